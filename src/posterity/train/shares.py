"""Gradient steps of several processes: gradients sent together, and checks that processes agree."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from posterity.distributed import World, fingerprint
from posterity.optim.pooling import meeting, refuse_unreached
from posterity.train.blocks import StepValues
from posterity.train.partition import Blocks


@final
class Shares:
    """The gradients of one step, to which every process contributes its share.

    With b examples here and B in all processes, the gradient of the step is the sum of (b / B) times that of
    each process. A KL that all processes compute from the same weights, and add, counts once in that sum.

    Args:
        blocks: The posterior's blocks.
        step: The values of the step.
        examples: The number of examples in this process.
    """

    def __init__(self, blocks: Blocks, step: StepValues, examples: float) -> None:
        self._step, self._examples = step, examples
        self._plain = [step.sums.of(flat, None) for flat in blocks.plain]
        self._diagonal = [block.complete(step) for block in blocks.diagonal]
        self._others = [(block, p) for block in blocks.other for p in block.own()]

    @torch.no_grad()
    def pack(self, losses: Tensor, row: Callable[..., Tensor]) -> list[Tensor]:
        """Number of examples, loss, reached parameters, then all gradients of the loss times the examples.

        Args:
            losses: The samples' losses.
            row: Makes one tensor from numbers.
        """
        step, here = self._step, self._examples
        scale = 1.0 if step.scale is None else step.scale
        own = [*(mine.grad for mine in self._plain), *(mine.both for mine in self._diagonal)]
        for each in own:
            each.mul_(here * scale)
        found = [block.grads[p] if p in block.grads else torch.zeros_like(p) for block, p in self._others]
        self._joined = Joined([grad * here for grad in found])
        used = [i in mine.used for mine in self._plain for i in range(len(mine.group.params))]
        used += [p in block.grads for block, p in self._others]
        poisons = [mine.poison for mine in step.sums]
        numbers, mean = list(map(float, used)), [losses.mean() * scale]
        return [meeting(here, mean, numbers, losses.device, poisons, row), *own, *self._joined.flats]

    @torch.no_grad()
    def unpack(self, sent: list[Tensor], losses: Tensor, *, captured: bool) -> Tensor:
        """Take in the sums over all examples; their loss. A captured step reads nothing on the host."""
        found: list[Any] = list(sent[0].unbind()) if captured else sent[0].tolist()
        total, weighted, poison, *everywhere = found
        for mine in self._plain:
            params = mine.group.params
            if captured:
                refuse_unreached(mine.group.layout.names, params, mine.used)
            else:
                mine.used |= {i for i in range(len(params)) if everywhere[i]}
            everywhere = everywhere[len(params) :]
        for each in sent[1:]:
            each.div_(total)
        for (block, p), grad, anywhere in zip(self._others, self._joined.parts(), everywhere, strict=True):
            if captured:
                refuse_unreached([", ".join(block.blocks.leaves)], [p], [0] if p in block.grads else [])
            if captured or anywhere:
                block.grads[p] = grad
        mean = weighted / total + (poison if captured else 0.0)
        return torch.as_tensor(mean, dtype=losses.dtype, device=losses.device)[None]


@final
class Joined:
    """Tensors joined end to end, one flat tensor for each device and dtype, so that they are sent together.

    Args:
        tensors: The tensors.

    Attributes:
        flats: The joined tensors.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._shapes = [tensor.shape for tensor in tensors]
        kinds: dict[object, list[int]] = {}
        for number, tensor in enumerate(tensors):
            kinds.setdefault((tensor.device, tensor.dtype), []).append(number)
        self._numbers = list(kinds.values())
        self.flats = [torch.cat([tensors[i].reshape(-1) for i in numbers]) for numbers in self._numbers]

    def parts(self) -> list[Tensor]:
        """The tensors, as views of ``flats``."""
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
