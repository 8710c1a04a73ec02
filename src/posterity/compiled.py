"""The fast path: a training step over all weight samples, as CUDA graphs wherever a device allows them."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Hashable, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from posterity import buffers, noise
from posterity.optim.guard import verdict
from posterity.optim.live import Live
from posterity.optim.variational import VariationalOptimizer
from posterity.train_step import LossFn, TrainStep

# Graphs kept for different shapes of batch; each holds the memory of a whole step.
_GRAPHS = 4
# A graph that so many calls did not use makes room for another.
_LONG = 100
# Kinds of batch that are remembered as seen once.
_KEYS = 256
# Entries of a group that a graph does not read.
_UNREAD = ("params", "param_names", "initial_lr", "steps")


def compile_step(
    model: nn.Module,
    loss_fn: LossFn,
    optimizer: VariationalOptimizer,
    *,
    max_norm: float | None = None,
    chunk: int | None = None,
    parts: int = 1,
) -> Callable[..., Tensor]:
    """A training step that evaluates all weight samples in one pass: ``loss = train_step(x, y)``.

    It draws the same noise and takes the same statistics as ``optimizer.step(closure)``. On a GPU the whole
    step is a CUDA graph per shape of batch, captured when a shape is seen for the second time; K-FAC's steps
    with new factors or inverses are none. Learning rates, and what else a rule calls ``live``, may change at
    any time. In a graph a loss that is not finite leaves the posterior as it is, and is raised by one of the
    next calls, when its value has reached the host.

    Args:
        model: The module whose parameters the optimiser holds.
        loss_fn: ``loss_fn(model, *batch)`` gives the mean loss of a batch: of tensors, or dicts, lists and
            tuples of them, whose examples are on the first axis. The first tensor's are counted, for rules
            that want to know how many there are, unless the optimiser was given a ``batch_size``. A batch
            that has other things in it is never a graph.
        optimizer: A rule such as BGD or IVON; it decides the number of samples.
        max_norm: Clip the norm of the mean gradient E[g] to this, as ``torch.nn.utils.clip_grad_norm_`` would
            between backward and step.
        chunk: At most this many samples at once, to cap memory.
        parts: Cut the batch into so many parts, each with ``mc_samples`` weight samples of its own: every
            example is still seen by as many, and their noise averages out over more. It costs no more
            arithmetic. Each part has a mean loss and batch statistics of its own, and counts as much as the
            others. A batch that cannot be cut so is cut into as many as divide both.

    Example:
        >>> from posterity import BGD
        >>> model = nn.Linear(4, 2)
        >>> loss_fn = lambda model, x, y: nn.functional.cross_entropy(model(x), y)
        >>> train_step = compile_step(model, loss_fn, BGD(model))
        >>> train_step(torch.randn(8, 4), torch.randint(0, 2, (8,))).shape
        torch.Size([])
    """
    step = TrainStep(model, loss_fn, optimizer, max_norm, chunk, parts)
    return CapturedStep(step) if can_capture(optimizer) else step


def can_capture(optimizer: VariationalOptimizer) -> bool:
    """Whether all parameters are on one GPU, and Triton is there to make noise."""
    devices = {p.device for group in optimizer.param_groups for p in group["params"]}
    on_gpu = len(devices) == 1 and devices.pop().type == "cuda"
    return on_gpu and noise.kernels is not None


@final
class CapturedStep:
    """The same step as CUDA graphs, one for each shape of batch, wherever the rule allows it."""

    def __init__(self, step: TrainStep) -> None:
        self.step = step
        self._modules = list(step.target.modules())
        self._graphs: dict[Any, _Graph] = {}
        self._seen: set[Any] = set()
        self._failed: set[Any] = set()
        self._calls = 0

    def __call__(self, *batch: Any) -> Tensor:
        """Learn from a batch; its mean loss over the samples."""
        self._calls += 1
        self.step.refuse_changed()
        self.step.optimizer.check_changed()
        tensors, form = _flat(batch)
        if not self.step.optimizer.captures() or not all(isinstance(x, Tensor) for x in tensors):
            return self.step(*batch)
        key = self._key(tensors, form)
        graph = self._graphs.get(key)
        if graph is not None and graph.stale():
            graph = None
        if graph is None and key in self._seen and key not in self._failed and self._has_room():
            graph = self._capture(key, batch)
        if graph is None:  # a shape that never comes again is not worth a graph
            loss = self.step(*batch)
            if len(self._seen) >= _KEYS:
                self._seen.clear()
            self._seen.add(key)
            return loss
        graph.used = self._calls
        return graph(tensors)

    def _capture(self, key: Any, batch: tuple[Any, ...]) -> _Graph | None:
        opt = self.step.optimizer
        opt._refuse_inside("a training step")
        opt.guard.settle_step()
        opt._ledger.refuse_foreign(opt.param_groups)
        self._drop(key)
        try:
            self._graphs[key] = _Graph(self.step, batch)
        except Exception as error:
            if not self._failed:
                reason = str(error).partition("\n")[0]
                warnings.warn(
                    f"this step cannot be captured ({reason}); it runs without a graph", stacklevel=3
                )
            self._failed.add(key)
        return self._graphs.get(key)

    def _has_room(self) -> bool:
        """Whether one more graph may be made, after those that nobody has used for long have gone."""
        generation = self.step.optimizer.generation
        for key, graph in list(self._graphs.items()):
            old = graph.generation != generation or graph.stale()
            if old or (len(self._graphs) >= _GRAPHS and self._calls - graph.used > _LONG):
                self._drop(key)
        return len(self._graphs) < _GRAPHS

    def _drop(self, key: Any) -> None:
        """Let a graph go, if there is one, after what it has to say."""
        if key in self._graphs:
            self._graphs.pop(key).wait()

    def _key(self, tensors: Sequence[Tensor], form: TreeSpec | None) -> Any:
        """What a graph has fixed: shapes, modes, where weights and state lie, fixed hyper-parameters."""
        opt, params = self.step.optimizer, self.step.names
        return (
            form,
            tuple((x.shape, x.dtype, x.device) for x in tensors),
            tuple(module.training for module in self._modules),
            tuple(p.data_ptr() for p in params),
            tuple(p.requires_grad for p in params),
            tuple(
                each.data_ptr()
                for part in self._modules
                for each in part._buffers.values()
                if each is not None
            ),
            opt.generation,
            torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda"),
            (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32),
            tuple(
                value if isinstance(value, Hashable) else str(value)
                for group in opt.param_groups
                for key, value in group.items()
                if key not in (*_UNREAD, *opt.live)
            ),
        )


def _flat(batch: tuple[Any, ...]) -> tuple[Sequence[Any], TreeSpec | None]:
    """What dicts, lists and tuples of a batch hold, and their form; None if it has tensors alone."""
    # Most batches do, and the general way takes ten times as long.
    return (batch, None) if all(isinstance(x, Tensor) for x in batch) else tree_flatten(batch)


@final
class _Graph:
    """A captured step for one shape of batch."""

    def __init__(self, step: TrainStep, batch: tuple[Any, ...]) -> None:
        self.step = step
        opt = step.optimizer
        device = opt.param_groups[0]["params"][0].device
        opt.draw(range(1))  # makes sure that every parameter has its state
        self.params = [p for group in opt.param_groups for p in group["params"]]
        steps = opt.param_groups[0]["steps"]
        updates = {p: int(opt.state[p]["step"]) if opt.state[p] else 0 for p in self.params}
        self.live = Live(
            torch.zeros((), dtype=torch.int32, device=device),
            {p: number - steps for p, number in updates.items()},
            [
                {key: torch.tensor(float(group[key]), device=device) for key in opt.live}
                for group in opt.param_groups
            ],
        )
        self.entries = [{key: float(group[key]) for key in opt.live} for group in opt.param_groups]
        self.clock = -1  # what the device's clock reads
        tensors, self.form = _flat(batch)
        self.tensors = [x.to(device).clone() for x in tensors]
        self.sizes = [opt._batch_size(group, step.batch_size(batch)) for group in opt.param_groups]
        self.host_loss = torch.zeros(()).pin_memory()
        self.poison = torch.zeros((), device=device)  # NaN once a step was not finite, until it is raised
        self.keeper = buffers.Keeper(step.target)
        self.generation, self.used = opt.generation, 0
        before = self._snapshot()
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        opt._live = self.live
        try:
            with torch.cuda.stream(stream), warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # the compiler's own
                for _ in range(2):
                    self._body()
                    self._restore(before)
            torch.cuda.current_stream().wait_stream(stream)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.loss = self._body()
            # What every replay writes anew, and which parameters it moves.
            self.grads = [(p, p.grad, p.grad._version) for p in self.params if p.grad is not None]
            self.unused = [p for p in self.params if p.grad is None]
            self.moved = [
                (slab, [i for i, p in enumerate(slab.params) if p.grad is not None]) for slab in opt._slabs
            ]
        finally:
            opt._live = opt.guard.ok = None
            opt._reset()
            torch.cuda.synchronize()
            self._restore(before)
            self.poison.zero_()
        self.counts = self._counts()
        opt.guard.graphs.add(self)

    def stale(self) -> bool:
        """Whether a parameter that it moves was left out of steps since: its count of updates is fixed."""
        return self._counts() != self.counts

    def _counts(self) -> list[int]:
        """How far each moved parameter's updates are ahead of the optimiser's steps."""
        steps = self.step.optimizer.param_groups[0]["steps"]
        counts = [
            slab.steps if len(moved) == len(slab.params) else slab.steps[moved] for slab, moved in self.moved
        ]
        return [count - steps for each in counts for count in each.tolist()]

    def __call__(self, tensors: Sequence[Tensor]) -> Tensor:
        opt = self.step.optimizer
        opt._refuse_inside("a training step")
        fresh = not all(p.grad is grad and grad._version == version for p, grad, version in self.grads)
        fresh = fresh or any(p.grad is not None for p in self.unused)
        if fresh:  # something happened to the gradients since the last replay
            opt._ledger.refuse_foreign(opt.param_groups)
        opt.guard.settle_step()
        self._look()
        steps = opt.param_groups[0]["steps"]
        if steps != self.clock:  # not the next one: state was loaded, or another graph ran
            self.live.clock.fill_(steps)
        self.clock = steps + 1
        for group, known, there in zip(opt.param_groups, self.entries, self.live.entries, strict=True):
            for key in opt.live:
                if group[key] != known[key]:
                    known[key] = float(group[key])
                    there[key].fill_(known[key])
        for mine, given in zip(self.tensors, tensors, strict=True):
            mine.copy_(given, non_blocking=True)
        self.graph.replay()
        for slab, moved in self.moved:
            slab.count(moved)
        opt.advance()
        if fresh:
            self.grads = [(p, grad, grad._version) for p, grad, _ in self.grads]
            for p, grad, _ in self.grads:
                p.grad = grad
            opt._reset()
        return self.loss.clone()

    def _look(self) -> None:
        """Raise what is known of earlier steps; this waits for nothing, unless one was bad."""
        loss = self.host_loss.item()
        if not math.isfinite(loss):
            torch.cuda.synchronize()  # else a step under way would tell of it again
            self.poison.zero_()
        self.host_loss.zero_()
        self.step.optimizer.guard.watch(loss)

    def wait(self) -> None:
        """Raise what there is to be known of all steps up to here."""
        torch.cuda.synchronize()
        self._look()

    def _body(self) -> Tensor:
        """What is captured: the eager step, with its checks done on the device."""
        opt = self.step.optimizer
        torch.clear_autocast_cache()  # a weight cast before the capture would never be cast again
        self.keeper.keep()
        # Made anew, since loss functions may take things out of dicts.
        batch = tuple(self.tensors) if self.form is None else tree_unflatten(self.tensors, self.form)
        losses = self.step.gather(self.keeper.copies, batch)
        poisons = [sums.poison for sums in opt._sums]
        loss, ok = verdict(losses, poisons, self.poison, self.host_loss, self.live.clock)
        opt.guard.ok = ok
        opt.apply(self.sizes)
        self.keeper.restore_unless(ok)
        opt.guard.ok = None
        opt._reset()
        return loss

    def _snapshot(self) -> list[tuple[Tensor, Tensor]]:
        state = self.step.optimizer.state
        tensors = [
            *self.params,
            *(value for p in self.params for value in state[p].values()),
            *buffers.writable(self.step.target).values(),
        ]
        return [(tensor, tensor.detach().clone()) for tensor in tensors]

    @torch.no_grad()
    def _restore(self, before: list[tuple[Tensor, Tensor]]) -> None:
        for tensor, value in before:
            tensor.copy_(value)
