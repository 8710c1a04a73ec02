"""The public optimiser class of every learning rule, and the interface that a rule implements.

One training step is: draw weights around the means (:meth:`VariationalOptimizer.sampled_params`), run forward
and backward there, restore the means, add up the statistics; after the last sample, pass them to the method's
rule (:meth:`VariationalOptimizer.step`). This is implemented in :mod:`posterity.optim.loop` and
:mod:`posterity.optim.step`; conversions of state are in :mod:`~posterity.optim.handover` and
:mod:`~posterity.optim.saved`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import chain, count
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakSet, proxy

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from posterity.arguments import instance, takes
from posterity.buffers import StepBuffers
from posterity.caller import warn
from posterity.curvature import Collector
from posterity.distributed import World, several
from posterity.names import NameFilter, padding_rows, select
from posterity.noise import new_seed
from posterity.optim import apply, checks, counting, groups, handover, loop, saved, watch
from posterity.optim.agreement import meet, unwrapped
from posterity.optim.matrices import Matrices, Moving
from posterity.optim.state import FlatGroup, Group, State, StateCache, members
from posterity.optim.statistics import Accumulator, Statistics
from posterity.optim.step import Numbers
from posterity.posterior import DiagonalGaussian, Factorised, Leaf
from posterity.sharding import ShardedModel, sharded_model

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# Numbers of samples that are drawn to look, not to learn: far from those of any step.
_PEEKS = 1 << 30


class VariationalOptimizer(Optimizer, ABC):
    """A torch optimiser whose state is a posterior over the parameters it was given.

    The model's parameters are the posterior's means whenever no sample is drawn, so evaluation, saving and
    everything else that reads a model works as usual.

    A method supplies pure functions of one block, ``init``, ``std``, ``update`` and ``check``, and class
    attributes that declare what its rule needs. The functions use only their arguments and the class, because
    their compiled form is shared by all optimisers of the class.

    Args:
        params: A module, or what torch.optim takes: (named) parameters or groups of them. The padding rows of
            a module's embeddings have a std of 0, and do not change.
        defaults: The method's hyper-parameters, for groups that do not set their own; ``mc_samples``, weight
            samples per step, and ``max_step`` among them.
        seed: Seed of the weight noise. By default one number is drawn from torch's generator here, as when a
            layer is built; training never draws from it.
        deterministic: Filter of parameter names that get no posterior.
        deterministic_lr: Learning rate of Adam for those; None if the rule itself trains them.
        batch_dim: The axis of the examples in the inputs of the module and of its layers.
        mesh: Processes that each draw their own weights for their share of a batch, without a wrapper that
            averages gradients; see :mod:`posterity.distributed`.
        overlap: Whether to send gradients of a mesh during the backward pass.

    Attributes:
        needs_batch_size: Whether the rule needs the number of examples in a step.
        collects: The curvature that it uses instead of E[g·eps].
        draws: Whether gradients are taken at drawn weights; else at the means.
        matrices: Keys of a state that are matrices of a block of tensors instead of values per weight.
        scheduled: Entries of a group that may change at every step, also in a captured one.
        derived: Entries computed from others if not given, in order of computation.
        widths: Entries that set the std at the start; a later one overrides those before it.
        without_noise: Entries that differ in groups without a posterior, if the rule itself can train these.
        narrower: What a user can do about stds that are too large, by the names of its settings.

    Example:
        >>> from posterity import BGD
        >>> model = nn.Linear(3, 2)
        >>> opt = BGD(model, std_init=0.1, mc_samples=1)
        >>> isinstance(opt, VariationalOptimizer)
        True
        >>> with opt.sampled_params():
        ...     model(torch.ones(4, 3)).square().mean().backward()
        >>> opt.step()
    """

    needs_batch_size: ClassVar[bool] = False
    collects: ClassVar[type[Collector] | None] = None
    draws: ClassVar[bool] = True
    matrices: ClassVar[tuple[str, ...]] = ()
    scheduled: ClassVar[tuple[str, ...]] = ("lr",)
    derived: ClassVar[tuple[str, ...]] = ()
    widths: ClassVar[tuple[str, ...]] = ("std_scale", "std_init")
    without_noise: ClassVar[Group | None] = None
    narrower: ClassVar[str] = "lower the stds it starts from"
    numbers: Numbers
    sharded: ShardedModel | None
    apart: bool  # whether contexts add up in this process alone
    averaged: bool  # whether gradients were seen to be the same in all processes
    ok: Tensor | None  # whether the last step was let through, as a flag on the device
    pending: tuple[checks.Verdict, list[tuple[FlatGroup, list[int]]]] | None
    # Makes a GradScaler announce itself, so that step() can refuse it.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: groups.Params,
        defaults: Group,
        *,
        seed: int | None,
        deterministic: NameFilter = (),
        deterministic_lr: float | None = 1e-3,
        batch_dim: int = 0,
        mesh: DeviceMesh | None = None,
        overlap: bool = False,
    ) -> None:
        if not isinstance(batch_dim, int) or batch_dim < 0:
            raise ValueError(f"batch_dim must be a whole number of at least 0, not {batch_dim}")
        if overlap and mesh is None:
            raise ValueError("overlap=True needs mesh=: a wrapper sends gradients by itself")
        if isinstance(params, DistributedDataParallel):
            params = unwrapped(params, type(self).__name__, self.collects is not None, mesh)
        self.module = params if isinstance(params, nn.Module) else None
        self.batch_dim, self.mesh, self.overlap = batch_dim, mesh, overlap
        self.deterministic_lr = deterministic_lr
        given = groups.named_groups(params)
        chosen = select([name for group in given for name, _ in group["params"]], deterministic)
        self.seeded = seed is not None
        if seed is None:  # one for all groups, and saved with them
            seed = new_seed() if self.draws else 0
        defaults = {key: groups.plain(value) for key, value in defaults.items()}
        shared: Group = {"seed": groups.plain(seed), "steps": 0, "deterministic": False}
        if self.matrices:
            shared["blocks"] = ()  # which tensors are one, once their layers have reported
        entries = self.without_noise if deterministic_lr is None else None
        super().__init__(groups.split_groups(given, chosen, entries), {**defaults, **shared})
        self.__setstate__({})

    # What a method supplies.

    @abstractmethod
    def init(self, mean: Tensor, std: Tensor | None, group: Group) -> State:
        """Initial state of a block; given a std, a state such that the posterior has it."""

    @abstractmethod
    def std(self, state: State, group: Group) -> Tensor:
        """Standard deviation of the block's weights."""

    @abstractmethod
    def update(self, mean: Tensor, state: State, stats: Statistics, group: Group) -> tuple[Tensor, State]:
        """The block's new mean and new state."""

    @abstractmethod
    def check(self, group: Group) -> None:
        """Raise ValueError for a hyper-parameter out of range."""

    def scale(self, state: State, group: Group) -> Any:
        """The std that ``max_step`` multiplies: the current one, or that without data."""
        return self.std(state, group)

    def derive(self, key: str, group: Group, params: Sequence[Tensor]) -> float:
        """The value of an entry that a group leaves as None, from its other entries and its parameters."""
        raise NotImplementedError(key)

    def leaf(self, mean: Sequence[Tensor], state: State, keep: Tensor | None, group: Group) -> Leaf:
        """The posterior of a block, given the means of its tensors."""
        return DiagonalGaussian(mean[0], self.std(state, group), keep=keep)

    def adopt(self, leaf: Leaf, mean: Tensor, std: Tensor, group: Group) -> State:
        """State of a block for which the posterior is a given leaf, with its mean and std."""
        return self.init(mean, std, group)

    def captures(self) -> bool:
        """Whether the next step may be a CUDA graph."""
        return True

    # And if its blocks are matrices:

    def perturb(self, state: State, noise: Tensor, group: Group) -> Tensor:
        """How far from its mean a block is drawn, given standard normals ``[K, O, I + 1]``."""
        return self.std(state, group) * noise

    def updates(self, blocks: Sequence[Moving]) -> list[tuple[Tensor, State]]:
        """``update`` for all blocks that are matrices; entries left out of a state do not change."""
        return [self.update(*block) for block in blocks]

    # One training step.

    def sampled_params(self) -> AbstractContextManager[None]:
        """A context in which the model has weights drawn from the posterior; afterwards it has the means
        again.

        Gradients add up, inside a context and across contexts, and the sum is divided by ``mc_samples``: a
        loop that accumulates with ``loss / n`` may use one context, or one for each micro-batch. If anything
        raises inside, the means are restored and the sample is not counted. Under ``torch.no_grad`` every
        context has its own weights, with no effect on training.
        """
        return loop.sampled(self)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """A context in which an optimiser with ``mesh=`` adds up gradients in this process only.

        As with torch's wrappers: put all micro-batches of a step but the last inside, and their gradients are
        sent once. Without a mesh it has no effect.
        """
        before, self.apart = self.apart, True
        try:
            yield
        finally:
            self.apart = before

    def taken(self) -> int:
        """Number of samples taken for the next step."""
        return self.sums.samples + (0 if self.local is self.sums else self.local.samples)

    def own_samples(self) -> int:
        """Number of weight samples that this process draws for its share of a batch."""
        return self.world.share(int(self.param_groups[0]["mc_samples"]))  # 2.0 equals a 2 that was checked

    @torch.no_grad()
    def step(  # type: ignore[override]
        self,
        closure: Callable[[], Tensor | float] | None = None,
        *,
        batch_size: int | None = None,
        count: float | Tensor | None = None,
    ) -> Tensor | None:
        """Update the posterior from the samples drawn since the last step.

        Args:
            closure: Computes the mean loss, with or without calling ``backward()``. It runs ``mc_samples``
                times, each time under its own weights.
            batch_size: Examples in the step. By default counted from the module's inputs.
            count: Number of terms that the loss is a mean of, if they are not the examples: words, outputs,
                labels that are not ignored. Like ``batch_size`` it is the sum over micro-batches, counted
                once for all samples.

        Returns:
            The closure's loss, averaged over the samples.

        Raises:
            FloatingPointError: A loss, a gradient or another statistic is not finite, or the rule's result is
                not, or a std would not be above 0. Then nothing has changed. If all parameters are on one
                GPU, the host does not wait for the device: the bad step changes nothing, and the next call of
                this method, or one that reads or saves the posterior, raises and drops its own gradients.
        """
        self.refuse_inside("step()")
        return loop.step(self, closure, batch_size, count)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients: inside a sampling context those it has added so far, outside all of them."""
        if set_to_none:
            for p in self.parameters():
                p.grad = None  # torch's own way takes longer than this
        else:
            super().zero_grad(set_to_none=False)
        if self.collector is not None:
            self.collector.clear()
        if self.entered is None:
            self.reset()

    # The posterior, described and taken up.

    def posterior(self, model: nn.Module | None = None) -> Factorised:
        """A copy of the current posterior, which training does not change.

        For a sharded model it is gathered in every process: call it in all of them.

        Gives a :class:`~posterity.diagnostics.PosteriorWarning` if its stds outweigh its weights and nothing
        shows that sampled networks are good: the rule takes gradients at the means, or the loss at sampled
        weights has not fallen.

        Args:
            model: The module whose names the tensors get, if the optimiser was built from parameters without
                names.
        """
        self.refuse_inside("posterior()")
        self.check_changed()
        self.settle()
        self.cache.groups()
        leaves = handover.leaves(self, groups.names_in(model, self.named()))
        if complaint := handover.unfit(self, leaves.values()):
            warn(complaint, watch.PosteriorWarning)
        return Factorised(leaves)

    @torch.no_grad()
    @takes(posterior=instance("a Factorised posterior", Factorised))
    def load_posterior(self, posterior: Factorised) -> None:
        """Continue from a posterior: its means, its stds, and its pruned weights, which stay zero."""
        self.refuse_inside("load_posterior()")
        self.check_changed()
        self.settle()
        handover.take_up(self, posterior)
        self.watch.fresh = self.met = False
        self.reset()

    # What torch.optim has besides.

    def add_param_group(self, param_group: Group) -> None:
        """Add a group; it is checked as a whole before anything is added."""
        built = hasattr(self, "cache")  # else there are neither samples nor a cache
        if built:
            self.refuse_inside("add_param_group()")
            if self.taken():
                raise RuntimeError(
                    "the current step already has samples: call step() or zero_grad() before "
                    "add_param_group()"
                )
            self.settle()
        super().add_param_group(groups.completed(self, param_group))
        if built:
            self.sharded = sharded_model(self.module, self.parameters())
            self.cache.drop()
            self.unfrozen = watch.Unfrozen(self.module, self.parameters())

    def state_dict(self) -> dict[str, Any]:
        """The complete state, to resume from."""
        self.refuse_inside("state_dict()")
        self.settle()
        found = super().state_dict()
        for group in found["param_groups"]:  # users and schedulers may have put others there
            group.update({key: groups.plain(value) for key, value in group.items()})
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from a state; one that does not fit is refused, and it is never cast to the parameters'
        dtype."""
        self.refuse_inside("load_state_dict()")
        saved.resume(self, state_dict, super().load_state_dict)

    def __getstate__(self) -> dict[str, Any]:
        self.refuse_inside("copying an optimiser")
        self.settle()
        kept = ("module", "batch_dim", "mesh", "overlap", "deterministic_lr", "seeded")
        own = {name: getattr(self, name) for name in kept}
        return {**super().__getstate__(), **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Called by unpickling, copying and ``load_state_dict`` alike: pending samples are dropped."""
        super().__setstate__(state)
        self.cache = StateCache(self)
        self.blocks = Matrices(self.param_groups, self.state, self.matrices)
        self.sharded = sharded_model(self.module, self.parameters())
        self.world, self.met, self.apart, self.averaged = self.all_processes(), False, False, False
        self.sums = Accumulator()
        self.pools = self.mesh is not None
        self.local = Accumulator() if self.pools else self.sums
        self.numbers = Numbers(self.param_groups)
        self.padding = {} if self.module is None else padding_rows(self.module)
        self.buffers = StepBuffers(self.module)
        # What no layer reports is refused in absorbing: only there is it known which gradients are used.
        self.collector = None
        if self.collects is not None:
            self.collector = self.collects(batch_dim=self.batch_dim, strict=False, once=True)
        fresh = all(group["steps"] == 0 for group in self.param_groups)
        noise = partial(handover.noise, proxy(self))  # a circle would keep both in memory
        slow = partial(handover.slow, proxy(self))
        self.watch = watch.LossWatch(type(self).__name__, self.narrower, noise, fresh, slow)
        self.unfrozen = watch.Unfrozen(self.module, self.parameters())
        self.terms = counting.LossTerms(type(self).__name__, self.batch_dim)
        # Captured steps, which learn late whether all they have seen was finite: wait() raises it.
        self.graphs: WeakSet[Any] = WeakSet()
        self.entered: int | None = None  # how often a context was entered again inside itself
        self.ok = self.pending = None
        self.peeks = count(_PEEKS)  # sampling contexts without gradients
        self.ledger = checks.GradientLedger()
        self.entries = checks.Entries(self)
        self.reset()

    # What groups say.

    def check_changed(self) -> None:
        """Refuse invalid entries, if one has changed since the last check."""
        self.entries.check(self)

    def by_adam(self, group: Group) -> bool:
        """Whether Adam trains a group, not the rule."""
        return bool(group["deterministic"]) and self.deterministic_lr is not None

    def parameters(self) -> list[Tensor]:
        """All parameters, in the order of the groups."""
        return [p for group in self.param_groups for p in group["params"]]

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """All parameters with their names."""
        return chain.from_iterable(map(members, self.param_groups))

    def stochastic(self) -> Iterator[tuple[str, Tensor, Group]]:
        """Parameters that have a posterior, with their names and groups."""
        random = (group for group in self.param_groups if not group["deterministic"])
        return ((name, p, group) for group in random for name, p in members(group))

    # What surrounds a step.

    def refuse_inside(self, call: str) -> None:
        """Raise inside a sampling context."""
        if self.entered is not None:
            raise RuntimeError(
                f"{call} inside sampled_params() would see sampled weights: call it outside the context"
            )

    def refuse_foreign(self) -> None:
        """Raise, before the first sample of a step, for existing gradients that would be lost."""
        self.refuse_inside("a training step")
        if torch.is_inference_mode_enabled():
            raise RuntimeError("torch.inference_mode() keeps no gradients: take training steps outside of it")
        if not self.met and several():
            meet(self)
        self.ledger.refuse_foreign(self.named())

    def all_processes(self) -> World:
        """The current group of processes that learn together."""
        return World(self.mesh, None if self.sharded is None else self.sharded.shares)

    def advance(self, by: int = 1) -> None:
        """Count steps: the next one draws new noise."""
        for group in self.param_groups:
            group["steps"] += by

    def reset(self) -> None:
        """Start the next step: pending samples are dropped, existing gradients count as used."""
        self.sums.clear()
        self.local.clear()
        self.terms.clear()
        self.watch.forget()
        self.buffers.finish()
        self.ledger.remember(self.parameters())

    def settle_step(self) -> None:
        """Wait for the finiteness check of the last step that was not a graph replay, and raise its error
        once."""
        pending, self.pending = self.pending, None
        if pending is not None:
            apply.settle(self, *pending)

    def settle(self) -> None:
        """Wait for the finiteness checks of all steps, and raise their errors once."""
        self.settle_step()
        for graph in list(self.graphs):
            graph.wait()
