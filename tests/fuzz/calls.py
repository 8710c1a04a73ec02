"""Random calls of everything public: each function draws one, with healthy objects and odd arguments."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import posterity
from fuzz.judge import Trial
from fuzz.values import Draw
from posterity import continual, diagnostics, laplace, metrics
from posterity.predict import MODES

X, Y = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 1, 0])
RULES: dict[str, dict[str, Any]] = {
    "BGD": {"mc_samples": 2},
    "BONG": {},
    "IVON": {"num_data": 10},
    "VOGN": {"num_data": 10},
    "OGN": {"num_data": 10},
    "NoisyKFAC": {"num_data": 10, "factors_every": 1},
    "KFAC": {"num_data": 10, "factors_every": 1},
}
_NUMBERS = ("lr", "std_scale", "std_init", "max_step", "settle_after", "temperature", "deterministic_lr")
_MORE = {
    "BGD": (),
    "BONG": ("consolidate_after",),
    "IVON": ("prior_precision", "hess_init", "clip_radius"),
    "VOGN": ("prior_precision", "hess_init", "damping", "augmentation", "lr_unit"),
}


def net() -> nn.Sequential:
    """A small net."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Dropout(0.5), nn.Linear(4, 2))


def loss_of(model: nn.Module, x: Any = X, y: Any = Y) -> Tensor:
    """The loss of a batch."""
    return F.cross_entropy(model(x), y)


def begun(draw: Draw, **settings: Any) -> tuple[nn.Sequential, posterity.VariationalOptimizer]:
    """A model, and a rule that has taken a step on it."""
    name = draw.one(list(RULES))
    model = net()
    opt = getattr(posterity, name)(model, **{**RULES[name], **settings})
    opt.step(lambda: loss_of(model), batch_size=4)
    return model, opt


def posterior(draw: Draw) -> posterity.Factorised:
    """Of a net: from a rule, pruned, or sure of itself."""
    q = begun(draw)[1].posterior()
    return q if draw.random() < 0.7 else posterity.prune(q, 0.5)


def construct(draw: Draw) -> Trial:
    """An optimiser with odd settings, and two steps."""
    name, model = draw.one(list(RULES)), net()
    numbers = (*_NUMBERS, *_MORE.get(name, _MORE["VOGN"]))
    kinds = dict.fromkeys(numbers, draw.number) | {"mc_samples": draw.whole, "seed": draw.whole}
    kinds |= {
        "batch_dim": draw.whole,
        "preset": lambda: draw.text("default", "zeno2018", "osawa2019", "shen2024"),
    }
    kinds |= {"deterministic": lambda: draw.one(["0.weight", "*bias", "nothing", 3, None, [], ["*"], len])}
    if name in ("BGD", "BONG"):
        kinds["batch_size"] = draw.whole
    else:
        kinds |= {
            "num_data": draw.whole,
            "betas": lambda: draw.one([(0.9, 0.9), (draw.number(), draw.number()), 0.9, (0.9,)]),
        }
    if "KFAC" in name:
        kinds |= {"factors_every": draw.whole, "inverses_every": draw.whole}
    if name in ("OGN", "KFAC"):
        del kinds["mc_samples"], kinds["seed"]
    given = draw.some(kinds, 3)
    params = (
        model
        if draw.random() < 0.85
        else draw.one(
            [
                list(model.parameters()),
                [],
                None,
                "x",
                3,
                model[0].weight,
                [3],
                [{}],
                [{"params": 3}],
                [("a", 3)],
                {"params": []},
                [{"params": list(model.parameters()), "lr": draw.number()}],
                iter([]),
                [torch.zeros(2, dtype=torch.int64)],
                [torch.zeros(2, device="meta", requires_grad=True)],
                [model[0].weight, model[0].weight],
            ]
        )
    )

    def call() -> Any:
        opt = getattr(posterity, name)(params, **{**RULES[name], **given})
        own = sum(p.numel() for p in opt.parameters())
        if own != sum(p.numel() for p in model.parameters()) or not isinstance(params, nn.Module):
            return opt.posterior().std() if any(not g["deterministic"] for g in opt.param_groups) else None
        found = [opt.step(lambda: loss_of(model)) for _ in range(2)]
        if any(not g["deterministic"] for g in opt.param_groups):
            q = opt.posterior()
            for name_, leaf in q.blocks.items():
                if not bool(
                    ((leaf.std() > 0) & torch.isfinite(leaf.std()) & torch.isfinite(leaf.mean())).all()
                ):
                    return [float("nan"), name_]
        return [float(each) if torch.isfinite(each) else 0.0 for each in found]

    return Trial(
        call,
        f"{name}({type(params).__name__}, {given})",
    )


