"""Tensors that a rule treats as one matrix: a layer's weight and bias together, as K-FAC does.

A layer says which tensors belong together in the first pass in which curvature is collected, and the group
remembers it, under ``"blocks"``. What a rule keeps of the matrix as a whole (factors of its curvature) is in
the optimiser's state of the block's first tensor; what it keeps of single weights is with each, as ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeAlias, final

import torch
from torch import Tensor

from posterity.curvature import Kronecker
from posterity.optim.groups import Group, members
from posterity.optim.sampling import Draw
from posterity.optim.slab import State
from posterity.optim.statistics import Accumulator, Statistics

Names: TypeAlias = tuple[str, ...]
Update: TypeAlias = Callable[[Tensor, State, Statistics, Group], tuple[Tensor, State]]


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

    def join(self, values: Iterable[Tensor]) -> Tensor:
        """One value per weight, ``[..., *shape]`` of every parameter, as a matrix."""
        places = zip(values, self.params, self._widths, strict=True)
        return torch.cat([v.reshape(*v.shape[: v.dim() - p.dim()], len(p), w) for v, p, w in places], -1)

    def split(self, matrix: Tensor) -> list[Tensor]:
        """The inverse of :meth:`join`."""
        places = zip(torch.split(matrix, self._widths, -1), self.params, strict=True)
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
        grads = [
            None if p.grad is None else p.grad.to(m.dtype) for p, m in zip(self.params, means, strict=True)
        ]

        def joined(values: Iterable[Tensor]) -> Tensor:
            pairs = zip(values, grads, strict=True)
            return self.join(torch.zeros_like(v) if grad is None else v for v, grad in pairs)

        single = self.parts[-1].state.keys() - {"step", "mean", "keep", *matrices}
        state = {key: joined(part.state[key] for part in self.parts) for key in single}
        state |= {key: self.state[key] for key in matrices if key in self.state}
        grad = joined(mean if grad is None else grad for mean, grad in zip(means, grads, strict=True))
        # What is pruned may not move the others through the matrix.
        return joined(means), grad if keep is None else grad * keep, state

    def put(self, mean: Tensor, state: State, matrices: Sequence[str]) -> None:
        """Write what a rule has made of them; parameters without a gradient stay as they are."""
        keep = self.keep()
        single = {"mean": mean if keep is None else mean * keep}
        for key, value in state.items():
            if key not in matrices:
                single[key] = value
            elif key in self.state and self.state[key].shape == value.shape:
                self.state[key].copy_(value)
            else:
                self.state[key] = value.clone()
        moved = [i for i, p in enumerate(self.params) if p.grad is not None]
        for key, value in single.items():
            values = self.split(value)
            for i in moved:
                if key in self.parts[i].state:
                    self.parts[i].state[key].copy_(values[i])
                if key == "mean":
                    self.params[i].copy_(values[i])
        for i in moved:
            self.parts[i].state["step"] += 1

    def forget(self, matrices: Sequence[str]) -> None:
        """Drop the state of the matrix as a whole."""
        for key in matrices:
            self.state.pop(key, None)


@final
class Blocks:
    """The blocks of an optimiser that are matrices, as its groups remember them.

    Args:
        groups: The optimiser's.
        states: The optimiser's.
        matrices: Keys of the state that are not values of single weights; a rule that has none has no blocks.
    """

    def __init__(
        self, groups: Sequence[Group], states: Mapping[Tensor, State], matrices: tuple[str, ...]
    ) -> None:
        self._groups, self._states, self._keys = groups, states, matrices
        self._blocks: list[Block] = []
        if any(group.get("blocks") for group in groups):
            parts = self._parts()
            self._blocks = [
                Block(names, [parts[name] for name in names]) for group in groups for names in group["blocks"]
            ]

    def by_name(self) -> dict[str, Block]:
        """The blocks, by the name of each of their parameters."""
        return {name: block for block in self._blocks for name in block.names}

    def draw(self, drawn: Sequence[Draw], perturb: Callable[[State, Tensor, Group], Tensor]) -> None:
        """Draw weights over those that were drawn one by one, from the same noise.

        Args:
            drawn: The draws of all slabs, those of deterministic parameters left out.
            perturb: How far from the mean the rule draws a block, given standard normals ``[K, O, I + 1]``.
        """
        if not self._blocks:
            return
        places = {p: (draw, i) for draw in drawn for i, p in enumerate(draw.slab.params)}
        weights = {draw.slab: draw.weights() for draw in drawn}
        for block in self._blocks:
            group = self._groups[block.number]
            if group["deterministic"]:
                continue
            found = [places[p] for p in block.params]
            noise = block.join(draw.noise.blocks[i] for draw, i in found)
            values, keep = block.join(block.means()) + perturb(block.state, noise, group), block.keep()
            parts = block.split(values if keep is None else values * keep)
            for (draw, i), part in zip(found, parts, strict=True):
                weights[draw.slab][i].copy_(part)

    def move(self, sums: Accumulator, sizes: Sequence[int], update: Update) -> set[Tensor]:
        """Move the blocks that have a gradient, all or none of them; the parameters of all blocks.

        What layers have told of is a block from here on, whatever its parameters were before.

        Args:
            sums: What a step has seen.
            sizes: The batch size that each group's rule sees.
            update: The rule.
        """
        parts = self._parts()
        factors = {
            names: each
            for names, each in told(sums.layers.values(), parts, sums.weight).items()
            if any(parts[name].p.grad is not None for name in names)
        }
        named = {name for names in factors for name in names}
        old = [each for each in self._blocks if each.names not in factors and named & {*each.names}]
        blocks = [each for each in self._blocks if each not in old]
        known = {each.names for each in blocks}
        blocks += [Block(names, [parts[name] for name in names]) for names in factors if names not in known]
        moves = []
        for block in blocks:
            if any(p.grad is not None for p in block.params):
                mean, grad, state = block.gather(self._keys)
                if block.names not in known:  # what is there belongs to another block of its first parameter
                    state = {key: value for key, value in state.items() if key not in self._keys}
                stats = Statistics(
                    grad,
                    grad[:0],
                    sizes[block.number],
                    int(block.state["step"]) + 1,
                    grad[:0],
                    factors.get(block.names),
                )
                try:
                    moves.append((block, *update(mean, state, stats, self._groups[block.number])))
                except ValueError as error:
                    raise ValueError(f"{'+'.join(block.names)!r}: {error}; nothing has moved") from error
        for block in old:
            block.forget(self._keys)
        for block, mean, state in moves:
            block.put(mean, state, self._keys)
        self._remember(blocks)
        return {p for block in blocks for p in block.params}

    def displace(self, blocks: Iterable[Names], fresh: Mapping[Tensor, State]) -> None:
        """Let parameters have other states, and other blocks where these have matrices.

        Args:
            blocks: Names of parameters that belong together.
            fresh: The states.
        """
        if not self._keys:
            return
        old = [each for each in self._blocks if not fresh.keys().isdisjoint(each.params)]
        for block in old:
            block.forget(self._keys)
        parts = self._parts()
        new = [names for names in blocks if not fresh[parts[names[0]].p].keys().isdisjoint(self._keys)]
        self._remember(
            [
                *(each for each in self._blocks if each not in old),
                *(Block(names, [parts[name] for name in names]) for names in new),
            ]
        )

    def _remember(self, blocks: list[Block]) -> None:
        self._blocks = blocks
        for number, group in enumerate(self._groups):
            group["blocks"] = tuple(each.names for each in blocks if each.number == number)

    def _parts(self) -> dict[str, Member]:
        return {
            name: Member(number, p, self._states[p])
            for number, group in enumerate(self._groups)
            for name, p in members(group)
        }


def told(layers: Iterable[Kronecker], parts: Mapping[str, Member], weight: float) -> dict[Names, Kronecker]:
    """The factors of blocks that layers have told of, over the weight of all samples together.

    A weight and a bias that differ in group or dtype are blocks of their own, each with its own columns.
    """
    found: dict[Names, Kronecker] = {}
    for layer in layers:
        mean = replace(layer, A=layer.A / weight, S=layer.S / weight)
        if layer.bias is None:
            found[layer.weight,] = mean
        elif parts[layer.weight].kind == parts[layer.bias].kind:
            found[layer.weight, layer.bias] = mean
        else:
            found[layer.weight,] = replace(mean, bias=None, A=mean.A[:-1, :-1])
            found[layer.bias,] = replace(mean, weight=layer.bias, bias=None, A=mean.A[-1:, -1:])
    return found
