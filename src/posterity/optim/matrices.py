"""Tensors that a rule treats as one matrix: a layer's weight and bias together, as K-FAC does.

Layers report which tensors belong together in the first pass in which curvature is collected, and the group
remembers it, under ``"blocks"``. A rule's state of the whole matrix (factors of its curvature) is in the
optimiser's state of the block's first tensor; its state of single weights is with each tensor, as usual.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, final

import torch
from torch import Tensor, nn

from posterity.curvature import Kronecker
from posterity.optim.state import COUNTS, Group, State, members
from posterity.optim.statistics import Accumulator, Statistics
from posterity.torch_private import foreach_add_, foreach_copy_

if TYPE_CHECKING:
    from posterity.optim.counting import Behind
    from posterity.optim.optimizer import VariationalOptimizer
    from posterity.optim.step import Draw

Names: TypeAlias = tuple[str, ...]
# Mean, state, what a step has seen, and group of every block; new means and states, in the same order.
Moving: TypeAlias = tuple[Tensor, State, Statistics, Group]


class Refused(ValueError):
    """A rule cannot update a block.

    Args:
        reason: Why, and what to do.
        number: The block's number among those given.
    """

    def __init__(self, reason: str, number: int) -> None:
        super().__init__(reason)
        self.number = number


class Member(NamedTuple):
    """A parameter that can be in a block.

    Attributes:
        number: Its group's number.
        p: The parameter.
        state: Its state in the optimiser.
    """

    number: int
    p: Tensor
    state: State

    @property
    def kind(self) -> tuple[object, ...]:
        """The properties that parameters of one block share."""
        return self.number, self.p.device, self.p.dtype


@final
class Block:
    """Parameters with the same first dimension, flattened to rows and put side by side: ``[O, I + 1]``.

    Args:
        names: The parameters' names.
        among: All parameters, by name.
        matrices: Keys of the state that are not values of single weights.
    """

    def __init__(self, names: Names, among: Mapping[str, Member], matrices: Sequence[str]) -> None:
        self.names, self._matrices = names, matrices
        self.parts = parts = [among[name] for name in names]
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
        """The parameters, or the stored means of half-precision ones."""
        return [part.state.get("mean", part.p.detach()) for part in self.parts]

    def keep(self) -> Tensor | None:
        """The mask of the weights that are updated, if some are not."""
        if not any("keep" in part.state for part in self.parts):
            return None
        return self.join(
            part.state.get("keep", torch.ones_like(part.p, dtype=torch.bool)) for part in self.parts
        )

    def gather(self) -> tuple[Tensor, Tensor, State]:
        """Mean, gradient and state for a rule: parameters without a gradient are zero in all."""
        means, keep = self.means(), self.keep()
        still = [p.grad is None for p in self.params]
        grads = [m if p.grad is None else p.grad.to(m.dtype) for p, m in zip(self.params, means, strict=True)]

        def joined(values: list[Tensor]) -> Tensor:
            if any(still):
                values = [torch.zeros_like(v) if s else v for v, s in zip(values, still, strict=True)]
            return self.join(values)

        apart = {*COUNTS, "mean", "keep", *self._matrices}
        # One part may have come from a posterior, with more than a rule gives the others.
        first, *others = (part.state for part in self.parts)
        single = [key for key in first if key not in apart and all(key in other for other in others)]
        state = {key: joined([part.state[key] for part in self.parts]) for key in single}
        state |= {key: self.state[key] for key in self._matrices if key in self.state}
        grad = joined(grads)
        # What does not move may not move the others through the matrix.
        return joined(means), grad if keep is None else grad * keep, state

    def put(self, mean: Tensor, state: State) -> list[tuple[Tensor, Tensor]]:
        """Convert a rule's results to values and the tensors to write them to.

        Parameters without a gradient do not change, nor do entries that the rule left out or returned
        unchanged.
        """
        keep = self.keep()
        pairs, single = [], {"mean": mean}
        if keep is not None:
            single["mean"] = torch.where(keep, mean, self.join(self.means()))
        for key, value in state.items():
            old = self.state.get(key)
            if key not in self._matrices:
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

    def forget(self) -> None:
        """Drop the state of the matrix as a whole."""
        for key in self._matrices:
            self.state.pop(key, None)


class Made(NamedTuple):
    """A rule's results for blocks, not written yet.

    Attributes:
        old: Blocks that no longer exist.
        blocks: The blocks from now on.
        moving: Those of them that have a gradient.
        results: New mean and state of each of these.
    """

    old: list[Block]
    blocks: list[Block]
    moving: list[Block]
    results: list[tuple[Tensor, State]]

    @property
    def params(self) -> set[Tensor]:
        """The parameters of all blocks."""
        return {p for block in self.blocks for p in block.params}

    def values(self) -> dict[str, list[Tensor]]:
        """The new values of each block, by name."""
        return {
            "+".join(block.names): [mean, *(v for key, v in new.items() if v is not block.state.get(key))]
            for block, (mean, new) in zip(self.moving, self.results, strict=True)
        }


@final
class Matrices:
    """The matrix blocks of an optimiser, as stored in its groups.

    Args:
        groups: The optimiser's groups.
        states: The optimiser's state.
        keys: Keys of the state that are not values of single weights; a rule without any has no blocks.
    """

    def __init__(self, groups: Sequence[Group], states: Mapping[Tensor, State], keys: Sequence[str]) -> None:
        self._groups, self._states, self._keys = groups, states, keys
        self.renew()

    def renew(self) -> None:
        """Look up the blocks again after states were replaced."""
        known = [names for group in self._groups for names in group.get("blocks", ())]
        parts = self._parts() if known else {}  # which would give a state to every parameter
        self._blocks = [self._block(names, parts) for names in known]

    def expect(self, opt: VariationalOptimizer) -> None:
        """Allocate matrices to be loaded: torch.distributed.checkpoint only reads entries that already exist.

        They belong to no block, so a step without loading ignores them.
        """
        if opt.module is None or not self._keys:
            return
        parts = {each.p: each.state for each in self._parts().values()}
        parts = {p: parts[p] for group in self._groups if not opt.by_adam(group) for p in group["params"]}
        for layer in opt.module.modules():
            if isinstance(layer, nn.Linear | nn.Conv1d | nn.Conv2d) and layer.weight in parts:
                outputs = len(layer.weight)
                inputs = layer.weight[0].numel() + (layer.bias is not None and layer.bias in parts)
                for key in self._keys:
                    size = outputs if key in ("outputs", "rows") else inputs
                    state = parts[layer.weight]
                    state[key] = state["momentum"].new_zeros(size, size)

    def by_name(self) -> dict[str, Block]:
        """The blocks, by the name of each of their parameters."""
        return {name: block for block in self._blocks for name in block.names}

    def draw(self, opt: VariationalOptimizer, drawn: Sequence[Draw]) -> None:
        """Draw weights over those that were drawn one by one, from the same noise.

        Args:
            opt: The optimiser, whose rule says how far from the mean a block is drawn.
            drawn: The draws of all groups, those of deterministic parameters left out.
        """
        groups = opt.numbers.groups
        blocks = [each for each in self._blocks if not groups[each.number]["deterministic"]]
        if not blocks:
            return
        places = {p: (draw, i) for draw in drawn for i, p in enumerate(draw.group.params)}
        weights = {draw.group: draw.weights() for draw in drawn}
        targets, values, means = [], [], []
        for block in blocks:
            found = [places[p] for p in block.params]
            noise = block.join(draw.noise.blocks[i] for draw, i in found)
            value, keep = opt.perturb(block.state, noise, groups[block.number]), block.keep()
            values.append(value if keep is None else value * keep)
            means.append(block.join(block.means())[None])
            targets += [weights[draw.group][i] for draw, i in found]
        foreach_add_(values, means)
        parts = [part for block, value in zip(blocks, values, strict=True) for part in block.split(value)]
        _copy(list(zip(targets, parts, strict=True)))

    def made(self, opt: VariationalOptimizer, behind: Behind) -> Made:
        """The rule's results for the blocks that have a gradient; nothing is written.

        Tensors that layers have reported together are a block from now on, whatever they were before.

        Args:
            opt: The optimiser.
            behind: The examples in the step, and the scale of its loss.
        """
        numbers, (size, scale) = opt.numbers, behind
        factors, old, blocks = self._reported(opt.sums)
        if scale is not None:
            factors = {names: replace(each, S=scale * scale * each.S) for names, each in factors.items()}
        known = {id(each) for each in self._blocks}
        moving, given, none = [], [], torch.empty(0)
        for block in blocks:
            if any(p.grad is not None for p in block.params):
                mean, grad, state = block.gather()
                if id(block) not in known:  # what is there belongs to another block of its first parameter
                    state = {key: value for key, value in state.items() if key not in self._keys}
                count = numbers.updates(block.params[0], int(block.state["step"]) + 1)
                grad = grad if scale is None else scale * grad
                stats = Statistics(grad, none, size, count, none, factors.get(block.names))
                moving.append(block)
                given.append((mean, state, stats, numbers.groups[block.number]))
        try:
            results = opt.updates(given)
        except Refused as error:
            names = "+".join(moving[error.number].names)
            raise ValueError(f"{names!r}: {error}; nothing has moved") from error
        return Made(old, blocks, moving, results)

    def write(self, made: Made, ok: Tensor | None) -> None:
        """Write a rule's results to the blocks, unless a flag on the device is not set."""
        for block in made.old:
            block.forget()
        pairs = [
            pair for block, new in zip(made.moving, made.results, strict=True) for pair in block.put(*new)
        ]
        _copy(pairs if ok is None else [(to, torch.where(ok, value, to)) for to, value in pairs])
        parts = [part for each in made.moving for part in each.parts]
        if counts := [part.state["step"] for part in parts if part.p.grad is not None]:
            foreach_add_(counts, 1)
        if made.blocks != self._blocks:
            self._remember(made.blocks)

    def _reported(self, sums: Accumulator) -> tuple[dict[Names, Kronecker], list[Block], list[Block]]:
        """Factors by block, blocks that no longer exist, and the blocks from now on."""
        if not sums.layers:
            return {}, [], self._blocks
        parts = self._parts()
        factors = {
            names: each
            for names, each in by_block(sums.layers.values(), parts).items()
            if any(parts[name].p.grad is not None for name in names)
        }
        named = {name for names in factors for name in names}
        old = [each for each in self._blocks if each.names not in factors and named & {*each.names}]
        blocks = [each for each in self._blocks if each not in old]
        known = {each.names for each in blocks}
        return (
            factors,
            old,
            [*blocks, *(self._block(names, parts) for names in factors if names not in known)],
        )

    def displace(self, blocks: Iterable[Names], fresh: Mapping[Tensor, State]) -> None:
        """Replace parameters' states, and the blocks of states with matrices.

        Args:
            blocks: Names of parameters that belong together.
            fresh: The states.
        """
        if not self._keys:
            return
        old = [each for each in self._blocks if not fresh.keys().isdisjoint(each.params)]
        for block in old:
            block.forget()
        parts = self._parts()
        new = [names for names in blocks if not fresh[parts[names[0]].p].keys().isdisjoint(self._keys)]
        kept = [each for each in self._blocks if each not in old]
        self._remember([*kept, *(self._block(names, parts) for names in new)])

    def _remember(self, blocks: list[Block]) -> None:
        self._blocks = blocks
        for number, group in enumerate(self._groups):
            group["blocks"] = tuple(each.names for each in blocks if each.number == number)

    def _block(self, names: Names, parts: Mapping[str, Member]) -> Block:
        return Block(names, parts, self._keys)

    def _parts(self) -> dict[str, Member]:
        return {
            name: Member(number, p, self._states[p])
            for number, group in enumerate(self._groups)
            for name, p in members(group)
        }


def by_block(layers: Iterable[Kronecker], parts: Mapping[str, Member]) -> dict[Names, Kronecker]:
    """The factors of blocks that layers have reported.

    A weight and a bias that differ in group or dtype are separate blocks, each with its own columns.
    """
    found: dict[Names, Kronecker] = {}
    for layer in layers:
        if layer.bias is None:
            found[layer.weight,] = layer
        elif parts[layer.weight].kind == parts[layer.bias].kind:
            found[layer.weight, layer.bias] = layer
        else:
            found[layer.weight,] = replace(layer, bias=None, A=layer.A[:-1, :-1])
            found[layer.bias,] = replace(layer, weight=layer.bias, bias=None, A=layer.A[-1:, -1:])
    return found


def _copy(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Write values over tensors, all at once."""
    if pairs:
        targets, values = zip(*pairs, strict=True)
        foreach_copy_(targets, values)
