"""Checks of a run and its posterior, with warnings that name the setting to change."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from posterity.caller import warn
from posterity.optim.groups import unwrapped
from posterity.posterior import Leaf
from posterity.torch_private import is_compiled

UNTOUCHED = (
    "the posterior was not touched: look for bad values in the batch, or lower the learning rate or the "
    "initial std"
)
# Numbers of steps in the average of the first losses, and in the running one.
_FIRST, _RECENT = 10, 50
# Steps after which a run that has learned nothing gets a warning: with a learning rate far too small; any
# run; one whose first losses were high because of noise.
_SOON, _PATIENCE, _LONG = 100, 300, 500
# Looking for the root of a user's own backward pass takes time at every operation: after the first steps only
# one in _EVERY is watched. On a GPU it is read at most _AT_ONCE steps later.
_EVERY, _AT_ONCE = 5, 100
# A loss falls by at least this share in _PATIENCE steps if the learning rate is not far too small.
_LITTLE = 0.1
# Updates of a variational() model's means after which its stds should have changed, too.
_MOVES = 3
# Below this loss there may be nothing to learn, as in a net that is already trained.
_LOW = 0.25


class DivergenceWarning(UserWarning):
    """The loss has risen far above its start, or has not fallen at all.

    Example:
        >>> import warnings
        >>> warnings.filterwarnings("error", category=DivergenceWarning)  # stop a sweep's run at once
    """


class PosteriorWarning(UserWarning):
    """A posterior that has not moved, or whose stds are negligible or outweigh the weights.

    Example:
        >>> import warnings
        >>> warnings.filterwarnings("error", category=PosteriorWarning)  # stop a sweep's run at once
    """


@final
class Average:
    """Averages of a number over the first and the latest steps.

    Attributes:
        count: Number of steps.
        first: Mean of the first ten.
        recent: Running mean of about the latest fifty, with less weight for older ones.
        lowest: The lowest running mean after the first fifty steps.
    """

    def __init__(self) -> None:
        self.count, self.first, self.recent, self.lowest, self._variance = 0, 0.0, 0.0, math.inf, 0.0

    def add(self, value: float) -> None:
        """Add one step's value."""
        self.count += 1
        if self.count <= _FIRST:
            self.first += (value - self.first) / self.count
        share, gap = 1 / min(self.count, _RECENT), value - self.recent
        self.recent += share * gap
        self._variance = (1 - share) * (self._variance + share * gap * gap)
        if self.count >= _RECENT:
            self.lowest = min(self.lowest, self.recent)

    def fallen(self, noisy: bool, share: float = 0.01) -> bool:
        """Whether it was ever below the first mean by a share, and, if steps are noisy, by more than
        chance."""
        return self.lowest < self.first - max(self._chance() if noisy else 0.0, share * abs(self.first))

    def risen(self) -> bool:
        """Whether it is above the first mean by two hundredths, and by more than chance."""
        return self.recent > self.first + max(self._chance(), 0.02 * abs(self.first))

    def _chance(self) -> float:
        """Twice the standard error of the difference of both means."""
        return 2.0 * math.sqrt(self._variance * (1 / _FIRST + 1 / (2 * _RECENT)))


@final
class Roots(TorchFunctionMode):
    """Records the tensors on which ``backward()`` is called: a user's own losses.

    Attributes:
        found: Scalars, without their graphs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Tensor] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the function."""
        kwargs = kwargs or {}
        if func is Tensor.backward and kwargs.get("gradient") is None:
            root = args[0]
            if type(root) is Tensor and root.numel() == 1:
                self.found.append(root.detach().clone())
        return func(*args, **kwargs)