def step(draw: Draw) -> Trial:
    """A step with an odd loss or odd counts."""
    model, opt = begun(draw)
    kind = draw.random()
    odd = draw.tensor() if kind < 0.3 else None
    scale = draw.one([1.0, 1e10, 1e20, 1e30, 1e38, -1.0, 0.0, float("nan"), float("inf")])

    def loss() -> Any:
        if kind < 0.3:
            return odd
        found = model(X)
        return (found.sum(), found, loss_of(model), loss_of(model) * scale)[int(kind * 40) % 4]

    given = draw.some({"batch_size": draw.whole, "count": draw.number})
    closure: Any = loss if draw.random() < 0.9 else draw.one([3, "x", None, lambda: 1 / 0, lambda x: x])

    def call() -> Any:
        return opt.step(closure, **given)

    def plain() -> Any:
        found = loss() if closure is loss else closure()
        assert found.numel() == 1

    return Trial(
        call,
        f"{type(opt).__name__}.step({closure!r}, {given}) {kind:.2f} {odd!r} {scale}",
        [model, opt],
        plain if kind >= 0.3 or closure is not loss else None,
        clean=False,
    )


def gradients(draw: Draw) -> Trial:
    """A loop that puts odd gradients where the rule looks."""
    model, opt = begun(draw)
    p = draw.one(list(model.parameters()))
    kind = draw.randrange(6)
    value = draw.one([float("nan"), float("inf"), 1e30, 1e38, 0.0])

    def call() -> Any:
        for _ in range(opt.param_groups[0]["mc_samples"]):
            with opt.sampled_params():
                loss_of(model).backward()
                if kind == 0:
                    p.grad = torch.full_like(p, value)
                elif kind == 1:
                    p.grad = torch.ones_like(p).to_sparse()
                elif kind == 2:
                    p.grad = None
                elif kind == 3:
                    assert p.grad is not None
                    p.grad.mul_(value)
                elif kind == 4:
                    model.zero_grad()
        if kind == 5:
            assert p.grad is not None
            p.grad.fill_(value)
        opt.step(batch_size=4)

    return Trial(call, f"{type(opt).__name__} gradient {kind} {value}", [opt], clean=False)


def compiled(draw: Draw) -> Trial:
    """A compiled step with odd settings and batches."""
    model, opt = begun(draw)
    given = draw.some({"max_norm": draw.number, "chunk": draw.whole, "parts": draw.whole}, 1)
    x = draw.tensor(4, 3) if draw.random() < 0.6 else X
    y = draw.labels() if draw.random() < 0.4 else Y
    count = {"count": draw.number()} if draw.random() < 0.2 else {}
    target: Any = (
        opt if draw.random() < 0.95 else draw.one([None, 3, torch.optim.SGD(model.parameters(), lr=0.1)])
    )
    function: Any = (
        loss_of
        if draw.random() < 0.9
        else draw.one([None, 3, lambda model, x, y: 3.0, lambda model, x, y: model(x), lambda model, x, y: x])
    )

    def call() -> Any:
        return posterity.compile_step(model, function, target, **given)(x, y, **count)

    def plain() -> Any:
        assert isinstance(function(model, x, y), Tensor)

    return Trial(
        call,
        f"{type(opt).__name__} compile_step({function!r}, {given})({x!r}, {y!r}, {count})",
        [model, opt],
        plain,
        clean=False,
    )


