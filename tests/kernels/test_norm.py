"""Stacked batch normalisation, sums over rows and pooling, against torch and autograd in float64.

On a GPU, or without one in Triton's interpreter, where it is installed: ``TRITON_INTERPRET=1 pytest``.
"""

import os

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

pytest.importorskip("triton", reason="needs Triton")
norm = pytest.importorskip("posterity.kernels.norm", reason="needs Triton")
pool = pytest.importorskip("posterity.kernels.pool", reason="needs Triton")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# Triton's interpreter makes ints of arrays of one element.
pytestmark = [
    pytest.mark.skipif(
        not (torch.cuda.is_available() or INTERPRETED), reason="needs a CUDA GPU or TRITON_INTERPRET=1"
    ),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
]
DEVICE = "cpu" if INTERPRETED else "cuda"
K = 2
EPS = 1e-5
# Rows and channels; and what a program works on: as chosen, or so little that there are several of each kind.
SHAPES = [
    ((7, 5), None),
    ((2, 3), norm.Tile(programs=1)),
    ((53, 5), norm.Tile(32, 4, programs=12)),
]
if not INTERPRETED:
    SHAPES += [((131072, 64), None), ((2000, 512), None), ((12345, 100), norm.Tile(stages=3))]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2}


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape).to(DEVICE, dtype)


def check(value: Tensor, wanted: Tensor, tolerance: float) -> None:
    assert value.shape == wanted.shape
    assert float((value.double() - wanted).norm() / wanted.norm()) < tolerance


def stack(values: Tensor | None) -> Tensor | None:
    """In float64, one for each sample."""
    return None if values is None else values.double().expand(K, values.shape[-1]).clone().requires_grad_()


