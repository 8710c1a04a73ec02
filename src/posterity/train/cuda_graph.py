"""A whole training step as one CUDA graph."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor

from posterity import buffers
from posterity.noise import kernels, read_by_replays
from posterity.optim.counting import Behind
from posterity.optim.step import Numbers
from posterity.torch_private import TreeSpec, dynamo_config, tree_flatten, tree_unflatten

if TYPE_CHECKING:
    from posterity.optim import VariationalOptimizer
    from posterity.train.step import TrainStep


@final
class DeviceNumbers(Numbers):
    """Numbers of a captured step: tensors, which every replay reads again, and compiled rules.

    Attributes:
        entries: The entries of each group whose values may change from step to step.
        groups: The groups with these entries as tensors.
    """

    def __init__(self, opt: VariationalOptimizer, device: torch.device) -> None:
        steps = opt.param_groups[0]["steps"]
        self._clock = torch.zeros((), dtype=torch.int32, device=device)
        # The difference between a parameter's current update number and the clock.
        self._ahead = {p: int(opt.state[p]["step"]) - steps for p in opt.parameters()}
        self._values = [{key: float(group[key]) for key in opt.scheduled} for group in opt.param_groups]
        self.entries = [
            {key: torch.tensor(value, device=device) for key, value in values.items()}
            for values in self._values
        ]
        pairs = zip(opt.param_groups, self.entries, strict=True)
        super().__init__([{**group, **entries} for group, entries in pairs])
        self._reads = -1  # what the device's clock reads
        self._rows = Rows()

    def refresh(self, opt: VariationalOptimizer) -> None:
        """Before a replay: copy changed numbers to the device."""
        steps = opt.param_groups[0]["steps"]
        if steps != self._reads:  # not the next one: state was loaded, or another graph ran
            self._clock.fill_(steps)
        self._reads = steps + 1
        for group, known, there in zip(opt.param_groups, self._values, self.entries, strict=True):
            for key in opt.scheduled:
                if group[key] != known[key]:
                    known[key] = float(group[key])
                    there[key].fill_(known[key])

    @property
    def clock(self) -> Tensor:
        """int32, one element; it counts the current step once its statistics have been checked."""
        return self._clock

    def updates(self, p: Tensor, count: int) -> Tensor:
        """The number of a parameter's current update."""
        ahead = self._ahead[p]
        return self._clock + ahead if ahead else self._clock

    def read(self, sums: Tensor) -> list[Any]:
        """Where they are."""
        return list(sums.unbind())

    def row(self, values: Sequence[float], device: torch.device) -> Tensor:
        """A copy of a row made by a step before the capture."""
        return self._rows(values, device)

    def run(self, rule: VariationalOptimizer, function: Callable[..., Any]) -> Callable[..., Any]:
        """As one kernel."""
        return fused(function, type(rule))


@final
class Rows:
    """Rows of numbers that were on the device before a capture, which cannot copy them from the host."""

    def __init__(self) -> None:
        self._made: dict[tuple[float, ...], Tensor] = {}

    def __call__(self, values: Sequence[float], device: torch.device) -> Tensor:
        """A copy in double precision."""
        key = tuple(values)
        if key not in self._made:
            self._made[key] = torch.tensor(key, dtype=torch.float64, device=device)
        return self._made[key].clone()


# By default the compiler starts a process for every core, each of which imports torch.
_ONE_KERNEL: dict[str, str | int | bool | Callable[..., Any]] = {"compile_threads": 1}
# Number of a rule's settings that are compiled in one process; later ones run uncompiled.
_SETTINGS = 64


@cache
def fused(function: Any, kind: Any = None) -> Callable[..., Any]:
    """A function of a rule and tensors, or of tensors only, as one kernel for all rules of a class.

    A compilation is shared by all sizes and optimisers; each combination of settings has its own. If it were
    given an optimiser, it would be compiled again for every other one. A rule consists of pure functions, so
    an uninitialised instance can stand for all of its class.
    """
    # A copy, since the compiler counts compilations per code object, which classes share.
    own = FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    method: Callable[..., Any] = own if kind is None else MethodType(own, object.__new__(kind))
    compiled = torch.compile(method, dynamic=True, options=_ONE_KERNEL)

    def run(*args: Any) -> Any:
        # Otherwise hyper-parameters would be dynamic too, and the compiler keeps the first value of some.
        with dynamo_config(
            specialize_float=True,
            recompile_limit=_SETTINGS,
            # Leaves that a function is given are modules, of any size.
            force_nn_module_property_static_shapes=False,
            allow_unspec_int_on_nn_module=True,
        ):
            return compiled(*args)

    return run


