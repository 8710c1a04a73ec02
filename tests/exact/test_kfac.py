"""K-FAC and Noisy K-FAC against a transcription: loops over examples, a Kronecker product that is solved."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

import posterity
from posterity import KFAC, DiagonalGaussian, EigenGaussian, Factorised, MatrixGaussian, NoisyKFAC
from posterity.curvature import Kronecker
from posterity.noise import normal
from posterity.optim.kfac import inverse_roots, undamped
from posterity.optim.statistics import Statistics
from posterity.optim.step import collecting, draw
from posterity.posterior.algebra import damped

B = 6
HYPER = {
    "num_data": 50,
    "prior_precision": 3.0,
    "temperature": 0.4,
    "betas": (0.8, 0.3),
    "damping": 0.02,
    "augmentation": 5.0,
    "preset": "osawa2019",
    "hess_init": 0.7,
    "lr": 0.05,
}
Problem = tuple[nn.Sequential, Tensor, Tensor]


def data(*shape: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(B, *shape, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 3, (B,), generator=generator)


def mlp() -> Problem:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3, bias=False))
    return model.double(), *data(4)


def conv_net() -> Problem:
    """With BatchNorm that is frozen to its statistics, so that examples have losses of their own."""
    torch.manual_seed(2)
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)
    )
    model[1].eval()
    return model.double(), *data(2, 4, 4)


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def columns_of(layer: nn.Module, x: Tensor) -> Tensor:
    """Inputs of one example at all positions, ``[I + 1, T]``."""
    a = x.T if isinstance(layer, nn.Linear) else F.unfold(x, 3, padding=1)[0]
    return a if layer.bias is None else torch.cat([a, torch.ones_like(a[:1])])


def example(model: nn.Sequential, theta: dict[str, Tensor], x: Tensor, y: Tensor) -> tuple[dict, dict]:
    """Gradients of one example's loss by name, and a aᵀ and g gᵀ of each layer by its number."""
    seen = {}
    hooks = [
        layer.register_forward_hook(lambda _, args, out, i=i: seen.update({i: (args[0], out)}))
        for i, layer in enumerate(model)
        if isinstance(layer, nn.Linear | nn.Conv2d)
    ]
    loss = F.cross_entropy(functional_call(model, theta, (x[None],)), y[None])
    for hook in hooks:
        hook.remove()
    wanted = [*theta.values(), *(out for _, out in seen.values())]
    grads = torch.autograd.grad(loss, wanted)
    factors = {}
    for (i, (into, _)), grad in zip(seen.items(), grads[len(theta) :], strict=True):
        a, g = columns_of(model[i], into.detach()), grad.flatten(2)[0] if grad.dim() > 2 else grad.T
        factors[i] = a @ a.T, g @ g.T / g.shape[1]
    return dict(zip(theta, grads, strict=False)), factors