def predict(draw: Draw) -> Trial:
    """A prediction, and what is read off it."""
    q, model = posterior(draw), net()
    x = draw.tensor(4, 3) if draw.random() < 0.5 else X
    given = draw.some(
        {
            "samples": draw.whole,
            "mode": lambda: draw.text(*MODES),
            "batch_size": draw.whole,
            "seed": draw.whole,
            "how": lambda: draw.text("stack", "loop"),
            "chunk": draw.whole,
            "class_dim": draw.whole,
            "binary": lambda: draw.one([True, 0, None, "x"]),
            "linearise": lambda: draw.one([True, False, None, "x"]),
            "output": lambda: draw.one([0, "logits", len, object()]),
            "inputs": lambda: draw.one([0, "x", None, object()]),
        }
    )
    source: Any = (
        q
        if draw.random() < 0.8
        else draw.one([None, 3, "x", posterity.MCDropout(), posterity.MCDropout, posterity.Factorised])
    )
    models: Any = (
        model
        if draw.random() < 0.9
        else draw.one([None, 3, [], [model, model], [3], nn.Linear(2, 2), nn.ReLU()])
    )
    view = draw.one(
        [
            "samples",
            "probs",
            "log_probs",
            "label",
            "vote",
            "entropy",
            "expected_entropy",
            "mutual_information",
            "mean",
            "variance",
        ]
    )

    def call() -> Any:
        return getattr(posterity.predict(models, source, x, **given), view)

    return Trial(
        call,
        f"predict({type(models).__name__}, {type(source).__name__}, {x!r}, {given}).{view}",
        [model, q],
        lambda: (models if isinstance(models, nn.Module) else model)(x),
        clean=draw.clean and "seed" not in given,
    )


def run(draw: Draw) -> Trial:
    """A model under odd weights."""
    model, q = net(), posterior(draw)
    weights: Any = q.sample(2, seed=0)
    if draw.random() < 0.6:
        name = draw.one(list(weights))
        weights = (
            {**weights, name: draw.tensor(2, *weights[name].shape[1:])}
            if draw.random() < 0.7
            else draw.one([None, {}, [], 3, {"other": torch.zeros(2)}, {3: 3}])
        )
    x = draw.tensor(4, 3) if draw.random() < 0.4 else X
    given = draw.some(
        {
            "how": lambda: draw.text("stack", "loop"),
            "chunk": draw.whole,
            "output": lambda: draw.one([0, "x", 3.5]),
            "around": lambda: draw.one([None, {}, 3, q.mean()]),
        }
    )
    return Trial(
        lambda: posterity.run(model, weights, x, **given),
        f"run({weights!r}, {x!r}, {given})",
        [model, q],
        lambda: model(x),
        clean=draw.clean,
    )


def leaf(draw: Draw) -> Any:
    """A leaf, a prior, or what is none."""
    kind = draw.randrange(9)
    if kind < 3:
        return posterity.DiagonalGaussian(torch.randn(2, 3), draw.one([0.0, 0.1, 1.0]))
    if kind == 3:
        return posterity.MatrixGaussian(torch.randn(2, 3), torch.eye(2), torch.eye(3))
    if kind == 4:
        return posterity.EigenGaussian(torch.randn(2, 3), torch.eye(2), torch.eye(3), torch.ones(2, 3))
    if kind == 5:
        return draw.one(
            [
                posterity.IsotropicGaussian(0.5),
                posterity.ScaleMixture(),
                posterity.ByName({"*": posterity.IsotropicGaussian()}),
            ]
        )
    if kind == 6:
        return posterity.Factorised({"w": posterity.DiagonalGaussian(torch.randn(2, 3), 0.5)})
    return (
        posterior(draw)
        if kind == 7
        else draw.one([None, 3, "x", torch.zeros(2, 3), posterity.IsotropicGaussian, net()])
    )


def divergence(draw: Draw) -> Trial:
    """A KL of odd pairs."""
    q, p = leaf(draw), leaf(draw)
    given = draw.some(
        {
            "samples": draw.whole,
            "seed": draw.whole,
            "step": draw.whole,
            "weights": lambda: draw.one([None, {}, 3, {"w": draw.tensor(2, 2, 3)}]),
        }
    )
    return Trial(
        lambda: posterity.kl(q, p, **given),
        f"kl({type(q).__name__}, {type(p).__name__}, {given})",
        clean=draw.clean,
    )


