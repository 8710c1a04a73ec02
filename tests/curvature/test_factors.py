"""Kronecker factors against their definition, and against Fisher matrices where they are exact."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev
from torch.nn import functional as F

from curvature.problems import PROBLEMS, Attention, Problem
from posterity import buffers
from posterity.curvature import Factors, Kronecker, fisher
from posterity.layers import calls
from posterity.mc import stacked_pass

EXACT = {"rtol": 1e-9, "atol": 1e-12}


def naive_factors(
    problem: Problem, model: nn.Module, x: Tensor, target: Tensor, layer: nn.Module
) -> tuple[Tensor, Tensor]:
    """A and S of one layer, by hooks on it, one example after another: E[Σ a aᵀ], E[Σ g gᵀ] / T."""
    seen: list[tuple[Tensor, Tensor]] = []

    def hook(_: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
        seen.append((args[0], out))
        return out.clone()  # what follows works in place

    handle = layer.register_forward_hook(hook)
    a_sum, s_sum = 0.0, 0.0
    for one, goal in zip(x.split(1, problem.batch_dim), target.split(1), strict=True):
        seen.clear()
        loss = problem.loss(model, one, goal)
        ((inputs, out),) = seen
        (grad,) = torch.autograd.grad(loss, out)
        if isinstance(layer, nn.Conv2d):
            inputs = F.unfold(inputs, layer.kernel_size, layer.dilation, layer.padding, layer.stride)
            inputs, grad = inputs[0].T, grad[0].flatten(1).T
        a, g = inputs.reshape(-1, inputs.shape[-1]), grad.reshape(-1, grad.shape[-1])
        if layer.bias is not None:
            a = torch.cat([a, torch.ones_like(a[:, :1])], 1)
        a_sum, s_sum = a_sum + a.T @ a / len(x), s_sum + g.T @ g / len(g) / len(x)
    handle.remove()
    return a_sum.detach(), s_sum


@pytest.mark.parametrize(
    ("name", "layer", "at_once"),
    [
        ("mlp", "0", 100),
        ("mlp", "2", 1 << 24),
        ("linear over pictures", "1", 30),
        ("conv", "1", 1 << 24),
        ("conv, stride and dilation", "1", 500),
        ("conv 1x1", "1", 1 << 24),
    ],
)
def test_factors_are_those_of_a_loop_over_examples(
    name: str, layer: str, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = PROBLEMS[name]
    model, x, target = problem.build()
    monkeypatch.setitem(calls.AT_ONCE, "cpu", at_once)
    plain = torch.autograd.grad(problem.loss(model, x, target), list(model.parameters()))
    factors = Factors(model)
    with factors:
        problem.loss(model, x, target).backward()
    block = factors.mean(len(x)).kronecker[f"{layer}.weight"]
    A, S = naive_factors(problem, model, x, target, model.get_submodule(layer))
    torch.testing.assert_close(block.A, A, **EXACT)
    torch.testing.assert_close(block.S, S, **EXACT)
    for p, grad in zip(model.parameters(), plain, strict=True):
        torch.testing.assert_close(p.grad, grad, **EXACT)


def test_norms_embeddings_and_grouped_convolutions_have_squares() -> None:
    for name in ("BatchNorm2d", "LayerNorm over words", "GroupNorm", "embedding", "conv in groups"):
        problem = PROBLEMS[name]
        model, x, target = problem.build()
        with Factors(model) as factors:
            problem.loss(model, x, target).backward()
        blocks, diagonal = factors.mean()
        assert not blocks
        for key, value in problem.naive(model, x, target).items():
            torch.testing.assert_close(diagonal[key], value, **EXACT)


def test_blocks_of_attention() -> None:
    problem = PROBLEMS["attention, encoder and decoder"]
    model, x, target = problem.build()
    with Factors(model) as factors:
        problem.loss(model, x, target).backward()
    blocks = factors.mean().kronecker
    assert sorted(blocks) == [
        "attention.in_proj_weight[0:6]",
        "attention.in_proj_weight[6:18]",
        "attention.out_proj.weight",
    ]
    keys = blocks["attention.in_proj_weight[6:18]"]
    assert (keys.weight, keys.bias, keys.rows) == (
        "attention.in_proj_weight",
        "attention.in_proj_bias",
        (6, 18),
    )
    a = F.pad(x[:, :2].flatten(0, 1), (0, 1), value=1.0)
    torch.testing.assert_close(keys.A, a.T @ a / len(x), **EXACT)
    assert keys.S.shape == (12, 12)


@pytest.mark.parametrize("bias", [True, False])
def test_projections_of_other_widths_are_blocks_without_the_bias(bias: bool) -> None:
    """Each has some rows of one bias, which is no row of its own weight's."""
    problem = Problem(lambda: Attention("widths", True, False, bias), PROBLEMS["attention"].x)
    model, x, target = problem.build()
    with Factors(model) as factors:
        problem.loss(model, x, target).backward()
    blocks, diagonal = factors.mean()
    assert {name: (block.bias, block.rows) for name, block in blocks.items()} == {
        **{f"attention.{each}_proj_weight": (None, None) for each in "qkv"},
        "attention.out_proj.weight": ("attention.out_proj.bias" if bias else None, None),
    }
    keys = x[:, :2, :4].flatten(0, 1)
    torch.testing.assert_close(blocks["attention.k_proj_weight"].A, keys.T @ keys / len(x), **EXACT)
    assert blocks["attention.v_proj_weight"].A.shape == (5, 5)
    assert list(diagonal) == (["attention.in_proj_bias"] if bias else [])
    for name, value in diagonal.items():
        torch.testing.assert_close(value, problem.naive(model, x, target)[name], **EXACT)