class Transcription:
    """The algorithm's lines; blocks are tuples of names, the matrices among them by the layer's number."""

    def __init__(
        self,
        model: nn.Sequential,
        samples: int = 1,
        fixed: tuple[str, ...] = (),
        apart: tuple[int, ...] = (),
        noisy: bool = True,
        factors_every: int = 1,
        inverses_every: int | None = None,
    ) -> None:
        self.model, self.samples, self.fixed, self.noisy = model, samples, fixed, noisy
        self.factors_every, self.inverses_every = factors_every, inverses_every or factors_every
        self.mu = {name: p.detach().clone() for name, p in model.named_parameters()}
        self.m = {name: 0 * p for name, p in self.mu.items()}
        self.h = {name: 0 * p + HYPER["hess_init"] for name, p in self.mu.items()}
        self.blocks: dict[tuple[str, ...], tuple[int, slice]] = {}
        for i, layer in enumerate(model):
            if isinstance(layer, nn.Linear | nn.Conv2d):
                if layer.bias is not None and i in apart:
                    self.blocks[f"{i}.weight",] = i, slice(0, -1)
                    self.blocks[f"{i}.bias",] = i, slice(-1, None)
                else:
                    names = (f"{i}.weight",) if layer.bias is None else (f"{i}.weight", f"{i}.bias")
                    self.blocks[names] = i, slice(None)
        self.A: dict[tuple[str, ...], Tensor] = {}
        self.S: dict[tuple[str, ...], Tensor] = {}
        self.damped: dict[tuple[str, ...], tuple[Tensor, Tensor]] = {}
        self.t = 0

    def delta(self, name: str) -> float:
        n = HYPER["num_data"] * HYPER["augmentation"]
        return 0.0 if name in self.fixed else HYPER["temperature"] * HYPER["prior_precision"] / n

    def matrix(self, values: dict[str, Tensor], names: tuple[str, ...]) -> Tensor:
        return torch.cat([values[name].reshape(len(values[name]), -1) for name in names], 1)

    def put(self, values: dict[str, Tensor], names: tuple[str, ...], matrix: Tensor) -> None:
        start = 0
        for name in names:
            width = values[name][0].numel()
            values[name] = matrix[:, start : start + width].reshape(values[name].shape)
            start += width

    def covariances(self, names: tuple[str, ...]) -> tuple[Tensor, Tensor]:
        """Among rows and among columns."""
        n = HYPER["num_data"] * HYPER["augmentation"]
        rows, columns = (torch.linalg.inv(each) for each in self.damped[names])
        return rows, HYPER["temperature"] / n * columns

    def stds(self) -> dict[str, Tensor]:
        n = HYPER["num_data"] * HYPER["augmentation"]
        found = {
            name: (HYPER["temperature"] / (n * (h + self.delta(name) + HYPER["damping"]))).sqrt()
            for name, h in self.h.items()
        }
        for names in self.damped:
            u, v = self.covariances(names)
            self.put(found, names, torch.outer(u.diagonal(), v.diagonal()).sqrt())
        return {name: std for name, std in found.items() if name not in self.fixed}

    def draw(self, sample: int) -> dict[str, Tensor]:
        if not self.noisy:
            return self.mu
        eps = {
            name: normal(
                range(sample, sample + 1), p.shape, seed=0, step=self.t, block=name, dtype=torch.float64
            )[0]
            for name, p in self.mu.items()
        }
        stds = self.stds()
        theta = {name: p + stds.get(name, 0.0) * eps[name] for name, p in self.mu.items()}
        for names in self.damped:
            if names[0] not in self.fixed:
                u, v = map(torch.linalg.cholesky, self.covariances(names))
                noise = u @ self.matrix(eps, names) @ v.T
                self.put(theta, names, self.matrix(self.mu, names) + noise)
        return theta

    def step(self, x: Tensor, y: Tensor) -> None:
        b1, b2 = HYPER["betas"]
        g, h = ({name: 0 * p for name, p in self.mu.items()} for _ in range(2))
        sums: dict[int, list[Tensor]] = {}
        for k in range(self.samples):
            theta = {name: value.detach().requires_grad_() for name, value in self.draw(k).items()}
            for i in range(B):
                grads, factors = example(self.model, theta, x[i], y[i])
                for name, grad in grads.items():
                    g[name] += grad / B / self.samples
                    h[name] += grad**2 / B / self.samples
                for layer, pair in factors.items():
                    total = sums.setdefault(layer, [0 * each for each in pair])
                    sums[layer] = [a + b / B / self.samples for a, b in zip(total, pair, strict=True)]
        for name in self.mu:
            self.m[name] = b1 * self.m[name] + g[name] + self.delta(name) * self.mu[name]
        for names, (layer, columns) in self.blocks.items():
            if self.t % self.factors_every == 0:
                A, S = sums[layer]
                A = A[columns, columns]
                self.A[names] = b2 * self.A[names] + (1 - b2) * A if names in self.A else A
                self.S[names] = b2 * self.S[names] + (1 - b2) * S if names in self.S else S
            if self.t % self.inverses_every == 0 or names not in self.damped:
                A, S = self.A[names], self.S[names]
                gamma = self.delta(names[0]) + HYPER["damping"]
                pi = math.sqrt(A.trace() / len(A) / (S.trace() / len(S)))
                self.damped[names] = (
                    S + math.sqrt(gamma) / pi * torch.eye(len(S)).double(),
                    A + math.sqrt(gamma) * pi * torch.eye(len(A)).double(),
                )
            m = self.matrix(self.m, names)
            natural = torch.linalg.solve(torch.kron(*self.damped[names]), m.flatten()).view(m.shape)
            self.put(self.mu, names, self.matrix(self.mu, names) - HYPER["lr"] * natural)
        for name in self.mu.keys() - {name for names in self.blocks for name in names}:
            if self.t % self.factors_every == 0:
                self.h[name] = b2 * self.h[name] + (1 - b2) * h[name]
            shift = self.delta(name) + HYPER["damping"]
            self.mu[name] = self.mu[name] - HYPER["lr"] * self.m[name] / (self.h[name] + shift)
        self.t += 1