def leaves(draw: Draw) -> Trial:
    """Leaves, priors and posteriors from odd arguments, and a draw of each."""
    square = lambda n: draw.tensor(n, n) if draw.random() < 0.4 else torch.eye(n)  # noqa: E731
    mean = draw.tensor(2, 3, odd=0.3)
    kinds: list[tuple[str, Callable[[], Any]]] = [
        ("DiagonalGaussian", lambda: posterity.DiagonalGaussian(mean, std, **given)),
        ("MatrixGaussian", lambda: posterity.MatrixGaussian(mean, rows, columns, **keep)),
        ("EigenGaussian", lambda: posterity.EigenGaussian(mean, rows, columns, scale, **keep)),
        ("from_precision", lambda: posterity.MatrixGaussian.from_precision(mean, rows, columns, **more)),
        ("IsotropicGaussian", lambda: posterity.IsotropicGaussian(std, shift)),
        ("ScaleMixture", lambda: posterity.ScaleMixture(shift, std, other)),
        ("ByName", lambda: posterity.ByName(things).block("w")),
        ("Factorised", lambda: posterity.Factorised(things)),
    ]
    name, make = draw.one(kinds)
    std, shift, other = draw.one([draw.number, lambda: draw.tensor(2, 3)])(), draw.number(), draw.number()
    rows, columns, scale = square(2), square(3), draw.tensor(2, 3)
    keep = draw.some({"keep": lambda: draw.tensor(2, 3)}, 1)
    given = {**keep, **draw.some({"trainable": lambda: draw.one([True, False, None])}, 1)}
    more = {**keep, **draw.some({"damping": draw.number, "scale": draw.number})}
    one = posterity.DiagonalGaussian(torch.zeros(2), 1.0)
    things: Any = draw.one(
        [
            {},
            None,
            3,
            [],
            {"w": one},
            {"w": 3},
            {3: one},
            {("a", "b"): one},
            {"w": None},
            {"w": posterity.IsotropicGaussian()},
            [one],
            {(): one},
            {("w",): one, "w": one},
        ]
    )

    def call() -> Any:
        made = make()
        if isinstance(made, posterity.Leaf):
            made.draw(torch.zeros(1, *made.shape, dtype=made.dtype))
            std = made.std()
            if not bool((torch.isfinite(std) & (std >= 0)).all()):
                return float("nan")
        return made

    return Trial(
        call,
        f"{name}({mean!r}, {std!r}, {shift!r}, {other!r}, {rows!r}, {columns!r}, {scale!r}, {given}, {more}, "
        f"{things!r})",
        clean=draw.clean,
    )


def sampling(draw: Draw) -> Trial:
    """Draws and densities of a posterior, by odd arguments."""
    q = posterior(draw)
    n, seed = draw.whole(), {} if draw.random() < 0.5 else {"seed": draw.whole()}
    values: Any = {name: draw.tensor(*m.shape) if draw.random() < 0.5 else m for name, m in q.mean().items()}
    values = values if draw.random() < 0.7 else draw.one([None, {}, 3, {"w": torch.zeros(2)}])
    name: Any = draw.one(["0.weight", "x", None, 3, (), ("0.weight",)])
    calls: dict[str, Callable[[], Any]] = {
        "sample": lambda: q.sample(n, **seed),
        "log_prob": lambda: q.log_prob(values),
        "block": lambda: q.block(name) and None,
        "join": lambda: q.join(values),
        "check": lambda: q.check(draw.one([net(), nn.Linear(1, 1), None, 3, [net()]])) and None,
    }
    kind = draw.one(list(calls))
    return Trial(calls[kind], f"{kind}({n!r}, {seed}, {name!r}, {values!r})", [q], clean=draw.clean)


def prune(draw: Draw) -> Trial:
    """Pruning by odd shares and scores."""
    q: Any = posterior(draw) if draw.random() < 0.9 else draw.one([None, 3, net()])
    scores: list[Any] = [
        posterity.snr,
        posterity.magnitude,
        None,
        3,
        lambda q: {},
        lambda q: 3,
        lambda q: dict.fromkeys(q.mean(), 3),
    ]
    given = draw.some(
        {
            "fraction": draw.number,
            "threshold": draw.number,
            "scope": lambda: draw.text("global", "layer"),
            "score": lambda: draw.one(scores),
            "spare": lambda: draw.one(["*bias", "x", 3, None, "*"]),
        },
        3,
    )
    return Trial(
        lambda: posterity.prune(q, **given),
        f"prune({type(q).__name__}, {given})",
        [q] if isinstance(q, nn.Module) else [],
        clean=draw.clean,
    )


