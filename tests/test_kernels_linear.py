"""The kernels of stacked linear layers and of the loss, against torch in float64.

They run on a GPU, or anywhere in Triton's interpreter: ``TRITON_INTERPRET=1``.
"""

import os

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from posterity.layout import Layout
from posterity.noise import Noise

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


@pytest.mark.parametrize(("shape", "tile"), SHAPES)
def test_linear_input_grad(shape, tile) -> None:
    batch, outputs, inputs = shape
    grad, weight = random(K, batch, outputs), random(K, outputs, inputs + 4)[:, :, :inputs]
    check(stacked.linear_input_grad(grad, weight, tile=tile), grad.double() @ weight.double())


@pytest.mark.parametrize(("shape", "tile"), SHAPES)
@pytest.mark.parametrize(("shared", "biased"), [(True, False), (False, True)], ids=["shared", "biased"])
def test_linear_moments_add_to_what_there_is(shape, tile, shared: bool, biased: bool) -> None:
    batch, outputs, inputs = shape
    x = random(batch, inputs) if shared else random(K, batch, inputs)
    grad = random(K, batch, outputs)
    step = torch.tensor([7], dtype=torch.int32, device=DEVICE)
    shapes = {"before": (3,), "a.weight": (outputs, inputs)} | ({"a.bias": (outputs,)} if biased else {})
    layout = Layout(list(shapes), list(shapes.values()))
    noise = Noise(range(2, 2 + K), layout, seed=1 << 40 | 3, step=7, device=DEVICE)
    normals = layout.stacked(kernels.normal(noise), K)
    noise.step = step
    gradients = [torch.zeros(K, 3), grad.double().mT @ x.double(), grad.double().sum(1)]
    total, product = random(layout.size), random(layout.size)
    wanted = [layout.views(flat.double().clone()) for flat in (total, product)]
    for i in range(1, len(layout)):
        wanted[0][i] += gradients[i].sum(0)
        wanted[1][i] += (gradients[i] * normals[i].double()).sum(0)
    stacked.linear_moments(noise, x, grad, list(range(1, len(layout))), total, product, tile=tile)
    for flat, targets in zip((total, product), wanted, strict=True):
        for value, target in zip(layout.views(flat), targets, strict=True):
            check(value, target)


# The interpreter cannot multiply bfloat16.
@pytest.mark.parametrize("dtype", [torch.float16] + [torch.bfloat16] * (not INTERPRETED))
def test_half_precision_sums_in_float32(dtype: torch.dtype) -> None:
    x, weight, grad = (
        random(9, 36, dtype=dtype),
        random(K, 18, 36, dtype=dtype),
        random(K, 9, 18, dtype=dtype),
    )
    out = stacked.linear(x, weight, random(K, 18, dtype=dtype) * 0)
    back = stacked.linear_input_grad(grad, weight)
    assert out.dtype == back.dtype == dtype
    check(out, x.double() @ weight.double().mT, 4e-3)
    check(back, grad.double() @ weight.double(), 4e-3)
    noise = Noise(range(K), Layout(["w"], [(18, 36)]), seed=0, step=0, device=DEVICE)
    total, product = torch.zeros(2, noise.layout.size, device=DEVICE)
    stacked.linear_moments(noise, x, grad, [0], total, product)
    check(noise.layout.views(total)[0], (grad.double().mT @ x.double()).sum(0), 1e-5)


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


@pytest.mark.parametrize("label", [-1, 4])
def test_a_label_that_names_no_class_gives_a_loss_that_is_not_a_number(label: int) -> None:
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
