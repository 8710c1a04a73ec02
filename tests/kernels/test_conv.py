"""Stacked convolutions against F.conv2d and autograd in float64.

On a GPU, or without one in Triton's interpreter, where it is installed: ``TRITON_INTERPRET=1 pytest``.
"""

import importlib.util
import os
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if importlib.util.find_spec("triton") is None or not (INTERPRETED or torch.cuda.is_available()):
    pytest.skip("needs a CUDA GPU, or Triton with TRITON_INTERPRET=1", allow_module_level=True)

from posterity.kernels import conv  # noqa: E402

# Triton's interpreter makes ints of arrays of one element.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")
DEVICE = "cpu" if INTERPRETED else "cuda"
# The interpreter takes its time: the smallest tiles, so that small layers have many.
TILE = conv.Tile(16, 16, 16, 4, 3) if INTERPRETED else None
K = 2


class Layer(NamedTuple):
    batch: int
    size: tuple[int, int]
    channels: int
    outputs: int
    kernel: tuple[int, int]
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)
    shared: bool = False
    bias: bool = True


LAYERS = {
    "3x3": Layer(3, (3, 2), 18, 17, (3, 3), padding=(1, 1)),
    "2x2 images": Layer(17, (2, 2), 4, 3, (3, 3), padding=(1, 1)),
    "shared input": Layer(3, (4, 3), 3, 5, (3, 3), padding=(1, 1), shared=True, bias=False),
    "stride 2": Layer(3, (5, 4), 5, 4, (3, 3), (2, 2), (1, 1)),
    "1x1, stride 2": Layer(3, (4, 3), 17, 4, (1, 1), (2, 2)),
    "5x3, strides 3 and 1": Layer(2, (7, 5), 3, 1, (5, 3), (3, 1), (2, 0), bias=False),
    "dilation 2, stride 2": Layer(2, (6, 7), 2, 3, (3, 3), (2, 2), (2, 1), (2, 2), shared=True),
    "no padding, dilation 2": Layer(2, (5, 6), 1, 2, (3, 2), dilation=(2, 1)),
    "stride beyond the image": Layer(2, (1, 2), 2, 2, (1, 1), (3, 3)),
}


class Case(NamedTuple):
    x: Tensor
    weight: Tensor
    bias: Tensor | None
    grad: Tensor
    out: Tensor
    input_grad: Tensor
    weight_grad: Tensor


def case(layer: Layer, dtype: torch.dtype = torch.float32) -> Case:
    torch.manual_seed(0)
    own = () if layer.shared else (K,)
    x = torch.randn(*own, layer.batch, *layer.size, layer.channels).to(DEVICE, dtype)
    weight = torch.randn(K, layer.outputs, layer.channels, *layer.kernel).to(DEVICE, dtype)
    bias = torch.randn(K, layer.outputs).to(DEVICE, dtype) if layer.bias else None
    xs = x.double().expand(K, *x.shape[-4:]).clone().requires_grad_()
    ws = weight.double().requires_grad_()
    outs = [
        F.conv2d(xs[k].permute(0, 3, 1, 2), ws[k], None if bias is None else bias[k].double(), *layer[5:8])
        for k in range(K)
    ]
    out = torch.stack(outs).permute(0, 1, 3, 4, 2)
    grad = torch.randn(out.shape).to(DEVICE, dtype)
    input_grad, weight_grad = torch.autograd.grad(out, [xs, ws], grad.double())
    return Case(x, weight, bias, grad, out, input_grad, weight_grad)


def assert_near(actual: Tensor, expected: Tensor) -> None:
    """Within the rounding of the factors, 2⁻¹⁰ each in tf32; the interpreter multiplies in float32."""
    error = 1e-6 if INTERPRETED else {torch.float32: 2e-3, torch.bfloat16: 1e-2}[actual.dtype]
    assert actual.shape == expected.shape
    assert (actual.double() - expected).norm() <= error * expected.norm()


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_the_output_and_both_gradients(layer: Layer) -> None:
    c = case(layer)
    rest = layer[5:8]
    assert_near(conv.conv2d(c.x, c.weight, c.bias, *rest, tile=TILE), c.out)
    assert_near(conv.conv2d_input_grad(c.grad, c.weight, layer.size, *rest, tile=TILE), c.input_grad)
    assert_near(conv.conv2d_weight_grad(c.x, c.grad, layer.kernel, *rest, tile=TILE), c.weight_grad)


@pytest.mark.parametrize("copy", [False, True])
@pytest.mark.parametrize("splits", [1, 3])
def test_a_weight_gradient_in_parts_and_of_either_layout(splits: int, copy: bool) -> None:
    layer = LAYERS["2x2 images"]
    c = case(layer)
    grad = conv.conv2d_weight_grad(
        c.x, c.grad, layer.kernel, *layer[5:8], tile=TILE, splits=splits, copy=copy
    )
    assert_near(grad, c.weight_grad)


@pytest.mark.parametrize("dtype", [torch.float32] if INTERPRETED else [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("channels", [3, 16])
def test_the_tiles_chosen_by_size(dtype: torch.dtype, channels: int) -> None:
    layer = Layer(3, (2, 2), channels, 20, (2, 2), padding=(1, 0))
    c = case(layer, dtype)
    rest = layer[5:8]
    assert_near(conv.conv2d(c.x, c.weight, c.bias, *rest), c.out)
    assert_near(conv.conv2d_input_grad(c.grad, c.weight, layer.size, *rest), c.input_grad)
    assert_near(conv.conv2d_weight_grad(c.x, c.grad, layer.kernel, *rest), c.weight_grad)


@pytest.mark.skipif(INTERPRETED, reason="as large as networks have them: for a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "layer",
    [
        Layer(128, (8, 8), 64, 128, (3, 3), padding=(1, 1)),
        Layer(128, (2, 2), 256, 512, (3, 3), padding=(1, 1)),
        Layer(100, (16, 16), 64, 64, (3, 3), (2, 2), (1, 1)),
    ],
)
def test_large_layers(layer: Layer, dtype: torch.dtype) -> None:
    c = case(layer, dtype)
    rest = layer[5:8]
    assert_near(conv.conv2d(c.x, c.weight, c.bias, *rest), c.out)
    assert_near(conv.conv2d_input_grad(c.grad, c.weight, layer.size, *rest), c.input_grad)
    assert_near(conv.conv2d_weight_grad(c.x, c.grad, layer.kernel, *rest), c.weight_grad)


def test_groups_are_refused() -> None:
    with pytest.raises(ValueError, match="groups must be 1"):
        conv.conv2d(torch.ones(1, 1, 1, 4), torch.ones(1, 4, 2, 1, 1))