def files(draw: Draw) -> Trial:
    """Saving and loading, from odd places, of damaged files, for odd models."""
    q = posterior(draw)
    folder = tempfile.mkdtemp()
    path = Path(folder) / "q.safetensors"
    q.save(path)
    content = bytearray(path.read_bytes())
    kind = draw.randrange(5)
    if kind == 0:
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    elif kind == 1:
        content = content[: draw.randrange(len(content))]
    elif kind == 2:
        content += b"more"
    path.write_bytes(content)
    where: Any = (
        path
        if draw.random() < 0.7
        else draw.one([None, 3, "", folder, folder + "/none/q", 3.5, [], b"x", Path(folder) / "none"])
    )
    model: Any = draw.one([None, net(), nn.Linear(2, 2), 3, "x", [net()]])
    if draw.random() < 0.3:
        return Trial(lambda: q.save(where), f"save({where!r})", [q])
    return Trial(
        lambda: posterity.Factorised.load(where, model),
        f"load({where!r}, {type(model).__name__}) {kind}",
        [model] if isinstance(model, nn.Module) else [],
    )


def states(draw: Draw) -> Trial:
    """States, posteriors and groups that do not fit an optimiser."""
    model, opt = begun(draw)
    kind = draw.randrange(4)
    if kind == 0:
        state: Any = copy.deepcopy(opt.state_dict())
        change = draw.randrange(6)
        index = draw.one(list(state["state"]))
        key = draw.one(list(state["state"][index]))
        if change == 0:
            state["state"][index][key] = draw.tensor(*state["state"][index][key].shape)
        elif change == 1:
            del state["state"][index][key]
        elif change == 2:
            group = state["param_groups"][0]
            group[draw.one(sorted(group))] = draw.one([draw.number, draw.whole, draw.tensor])()
        elif change == 3:
            group = state["param_groups"][0]
            del group[draw.one(sorted(group))]
        elif change == 4:
            state["state"] = draw.one([{}, None, [], {0: {}}, {9: {}}, {"x": 3}])
        else:
            state = draw.one(
                [None, {}, [], 3, {"state": {}, "param_groups": [3]}, {"state": {}, "param_groups": []}]
            )
        return Trial(
            lambda: opt.load_state_dict(state),
            f"{type(opt).__name__}.load_state_dict {change} {key!r}",
            [model, opt],
        )
    if kind == 1:
        q: Any = (
            posterior(draw)
            if draw.random() < 0.5
            else draw.one(
                [
                    None,
                    3,
                    posterity.point_mass(model),
                    posterity.point_mass(nn.Linear(3, 4)),
                    posterity.Factorised(
                        {
                            "0.weight": posterity.DiagonalGaussian(
                                torch.randn(4, 3) * draw.one([1.0, 1e30, float("nan")]),
                                draw.one([0.1, 1e-30, 1e30]),
                            )
                        }
                    ),
                ]
            )
        )
        return Trial(
            lambda: opt.load_posterior(q), f"{type(opt).__name__}.load_posterior({q!r})", [model, opt]
        )
    if kind == 2:
        new = nn.Linear(2, 2)
        group = draw.one(
            [
                {"params": list(new.parameters())},
                {"params": [("a", new.weight)]},
                {"params": []},
                {},
                None,
                3,
                {"params": 3},
                {"params": [3]},
                {"params": [draw.tensor(2, 2)]},
                {"params": list(model.parameters())},
            ]
        )
        if isinstance(group, dict):
            group.update(
                draw.some(
                    {
                        "lr": draw.number,
                        "std_init": draw.number,
                        "betas": draw.number,
                        "seed": draw.whole,
                        "x": draw.number,
                        "deterministic": draw.number,
                        "mc_samples": draw.whole,
                    }
                )
            )
        return Trial(
            lambda: opt.add_param_group(group),
            f"{type(opt).__name__}.add_param_group({group!r})",
            [model, opt],
        )
    key = draw.one(
        sorted(set(opt.param_groups[0]) - {"params", "param_names", "blocks", "steps", "deterministic"})
    )
    value = draw.number()

    def call() -> Any:
        old = opt.param_groups[0][key]
        opt.param_groups[0][key] = value
        try:
            opt.step(lambda: loss_of(model))
        except BaseException:
            opt.param_groups[0][key] = old
            raise

    return Trial(call, f"{type(opt).__name__}.param_groups[0][{key!r}] = {value!r}", [model, opt])


