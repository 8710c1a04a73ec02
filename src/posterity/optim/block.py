"""A matrix made of tensors: a layer's weight and bias side by side."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias, final

import torch
from torch import Tensor

from posterity.optim.slab import State

Names: TypeAlias = tuple[str, ...]


class Member(NamedTuple):
    """A parameter that a block may have.

    Attributes:
        number: Of its group.
        p: The parameter.
        state: The optimiser's state of it.
    """

    number: int
    p: Tensor
    state: State

    @property
    def kind(self) -> tuple[object, ...]:
        """Parameters of one block have this in common."""
        return self.number, self.p.device, self.p.dtype


@final
class Block:
    """Parameters with the same first dimension, flattened to rows and put side by side: ``[O, I + 1]``.

    Args:
        names: Of the parameters.
        parts: The parameters.
    """

    def __init__(self, names: Names, parts: Sequence[Member]) -> None:
        self.names, self.parts = names, parts
        self.number, _, self.state = parts[0]
        self.params = [part.p for part in parts]
        self._widths = [p.shape[1:].numel() for p in self.params]
        self._dims = [p.dim() for p in self.params]

    def join(self, values: Iterable[Tensor]) -> Tensor:
        """One value per weight, ``[..., *shape]`` of every parameter, as a matrix; a view if it can be."""
        places = zip(values, self._dims, strict=True)
        rows = [value.flatten(1 - dim) if dim > 1 else value.unsqueeze(-1) for value, dim in places]
        return rows[0] if len(rows) == 1 else torch.cat(rows, -1)

    def split(self, matrix: Tensor) -> list[Tensor]:
        """The inverse of :meth:`join`."""
        parts = [matrix] if len(self.params) == 1 else torch.split(matrix, self._widths, -1)
        places = zip(parts, self.params, strict=True)
        return [part.reshape(*matrix.shape[:-2], *p.shape) for part, p in places]

    def means(self) -> list[Tensor]:
        """The parameters, or what is kept of half-precision ones."""
        return [part.state.get("mean", part.p.detach()) for part in self.parts]

    def keep(self) -> Tensor | None:
        """The mask of the weights that are not pruned, if some are."""
        if not any("keep" in part.state for part in self.parts):
            return None
        return self.join(
            part.state.get("keep", torch.ones_like(part.p, dtype=torch.bool)) for part in self.parts
        )

    def gather(self, matrices: Sequence[str]) -> tuple[Tensor, Tensor, State]:
        """Mean, gradient and state, as a rule sees them: parameters without a gradient are zero in all.

        Args:
            matrices: Keys of the state that are not values of single weights.
        """
        means, keep = self.means(), self.keep()
        still = [p.grad is None for p in self.params]
        grads = [m if p.grad is None else p.grad.to(m.dtype) for p, m in zip(self.params, means, strict=True)]

        def joined(values: list[Tensor]) -> Tensor:
            if any(still):
                values = [torch.zeros_like(v) if s else v for v, s in zip(values, still, strict=True)]
            return self.join(values)

        apart = {"step", "mean", "keep", *matrices}
        single = [key for key in self.parts[-1].state if key not in apart]
        state = {key: joined([part.state[key] for part in self.parts]) for key in single}
        state |= {key: self.state[key] for key in matrices if key in self.state}
        grad = joined(grads)
        # What is pruned may not move the others through the matrix.
        return joined(means), grad if keep is None else grad * keep, state

    def put(self, mean: Tensor, state: State, matrices: Sequence[str]) -> list[tuple[Tensor, Tensor]]:
        """Take what a rule has made of them: what is to be written where, others being as they are.

        Parameters without a gradient stay, and so does what the rule has left out or given back.
        """
        keep = self.keep()
        pairs, single = [], {"mean": mean if keep is None else torch.where(keep, mean, 0.0)}
        for key, value in state.items():
            old = self.state.get(key)
            if key not in matrices:
                single[key] = value
            elif old is None or old.shape != value.shape:
                self.state[key] = value.clone()
            elif old is not value:
                pairs.append((old, value))
        moved = [i for i, p in enumerate(self.params) if p.grad is not None]
        for key, value in single.items():
            values = self.split(value)
            pairs += [(self.parts[i].state[key], values[i]) for i in moved if key in self.parts[i].state]
            if key == "mean":
                pairs += [(self.params[i], values[i]) for i in moved]
        return pairs

    def forget(self, matrices: Sequence[str]) -> None:
        """Drop the state of the matrix as a whole."""
        for key in matrices:
            self.state.pop(key, None)
