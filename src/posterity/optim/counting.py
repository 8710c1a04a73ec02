"""The number of examples in a step, and the number of terms that its loss is a mean of.

The data's log-likelihood is a sum over N examples (``num_data``), each of which may have several terms: the
words of a text, the outputs of a regression. Rules are written for the mean over the B examples of a step,

    (1/B) Σ_i nll_i

and a loss that is a mean over ``count`` terms is B / count times that. So E[g] and E[g·eps] are multiplied by
count / B, and squares and factors of gradients by its square: with ``count=`` every mean gives the posterior
of the mean per example, whatever the rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, final

import torch
from torch import Tensor, nn

from posterity.arguments import described, is_dense, is_number
from posterity.caller import warn
from posterity.layers import Intercept
from posterity.layers.losses import Notes
from posterity.layers.stacks import innermost
from posterity.optim.scales import Scales
from posterity.sharding import ShardedModel
from posterity.torch_private import add_hook, graph_task_id, is_compiled, tree_leaves

if TYPE_CHECKING:
    from posterity.optim.optimizer import VariationalOptimizer

_UNKNOWN = (
    "{} needs the number of examples behind each step, and counts them only where its module is called once "
    "before each backward(): pass step(..., batch_size=len(x)), or give the optimiser batch_size= once"
)


class CountWarning(UserWarning):
    """A loss is a mean over something other than examples, and ``count=`` was not given.

    Example:
        >>> import warnings
        >>> warnings.filterwarnings("error", category=CountWarning)  # stop at the first step
    """


# Lengths of the axis of examples in a batch and of the other one that could hold them, None if unknown.
Axes: TypeAlias = tuple[float | None, float | None]


class Behind(NamedTuple):
    """The examples of a step, and the scale of its loss.

    Attributes:
        batch_size: B, the examples; 0 if unknown and not needed by the rule. A tensor in a captured step of
            several processes.
        scale: count / B, a tensor in a captured step; None if the loss is a mean over examples.
    """

    batch_size: float | Tensor
    scale: float | Tensor | None = None


def as_count(count: float | Tensor | None) -> float | None:
    """A user's ``count=`` as a number."""
    if count is not None and not (
        is_number(count) or (isinstance(count, Tensor) and is_dense(count) and count.numel() == 1)
    ):
        raise TypeError(f"count must be a number, or a tensor of one, not {described(count)}")
    if count is not None and not 0 < float(count) < math.inf:
        raise ValueError(f"count must be greater than 0, not {float(count):g}")
    return None if count is None else float(count)


def refuse_unknown(
    opt: VariationalOptimizer, batch_size: float | None, count: float | None, runs: bool
) -> None:
    """Raise, before a step begins, if the number of its examples cannot be known.

    Args:
        opt: The optimiser.
        batch_size: As the user gave it.
        count: Likewise.
        runs: Whether the module will run, or else has run.
    """
    if batch_size is not None and not (is_number(batch_size) and 1 <= batch_size < math.inf):
        raise ValueError(f"batch_size must be at least 1, not {described(batch_size)}")
    told = batch_size or count or opt.param_groups[0].get("batch_size") or opt.sums.counted()
    waits = opt.module is not None and (runs or not opt.sums.samples)
    if asks_batch_size(opt) and not told and not waits:
        raise ValueError(_UNKNOWN.format(type(opt).__name__))


def asks_batch_size(opt: VariationalOptimizer) -> bool:
    """Whether the rule needs the number of examples in a step."""
    return opt.needs_batch_size and not all(group["deterministic"] for group in opt.param_groups)


def behind_here(opt: VariationalOptimizer, behind: Any) -> Any:
    """The number of terms of this process's loss: the user's, or the number of examples counted."""
    if behind is not None:
        return behind
    return opt.local.counted() or opt.local.seen_by_layers() or opt.param_groups[0].get("batch_size") or 1


