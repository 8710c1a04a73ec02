"""Tensors that a rule treats as one matrix: a layer's weight and bias together, as K-FAC does.

A layer says which tensors belong together in the first pass in which curvature is collected, and the group
remembers it, under ``"blocks"``. What a rule keeps of the matrix as a whole (factors of its curvature) is in
the optimiser's state of the block's first tensor; what it keeps of single weights is with each, as ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias, final

import torch
from torch import Tensor

from posterity.curvature import Kronecker
from posterity.optim.block import Block, Member, Names
from posterity.optim.groups import Group, members
from posterity.optim.live import Live, under_way
from posterity.optim.sampling import Draw
from posterity.optim.slab import State
from posterity.optim.statistics import Accumulator, Statistics

# Mean, state, what a step has seen, and group of every block; new means and states, in the same order.
Moving: TypeAlias = tuple[Tensor, State, Statistics, Group]
Updates: TypeAlias = Callable[[Sequence[Moving]], Sequence[tuple[Tensor, State]]]


class Refused(ValueError):
    """A rule cannot move a block.

    Args:
        reason: Why, and what to do.
        number: Which of those that it was given.
    """

    def __init__(self, reason: str, number: int) -> None:
        super().__init__(reason)
        self.number = number


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

    def draw(
        self,
        drawn: Sequence[Draw],
        perturb: Callable[[State, Tensor, Group], Tensor],
        live: Live | None,
    ) -> None:
        """Draw weights over those that were drawn one by one, from the same noise.

        Args:
            drawn: The draws of all slabs, those of deterministic parameters left out.
            perturb: How far from the mean the rule draws a block, given standard normals ``[K, O, I + 1]``.
            live: What a captured step reads from the device.
        """
        groups = under_way(self._groups, live)
        blocks = [each for each in self._blocks if not groups[each.number]["deterministic"]]
        if not blocks:
            return
        places = {p: (draw, i) for draw in drawn for i, p in enumerate(draw.slab.params)}
        weights = {draw.slab: draw.weights() for draw in drawn}
        targets, values, means = [], [], []
        for block in blocks:
            found = [places[p] for p in block.params]
            noise = block.join(draw.noise.blocks[i] for draw, i in found)
            values.append(perturb(block.state, noise, groups[block.number]))
            means.append(block.join(block.means())[None])
            targets += [weights[draw.slab][i] for draw, i in found]
        torch._foreach_add_(values, means)
        parts = []
        for block, value in zip(blocks, values, strict=True):
            keep = block.keep()
            parts += block.split(value if keep is None else value * keep)
        _copy(list(zip(targets, parts, strict=True)))

    def move(
        self,
        sums: Accumulator,
        sizes: Sequence[int],
        updates: Updates,
        live: Live | None,
        ok: Tensor | None,
    ) -> set[Tensor]:
        """Move the blocks that have a gradient, all or none of them; the parameters of all blocks.

        What layers have told of is a block from here on, whatever its parameters were before.

        Args:
            sums: What a step has seen.
            sizes: The batch size that each group's rule sees.
            updates: The rule.
            live: What a captured step reads from the device.
            ok: A flag there that lets values through, if there is one.
        """
        groups = under_way(self._groups, live)
        factors, old, blocks = self._told(sums)
        known = {id(each) for each in self._blocks}
        moving, given, none = [], [], torch.empty(0)
        for block in blocks:
            if any(p.grad is not None for p in block.params):
                mean, grad, state = block.gather(self._keys)
                if id(block) not in known:  # what is there belongs to another block of its first parameter
                    state = {key: value for key, value in state.items() if key not in self._keys}
                stats = Statistics(
                    grad,
                    none,
                    sizes[block.number],
                    int(block.state["step"]) + 1 if live is None else live.step(block.params[0]),
                    none,
                    factors.get(block.names),
                )
                moving.append(block)
                given.append((mean, state, stats, groups[block.number]))
        try:
            made = updates(given)
        except Refused as error:
            names = "+".join(moving[error.number].names)
            raise ValueError(f"{names!r}: {error}; nothing has moved") from error
        for block in old:
            block.forget(self._keys)
        pairs = [
            pair for block, new in zip(moving, made, strict=True) for pair in block.put(*new, self._keys)
        ]
        _copy(pairs if ok is None else [(to, torch.where(ok, value, to)) for to, value in pairs])
        if counts := [
            part.state["step"] for each in moving for part in each.parts if part.p.grad is not None
        ]:
            torch._foreach_add_(counts, 1)
        if blocks != self._blocks:
            self._remember(blocks)
        return {p for block in blocks for p in block.params}

    def _told(self, sums: Accumulator) -> tuple[dict[Names, Kronecker], list[Block], list[Block]]:
        """Factors by block, blocks that are none any more, and those that there are from here on."""
        if not sums.layers:
            return {}, [], self._blocks
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
        new = [Block(names, [parts[name] for name in names]) for names in factors if names not in known]
        return factors, old, [*blocks, *new]

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
        mean = layer
        if not layer.examples == weight == 1:
            mean = replace(layer, A=layer.A / layer.examples, S=layer.S / weight)
        if layer.bias is None:
            found[layer.weight,] = mean
        elif parts[layer.weight].kind == parts[layer.bias].kind:
            found[layer.weight, layer.bias] = mean
        else:
            found[layer.weight,] = replace(mean, bias=None, A=mean.A[:-1, :-1])
            found[layer.bias,] = replace(mean, weight=layer.bias, bias=None, A=mean.A[-1:, -1:])
    return found


def _copy(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Write values over tensors, all at once."""
    if pairs:
        targets, values = zip(*pairs, strict=True)
        torch._foreach_copy_(targets, values)