@final
class LossWatch:
    """Watches the losses of one optimiser, and warns once if a run goes wrong.

    In contexts around a user's own backward passes, losses are the roots of those passes, until a fresh run
    has learned something. After that, and if roots are not seen, the largest gradient is watched instead.

    Args:
        name: The optimiser's, for messages.
        narrower: What to do about stds that are too large.
        noise: Returns ‖std‖ / ‖mean‖ of the weights at which losses were taken.
        fresh: Whether training starts here; a continued run may have nothing left to learn.
        slow: Returns advice if the learning rate is far below the usual one.
        otherwise: Advice for a loss that has not fallen, if no other cause is found.

    Attributes:
        guess: The mean of the first step's known losses, and that of a guess.
    """

    def __init__(
        self,
        name: str,
        narrower: str,
        noise: Callable[[], float],
        fresh: bool,
        slow: Callable[[], str] = lambda: "",
        otherwise: str = "try another lr or a larger max_step, and norm layers if the net is deep",
    ) -> None:
        self.name, self.narrower, self._noise, self.fresh, self._slow = name, narrower, noise, fresh, slow
        self._otherwise, self.guess = otherwise, (math.nan, math.inf)
        self.losses, self._gradients = Average(), Average()
        self._begin: float | None = None
        self._halfway = self._stuck = math.inf
        self._diverged, self._high = False, 0
        self._step = 0
        self._roots: list[tuple[float, Tensor]] = []  # of the step that is being taken
        self._heard: list[tuple[int, Sequence[tuple[float, Tensor]]]] = []

    def wanted(self) -> bool:
        """Whether to watch the loss of the current step, which takes time."""
        if self._step >= _FIRST and self._step % _EVERY:
            return False
        return self.fresh and not (self._diverged or (self.losses.count >= _LONG and self.learned))

    def listen(self, module: nn.Module | None) -> AbstractContextManager[Roots | None]:
        """A context that records the roots of backward passes, if this step's are wanted."""
        deaf = module is None or not self.wanted() or is_compiled(module)
        return nullcontext() if deaf else Roots()

    def follow(self, loss: Tensor) -> None:
        """Start watching the loss of a new step, if wanted; the previous step is over."""
        self.close()
        if self.wanted():
            self.hear([loss.detach().clone()], 1.0)

    def hear(self, roots: Sequence[Tensor], weight: float) -> None:
        """Add the roots of one context to the step's loss, which is their weighted sum."""
        self._roots += [(weight, root) for root in roots]

    def forget(self) -> None:
        """Drop the roots recorded since the last step."""
        self._roots = []

    def close(self) -> None:
        """End a step."""
        step, roots = self._step, self._roots
        self._step, self._roots = step + 1, []
        if roots:
            self._heard.append((1 if step < _FIRST else _EVERY, roots))
        if not roots or (roots[0][1].is_cuda and step % _AT_ONCE):
            return
        flat = [root.reshape(()).double() for _, each in self._heard for _, root in each]
        values = iter(torch.stack([each.to(flat[0].device) for each in flat]).tolist())
        heard, self._heard = self._heard, []
        for times, each in heard:
            loss = sum(weight * next(values) for weight, _ in each)
            for _ in range(times if math.isfinite(loss) else 0):  # the step was judged by its gradients
                self(loss)

    def __call__(self, loss: float | None, gradient: float = 0.0) -> None:
        """Add a step's mean loss and its largest gradient, each if known.

        Raises:
            FloatingPointError: The loss is not finite.
        """
        if loss is None:
            if gradient:
                self._look_at_gradient(gradient)
            return
        if not math.isfinite(loss):
            raise FloatingPointError(f"the loss is {loss:g}; {UNTOUCHED}")
        self._begin = loss if self._begin is None else self._begin
        seen = self.losses
        seen.add(loss)
        # A bad batch or a change of tasks raises the loss for some steps, a run that diverges for good.
        high = loss > self._begin + 2.0 * max(abs(self._begin), _LOW)
        far = loss > 10.0 * (abs(self._begin) + 1.0)
        self._high = max(0, self._high + (3 if far else 1 if high else -1))
        if self._high >= _RECENT:
            self._diverges(f"the loss began at {self._begin:.3g} and is {seen.recent:.3g} on average")
        elif seen.count in (_SOON, _PATIENCE, _LONG) and self.fresh and not self._diverged:
            self._look_at_progress()

    def _look_at_gradient(self, gradient: float) -> None:
        seen = self._gradients
        if not math.isfinite(gradient):
            return
        seen.add(gradient)
        if seen.count >= _RECENT and seen.recent > 100.0 * seen.first:
            self._diverges(f"its largest gradient was {seen.first:.3g} and is {seen.recent:.3g} on average")

    def _look_at_progress(self) -> None:
        seen = self.losses
        if seen.first <= _LOW or seen.lowest <= _LOW or self._stuck < math.inf:
            return
        noisy, advice = self._noise() > 1.0, self._slow()
        if seen.count == _SOON and not advice:
            return
        if seen.count <= _PATIENCE:
            self._halfway = seen.recent
            # With a learning rate for another optimiser a loss may come down a little and get nowhere.
            fallen = seen.fallen(noisy)
            little = _LITTLE * (seen.count - _RECENT) / (_PATIENCE - _RECENT)  # a recent loss is that old
            stuck = not fallen or bool(advice and not seen.fallen(noisy, little)) or self._guesses()
            done = f"has {'hardly' if fallen else 'not'} lowered its loss"
            done = "has a loss no better than a guess" if fallen and self._guesses() else done
            told = f"{done} in {seen.count} steps ({seen.first:.3g} at first,"
        else:  # noise alone may have made the first losses high, and steps have lowered them to chance
            stuck = noisy and seen.lowest > 0.85 * self._halfway
            told = f"hardly lowers its loss any more ({self._halfway:.3g} after {_PATIENCE} steps,"
        if stuck:
            self._stuck = seen.lowest
            if not advice and seen.risen():
                advice = "lower lr"
            elif not advice:
                advice = self._otherwise
            if noisy:
                advice = f"its stds outweigh its weights, {self.narrower}"
            warn(f"{self.name} {told} {seen.recent:.3g} now): {advice}", DivergenceWarning)

    def _guesses(self) -> bool:
        """Whether the loss is still that of a guess, if it consists of known losses only."""
        value, guess = self.guess
        alone = self._begin is not None and math.isclose(value, self._begin, rel_tol=1e-3)
        return alone and guess < math.inf and self.losses.lowest > 0.99 * guess

    def _diverges(self, what: str) -> None:
        if not self._diverged:
            self._diverged = True
            warn(f"{self.name} seems to diverge: {what}; lower lr, or {self.narrower}", DivergenceWarning)

    @property
    def learned(self) -> bool:
        """Whether the loss has fallen in spite of noise, or has not been known for long enough."""
        seen = self.losses
        return seen.count < _RECENT or (seen.fallen(True) and seen.lowest < 0.85 * self._stuck)


