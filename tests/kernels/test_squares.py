"""Sums of examples' gradients and of their squares against a loop over examples in float64.

On a GPU, or without one in Triton's interpreter, where it is installed: ``TRITON_INTERPRET=1 pytest``.
"""

import importlib.util
import os
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if importlib.util.find_spec("triton") is None or not (INTERPRETED or torch.cuda.is_available()):
    pytest.skip("needs a CUDA GPU, or Triton with TRITON_INTERPRET=1", allow_module_level=True)

from torch.nn.grad import conv2d_weight  # noqa: E402

from posterity import kernels  # noqa: E402
from posterity.kernels import squares  # noqa: E402
from posterity.kernels.conv import Tile  # noqa: E402
from posterity.layers import LayerCall, norm  # noqa: E402
from posterity.layers.conv import Conv  # noqa: E402
from posterity.layers.linear import Linear  # noqa: E402
from posterity.layers.norm import BatchNorm  # noqa: E402

# Triton's interpreter makes ints of arrays of one element.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")
DEVICE = "cpu" if INTERPRETED else "cuda"
# The interpreter takes its time: the smallest tiles, so that small layers have many.
TILE = Tile(16, 16, 16, 4, 3) if INTERPRETED else None


class Layer(NamedTuple):
    batch: int
    size: tuple[int, int]
    channels: int
    outputs: int
    kernel: tuple[int, int]
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)
    samples: int = 1
    shared: bool = False


LAYERS = {
    "3x3": Layer(3, (5, 4), 3, 17, (3, 3), padding=(1, 1)),
    "4x4 pictures, 3 samples": Layer(4, (4, 4), 5, 4, (3, 3), padding=(1, 1), samples=3),
    "2x2 pictures": Layer(5, (2, 2), 18, 3, (3, 3), padding=(1, 1)),
    "a shared input": Layer(2, (4, 3), 3, 5, (3, 3), padding=(1, 1), samples=3, shared=True),
    "stride 2": Layer(3, (9, 8), 2, 4, (3, 3), (2, 2), (1, 1)),
    "1x1, stride 2": Layer(3, (5, 4), 17, 4, (1, 1), (2, 2)),
    "5x5, padding 2": Layer(2, (6, 5), 3, 6, (5, 5), padding=(2, 2)),
    "5x3, strides 3 and 1": Layer(2, (7, 5), 3, 1, (5, 3), (3, 1), (2, 0)),
    "dilation 2, stride 2": Layer(2, (6, 7), 2, 3, (3, 3), (2, 2), (2, 1), (2, 2), samples=2),
    "one place": Layer(3, (3, 2), 2, 3, (3, 2), samples=2),
    "one of everything": Layer(1, (1, 1), 1, 1, (1, 1)),
}


# Which neighbours are side by side in memory.
ORDERS = {
    "places": lambda x: x,
    "channels": lambda x: x.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3),
    "neither": lambda x: torch.stack([x, x], -1)[..., 0],
}


class Case(NamedTuple):
    x: Tensor
    grad: Tensor
    sums: Tensor
    squares: Tensor


def case(layer: Layer, dtype: torch.dtype = torch.float32, order: str = "places") -> Case:
    torch.manual_seed(0)
    own = 1 if layer.shared else layer.samples
    x = torch.randn(own, layer.batch, layer.channels, *layer.size).to(DEVICE, dtype)
    sizes = zip(layer.size, layer.kernel, *layer[5:8], strict=True)
    places = [(size + 2 * p - d * (taps - 1) - 1) // s + 1 for size, taps, s, p, d in sizes]
    grad = torch.randn(layer.samples, layer.batch, layer.outputs, *places).to(DEVICE, dtype)
    x, grad = (ORDERS[order](each) for each in (x, grad))
    x = x.expand(layer.samples, *x.shape[1:])
    shape = (layer.outputs, layer.channels, *layer.kernel)
    gradients = torch.stack(
        [
            torch.stack(
                [
                    conv2d_weight(one[None], shape, of[None], *layer[5:8])
                    for one, of in zip(*both, strict=True)
                ]
            )
            for both in zip(x.double(), grad.double(), strict=True)
        ]
    )
    return Case(x, grad, gradients.sum(1), gradients.square().sum((0, 1)))


def assert_near(found: tuple[Tensor, Tensor], expected: Case) -> None:
    """Tf32 cuts factors to 10 bits: each loses up to 2⁻¹⁰ of itself, a product 2⁻⁹, and its square 2⁻⁸."""
    for actual, true, cut in zip(found, expected[2:], (2**-9, 2**-8), strict=True):
        assert (actual.dtype, actual.shape) == (torch.float32, true.shape)
        assert (actual.double() - true).norm() <= (1e-6 if INTERPRETED else cut) * true.norm()


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_sums_and_squares(layer: Layer) -> None:
    c = case(layer)
    assert_near(squares.conv2d_squares(c.x, c.grad, layer.kernel, *layer[5:8], tile=TILE, splits=1), c)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", ["3x3", "a shared input", "5x3, strides 3 and 1", "one of everything"])
def test_any_order_in_memory(name: str, order: str) -> None:
    c = case(LAYERS[name], order=order)
    assert_near(
        squares.conv2d_squares(c.x, c.grad, LAYERS[name].kernel, *LAYERS[name][5:8], tile=TILE, splits=1), c
    )


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "layer",
    [
        Layer(3, (4, 5), 16, 16, (2, 3), (1, 2), (1, 1), samples=2),
        Layer(3, (6, 5), 32, 16, (1, 2), dilation=(1, 2)),
        LAYERS["stride 2"],
    ],
)
def test_halves_in_any_order(layer: Layer, dtype: torch.dtype, order: str) -> None:
    if INTERPRETED and dtype == torch.bfloat16:
        pytest.skip("the interpreter has no bfloat16")
    c = case(layer, dtype, order)
    assert_near(squares.conv2d_squares(c.x, c.grad, layer.kernel, *layer[5:8], tile=TILE, splits=1), c)


