"""Laplace approximations against Bayesian linear regression and explicit matrices, in float64."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import MultivariateNormal
from torch.func import functional_call, jacrev
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from posterity import (
    BGD,
    DiagonalGaussian,
    EigenGaussian,
    Factorised,
    IsotropicGaussian,
    MCDropout,
    kl,
    laplace,
    predict,
    prune,
)
from posterity.curvature import fisher

F64 = torch.float64
N, D, C = 30, 4, 2
G = torch.Generator().manual_seed(0)
X = torch.randn(N, D, generator=G, dtype=F64) @ torch.randn(D, D, generator=G, dtype=F64)
Y = X @ torch.randn(D, C, generator=G, dtype=F64) + 0.5 + torch.randn(N, C, generator=G, dtype=F64)
ONES = torch.cat([X, torch.ones(N, 1, dtype=F64)], 1)
LABELS = torch.randint(0, 3, (N,), generator=G)
PRIOR, NOISE = 0.7, 1.3
EXACT = {"rtol": 1e-9, "atol": 1e-12}
ALL = ["*", "1.*"]  # norm layers, too


def regression(temperature: float = 1.0, prior: float = PRIOR) -> nn.Linear:
    """The exact mean of the weights, bias included."""
    weights = torch.linalg.solve(precision(temperature, prior), ONES.T @ Y / (NOISE * temperature))
    model = nn.Linear(D, C, dtype=F64)
    with torch.no_grad():
        model.weight.copy_(weights[:D].T)
        model.bias.copy_(weights[D])
    return model


def precision(temperature: float = 1.0, prior: float = PRIOR) -> Tensor:
    """That of the weights of one output."""
    return ONES.T @ ONES / (NOISE * temperature) + prior * torch.eye(D + 1, dtype=F64)


def covariance(leaf: EigenGaussian) -> Tensor:
    basis = torch.kron(leaf.rows, leaf.columns)  # of rows, as flatten() has them
    return basis * leaf.scale.flatten().square() @ basis.T


def evidence(prior: float = PRIOR) -> float:
    """log N(Y; 0, noise I + ONES ONESᵀ / prior), of every output."""
    marginal = NOISE * torch.eye(N, dtype=F64) + ONES @ ONES.T / prior
    return float(MultivariateNormal(torch.zeros(N, dtype=F64), marginal).log_prob(Y.T).sum())


@pytest.mark.parametrize("temperature", [1.0, 0.3])
def test_linear_regression_is_exact(temperature: float) -> None:
    model = regression(temperature)
    found = laplace.fit(
        model,
        (X, Y),
        likelihood="regression",
        prior_precision=PRIOR,
        noise_variance=NOISE,
        temperature=temperature,
    )
    q = found.posterior()
    assert torch.equal(q.mean()["weight"], model.weight)
    assert torch.equal(q.mean()["bias"], model.bias)
    exact = torch.linalg.inv(torch.block_diag(*[precision(temperature)] * C))
    leaf = q.block("weight+bias")
    torch.testing.assert_close(covariance(leaf), exact, **EXACT)
    draws = q.sample(20_000, seed=0)
    value = leaf.join([draws["weight"], draws["bias"]]).flatten(1)
    # Var of a sample covariance: (s_ii s_jj + s_ij²) / n.
    variance = exact.diagonal()
    error = ((variance[:, None] * variance + exact.square()) / len(value)).sqrt()
    assert ((value.T.cov() - exact).abs() < 5 * error).all()


def test_the_evidence_is_that_of_linear_regression() -> None:
    options = {"likelihood": "regression", "noise_variance": NOISE}
    for prior in (PRIOR, 5.0):
        found = laplace.fit(regression(prior=prior), (X, Y), prior_precision=prior, **options)
        assert found.log_evidence == pytest.approx(evidence(prior), rel=1e-10)
    # Without a bias there is one block of one tensor; with correlated outputs nothing else changes.
    model = nn.Linear(D, 1, bias=False, dtype=F64)
    inner = X.T @ X / NOISE + PRIOR * torch.eye(D, dtype=F64)
    with torch.no_grad():
        model.weight.copy_(torch.linalg.solve(inner, X.T @ Y[:, :1] / NOISE).T)
    marginal = NOISE * torch.eye(N, dtype=F64) + X @ X.T / PRIOR
    expected = MultivariateNormal(torch.zeros(N, dtype=F64), marginal).log_prob(Y[:, 0])
    found = laplace.fit(model, (X, Y[:, :1]), prior_precision=PRIOR, **options)
    assert found.log_evidence == pytest.approx(float(expected), rel=1e-10)
    assert list(found.posterior().blocks) == ["weight"]


def test_best_prior_maximises_the_exact_evidence() -> None:
    """Where δ trains the weights that choose δ again, the exact evidence has its maximum."""
    prior = 1.0
    for _ in range(60):
        found = laplace.fit(
            regression(prior=prior),
            (X, Y),
            likelihood="regression",
            noise_variance=NOISE,
            prior_precision="marginal",
        )
        prior = found.prior_precision["weight+bias"]
    s = torch.tensor(math.log(prior), dtype=F64, requires_grad=True)
    marginal = NOISE * torch.eye(N, dtype=F64) + ONES @ ONES.T / s.exp()
    total = MultivariateNormal(torch.zeros(N, dtype=F64), marginal).log_prob(Y.T).sum()
    assert abs(torch.autograd.grad(total, s)[0]) < 1e-6
    assert evidence(prior) > max(evidence(prior * 1.1), evidence(prior / 1.1))


def net() -> nn.Sequential:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(D, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 3, bias=False)).double()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn_like(p))  # LayerNorm's are not ones and zeros
    return model


def ggn(model: nn.Module, x: Tensor, likelihood: str) -> dict[str, Tensor]:
    """Σ_i diag(Jᵀ H J), by Jacobians and Hessians."""
    params = {name: p.detach() for name, p in model.named_parameters()}
    totals = {name: torch.zeros_like(p) for name, p in params.items()}
    for one in x:

        def outputs(params: Mapping[str, Tensor], one: Tensor = one) -> Tensor:
            return functional_call(model, dict(params), (one[None],))[0]

        p = outputs(params).softmax(-1)
        hessian = p.diag() - torch.outer(p, p) if likelihood == "classification" else torch.eye(3, dtype=F64)
        for name, jac in jacrev(outputs)(params).items():
            totals[name] += torch.einsum("i...,ij,j...->...", jac, hessian, jac)
    return totals


@pytest.mark.parametrize("likelihood", ["classification", "regression"])
def test_the_diagonal_is_that_of_the_gauss_newton_matrix(likelihood: str) -> None:
    model = net()
    y = LABELS if likelihood == "classification" else torch.randn(N, 3, dtype=F64)
    noise = None if likelihood == "classification" else NOISE
    found = laplace.fit(
        model,
        (X, y),
        names=ALL,
        structure="diagonal",
        likelihood=likelihood,
        prior_precision=PRIOR,
        noise_variance=noise,
        temperature=0.5,
    )
    q = found.posterior()
    assert [*q.std()] == [name for name, _ in model.named_parameters()]
    for name, curvature in ggn(model, X, likelihood).items():
        assert isinstance(q.block(name), DiagonalGaussian)
        expected = (curvature / (0.5 * (noise or 1.0)) + PRIOR).rsqrt()
        torch.testing.assert_close(q.std()[name], expected, **EXACT)
    with torch.no_grad():
        out = model(X)
    log_likelihood = (
        -F.cross_entropy(out, y, reduction="sum")
        if noise is None
        else torch.distributions.Normal(out, NOISE**0.5).log_prob(y).sum()
    )
    assert found.log_likelihood == pytest.approx(float(log_likelihood), rel=1e-10)


def test_kronecker_precisions_are_products_and_the_prior_added() -> None:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Conv2d(1, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(12, 3)).double()
    x = torch.randn(N, 1, 3, 3, dtype=F64)
    q = laplace.fit(model, (x, LABELS), names="*", prior_precision=PRIOR, temperature=0.5).posterior()
    blocks = fisher(model, x, structure="kronecker").kronecker
    for name in ("0", "3"):
        block, leaf = blocks[f"{name}.weight"], q.block((f"{name}.weight", f"{name}.bias"))
        size = leaf.shape.numel()
        expected = N / 0.5 * torch.kron(block.S, block.A) + PRIOR * torch.eye(size, dtype=F64)
        torch.testing.assert_close(covariance(leaf) @ expected, torch.eye(size, dtype=F64), **EXACT)
        mean = torch.cat([model[int(name)].weight.flatten(1), model[int(name)].bias[:, None]], 1)
        assert torch.equal(leaf.mean(), mean)


@pytest.mark.parametrize("temperature", [1.0, 0.3])
def test_the_evidence_is_the_gaussian_integral(temperature: float) -> None:
    """log p(D | θ*) / τ + log p(θ*) − log q(θ*): Laplace's approximation, by densities alone."""
    model, options = net(), {"names": ALL, "prior_precision": PRIOR, "temperature": temperature}
    for structure in ("diagonal", "kronecker"):
        found = laplace.fit(model, (X, LABELS), structure=structure, **options)
        q = found.posterior()
        prior = sum(IsotropicGaussian(PRIOR**-0.5).log_density(each).sum() for each in q.mean().values())
        expected = found.log_likelihood / temperature + float(prior - q.log_prob(q.mean()))
        assert found.log_evidence == pytest.approx(expected, rel=1e-10)