def laplace_fit(draw: Draw) -> Trial:
    """A Laplace approximation of odd data by odd settings."""
    model = net()
    x, y = (
        (draw.tensor(4, 3), Y)
        if draw.random() < 0.4
        else (X, draw.labels())
        if draw.random() < 0.5
        else (X, Y)
    )
    data: Any = (
        (x, y)
        if draw.random() < 0.8
        else draw.one([None, [], 3, "x", [(x, y)], X, iter([]), {"x": x}, (x, y, y), [X], {"labels": Y}])
    )
    given = draw.some(
        {
            "likelihood": lambda: draw.text("classification", "regression"),
            "structure": lambda: draw.text("kronecker", "diagonal"),
            "kind": lambda: draw.text("exact", "mc", "empirical"),
            "names": lambda: draw.one(["*", "3.*", "x", 3, []]),
            "prior_precision": lambda: draw.one(
                [draw.number(), "marginal", "marginal-by-block", "validation", "x"]
            ),
            "noise_variance": draw.number,
            "temperature": draw.number,
            "num_data": draw.whole,
            "samples": draw.whole,
            "validation": lambda: draw.one([(X, Y), (x, y), None, 3, []]),
            "grid": lambda: draw.one([[1.0], [], [draw.number()], 3, "x"]),
            "seed": draw.whole,
            "batch_size": draw.whole,
            "fallback": lambda: draw.text("vmap"),
            "output": lambda: draw.one([0, "x", 3.5]),
        }
    )
    return Trial(
        lambda: laplace.fit(model, data, **given).posterior(),
        f"laplace.fit({data!r}, {given})",
        [model],
        lambda: loss_of(model, x, y),
        clean=draw.clean,
    )


def by_gradient(draw: Draw) -> Trial:
    """A variational model, a forward pass, its KL and the bound."""
    model: Any = net() if draw.random() < 0.9 else draw.one([None, 3, nn.ReLU(), [net()]])
    given = draw.some(
        {
            "std_scale": draw.number,
            "std_init": draw.number,
            "seed": draw.whole,
            "deterministic": lambda: draw.one(["*bias", "x", 3, None, "*"]),
            "family": lambda: draw.one(
                [None, 3, {}, {"x": posterity.DiagonalGaussian}, lambda p, std: 3, posterity.DiagonalGaussian]
            ),
        }
    )
    prior: Any = draw.one(
        [
            posterity.IsotropicGaussian(),
            posterity.ScaleMixture(),
            None,
            3,
            "x",
            posterity.ByName({"x": posterity.IsotropicGaussian()}),
        ]
    )
    bound = {
        "num_data": 10,
        **draw.some(
            {
                "num_data": draw.whole,
                "factor": lambda: draw.one([draw.number(), posterity.warmup(3), lambda step: None]),
                "step": draw.whole,
            }
        ),
    }
    nll = draw.tensor(odd=0.2) if draw.random() < 0.2 else None

    def call() -> Any:
        made = posterity.variational(model, **given)
        loss = nll if nll is not None else loss_of(made)
        return posterity.elbo(loss, made.kl(prior), **bound)

    return Trial(
        call,
        f"variational({type(model).__name__}, {given}).kl({prior!r}); elbo({nll!r}, {bound})",
        [model] if isinstance(model, nn.Module) else [],
        clean=draw.clean,
    )


def outputs(draw: Draw) -> Trial:
    """Outputs of a variational model, by odd inputs and numbers."""
    model = posterity.variational(net())
    x = draw.tensor(4, 3)
    given = {
        "samples": 2,
        **draw.some({"samples": draw.whole, "chunk": draw.whole, "how": lambda: draw.text("stack", "loop")}),
    }
    return Trial(
        lambda: model.outputs(x, **given),
        f"outputs({x!r}, {given})",
        [model.module],
        lambda: model.module(x),
        clean=draw.clean,
    )