@final
class Graph:
    """A captured step for one shape of batch.

    With several processes it has two pieces, between which all processes add up their sums, as in an eager
    step, so each decides by itself whether to replay. Captured NCCL calls would force all of them to replay.

    Args:
        step: The step.
        batch: A batch of that shape.
        count: Terms that the loss is a mean of; every replay has its own. None if they are the examples.

    Attributes:
        used: Number of the last call that used it.
    """

    def __init__(self, step: TrainStep, batch: tuple[Any, ...], count: float | None) -> None:
        self.step, self.learner = step, step.learner
        learner = step.learner
        (device,) = learner.devices()
        before = self._snapshot()  # makes sure that every parameter has its state
        self.live = learner.replays(device)
        tensors, self.form = flat_batch(batch)
        self.tensors = [x.to(device).clone() for x in tensors]
        self.examples = step.examples(batch)
        size, scale = learner.behind(self.examples, count)
        self.behind = Behind(size, None if scale is None else torch.tensor(scale, device=device))
        self.host_loss = torch.zeros(()).pin_memory()
        self._read: list[Tensor] = []  # host tensors that every replay reads
        self.poison = torch.zeros((), device=device)  # NaN once a step was not finite, until it is raised
        self.keeper, self.world = buffers.Keeper(step.target), learner.world
        self.generation, self.used = learner.generation, 0
        self.done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        try:
            with self.live.inside(), learner.pooling():
                with torch.cuda.stream(stream), warnings.catch_warnings():
                    warnings.simplefilter("ignore", DeprecationWarning)  # the compiler's own
                    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor")  # too
                    for _ in range(2):
                        for _ in self._body():
                            pass  # nothing is sent: others do not wait for it, and all that moves is restored
                        self._restore(before)
                torch.cuda.current_stream().wait_stream(stream)
                self.pieces = list(self._captured())
                self.live.captured(self)
        finally:
            learner.reset()
            torch.cuda.synchronize()
            self._restore(before)
            self.poison.zero_()
        self.live.restored()

    def stale(self) -> bool:
        """Whether it is out of date."""
        return self.live.stale()

    def __call__(self, tensors: Sequence[Tensor], count: float | None, settle: Callable[[], None]) -> Tensor:
        """Replay it on a batch; returns the objective.

        Args:
            tensors: The batch.
            count: Terms that the loss is a mean of.
            settle: With several processes, raises the last step's error; all must do so at the same call. It
                waits while the device works on the first piece of this step.
        """
        self.live.refuse()
        if self.world is None:
            self._look()
        self.live.refresh()
        if isinstance(self.behind.scale, Tensor):
            scale = self.learner.behind(self.examples, count).scale
            assert scale is not None
            self.behind.scale.fill_(scale)
        for mine, given in zip(self.tensors, tensors, strict=True):
            mine.copy_(given, non_blocking=True)
        for graph, sent in self.pieces:
            graph.replay()
            if self.world is not None and sent:
                try:
                    settle()
                except BaseException:
                    self.keeper.restore()
                    raise
                self.world.add_up(*sent)
        self.live.replayed()
        if self.world is not None:
            self.done.record()
        return self.loss.clone()

    def settle(self) -> None:
        """Wait for the last replay, and raise its error."""
        self.done.synchronize()
        self._look()

    def _look(self) -> None:
        """Raise known errors of earlier steps; waits only if one was bad."""
        loss = self.host_loss.item()
        if not math.isfinite(loss):
            torch.cuda.synchronize()  # else a step under way would raise it again
            self.poison.zero_()
        self.host_loss.zero_()
        if self.world is not None and not math.isfinite(loss):  # no other was launched since
            self.live.undo()
        if loss == -math.inf:  # all that the step has seen was finite
            raise FloatingPointError(self.learner.overshot())
        if loss:  # else it has not come yet
            self.learner.seen(loss)

    def wait(self) -> None:
        """Wait for all steps so far, and raise their errors."""
        torch.cuda.synchronize()
        self._look()

    def _captured(self) -> Iterator[tuple[torch.cuda.CUDAGraph, Sequence[Tensor]]]:
        """The pieces of a step in turn, each with the tensors to be added up after it."""
        body, pool = self._body(), None
        sent: Sequence[Tensor] | None = ()
        while sent is not None:
            graph = torch.cuda.CUDAGraph()
            # Other threads, such as NCCL's, may query the device in the meantime.
            with (
                read_by_replays(self._read),
                torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"),
            ):
                sent = next(body, None)
            pool = graph.pool()
            yield graph, sent or ()

    def _body(self) -> Iterator[Sequence[Tensor]]:
        """The captured code: the eager step, with its checks on the device.

        With several processes it yields the tensors that all of them add up.
        """
        torch.clear_autocast_cache()  # a weight cast before the capture would never be cast again
        self.keeper.keep()
        # New containers each time, since loss functions may pop entries from dicts.
        batch = tuple(self.tensors) if self.form is None else tree_unflatten(self.tensors, self.form)
        learner, behind = self.learner, self.behind
        learner.expect(self.examples, behind)
        losses = self.step.gather(self.keeper.copies, batch)
        if self.world is not None:
            sent, shared = learner.pack(losses), learner.shared_buffers()
            yield [*sent, *(shared.joined if shared else [])]
            losses = learner.unpack(sent, losses)
            behind = learner.together(behind)
            if shared:
                shared.spread()
        losses, poisons = learner.finish(learner.publish(losses, self.step.max_norm))
        loss, ok = verdict(losses, poisons, self.poison, self.live.clock)
        learner.move(behind, ok)
        report(loss, ok, self.poison, self.host_loss)
        self.keeper.restore_unless(ok)
        self.loss = learner.objective(loss)
        learner.reset()

    def _snapshot(self) -> list[tuple[Tensor, Tensor]]:
        tensors = [*self.learner.tensors(), *buffers.writable(self.step.target).values()]
        return [(tensor, tensor.detach().clone()) for tensor in tensors]

    @torch.no_grad()
    def _restore(self, before: list[tuple[Tensor, Tensor]]) -> None:
        for tensor, value in before:
            tensor.copy_(value)
        self.learner.tensors()  # else a capture would begin with what is to be read anew