def test_empirical_fisher_of_regression_includes_the_noise_variance() -> None:
    model, y = net(), torch.randn(N, 3, dtype=F64)
    found = laplace.fit(
        model,
        (X, y),
        structure="diagonal",
        likelihood="regression",
        kind="empirical",
        noise_variance=NOISE,
        prior_precision=PRIOR,
    )
    squares = 0.0
    for one, goal in zip(X, y, strict=True):
        nll = 0.5 * (model(one[None])[0] - goal).square().sum() / NOISE
        squares = squares + torch.autograd.grad(nll, model[3].weight)[0].square()
    torch.testing.assert_close(found.posterior().std()["3.weight"], (squares + PRIOR).rsqrt(), **EXACT)


def test_the_noise_is_the_mean_squared_error_unless_given() -> None:
    model, y = net(), torch.randn(N, 3, dtype=F64)
    found = laplace.fit(model, (X, y), likelihood="regression", prior_precision=PRIOR)
    variance = float((model(X) - y).detach().square().mean())
    assert found.noise_variance == pytest.approx(variance, rel=1e-12)
    given = laplace.fit(
        model, (X, y), likelihood="regression", prior_precision=PRIOR, noise_variance=variance
    )
    assert given.log_evidence == pytest.approx(found.log_evidence, rel=1e-12)
    assert kl(found.posterior(), given.posterior()).item() == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("structure", ["diagonal", "kronecker"])
