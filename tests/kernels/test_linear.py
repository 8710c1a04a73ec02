"""The kernels of stacked linear layers and of the loss, against torch in float64.

They run on a GPU, or anywhere in Triton's interpreter: ``TRITON_INTERPRET=1``.
"""

import os

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

pytest.importorskip("triton", reason="needs Triton")
kernels = pytest.importorskip("posterity.kernels", reason="needs Triton")
stacked = pytest.importorskip("posterity.kernels.matmul", reason="needs Triton")
loss = pytest.importorskip("posterity.kernels.loss", reason="needs Triton")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = pytest.mark.skipif(
    not (torch.cuda.is_available() or INTERPRETED), reason="needs a CUDA GPU or TRITON_INTERPRET=1"
)

DEVICE = "cpu" if INTERPRETED else "cuda"
K = 3
# Batch, outputs, inputs; and what a program makes: chosen, or given so that there are several each way.
SHAPES = [
    ((5, 10, 20), None),
    ((17, 37, 44), stacked.Tile(32, 32, 16)),
    ((33, 3, 64), stacked.Tile(16, 64, 16)),
]
SHAPES += [] if INTERPRETED else [((128, 400, 784), None), ((100, 10, 400), None), ((128, 1200, 1200), None)]
# tf32 has 10 bits of fraction, the interpreter 23.
TOLERANCE = 1e-5 if INTERPRETED else 2e-3


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def check(value: Tensor, wanted: Tensor, tolerance: float = TOLERANCE) -> None:
    assert value.shape == wanted.shape
    assert float((value.double() - wanted).norm() / wanted.norm()) < tolerance


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize(("shape", "tile"), SHAPES)
@pytest.mark.parametrize(("shared", "biased"), [(True, False), (False, True)], ids=["shared", "biased"])
def test_linear(shape, tile, shared: bool, biased: bool) -> None:
    batch, outputs, inputs = shape
    x = random(batch, inputs) if shared else random(K, batch, inputs)
    # Weights and biases lie in one buffer of all parameters.
    flat = random(K, outputs * inputs + outputs + 5)
    weight = flat[:, : outputs * inputs].view(K, outputs, inputs)
    bias = flat[:, outputs * inputs :][:, :outputs] if biased else None
    wanted = x.double() @ weight.double().mT + (bias.double()[:, None] if biased else 0)
    check(stacked.linear(x, weight, bias, tile=tile), wanted)


# The interpreter cannot multiply bfloat16.
@pytest.mark.parametrize("dtype", [torch.float16] + [torch.bfloat16] * (not INTERPRETED))
def test_half_precision_sums_in_float32(dtype: torch.dtype) -> None:
    x, weight = random(9, 36, dtype=dtype), random(K, 18, 36, dtype=dtype)
    out = stacked.linear(x, weight, random(K, 18, dtype=dtype) * 0)
    assert out.dtype == dtype
    check(out, x.double() @ weight.double().mT, 4e-3)


@pytest.mark.parametrize(("batch", "classes"), [(1, 2), (7, 10), (130, 10), (200, 33), (5, 3000)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ignore_index", [-100, 1])
def test_cross_entropy(batch: int, classes: int, dtype: torch.dtype, ignore_index: int) -> None:
    logits = (5 * random(K, batch, classes)).to(dtype)
    labels = torch.randint(0, classes, (batch,), device=DEVICE)
    labels[1:3] = ignore_index
    labels[0] = 0
    exact = logits.double().requires_grad_()
    wanted = torch.stack([F.cross_entropy(one, labels, ignore_index=ignore_index) for one in exact])
    wanted.sum().backward()
    losses, grads = loss.cross_entropy(logits, labels, ignore_index)
    assert grads.dtype == dtype
    check(losses, wanted.detach(), 1e-4)
    check(grads, exact.grad, 1e-4 if dtype == torch.float32 else 4e-3)
    assert not grads[:, labels == ignore_index].any()


def test_labels_of_each_samples_own() -> None:
    logits, labels = random(K, 7, 4), torch.randint(0, 4, (K, 7), device=DEVICE)
    losses, grads = loss.cross_entropy(logits, labels, 1)
    for sample in range(K):
        (wanted,), slope = loss.cross_entropy(logits[sample : sample + 1], labels[sample], 1)
        check(losses[sample], wanted, 1e-6)
        check(grads[sample], slope[0], 1e-6)
    assert len(losses.unique()) == K


@pytest.mark.parametrize("label", [-1, 4])
def test_invalid_label_gives_a_nan_loss(label: int) -> None:
    logits, labels = random(K, 6, 4), torch.zeros(6, dtype=torch.int64, device=DEVICE)
    losses, grads = loss.cross_entropy(logits, labels)
    assert torch.isfinite(losses).all()
    labels[2] = label
    losses, grads = loss.cross_entropy(logits, labels)
    assert torch.isnan(losses).all()
    assert torch.isfinite(grads[:, [0, 1, 3, 4, 5]]).all()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's numpy, of divisions by 0
def test_a_batch_without_labels_has_no_loss_and_no_gradient() -> None:
    labels = torch.full((6,), -100, device=DEVICE)
    losses, grads = loss.cross_entropy(random(K, 6, 4), labels)
    assert torch.isnan(losses).all()
    assert not grads.any()
