"""Steps by gradient of several processes: gradients that travel together, and processes that do not fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from posterity.distributed import World, fingerprint


@final
class Joined:
    """Tensors end to end, in one for each device and type, so that they travel together.

    Args:
        tensors: The tensors.

    Attributes:
        flats: They, end to end.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._shapes = [tensor.shape for tensor in tensors]
        kinds: dict[object, list[int]] = {}
        for number, tensor in enumerate(tensors):
            kinds.setdefault((tensor.device, tensor.dtype), []).append(number)
        self._numbers = list(kinds.values())
        self.flats = [torch.cat([tensors[i].reshape(-1) for i in numbers]) for numbers in self._numbers]

    def parts(self) -> list[Tensor]:
        """The tensors, as they are there."""
        found: dict[int, Tensor] = {}
        for numbers, flat in zip(self._numbers, self.flats, strict=True):
            parts = torch.split(flat, [self._shapes[i].numel() for i in numbers])
            found |= {i: part.view(self._shapes[i]) for i, part in zip(numbers, parts, strict=True)}
        return [found[i] for i in range(len(self._shapes))]


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