def compare(model: nn.Module, opt: posterity.VariationalOptimizer, exact: Transcription) -> None:
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.detach(), exact.mu[name], rtol=1e-9, atol=1e-12, msg=name)
    q = opt.posterior()
    stds = exact.stds()
    assert q.std().keys() == stds.keys()
    for name, std in q.std().items():
        torch.testing.assert_close(std, stds[name], rtol=1e-9, atol=0, msg=name)
    params = dict(model.named_parameters())
    for names in exact.damped:
        hess = exact.matrix({name: opt.state[params[name]]["hess"] for name in names}, names)
        diagonal = torch.outer(exact.S[names].diagonal(), exact.A[names].diagonal())
        torch.testing.assert_close(hess, diagonal, rtol=1e-9, atol=1e-12)
        if names[0] not in exact.fixed:
            leaf = q.block(names)
            assert isinstance(leaf, MatrixGaussian)
            for root, covariance in zip((leaf.rows, leaf.columns), exact.covariances(names), strict=True):
                # Both are up to a number, which is that of one times that of the other.
                found = root @ root.mT
                torch.testing.assert_close(
                    found / found.trace(), covariance / covariance.trace(), rtol=1e-9, atol=1e-12
                )


@pytest.mark.parametrize("way", ["eager", "compiled"])
@pytest.mark.parametrize(
    ("make", "samples", "every"),
    [(KFAC, 1, (1, None)), (KFAC, 1, (2, 3)), (NoisyKFAC, 1, (1, None)), (NoisyKFAC, 2, (2, 1))],
)
@pytest.mark.parametrize(
    ("build", "fixed"), [(mlp, ("0.weight", "0.bias")), (conv_net, ()), (conv_net, ("1.weight", "1.bias"))]
)
def test_a_run_equals_the_transcription(
    build: Callable[[], Problem],
    fixed: tuple[str, ...],
    make: type[KFAC] | type[NoisyKFAC],
    samples: int,
    every: tuple[int, int | None],
    way: str,
) -> None:
    model, x, y = build()
    entries = {**HYPER, "factors_every": every[0], "inverses_every": every[1], "deterministic": fixed}
    opt = (
        NoisyKFAC(model, mc_samples=samples, seed=0, **entries)
        if make is NoisyKFAC
        else KFAC(model, **entries)
    )
    exact = Transcription(
        model, samples, fixed, noisy=opt.draws, factors_every=every[0], inverses_every=every[1]
    )
    step = posterity.compile_step(model, loss_fn, opt)
    for _ in range(5):
        exact.step(x, y)
        step(x, y) if way == "compiled" else opt.step(lambda: loss_fn(model, x, y), batch_size=B)
    compare(model, opt, exact)


def test_blocks_may_all_be_deterministic() -> None:
    model, x, y = conv_net()
    fixed = ("0.weight", "0.bias", "4.weight", "4.bias")
    opt, exact = NoisyKFAC(model, deterministic=fixed, seed=0, **HYPER), Transcription(model, fixed=fixed)
    for _ in range(3):
        exact.step(x, y)
        opt.step(lambda: loss_fn(model, x, y), batch_size=B)
    compare(model, opt, exact)


def test_weights_and_biases_in_different_groups_are_separate_blocks() -> None:
    model, x, y = conv_net()
    named = list(model.named_parameters())
    weights = [(name, p) for name, p in named if name != "4.bias"]
    opt = NoisyKFAC([{"params": weights}, {"params": [named[-1]]}], mc_samples=2, seed=0, **HYPER)
    exact = Transcription(model, 2, apart=(4,))
    for _ in range(4):
        exact.step(x, y)
        opt.step(lambda: loss_fn(model, x, y), batch_size=B)
    assert {"4.weight", "4.bias", "0.weight+0.bias"} <= opt.posterior().blocks.keys()
    compare(model, opt, exact)


def test_weight_and_bias_of_equal_dtype_are_one_block() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    model.weight.data = model.weight.data.bfloat16()
    x, y = torch.randn(B, 4), torch.randint(0, 3, (B,))
    opt = KFAC(model, **HYPER)
    for blocks in ({"weight", "bias"}, {"weight+bias"}):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            opt.step(lambda: loss_fn(model, x, y))
        assert opt.posterior().blocks.keys() == blocks
        assert ("inputs" in opt.state[model.bias]) == ("bias" in blocks)
        model.bfloat16()


def test_nothing_is_collected_between() -> None:
    model, x, y = mlp()
    opt = KFAC(model, factors_every=3, **HYPER)
    for step in range(7):
        assert isinstance(collecting(opt), nullcontext) == (step % 3 > 0)
        opt.step(lambda: loss_fn(model, x, y), batch_size=B)


