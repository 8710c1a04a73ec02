"""Units are followed through operations: outputs stay those of the pruned net, and what can shrink does."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from compress.test_removal import masked, without
from posterity import DiagonalGaussian, Factorised
from posterity.compress import shrink


class Net(nn.Module):
    """Layers by name, and what is done with them."""

    def __init__(self, forward: Callable[..., Any], **layers: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.steps = forward
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, *inputs: Tensor) -> Any:
        return self.steps(self, *inputs)


def line(inputs: int, outputs: int, **kwargs: Any) -> nn.Linear:
    return nn.Linear(inputs, outputs, **kwargs)


def conv(inputs: int, outputs: int, kernel: int = 3, **kwargs: Any) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, **kwargs)


def attended(net: Any, x: Tensor) -> Tensor:
    q, k, v = (each(x).view(x.shape[0], 5, 4, 2).transpose(1, 2) for each in (net.q, net.k, net.v))
    return net.d(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape[0], 5, 8))


def multiplied(net: Any, x: Tensor) -> Tensor:
    q, k, v = (each(x).view(x.shape[0], 5, 4, 2).transpose(1, 2) for each in (net.q, net.k, net.v))
    return net.d((torch.softmax(q @ k.transpose(-1, -2), -1) @ v).transpose(1, 2).flatten(2))


def shuffled(net: Any, x: Tensor) -> Tensor:
    h = net.a(x).view(-1, 2, 4, 6, 6).transpose(1, 2).reshape(-1, 8, 6, 6)
    return net.d(net.b(h.relu()).mean((2, 3)))


def changed(net: Any, x: Tensor) -> Tensor:
    """A view is changed by the input, and so is what it is a view of."""
    h = net.a(x)
    h.unsqueeze(1).add_(x.sum(1)[:, None, None])
    return net.d(net.b(h.sigmoid()).sigmoid())


def frozen_trunk(net: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        h = net.a(x).relu()
    return net.d(net.b(h).relu())


def counted(net: Any, x: Tensor) -> Tensor:
    net.calls += 1
    return net.d(net.a(x).sigmoid()) * net.calls


def with_buffer() -> Net:
    net = Net(counted, a=line(6, 8), d=line(8, 3))
    net.register_buffer("calls", torch.zeros(()))
    return net


def selecting(places: list[int], width: int, times: int = 1) -> Callable[[], Net]:
    """Some entries of the second axis, by a buffer; some of them twice."""

    def build() -> Net:
        def forward(net: Any, x: Tensor) -> Tensor:
            h = net.a(x).sigmoid()
            return net.d(sum(torch.index_select(h.pow(each + 1), 1, net.places) for each in range(times)))

        net = Net(forward, a=line(6, 8), d=line(width, 3))
        net.register_buffer("places", torch.tensor(places))
        return net

    return build


def tail(before: Callable[[Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    """A convolution, something, a convolution without padding, a mean."""
    return lambda net, x: net.d(net.b(before(net.a(x).sigmoid())).relu().mean((2, 3)))


def between(**layers: nn.Module) -> Callable[[], Net]:
    """The same with a layer in the middle."""
    return lambda: Net(
        lambda net, x: net.d(net.b(net.n(net.a(x)).sigmoid()).relu().mean((2, 3))),
        **copy.deepcopy(dict(a=conv(3, 8), b=conv(8, 6, 2), d=line(6, 3), **layers)),
    )


def pooled(before: Callable[[Tensor], Tensor]) -> Callable[[], Net]:
    return lambda: Net(tail(before), a=conv(3, 8), b=conv(8, 6, 2), d=line(6, 3))


def vectors(forward: Callable[..., Any], *sizes: int) -> Callable[[], Net]:
    """One layer, something, another."""
    return lambda: Net(forward, a=line(6, sizes[0]), d=line(sizes[1], 3))


ROWS, WORDS = (6,), (5, 6)
IMAGES = (3, 8, 8)
# The net, shapes of its inputs, and the first parameter that must become smaller.
FOLLOWED: dict[str, tuple[Callable[[], Net], list[tuple[int, ...]], str]] = {
    "channels that multiply": (
        lambda: Net(tail(lambda h: h), a=conv(3, 8), b=conv(8, 16, groups=8), d=line(16, 3)),
        [IMAGES],
        "b.weight",
    ),
    "transposed convolution": (
        lambda: Net(
            lambda n, x: n.d(n.b(n.a(x).sigmoid()).relu()),
            a=conv(3, 8),
            b=nn.ConvTranspose2d(8, 6, 3, stride=2),
            d=conv(6, 3, 1),
        ),
        [IMAGES],
        "b.weight",
    ),
    "skip from the input": (
        lambda: Net(
            lambda n, x: n.d(torch.cat([x, n.b(torch.cat([x, n.a(x).relu()], 1)).relu()], 1)),
            a=conv(3, 8, padding=1),
            b=conv(11, 16, padding=1),
            d=conv(19, 2, 1),
        ),
        [IMAGES],
        "b.weight",
    ),
    "channel shuffle": (
        lambda: Net(shuffled, a=conv(3, 8), b=conv(8, 6), d=line(6, 3)),
        [IMAGES],
        "b.weight",
    ),
    "halves": (
        vectors(lambda n, x: n.d(torch.mul(*n.a(x).sigmoid().chunk(2, 1))), 16, 8),
        [ROWS],
        "a.weight",
    ),
    "parts": (
        vectors(lambda n, x: n.d(torch.cat([each.exp() for each in n.a(x).split([3, 9], 1)], 1)), 12, 12),
        [ROWS],
        "a.weight",
    ),
    "glu": (vectors(lambda n, x: n.d(F.glu(n.a(x))), 24, 12), [ROWS], "a.weight"),
    "a slice": (vectors(lambda n, x: n.d(n.a(x).sigmoid()[:, 2:-1]), 12, 9), [ROWS], "a.weight"),
    "a position": (vectors(lambda n, x: n.d(n.a(x).sigmoid()[:, -1]), 8, 8), [WORDS], "a.weight"),
    "shifted": (vectors(lambda n, x: n.d(n.a(x)[:, 1:] - n.a(x)[:, :-1]), 8, 8), [WORDS], "a.weight"),
    "squeeze and excitation": (
        lambda: Net(
            lambda n, x: n.d(
                (n.a(x) * n.u(n.v(n.a(x).mean((2, 3)))).sigmoid()[:, :, None, None]).mean((2, 3))
            ),
            a=conv(3, 8),
            v=line(8, 4),
            u=line(4, 8),
            d=line(8, 3),
        ),
        [IMAGES],
        "a.weight",
    ),
    "one gate for all": (
        lambda: Net(
            lambda n, x: n.d(n.a(x).sigmoid() * n.g(x).sigmoid()), a=line(6, 8), g=line(6, 1), d=line(8, 3)
        ),
        [ROWS],
        "a.weight",
    ),
    "gated units": (
        lambda: Net(
            lambda n, x: n.d(F.silu(n.g(x)) * n.a(x)),
            a=line(6, 8),
            g=line(6, 8, bias=False),
            d=line(8, 3),
        ),
        [ROWS],
        "a.weight",
    ),
    "instance norm": (between(n=nn.InstanceNorm2d(8, affine=True)), [IMAGES], "n.weight"),
    "batch norm of each batch": (
        between(n=nn.BatchNorm2d(8, track_running_stats=False)),
        [IMAGES],
        "n.weight",
    ),
    "group norm by channel": (between(n=nn.GroupNorm(8, 8)), [IMAGES], "n.weight"),
    "layer norm of positions": (between(n=nn.LayerNorm([6, 6])), [IMAGES], "a.weight"),
    "prelu": (between(n=nn.PReLU(8)), [IMAGES], "n.weight"),
    "one prelu": (between(n=nn.PReLU()), [IMAGES], "a.weight"),
    "zeros around": (pooled(lambda h: F.pad(h, (1, 1, 1, 1))), [IMAGES], "b.weight"),
    "averages with zeros": (pooled(lambda h: F.avg_pool2d(h, 3, 2, 1)), [IMAGES], "b.weight"),
    "largest": (pooled(lambda h: F.adaptive_max_pool2d(h, 3)), [IMAGES], "b.weight"),
    "bicubic": (
        pooled(lambda h: F.interpolate(h, scale_factor=2, mode="bicubic")),
        [IMAGES],
        "b.weight",
    ),
    "hardswish": (pooled(F.hardswish), [IMAGES], "b.weight"),
    "channels last, flat": (
        lambda: Net(
            lambda n, x: n.d(n.a(x).sigmoid().permute(0, 2, 3, 1).flatten(1)), a=conv(3, 8), d=line(288, 3)
        ),
        [IMAGES],
        "d.weight",
    ),
    "flat, then channels": (
        lambda: Net(
            lambda n, x: n.d(n.b(n.a(x).sigmoid().unflatten(1, (8, 3, 3))).mean((2, 3))),
            a=line(6, 72),
            b=conv(8, 5, 2),
            d=line(5, 3),
        ),
        [ROWS],
        "a.weight",
    ),
    "axes of size one": (
        lambda: Net(lambda n, x: n.d(n.a(x).sigmoid().squeeze((2, 3))), a=conv(3, 8, 8), d=line(8, 3)),
        [IMAGES],
        "a.weight",
    ),
    "product with a parameter": (
        lambda: Net(
            lambda n, x: n.d((n.a(x).sigmoid() @ n.w).sigmoid()),
            a=line(6, 8),
            w=nn.Parameter(torch.randn(8, 9)),
            d=line(9, 3),
        ),
        [ROWS],
        "w",
    ),
    "addmm": (
        lambda: Net(
            lambda n, x: n.d(torch.addmm(n.b, n.a(x).sigmoid(), n.w).sigmoid()),
            a=line(6, 8),
            w=nn.Parameter(torch.randn(8, 9)),
            b=nn.Parameter(torch.randn(9)),
            d=line(9, 3),
        ),
        [ROWS],
        "w",
    ),
    "one after another in time": (
        lambda: Net(
            lambda n, x: n.d(torch.cat([n.a(x).exp(), n.b(x).sigmoid()], 1)),
            a=line(6, 8),
            b=line(6, 8),
            d=line(8, 3),
        ),
        [WORDS],
        "d.weight",
    ),
    "stacked": (
        lambda: Net(
            lambda n, x: n.d(torch.stack([n.a(x).exp(), n.b(x).exp()], 1).amax(1)),
            a=line(6, 8),
            b=line(6, 8),
            d=line(8, 3),
        ),
        [ROWS],
        "d.weight",
    ),
    "repeated in time": (
        lambda: Net(
            lambda n, x: n.d(n.a(x).sigmoid()[:, None].expand(-1, 5, 8).mean(1)), a=line(6, 8), d=line(8, 3)
        ),
        [ROWS],
        "d.weight",
    ),
    "sum over a batch": (
        vectors(lambda n, x: n.d(n.a(x).sigmoid().sum(0, keepdim=True)), 8, 8),
        [ROWS],
        "a.weight",
    ),
    "all of a batch": (vectors(lambda n, x: n.d(n.a(x).sigmoid().mean(0)), 8, 8), [ROWS], "a.weight"),
    "times the size of a batch": (
        vectors(lambda n, x: n.d(n.a(x).sigmoid() * x.shape[0]), 8, 8),
        [ROWS],
        "a.weight",
    ),
    "a bias that is used elsewhere": (
        lambda: Net(
            lambda n, x: n.d(n.b(n.a(x).sigmoid()).sigmoid() + n.b.bias),
            a=line(6, 8),
            b=line(8, 8),
            d=line(8, 3),
        ),
        [ROWS],
        "a.weight",
    ),
    "words as rows": (
        lambda: Net(
            lambda n, x: n.d(F.linear(n.b(n.e((x > 0).long()).mean(1)), n.e.weight).sigmoid()),
            e=nn.Embedding(11, 6),
            b=line(6, 6),
            d=line(11, 3),
        ),
        [(5,)],
        "b.weight",
    ),
    "frozen trunk": (
        lambda: Net(frozen_trunk, a=line(6, 8), b=line(8, 9), d=line(9, 3)),
        [ROWS],
        "b.weight",
    ),
    "a buffer that counts": (with_buffer, [ROWS], "a.weight"),
    "selected": (selecting([3, 0, 0, 5, 7, 1], 6), [ROWS], "a.weight"),
    "selected in time": (selecting([4, 1], 8), [WORDS], "a.weight"),
    "two inputs": (
        lambda: Net(lambda n, x, s: n.d(n.a(x).sigmoid()) * s, a=line(6, 8), d=line(8, 3)),
        [ROWS, ()],
        "a.weight",
    ),
}
# The net, shapes of its inputs, a parameter that stays, and why.
WHOLE: dict[str, tuple[Callable[[], Net], list[tuple[int, ...]], str, str]] = {
    "all of a weight": (
        vectors(lambda n, x: n.d(n.a(x).sigmoid()) + n.a.weight.mean(), 8, 8),
        [ROWS],
        "a.weight",
        "mean takes all of it",
    ),
    "a table that is computed": (
        lambda: Net(
            lambda n, x: n.d(F.embedding((x > 0).long(), n.h(n.t)).mean(1)),
            h=line(4, 24),
            t=nn.Parameter(torch.randn(5, 4)),
            d=line(24, 3),
        ),
        [(5,)],
        "h.weight",
        "the weight of embedding is computed, not a parameter",
    ),
    "changed in place": (
        lambda: Net(changed, a=line(6, 8), b=line(8, 8), d=line(8, 3)),
        [ROWS],
        "a.weight",
        "add_ changes it in place",
    ),
    "every other": (
        vectors(lambda n, x: n.d(n.a(x)[:, ::2]), 8, 4),
        [ROWS],
        "a.weight",
        "slice takes some of its units",
    ),
    "selected twice": (
        selecting([3, 0, 0, 5, 7, 1], 6, times=2),
        [ROWS],
        "a.weight",
        "index_select takes some of its units",
    ),
    "from back to front": (
        vectors(lambda n, x: n.d(n.a(x).flip(1)), 8, 8),
        [ROWS],
        "a.weight",
        "flip is over its units",
    ),
    "recurrent": (
        lambda: Net(
            lambda n, x: n.d(n.r(n.a(x))[0]), a=line(6, 8), r=nn.GRU(8, 7, batch_first=True), d=line(7, 3)
        ),
        [WORDS],
        "d.weight",
        "gru is not followed",
    ),
}


def inputs(shapes: list[tuple[int, ...]], batch: int) -> tuple[Tensor, ...]:
    """The second and later ones may be without a batch."""
    return tuple(
        torch.randn(batch, *shape, dtype=torch.double) if shape else torch.tensor([1.5]) for shape in shapes
    )


def check(model: Net, posterior: Factorised, small: nn.Module, shapes: list[tuple[int, ...]]) -> None:
    for batch in (1, 3, 5):
        x = inputs(shapes, batch)
        found = copy.deepcopy(small)(*x)
        torch.testing.assert_close(found, masked(model, posterior)(*x), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("case", FOLLOWED)
@pytest.mark.parametrize("examples", [1, 3])
def test_units_are_followed(case: str, examples: int) -> None:
    build, shapes, smaller = FOLLOWED[case]
    torch.manual_seed(examples)
    model = build().double()
    for p in model.parameters():
        if p.dim() == 1:
            nn.init.normal_(p)
    posterior = without(model, torch.Generator().manual_seed(3))
    small = shrink(model, posterior, inputs(shapes, examples))
    check(model, posterior, small.module, shapes)
    assert smaller in small.shapes
    assert case == "frozen trunk" or not small.dense


@pytest.mark.parametrize("case", WHOLE)
def test_what_must_stay_is_named(case: str) -> None:
    build, shapes, name, reason = WHOLE[case]
    torch.manual_seed(0)
    model = build().double()
    posterior = without(model, torch.Generator().manual_seed(1))
    small = shrink(model, posterior, inputs(shapes, 1))
    check(model, posterior, small.module, shapes)
    assert reason in small.dense[name]


@pytest.mark.parametrize("steps", [attended, multiplied])
def test_whole_heads_are_removed(steps: Callable[..., Tensor]) -> None:
    """One that nothing uses, and one whose values are zero; a query alone is not enough."""
    model = Net(steps, q=line(6, 8), k=line(6, 8), v=line(6, 8), d=line(8, 3)).double()
    keep = {name: torch.ones_like(p, dtype=torch.bool) for name, p in model.named_parameters()}
    keep["d.weight"][:, :2] = keep["v.weight"][4:6] = keep["v.bias"][4:6] = keep["q.weight"][6:] = keep[
        "q.bias"
    ][6:] = False
    leaves = {name: DiagonalGaussian(p.detach(), 0.1) for name, p in model.named_parameters()}
    posterior = Factorised({name: leaf.pruned(keep[name]) for name, leaf in leaves.items()})
    small = shrink(model, posterior, torch.randn(2, 5, 6).double())
    check(model, posterior, small.module, [WORDS])
    assert small.shapes["k.weight"] == ((8, 6), (4, 6))
    assert small.shapes["d.weight"] == ((3, 8), (3, 4))


def test_units_changed_in_place_are_not_constant() -> None:
    """They look so in the layer, and in an example of one input."""
    model = Net(changed, a=line(6, 8), b=line(8, 8), d=line(8, 3)).double()
    keep = {name: torch.ones_like(p, dtype=torch.bool) for name, p in model.named_parameters()}
    keep["a.weight"][:4] = keep["b.weight"][:3, 4:] = False
    leaves = {name: DiagonalGaussian(p.detach(), 0.1) for name, p in model.named_parameters()}
    posterior = Factorised({name: leaf.pruned(keep[name]) for name, leaf in leaves.items()})
    small = shrink(model, posterior, torch.randn(1, 6).double())
    check(model, posterior, small.module, [ROWS])


def test_a_gate_that_is_always_zero_removes_its_unit() -> None:
    steps = lambda n, x: n.d(F.silu(n.g(x)) * n.a(x))  # noqa: E731
    model = Net(steps, a=line(6, 8), g=line(6, 8, bias=False), d=line(8, 3)).double()
    keep = torch.ones(8, 6, dtype=torch.bool)
    keep[2:5] = False
    leaves = {name: DiagonalGaussian(p.detach(), 0.1) for name, p in model.named_parameters()}
    posterior = Factorised({**leaves, "g.weight": leaves["g.weight"].pruned(keep)})
    small = shrink(model, posterior, torch.randn(2, 6).double())
    check(model, posterior, small.module, [ROWS])
    assert small.shapes["a.weight"] == ((8, 6), (5, 6))


def test_constants_that_differ_slightly_from_place_to_place_stay() -> None:
    places = nn.Parameter(1e-7 * torch.randn(5, 1))
    model = Net(lambda n, x: n.d(n.a(x).exp() + n.p).sum(1), a=line(6, 8), d=line(8, 3), p=places).double()
    posterior = without(model, torch.Generator().manual_seed(1))
    small = shrink(model, posterior, torch.randn(2, 5, 6).double())
    check(model, posterior, small.module, [WORDS])


def test_a_dead_branch_keeps_one_unit() -> None:
    model = Net(
        lambda n, x: n.d(n.a(x) + n.c(n.b(n.a(x)).relu())),
        a=line(6, 8),
        b=line(8, 9),
        c=line(9, 8),
        d=line(8, 3),
    ).double()
    leaves = {name: DiagonalGaussian(p.detach(), 0.1) for name, p in model.named_parameters()}
    leaves["c.weight"] = leaves["c.weight"].pruned(torch.zeros(8, 9, dtype=torch.bool))
    posterior = Factorised(leaves)
    small = shrink(model, posterior, torch.randn(2, 6).double())
    check(model, posterior, small.module, [ROWS])
    assert small.shapes["b.weight"] == ((9, 8), (1, 8))
    assert small.shapes["c.weight"] == ((8, 9), (8, 1))
    assert small.dense["b.weight"] == "a layer needs one unit"


def test_size_read_as_a_number_is_fixed() -> None:
    model = vectors(lambda n, x: n.d(n.a(x).sigmoid() * torch.full((1,), float(x.shape[0]))), 8, 8)()
    posterior = without(model, torch.Generator().manual_seed(1))
    for size in (1, 3):
        small = shrink(model, posterior, torch.randn(size, 6)).module
        x = torch.randn(size, 6)
        torch.testing.assert_close(small(x), masked(model, posterior)(x))
        with pytest.raises(
            ValueError, match=f"this net takes only inputs of {size} along the first axis, not 5"
        ):
            small(torch.randn(5, 6))


def test_random_outputs_are_refused() -> None:
    model = vectors(lambda n, x: n.d(F.dropout(n.a(x).sigmoid(), 0.5, True)), 8, 8)()
    posterior = without(model, torch.Generator().manual_seed(1))
    with pytest.raises(
        ValueError, match=r"the model's outputs differ by .* from call to call, so that no smaller"
    ):
        shrink(model, posterior, torch.randn(3, 6))


def test_differences_in_half_precision_are_seen() -> None:
    from posterity.compress.trace import compare

    x = torch.ones(3, dtype=torch.bfloat16)
    compare(x, x + 0.01)
    with pytest.raises(RuntimeError, match=r"the smaller net's outputs are off by 0\.5"):
        compare(x, x + 0.5)