def test_the_marginal_prior_is_where_the_evidence_is_largest(structure: str) -> None:
    options = {"names": ALL, "structure": structure}
    found = laplace.fit(net(), (X, LABELS), prior_precision="marginal", **options)
    (chosen,) = {*found.prior_precision.values()}
    logs = torch.linspace(math.log(chosen) - 8, math.log(chosen) + 8, 1601, dtype=F64)
    values = [found.with_prior(math.exp(s)).log_evidence for s in logs]
    assert values.index(max(values)) == 800
    assert found.log_evidence >= max(values)
    blocks = found.with_prior("marginal-by-block")
    assert blocks.log_evidence > found.log_evidence
    for name, spectrum in found.spectra.items():
        best = blocks.prior_precision[name]
        near = [spectrum.log_evidence(best * factor) for factor in (0.999, 1.0, 1.001)]
        assert max(near) == near[1]
    again = found.with_prior(3.0).posterior()
    direct = laplace.fit(net(), (X, LABELS), prior_precision=3.0, **options).posterior()
    assert all(torch.equal(std, direct.std()[name]) for name, std in again.std().items())


@pytest.mark.parametrize("structure", ["diagonal", "kronecker"])
@pytest.mark.parametrize("kind", ["exact", "empirical"])
def test_several_batches_are_one(structure: str, kind: str) -> None:
    options = {"names": ALL, "structure": structure, "kind": kind, "prior_precision": PRIOR}
    whole = laplace.fit(net(), (X, LABELS), **options)
    parts = [(X[:7], LABELS[:7]), (X[7:19], LABELS[7:19]), (X[19:], LABELS[19:])]
    for data in (
        parts,
        iter(parts),
        DataLoader(TensorDataset(X, LABELS), batch_size=8, shuffle=True),
        [X, LABELS],
    ):
        found = laplace.fit(net(), data, batch_size=11, **options)
        assert found.num_data == N
        assert found.log_evidence == pytest.approx(whole.log_evidence, rel=1e-10)
        for name, std in whole.posterior().std().items():
            torch.testing.assert_close(found.posterior().std()[name], std, **EXACT)
    some = laplace.fit(net(), parts[:1], num_data=N, **options)
    first = laplace.fit(net(), parts[:1], temperature=7 / N, **options)
    torch.testing.assert_close(some.posterior().std(), first.posterior().std(), **EXACT)
    assert some.log_likelihood == pytest.approx(first.log_likelihood * N / 7)


