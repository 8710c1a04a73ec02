"""The kernels that make noise, against each other and against their definition.

They run on a GPU, or anywhere in Triton's interpreter: ``TRITON_INTERPRET=1``.
"""

import os

import numpy as np
import pytest
import torch
from torch import Tensor

from posterity.flat import TILE, Layout
from posterity.noise import Domain, Noise, addresses

pytest.importorskip("triton", reason="needs Triton")
kernels = pytest.importorskip("posterity.kernels", reason="needs Triton")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = pytest.mark.skipif(
    not (torch.cuda.is_available() or INTERPRETED), reason="needs a CUDA GPU or TRITON_INTERPRET=1"
)

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
# The interpreter takes its time: fewer draws, and of fewer rows.
SLICES, ROWS, NORMALS = (3, 9, 50_000) if INTERPRETED else (8, 40, 200_000)
# Less than a quarter of a tile, less than two tiles, whole tiles and a quarter, a scalar, nothing at all.
SHAPES = [(7, 3), (600,), (64, 4, 3, 3), (), (5,), (0, 4), (17, 1)]
LAYOUT = Layout([f"block.{i}" for i in range(len(SHAPES))], SHAPES)


def noise(samples: range = range(1, 4), step: int = 3, layout: Layout = LAYOUT) -> Noise:
    return Noise(samples, layout, seed=5, step=step, device=DEVICE)


def drawn(layout: Layout, samples: range = range(1, 4)) -> list[Tensor]:
    return layout.stacked(kernels.normal(noise(samples, layout=layout)), len(samples))


def test_normals_are_a_function_of_their_address() -> None:
    values = LAYOUT.stacked(kernels.normal(noise()), 3)
    later = LAYOUT.stacked(kernels.normal(noise(range(2, 4))), 2)
    for a, b in zip(values, later, strict=True):
        assert torch.equal(a[1:], b)
    other = kernels.normal(noise(step=4))
    assert abs(float((LAYOUT.stacked(other, 3)[2] * values[2]).mean())) < 5 / values[2].numel() ** 0.5