def behind(
    opt: VariationalOptimizer, given: float | None, counted: float | None, count: float | None
) -> Behind:
    """The examples of a step, from all sources.

    Args:
        opt: The optimiser. Its own ``batch_size`` is used if examples were not counted.
        given: B, as passed by the user at this step; overrides all others.
        counted: B, in the inputs of the module.
        count: Terms that the loss is a mean of; None if they are the examples.
    """
    size, own = counted if given is None else given, opt.param_groups[0].get("batch_size")
    layers, asks = opt.sums.seen_by_layers(), asks_batch_size(opt)
    if size is not None and layers is not None and abs(size - layers) * opt.sums.samples > 0.5:
        said, other = f"batch_size={given}", "count those of all micro-batches"
        if given is None:
            said = f"the {size:g} of the model's inputs"
            other = f"pass step(..., batch_size={layers:g}) if that is right"
        raise ValueError(
            f"the layers saw {layers:g} examples, not {said}: {other}, or keep examples on axis "
            f"{opt.batch_dim} (batch_dim=)"
        )
    if asks and given is None and size is not None and own is not None and size > own:
        raise ValueError(
            f"the model's inputs have {size:g} examples on axis {opt.batch_dim}, more than batch_size={own}: "
            "leave it out if that is right, else pass step(..., batch_size=)"
        )
    size = size or layers or own
    if size is None and asks and count is None:
        raise ValueError(_UNKNOWN.format(type(opt).__name__))
    if count is None:
        return Behind(size or 0)
    if size is None and not asks:
        raise ValueError(f"count={count:g} also needs the number of examples: pass batch_size=len(x)")
    size = size or 1  # the rule multiplies by both
    return Behind(size, count / size)


def examples_of(batch: object, axis: int) -> int | None:
    """The length of an axis of the first tensor that has it, also in dicts, lists and tuples; None if none
    has."""
    if isinstance(batch, Tensor):
        return batch.shape[axis] if batch.dim() > axis else None
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else ()
    return next((size for each in parts if (size := examples_of(each, axis)) is not None), None)


def both_axes(batch: object, axis: int) -> tuple[int | None, int | None]:
    """Lengths of the axis of examples and of the other one that could hold them: 1, or else 0."""
    return examples_of(batch, axis), examples_of(batch, 0 if axis else 1)