def test_micro_batches_are_one_batch() -> None:
    model, x, y = conv_net()
    opt = NoisyKFAC(model, mc_samples=2, seed=0, **HYPER)
    exact = Transcription(model, 2)
    for _ in range(4):
        exact.step(x, y)
        for _ in range(2):
            with opt.sampled_params():
                for rows in (slice(0, 4), slice(4, 6)):
                    part = (rows.stop - rows.start) / B
                    (part * loss_fn(model, x[rows], y[rows])).backward()
        opt.step(batch_size=B)
    compare(model, opt, exact)


def test_a_bias_may_be_frozen_and_thaw() -> None:
    model, x, y = mlp()
    opt = NoisyKFAC(model, factors_every=2, seed=0, **HYPER)
    layer, sizes = model[0], []
    for frozen in (False, True, True, True, False, False):
        layer.bias.requires_grad_(not frozen)
        before = layer.bias.detach().clone(), layer.weight.detach().clone()
        opt.step(lambda: loss_fn(model, x, y))
        assert torch.equal(before[0], layer.bias) == frozen
        assert not torch.equal(before[1], layer.weight)
        sizes.append(len(opt.state[layer.weight]["inputs"]))
        assert set(opt.posterior().mean()) == {"0.weight", "0.bias", "2.weight"}
    assert sizes == [5, 5, 4, 4, 5, 5]


def test_a_layer_whose_gradients_a_user_drops_stays_as_it_is() -> None:
    model, x, y = mlp()
    opt = NoisyKFAC(model, factors_every=2, seed=0, **HYPER)
    weight = model[0].weight.detach().clone()
    for step in range(3):
        with opt.sampled_params():
            loss_fn(model, x, y).backward()
        if step == 0:
            model[0].weight.grad = model[0].bias.grad = None
        opt.step(batch_size=B)
        assert torch.equal(weight, model[0].weight) == (step == 0)
        assert ("0.weight+0.bias" in opt.posterior().blocks) == (step == 2)
    assert int(opt.state[model[0].weight]["step"]) == 2


def test_groups_of_convolutions_and_embeddings_have_squares() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(7, 4), nn.Conv1d(4, 4, 3, padding=1, groups=2), nn.Flatten(), nn.Linear(16, 3)
    )
    x, y = torch.randint(0, 7, (B, 4)), torch.randint(0, 3, (B,))
    opt = NoisyKFAC(model, mc_samples=2, seed=0, **HYPER)
    for _ in range(2):
        opt.step(lambda: loss_fn(model, x, y))
    assert set(opt.posterior().blocks) == {"0.weight", "1.weight", "1.bias", "3.weight+3.bias"}


def test_loaded_posterior_is_the_same() -> None:
    model, x, y = conv_net()
    opt = NoisyKFAC(model, seed=0, **HYPER)
    for _ in range(3):
        opt.step(lambda: loss_fn(model, x, y))
    q = opt.posterior()
    for entries in (HYPER, {**HYPER, "temperature": 0.9, "damping": 0.5}):
        twin = conv_net()[0]
        other = NoisyKFAC(twin, seed=0, **entries)
        for _ in range(2):
            other.load_posterior(q)
            for name, std in q.std().items():
                torch.testing.assert_close(other.posterior().std()[name], std)
            other.step(lambda twin=twin: loss_fn(twin, x, y))
        if entries is HYPER:
            first = model[0].weight
            for key in ("inputs", "outputs"):
                other.load_posterior(q)
                torch.testing.assert_close(other.state[twin[0].weight][key], opt.state[first][key])


def eigen_leaf(scale: Tensor) -> EigenGaussian:
    generator = torch.Generator().manual_seed(3)
    rows, columns = (torch.linalg.qr(torch.randn(n, n, generator=generator).double()).Q for n in (5, 5))
    return EigenGaussian((torch.ones(5, 4).double(), torch.zeros(5).double()), rows, columns, scale)


