"""A Triton kernel: the cross-entropy of every sample and its gradient, in one pass over the logits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Logits that one program holds in registers.
_TILE = 4096


@triton.jit(do_not_specialize=["batch", "ignore_index", "own"])
def _cross_entropy(
    logits,
    labels,
    losses,
    grads,
    batch,
    classes,
    ignore_index,
    own,
    ROWS: tl.constexpr,
    CLASSES: tl.constexpr,
    COUNTED: tl.constexpr,
):
    """The contribution of a tile of rows to one sample's mean loss, and these rows' gradient."""
    tile = tl.program_id(0)
    sample = tl.program_id(1).to(tl.int64)
    labels += sample * own
    counts = tl.zeros([COUNTED], tl.int32)
    for start in range(0, batch, COUNTED):
        at = start + tl.arange(0, COUNTED)
        label = tl.load(labels + at, mask=at < batch, other=0)
        counts += ((at < batch) & (label != ignore_index)).to(tl.int32)
    count = tl.sum(counts, 0).to(tl.float32)

    row = tile * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, CLASSES)
    inside = row < batch
    mask = inside[:, None] & (column < classes)[None, :]
    here = (sample * batch + row)[:, None] * classes + column[None, :]
    label = tl.load(labels + row, mask=inside, other=0)
    used = inside & (label != ignore_index)
    # Rows beyond the batch hold zeros, which stay finite below.
    value = tl.load(logits + here, mask=mask, other=0.0).to(tl.float32)
    value = tl.where((column < classes)[None, :], value, float("-inf"))
    shifted = value - tl.max(value, 1)[:, None]
    exponential = tl.exp(shifted)
    normaliser = tl.sum(exponential, 1)
    target = column[None, :] == label[:, None]
    chosen = tl.sum(tl.where(target, shifted, 0.0), 1)
    # A label that is not a class makes the loss and its row's gradient NaN.
    known = (label >= 0) & (label < classes)
    loss = tl.where(known, tl.log(normaliser) - chosen, float("nan"))
    tl.store(losses + sample * tl.num_programs(0) + tile, tl.sum(tl.where(used, loss, 0.0), 0) / count)
    grad = (exponential / normaliser[:, None] - target.to(tl.float32)) / count
    grad = tl.where(known[:, None], grad, float("nan"))
    grad = tl.where(used[:, None], grad, 0.0)
    tl.store(grads + here, grad.to(grads.dtype.element_ty), mask=mask)


def cross_entropy(logits: Tensor, labels: Tensor, ignore_index: int = -100) -> tuple[Tensor, Tensor]:
    """Each sample's mean cross-entropy ``[K]``, and its gradient with respect to its logits ``[K, B, C]``.

    A label that is not a class gives a NaN loss, where torch would abort the process: the caller must check.

    Args:
        logits: ``[K, B, C]``; the arithmetic is float32 whatever their type.
        labels: The classes, int64: ``[K, B]``, or ``[B]``, the same for every sample.
        ignore_index: Rows with this label do not count.
    """
    logits, labels = logits.contiguous(), labels.contiguous()
    samples, batch, classes = logits.shape
    width = triton.next_power_of_2(classes)
    rows = max(1, min(triton.next_power_of_2(max(batch, 1)), _TILE // width))
    grid = (triton.cdiv(max(batch, 1), rows), samples)
    grads = torch.empty_like(logits)
    losses = logits.new_empty((samples, grid[0]), dtype=torch.float32)
    _cross_entropy[grid](
        logits,
        labels,
        losses,
        grads,
        batch,
        classes,
        ignore_index,
        batch * (labels.dim() - 1),
        ROWS=rows,
        CLASSES=width,
        COUNTED=min(1024, max(16, triton.next_power_of_2(max(batch, 1)))),
    )
    return (losses[:, 0] if grid[0] == 1 else losses.sum(1)), grads
