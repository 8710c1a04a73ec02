"""Steps by gradient of several processes, each with its share of the batch and the same drawn weights.

With b examples in a process and B in all, the gradient of the step is Σ (b / B) of those of the processes. A
KL that all of them take of the same weights, and add to what they have, counts once in that sum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from posterity.distributed import World, fingerprint


class Share(NamedTuple):
    """The part of one process in a step of several.

    Attributes:
        world: All processes.
        weight: Examples of this process over those of all.
    """

    world: World
    weight: float

    def add_up(self, tensor: Tensor) -> None:
        """Replace a tensor by the weighted sum of those of all processes."""
        self.world.add_up(tensor.mul_(self.weight))

    def add_up_all(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The weighted sums of some tensors, by one collective for all of a device and type."""
        found: dict[int, Tensor] = {}
        kinds: dict[object, list[int]] = {}
        for number, tensor in enumerate(tensors):
            kinds.setdefault((tensor.device, tensor.dtype), []).append(number)
        for numbers in kinds.values():
            joined = torch.cat([tensors[i].reshape(-1) for i in numbers])
            self.add_up(joined)
            parts = torch.split(joined, [tensors[i].numel() for i in numbers])
            found |= {i: part.view_as(tensors[i]) for i, part in zip(numbers, parts, strict=True)}
        return [found[i] for i in range(len(tensors))]


def met(
    world: World, examples: float, loss: Tensor, used: Sequence[bool]
) -> tuple[Share, Tensor, list[bool]]:
    """Exchange the size and the loss of each process's batch, before anything is added up.

    Args:
        world: All processes.
        examples: Examples in this process's batch.
        loss: Its mean loss.
        used: Which parameters its backward passes have reached.

    Returns:
        This process's share, the mean loss of all, and which parameters any process has reached.
    """
    numbers = [examples, examples * float(loss), *map(float, used)]
    meta = torch.tensor(numbers, dtype=torch.float64, device=loss.device)
    world.add_up(meta)
    total, weighted, *everywhere = meta.tolist()
    return Share(world, examples / total), loss.new_tensor(weighted / total), list(map(bool, everywhere))


def refuse_unlike(
    world: World, named: Mapping[str, Tensor], optimizer: Optimizer, settings: Mapping[str, Any]
) -> None:
    """Raise in all processes if they train different parameters, or with different settings."""
    entries = {
        f"{key} of group {number}": repr(value)
        for number, group in enumerate(optimizer.param_groups)
        for key, value in group.items()
        if key != "params"
    }
    what = {"type": type(optimizer).__name__, **entries}
    world.refuse_others(what, "the optimiser's")
    world.refuse_others(dict(settings), "compile_step's")
    world.refuse_others({name: fingerprint(p) for name, p in named.items()}, "the parameter")