def test_eigenbasis_posterior_is_loaded_as_the_nearest_product() -> None:
    model, x, y = mlp()
    opt = NoisyKFAC(model, seed=0, **HYPER)
    first, second = torch.linspace(0.1, 0.5, 5).double(), torch.linspace(2, 1, 5).double()
    for prior in (0.0, 0.7):
        # As a Laplace approximation has it: a product, and the prior's precision added.
        leaf = eigen_leaf((torch.outer(first, second) ** -2 + prior).rsqrt())
        opt.load_posterior(Factorised({("0.weight", "0.bias"): leaf}))
        taken = opt.posterior().block("0.weight+0.bias")
        assert isinstance(taken, MatrixGaussian)
        torch.testing.assert_close(taken.mean(), leaf.mean())
        torch.testing.assert_close(taken.log_volume(), leaf.log_volume())
        covariance = torch.kron(taken.rows @ taken.rows.mT, taken.columns @ taken.columns.mT)
        basis = torch.kron(leaf.rows, leaf.columns)
        found = basis.mT @ covariance @ basis
        torch.testing.assert_close(found, found.diagonal().diag(), rtol=0, atol=1e-12)
        logs = 0.5 * found.diagonal().log().view(5, 5)
        torch.testing.assert_close(logs.mean(0), leaf.scale.log().mean(0))
        torch.testing.assert_close(logs.mean(1), leaf.scale.log().mean(1))
        if prior == 0.0:
            torch.testing.assert_close(taken.std(), leaf.std())
        opt.step(lambda: loss_fn(model, x, y))
        assert set(opt.posterior().blocks) == {"0.weight+0.bias", "2.weight"}


def test_diagonal_posterior_is_used_until_factors_come() -> None:
    model, x, y = mlp()
    opt = NoisyKFAC(model, seed=0, **HYPER)
    opt.step(lambda: loss_fn(model, x, y))
    q = Factorised({"0.bias": DiagonalGaussian(torch.ones(5).double(), 0.1)})
    opt.load_posterior(q)
    assert set(opt.posterior().blocks) == {"0.weight", "0.bias", "2.weight"}
    torch.testing.assert_close(opt.posterior().std()["0.bias"], torch.full((5,), 0.1).double())
    opt.step(lambda: loss_fn(model, x, y))
    assert set(opt.posterior().blocks) == {"0.weight+0.bias", "2.weight"}
    with pytest.raises(
        ValueError, match=r"'0.weight\+0.bias' is one block, but its tensors are in different"
    ):
        NoisyKFAC([{"params": [pair]} for pair in model.named_parameters()], seed=0, **HYPER).load_posterior(
            opt.posterior()
        )
    with pytest.raises(ValueError, match=r"a block '0.weight\+0.bias' of several tensors"):
        posterity.VOGN(model, num_data=5).load_posterior(opt.posterior())


def test_pruned_weights_move_no_others() -> None:
    model, x, y = mlp()
    opt = KFAC(model, **HYPER)
    opt.step(lambda: loss_fn(model, x, y))
    keep = torch.ones(5, 5, dtype=torch.bool)
    keep[2:] = False
    leaf = opt.posterior().block("0.weight+0.bias")
    opt.load_posterior(Factorised({("0.weight", "0.bias"): leaf.pruned(keep)}))
    opt.step(lambda: loss_fn(model, x, y))
    momentum = opt.state[model[0].weight]["momentum"]
    assert not momentum[2:].any()
    assert momentum[:2].all()


@pytest.mark.filterwarnings("ignore:.*seems to diverge")  # without damping draws are that wide
@pytest.mark.filterwarnings("ignore::posterity.optim.ScaleWarning")
@pytest.mark.parametrize("make", [KFAC, NoisyKFAC])
def test_singular_factors_have_an_inverse_in_single_precision(make: type[KFAC] | type[NoisyKFAC]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(100, 50), nn.ReLU(), nn.Linear(50, 10))
    # Damping is far below what single precision resolves, and there are less examples than inputs.
    opt = make(model, num_data=10, prior_precision=1e-12, damping=0.0, lr=1e-6)
    x, y = 100 * torch.rand(20, 100), torch.randint(0, 10, (20,))
    for _ in range(3):
        opt.step(lambda: 100 * loss_fn(model, x, y))
    assert all(torch.isfinite(std).all() for std in opt.posterior().std().values())


@pytest.mark.parametrize(("layer", "block"), [(0, "0.weight+0.bias"), (2, "2.weight")])
def test_singular_factors_are_refused_before_any_change(layer: int, block: str) -> None:
    model, x, y = mlp()
    opt = KFAC(model, **HYPER)
    opt.step(lambda: loss_fn(model, x, y))
    opt.state[model[layer].weight]["outputs"].neg_().mul_(10)  # as no loss makes them
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with pytest.raises(ValueError, match=f"'{re.escape(block)}': .* raise damping; nothing has moved"):
        opt.step(lambda: loss_fn(model, x, y))
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())
    with pytest.raises(RuntimeError, match="no gradient at sampled weights"):
        opt.step()  # what was refused is not waiting
    opt.state[model[layer].weight]["outputs"].neg_()
    opt.step(lambda: loss_fn(model, x, y))