@pytest.mark.parametrize("name", ["BERT", "GPT-2", "T5", "layers applied twice"])
def test_weights_that_several_layers_use_have_squares(name: str) -> None:
    problem = PROBLEMS[name]
    model, x, target = problem.build()
    with Factors(model) as factors:
        problem.loss(model, x, target).backward()
    blocks, diagonal = factors.mean()
    inside = {each for block in blocks.values() for each in (block.weight, block.bias)} - {None}
    assert inside.isdisjoint(diagonal)
    assert {*inside, *diagonal} == {name for name, _ in model.named_parameters()}
    assert {"words.weight", "wte.weight", "shared.weight", "conv.weight"} & diagonal.keys()
    for each, value in problem.naive(model, x, target).items():
        if each in diagonal:
            torch.testing.assert_close(diagonal[each], value, **EXACT)


def test_a_look_at_the_model_changes_no_block() -> None:
    """A pass that nobody differentiates is no second use."""
    problem, found = PROBLEMS["mlp"], []
    model, x, target = problem.build()
    for looks in (False, True):
        with Factors(model) as factors:
            for rows in (slice(0, 3), slice(3, 7)):
                loss = problem.loss(model, x[rows], target[rows]) * len(target[rows]) / 7
                if looks:
                    model(x[:3]).argmax(-1)
                loss.backward()
        blocks = factors.mean(7).kronecker
        assert blocks["0.weight"].bias == "0.bias"
        found.append({key: (block.A, block.S) for key, block in blocks.items()})
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("often", [(1, 2), (2, 1)])
def test_a_weight_with_squares_in_some_passes_only_is_refused(often: tuple[int, int]) -> None:
    layer, x = nn.Linear(3, 3), torch.randn(4, 3)
    with Factors(layer, strict=False) as factors:
        for times in often:
            out = x
            for _ in range(times):
                out = layer(out).tanh()
            out.square().mean().backward()
    assert factors.refused.keys() == {"weight", "bias"}
    assert not factors.sums
    assert not factors.blocks


def test_unwatched_bias_is_not_in_the_block() -> None:
    model, x = nn.Linear(3, 2), torch.randn(4, 3)
    for watched, size in ((("weight",), 3), (("weight", "bias"), 4)):
        with Factors({name: model.get_parameter(name) for name in watched}) as factors:
            model(x).square().mean().backward()
        block = factors.blocks["weight"]
        assert block.A.shape == (size, size)
        assert (block.bias is None) == (len(watched) == 1)
    with Factors({"bias": model.bias}) as factors:
        model(x).square().mean().backward()
    assert (list(factors.blocks), list(factors.sums)) == ([], ["bias"])


def test_backward_passes_add_up() -> None:
    problem = PROBLEMS["conv"]
    model, x, target = problem.build()
    with Factors(model) as whole:
        problem.loss(model, x, target).backward()
    with Factors(model) as parts:
        for rows in (slice(0, 3), slice(3, 5)):
            (problem.loss(model, x[rows], target[rows]) * len(target[rows]) / 5).backward()
    block, other = (each.mean(5).kronecker["1.weight"] for each in (whole, parts))
    torch.testing.assert_close(other.A, block.A, **EXACT)
    torch.testing.assert_close(other.S, block.S, **EXACT)


@pytest.mark.parametrize(
    "name",
    [
        "mlp",
        "linear over words",
        "conv",
        "conv on data",
        "transformer",
        "BERT",
        "GPT-2",
        "layers applied twice",
        "attention, own projections",
    ],
)
def test_a_stack_of_samples_is_as_many_plain_passes(name: str) -> None:
    problem = PROBLEMS[name]
    model, x, target = problem.build()
    drawn = {
        name: (p + 0.3 * torch.randn(3, *p.shape, dtype=p.dtype)).detach().requires_grad_()
        for name, p in model.named_parameters()
    }
    stack, loop = Factors(), Factors()
    with stack.watch(drawn, stacked=True):
        outputs, _ = stacked_pass(model, drawn, buffers.snapshot(model), (x,), {}, stacked=True)
        (outputs.flatten(2) - target).square().sum(2).mean(1).sum().backward()
    for k in range(3):
        one = {name: value[k].detach().requires_grad_() for name, value in drawn.items()}
        with loop.watch(one):
            problem.loss(lambda x, one=one: functional_call(model, one, (x,)), x, target).backward()
    (blocks, diagonal), (others, squares) = (each.mean(len(x), samples=3) for each in (stack, loop))
    assert (blocks.keys(), diagonal.keys()) == (others.keys(), squares.keys())
    for key, block in blocks.items():
        torch.testing.assert_close(block.A, others[key].A, **EXACT)
        torch.testing.assert_close(block.S, others[key].S, **EXACT)
    for key, value in diagonal.items():
        torch.testing.assert_close(value, squares[key], **EXACT)