def flat_batch(batch: tuple[Any, ...]) -> tuple[Sequence[Any], TreeSpec | None]:
    """The contents of a batch's dicts, lists and tuples, and their structure; None if it has tensors only."""
    # True of most batches, and the general path takes ten times as long.
    return (batch, None) if all(isinstance(x, Tensor) for x in batch) else tree_flatten(batch)


def verdict(losses: Tensor, poisons: Sequence[Tensor], stuck: Tensor, clock: Tensor) -> tuple[Tensor, Tensor]:
    """The mean loss of a captured step, and the flag that accepts it: whether everything is finite.

    Args:
        losses: The samples' losses.
        poisons: One per group's sums: 0, or NaN.
        stuck: Becomes NaN with the first rejected step, and stays so.
        clock: Counts the step.
    """
    poison = poisons[0] if len(poisons) == 1 else torch.stack(list(poisons)).sum()
    if kernels is not None and losses.is_cuda and losses.dtype == poison.dtype == torch.float32:
        return kernels.verdict(losses, poison, stuck, clock)
    loss = losses.mean()
    ok = loss.abs() + poison < math.inf  # NaN is less than nothing
    stuck += torch.where(ok, 0.0, math.nan)
    clock += 1
    return loss, ok


def report(loss: Tensor, ok: Tensor, stuck: Tensor, host: Tensor) -> None:
    """Report a captured step to the host, once the rule's results have been checked, too.

    Args:
        loss: The mean loss.
        ok: The flag, cleared since the check if a result is invalid.
        stuck: 0, or NaN; becomes -inf where a result alone was bad, and stays so.
        host: Host memory that gets the mean loss, or ``stuck``.
    """
    if kernels is not None and loss.is_cuda and loss.dtype == stuck.dtype == torch.float32:
        kernels.report(loss, ok, stuck, host)
        return
    stuck += torch.where(ok, 0.0, -math.inf)
    host.copy_(loss + stuck, non_blocking=True)
