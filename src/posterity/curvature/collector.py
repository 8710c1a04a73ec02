"""Statistics that a backward pass collects beyond the gradient.

A *term* g_i of example i is the gradient of the batch's loss in a copy of the weights that only example i
uses. If examples do not interact (no BatchNorm in training mode) it is the gradient of the example's own
loss, over the batch size for a mean loss. With BatchNorm they interact: the effect of example i on the others
through the batch's statistics is then in its term. The terms always add up to the gradient. For a weight that
several layers use, a term is the sum over these layers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Self, final

import torch
from torch import Tensor, nn

from posterity.curvature.results import Curvature, Kronecker, NothingCollected, Uncollected
from posterity.curvature.several import Report, Run, added_squares, gathered, several_batches
from posterity.layers import Intercept, LayerCall, Part
from posterity.torch_private import graph_task_id


class Collector(ABC):
    """Collects statistics from every backward pass inside ``with collector:``, for the watched parameters.

    Sums continue over contexts until :meth:`clear`. Inside, layers use aliases of their weights: ``p.grad``
    gets the gradient, and hooks on the weight are called, once ``backward()`` is done.

    Args:
        params: A module, for all of its parameters, or tensors by name: parameters, or drawn weights, with
            samples on the first axis in a stacked pass. Those that require no gradient are left out.
        batch_dim: The axis of the examples in the inputs of linear layers, embeddings and LayerNorm, if these
            have several axes.
        strict: Whether to raise for a parameter that is used in an unsupported way; otherwise it is listed in
            ``refused`` and left out.
        once: Whether to refuse a second backward pass through the same forward pass, which would add the
            squares of its own gradients, not those of the sum.

    Attributes:
        sums: Σ g_i² over examples and samples, by name, of the loss as given to backward. Put your own zeros
            here to accumulate into them.
        blocks: Sums of Kronecker factors, if the collector has them.
        examples: Number of examples, each counted once for every sample.
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
        self.batch_dim, self._strict, self._once = batch_dim, strict, once
        self._watched: list[tuple[Tensor, Part]] = []
        self._intercept: Intercept | None = None
        self.refused: dict[str, str] = {}
        self.only: set[str] | None = None
        self._context: object = None  # of forward passes that may be differentiated
        self._run = Run(None)
        self.watch({} if params is None else params)
        self.clear()

    def watch(self, params: nn.Module | Mapping[str, Tensor], *, stacked: bool = False) -> Self:
        """Watch these tensors from now on: ``with collector.watch(drawn): …``.

        Args:
            params: As for the collector itself.
            stacked: Whether they are samples ``[K, …]`` for ``stacked_pass``, except shared ones.
        """
        if self._intercept is not None:
            raise RuntimeError(
                "this collector is already active: watch other parameters after leaving its context"
            )
        named = dict(params.named_parameters()) if isinstance(params, nn.Module) else params
        self.stacked = stacked
        self._watched = [(p, Part(name)) for name, p in named.items() if p.requires_grad]
        return self

    def clear(self) -> None:
        """Clear the sums, and outside the context the refusals."""
        self.sums: dict[str, Tensor] = {}
        self.blocks: dict[str, Kronecker] = {}
        self.examples = 0
        self._passes: list[set[str]] = []  # names that each backward pass of the last context has reported
        if self._intercept is None:  # inside, what a forward pass has shown is not forgotten
            self.refused.clear()
        # Squares of a backward pass that are not yet summed over examples, and reports of weights that
        # several layers use.
        self._late: list[tuple[LayerCall, Tensor]] = []
        self._held: list[Report] = []
        self._task = -1

    def __enter__(self) -> Self:
        if self._intercept is not None:
            raise RuntimeError("this collector is already active: enter its context once only")
        if not self._watched:
            raise RuntimeError(
                "the collector has nothing to watch: give it at least one parameter that requires a gradient"
            )
        current = Intercept.current()
        self._intercept, self._joined = current or Intercept(), current is not None
        self._context, self._passes = object(), []
        self._run, self._collected = Run(self._context), False  # whether there was a backward pass
        self.reported: set[str] = set()  # by the running backward pass
        self._versions = [(tensor, tensor._version) for tensor, _ in self._watched if not tensor.is_leaf]
        self._intercept.passes.listen(self, self._watched)
        if not self._joined:
            self._intercept.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        intercept = self._intercept
        assert intercept is not None
        try:
            if not self._joined:
                intercept.__exit__(kind, *error)  # type: ignore[no-untyped-call]
            intercept.passes.leave(self, failed=kind is not None)
        finally:
            self._intercept = self._context = None
        self._add_late()
        if kind is not None:
            return
        changed = {id(tensor) for tensor, version in self._versions if tensor._version != version}
        if changed:
            names = [part.name for tensor, part in self._watched if id(tensor) in changed]
            self.refuse(names, "was changed in place")
        if not (self._collected or self.refused):
            raise NothingCollected(
                "nothing was collected: run forward and backward inside the context, with the watched tensors"
            )

    def several(self) -> set[str]:
        """Names reported by several backward passes since :meth:`clear`, in the last context."""
        passes = Counter(name for names in self._passes for name in names)
        return {name for name, count in passes.items() if count > 1}

    # The layers' interface.

    def begin(self, call: LayerCall) -> None:
        """Called when a layer runs."""
        run = self._run
        if run.begun:
            run = self._run = Run(self._context)
        call.run, run.examples = run, call.examples
        for part in call.parts:
            if part is not None:
                uses = run.uses.setdefault(part.name, [])
                uses.append(part)
                run.repeated = run.repeated or len(uses) > 1

    def seen_examples(self) -> int | None:
        """Number of examples of the last layer in this forward pass."""
        return None if self._run.begun else self._run.examples

    def refuse(self, names: Sequence[str], reason: str) -> None:
        """Refuse parameters that are used in an unsupported way."""
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
        """Drop the whole block if one parameter is refused."""
        for name in names:
            if name is not None:
                self.refused.setdefault(name, "is in one block with a parameter that is refused")

    def report(self, call: LayerCall, x: Tensor | None, grad: Tensor) -> Tensor | None:
        """Take a layer's inputs and its outputs' gradient; returns the weight's gradient if computed here."""
        run, task, names = call.run, graph_task_id(), call.names
        if run.context is not self._context:
            raise RuntimeError(
                "backward() was called after the context of its forward pass had ended: call it "
                "inside the context"
            )
        if task != self._task:
            self.end_pass()  # of one that nobody has seen end
            self._task = task
        self.reported.update(names)
        if self.only is not None and not self.only.issuperset(names):
            self.refuse(
                [name for name in names if name not in self.only],
                "lies behind a backward pass that makes no gradient of it (take those of inputs outside)",
            )
        if not call.fresh:
            if self._once:
                self.refuse(names, "is in several backward passes of one forward pass (add the losses)")
        elif any(run.tasks.setdefault(part[::2], task) != task for part in call.parts if part):
            # Another forward pass, before the backward pass of the first: its examples are others.
            run.begun.clear()
            run.tasks = {part[::2]: task for part in call.parts if part}
            run.matched = run.counted = None
        if call.fresh and (call.examples != run.matched or call.counted != run.counted):
            # Checked only here: a pass without a backward pass does no harm.
            self._match(call, run)
        part = call.parts[0] or call.parts[1]
        if part is not None and part.sample not in run.begun:
            run.begun.add(part.sample)
            self.examples += call.samples * call.examples
        if call.axis or call.folded or call.grad_axis is not None:
            x = None if x is None else call.rows(x, call.x_axis)
            grad = call.rows(grad, call.grad_axis)
        if not (run.repeated and any(part is not None and run.several(part) for part in call.parts)):
            return self._take(call, x, grad)
        # An example's gradient may be the sum over several layers: known when the backward pass is over.
        self._held.append(Report(call, x, grad, call.fresh))
        if x is None or not self.brings_gradient(call):
            return None
        return call.squares(x, grad, False).gradient

    def _match(self, call: LayerCall, run: Run) -> None:
        """Refuse a number of examples that differs from earlier layers'."""
        if not call.examples:
            raise ValueError("a batch has no examples: skip empty batches")
        if None not in (run.counted, call.counted) and run.counted != call.counted:
            self.refuse(
                call.names,
                f"counts examples on axis {call.counted} where another layer does on axis {run.counted} "
                "(pass batch_dim=1 for [T, B, …], or give attention batch_first=True)",
            )
        elif run.matched not in (None, call.examples):
            self.refuse(call.names, f"sees {call.examples} examples where another layer saw {run.matched}")
        else:  # the next one is to be like those before
            run.matched = call.examples
            run.counted = run.counted if call.counted is None else call.counted

    @abstractmethod
    def brings_gradient(self, call: LayerCall) -> bool:
        """Whether report() gives the gradient of such a layer's weight."""

    @abstractmethod
    def _take(self, call: LayerCall, x: Tensor | None, grad: Tensor) -> Tensor | None:
        """Add the statistics of a layer whose weights no other layer uses."""

    # Shared by the methods.

    def end_pass(self) -> None:
        """Called after a backward pass: add the statistics held until then."""
        self._add_late()
        if self.reported:
            self._passes.append(self.reported)
            self.reported, self._collected = set(), True
        if self._run.begun:
            self._run = Run(self._context)
        if self._held:
            with torch.no_grad(), torch.autocast(self._held[0].grad.device.type, enabled=False):
                self._add_held()

    def _add_held(self) -> None:
        """Add the statistics of weights that several layers may use."""
        held, self._held = self._held, []
        alone, groups = gathered(held)
        for call, x, grad, fresh in alone:
            call.fresh = fresh
            self._take(call, x, grad)
            call.fresh = False
        for part, group in groups:
            if several_batches(group):
                self.refuse(
                    [part.name],
                    "is used on several inputs from outside the model before a backward pass, which may be "
                    "several batches (call backward() after each, or pass them as one)",
                )
            if part.name not in self.refused:
                self._add(part, added_squares(group))

    def _add_squares(self, call: LayerCall, x: Tensor | None, grad: Tensor) -> Tensor | None:
        """Add Σ g² of a layer; returns the weight's gradient if computed here."""
        weight, bias = call.parts
        if weight is None or x is None:
            if bias is not None:
                self._add(bias, call.bias_squares(grad))
            return None
        found = call.squares(x, grad, bias is not None)
        if found.by_example is not None:
            self._late.append((call, found.by_example))
            return None
        if found.weight is not None:
            self._add(weight, found.weight)
        if bias is not None and found.bias is not None:
            self._add(bias, found.bias)
        return found.gradient

    def _add_late(self) -> None:
        """Add terms that are not yet summed over examples, for all layers at once."""
        alike: defaultdict[tuple[object, ...], list[tuple[LayerCall, Tensor]]] = defaultdict(list)
        for call, both in self._late:
            alike[both.device, both.dtype, both.shape[1]].append((call, both))
        self._late = []
        for some in alike.values():
            sizes = [both.shape[2] for _, both in some]
            sums = torch.cat([both for _, both in some], 2).sum(1)
            for (call, _), both in zip(some, sums.split_with_sizes(sizes, 1), strict=True):
                for part, squares in zip(call.parts, both.unbind(), strict=True):
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

    def _mean(self, batch_size: int | None, samples: int, count: float | None) -> Curvature:
        """Scale to the examples' own losses: a mean loss's gradients are theirs over the number of its
        terms."""
        self._add_late()
        if samples < 1:
            raise ValueError(f"samples must be at least 1, not {samples}")
        seen = self.examples // samples
        if seen < 1 or seen * samples != self.examples or batch_size not in (None, seen):
            raise ValueError(
                f"the layers saw {self.examples} examples, not {samples} × {batch_size or 'a batch'}: count "
                "those of all passes since clear(), and keep them on one axis up to the last layer"
            )
        if count is not None and not count > 0:
            raise ValueError(f"count must be greater than 0, not {count}")
        scale = (seen if count is None else count) ** 2 / self.examples
        blocks = {
            key: replace(block, A=block.A / block.examples, S=block.S * scale)
            for key, block in self.blocks.items()
        }
        return Curvature(blocks, {name: total * scale for name, total in self.sums.items()})