def test_linearised_prediction() -> None:
    model = regression()
    found = laplace.fit(model, (X, Y), likelihood="regression", noise_variance=NOISE, prior_precision=PRIOR)
    q = found.posterior()
    n = 20_000
    p = predict(model, q, X[:5], samples=n, seed=1, chunk=5000, batch_size=3)
    variance = (ONES[:5] @ torch.linalg.inv(precision()) * ONES[:5]).sum(1, keepdim=True).expand(5, C)
    assert ((p.mean - model(X[:5])).abs() < 5 * (variance / n).sqrt()).all()
    assert ((p.variance - variance).abs() < 5 * variance * (2 / n) ** 0.5).all()
    # Of a net: its value at the means, and Jacobian times deviations.
    model = net()
    q = laplace.fit(model, (X, LABELS), names="[03].weight", prior_precision=PRIOR).posterior()
    draws = q.sample(4, seed=2)
    jacobian = jacrev(lambda params: functional_call(model, params, (X[:6],)))(
        {name: mean.detach() for name, mean in q.mean().items()}
    )
    expected = model(X[:6]).detach().expand(4, 6, 3).clone()
    for name, mean in q.mean().items():
        expected += torch.einsum("bcoi,soi->sbc", jacobian[name], draws[name] - mean)
    for options in ({}, {"how": "loop"}, {"chunk": 3}, {"batch_size": 4}):
        got = predict(model, q, X[:6], samples=4, seed=2, **options)
        torch.testing.assert_close(got.samples, expected, **EXACT)
    drawn = predict(model, q, X[:6], samples=4, seed=2, linearise=False).samples
    assert (drawn - expected).abs().max() > 0.1
    plain = BGD(model, std_init=0.5).posterior()  # of the model itself, unless told otherwise
    a, b = (predict(model, plain, X[:6], linearise=each).samples for each in (True, None))
    assert (a - b).abs().max() > 0.1


