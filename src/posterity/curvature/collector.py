"""What a backward pass gathers beyond the gradient.

A *term* g_i of example i is the gradient of the batch's loss in a copy of the weights that only example i
uses. Where examples do not meet (no BatchNorm in training mode) it is the gradient of the example's own loss,
over the batch size for a mean loss. BatchNorm makes them meet: what example i does to the others through the
batch's statistics is then in its term, and all terms together are always the gradient.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import NamedTuple, Self, final

import torch
from torch import Tensor, nn

from posterity.curvature.ends import Notes, Use
from posterity.curvature.layers import Layer, Terms
from posterity.curvature.tap import Taps
from posterity.curvature.uses import Part, Run, Site


class Uncollected(RuntimeError):
    """A parameter is used in a way that nothing can be collected from.

    Attributes:
        reason: Which, and how.

    Example:
        >>> Uncollected("'weight' is used twice").reason
        "'weight' is used twice"
    """

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(
            f"{reason}, from which no single examples' gradients can be collected: do not watch it, or see "
            "curvature.vmap_squares"
        )


@final
@dataclass(frozen=True)
class Kronecker:
    """The factors of one block, see :class:`Factors`.

    Attributes:
        weight: Its parameter's name.
        bias: Its bias's name, if that is part of the block.
        rows: Which rows of both, if not all.
        A: Of inputs, ``[I, I]``, or ``[I + 1, I + 1]`` with a bias.
        S: Of gradients of the outputs, ``[O, O]``.
        examples: Behind A. A layer may see some of the examples only; the others have no part in A, and none
            but zeros in S.
    """

    weight: str
    bias: str | None
    rows: tuple[int, int] | None
    A: Tensor
    S: Tensor
    examples: float = 1.0


class Curvature(NamedTuple):
    """Means over examples, by the name of a parameter.

    Attributes:
        kronecker: Blocks that have factors.
        diagonal: The other parameters.
    """

    kronecker: dict[str, Kronecker]
    diagonal: dict[str, Tensor]


class Collector(ABC):
    """Gathers from every backward pass inside ``with collector:``, for the parameters that it watches.

    Sums go on from context to context, until :meth:`clear`.

    Args:
        params: A module, all of whose parameters are wanted, or tensors by name: parameters, or drawn
            weights, with samples in front in a stacked pass. Those that need no gradient are left out.
        batch_dim: The axis that counts examples in the inputs of linear layers, embeddings and LayerNorm,
            where they have several axes to choose from.
        strict: Whether to raise for a parameter that is used in a way that nothing can be collected from;
            else it is put into ``refused``, and left out.
        once: Whether to refuse a second backward pass through one forward pass: what it adds are squares of
            its own gradients, not those of the sum.

    Attributes:
        sums: Σ g_i² over examples and samples, by name, of the loss as backward saw it. Put zeros of your own
            there to have them added to.
        blocks: Sums of Kronecker factors, where the collector has them.
        examples: How many there were, each counted once for every sample.
        refused: Reasons, by name.
    """

    def __init__(
        self,
        params: nn.Module | Mapping[str, Tensor] | None = None,
        *,
        batch_dim: int = 0,
        strict: bool = True,
        once: bool = False,
    ) -> None:
        if batch_dim < 0:
            raise ValueError(f"batch_dim must be at least 0, not {batch_dim}")
        self._taps, self._strict, self._once = Taps(self, batch_dim), strict, once
        self._wanted: dict[int, tuple[Tensor, Part]] = {}
        self.parts: dict[int, tuple[Tensor, Part]] = {}
        self._entered = False
        self.refused: dict[str, str] = {}
        # In the last context, names of which a backward pass told, and passes whose sums were cleared.
        self._heard: defaultdict[int, set[str]] = defaultdict(set)
        self._dropped: set[int] = set()
        self.watch({} if params is None else params)
        self.clear()

    def watch(self, params: nn.Module | Mapping[str, Tensor], *, stacked: bool = False) -> Self:
        """From here on, gather for these tensors: ``with collector.watch(drawn): …``.

        Args:
            params: As for the collector itself.
            stacked: Whether they are samples ``[K, …]`` for ``stacked_pass``, except those that all share.
        """
        if self._entered:
            raise RuntimeError("a collector is inside its context: watch other parameters after it")
        named = dict(params.named_parameters()) if isinstance(params, nn.Module) else params
        self.stacked = stacked
        self._wanted = {id(p): (p, Part(name)) for name, p in named.items() if p.requires_grad}
        return self

    def clear(self) -> None:
        """Forget the sums, and outside the context what was refused."""
        self.sums: dict[str, Tensor] = {}
        self.blocks: dict[str, Kronecker] = {}
        self.examples = 0
        if self._entered:  # what a forward pass has shown is not forgotten
            self._dropped.update(self._heard)
        else:
            self.refused.clear()
        # Squares of a backward pass that are not yet summed over examples.
        self._terms: list[tuple[Site, Tensor]] = []
        self._task = -1

    def __enter__(self) -> Self:
        if self._entered:
            raise RuntimeError("a collector was entered again inside itself")
        if not self._wanted:
            raise RuntimeError(
                "a collector has nothing to watch: no parameter that needs a gradient was given"
            )
        self.parts = dict(self._wanted)
        self._run = Run()
        self._heard.clear()
        self._dropped.clear()
        self._entered = True
        # Whose gradient is made, without a word from any layer, was used where nobody could see it.
        self._notes = Notes((part.name, tensor) for tensor, part in self._wanted.values())
        self._taps.forget()
        self._taps.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._taps.__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        self._entered = False
        self.parts = {}
        self._notes.remove()
        self._add_terms()
        if kind is not None:
            return
        reached = self._notes.reached
        if not (self._heard or reached or self.refused):
            raise RuntimeError(
                "nothing was collected: run forward and backward inside, with the tensors that are watched"
            )
        # By the backward pass: one use that is heard is no excuse for another one.
        missed = {name for task, made in reached.items() for name in made - self._heard[task]}
        missed -= self.refused.keys()
        if missed:
            self.refuse(sorted(missed), "is used by an operation that cannot be seen")
        passed = {name for task, told in self._heard.items() for name in told - reached[task]}
        passed -= self.refused.keys()
        if passed:
            self.refuse(
                sorted(passed),
                "lies behind a backward pass that makes no gradient of it (take those of inputs outside)",
            )

    def several(self) -> set[str]:
        """Names of which several backward passes have told since :meth:`clear`, in the last context."""
        told = [names for task, names in self._heard.items() if task not in self._dropped]
        return {name for names in told[1:] for name in names if sum(name in each for each in told) > 1}

    # What its taps ask and tell.

    def begin(self, site: Site) -> Run | None:
        """A layer is called: in which forward pass, if it is to be listened to."""
        if torch._C._current_graph_task_id() != -1:
            self.refuse(site.names, "is used in a backward pass, as checkpointing does")
            return None
        if self._run.heard:
            self._run = Run()
        return self._run

    def refuse(self, names: Sequence[str], reason: str) -> None:
        """Parameters are used in a way that nothing can be collected from."""
        if self._strict:
            raise Uncollected(f"{', '.join(map(repr, names))} {reason}")
        for name in names:
            self.refused.setdefault(name, reason)
        for key, block in list(self.blocks.items()):
            if not self.refused.keys().isdisjoint((block.weight, block.bias)):
                self.refuse_block(block.weight, block.bias)
                del self.blocks[key]
        self.sums = {name: each for name, each in self.sums.items() if name not in self.refused}

    def refuse_block(self, *names: str | None) -> None:
        """Of one that is refused in part nothing is left."""
        for name in names:
            if name is not None:
                self.refused.setdefault(name, "is in one block with a parameter that is refused")

    def heard(self, use: Use, x: Tensor | None, grad: Tensor, extras: Sequence[Tensor]) -> Tensor | None:
        """A use's inputs and gradient; the weight's gradient, if it brings it."""
        site, run, task = use.site, use.run, torch._C._current_graph_task_id()
        if not site.place.examples:
            raise ValueError("a batch has no examples: leave it out")
        if task != self._task:
            self._add_terms()  # those of many passes would fill the memory
            self._task = task
        self._heard[task].update(site.names)
        if use.fresh:
            # Only now: a pass that nobody differentiates does no harm.
            if run.place != site.place:
                self._match(site, run)
            if not run.names.isdisjoint(site.names):
                twice = {part.name for part in site.parts if any(map(part.meets, run.used))}
                if twice:
                    self.refuse(sorted(twice), "is used twice before a backward pass")
            run.names.update(site.names)
            run.used += site.parts
        elif self._once:
            self.refuse(site.names, "is in several backward passes of one forward pass (add the losses)")
        sample = site.parts[0].sample
        if sample not in run.heard:
            run.heard.add(sample)
            self.examples += site.place.samples * site.place.examples
        return self._take(use, x, grad, extras)

    def _match(self, site: Site, run: Run) -> None:
        """Refuse examples that are not those of the uses that have told before."""
        examples, counted = site.place.examples, site.place.counted
        if run.place is not None and run.place.examples != examples:
            self.refuse(site.names, f"sees {examples} examples where another layer saw {run.place.examples}")
            return  # the next one is to be like those before
        if counted is not None:
            if run.counted not in (None, counted):
                self.refuse(
                    site.names,
                    f"counts examples on axis {counted} where another layer does on axis {run.counted} "
                    "(attention has batch_first=True)",
                )
            run.counted = counted
        run.place = site.place

    @abstractmethod
    def brings_gradient(self, layer: Layer) -> bool:
        """Whether heard() gives the gradient of such a layer's weight."""

    @abstractmethod
    def _take(self, use: Use, x: Tensor | None, grad: Tensor, extras: Sequence[Tensor]) -> Tensor | None:
        """Add what this method gathers."""

    # What the methods share.

    def _add_squares(
        self, use: Use, x: Tensor | None, grad: Tensor, extras: Sequence[Tensor]
    ) -> Tensor | None:
        """Add Σ g² of a use; the weight's gradient, if the layer brings it."""
        site = use.site
        layer, weight, bias = site.layer, site.weight, site.bias
        if weight is None or x is None:
            if bias is not None:
                self._add(bias, layer.bias_squares(site.stacks(None, grad)[1]))
            return None
        found = layer.of_one(x, grad, extras, bias is not None) if site.alone else None
        if found is None:
            found = layer.squares(*site.stacks(x, grad), extras, bias is not None)
            if site.alone and found.gradient is not None:
                found = found._replace(gradient=found.gradient[0])
        if isinstance(found, Terms):
            self._terms.append((site, found.both))
            if not self._entered:  # nobody would add them later
                self._add_terms()
            return None
        self._add(weight, found.weight)
        if bias is not None and found.bias is not None:
            self._add(bias, found.bias)
        return found.gradient

    def _add_terms(self) -> None:
        """Add what is not yet summed over examples, all layers' at once."""
        alike: defaultdict[tuple[object, ...], list[tuple[Site, Tensor]]] = defaultdict(list)
        for site, both in self._terms:
            alike[both.device, both.dtype, both.shape[1]].append((site, both))
        self._terms = []
        for some in alike.values():
            sizes = [both.shape[2] for _, both in some]
            weights, biases = torch.cat([both for _, both in some], 2).sum(1).unbind()
            for (site, _), weight, bias in zip(
                some, weights.split_with_sizes(sizes), biases.split_with_sizes(sizes), strict=True
            ):
                for part, squares in ((site.weight, weight), (site.bias, bias)):
                    if part is not None:
                        self._add(part, squares)

    def _add(self, part: Part, squares: Tensor) -> None:
        if part.name in self.refused:
            return
        if part.rows is None and part.name not in self.sums:
            self.sums[part.name] = squares
            return
        start, stop, count = part.rows or (0, len(squares), len(squares))
        if part.name not in self.sums:
            self.sums[part.name] = squares.new_zeros(count, *squares.shape[1:])
        self.sums[part.name][start:stop].add_(squares)

    def _mean(self, batch_size: int | None, samples: int) -> Curvature:
        """Of the examples' own losses: a mean loss's gradients are theirs over the batch size."""
        self._add_terms()
        if samples < 1:
            raise ValueError(f"samples must be at least 1, not {samples}")
        seen = self.examples // samples
        if seen < 1 or seen * samples != self.examples or batch_size not in (None, seen):
            raise ValueError(
                f"the layers saw {self.examples} examples, not {samples} × {batch_size or 'a batch'}: count "
                "those of all passes since clear(), and keep them on one axis up to the last layer"
            )
        scale = seen / samples
        blocks = {
            key: replace(block, A=block.A / block.examples, S=block.S * scale)
            for key, block in self.blocks.items()
        }
        return Curvature(blocks, {name: total * scale for name, total in self.sums.items()})