def test_non_finite_factors_are_refused_before_any_change() -> None:
    model = nn.Linear(4, 3)
    opt = KFAC(model, **HYPER)
    x, y = 1e25 * torch.eye(4), torch.tensor([0, 1, 2, 0])
    with pytest.raises(FloatingPointError, match="a Kronecker factor of 'weight' is not finite"):
        opt.step(lambda: 1e-20 * model(x)[range(4), y].mean())
    assert "inputs" not in opt.state[model.weight]


def test_a_weight_used_by_rows_is_refused_by_name() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(6, 4).double())

        def forward(self, x: Tensor) -> Tensor:
            first, second = self.weight.chunk(2)
            return F.linear(x, first) * F.linear(x, second).sigmoid()

    model = Net()
    opt = KFAC(model, **HYPER)
    with pytest.raises(RuntimeError, match=r"'weight' is used in parts .*, for which KFAC has no"):
        opt.step(lambda: loss_fn(model, *data(4)))


def test_undamping_undoes_damping() -> None:
    generator = torch.Generator().manual_seed(0)
    a, s = (torch.randn(n, 9, generator=generator).double() for n in (4, 3))
    roots = inverse_roots({0: (s @ s.T, a @ a.T, 0.7)})[0]
    for found, exact in zip(undamped(*roots, 0.7), (s @ s.T, a @ a.T), strict=True):
        torch.testing.assert_close(found, exact)
    for found in undamped(*roots, 1e6):
        assert not found.any()


@pytest.mark.parametrize("damping", [1e-15, 1e-9, 1e-4, 1e-1])
def test_inverses_of_single_precision_are_right_to_three_digits(damping: float) -> None:
    generator = torch.Generator().manual_seed(0)
    factors = []
    for size in (600, 40, 40):  # without damping, Cholesky's method fails for the first
        a = torch.rand(size, 1, generator=generator)
        s = torch.randn(30, 20, generator=generator)
        factors.append((s @ s.T, a @ a.T, damping))
    for (s, a, _), pair in zip(factors, inverse_roots(dict(enumerate(factors))).values(), strict=True):
        exact = damped(s.double(), a.double(), damping)
        for precision, root in zip(exact, pair, strict=True):
            precision.diagonal().add_(torch.finfo(torch.float32).eps * precision.trace())
            assert root.dtype == torch.float32
            left = root.double().mT @ precision @ root.double()
            torch.testing.assert_close(left, torch.eye(len(left)).double(), rtol=0, atol=1e-3)


def test_drawn_weights_have_the_covariance_of_the_posterior() -> None:
    model, x, y = mlp()
    opt = NoisyKFAC(model, seed=0, **HYPER)
    for _ in range(3):
        opt.step(lambda: loss_fn(model, x, y))
    n, layer = 5000, model[0]
    leaf = opt.posterior().block("0.weight+0.bias")
    assert isinstance(leaf, MatrixGaussian)
    (drawn,) = draw(opt, range(n), 1.0)
    weights = dict(zip(drawn.group.layout.names, drawn.weights(), strict=True))
    found = torch.cat([weights["0.weight"], weights["0.bias"][..., None]], -1).flatten(1)
    mean = torch.cat([layer.weight, layer.bias[:, None]], 1).detach().flatten()
    exact = torch.kron(leaf.rows @ leaf.rows.mT, leaf.columns @ leaf.columns.mT)
    variance = exact.diagonal()
    assert ((found.mean(0) - mean).abs() < 5 * (variance / n).sqrt()).all()
    error = ((torch.outer(variance, variance) + exact**2) / n).sqrt()
    covariance = (found - mean).mT @ (found - mean) / n
    assert ((covariance - exact).abs() < 5 * error).all()
    assert ((exact - variance.diag()).abs() > 5 * error).any()  # independent weights would be seen


N, INPUTS, OUTPUTS = 40, 3, 2
G = torch.Generator().manual_seed(0)
MIX = torch.tensor([[1.0, 0.4, 0.0], [0.0, 1.0, 0.3], [0.0, 0.0, 0.5]])
X = (torch.randn(N, INPUTS, generator=G) @ MIX).double()
Y = X @ torch.randn(INPUTS, OUTPUTS, generator=G).double() + torch.randn(
    N, OUTPUTS, generator=G
).double() @ torch.tensor([[1.0, 0.8], [0.0, 0.5]], dtype=torch.float64)