@pytest.mark.parametrize("whole", [(ROWS, 50), (1300,), (5, 7, 9), (3, 1100), (2 * TILE,), (TILE + 1,), ()])
def test_a_slice_equals_that_slice_of_the_whole(whole: tuple[int, ...]) -> None:
    (values,) = drawn(Layout(["a"], [whole]))
    rng = np.random.default_rng(0)
    for _ in range(SLICES):
        offset = [int(rng.integers(full + 1)) for full in whole]
        shape = [int(rng.integers(full - first + 1)) for full, first in zip(whole, offset, strict=True)]
        layout = Layout(["a"], [shape], [whole], [offset])
        here = tuple(slice(first, first + size) for first, size in zip(offset, shape, strict=True))
        (own,) = drawn(layout)
        assert torch.equal(own, values[(slice(None), *here)]), (offset, shape)
        mean, std = torch.rand(2, layout.size, device=DEVICE)
        (theta,) = layout.stacked(kernels.perturb(noise(layout=layout), mean, std), 3)
        (m,), (s,) = layout.views(mean), layout.views(std)
        torch.testing.assert_close(theta, m + s * own)
        grad = torch.randn(3, *shape, device=DEVICE)
        sums, poison = torch.zeros(2, layout.size, device=DEVICE), torch.zeros((), device=DEVICE)
        kernels.moments(noise(layout=layout), range(1, 4), [0], grad, sums, poison, fresh=True)
        torch.testing.assert_close(layout.views(sums[0])[0], grad.sum(0))
        torch.testing.assert_close(layout.views(sums[1])[0], (grad * own).sum(0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("axis", [0, 1])
def test_shards_together_are_the_whole(axis: int) -> None:
    shapes = [(ROWS, 50), (7, 300)]
    found: list[list[Tensor]] = [[], []]
    for rank in range(4):
        rows = [range(rank * shape[axis] // 4, (rank + 1) * shape[axis] // 4) for shape in shapes]
        sizes = [
            [len(r) if a == axis else shape[a] for a in (0, 1)] for r, shape in zip(rows, shapes, strict=True)
        ]
        offsets = [[r.start if a == axis else 0 for a in (0, 1)] for r in rows]
        for each, own in zip(found, drawn(Layout(["a", "b"], sizes, shapes, offsets)), strict=True):
            each.append(own)
    for each, values in zip(found, drawn(Layout(["a", "b"], shapes)), strict=True):
        assert torch.equal(torch.cat(each, axis + 1), values)


def test_a_number_depends_on_its_position_alone() -> None:
    (values,) = drawn(Layout(["a"], [(40, 50)]))
    (longer,) = drawn(Layout(["a"], [(5000,)]))
    assert torch.equal(values.flatten(1), longer[:, :2000])


def test_domains_and_seeds_have_different_normals() -> None:
    given = [
        *((domain, 5) for domain in Domain),
        (Domain.TRAIN, 6),
        (Domain.TRAIN, -5),
        (Domain.TRAIN, 1 << 40),
    ]
    draws = [
        kernels.normal(Noise(range(1), LAYOUT, seed=seed, step=3, device=DEVICE, domain=domain))
        for domain, seed in given
    ]
    first = [LAYOUT.stacked(each, 1)[1] for each in draws]
    for i, one in enumerate(first):
        assert not any(torch.equal(one, other) for other in first[:i])


def test_normals_are_standard_and_independent() -> None:
    n = NORMALS
    layout = Layout(["a"], [(n,)])
    a, b = layout.stacked(kernels.normal(Noise(range(2), layout, seed=0, step=0, device=DEVICE)), 2)[
        0
    ].double()
    for x in (a, b):
        # Each moment within five of its standard errors.
        for power, mean, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96), (6, 15, 10170)):
            assert abs(float((x**power).mean()) - mean) < 5 * (variance / n) ** 0.5
    # The four of a counter, neighbours, and tiles next to each other.
    tiles = a[: n // TILE * TILE].view(-1, 4, TILE // 4)
    quarters = [quarter.flatten() for quarter in tiles.unbind(1)]
    lagged = [(a[:-lag], a[lag:]) for lag in (1, TILE // 4, TILE)]
    for x, y in [(a, b), *lagged, *((quarters[i], quarters[j]) for i in range(4) for j in range(i))]:
        for power in (1, 2):
            product = (x**power - x.pow(power).mean()) * (y**power - y.pow(power).mean())
            assert abs(float(product.mean())) < 5 * float(product.std()) / len(x) ** 0.5


def test_perturb_and_moments_use_the_same_normals() -> None:
    made = noise()
    eps = LAYOUT.stacked(kernels.normal(made), 3)
    generator = torch.Generator().manual_seed(0)
    mean, std = torch.rand(2, LAYOUT.size, generator=generator).to(DEVICE)
    theta = LAYOUT.stacked(kernels.perturb(made, mean, std), 3)
    for i, (m, s) in enumerate(zip(LAYOUT.views(mean), LAYOUT.views(std), strict=True)):
        torch.testing.assert_close(theta[i], m + s * eps[i])
    grads = [torch.randn(2, *shape, generator=generator).to(DEVICE) for shape in SHAPES]
    sums, poison = torch.ones(2, LAYOUT.size, device=DEVICE), torch.zeros((), device=DEVICE)
    made.weight = 0.5
    fresh = {0: False, 1: True, 3: False}
    for blocks in ([0, 2, 4], [1], [3, 5, 6]):
        joined = torch.cat([grads[i].flatten() for i in blocks])
        # Of the last two samples.
        kernels.moments(made, range(2, 4), blocks, joined, sums, poison, fresh=fresh[blocks[0]])
    assert float(poison) == 0.0
    for i, grad in enumerate(grads):
        before = 0.0 if i == 1 else 1.0
        torch.testing.assert_close(LAYOUT.views(sums[0])[i], before + 0.5 * grad.sum(0))
        torch.testing.assert_close(LAYOUT.views(sums[1])[i], before + 0.5 * (grad * eps[i][1:]).sum(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_that_lie_apart_are_found_by_their_addresses(dtype: torch.dtype) -> None:
    blocks = [5, 0, 2, 3, 6]
    grads = [torch.randn(2, *SHAPES[i]).to(DEVICE, dtype) for i in blocks]
    results = []
    for places in (None, addresses(tuple(grad.data_ptr() for grad in grads), DEVICE)):
        given = torch.cat([grad.flatten() for grad in grads]) if places is None else grads[0]
        sums, poison = torch.zeros(2, LAYOUT.size, device=DEVICE), torch.zeros((), device=DEVICE)
        kernels.moments(noise(), range(2, 4), blocks, given, sums, poison, fresh=True, places=places)
        results.append(sums)
    assert torch.equal(*results)
    assert all(LAYOUT.views(results[0][0])[i].any() for i in blocks if i != 5)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's numpy, of infinities
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("place", [0, 599])
def test_non_finite_gradient_poisons(value: float, place: int) -> None:
    grads = torch.ones(3, 600, device=DEVICE)
    grads[1, place] = value
    sums, poison = torch.ones(2, LAYOUT.size, device=DEVICE), torch.zeros((), device=DEVICE)
    kernels.moments(noise(), range(1, 4), [1], grads, sums, poison, fresh=True)
    assert torch.isnan(poison)


def test_tensors_are_copied_by_their_addresses() -> None:
    tensors = [torch.randn(shape, device=DEVICE) for shape in SHAPES]
    pointers = torch.tensor([each.data_ptr() for each in tensors]).to(DEVICE)
    flat = torch.zeros(LAYOUT.size, device=DEVICE)
    kernels.transfer(LAYOUT, pointers, flat, read=True)
    for view, each in zip(LAYOUT.views(flat), tensors, strict=True):
        assert torch.equal(view, each)
    flat.mul_(2)
    before = [each.clone() for each in tensors]
    kernels.transfer(LAYOUT, pointers, flat, read=False)
    for each, old in zip(tensors, before, strict=True):
        assert torch.equal(each, 2 * old)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's numpy, of infinities
@pytest.mark.parametrize("value", [1.0, float("nan"), float("-inf")])
@pytest.mark.parametrize(("block", "place"), [(1, 599), (2, 2000), (3, 0)])
def test_non_finite_tensor_poisons_its_copy_group(value: float, block: int, place: int) -> None:
    tensors = [torch.randn(shape, device=DEVICE) for shape in SHAPES]
    tensors[block].view(-1)[place] = value
    pointers = torch.tensor([each.data_ptr() for each in tensors]).to(DEVICE)
    flat, poison = torch.zeros(LAYOUT.size, device=DEVICE), torch.zeros((), device=DEVICE)
    kernels.transfer(LAYOUT, pointers, flat, read=True, poison=poison)
    assert float(LAYOUT.views(flat)[block].view(-1)[place]) == value or value != value
    assert bool(torch.isnan(poison)) == (value != 1.0)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's numpy, of infinities
@pytest.mark.parametrize("value", [1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("blocks", [tuple(range(len(SHAPES))), (4, 2)])
def test_adding_by_address_poisons_infinite_sums(blocks: tuple[int, ...], value: float) -> None:
    tensors = {i: torch.randn(SHAPES[i], device=DEVICE) for i in blocks}
    tensors[2][63, 3, 2, 1] = value
    pointers = torch.tensor([each.data_ptr() for each in tensors.values()]).to(DEVICE)
    flat, poison = torch.ones(LAYOUT.size, device=DEVICE), torch.zeros((), device=DEVICE)
    kernels.add(LAYOUT, blocks, pointers, flat, 2.5, poison)
    for i, view in enumerate(LAYOUT.views(flat)):
        expected = 1 + 2.5 * tensors[i] if i in tensors else torch.ones_like(view)
        torch.testing.assert_close(view, expected, equal_nan=True)
    assert bool(torch.isnan(poison)) == (value != 1.0)


def test_a_step_is_read_from_python_or_from_the_device() -> None:
    live = Noise(
        range(2), LAYOUT, seed=1 << 40, step=torch.tensor(7, dtype=torch.int32).to(DEVICE), device=DEVICE
    )
    for step in (7, 8):
        plain = Noise(range(2), LAYOUT, seed=1 << 40, step=step, device=DEVICE)
        for a, b in zip(*(LAYOUT.stacked(kernels.normal(each), 2) for each in (live, plain)), strict=True):
            assert torch.equal(a, b) == (step == 7 or a.numel() == 0)
    short = Noise(range(2), LAYOUT, seed=1, step=7, device=DEVICE)
    assert not torch.equal(
        LAYOUT.stacked(kernels.normal(short), 2)[2], LAYOUT.stacked(kernels.normal(live), 2)[2]
    )


@pytest.mark.parametrize("ok", [False, True])
def test_a_flag_on_the_device_keeps_tensors_from_being_copied(ok: bool) -> None:
    tensors = [torch.randn(shape, device=DEVICE) for shape in SHAPES]
    before = [each.clone() for each in tensors]
    pointers = torch.tensor([each.data_ptr() for each in tensors]).to(DEVICE)
    flat, flag = torch.zeros(LAYOUT.size, device=DEVICE), torch.tensor(ok, device=DEVICE)
    kernels.transfer(LAYOUT, pointers, flat, read=False, unless=flag)
    for each, old in zip(tensors, before, strict=True):
        assert torch.equal(each, old if ok else torch.zeros_like(old))
