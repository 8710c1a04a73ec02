"""Loop and stack give the same numbers; what cannot be stacked says so once."""

import warnings
from collections import OrderedDict, UserDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import posterity


def conv_net() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.LayerNorm(16),
        nn.Linear(16, 3),
    ).double()


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.block(self.embed(ids)).mean(1))


CASES = {
    "mlp": (
        lambda: nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double(),
        torch.randn(7, 6).double(),
    ),
    "conv with BatchNorm": (conv_net, torch.randn(7, 2, 4, 4).double()),
    "embedding and attention": (lambda: Tokens().double(), torch.randint(0, 11, (7, 5))),
    "GroupNorm": (
        lambda: nn.Sequential(nn.Conv1d(2, 4, 3), nn.GroupNorm(2, 4), nn.Flatten()).double(),
        torch.randn(7, 2, 6).double(),
    ),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("training", [True, False])
def test_loop_and_stack_agree(case: str, training: bool) -> None:
    make, x = CASES[case]
    results = []
    for how, chunk in (("loop", None), ("stack", None), ("stack", 2)):
        torch.manual_seed(1)
        model = make().train(training)
        q = posterity.BGD(model, std_init=0.1).posterior()
        out = posterity.run(model, q.sample(5, seed=0), x, how=how, chunk=chunk)
        results.append((out, {name: b.clone() for name, b in model.named_buffers()}))
    assert results[0][0].shape[:2] == (5, 7)
    assert not torch.equal(results[0][0][0], results[0][0][1])
    for out, buffers in results[1:]:
        torch.testing.assert_close(out, results[0][0], rtol=1e-9, atol=1e-11)
        for name, value in buffers.items():
            torch.testing.assert_close(value, results[0][1][name], rtol=1e-9, atol=1e-11)


def test_buffers_are_moved_by_the_first_sample_alone() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    weights = posterity.BGD(model, std_init=0.5).posterior().sample(6, seed=0)
    x = torch.randn(20, 3)
    posterity.run(model, weights, x)
    assert int(model[1].num_batches_tracked) == 1
    hidden = F.linear(x, weights["0.weight"][0], weights["0.bias"][0])
    torch.testing.assert_close(model[1].running_mean, 0.1 * hidden.mean(0))
    model.eval()
    before = model[1].running_mean.clone()
    posterity.run(model, weights, x)
    assert torch.equal(model[1].running_mean, before)


class Branches(nn.Module):
    """Control flow that depends on weights: no vectorised pass can follow it."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(3))
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm(x * self.w)
        return out if self.w.sum() > 0 else -out


def test_what_cannot_be_stacked_falls_back_with_one_warning() -> None:
    torch.manual_seed(0)
    model, x = Branches(), torch.randn(4, 3)
    weights = {"w": torch.randn(5, 3)}
    with pytest.warns(
        UserWarning, match="Branches cannot be vectorised over weight samples .*one sample after"
    ):
        stacked = posterity.run(model, weights, x)
    assert int(model.norm.num_batches_tracked) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        posterity.run(model, weights, x)
        loop = posterity.run(Branches(), weights, x, how="loop")
    torch.testing.assert_close(stacked, loop)


def test_a_training_step_falls_back_too() -> None:
    results = []
    x, y = torch.randn(4, 3), torch.tensor([0, 1, 2, 0])

    def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y)

    for stacked in (True, False):
        model = Branches()
        opt = posterity.BGD(model, std_init=0.5, mc_samples=4, seed=0)
        if stacked:
            step = posterity.compile_step(model, loss_fn, opt)
            with pytest.warns(UserWarning, match="Branches cannot be vectorised"):
                step(x, y)
            step(x, y)
        else:
            for _ in range(2):
                opt.step(lambda model=model: loss_fn(model, x, y), batch_size=4)
        results.append((model.w.detach(), opt.posterior().std()["w"], model.norm.running_mean))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


def test_model_error_is_raised_without_side_effects() -> None:
    model = nn.Linear(3, 2)
    weights = {"weight": torch.randn(5, 2, 3)}
    with pytest.raises(RuntimeError, match="shapes"):
        posterity.run(model, weights, torch.randn(4, 7))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert posterity.run(model, weights, torch.randn(4, 3)).shape == (5, 4, 2)


def test_gradients_flow_through_a_stacked_pass() -> None:
    model = posterity.variational(nn.Linear(3, 2))
    x = torch.randn(4, 3)
    grads = []
    for how in ("loop", "stack"):
        model.draws = 0
        model.zero_grad()
        model.outputs(x, samples=6, how=how).square().mean().backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


def test_only_the_mean_loss_of_a_batch_will_do() -> None:
    model = nn.Linear(3, 2)
    step = posterity.compile_step(
        model, lambda m, x, y: F.cross_entropy(m(x), y, reduction="none"), posterity.BGD(model)
    )
    with pytest.raises(ValueError, match=r"the mean loss of a batch, one number, not shape \[4\]"):
        step(torch.randn(4, 3), torch.tensor([0, 1, 0, 1]))


def test_an_optimiser_over_a_part_of_the_model_trains_that_part() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.temperature = nn.Parameter(torch.ones(()))

        def forward(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(model(x) / self.temperature, y)

    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    before = [p.detach().clone() for p in model.parameters()]
    for opt in (posterity.BGD(model[1]), posterity.BGD(model[1].parameters())):
        model.zero_grad()
        posterity.compile_step(model, Scaled(), opt)(torch.randn(4, 3), torch.tensor([0, 1, 0, 1]))
    assert torch.equal(before[0], model[0].weight)
    assert not torch.equal(before[2], model[1].weight)
    with pytest.raises(ValueError, match="has 'weight', which is not a parameter of this model"):
        posterity.compile_step(model, Scaled(), posterity.BGD(nn.Linear(3, 2)))


def test_counted_examples_override_the_optimisers_batch_size() -> None:
    moved = []
    for size in (None, 40):
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        opt = posterity.BGD(model, batch_size=size, seed=0)
        step = posterity.compile_step(model, lambda m, x, y: F.cross_entropy(m(x), y), opt)
        step(torch.ones(4, 3), torch.tensor([0, 1, 0, 1]))
        moved.append(model.weight.detach())
    assert torch.equal(*moved)


def nested_loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch.pop("x")[0]), batch.pop("y"))


@pytest.mark.parametrize("kind", [dict, OrderedDict, UserDict])
@pytest.mark.parametrize("name", ["BGD", "VOGN"])
def test_examples_are_counted_inside_dicts_lists_and_tuples(name: str, kind: Callable[..., Any]) -> None:
    found = []
    x, y = torch.randn(6, 3), torch.tensor([0, 1, 0, 1, 1, 1])
    for nested in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        opt = getattr(posterity, name)(model, mc_samples=2, **({} if name == "BGD" else {"num_data": 6}))
        if nested:
            batch = kind({"scale": torch.tensor(2.0), "title": "one", "x": [x, (y,)], "y": y})
            posterity.compile_step(model, nested_loss, opt)(batch)
        else:
            posterity.compile_step(model, mean_loss, opt)(x, y)
        found.append({**opt.posterior().mean(), **{f"std {k}": v for k, v in opt.posterior().std().items()}})
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_only_bgd_needs_a_batch_size_for_a_batch_without_tensors() -> None:
    model = nn.Linear(3, 2)

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        return model(torch.tensor(batch)).square().mean()

    before = model.weight.detach().clone()
    with pytest.raises(ValueError, match=r"needs the number of examples .* give the optimiser batch_size="):
        posterity.compile_step(model, loss_fn, posterity.BGD(model))([[1.0, 2.0, 3.0]])
    assert torch.equal(before, model.weight)
    for opt in (posterity.BGD(model, batch_size=1), posterity.IVON(model, num_data=1)):
        opt.zero_grad()
        assert posterity.compile_step(model, loss_fn, opt)([[1.0, 2.0, 3.0]]) > 0


def test_parts_are_cut_of_tensors_alone() -> None:
    model = nn.Linear(3, 2)
    step = posterity.compile_step(model, nested_loss, posterity.BGD(model), parts=2)
    with pytest.raises(
        TypeError, match=r"parts=2 splits tensors: pass each by itself, as train_step\(x, y\)"
    ):
        step({"x": [torch.ones(4, 3)], "y": torch.zeros(4, dtype=torch.long)})


def test_what_compile_step_cannot_use_is_said() -> None:
    model = nn.Linear(3, 2)
    with pytest.raises(
        TypeError, match=r"Adam does not learn a posterior of a plain \w+: pass variational\(model\)"
    ):
        posterity.compile_step(model, mean_loss, torch.optim.Adam(model.parameters()))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^3 does not learn a posterior of a plain Linear: pass variational"):
        posterity.compile_step(model, mean_loss, 3)  # type: ignore[arg-type]
    x, y = torch.ones(4, 3), torch.zeros(4, dtype=torch.long)
    for samples in (1, 3):
        opt = posterity.BGD(model, mc_samples=samples)
        step = posterity.compile_step(model, lambda m, x, y: mean_loss(m, x, y).item(), opt)  # type: ignore[arg-type, return-value]
        with pytest.raises(TypeError, match="loss_fn must return the loss as a tensor, not float"):
            step(x, y)


@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize(
    ("loss_fn", "called"),
    [
        (nn.CrossEntropyLoss(), "a CrossEntropyLoss"),
        (lambda x, y: x.sum(), "a function"),
        (lambda model, x, y, weight: x.sum(), "a function"),
    ],
)
def test_a_loss_fn_of_other_arguments_is_refused_by_name(loss_fn: Any, called: str, samples: int) -> None:
    model = nn.Linear(3, 2)
    step = posterity.compile_step(model, loss_fn, posterity.BGD(model, mc_samples=samples))
    message = rf"loss_fn is {called} that does not take \(model, \*batch\), here 3 arguments: pass a function"
    with pytest.raises(TypeError, match=message):
        step(torch.ones(4, 3), torch.zeros(4, dtype=torch.long))


def test_a_type_error_inside_loss_fn_is_its_own() -> None:
    model = nn.Linear(3, 2)
    step = posterity.compile_step(model, lambda model, x, y: x + "1", posterity.BGD(model))  # type: ignore[operator, return-value]
    with pytest.raises(TypeError, match=r"unsupported operand|can only concatenate|must be Tensor"):
        step(torch.ones(4, 3), torch.zeros(4, dtype=torch.long))


def test_an_empty_batch_is_refused_by_name() -> None:
    one, two, bayesian = nn.Linear(3, 2), nn.Linear(3, 2), posterity.variational(nn.Linear(3, 2))
    adam = torch.optim.Adam(bayesian.parameters())
    empty, full = ((torch.ones(n, 3), torch.zeros(n, dtype=torch.long)) for n in (0, 4))
    for step in (
        posterity.compile_step(one, mean_loss, posterity.BGD(one)),
        posterity.compile_step(two, mean_loss, posterity.IVON(two, num_data=10)),
        posterity.compile_step(bayesian, mean_loss, adam, num_data=10),
    ):
        with pytest.raises(ValueError, match="the batch has 0 examples on axis 0: skip empty batches"):
            step(*empty)
        assert torch.isfinite(step(*full))


def test_waiting_samples_are_not_mixed_in() -> None:
    model = nn.Linear(3, 2)
    opt = posterity.BGD(model)
    with opt.sampled_params():
        model(torch.ones(1, 3)).sum().backward()
    step = posterity.compile_step(model, lambda m, x: m(x).mean(), opt)
    with pytest.raises(RuntimeError, match=r"call step\(\) or zero_grad\(\) first"):
        step(torch.ones(1, 3))


def test_out_of_memory_is_raised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr("posterity.mc.vmap", full)
    with pytest.raises(torch.OutOfMemoryError):
        posterity.run(nn.Linear(3, 2), {"weight": torch.randn(5, 2, 3)}, torch.randn(4, 3))


def test_weights_are_run_in_the_models_dtype() -> None:
    model = nn.Linear(3, 2).bfloat16()
    out = posterity.predict(model, posterity.BGD(model).posterior(), torch.randn(4, 3).bfloat16(), samples=2)
    assert out.samples.dtype == torch.bfloat16


@pytest.mark.parametrize("shape", [(3,), (5, 3), (2, 5, 3)])
def test_a_linear_layer_takes_any_leading_dimensions(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    weights = {"2.weight": torch.randn(6, 2, 4).double()}
    results = []
    for how in ("stack", "loop"):
        x = torch.linspace(-1, 1, 30).double()[: torch.Size(shape).numel()].view(shape).requires_grad_()
        model.zero_grad()
        out = posterity.run(model, weights, x, how=how)
        out.square().sum().backward()
        results.append([out.detach(), x.grad, model[0].weight.grad.clone(), model[2].bias.grad.clone()])
    assert results[0][0].shape == (6, *shape[:-1], 2)
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


def test_backward_may_run_outside_autocast() -> None:
    model = posterity.variational(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model.outputs(torch.randn(5, 3), samples=3)
    assert out.dtype == torch.bfloat16
    out.float().square().mean().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())


def test_deterministic_weights_between_stacked_ones_agree_with_the_loop() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    x = torch.randn(5, 3).double()
    for names in (["0.weight"], ["0.weight", "2.bias"], ["2.weight"], ["2.bias"], ["4.weight", "0.bias"]):
        weights = {
            name: torch.randn(6, *p.shape).double() for name, p in model.named_parameters() if name in names
        }
        a, b = (posterity.run(model, weights, x, how=how) for how in ("stack", "loop"))
        torch.testing.assert_close(a, b)
        for how in ("stack", "loop"):
            model.zero_grad()
            posterity.run(model, weights, x, how=how).square().mean().backward()
            grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
            if how == "stack":
                expected = grads
        for ours, theirs in zip(grads, expected, strict=True):
            torch.testing.assert_close(ours, theirs)


def test_bad_calls_are_refused() -> None:
    x = torch.randn(4, 3)
    with pytest.raises(ValueError, match="the model has no parameter 'wieght'"):
        posterity.run(nn.Linear(3, 2), {"wieght": torch.randn(5, 2, 3)}, x)
    with pytest.raises(ValueError, match=r"'bias' have shape \(3, 2\), not \(5, 2\): one row per sample"):
        posterity.run(nn.Linear(3, 2), {"weight": torch.randn(5, 2, 3), "bias": torch.randn(3, 2)}, x)
    with pytest.raises(ValueError, match="how must be 'stack' or 'loop', not 'stacked'"):
        posterity.run(nn.Linear(3, 2), {"weight": torch.randn(5, 2, 3)}, x, how="stacked")
    with pytest.raises(TypeError, match=r"such as posterior.sample\(n\), not a Factorised"):
        posterity.run(nn.Linear(3, 2), posterity.BGD(nn.Linear(3, 2)).posterior(), x)
    gru = nn.GRU(3, 2)
    with pytest.raises(TypeError, match="the model must return one tensor, not tuple"):
        posterity.run(gru, {"weight_ih_l0": torch.randn(2, 6, 3)}, x, how="loop")
    with pytest.raises(ValueError, match="chunk must be at least 1, not 0"):
        posterity.run(nn.Linear(3, 2), {"weight": torch.randn(5, 2, 3)}, torch.randn(4, 3), chunk=0)
    with pytest.raises(ValueError, match="no weights were given"):
        posterity.run(nn.Linear(3, 2), {}, torch.randn(4, 3))


class OwnVmap(nn.Module):
    """A model that vectorises by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.vmap(self.linear)(x)


@pytest.mark.parametrize("batch", [3, 5])
def test_a_vmap_inside_the_model_is_not_taken_for_ours(batch: int) -> None:
    torch.manual_seed(0)
    model, x = OwnVmap(), torch.randn(batch, 4)
    weights = {"linear.weight": torch.randn(3, 2, 4), "linear.bias": torch.randn(3, 2)}
    torch.testing.assert_close(*(posterity.run(model, weights, x, how=how) for how in ("stack", "loop")))


def test_heads_in_groups_of_their_own_train_when_used() -> None:
    results = []
    for stacked in (True, False):
        torch.manual_seed(0)
        body, heads = nn.Linear(4, 5), nn.ModuleList([nn.Linear(5, 2), nn.Linear(5, 2)])
        model = nn.ModuleDict({"body": body, "heads": heads})
        groups = [
            {"params": list(body.named_parameters(prefix="body"))},
            *({"params": list(h.named_parameters(prefix=f"heads.{i}"))} for i, h in enumerate(heads)),
        ]
        opt = posterity.BGD(groups, batch_size=6, mc_samples=3)
        x, y = torch.randn(6, 4), torch.randint(0, 2, (6,))

        def loss_fn(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(m["heads"][0](m["body"](x)), y)

        if stacked:
            posterity.compile_step(model, loss_fn, opt)(x, y)
        else:
            opt.step(lambda m=model, x=x, y=y: loss_fn(m, x, y))
        results.append([p.detach().clone() for p in model.parameters()])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


def test_an_empty_batch_and_shared_buffers_are_stacked() -> None:
    model = nn.Linear(4, 2)
    weights = {"weight": torch.randn(3, 2, 4)}
    assert posterity.run(model, weights, torch.zeros(0, 4)).shape == (3, 0, 2)
    first, second = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
    second.running_mean, second.running_var = first.running_mean, first.running_var
    net = nn.Sequential(first, second, nn.Linear(4, 2))
    step = posterity.compile_step(
        net, lambda m, x, y: F.cross_entropy(m(x), y), posterity.BGD(net, mc_samples=2)
    )
    step(torch.randn(6, 4), torch.randint(0, 2, (6,)))


def test_a_step_refuses_a_model_whose_parts_were_replaced() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    step = posterity.compile_step(model, lambda m, x, y: F.cross_entropy(m(x), y), posterity.BGD(model))
    x, y = torch.randn(6, 4), torch.randint(0, 3, (6,))
    step(x, y)
    model[2] = nn.Linear(5, 3)
    with pytest.raises(RuntimeError, match="call compile_step again"):
        step(x, y)


@pytest.mark.parametrize("name", ["BGD", "IVON", "VOGN"])
@pytest.mark.parametrize("chunk", [None, 1, 3])
def test_parts_of_a_batch_have_samples_of_their_own(name: str, chunk: int | None) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(12, 4), torch.randint(0, 3, (12,))
    found = []
    for stacked in (True, False):
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.BatchNorm1d(5), nn.Linear(5, 3)).double()
        for p, value in zip(model.parameters(), torch.linspace(0.1, 0.9, 6), strict=True):
            nn.init.constant_(p, float(value))
        given = {"std_init": 0.05} if name == "BGD" else {"num_data": 100, "lr": 0.01}
        opt = getattr(posterity, name)(model, mc_samples=2, seed=3, **given)
        step = posterity.compile_step(model, mean_loss, opt, parts=3, chunk=chunk)
        for begin in (0, 1):  # the second batch, of 11, cannot be cut
            a, b = x[begin:].double(), y[begin:]
            if stacked:
                step(a, b)
                continue
            parts = 3 if begin == 0 else 1
            for number in range(2 * parts):
                part = slice(number // 2 * (12 // parts), (number // 2 + 1) * (12 // parts))
                part = part if parts > 1 else slice(None)
                with opt.sampled_params():
                    (mean_loss(model, a[part], b[part]) / parts).backward()
            opt.step(batch_size=len(a) if name == "BGD" else None)
        posterior = opt.posterior()
        found.append({**posterior.mean(), **{f"std of {k}": v for k, v in posterior.std().items()}})
        found[-1] |= {key: value.double() for key, value in model.named_buffers()}
    torch.testing.assert_close(found[0], found[1])


def test_parts_need_tensors_of_one_length() -> None:
    model = nn.Linear(4, 3)
    opt = posterity.BGD(model, mc_samples=2, batch_size=8)
    with pytest.raises(ValueError, match="parts must be a whole number of at least 1, not 0"):
        posterity.compile_step(model, mean_loss, opt, parts=0)
    step = posterity.compile_step(model, lambda model, x, y, scale: mean_loss(model, x, y), opt, parts=2)
    for scale in (torch.ones(1), torch.tensor(1.0)):
        with pytest.raises(
            ValueError, match="parts=2 splits all tensors of a batch: give them the same length"
        ):
            step(torch.randn(8, 4), torch.zeros(8, dtype=torch.long), scale)


def test_where_nothing_is_drawn_one_pass_will_do() -> None:
    x, y = torch.randn(12, 4), torch.randint(0, 3, (12,))
    found = []
    for more in ({}, {"parts": 3}):
        for name, given in (
            ("OGN", {}),
            ("KFAC", {}),
            ("IVON", {"mc_samples": 3, "deterministic": "*"}),
        ):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
            opt = getattr(posterity, name)(model, num_data=100, **given)
            posterity.compile_step(model, mean_loss, opt, **more)(x, y)
            found.append(model.state_dict())
    torch.testing.assert_close(found[:3], found[3:])


def test_a_loss_may_need_no_batch() -> None:
    model = nn.Linear(4, 3)
    opt = posterity.BGD(model, mc_samples=2, batch_size=8)
    step = posterity.compile_step(model, lambda model: model(torch.ones(2, 4)).square().mean(), opt)
    assert step() > 0


def mean_loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(x), y)