def dense_fisher(model: nn.Module, x: Tensor, names: list[str]) -> Tensor:
    """Mean of Jᵀ J over examples, of [W | b] by rows."""
    params = {name: p.detach() for name, p in model.named_parameters()}
    total = 0.0
    for one in x:
        jac = jacrev(lambda p, one=one: functional_call(model, p, (one[None],))[0])(params)
        rows = torch.cat([jac[name].reshape(*jac[name].shape[:2], -1) for name in names], 2).flatten(1)
        total = total + rows.T @ rows / len(x)
    return total


def kron(block: Kronecker) -> Tensor:
    return torch.kron(block.S, block.A)


def test_one_linear_layer_is_exact() -> None:
    model, x = nn.Linear(4, 3).double(), torch.randn(6, 4).double()
    # The Hessian of a Gaussian likelihood is the same for all inputs: any batch.
    block = fisher(model, x, structure="kronecker", likelihood="regression").kronecker["weight"]
    torch.testing.assert_close(kron(block), dense_fisher(model, x, ["weight", "bias"]), **EXACT)
    # That of a softmax is not: one example.
    block = fisher(model, x[:1], structure="kronecker").kronecker["weight"]
    p = model(x[:1])[0].softmax(0)
    a = F.pad(x[:1], (0, 1), value=1.0)
    torch.testing.assert_close(kron(block), torch.kron(p.diag() - p.outer(p), a.T @ a), **EXACT)
    y = torch.tensor([2])
    block = fisher(model, x[:1], y, kind="empirical", structure="kronecker").kronecker["weight"]
    grads = torch.autograd.grad(F.cross_entropy(model(x[:1]), y), (model.weight, model.bias))
    flat = torch.cat([grads[0], grads[1][:, None]], 1).flatten()
    torch.testing.assert_close(kron(block), flat.outer(flat), **EXACT)


def test_deep_linear_nets_are_exact_with_a_gaussian_likelihood() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3, bias=False), nn.Linear(3, 2)).double()
    x = torch.randn(6, 4).double()
    blocks = fisher(model, x, structure="kronecker", likelihood="regression").kronecker
    for name, names in (
        ("0.weight", ["0.weight", "0.bias"]),
        ("1.weight", ["1.weight"]),
        ("2.weight", ["2.weight", "2.bias"]),
    ):
        torch.testing.assert_close(kron(blocks[name]), dense_fisher(model, x, names), **EXACT)


class Heads(nn.Module):
    """One for each task; the first column says which a batch is of."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(3, 2, bias=bias) for bias in (True, False))

    def forward(self, x: Tensor) -> Tensor:
        return self.heads[int(x[0, 0])](x[:, 1:])


def test_a_layer_that_some_examples_use_has_their_inputs_only() -> None:
    """The mean Fisher matrix over all examples is theirs, times the share that they are."""
    model = Heads().double()
    x = [torch.cat([torch.full((n, 1), float(task)), torch.randn(n, 3)], 1) for task, n in ((0, 6), (1, 2))]
    x = [each.double() for each in x]
    with Factors(model) as factors:
        for each in x:
            # Of a Gaussian likelihood, any of whose columns has the same factor of the outputs' gradients.
            (model(each) * torch.tensor([1.0, 2.0])).sum(1).sum().div(8).backward()
    found = factors.mean(8).kronecker
    for task, share in ((0, 6 / 8), (1, 2 / 8)):
        inputs = F.pad(x[task][:, 1:], (0, 1), value=1.0) if task == 0 else x[task][:, 1:]
        column = torch.tensor([1.0, 2.0]).double()
        expected = torch.kron(column.outer(column), inputs.T @ inputs / len(inputs)) * share
        torch.testing.assert_close(kron(found[f"heads.{task}.weight"]), expected, **EXACT)
        assert found[f"heads.{task}.weight"].examples == len(inputs)


def test_a_whole_weight_that_was_cast_to_what_it_is_is_whole() -> None:
    class Cast(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.weight.to(x.dtype).contiguous()[:], self.bias)

    model = Cast(3, 2)
    with Factors(model) as factors:
        model(torch.randn(4, 3)).square().mean().backward()
    assert [(key, block.rows, block.bias) for key, block in factors.blocks.items()] == [
        ("weight", None, "bias")
    ]