@final
class ModuleCalls:
    """A forward hook of a module inside one context: counts examples, and refuses a backward pass after it.

    Examples count when a backward pass with gradients reaches the outputs of their call. Several calls before
    one backward pass may have the same examples (a siamese net) or others: these cannot be counted.

    Args:
        axis: The axis of the examples, in the first tensor among the module's inputs.
        params: The parameters whose gradients count.
        sharded: The parameters' model, if they are sharded.

    Attributes:
        inside: Whether the context is active.
        last: Number of examples of the last call, if known.
        beside: Length of the other axis that could hold the examples, in that call.
    """

    def __init__(self, axis: int, params: Sequence[Tensor], sharded: ShardedModel | None = None) -> None:
        self.inside = True
        self.last: int | None = None
        self.beside: int | None = None
        self._axis, self._params, self._sharded = axis, params, sharded
        # By backward pass, the examples of the calls behind it.
        self._passes: dict[int, list[int | None]] = {}

    def __call__(self, _: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """A call of the module."""
        if torch.compiler.is_compiling():
            return
        self.last, self.beside = both_axes((args, kwargs), self._axis)
        reached = self._hook(self.last)
        for each in [output] if isinstance(output, Tensor) else tree_leaves(output):
            if isinstance(each, Tensor) and each.grad_fn is not None:
                add_hook(each, reached)

    def _hook(self, examples: int | None) -> Callable[[Tensor], None]:
        """The hook on the outputs of a call, for a backward pass that reaches them."""
        fresh = [True]

        def reached(_: Tensor) -> None:
            if not self.inside:  # autograd itself would only say that a weight was changed in place
                raise RuntimeError(
                    "backward() was called after sampled_params() had ended and the means were "
                    "restored: call it inside the context"
                )
            task = graph_task_id()
            later = self._passes and task not in self._passes
            if later and all(p.grad is None for p in self._params) and not self._waiting():
                self._passes.clear()  # gradients were dropped since, or wanted in something else
            if fresh:
                fresh.clear()
                self._passes.setdefault(task, []).append(examples)

        return reached

    def _waiting(self) -> bool:
        """Whether there are gradients that no parameter has received yet."""
        return self._sharded is not None and self._sharded.holds_gradients()

    def reached(self) -> bool:
        """Whether a backward pass has come from the outputs of a call."""
        return bool(self._passes)

    def examples(self) -> int | None:
        """The examples of all calls that a backward pass has reached; None if they cannot be counted."""
        calls = [each for behind in self._passes.values() for each in behind]
        known = [each for each in calls if each is not None]
        return sum(known) if known and len(known) == len(calls) == len(self._passes) else None


@final
class LossTerms:
    """Checks an optimiser's first step, and warns if losses are means over something other than examples.

    It also warns if inputs or targets are far from standardised.

    Args:
        rule: The optimiser's name, for messages.
        axis: The axis of the examples, if the user can set it by ``batch_dim=``.

    Attributes:
        guess: The mean of the first step's losses, and that of a guess: infinite if unknown.
    """

    def __init__(self, rule: str, axis: int | None = None) -> None:
        self._rule, self._axis = rule, axis
        self.guess = math.nan, math.inf
        self._scales: Scales | None = Scales()  # None after the first step
        self.clear()

    def clear(self) -> None:
        """Start the next step."""
        self._seen: list[tuple[str, float, Axes]] = []
        self._guesses: list[tuple[Tensor, float]] = []
        if self._scales is not None:
            self._scales.clear()

    def notes(self, axes: Callable[[], Axes]) -> Notes | None:
        """Records layers and losses of the first step; None after it.

        Args:
            axes: Called at every loss for the lengths of both axes.
        """
        scales = self._scales
        return None if scales is None else Notes(scales.add_layer, partial(self._add, scales, axes))

    def watch(self, module: nn.Module | None, axes: Callable[[], Axes]) -> AbstractContextManager[object]:
        """A context in which losses of a module's outputs are recorded."""
        notes = self.notes(axes)
        if notes is None or (module is not None and is_compiled(module)):
            return nullcontext()
        return Intercept(notes=notes)

    def _add(
        self,
        scales: Scales,
        axes: Callable[[], Axes],
        name: str,
        terms: float,
        value: Tensor,
        guess: float,
    ) -> None:
        self._seen.append((name, terms, axes()))
        self._guesses.append((innermost(value).detach().float().reshape(-1), guess))
        scales.add_loss(name, value)

    def judge(self, batch_size: float, inputs: float | None, counted: bool) -> None:
        """Warn, once, about means over something other than examples.

        A loss beside one that is a mean over examples is taken for a penalty: no count would suit both.
        Examples are those of the module's inputs, or the number given by the user.

        Args:
            batch_size: Examples in the step, or 0.
            inputs: Examples in the module's inputs, if they could be counted.
            counted: Whether the user gave ``count=``.
        """
        scales, self._scales = self._scales, None
        if scales is None:
            return
        if self._guesses:
            values, guesses = zip(*self._guesses, strict=True)
            self.guess = float(torch.cat([each.cpu() for each in values]).mean()), sum(guesses) / len(guesses)
        scales.judge()
        if crossed := next((name for name, terms, _ in self._seen if math.isnan(terms)), None):
            warn(
                f"{crossed} compares every output with every target, because it broadcasts both: "
                "give outputs and targets the same shape, such as [B, 1]",
                CountWarning,
            )
        if counted or crossed:
            return
        said = batch_size / inputs if inputs and batch_size else 1.0  # of a user who knows better than inputs
        wrong: list[tuple[str, float, float, bool]] = []
        for name, terms, (examples, beside) in self._seen:
            own = examples or batch_size
            if any(math.isclose(terms, each, rel_tol=1e-6) for each in (own, said * own)):
                return
            if own and terms:
                wrong.append((name, terms, said * own if examples else own, terms == beside))
        if wrong:
            name, terms, own, turned = wrong[0]
            count = f"{terms * (batch_size or own) / own:g}"
            other = f", or batch_size={count} if these are its examples" if terms < own else ""
            if turned and self._axis is not None:
                axis = 0 if self._axis else 1
                other = f", or build {self._rule} with batch_dim={axis} if examples are on axis {axis}"
            elif turned:
                other = f", or count={own:g} if examples are on axis 1"
            warn(
                f"{name} is a mean over {terms:g} terms, and {self._rule} takes it for the mean over "
                f"{own:g} examples: pass count={count} to the step{other}, see docs/loss.md",
                CountWarning,
            )