def regression(temperature: float, damping: float, noise: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Where the rule should end: the tempered posterior's mean, and covariances among rows and columns.

    With g_i = W x_i − y_i the factor of the gradients is E[g gᵀ] = (1/N) Σ r_i r_iᵀ + U tr(V A): residuals at
    the mean, and their covariance (xᵀ V x) U under q. It stands where a Gaussian likelihood's Fisher has 1.
    """
    A, delta = X.T @ X / N, temperature * 2.0 / N
    mean = torch.linalg.solve(A + delta * torch.eye(INPUTS).double(), X.T @ Y / N).T
    residual = X @ mean.T - Y
    S = R = residual.T @ residual / N
    for _ in range(500):
        pi = (A.trace() / INPUTS / (S.trace() / OUTPUTS)).sqrt()
        gamma = math.sqrt(delta + damping)
        U = torch.linalg.inv(S + gamma / pi * torch.eye(OUTPUTS).double())
        V = temperature / N * torch.linalg.inv(A + gamma * pi * torch.eye(INPUTS).double())
        S = R + noise * U * (V @ A).trace()
    return mean, U, V


@pytest.mark.parametrize("damping", [0.0, 0.1])
@pytest.mark.parametrize("temperature", [1.0, 0.3])
@pytest.mark.parametrize("make", [NoisyKFAC, KFAC])
def test_linear_regression_reaches_its_own_fixed_point(
    make: type[KFAC] | type[NoisyKFAC], temperature: float, damping: float
) -> None:
    entries = {"prior_precision": 2.0, "temperature": temperature, "damping": damping, "betas": (0.5, 0.9)}
    opt = make(
        [torch.zeros(OUTPUTS, INPUTS).double().requires_grad_()],
        num_data=N,
        preset="osawa2019",
        lr=0.12,
        **entries,
    )
    group = opt.param_groups[0]
    mean = torch.zeros(OUTPUTS, INPUTS).double()
    state, A = opt.init(mean, None, group), X.T @ X / N
    covariance = 0 * torch.eye(OUTPUTS).double(), 0 * torch.eye(INPUTS).double()
    for step in range(1, 500):
        residual = X @ mean.T - Y
        S = residual.T @ residual / N
        if "rows" in state:
            leaf = opt.leaf([mean], state, None, group)
            covariance = leaf.rows @ leaf.rows.mT, leaf.columns @ leaf.columns.mT
            S = S + opt.draws * covariance[0] * (covariance[1] @ A).trace()
        grad = residual.T @ X / N
        told = Kronecker("w", None, None, A, S)
        stats = Statistics(grad, grad[:0], N, step, grad[:0], told)
        ((mean, new),) = opt.updates([(mean, state, stats, group)])
        state |= new
    exact, U, V = regression(temperature, damping, opt.draws)
    torch.testing.assert_close(mean, exact, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(torch.kron(*covariance), torch.kron(U, V), rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("make", [NoisyKFAC, KFAC])
def test_with_the_exact_fisher_and_no_damping_the_posterior_is_exact(
    make: type[KFAC] | type[NoisyKFAC],
) -> None:
    """Noise of precision P has S = P for its Fisher; without a prior the posterior is a matrix Gaussian."""
    P = torch.tensor([[2.0, 0.5], [0.5, 1.0]], dtype=torch.float64)
    mean = torch.zeros(OUTPUTS, INPUTS).double()
    opt = make(
        [mean.clone().requires_grad_()],
        num_data=N,
        preset="osawa2019",
        lr=0.12,
        prior_precision=1e-10,
        damping=0.0,
    )
    group = opt.param_groups[0]
    state, told = opt.init(mean, None, group), Kronecker("w", None, None, X.T @ X / N, P)
    for step in range(1, 500):
        grad = P @ (X @ mean.T - Y).T @ X / N
        stats = Statistics(grad, grad[:0], N, step, grad[:0], told)
        ((mean, new),) = opt.updates([(mean, state, stats, group)])
        state |= new
    leaf = opt.leaf([mean], state, None, group)
    covariance = torch.kron(leaf.rows @ leaf.rows.mT, leaf.columns @ leaf.columns.mT)
    torch.testing.assert_close(mean, torch.linalg.lstsq(X, Y).solution.T, rtol=1e-5, atol=1e-6)
    exact = torch.linalg.inv(torch.kron(P, X.T @ X))
    torch.testing.assert_close(covariance, exact, rtol=1e-4, atol=1e-6)
    assert bool((exact - exact.diagonal().diag()).abs().max() > 1e-3)  # independent weights would be seen


def test_sampled_factors_are_unbiased() -> None:
    layer = nn.Linear(INPUTS, OUTPUTS, bias=False).double()
    mean, U, V = regression(1.0, 0.0, True)
    leaf = MatrixGaussian(mean, torch.linalg.cholesky(U), torch.linalg.cholesky(V))
    n = 400
    opt = NoisyKFAC(layer, num_data=N, prior_precision=2.0, damping=0.0)
    opt.load_posterior(Factorised({"weight": leaf}))
    singles, before = [], torch.zeros(OUTPUTS, OUTPUTS).double()
    for _ in range(n):
        with opt.sampled_params():
            (0.5 * (layer(X) - Y).square().sum(1).mean()).backward()
        total = opt.sums.layers["weight"].S * N
        singles.append(total - before)
        before = total
    found = torch.stack(singles)
    torch.testing.assert_close(opt.sums.layers["weight"].A / n, X.T @ X)
    residual = X @ mean.T - Y
    noise = U * (V @ X.T @ X / N).trace()
    error = found.std(0) / n**0.5
    assert ((found.mean(0) - residual.T @ residual / N - noise).abs() < 5 * error).all()
    assert (noise.diagonal() > 10 * error.diagonal()).all()  # it would be missed


def test_model_cast_to_double_continues_training() -> None:
    torch.manual_seed(0)
    model, x, y = nn.Linear(4, 3), torch.randn(6, 4), torch.randint(0, 3, (6,))
    opt = posterity.NoisyKFAC(model, num_data=6)
    opt.step(lambda: nn.functional.cross_entropy(model(x), y))
    model.double()
    opt.zero_grad()
    assert opt.step(lambda: nn.functional.cross_entropy(model(x.double()), y)).dtype == torch.float64


def test_a_layer_in_some_micro_batches_has_their_inputs_only() -> None:
    heads, x = nn.ModuleList(nn.Linear(3, 2, bias=False) for _ in range(2)).double(), data(3)[0]
    opt = KFAC(heads, **HYPER | {"betas": (0.0, 0.0)})
    column = torch.tensor([1.0, 2.0]).double()
    parts = [x[:4], x[4:]]
    with opt.sampled_params():
        for head, part in zip(heads, parts, strict=True):
            ((head(part) @ column).sum() / B).backward()
    opt.step()
    for head, part in zip(heads, parts, strict=True):
        state = opt.state[head.weight]
        torch.testing.assert_close(state["inputs"], part.T @ part / len(part))
        torch.testing.assert_close(state["outputs"], column.outer(column) * len(part) / B)


def test_gradients_are_dropped_by_the_optimiser_alone() -> None:
    """Else the curvature of what is gone would stay."""
    model, x, y = mlp()
    opt = KFAC(model, **HYPER)
    with (
        pytest.raises(
            RuntimeError, match=r"was dropped or changed .*: drop gradients with the optimiser's own"
        ),
        opt.sampled_params(),
    ):
        loss_fn(model, x, y).backward()
        model.zero_grad()
        loss_fn(model, x, y).backward()
    results = []
    for again in (False, True):
        model, x, y = mlp()
        opt = KFAC(model, **HYPER)
        with opt.sampled_params():
            loss_fn(model, x, y).backward()
            if again:
                opt.zero_grad()
                loss_fn(model, x, y).backward()
        opt.step()
        results.append(model[0].weight.detach())
    assert torch.equal(*results)


class CrossAttention(nn.Module):
    """Attention to a text of other widths."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, kdim=3, vdim=2, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.attention(x, x[..., :3], x[..., 1:3], need_weights=False)[0].mean(1))


@pytest.mark.parametrize("way", ["eager", "compiled"])
def test_attention_with_projections_of_other_widths(way: str) -> None:
    torch.manual_seed(0)
    model, x, y = CrossAttention(), torch.randn(6, 5, 4), torch.randint(0, 3, (6,))
    opt = posterity.NoisyKFAC(model, num_data=6, mc_samples=2)
    step = posterity.compile_step(model, lambda m, x, y: nn.functional.cross_entropy(m(x), y), opt)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for _ in range(3):
        step(x, y) if way == "compiled" else opt.step(lambda: nn.functional.cross_entropy(model(x), y))
    assert not any(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert {*opt.posterior().blocks} == {
        *(f"attention.{each}_proj_weight" for each in "qkv"),
        "attention.in_proj_bias",
        "attention.out_proj.weight+attention.out_proj.bias",
        "head.weight+head.bias",
    }
