"""What a user calls: the shell of every learning rule, and what a rule supplies.

One training step is: draw weights around the means (:meth:`VariationalOptimizer.sampled_params`), run forward
and backward there, put the means back, add up the statistics; after the last sample, hand them to the
method's rule (:meth:`VariationalOptimizer.step`). How that is done is in :mod:`posterity.optim.step`.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property, partial
from itertools import chain, count
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakSet, proxy

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from posterity.arguments import described, instance, is_dense, takes
from posterity.buffers import StepBuffers
from posterity.curvature import Collector
from posterity.distributed import World, several
from posterity.names import NameFilter, padding_rows, select
from posterity.noise import new_seed
from posterity.optim import checks, counting, groups, saved, watch
from posterity.optim.adam import ADAM
from posterity.optim.matrices import Matrices, Moving
from posterity.optim.presets import overridden
from posterity.optim.state import FlatGroup, Group, State, StateCache, members, state_dtype
from posterity.optim.statistics import Accumulator, Statistics
from posterity.optim.step import Numbers, apply, one_sample
from posterity.optim.together import (
    complete,
    mean_loss,
    pool,
    refuse_unlike,
    share_buffers,
    summed,
    unwrapped,
)
from posterity.posterior import DiagonalGaussian, Factorised, Leaf
from posterity.posterior.factorised import Key

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# Numbers of samples that are drawn to look, not to learn: far from those of any step.
_PEEKS = 1 << 30


class VariationalOptimizer(Optimizer, ABC):
    """A torch optimiser whose state is a posterior over the parameters it was given.

    The model's parameters are the posterior's means whenever no sample is drawn, so evaluation, saving and
    everything else that reads a model works as ever.

    A method supplies pure functions of one block, ``init``, ``std``, ``update`` and ``check``, and attributes
    that say what its rule wants. What a function needs it is given, or has from its class: compiled, it
    serves all optimisers of a kind.

    Args:
        params: A module, or what torch.optim takes: (named) parameters or groups of them. The padding rows
            of a module's embeddings have no std, and do not move.
        defaults: The method's hyper-parameters, for groups that do not set their own; ``mc_samples``, weight
            samples per step, and ``max_step`` among them.
        seed: Seed of the weight noise. By default one number is drawn from torch's generator here, as when a
            layer is built; training never draws from it.
        deterministic: Filter of parameter names that get no posterior.
        deterministic_lr: Learning rate of Adam, which trains those; None if the rule itself does.
        batch_dim: The axis that counts examples in the module's inputs and in those of its layers.
        mesh: Processes that each draw weights of their own for their share of a batch, where no wrapper
            averages gradients; see :mod:`posterity.distributed`.

    Attributes:
        needs_batch_size: Whether the rule asks for the number of examples behind a step.
        collects: The curvature that it consumes, instead of E[g·eps].
        draws: Whether gradients are wanted at drawn weights; else at the means.
        matrices: Keys of a state that are no values of single weights, but matrices of a block of tensors.
        scheduled: Entries of a group that may change at every step; a captured step reads them anew.
        derived: Entries that follow from others where they are not given, in the order in which they do.
        widths: Entries that say how wide the posterior is at the start, the most decisive last.
        without_noise: What differs in groups without a posterior, if the rule itself can train these.
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
    _apart: bool  # whether contexts add up in this process alone
    _averaged: bool  # whether gradients were seen to be the same in all processes
    ok: Tensor | None  # whether the last step was let through, as a flag on the device
    _pending: tuple[checks.Verdict, list[tuple[FlatGroup, list[int]]]] | None
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
    ) -> None:
        if not isinstance(batch_dim, int) or batch_dim < 0:
            raise ValueError(f"batch_dim must be a whole number of at least 0, not {batch_dim}")
        if isinstance(params, DistributedDataParallel):
            params = unwrapped(params, type(self).__name__, self.collects is not None, mesh)
        self.module = params if isinstance(params, nn.Module) else None
        self.batch_dim, self.mesh = batch_dim, mesh
        self._deterministic_lr = deterministic_lr
        given = groups.named_groups(params)
        chosen = select([name for group in given for name, _ in group["params"]], deterministic)
        self._seeded = seed is not None
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
        """State of a block at the start, or, given a std, such that the posterior has it."""

    @abstractmethod
    def std(self, state: State, group: Group) -> Tensor:
        """Standard deviation of the block's weights."""

    @abstractmethod
    def update(self, mean: Tensor, state: State, stats: Statistics, group: Group) -> tuple[Tensor, State]:
        """The block's new mean and new state."""

    @abstractmethod
    def check(self, group: Group) -> None:
        """Raise ValueError, in one sentence, for a hyper-parameter out of range."""

    def scale(self, state: State, group: Group) -> Any:
        """The std that ``max_step`` is a multiple of: the present one, or that without data."""
        return self.std(state, group)

    def derive(self, key: str, group: Group, params: Sequence[Tensor]) -> float:
        """The value of an entry that a group leaves open (None), from its others and its parameters."""
        raise NotImplementedError(key)

    def leaf(self, mean: Sequence[Tensor], state: State, keep: Tensor | None, group: Group) -> Leaf:
        """The posterior of a block, given the means of its tensors."""
        return DiagonalGaussian(mean[0], self.std(state, group), keep=keep)

    def adopt(self, leaf: Leaf, mean: Tensor, std: Tensor, group: Group) -> State:
        """State of a block such that the posterior is a leaf, whose mean and std are given."""
        return self.init(mean, std, group)

    def captures(self) -> bool:
        """Whether the step that comes next may be a CUDA graph."""
        return True

    # And if its blocks are matrices:

    def perturb(self, state: State, noise: Tensor, group: Group) -> Tensor:
        """How far from its mean a block is drawn, given standard normals ``[K, O, I + 1]``."""
        return self.std(state, group) * noise

    def updates(self, blocks: Sequence[Moving]) -> list[tuple[Tensor, State]]:
        """``update`` for all blocks that are matrices; what is left out of a state stays."""
        return [self.update(*block) for block in blocks]

    # One training step.

    @contextmanager
    def sampled_params(self) -> Iterator[None]:
        """Inside, the model has weights drawn from the posterior; afterwards, its means again.

        Backwards add, inside a context and across contexts, and the sum is divided by ``mc_samples``: a loop
        that accumulates with ``loss / n`` may have one context, or one for each micro-batch. Whatever is
        raised inside, the means come back and the sample is not counted. Under ``torch.no_grad`` every
        context has weights of its own, which training never sees.
        """
        if self.entered is not None:
            self.entered += 1
            if self.entered > 1:
                raise RuntimeError(
                    "sampled_params() was entered again inside itself; step(closure) draws the samples: set "
                    "mc_samples instead of a loop inside the closure"
                )
            yield
            return
        self.check_changed()
        if not torch.is_grad_enabled():
            with one_sample(self, next(self._peeks), 0.0):
                yield
            return
        if self.taken() and all(p.grad is None for p in self.parameters()):
            self.reset()  # somebody has dropped all gradients, as zero_grad() does
        elif self.taken():
            self._ledger.refuse_changed(self.named())
        taken = self.taken()
        with self._next_sample():
            yield
        if self.taken() > taken:
            if self.pools and not self._apart:
                pool(self, [])
            if self.local is self.sums or not self.local.samples:
                self.sums.publish()
            self._ledger.remember(self.parameters())

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, contexts of an optimiser with ``mesh=`` add up in this process alone.

        As with torch's wrappers: put all micro-batches of a step but the last inside, and their gradients
        travel once. Without a mesh it changes nothing.
        """
        before, self._apart = self._apart, True
        try:
            yield
        finally:
            self._apart = before

    def taken(self) -> int:
        """Samples that wait for the step."""
        return self.sums.samples + (0 if self.local is self.sums else self.local.samples)

    def _next_sample(self) -> AbstractContextManager[None]:
        weight = 1 / self.own_samples()
        if self.taken() == 0:
            self.refuse_foreign()
        elif weight != (self.local if self.local.samples else self.sums).weight:
            raise RuntimeError("mc_samples was changed while samples wait: call step() or zero_grad() first")
        return one_sample(self, self.taken(), weight)

    def own_samples(self) -> int:
        """Weight samples that this process takes of its share of a batch."""
        samples: int = self.param_groups[0]["mc_samples"]
        if samples % self.world.split:
            raise ValueError(
                f"mc_samples={samples} cannot be split over the {self.world.split} processes of the mesh's "
                f"dimension 'mc': choose a multiple"
            )
        return samples // self.world.split

    def numbered(self, samples: range, of: int | None = None) -> range:
        """The numbers of some of this process's samples among those of all processes.

        Args:
            samples: By their numbers here.
            of: How many this process takes at once; ``own_samples`` if not given.
        """
        if self.mesh is None:
            return samples
        window, first = divmod(samples.start, of or self.own_samples())
        start = (window * self.world.size + self.world.rank) * (of or self.own_samples()) + first
        return range(start, start + len(samples))

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
            batch_size: Examples behind the step. By default those of the module's inputs are counted.
            count: Terms that the loss is a mean of, where these are not the examples: words, outputs, labels
                that are not ignored. Like ``batch_size`` it counts all micro-batches, once for all samples.

        Returns:
            The closure's loss, averaged over the samples.

        Raises:
            FloatingPointError: A loss, a gradient or another statistic is not finite, or the rule's result is
                not, or a std would not be above 0. Nothing has moved then.
                Where all parameters are on one GPU, the host does not wait for what the device finds: the
                step that was bad moves nothing, and the next call of this method, or of what shows or saves
                the posterior, raises, and drops what was gathered for a step of its own.
        """
        self.refuse_inside("step()")
        if closure is not None and not callable(closure):
            raise TypeError(f"step() takes a function that computes the loss, not {described(closure)}")
        if closure is None and self._asked_for_state():
            self.cache.groups()
            return None
        self.check_changed()
        checks.refuse_scaler(self)
        count = counting.as_count(count)
        counting.refuse_unknown(self, batch_size, count, runs=closure is not None)
        if closure is None and self.local is not self.sums and self.local.samples:  # all were in no_sync()
            pool(self, [])
            self.sums.publish()
        if closure is None:  # those that are there wait for the others
            checks.refuse_partial(self.param_groups, self.sums, type(self).__name__)
        loss = None
        try:
            if closure is not None:
                loss = self._run(closure, count or batch_size)
            self._learn(batch_size, count)
        except BaseException:
            self.buffers.undo()
            self.reset()
            raise
        self.reset()
        return loss

    def _run(self, closure: Callable[[], Tensor | float], behind: float | None) -> Tensor:
        """Run the closure under ``mc_samples`` weight samples; its mean loss, over ``behind`` terms."""
        params = self.parameters()
        losses: list[Tensor] = []
        for _ in range(self.own_samples()):
            with self._next_sample(), torch.enable_grad():
                loss = closure()
                if not isinstance(loss, Tensor | float | int):
                    raise TypeError(f"the closure must return the loss, not {type(loss).__name__}")
                if isinstance(loss, Tensor) and not (is_dense(loss) and loss.numel() == 1):
                    raise ValueError(
                        f"the closure must return the mean loss, one number, not {described(loss)} of shape "
                        f"{list(loss.shape)}"
                    )
                if isinstance(loss, Tensor) and loss.requires_grad and all(p.grad is None for p in params):
                    loss.backward()  # type: ignore[no-untyped-call]
                losses.append(_number(loss))
        if self.pools:
            losses = pool(self, losses, behind)
        elif self.world.size > 1:
            losses = mean_loss(self, losses)
        self.sums.publish()
        self.sums.losses += losses
        return torch.stack(losses).mean(0)

    def _asked_for_state(self) -> bool:
        """Whether a step is that of torch.distributed.checkpoint, which wants to see state, not to learn."""
        grads = [p.grad for p in self.parameters()]
        return (
            not (self.state or self.taken() or any(group["lr"] for group in self.param_groups))
            and all(grad is not None for grad in grads)
            and not any(bool(grad.any()) for grad in grads if grad is not None)
        )

    def _learn(self, batch_size: int | None, count: float | None) -> None:
        """Judge what was absorbed, and apply it."""
        checks.refuse_missing(self.param_groups, self.sums, type(self).__name__)
        self.cache.groups()  # a user may have changed state since the draw
        if self.world.size > 1 and not self.pools:
            complete(self, first=not self._averaged)
            self._averaged = True
        inputs = self.sums.counted()
        behind = counting.behind(self, summed(self, batch_size), inputs, summed(self, count))
        alone = self.world.size == 1  # each looks at losses of its own
        size = behind.batch_size if alone else float(batch_size or 0)
        self.terms.judge(size, inputs if alone else None, counted=count is not None)
        self.settle_step()
        self.sums.finish()
        verdict = checks.Verdict(self.sums)
        # What may fail in the middle of a step is not for a device alone to judge.
        waits = bool(self.matrices) or not runs_ahead_of({flat.device for flat in self.cache.latest})
        if waits:
            verdict.report(self.watch, None if verdict.passed else checks.bad_gradient(self.named()))
        self.ok = None if waits else verdict.ok
        self.cache.reread()
        moved = apply(self, behind, self.ok)
        self.buffers.undo_unless(self.ok)
        if self.pools and self.module is not None:
            share_buffers(self.world, self.module)
        if not waits:
            verdict.send()
            self._pending = verdict, moved
        self.advance()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients: inside a sampling context what it has added so far, outside everything."""
        if set_to_none:
            for p in self.parameters():
                p.grad = None  # torch's own way takes longer than this
        else:
            super().zero_grad(set_to_none=False)
        if self.collector is not None:
            self.collector.clear()
        if self.entered is None:
            self.reset()

    def asks_batch_size(self) -> bool:
        """Whether the rule must know the number of examples behind a step."""
        return self.needs_batch_size and not all(group["deterministic"] for group in self.param_groups)

    # The posterior, described and taken up.

    def posterior(self, model: nn.Module | None = None) -> Factorised:
        """The posterior as it stands, as a copy that training no longer changes.

        A :class:`~posterity.diagnostics.PosteriorWarning` says if its stds outweigh its weights and nothing
        shows that sampled networks are any good: the rule takes gradients at the means, or the loss at
        sampled weights has not come down.

        Args:
            model: Whose names the tensors get, where the optimiser was given parameters without names.
        """
        self.refuse_inside("posterior()")
        self.check_changed()
        self.settle()
        self.cache.groups()
        leaves = self._leaves(groups.names_in(model, self.named()))
        if complaint := self.unfit(leaves.values()):
            warnings.warn(complaint, watch.PosteriorWarning, stacklevel=2)
        return Factorised(leaves)

    def unfit(self, leaves: Iterable[Leaf]) -> str | None:
        """Why this optimiser's posterior is not fit to be sampled, and what to do, if so it is.

        Losses at sampled weights that have come down say that it is. Without them, stds that outweigh weights
        say that it is not.
        """
        if not self.param_groups[0]["steps"] or (self.draws and self.watch.learned):
            return None
        noise = watch.noise_of(leaves)
        seen = "it has hardly learned" if self.draws else "it has seen the loss at its means alone"
        return (
            f"the stds of {type(self).__name__}'s posterior are {noise:.2g} times its weights, and {seen}: "
            f"sampled networks will not do what their mean does, {self.narrower}"
            if noise > 1.0
            else None
        )

    def _leaves(self, called: Mapping[str, str]) -> dict[Key, Leaf]:
        """The posterior of every block, by the names that parameters are called."""
        leaves: dict[Key, Leaf] = {}
        within = self.blocks.by_name()
        for name, p, group in self._stochastic():
            block, state = within.get(name), self.state[p]
            names: Key
            if block is None:
                names, means, keep = called[name], [state.get("mean", p.detach())], state.get("keep")
            elif name == block.names[0]:
                names = tuple(called[each] for each in block.names)
                means, keep = block.means(), block.keep()
            else:
                continue
            held = None
            if keep is not None:  # pruned weights are zero; others that do not move are held
                held = ~keep & ((means[0] if block is None else block.join(means)) != 0)
                keep = keep | held
            leaves[names] = self.leaf(means, state, keep, group).hold(held)
        return leaves

    def _noise(self) -> float:
        """‖std‖ / ‖mean‖ of the weights that losses are taken at."""
        if not self.draws:
            return 0.0
        return watch.noise_of(self._leaves({name: name for name, _ in self.named()}).values())

    @torch.no_grad()
    @takes(posterior=instance("a Factorised posterior", Factorised))
    def load_posterior(self, posterior: Factorised) -> None:
        """Go on from a posterior: its means, its stds, and its pruned weights, which stay zero."""
        self.refuse_inside("load_posterior()")
        self.check_changed()
        self.settle()
        params = {name: (p, group) for name, p, group in self._stochastic()}
        fresh = saved.states_from(posterior, params, self)
        self.blocks.displace(posterior.tensors.values(), fresh)
        for p, state in fresh.items():
            p.copy_(state["mean"])
            if state_dtype(p) == p.dtype:
                del state["mean"]  # the parameter itself is the mean
            self.state[p] = state
        self.watch.fresh = self._met = False
        self.reset()

    def _stochastic(self) -> Iterator[tuple[str, Tensor, Group]]:
        for group in self.param_groups:
            if not group["deterministic"]:
                for name, p in members(group):
                    yield name, p, group

    # What torch.optim has besides.

    def add_param_group(self, param_group: Group) -> None:
        """Add a group; it is checked as a whole before anything is added."""
        if not isinstance(param_group, dict):
            raise TypeError(
                f"a group is a dict with its parameters under 'params', not {described(param_group)}"
            )
        if not isinstance(param_group.get("deterministic", False), bool):
            raise TypeError(f"deterministic is True or False, not {described(param_group['deterministic'])}")
        built = hasattr(self, "cache")  # else there are neither samples nor a cache
        if built:
            self.refuse_inside("add_param_group()")
            if self.taken():
                raise RuntimeError("samples are waiting: call step() or zero_grad() before add_param_group()")
            self.settle()
        defaults = self.defaults
        if param_group.get("deterministic") and self._deterministic_lr is not None:
            defaults = {**defaults, **ADAM, "lr": self._deterministic_lr}
        elif param_group.get("deterministic"):
            defaults = {**defaults, **(self.without_noise or {})}
        groups.refuse_unknown(param_group, defaults.keys() | {"params", "param_names"}, type(self).__name__)
        given = {key: value if key == "params" else groups.plain(value) for key, value in param_group.items()}
        group = groups.checked_group(overridden(defaults, given, self.widths), self.param_groups)
        by_rule = not self.by_adam(group)
        left_open = {key: 1.0 for key in self.derived if by_rule and group[key] is None}
        self._check([*self.param_groups, {**group, **left_open}])
        for key in left_open:  # one may follow from another
            group[key] = self.derive(key, group, [p for _, p in group["params"]])
        super().add_param_group(group)
        if built:
            self.cache.drop()

    def state_dict(self) -> dict[str, Any]:
        """All there is to resume from."""
        self.refuse_inside("state_dict()")
        self.settle()
        found = super().state_dict()
        for group in found["param_groups"]:  # users and schedulers may have put others there
            group.update({key: groups.plain(value) for key, value in group.items()})
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume; what does not fit is refused, and state is never cast to the parameters' dtype."""
        self.refuse_inside("load_state_dict()")
        saved.refuse_foreign(state_dict)
        self.settle()
        used: list[dict[str, Any]] = []

        def fits(_: Optimizer, given: dict[str, Any]) -> None:
            saved.refuse_mismatch(self.param_groups, given, self.defaults, self.matrices)
            self._check(given["param_groups"])
            saved.refuse_unfit(self, given)
            used.append(given)

        # After the hooks of others, so that what they made of the state is what counts.
        handle = self.register_load_state_dict_pre_hook(fits)
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
        saved.load(self.state, self.param_groups, used[0])

    def __getstate__(self) -> dict[str, Any]:
        self.refuse_inside("copying an optimiser")
        self.settle()
        kept = ("module", "batch_dim", "mesh", "_deterministic_lr", "_seeded")
        own = {name: getattr(self, name) for name in kept}
        return {**super().__getstate__(), **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Called by unpickling, copying and ``load_state_dict`` alike: pending samples are dropped."""
        super().__setstate__(state)
        self.cache = StateCache(self)
        self.blocks = Matrices(self.param_groups, self.state, self.matrices)
        self.world, self._met, self._apart, self._averaged = World(self.mesh), False, False, False
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
        noise = partial(VariationalOptimizer._noise, proxy(self))  # a circle would keep both in memory
        self.watch = watch.LossWatch(type(self).__name__, self.narrower, noise, fresh)
        self.terms = counting.LossTerms(type(self).__name__)
        # Captured steps, which learn late whether all they have seen was finite: wait() raises it.
        self.graphs: WeakSet[Any] = WeakSet()
        self.entered: int | None = None  # how often a context was entered again inside itself
        self.ok = self._pending = None
        self._peeks = count(_PEEKS)  # sampling contexts without gradients
        self._ledger = checks.GradientLedger()
        self._checked = self._entries_now()
        self.reset()

    # What groups say.

    def check_changed(self) -> None:
        """Refuse entries for which a rule is undefined, if one has changed since they were last checked."""
        entries = self._entries_now()
        try:
            changed = bool(entries != self._checked)
        except (RuntimeError, ValueError):  # several numbers, which are not to be compared, nor what is meant
            changed = True
        if changed:
            for group in self.param_groups:
                group.update({key: groups.plain(group[key]) for key in self._keys if key in group})
            entries = self._entries_now()
            self._check(self.param_groups)
            self._checked = entries

    def _entries_now(self) -> list[list[object]]:
        return [
            # A number may be in a tensor, and change in place.
            [*[getattr(group[key], "_version", None) for key in self.scheduled], *map(group.get, self._keys)]
            for group in self.param_groups
        ]

    @cached_property
    def _keys(self) -> list[str]:
        """Names of entries that only users change, Adam's among them."""
        return sorted({*self.defaults, *ADAM} - {"steps", "blocks"})

    def _check(self, held: Sequence[Group]) -> None:
        for group in held:
            groups.check_common(group, held[0])
            if not self.by_adam(group):
                self.check(group)

    def by_adam(self, group: Group) -> bool:
        """Whether Adam trains a group, not the rule."""
        return bool(group["deterministic"]) and self._deterministic_lr is not None

    def parameters(self) -> list[Tensor]:
        """All parameters, in the order of the groups."""
        return [p for group in self.param_groups for p in group["params"]]

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """All parameters with their names."""
        return chain.from_iterable(map(members, self.param_groups))

    # What surrounds a step.

    def refuse_inside(self, call: str) -> None:
        """Raise inside a sampling context."""
        if self.entered is not None:
            raise RuntimeError(f"{call} inside sampled_params() would see sampled weights: leave it first")

    def refuse_foreign(self) -> None:
        """Raise, before the first sample of a step, for gradients that it would lose."""
        self.refuse_inside("a training step")
        self._meet()
        self._ledger.refuse_foreign(self.named())

    @contextmanager
    def pooling(self) -> Iterator[None]:
        """Inside, sums of processes are added up by this optimiser, not by a wrapper."""
        before = self.pools, self.local
        self.pools, self.local = True, Accumulator()
        try:
            yield
        finally:
            self.pools, self.local = before

    def _meet(self) -> None:
        """Before the first step: refuse processes that differ, and let all draw by one seed."""
        if self._met or (self.world.size == 1 and not several()):
            return
        if self.mesh is None:  # processes may have come together after this was built
            self.world = World(None)
        self._met = True
        if self.world.size == 1:
            return
        if not self._seeded and not self.param_groups[0]["steps"]:
            seed = self.world.gathered(self.param_groups[0]["seed"])[0]
            for group in self.param_groups:
                group["seed"] = seed
        refuse_unlike(self)

    def advance(self, by: int = 1) -> None:
        """Count steps: the next one draws other noise."""
        for group in self.param_groups:
            group["steps"] += by

    def reset(self) -> None:
        """Start the next step: pending samples are dropped, gradients that are there are used up."""
        self.sums.clear()
        self.local.clear()
        self.terms.clear()
        self.buffers.finish()
        self._ledger.remember(self.parameters())

    def settle_step(self) -> None:
        """Wait for the verdict on the last step that was no replay of a graph, and raise it, once."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        verdict, moved = pending
        bad = None
        if not verdict.passed:  # it was held back on the device: uncount it
            for flat, numbers in moved:
                flat.count(numbers, -1)
            self.advance(-1)
            bad = self._ledger.not_finite(self.named())
        verdict.report(self.watch, bad, self.overshot(), " of the last step")

    def overshot(self, what: str = "a mean, a state or a std that is not finite") -> str:
        """The sentence for a step whose result is not fit: what it is, and which settings make it smaller."""
        group = self.param_groups[0]
        wide, lr = self.narrower, float(group["lr"])
        if group.get("std_init") is not None:
            wide = wide.replace("std_scale", f"std_init={group['std_init']:g}")
        return (
            f"{type(self).__name__}'s step would give {what}; the posterior was not touched: lower "
            f"lr={lr:g}, or {wide}, or look for huge values in the batch"
        )

    def settle(self) -> None:
        """Wait for the verdicts on all steps, and raise them, once."""
        self.settle_step()
        for graph in list(self.graphs):
            graph.wait()


def _number(loss: Tensor | float) -> Tensor:
    """A loss as a real number, without its graph."""
    found = loss.detach() if isinstance(loss, Tensor) else torch.tensor(float(loss))
    return found if found.is_floating_point() else found.float()


def runs_ahead_of(devices: Collection[torch.device]) -> bool:
    """Whether a host need not wait for verdicts: all parameters are on one GPU."""
    return len(devices) == 1 and all(device.type == "cuda" for device in devices)
