"""The cost of a net: weights, bytes, multiply-adds, and time."""

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
    """The cost of a net.

    Attributes:
        weights: Number of weights, including the zeros that sparse matrices leave out.
        nonzero: Number of weights that are not zero.
        bytes: Bytes of parameters and buffers, including indices of sparse matrices.
        multiply_adds: Multiply-adds for one example; None if a layer is sparse, which torch does not count.
        milliseconds: Median time of a forward pass, by batch size.
    """

    weights: int
    nonzero: int
    bytes: int
    multiply_adds: int | None
    milliseconds: dict[int, float]


@takes(model=MODULE, seconds=NUMBER)
def measure(model: nn.Module, example: Any, batches: Sequence[int] = (1, 128), seconds: float = 0.5) -> Cost:
    """Count and time a net in evaluation mode, on its device, with torch's current number of threads.

    Args:
        model: Any module; it is not changed.
        example: Its input, or a tuple of several: real examples, as many as in the largest batch. Fewer are
            repeated, in all inputs of the first one's length, but a CPU predicts the branches of repeated
            examples, such as in max pooling.
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
    """Raise unless the time is positive and finite.

    Example:
        >>> refuse_seconds(0.1)
    """
    if not 0.0 < seconds < math.inf:
        raise ValueError(f"seconds must be finite and greater than 0, not {seconds}")


def _stored(tensor: Tensor) -> tuple[Tensor, ...]:
    """The tensors in memory behind a tensor: its values, and their indices if it is sparse."""
    if tensor.layout is torch.sparse_csr:
        return tensor.values(), tensor.crow_indices(), tensor.col_indices()
    return (tensor.detach(),)


def _of(args: tuple[Any, ...], size: int) -> tuple[Any, ...]:
    """A batch of a size, made of the given examples in order, repeated if needed."""
    batches = [x for x in tree_leaves(args) if isinstance(x, Tensor) and x.dim()]
    if any(not len(x) for x in batches):
        raise ValueError("the example has a batch of 0: pass at least one input")

    def repeated(x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.dim() or len(x) != len(batches[0]):  # others are settings
            return x
        return x[torch.arange(size, device=x.device) % len(x)]

    return tuple(tree_map(repeated, args))
