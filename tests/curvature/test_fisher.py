"""Exact Fisher matrices against J^T H J, sampled ones against the exact."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev
from torch.nn import functional as F

from posterity.curvature import fisher

EXACT = {"rtol": 1e-9, "atol": 1e-12}


def problem() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Conv2d(1, 2, 2), nn.GroupNorm(1, 2), nn.Tanh(), nn.Flatten(), nn.Linear(8, 3), nn.LayerNorm(3)
    )
    return model.double(), torch.randn(5, 1, 3, 3).double()


def explicit(model: nn.Module, x: Tensor, likelihood: str) -> dict[str, Tensor]:
    """The mean of diag(Jᵀ H J), by Jacobians and Hessians."""
    params = {name: p.detach() for name, p in model.named_parameters()}
    totals = {name: torch.zeros_like(p) for name, p in params.items()}
    for one in x:

        def outputs(params: dict[str, Tensor], one: Tensor = one) -> Tensor:
            return functional_call(model, params, (one[None],))[0]

        f = outputs(params)
        hessian = torch.eye(len(f), dtype=f.dtype)
        if likelihood == "classification":
            hessian = torch.autograd.functional.hessian(
                lambda f: F.cross_entropy(f[None], torch.tensor([1])), f
            )
        for name, jac in jacrev(outputs)(params).items():
            totals[name] += torch.einsum("i...,ij,j...->...", jac, hessian, jac) / len(x)
    return totals


@pytest.mark.parametrize("likelihood", ["classification", "regression"])
def test_the_exact_diagonal(likelihood: str) -> None:
    model, x = problem()
    found = fisher(model, x, likelihood=likelihood)
    assert not found.kronecker
    expected = explicit(model, x, likelihood)
    assert found.diagonal.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found.diagonal[name], value, **EXACT)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("likelihood", ["classification", "regression"])
def test_the_empirical_diagonal(likelihood: str) -> None:
    model, x = problem()
    y = torch.tensor([0, 1, 2, 1, 0]) if likelihood == "classification" else torch.randn(5, 3).double()
    found = fisher(model, x, y, kind="empirical", likelihood=likelihood).diagonal
    for name, p in model.named_parameters():
        total = 0.0
        for i in range(5):
            out = model(x[i : i + 1])
            nll = (
                F.cross_entropy(out, y[i : i + 1])
                if likelihood == "classification"
                else 0.5 * F.mse_loss(out, y[i : i + 1], reduction="sum")
            )
            total = total + torch.autograd.grad(nll, p)[0].square() / 5
        torch.testing.assert_close(found[name], total, **EXACT)


@pytest.mark.parametrize("likelihood", ["classification", "regression"])
@pytest.mark.parametrize("structure", ["diagonal", "kronecker"])
def test_sampled_labels_have_the_exact_fisher_as_their_mean(likelihood: str, structure: str) -> None:
    model, x = problem()

    def numbers(**options: object) -> Tensor:
        blocks, diagonal = fisher(model, x, likelihood=likelihood, structure=structure, **options)
        return torch.cat(
            [*(v.flatten() for v in diagonal.values()), *(b.S.flatten() for b in blocks.values())]
        )

    count = 80
    draws = torch.stack([numbers(kind="mc", seed=0, step=step) for step in range(count)])
    exact = numbers()
    error = draws.std(0) / math.sqrt(count)
    assert (error > 0).all()
    assert ((draws.mean(0) - exact).abs() < 5 * error).all()


def test_draws_are_averaged_and_do_not_use_torch_generators() -> None:
    model, x = problem()
    before = torch.get_rng_state()
    # Eight labels for each example: a single one is the same in 4 % of two draws.
    one = fisher(model, x, kind="mc", draws=8, seed=1).diagonal["4.weight"]
    assert torch.equal(one, fisher(model, x, kind="mc", draws=8, seed=1).diagonal["4.weight"])
    assert not torch.equal(one, fisher(model, x, kind="mc", draws=8, seed=1, step=1).diagonal["4.weight"])
    assert not torch.equal(*(fisher(model, x, kind="mc", draws=8).diagonal["4.weight"] for _ in range(2)))
    assert torch.equal(before, torch.get_rng_state())
    exact = fisher(model, x).diagonal["4.weight"]
    many = fisher(model, x, kind="mc", draws=32, seed=0).diagonal["4.weight"]
    few = torch.stack([fisher(model, x, kind="mc", seed=seed).diagonal["4.weight"] for seed in range(1, 5)])
    assert (many - exact).norm() < (few - exact).flatten(1).norm(dim=1).mean() / 2


def test_kronecker_factors_are_counted_once_for_all_columns() -> None:
    model, x = problem()
    exact, sampled = (
        fisher(model, x, kind=kind, structure="kronecker").kronecker for kind in ("exact", "mc")
    )
    assert sorted(exact) == ["0.weight", "4.weight"]
    for name, block in exact.items():
        torch.testing.assert_close(sampled[name].A, block.A, **EXACT)
    hidden = F.pad(model[:4](x), (0, 1), value=1.0)
    torch.testing.assert_close(exact["4.weight"].A, hidden.T @ hidden / 5, **EXACT)


def test_parameters_are_chosen_by_name() -> None:
    model, x = problem()
    assert sorted(fisher(model, x, names="4.*").diagonal) == ["4.bias", "4.weight"]
    with pytest.raises(ValueError, match="no parameter is named like 'head'"):
        fisher(model, x, names="head")


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(3, 3), nn.Parameter(torch.rand(3))
        self.head = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(self.layer(x).tanh()) * self.scale)


@pytest.mark.parametrize("structure", ["diagonal", "kronecker"])
def test_the_fallback_is_exact(structure: str) -> None:
    model, x = Tied().double(), torch.randn(5, 3).double()
    with pytest.raises(RuntimeError, match="'scale' is used by an operation that is not a known layer"):
        fisher(model, x)
    blocks, diagonal = fisher(model, x, structure=structure, fallback="vmap", chunk=2)
    expected = explicit(model, x, "classification")
    assert sorted(blocks) == ([] if structure == "diagonal" else ["head.weight"])
    assert {"layer.weight", "layer.bias", "scale"} <= diagonal.keys()
    for name, value in diagonal.items():
        torch.testing.assert_close(value, expected[name], **EXACT)


class Recurrent(nn.Module):
    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.words = 1 if batch_first else 0
        self.read, self.turn = nn.Linear(3, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros_like(x.select(self.words, 0)[:, :2])
        for word in x.unbind(self.words):
            state = (self.read(word) + self.turn(state)).tanh()
        return state


def test_the_fallback_where_nothing_else_is() -> None:
    model, x = nn.PReLU(3).double(), torch.randn(5, 3).double()
    with pytest.raises(RuntimeError, match="'weight' is used by an operation that is not a known layer"):
        fisher(model, x)
    found = fisher(model, x, fallback="vmap").diagonal["weight"]
    torch.testing.assert_close(found, explicit(model, x, "classification")["weight"], **EXACT)


def test_the_fallback_with_words_first() -> None:
    last = Recurrent(batch_first=False).double()
    first = Recurrent(batch_first=True).double()
    first.load_state_dict(last.state_dict())
    x = torch.randn(4, 5, 3).double()
    expected = explicit(first, x.movedim(0, 1), "classification")
    for model, data, batch_dim in ((last, x, 1), (first, x.movedim(0, 1), 0)):
        found = fisher(model, data, batch_dim=batch_dim, fallback="vmap").diagonal
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, **EXACT)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "true"}, "kind must be one of 'empirical', 'mc', 'exact', not 'true'"),
        ({"structure": "full"}, "structure must be one of 'diagonal', 'kronecker', not 'full'"),
        ({"likelihood": "poisson"}, "likelihood must be one of"),
        ({"fallback": "loop"}, "fallback must be one of None, 'vmap', not 'loop'"),
        ({"draws": 0}, "draws and chunk must be at least 1, not 0 and 32"),
        ({"kind": "empirical"}, "y is needed for kind='empirical'"),
        ({"y": torch.zeros(5)}, "unused by the other kinds: pass it for that kind only"),
        (
            {"kind": "empirical", "y": torch.zeros(5, 3)},
            r"y has shape \[5, 3\], outputs \[5, 3\]: give labels",
        ),
        (
            {"kind": "empirical", "y": torch.zeros(5), "likelihood": "regression"},
            r"y has shape \[5\], outputs \[5, 3\]: give labels \[B\], one class for each",
        ),
    ],
)
def test_misuse(options: dict[str, object], message: str) -> None:
    model, x = problem()
    with pytest.raises(ValueError, match=message):
        fisher(model, x, **options)


@pytest.mark.parametrize("shape", [(4, 2, 3), (4, 1)])
def test_outputs_are_a_matrix(shape: tuple[int, ...]) -> None:
    with pytest.raises(
        ValueError, match=r"the model must give outputs \[B, C\], for two classes or more, not"
    ):
        fisher(nn.Linear(3, shape[-1]), torch.randn(*shape[:-1], 3))


def test_regression_may_have_one_output() -> None:
    model, x = nn.Linear(3, 1), torch.randn(4, 3)
    found = fisher(model, x, likelihood="regression").diagonal
    torch.testing.assert_close(found["weight"][0], x.square().mean(0))


@pytest.mark.parametrize("kind", ["exact", "mc"])
def test_bf16_autocast(kind: str) -> None:
    model, x = problem()
    model, x = model[:5].float(), x.float()  # LayerNorm's outputs would be in single precision
    exact = fisher(model, x, kind=kind, seed=0).diagonal
    with torch.autocast("cpu", torch.bfloat16):
        assert model(x).dtype == torch.bfloat16
        found = fisher(model, x, kind=kind, seed=0).diagonal
    for name, value in exact.items():
        assert (found[name] - value).norm() < 0.1 * value.norm()


def test_positions_folded_into_the_batch_are_refused() -> None:
    class Folded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x.flatten(0, 1)).view(len(x), -1, 3).mean(1)

    with pytest.raises((RuntimeError, ValueError), match="60"):
        fisher(Folded(), torch.randn(10, 6, 4))


def test_what_has_no_gradients_is_said_so() -> None:
    model, x = nn.Linear(4, 3), torch.randn(5, 4)
    with torch.inference_mode(), pytest.raises(RuntimeError, match=r"outside torch.inference_mode\(\)"):
        fisher(model, x)
    with pytest.raises(ValueError, match="names= matches no parameter"):
        fisher(model, x, names=[])
    with pytest.raises(ValueError, match="no parameter of the model requires a gradient"):
        fisher(model.requires_grad_(False), x)


def test_outputs_and_labels_are_looked_at() -> None:
    class Dict(nn.Linear):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"scores": super().forward(x)}

    x = torch.randn(5, 4)
    with pytest.raises(TypeError, match=r"the model must return one tensor, not dict: pick one by output="):
        fisher(Dict(4, 3), x)
    for y in (torch.full((5,), 3), torch.full((5,), -1), torch.zeros(5)):
        with pytest.raises(ValueError, match="labels must be whole numbers from 0 to 2"):
            fisher(nn.Linear(4, 3), x, y, kind="empirical")


def test_the_fallback_holds_no_graph() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.inner(self.inner(x).tanh()))

    found = fisher(Twice(), torch.randn(5, 4), fallback="vmap").diagonal
    assert {name: value.requires_grad for name, value in found.items()} == dict.fromkeys(found, False)
    assert sorted(found) == ["head.bias", "head.weight", "inner.bias", "inner.weight"]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32])
def test_labels_of_any_whole_number_type(dtype: torch.dtype) -> None:
    model, x = problem()
    y = torch.arange(len(x)) % 3
    found, expected = (fisher(model, x, labels, kind="empirical").diagonal for labels in (y.to(dtype), y))
    assert all(torch.equal(found[name], expected[name]) for name in expected)