def test_a_head_that_some_batches_use_has_the_posterior_of_these() -> None:
    class Heads(nn.Module):
        """The first column says which a batch is for."""

        def __init__(self) -> None:
            super().__init__()
            self.heads = nn.ModuleList(nn.Linear(D, C, dtype=F64) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            return self.heads[int(x[0, 0])](x[:, 1:])

    model = Heads()
    rows = torch.tensor_split(torch.arange(N), [N // 3])
    batches = [
        (torch.cat([torch.full((len(each), 1), float(task), dtype=F64), X[each]], 1), Y[each])
        for task, each in enumerate(rows)
    ]
    for structure in ("kronecker", "diagonal"):
        std = (
            laplace.fit(
                model,
                batches,
                names="*",
                likelihood="regression",
                structure=structure,
                prior_precision=PRIOR,
                noise_variance=NOISE,
            )
            .posterior()
            .std()
        )
        for task, each in enumerate(rows):
            own = ONES[each].T @ ONES[each] / NOISE + PRIOR * torch.eye(D + 1, dtype=F64)
            own = torch.linalg.inv(own) if structure == "kronecker" else own.diagonal().reciprocal().diag()
            expected = own.diagonal().sqrt()
            for row, shift in zip(std[f"heads.{task}.weight"], std[f"heads.{task}.bias"], strict=True):
                torch.testing.assert_close(torch.cat([row, shift[None]]), expected, **EXACT)


@pytest.mark.parametrize("structure", ["diagonal", "kronecker"])
@pytest.mark.parametrize("pruned", [False, True])
def test_moments_are_those_of_the_dense_matrices(structure: str, pruned: bool) -> None:
    """diag(J Σ Jᵀ), with Σ by block from the leaf's own factors."""
    model = net()
    q = laplace.fit(model, (X, LABELS), names=ALL, structure=structure, prior_precision=PRIOR).posterior()
    q = prune(q, 0.3) if pruned else q
    mean = {name: each.detach() for name, each in q.mean().items()}
    jacobian = jacrev(lambda params: functional_call(model, params, (X[:6],)))(mean)
    expected = torch.zeros(6, 3, dtype=F64)
    for block, leaf in q.blocks.items():
        sigma = covariance(leaf) if isinstance(leaf, EigenGaussian) else leaf.std().flatten().square().diag()
        sigma = sigma * leaf.kept.flatten() * leaf.kept.flatten()[:, None]
        j = torch.cat([jacobian[name].reshape(6, 3, leaf.shape[0], -1) for name in q.tensors[block]], -1)
        j = j.flatten(2)
        expected += torch.einsum("bcp,pq,bcq->bc", j, sigma, j)
    got = laplace.moments(model, q, X[:6], batch_size=4)
    torch.testing.assert_close(got.variance, expected, **EXACT)
    torch.testing.assert_close(got.mean, functional_call(model, mean, (X[:6],)).detach(), **EXACT)


def test_moments_are_those_of_sampled_outputs() -> None:
    model, n = net(), 20_000
    q = laplace.fit(model, (X, LABELS), names="*", prior_precision=5.0).posterior()
    exact = laplace.moments(model, q, X[:5])
    p = predict(model, q, X[:5], samples=n, chunk=5000)
    assert ((p.mean - exact.mean).abs() < 5 * (exact.variance / n).sqrt()).all()
    assert ((p.variance - exact.variance).abs() < 5 * exact.variance * (2 / n) ** 0.5).all()


def test_probit_probabilities_are_near_the_average() -> None:
    """For two classes with opposite logits, MacKay's approximation errs by less than 0.02 anywhere."""
    mean, std = torch.meshgrid(
        torch.linspace(-4, 4, 9, dtype=F64), torch.linspace(0, 4, 5, dtype=F64), indexing="ij"
    )
    mean, variance = mean.flatten(), std.flatten().square()
    nodes = torch.linspace(-8, 8, 4001, dtype=F64)
    weights = torch.exp(-0.5 * nodes**2) / torch.exp(-0.5 * nodes**2).sum()
    average = (torch.sigmoid(mean[:, None] + variance.sqrt()[:, None] * nodes) * weights).sum(1)
    one = laplace.Moments(mean[:, None], variance[:, None])
    assert (torch.sigmoid(one.logits[:, 0]) - average).abs().max() < 0.02
    three = laplace.Moments(torch.randn(7, 3, dtype=F64), torch.zeros(7, 3, dtype=F64))
    torch.testing.assert_close(three.probs, three.mean.softmax(-1))


@pytest.mark.parametrize("structure", ["diagonal", "kronecker"])
def test_a_last_layer_has_the_moments_of_its_features(structure: str) -> None:
    model = net()
    q = laplace.fit(model, (X, LABELS), structure=structure, prior_precision=PRIOR).posterior()
    assert [*q.mean()] == ["3.weight"]
    leaf = q.block("3.weight")
    with torch.no_grad():
        features = model[:3](X[:6])
    sigma = covariance(leaf) if structure == "kronecker" else leaf.std().flatten().square().diag()
    blocks = sigma.view(3, 5, 3, 5).diagonal(dim1=0, dim2=2)  # of one output, [5, 5, 3]
    expected = torch.einsum("bi,ijc,bj->bc", features, blocks, features)
    torch.testing.assert_close(laplace.moments(model, q, X[:6]).variance, expected, **EXACT)
    # Linear in these weights, the model itself and its linearisation are the same.
    a, b = (predict(model, q, X[:6], linearise=each).samples for each in (True, False))
    torch.testing.assert_close(a, b, **EXACT)


def test_moments_take_what_predict_takes() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def forward(self, a: Tensor, b: Tensor, flag: str | None = None) -> dict[str, Tensor]:
            return {"scores": self.net(a + b)}

    model = Both()
    q = laplace.fit(model, ((X, 0 * X), LABELS), output="scores", prior_precision=PRIOR).posterior()
    inner = laplace.fit(model.net, (X, LABELS), prior_precision=PRIOR).posterior()
    expected = laplace.moments(model.net, inner, X)
    loader = DataLoader(TensorDataset(X, 0 * X, LABELS), batch_size=7)
    for x in ((X, 0 * X), {"a": X, "b": 0 * X, "flag": None}, loader):
        got = laplace.moments(model, q, x, output="scores")
        torch.testing.assert_close(got.mean, expected.mean, **EXACT)
        torch.testing.assert_close(got.variance, expected.variance, **EXACT)
    with pytest.raises(TypeError, match=r"moments\(\) needs a posterior of blocks, not a MCDropout"):
        laplace.moments(model, MCDropout(), X)
    pooled = nn.Sequential(nn.Linear(D, 3, dtype=F64), nn.Flatten(0))
    flat = laplace.fit(pooled[0], (X, LABELS), prior_precision=PRIOR).posterior()
    renamed = Factorised({("0.weight", "0.bias"): flat.block("weight+bias")})
    with pytest.raises(ValueError, match=r"outputs \[3\] for one input: moments\(\) needs one row"):
        laplace.moments(pooled, renamed, X)