@pytest.mark.parametrize("splits", [2, 3, 5, None])
@pytest.mark.parametrize("name", ["3x3", "4x4 pictures, 3 samples", "a shared input"])
def test_examples_in_parts(name: str, splits: int | None) -> None:
    c = case(LAYERS[name])
    assert_near(
        squares.conv2d_squares(
            c.x, c.grad, LAYERS[name].kernel, padding=LAYERS[name].padding, tile=TILE, splits=splits
        ),
        c,
    )


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("name", ["3x3", "1x1, stride 2"])
def test_one_sample_needs_no_axis_of_samples(name: str, splits: int, order: str) -> None:
    layer = LAYERS[name]
    c = case(layer, order=order)
    found = squares.conv2d_squares(c.x[0], c.grad[0], layer.kernel, *layer[5:8], tile=TILE, splits=splits)
    assert_near(found, c._replace(sums=c.sums[0]))


@pytest.mark.parametrize("layer", [Layer(3, (4, 4), 3, 20, (3, 3)), Layer(2, (9, 9), 16, 80, (2, 2))])
def test_the_tiles_chosen_by_size(layer: Layer) -> None:
    c = case(layer)
    assert_near(squares.conv2d_squares(c.x, c.grad, layer.kernel), c)


@pytest.mark.skipif(INTERPRETED, reason="as large as networks have them: for a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("order", ["places", "channels"])
@pytest.mark.parametrize(
    "layer",
    [
        Layer(128, (32, 32), 3, 64, (3, 3), padding=(1, 1)),
        Layer(33, (32, 32), 64, 64, (3, 3), padding=(1, 1)),
        Layer(100, (16, 16), 64, 128, (3, 3), (2, 2), (1, 1), samples=2),
        Layer(128, (4, 4), 256, 256, (3, 3), padding=(1, 1)),
        Layer(128, (2, 2), 256, 512, (3, 3), padding=(1, 1)),
    ],
)
def test_large_layers(layer: Layer, order: str, dtype: torch.dtype) -> None:
    c = case(layer, dtype, order)
    assert_near(squares.conv2d_squares(c.x, c.grad, layer.kernel, *layer[5:8]), c)


def test_programs_are_as_many_as_run_at_once() -> None:
    assert squares._splits(programs=132, batch=128, depth=64, warps=16) == 1
    assert squares._splits(programs=33, batch=128, depth=64, warps=16) == 4
    assert squares._splits(programs=33, batch=128, depth=64, warps=8) == 8
    assert squares._splits(programs=1, batch=2, depth=64, warps=8) == 2
    assert squares._splits(programs=133, batch=128, depth=1024, warps=16) > 4
    assert squares._splits(programs=133, batch=128, depth=1, warps=16) == 1


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(
    ("shape", "shared"), [((2, 3, 5, 7), False), ((1, 2, 70, 9), False), ((3, 2, 2, 600), True)]
)
def test_squares_of_a_batch_normalisation(shape: tuple[int, ...], shared: bool, last: bool) -> None:
    torch.manual_seed(0)
    x, grad = 3 + torch.randn(2, *shape, device=DEVICE)
    mean, rstd = torch.rand(2, shape[0], shape[2], device=DEVICE)
    if shared:
        x, mean, rstd = x[:1].expand(shape), mean[0], rstd[0]
    if last:
        grad = grad.mT.contiguous().mT
    found = squares.batch_norm_squares(x, grad, mean, rstd).sum(1)
    mean, rstd = (each.double().view(-1, 1, shape[2], 1) for each in (mean, rstd))
    normal = (x.double() - mean) * rstd
    terms = torch.stack([normal * grad.double(), grad.double()]).sum(4)
    expected = terms.square().sum((1, 2))
    assert found.dtype == torch.float32
    assert ((found.double() - expected).norm(dim=1) <= 1e-6 * expected.norm(dim=1)).all()


@pytest.mark.parametrize("order", ["places", "channels", "neither", "turned"])
def test_a_batch_normalisation_of_one_sample_as_it_lies(order: str) -> None:
    torch.manual_seed(0)
    x, grad = 3 + torch.randn(2, 1, 3, 5, 4, 6, device=DEVICE)
    orders = {**ORDERS, "turned": lambda x: x.mT.contiguous().mT}
    x, mean, rstd = orders[order](x), *torch.rand(2, 5, device=DEVICE)
    found = squares.batch_norm_squares(x[0], grad[0], mean, rstd, axis=1)
    expected = squares.batch_norm_squares(x.flatten(3), grad.flatten(3), mean, rstd)
    assert found.shape == (2, 3, 5)
    torch.testing.assert_close(found, expected)
    back = squares.batch_norm_squares(grad[0], x[0], mean, rstd, axis=1)
    torch.testing.assert_close(back, squares.batch_norm_squares(grad.flatten(3), x.flatten(3), mean, rstd))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Layers take the kernel for float32, wherever it is; how often they did."""
    made: list[object] = []
    real = kernels.conv2d_squares

    def counted(*args: Tensor, **more: object) -> tuple[Tensor, Tensor]:
        made.append(args)
        return real(*args, **more)

    monkeypatch.setattr(kernels, "multiplies", lambda x: x.dtype == torch.float32)
    monkeypatch.setattr(kernels, "conv2d_squares", counted)
    return made


def called(call: LayerCall, samples: int, examples: int) -> LayerCall:
    """A call as it reports: of K samples and B examples."""
    call.samples, call.examples, call.grad_axis = samples, examples, None if samples == 1 else 0
    call.keep(torch.empty(0))
    return call


def test_convolutions_take_the_kernel_unless_they_are_in_groups(calls: list[object]) -> None:
    torch.manual_seed(0)
    x, grad = torch.randn(6, 4, 5, 6, device=DEVICE), torch.randn(6, 2, 3, 3, device=DEVICE)
    for groups, padding, taps, both in (
        (1, "same", (3, 3), (x[..., :3, :3], grad)),
        (1, 0, (3, 4), (x, grad)),
        (1, 0, (3, 4), (x[:3], grad)),  # inputs that samples share
        (1, 0, (4,), (x[..., 0, :], grad[..., 0, :])),
        (2, 0, (3, 4), (x, grad)),
    ):
        weight = torch.empty(2, 4 // groups, *taps)
        for samples in (1, 2) if len(both[0]) == 6 else (2,):
            layer = called(Conv(both[0], weight, None, 1, padding, 1, groups), samples, 6 // samples)
            calls.clear()
            found = layer.squares(*both, bias=True)
            assert len(calls) == int(groups == 1)
            expected = layer.squares(*(each.double() for each in both), bias=True)
            assert len(calls) == int(groups == 1)
            for actual, true in zip(found[:3], expected[:3], strict=True):
                torch.testing.assert_close(
                    actual.double(), true, rtol=1e-2, atol=1e-2 * float(true.abs().max())
                )


@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("kind", ["kept", "made again"])
def test_a_batch_normalisation_takes_the_kernel(
    kind: str, samples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    x, grad = 2 + torch.randn(2, 3 * samples, 4, 5, 6, device=DEVICE)
    rows = x.view(samples, 3, 4, 5, 6)
    mean, var = rows.mean((1, 3, 4)), rows.var((1, 3, 4), correction=0)
    layer = called(BatchNorm(x, None, None, training=True, eps=0.1), samples, 3)
    if kind != "made again":
        layer.statistics = mean, torch.rsqrt(var + 0.1)
    monkeypatch.setattr(norm, "_fuses", lambda x: x.dtype == torch.float32)
    found = layer.squares(x, grad, bias=True).by_example.sum(1)
    expected = layer.squares(x.double(), grad.double(), bias=True)
    torch.testing.assert_close(found.double(), torch.stack(expected[:2]), rtol=1e-5, atol=1e-5)


def test_a_linear_layer_over_words_is_a_convolution(calls: list[object]) -> None:
    torch.manual_seed(0)
    x, grad = torch.randn(6, 5, 18, device=DEVICE), torch.randn(6, 5, 4, device=DEVICE)
    weight = torch.empty(4, 18)
    for inputs, grads in ((x, grad), (x[:2], grad), (x[:, None], grad[:, None])):
        layer = called(Linear(inputs, weight), 6 // len(inputs) if len(inputs) < 6 else 1, 2)
        found = layer.squares(inputs, grads, bias=True)
        expected = layer.squares(inputs.double(), grads.double(), bias=True)
        for actual, true in zip(found[:2], expected[:2], strict=True):
            torch.testing.assert_close(actual.double(), true, rtol=1e-2, atol=1e-2 * float(true.abs().max()))
    assert len(calls) == 3
    called(Linear(x[:, 0], weight), 1, 6).squares(x[:, 0], grad[:, 0], bias=False)
    assert len(calls) == 3
