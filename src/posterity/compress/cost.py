"""What a net costs: numbers, bytes, multiply-adds, and time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils.benchmark import Timer
from torch.utils.flop_counter import FlopCounterMode

from posterity.arguments import MODULE, NUMBER, is_whole, takes
from posterity.replica import evaluating
from posterity.torch_private import tree_leaves, tree_map


@final
@dataclass(frozen=True)
class Cost:
    """What a net costs.

    Attributes:
        weights: Numbers in its parameters, with the zeros that sparse matrices leave out.
        nonzero: Those that are not zero.
        bytes: Of parameters and buffers, with the indices of sparse matrices.
        multiply_adds: Of one example; None if a layer is sparse, which torch does not count.
        milliseconds: Median time of a forward pass, by batch size.
    """

    weights: int
    nonzero: int
    bytes: int
    multiply_adds: int | None
    milliseconds: dict[int, float]


@takes(model=MODULE, seconds=NUMBER)
def measure(model: nn.Module, example: Any, batches: Sequence[int] = (1, 128), seconds: float = 0.5) -> Cost:
    """Count and time a net in evaluation mode, on the device and with the threads that it has.

    Args:
        model: Any module; it is left as it is.
        example: Its input, or a tuple of several: as many examples as the largest batch has, and real ones.
            Fewer are repeated, with all inputs that are as long as the first, and a CPU foresees the
            branches of repeated ones, such as in max pooling.
        batches: Sizes to time.
        seconds: How long to time each.

    Example:
        >>> found = measure(nn.Linear(3, 2), torch.randn(1, 3), batches=(1,), seconds=0.01)
        >>> found.weights, found.bytes, found.multiply_adds, found.milliseconds[1] > 0
        (8, 32, 6, True)
    """
    if (
        not isinstance(batches, Sequence)
        or not batches
        or not all(is_whole(size) and size > 0 for size in batches)
    ):
        raise ValueError(f"batches must be sizes of at least 1, not {batches}")
    refuse_seconds(seconds)
    args = example if isinstance(example, tuple) else (example,)
    tensors = [*chain(model.parameters(), model.buffers())]
    model = evaluating(model)
    with torch.no_grad():
        sparse = any(each.layout is torch.sparse_csr for each in tensors)
        with FlopCounterMode(display=False) as counter:
            model(*_of(args, 1))
        times = {
            size: Timer("model(*x)", globals={"model": model, "x": _of(args, size)})
            .blocked_autorange(min_run_time=seconds)
            .median
            * 1e3
            for size in batches
        }
    return Cost(
        sum(p.numel() for p in model.parameters()),
        sum(int(_stored(p)[0].count_nonzero()) for p in model.parameters()),
        sum(part.numel() * part.element_size() for each in tensors for part in _stored(each)),
        None if sparse else counter.get_total_flops() // 2,
        times,
    )


def refuse_seconds(seconds: float) -> None:
    """Raise unless timing can end after so long.

    Example:
        >>> refuse_seconds(0.1)
    """
    if not 0.0 < seconds < math.inf:
        raise ValueError(f"seconds must be finite and greater than 0, not {seconds}")


def _stored(tensor: Tensor) -> tuple[Tensor, ...]:
    """What memory holds of a tensor: its numbers, then their places if it is sparse."""
    if tensor.layout is torch.sparse_csr:
        return tensor.values(), tensor.crow_indices(), tensor.col_indices()
    return (tensor.detach(),)


def _of(args: tuple[Any, ...], size: int) -> tuple[Any, ...]:
    """So many examples, from the first one on and over again."""
    batches = [x for x in tree_leaves(args) if isinstance(x, Tensor) and x.dim()]
    if any(not len(x) for x in batches):
        raise ValueError("the example has a batch of 0: give at least one input")

    def repeated(x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.dim() or len(x) != len(batches[0]):  # others are settings
            return x
        return x[torch.arange(size, device=x.device) % len(x)]

    return tuple(tree_map(repeated, args))