@final
class Squares(Collector):
    """Σ g_i²: per-example squared gradients, for the diagonal of an empirical Fisher matrix.

    Exact for linear layers (with any positions that share the weight), convolutions, embeddings, attention,
    and the scales and shifts of norms, including biases. Convolutions compute the gradient from the same
    products.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(3, 2)
        >>> squares = Squares(model)
        >>> with squares:
        ...     model(torch.randn(8, 3)).square().mean().backward()
        >>> squares.sums["weight"].shape, squares.mean(batch_size=8)["bias"].shape
        (torch.Size([2, 3]), torch.Size([2]))
    """

    def mean(
        self, batch_size: int | None = None, samples: int = 1, count: float | None = None
    ) -> dict[str, Tensor]:
        """(1/B) Σ_i g_i² of the examples' own losses, averaged over weight samples, by name.

        Args:
            batch_size: B, the examples of all passes together; by default the number that the layers saw.
            samples: K, the number of weight samples in the sums.
            count: Number of terms that the loss is a mean of, if these are not the examples (words, outputs).
        """
        return self._mean(batch_size, samples, count).diagonal

    def brings_gradient(self, call: LayerCall) -> bool:
        """Whether report() gives the gradient of such a layer's weight."""
        return call.brings_gradient

    _take = Collector._add_squares