@final
class Unfrozen:
    """Warns, once, about parameters that were frozen when an optimiser was built, and that nothing trains
    now.

    Args:
        module: Their module, if known.
        params: The optimiser's parameters.
    """

    def __init__(self, module: nn.Module | None, params: Sequence[Tensor]) -> None:
        own, named = set(params), [] if module is None else unwrapped(module.named_parameters())
        self._named = [(name, p) for name, p in named if p not in own]
        self._versions: dict[str, int] = {}

    def look(self, rule: str) -> None:
        """Check gradients at a step: a second gradient at an unchanged value means that no optimiser trains
        it."""
        for name, p in self._named:
            if p.grad is None or not p.requires_grad:
                continue
            if self._versions.get(name) == p._version:
                warn(
                    f"{name!r} has a gradient, and {rule} does not train it: it was frozen when {rule} was "
                    "built; add it by add_param_group({'params': [...]}), or freeze it again"
                )
                self._named = []
                return
            self._versions[name] = p._version


@final
class Untrained:
    """Warns, once, if an optimiser trains a posterior's means, but not its stds and others with gradients.

    Args:
        means: The posterior's means, which are the module's parameters.
        others: Its stds, and all others of its parameters that the module does not have.
    """

    def __init__(self, means: Sequence[Tensor], others: Sequence[Tensor]) -> None:
        self._means, self._others = means, others
        self._begin, self._last, self._moves = _versions(others), _versions(means), 0

    def look(self) -> None:
        """Check at a step, before its backward pass, when gradients are those of the step before."""
        if not self._others or _versions(self._others) != self._begin:
            self._others = ()
            return
        last, self._last = self._last, _versions(self._means)
        self._moves += self._last != last and all(p.grad is not None for p in self._others)
        if self._moves >= _MOVES:
            self._others = ()
            warn(
                "the means of the variational() model are trained, but its stds have gradients that no "
                "optimiser uses: build the optimiser from the parameters() of what variational() returned, "
                "not of the module inside it"
            )


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    return [each._version for each in tensors]


@torch.no_grad()
def noise_of(leaves: Iterable[Leaf]) -> float:
    """‖std‖ / ‖mean‖ of all weights of matrices, the relative change by sampling; 0 if there are none.

    Biases and scales are left out: they may be zero, or larger than everything else.
    """
    norms = [
        torch.linalg.vector_norm(each, dtype=torch.float64)
        for leaf in leaves
        if any(len(shape) > 1 for shape in leaf.shapes)
        for each in (leaf.std(), leaf.mean())
    ]
    if not norms:
        return 0.0
    values = torch.stack([each.to(norms[0].device) for each in norms]).tolist()  # the one wait for a device
    std, mean = math.hypot(*values[::2]), math.hypot(*values[1::2])
    return std / mean if mean else math.inf if std else 0.0