def normalised(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """What torch makes of each sample."""
    return torch.stack(
        [
            F.batch_norm(
                x[k],
                None,
                None,
                None if weight is None else weight[k],
                None if bias is None else bias[k],
                True,
                eps=EPS,
            )
            for k in range(K)
        ]
    )


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize(
    ("affine", "dtype"),
    [
        ("none", torch.float32),
        ("shared", torch.float32),
        ("own", torch.float32),
        ("own", torch.bfloat16),
        ("weight", torch.bfloat16),
    ],
)
@pytest.mark.parametrize(("shape", "tile"), SHAPES)
def test_batch_norm_and_its_gradients(shape, tile, affine: str, dtype: torch.dtype) -> None:
    rows, channels = shape
    x, grad = random(K, rows, channels, dtype=dtype) * 2 + 1, random(K, rows, channels, dtype=dtype)
    # Stacked weights and biases lie in one buffer of all parameters.
    flat = random(K, 2 * channels + 3, dtype=dtype)[0 if affine == "shared" else slice(None)]
    weight = None if affine == "none" else flat[..., :channels]
    bias = flat[..., channels : 2 * channels] if affine in ("shared", "own") else None
    exact, exact_weight, exact_bias = x.double().requires_grad_(), stack(weight), stack(bias)
    wanted = normalised(exact, exact_weight, exact_bias)
    with torch.no_grad():
        exact_mean, exact_variance = exact.mean(1), exact.var(1, correction=0)
        exact_rstd = (exact_variance + EPS) ** -0.5

    y, mean, rstd, variance = norm.batch_norm(x, weight, bias, EPS, tile=tile)
    assert y.dtype == dtype
    assert mean.dtype == rstd.dtype == variance.dtype == torch.float32
    check(y, wanted.detach(), TOLERANCE[dtype])
    check(mean, exact_mean, 2e-6)
    check(variance, exact_variance, 2e-6)
    check(rstd, exact_rstd, 2e-6)

    wanted.backward(grad.double())
    x_grad, weight_grad, bias_grad = norm.batch_norm_grad(x, grad, weight, mean, rstd, tile=tile)
    assert x_grad.dtype == dtype
    # The gradient of two rows is what is left where almost all cancels.
    assert float((x_grad.double() - exact.grad).abs().max()) < TOLERANCE[dtype] * 10
    centred = (x.double() - exact_mean[:, None]) * exact_rstd[:, None]
    check(weight_grad, (grad.double() * centred).sum(1), 1e-5)
    check(bias_grad, grad.double().sum(1), 1e-5)
    if exact_weight is not None:
        check(weight_grad, exact_weight.grad, 1e-5)


@pytest.mark.parametrize(("shape", "tile"), SHAPES[2:])
def test_a_mean_far_from_zero_costs_no_accuracy(shape, tile) -> None:
    x = 1000 + random(K, *shape)
    y, _, _, variance = norm.batch_norm(x, eps=EPS, tile=tile)
    exact = x.double()
    # Half of a float32's last bit is 3e-5 here, and E[x²] − E[x]² would be off by 0.1.
    check(variance, exact.var(1, correction=0), 3e-5)
    check(y, normalised(exact, None, None), 3e-4)


def test_the_first_value_may_be_an_outlier() -> None:
    x = random(K, 60, 4)
    x[:, 0] = 1e4
    y, _, _, variance = norm.batch_norm(x, tile=norm.Tile(32, 4, programs=4))
    check(variance, x.double().var(1, correction=0), 1e-5)
    check(y, normalised(x.double(), None, None), 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("shape", "tile"), SHAPES)
def test_column_sums(shape, tile, dtype: torch.dtype) -> None:
    x = random(K, *shape, dtype=dtype)
    sums = norm.column_sums(x, tile=tile)
    assert sums.dtype == torch.float32
    check(sums, x.double().sum(1), 1e-5)


def test_column_sums_of_no_rows_are_zero() -> None:
    assert torch.equal(norm.column_sums(random(K, 0, 5)), torch.zeros(K, 5, device=DEVICE))


# Images, height, width, channels; kernel; what a program works on.
POOLS = [
    ((2, 4, 6, 5), (2, 2), None),
    ((2, 5, 3, 3), (2, 2), pool.Tile(8, 2)),
    ((2, 4, 5, 2), (3, 2), None),
]
POOLS += [] if INTERPRETED else [((128, 32, 32, 64), (2, 2), None), ((128, 9, 9, 200), (2, 2), None)]


@pytest.mark.parametrize(
    ("ties", "dtype"), [(False, torch.float32), (True, torch.float32), (True, torch.bfloat16)]
)
@pytest.mark.parametrize(("shape", "kernel", "tile"), POOLS)
def test_max_pool_and_its_gradient(shape, kernel, tile, ties: bool, dtype: torch.dtype) -> None:
    x = random(*shape, dtype=dtype)
    if ties:
        # Windows of zeros after a ReLU, one of -inf alone, and NaNs, also two in a window.
        x = x.round().clamp(min=0)
        x[0, : kernel[0], : kernel[1], 0] = -torch.inf
        x[1, 0, :, 1] = torch.nan
    exact = x.double().permute(0, 3, 1, 2).requires_grad_()
    wanted = F.max_pool2d(exact, kernel)
    y = pool.max_pool2d(x, kernel, tile=tile)
    assert y.dtype == dtype
    torch.testing.assert_close(y.double(), wanted.permute(0, 2, 3, 1), rtol=0, atol=0, equal_nan=True)

    grad = random(*y.shape, dtype=dtype)
    (wanted_grad,) = torch.autograd.grad(wanted, exact, grad.double().permute(0, 3, 1, 2))
    x_grad = pool.max_pool2d_grad(x, grad, kernel, tile=tile)
    assert x_grad.dtype == dtype
    torch.testing.assert_close(x_grad.double(), wanted_grad.permute(0, 2, 3, 1), rtol=0, atol=0)


def test_max_pool_refuses_images_smaller_than_a_window() -> None:
    with pytest.raises(ValueError, match="use smaller"):
        pool.max_pool2d(random(1, 1, 4, 2), (2, 2))


def test_pools_knows_windows_that_tile() -> None:
    assert pool.pools((2, 2), (2, 2))
    assert not pool.pools((3, 3), (2, 2))
    assert not pool.pools((2, 2), (2, 2), padding=(1, 1))
    assert not pool.pools((2, 2), (2, 2), dilation=(2, 2))
    assert not pool.pools((2, 2), (2, 2), ceil_mode=True)