def small(draw: Draw) -> Trial:
    """The functions of a few numbers."""
    a, b, c, d = draw.number(), draw.number(), draw.whole(), draw.whole()
    x = draw.tensor(4, 3)
    layer = nn.Linear(2, 2)
    matrix: Any = draw.one([torch.rand(3, 3), draw.tensor(3, 3)])
    row: Any = draw.one([torch.rand(3), draw.tensor(3)])
    calls: dict[str, Callable[[], Any]] = {
        "elbo": lambda: posterity.elbo(x, draw.tensor(odd=0.3), num_data=c, factor=a),
        "warmup": lambda: posterity.warmup(c, delay=d, start=a, end=b)(draw.whole()),
        "blundell": lambda: posterity.blundell(c)(d),
        "dropout_kl": lambda: posterity.dropout_kl(
            draw.one([net(), {layer: a}, {layer: 0.5}, 3, None, {}, {3: a}, nn.Sequential()]),
            prior_precision=b,
        ),
        "point_mass": lambda: posterity.point_mass(draw.one([net(), None, 3, nn.ReLU()])),
        "names_of": lambda: posterity.names_of(
            draw.one([net(), None, 3]), draw.one([nn.Linear, None, 3, "x"])
        ),
        "snr": lambda: posterity.snr(draw.one([posterior(draw), None, 3])),
        "magnitude": lambda: posterity.magnitude(draw.one([posterior(draw), None, 3])),
        "sparsity": lambda: posterity.sparsity(draw.one([posterior(draw), None, 3])),
        "average_accuracy": lambda: continual.average_accuracy(matrix),
        "forgetting": lambda: continual.forgetting(matrix),
        "backward_transfer": lambda: continual.backward_transfer(matrix),
        "forward_transfer": lambda: continual.forward_transfer(matrix, row),
    }
    name = draw.one(list(calls))
    call = calls[name]
    return Trial(call, f"{name}({a!r}, {b!r}, {c!r}, {d!r}, {x!r}, {matrix!r}, {row!r})", clean=False)


def measures(draw: Draw) -> Trial:
    """Metrics of odd probabilities and targets."""
    probs: Any = torch.tensor([[0.8, 0.2], [0.4, 0.6], [0.5, 0.5], [1.0, 0.0]])
    probs = probs if draw.random() < 0.4 else draw.tensor(4, 2)
    target, bins = draw.labels(), draw.whole()
    one, two = (draw.tensor(5) if draw.random() < 0.6 else torch.rand(5) for _ in range(2))
    calls: dict[str, Callable[[], Any]] = {
        "accuracy": lambda: metrics.accuracy(probs, target),
        "nll": lambda: metrics.nll(probs, target),
        "brier": lambda: metrics.brier(probs, target),
        "ece": lambda: metrics.ece(probs, target, bins),
        "reliability": lambda: metrics.reliability(probs, target, bins) and None,
        "auroc": lambda: metrics.auroc(one, two),
        "fpr95": lambda: metrics.fpr95(one, two),
        "Prediction": lambda: posterity.Prediction(probs, draw.text(*MODES)).probs,
    }
    name = draw.one(list(calls))
    return Trial(calls[name], f"{name}({probs!r}, {target!r}, {bins!r}, {one!r}, {two!r})", clean=draw.clean)


def checks(draw: Draw) -> Trial:
    """Diagnostics of odd posteriors."""
    q: Any = posterior(draw) if draw.random() < 0.7 else draw.one([None, 3, net()])
    start: Any = (
        posterior(draw)
        if draw.random() < 0.7
        else draw.one([None, 3, net(), posterity.point_mass(nn.Linear(1, 1))])
    )
    return Trial(
        lambda: diagnostics.check(q, start) and None,
        f"check({type(q).__name__}, {type(start).__name__})",
        clean=False,
    )


CALLS: dict[str, tuple[Callable[[Draw], Trial], int]] = {
    call.__name__: (call, weight)
    for call, weight in (
        (construct, 6),
        (step, 5),
        (gradients, 2),
        (compiled, 5),
        (predict, 6),
        (run, 3),
        (divergence, 3),
        (leaves, 4),
        (sampling, 3),
        (prune, 2),
        (files, 2),
        (states, 6),
        (laplace_fit, 4),
        (by_gradient, 3),
        (outputs, 2),
        (small, 3),
        (measures, 4),
        (checks, 1),
    )
}
