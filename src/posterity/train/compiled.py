"""``compile_step``: a training step over all weight samples, as CUDA graphs wherever a device allows them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from posterity import noise
from posterity.arguments import FUNCTION, MODULE, NUMBER, WHOLE, described, takes
from posterity.caller import warn
from posterity.objective import Factor
from posterity.optim import VariationalOptimizer
from posterity.optim.checks import runs_ahead_of
from posterity.optim.counting import as_count
from posterity.posterior import ByName, Density, Posterior
from posterity.sharding import is_sharded
from posterity.torch_private import TreeSpec
from posterity.train.cuda_graph import Graph, flat_batch
from posterity.train.gradient import ByGradient
from posterity.train.learner import Learner
from posterity.train.rule import ByRule
from posterity.train.step import LossFn, TrainStep
from posterity.variational import Variational

# Graphs kept for different shapes of batch; each holds the memory of a whole step.
_GRAPHS = 4
# A graph that was not used for this many calls makes room for another.
_LONG = 100
# Number of batch shapes that are remembered as seen once.
_KEYS = 256


@takes(model=MODULE, loss_fn=FUNCTION, max_norm=NUMBER, chunk=WHOLE, parts=WHOLE)
def compile_step(
    model: nn.Module,
    loss_fn: LossFn,
    optimizer: Optimizer,
    *,
    max_norm: float | None = None,
    chunk: int | None = None,
    parts: int = 1,
    mc_samples: int | None = None,
    prior: Posterior | Density | ByName | None = None,
    num_data: int | None = None,
    factor: Factor | None = None,
) -> Callable[..., Tensor]:
    """A training step that evaluates all weight samples in one pass: ``loss = train_step(x, y)``.

    It draws the same noise and computes the same statistics as ``optimizer.step(closure)``, or, for a
    :func:`~posterity.variational` model, as ``elbo(...)`` with ``backward()`` and a torch optimiser's
    ``step()``. On a GPU the whole step is one CUDA graph per batch shape, captured when a shape is seen for
    the second or third time, except K-FAC's steps with new factors or inverses. Learning rates, the KL's
    factor, and a rule's ``scheduled`` entries may change at any time. In a graph a non-finite loss leaves the
    posterior unchanged, and is raised by one of the next calls, when its value has reached the host; with
    several processes by the next call, in all of them.

    Args:
        model: The module whose parameters the optimiser holds, or a ``variational()`` model.
        loss_fn: ``loss_fn(model, *batch)`` returns the mean loss of a batch of tensors or arrays, or of
            dicts, lists and tuples of them, with examples on the first axis (or the optimiser's
            ``batch_dim``). The first tensor's examples are counted. A loss that is a mean over something
            other than examples needs the number of terms, ``train_step(x, y, count=n)``. A batch with other
            objects in it never becomes a graph. ``model`` is the user's own module, with drawn weights.
        optimizer: A rule such as BGD or IVON, which sets the number of samples; for a ``variational()`` model
            any torch optimiser of its parameters, whose gradients are dropped before each step.
        max_norm: Clip the norm of the mean gradient E[g] to this, as ``torch.nn.utils.clip_grad_norm_`` would
            between backward and step.
        chunk: At most this many samples at once, to cap memory.
        parts: Split the batch into this many parts, each with its own ``mc_samples`` weight samples: every
            example still has as many samples, but the noise averages over more. It costs no more arithmetic.
            Each part has its own mean loss and batch statistics, and the same weight. If the batch cannot be
            split evenly, it is split into the largest number of parts that divides both.
        mc_samples: Weight samples per step of a ``variational()`` model: 1. This and the following arguments
            are for such models only.
        prior: Anything that ``model.kl()`` takes, except blocks of several tensors, as of K-FAC and Laplace:
            by default the model's own.
        num_data: Number of training examples; required.
        factor: Scale of the KL against ``1 / num_data``: 1, another number, or a function of the number of
            draws so far, ``model.draws``, such as :func:`~posterity.warmup` gives.

    Example:
        >>> from posterity import BGD, variational
        >>> model = nn.Linear(4, 2)
        >>> loss_fn = lambda model, x, y: nn.functional.cross_entropy(model(x), y)
        >>> train_step = compile_step(model, loss_fn, BGD(model))
        >>> train_step(torch.randn(8, 4), torch.randint(0, 2, (8,))).shape
        torch.Size([])
        >>> bayesian = variational(nn.Linear(4, 2))
        >>> adam = torch.optim.Adam(bayesian.parameters(), lr=1e-3)
        >>> train_step = compile_step(bayesian, loss_fn, adam, num_data=60_000, factor=0.01, mc_samples=3)
        >>> train_step(torch.randn(8, 4), torch.randint(0, 2, (8,))).shape
        torch.Size([])
    """
    learner: Learner
    if any(map(is_sharded, model.parameters())):
        raise TypeError(
            "compile_step does not support a sharded model (with DTensors, as from fully_shard() or "
            "parallelize_module()): use a loop with sampled_params(), or step(closure)"
        )
    if isinstance(model, DistributedDataParallel) and isinstance(model.module, Variational):
        model = model.module  # whose averaging is passed by
    if isinstance(model, Variational):
        learner = ByGradient(
            model,
            optimizer,
            prior=prior,
            num_data=num_data,
            factor=1.0 if factor is None else factor,
            mc_samples=mc_samples,
        )
    elif isinstance(optimizer, VariationalOptimizer):
        own = {"mc_samples": mc_samples, "prior": prior, "num_data": num_data, "factor": factor}
        for name, value in own.items():
            if value is not None:
                raise TypeError(f"{name}= is for variational() models: give it to {type(optimizer).__name__}")
        learner = ByRule(model, optimizer)
    else:
        given = type(optimizer).__name__ if isinstance(optimizer, Optimizer) else described(optimizer)
        raise TypeError(
            f"{given} does not learn a posterior of a plain {type(model).__name__}: pass "
            "variational(model) and a torch optimiser of its parameters, or a rule such as "
            "BGD(model) as the optimiser"
        )
    step = TrainStep(learner, loss_fn, max_norm, chunk, parts)
    if not can_capture(learner.devices()):
        return step
    if isinstance(learner, ByGradient):
        learner.optimizer.make_capturable()
    return CapturedStep(step)


def can_capture(devices: Collection[torch.device]) -> bool:
    """Whether all parameters are on one GPU and Triton is installed."""
    return noise.kernels is not None and runs_ahead_of(devices)


@final
class CapturedStep:
    """The same step as CUDA graphs, one for each batch shape, wherever the rule allows it."""

    def __init__(self, step: TrainStep) -> None:
        self.step = step
        self._modules = list(step.target.modules())
        self._graphs: dict[Any, Graph] = {}
        self._seen: set[Any] = set()
        self._failed: set[Any] = set()
        self._calls = 0
        # With several processes: raises the error of the last step.
        self._settle_last: Callable[[], None] | None = None

    def __call__(self, *batch: Any, count: float | Tensor | None = None) -> Tensor:
        """Learn from a batch whose loss is a mean of ``count`` terms; returns the loss, averaged over
        samples."""
        self._calls += 1
        self.step.refuse_changed()
        self.step.learner.check()
        batch = self.step.as_tensors(batch)
        tensors, form = flat_batch(batch)
        if not self.step.learner.captures() or not all(isinstance(x, Tensor) for x in tensors):
            return self._eager(batch, count)
        count = as_count(count)
        key = (count is None, *self._key(tensors, form))
        graph = self._graphs.get(key)
        if graph is not None and graph.stale():
            graph = None
        if graph is None and key in self._seen and key not in self._failed and self._has_room():
            graph = self._capture(key, batch, count)
        if graph is None:  # a shape that never comes again is not worth a graph
            loss = self._eager(batch, count)
            if len(self._seen) >= _KEYS:
                self._seen.clear()
            self._seen.add(key)
            return loss
        graph.used = self._calls
        loss = graph(tensors, count, self.wait)
        if graph.world is not None:
            self._settle_last = graph.settle
        return loss

    def _eager(self, batch: tuple[Any, ...], count: float | Tensor | None) -> Tensor:
        """A step without a graph; with several processes the next call raises this one's errors.

        Other processes may replay it, and all must raise at the same call.
        """
        if self.step.learner.world is None:
            return self.step(*batch, count=count)
        self.step.learner.settle()
        self.wait()
        try:
            return self.step(*batch, count=count)
        except FloatingPointError as error:
            self._settle_last = partial(_raise, error)
            self.step.learner.postponed(self)
            (device,) = self.step.learner.devices()
            return torch.full((), torch.nan, device=device)

    def wait(self) -> None:
        """Raise the error of the last step of several processes, if any."""
        last, self._settle_last = self._settle_last, None
        if last is not None:
            last()

    def _capture(self, key: Any, batch: tuple[Any, ...], count: float | None) -> Graph | None:
        self.step.learner.settle()
        self.wait()
        self._drop(key)
        try:
            self._graphs[key] = Graph(self.step, batch, count)
        except Exception as error:
            if not self._failed:
                reason = str(error).partition("\n")[0]
                warn(f"this step cannot be captured ({reason}); it runs without a graph")
            self._failed.add(key)
        return self._graphs.get(key)

    def _has_room(self) -> bool:
        """Whether one more graph may be captured, after dropping graphs that have not been used for long."""
        generation = self.step.learner.generation
        for key, graph in list(self._graphs.items()):
            old = graph.generation != generation or graph.stale()
            if old or (len(self._graphs) >= _GRAPHS and self._calls - graph.used > _LONG):
                self._drop(key)
        return len(self._graphs) < _GRAPHS

    def _drop(self, key: Any) -> None:
        """Drop a graph, if there is one, after raising its pending error."""
        if key in self._graphs:
            self._graphs.pop(key).wait()

    def _key(self, tensors: Sequence[Tensor], form: TreeSpec | None) -> Any:
        """Everything that is fixed in a graph: shapes, modes, addresses of weights and state, fixed
        hyper-parameters."""
        params = self.step.names
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
            torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda"),
            (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32),
            *self.step.learner.fixed(),
        )


def _raise(error: Exception) -> None:
    raise error
