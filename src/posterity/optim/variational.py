"""The shell that every learning rule runs in: state, sampling, averaging, safety.

One training step is: draw weights around the means (:meth:`VariationalOptimizer.sampled_params`), run forward
and backward there, put the means back, add up the statistics; after the last sample, hand their averages to
the method's rule (:meth:`VariationalOptimizer.step`). A method adds only pure functions of one block.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from itertools import count
from operator import is_
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from posterity.curvature import Collector
from posterity.names import NameFilter, select
from posterity.noise import Noise
from posterity.optim.adam import adam_init, adam_update
from posterity.optim.blocks import Blocks, Moving
from posterity.optim.checkpoint import refuse_mismatch, saved_states
from posterity.optim.collecting import Collecting, due
from posterity.optim.gradients import (
    GradientLedger,
    refuse_missing,
    refuse_not_finite,
    refuse_process_group,
)
from posterity.optim.groups import Group, Params, checked_group, members, named_groups, split_groups
from posterity.optim.guard import Guard, ahead_of
from posterity.optim.handover import states_from
from posterity.optim.live import Live, under_way
from posterity.optim.sampling import Draw, Sampling
from posterity.optim.slab import Slab, State, needs_mean, slabs
from posterity.optim.statistics import Accumulator, Sink, Statistics, state_dtype, zero
from posterity.posterior import DiagonalGaussian, Factorised, Leaf
from posterity.posterior.factorised import Key

_generations = count()
# Numbers of samples that are drawn to look, not to learn: far from those of any step.
_PEEKS = 1 << 30
# By default the compiler starts a process for every core, each of which imports torch.
_ONE_KERNEL: dict[str, str | int | bool | Callable[..., Any]] = {"compile_threads": 1}


class VariationalOptimizer(Optimizer, ABC):
    """A torch optimiser whose state is a posterior over the parameters it was given.

    The model's parameters are the posterior's means whenever no sample is drawn, so evaluation, saving and
    everything else that reads a model works as ever.

    Args:
        params: A module, or what torch.optim takes: (named) parameters or groups of them.
        defaults: The method's hyper-parameters, for groups that do not set their own.
        mc_samples: Weight samples per ``step(closure)``.
        seed: Seed of the weight noise.
        deterministic: Filter of parameter names that get no posterior; Adam trains them, or the rule itself.
        deterministic_lr: Adam's learning rate for those.

    Example:
        >>> from posterity import BGD
        >>> model = nn.Linear(3, 2)
        >>> opt = BGD(model, std_init=0.1, batch_size=4)
        >>> isinstance(opt, VariationalOptimizer)
        True
        >>> with opt.sampled_params():
        ...     model(torch.ones(4, 3)).square().mean().backward()
        >>> opt.step()
    """

    # What a method says of its rule.
    needs_batch_size: ClassVar[bool] = False
    # The curvature that it consumes, instead of E[g·eps].
    collects: ClassVar[type[Collector] | None] = None
    # Whether gradients are wanted at drawn weights; else at the means.
    draws: ClassVar[bool] = True
    # Keys of a state that are no values of single weights, but matrices of a block of tensors.
    matrices: ClassVar[tuple[str, ...]] = ()
    # Entries of a group that may change at every step; a captured step reads them anew.
    live: ClassVar[tuple[str, ...]] = ("lr",)
    # What differs in groups without a posterior, if the rule itself trains these; None: Adam does.
    without_noise: ClassVar[Group | None] = None

    _slabs: Sequence[Slab] = ()
    # Makes a GradScaler announce itself, so that step() can refuse it.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Params,
        defaults: Group,
        *,
        mc_samples: int,
        seed: int,
        deterministic: NameFilter = (),
        deterministic_lr: float = 1e-3,
    ) -> None:
        if not isinstance(mc_samples, int) or mc_samples < 1:
            raise ValueError(f"mc_samples must be a whole number of at least 1, not {mc_samples}")
        self._module = params if isinstance(params, nn.Module) else None
        self._deterministic_lr = deterministic_lr
        groups = named_groups(params)
        chosen = select([name for group in groups for name, _ in group["params"]], deterministic)
        shared = {"mc_samples": mc_samples, "seed": seed, "steps": 0, "deterministic": False}
        super().__init__(split_groups(groups, chosen, self.without_noise), {**defaults, **shared})
        self.__setstate__({})

    # What a method supplies: pure functions of one block.

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

    # What one supplies besides if its blocks are matrices.

    def perturb(self, state: State, noise: Tensor, group: Group) -> Tensor:
        """How far weights are drawn from their mean, given standard normals."""
        return self.std(state, group) * noise

    def updates(self, blocks: Sequence[Moving]) -> Sequence[tuple[Tensor, State]]:
        """New means and states of all blocks that are matrices; what is left out of a state stays."""
        return [self.update(*block) for block in blocks]

    def leaf(self, mean: Sequence[Tensor], state: State, keep: Tensor | None, group: Group) -> Leaf:
        """The posterior of a block, given the means of its tensors."""
        return DiagonalGaussian(mean[0], self.std(state, group), keep=keep)

    def adopt(self, leaf: Leaf, mean: Tensor, std: Tensor, group: Group) -> State:
        """State of a block such that the posterior is a leaf, whose mean and std are given."""
        return self.init(mean, std, group)

    def captures(self) -> bool:
        """Whether the step that comes next may be a CUDA graph."""
        return True

    # What a user calls.

    @contextmanager
    def sampled_params(self) -> Iterator[None]:
        """Inside, the model has weights drawn from the posterior; afterwards, its means again.

        Backwards inside one context add up (micro-batches); contexts before one ``step()`` are averaged
        (Monte-Carlo samples). Whatever is raised inside, the means come back and the sample is not counted.
        Under ``torch.no_grad`` every context has weights of its own, which training never sees.
        """
        if self._sampling.entered is not None:
            self._sampling.entered += 1
            if self._sampling.entered > 1:
                raise RuntimeError(
                    "sampled_params() was entered again inside itself; step(closure) draws the samples: set "
                    "mc_samples instead of a loop inside the closure"
                )
            yield
            return
        sample = self._sums.samples
        if not torch.is_grad_enabled():
            sample = _PEEKS + self._peeks
            self._peeks += 1
        taken = self._sums.samples
        with self._one_sample(sample):
            yield
        if self._sums.samples > taken:
            self._sums.publish()

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], Tensor | float] | None = None, *, batch_size: int | None = None
    ) -> Tensor | None:
        """Update the posterior from the samples drawn since the last step.

        Args:
            closure: Computes the mean loss, with or without calling ``backward()``. It runs ``mc_samples``
                times, each time under its own weights.
            batch_size: Examples behind the loss, for methods that need it; the group's value otherwise.

        Returns:
            The closure's loss, averaged over the samples.

        Raises:
            FloatingPointError: A loss, a gradient or another statistic is not finite. Nothing has moved then.
                Where all parameters are on one GPU, the host does not wait for what the device finds: the
                step that was bad moves nothing, and the next call of this method, or of what shows or saves
                the posterior, raises, and drops what was gathered for a step of its own.
        """
        self._refuse_inside("step()")
        if hasattr(self, "grad_scale"):
            for name in ("grad_scale", "found_inf"):  # else every later step would be refused as well
                delattr(self, name)
            raise RuntimeError(
                f"{type(self).__name__} takes its statistics before a GradScaler unscales the gradients; "
                "use torch.autocast(dtype=torch.bfloat16), which needs no scaler"
            )
        sizes = [self._batch_size(group, batch_size) for group in self.param_groups]
        loss = None
        try:
            if closure is not None:
                loss = self._run(closure)
            if batch_size is not None and self._sums.examples - {batch_size}:
                raise ValueError(
                    f"the layers saw {min(self._sums.examples - {batch_size})} examples, not batch_size="
                    f"{batch_size}: count those of all micro-batches, and keep them on the first axis"
                )
            refuse_missing(self.param_groups, self._sums, type(self).__name__)
            self.guard.settle_step()
            check = None
            if self.guard.device is None:
                refuse_not_finite(self.param_groups, self._sums)
            else:
                check = self.guard.judge(self._sums, self._take_back)
            self.apply(sizes)
        except BaseException:
            self._sampling.restore()
            self._reset()
            raise
        if check is not None and self.guard.ok is not None:
            self._sampling.restore_unless(self.guard.ok)
            self.guard.expect(check)
        self.advance()
        self._reset()
        return loss

    def posterior(self) -> Factorised:
        """The posterior as it stands, as a copy that training no longer changes."""
        self._refuse_inside("posterior()")
        self.guard.settle()
        leaves: dict[Key, Leaf] = {}
        self._ready()
        within = self._matrices.by_name()
        for name, p, group in self._blocks():
            block, state = within.get(name), self.state[p]
            if block is None:
                leaves[name] = self.leaf([self._mean(p)], state, state.get("keep"), group)
            elif name == block.names[0]:
                leaves[block.names] = self.leaf(block.means(), state, block.keep(), group)
        return Factorised(leaves)

    @torch.no_grad()
    def load_posterior(self, posterior: Factorised) -> None:
        """Go on from a posterior: its means, its stds, and its pruned weights, which stay zero."""
        self._refuse_inside("load_posterior()")
        self.guard.settle()
        named = {name: (p, group) for name, p, group in self._blocks()}
        fresh = states_from(posterior, named, self.adopt, self.matrices)
        self._matrices.displace(posterior.tensors.values(), fresh)
        for p, state in fresh.items():
            p.copy_(state["mean"])
            if state_dtype(p) == p.dtype:
                del state["mean"]  # the parameter itself is the mean
            self.state[p] = state
        self._reset()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients: inside a sampling context what it has added so far, outside everything."""
        super().zero_grad(set_to_none=set_to_none)
        self._collecting.clear()
        if self._sampling.entered is None:
            self._reset()

    def add_param_group(self, param_group: Group) -> None:
        """Add a group; it is checked as a whole before anything is added."""
        if self._slabs and self._sums.samples:
            raise RuntimeError("samples are waiting: call step() or zero_grad() before add_param_group()")
        if self._slabs:
            self.guard.settle()
        if param_group.get("deterministic"):
            adam = {"lr": self._deterministic_lr, "betas": (0.9, 0.999)}
            param_group = {**(adam if self.without_noise is None else self.without_noise), **param_group}
        group = checked_group({**self.defaults, **param_group}, self.param_groups)
        if not self._adams(group):
            self.check(group)
        super().add_param_group(group)
        self._slabs = []

    def state_dict(self) -> dict[str, Any]:
        """All there is to resume from."""
        self.guard.settle()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume; what does not fit is refused, and state is never cast to the parameters' dtype."""
        self._refuse_inside("load_state_dict()")
        self.guard.settle()
        used: list[dict[str, Any]] = []

        def fits(_: Optimizer, given: dict[str, Any]) -> None:
            refuse_mismatch(self.param_groups, given, self.defaults, self.matrices)
            used.append(given)

        # After the hooks of others, so that what they made of the state is what counts.
        handle = self.register_load_state_dict_pre_hook(fits)
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
        for p, state in saved_states(self.param_groups, used[0]):
            for key, value in state.items():
                self.state[p][key] = value.detach().to("cpu" if key == "step" else p.device, copy=True)

    def __getstate__(self) -> dict[str, Any]:
        self.guard.settle()
        own = {"_module": self._module, "_deterministic_lr": self._deterministic_lr}
        return {**super().__getstate__(), **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Called by unpickling, copying and ``load_state_dict`` alike: pending samples are dropped."""
        super().__setstate__(state)
        self._slabs = []
        self._matrices = Blocks(self.param_groups, self.state, self.matrices)
        self._held: list[Tensor] = []  # all of the state, when the slabs were made of it
        self._sums = Accumulator()
        self._ledger = GradientLedger()
        self._sampling = Sampling(self._module)
        self._collecting = Collecting(self.collects, type(self).__name__)
        self._peeks: int = 0  # sampling contexts without gradients
        self.guard = Guard(type(self).__name__)
        self._moved: list[tuple[Slab, list[int]]] = []  # by the last step, of each slab
        self._live: Live | None = None
        self._generation = next(_generations)
        self._reset()

    # How the stacked path takes part: the same draws, the same sums.

    @torch.no_grad()
    def draw(self, samples: range, weight: float = 1.0) -> list[Draw]:
        """Weights of every stochastic parameter, with their noise; the parameters' own are kept.

        Args:
            samples: Numbers of the samples.
            weight: Of each in the statistics; if all together have 1, these need no division.
        """
        self._refuse_inside("a training step")
        if samples.start == 0 and self._live is None:
            refuse_process_group()
            self._ledger.refuse_foreign(self.param_groups)
        drawn = []
        groups = under_way(self.param_groups, self._live)
        for slab in self._ready():
            slab.read()
            group = groups[slab.number]
            if group["deterministic"] or not self.draws:
                continue
            noise = Noise(
                samples,
                slab.layout,
                seed=group["seed"],
                step=group["steps"] if self._live is None else self._live.clock,
                weight=weight,
                device=slab.device,
                dtype=slab.mean.dtype,
                room=slab.room,
            )
            mean, std = slab.mean, (self.std if self._live is None else self._fused_std)(slab.state, group)
            if "keep" in slab.state:
                mean, std = mean * slab.state["keep"], std * slab.state["keep"]
            drawn.append(Draw(slab, noise, noise.perturb(mean, std).to(slab.dtype)))
        if drawn:
            self._matrices.draw(drawn, self.perturb, self._live)
        return drawn

    def absorb(
        self,
        grad_of: Callable[[Tensor], Tensor | None],
        drawn: list[Draw],
        samples: int,
        weight: float = 1.0,
        parts: int = 1,
    ) -> None:
        """Add gradients ``[samples, ...]`` taken at drawn weights to the statistics.

        Those of one sample may lack the leading dimension. Those of deterministic parameters are one, a sum
        over the samples.

        Args:
            grad_of: A parameter's gradient, if it has one.
            drawn: The weights.
            samples: How many.
            weight: Of each.
            parts: Of the batch, of which every sample has seen one.
        """
        noises = {draw.slab: draw.noise for draw in drawn if self.collects is None}
        grads = [
            (slab, {i: grad for i, p in enumerate(slab.params) if (grad := grad_of(p)) is not None})
            for slab in self._slabs
        ]
        squares, layers, examples = self._collecting.take(
            (slab.layout.names[i] for slab, found in grads for i in found), samples
        )
        for slab, found in grads:
            noise = noises.get(slab)
            if found:
                self._sums.of(slab, noise).add(found, noise, weight)
            names = slab.layout.names
            if own := {i: squares[names[i]] for i in found if names[i] in squares}:
                # Those of a mean loss: the examples' own gradients are as many times larger as they are many.
                self._sums.of(slab, noise).add_squares(own, weight * examples)
        if examples:
            self._sums.examples.add(examples * parts)
            self._sums.add_layers(layers, examples, weight)
        self._sums.samples += samples
        self._sums.weight += samples * weight

    def collecting(
        self, drawn: Mapping[Tensor, Tensor] | None = None, *, stacked: bool = False
    ) -> AbstractContextManager[object]:
        """What forward and backward passes are run inside: they tell of the curvature that the rule wants.

        Args:
            drawn: Tensors in the place of parameters, if any.
            stacked: Whether these are ``[samples, ...]``.
        """
        named = (pair for group in self.param_groups for pair in members(group))
        return self._collecting.watch(named, drawn or {}, stacked=stacked, due=due(self.param_groups[0]))

    def sink(self, draw: Draw, block: int) -> Sink:
        """Where a layer's backward pass may bring a drawn weight's gradient by itself."""
        return Sink(self._sums, draw.slab, draw.noise, block)

    def publish(self) -> None:
        """Put the mean gradients of all that was absorbed into ``p.grad``."""
        self._sums.publish(last=True)

    @torch.no_grad()
    def apply(self, sizes: list[int]) -> None:
        """Move every parameter that has a gradient, given the batch size that each group's rule sees."""
        live, ok, done = self._live, self.guard.ok, set[Tensor]()
        if self.matrices:
            done = self._matrices.move(self._sums, sizes, self.updates, live, ok)
        groups = under_way(self.param_groups, live)
        collected = self.collects is None or bool(self._sums.examples)
        self._moved = []
        for sums in self._sums:
            slab = sums.slab
            moved = [i for i, p in enumerate(slab.params) if p.grad is not None and not (done and p in done)]
            if not moved:
                continue
            slab.count(moved)
            self._moved.append((slab, moved))
            group = groups[slab.number]
            if live is None:
                slab.locate()
                slab.read()  # a user may have changed weights since the draw
            grad = sums.mean_grad
            counts = slab.steps.tolist()
            alike = len(moved) == len(slab.params) and len(set(counts)) == 1
            for i, span in slab.spans(None if alike else moved):
                p = slab.params[i]
                (self._move if live is None else self._fused_move)(
                    slab.mean[span],
                    {key: value[span] for key, value in slab.state.items() if key not in ("mean", "keep")},
                    grad[span],
                    None if self._adams(group) else sums.second[span if collected else slice(0)],
                    self._sums.weight,
                    sizes[slab.number],
                    counts[i] if live is None else live.step(p),
                    group,
                    slab.state["keep"][span] if "keep" in slab.state else None,
                    ok,
                )
            slab.write(moved)

    @property
    def generation(self) -> int:
        """A number that is new whenever state lies elsewhere than before: captured steps hold on to it."""
        self._ready()
        return self._generation

    def advance(self, by: int = 1) -> None:
        """Count steps: the next one draws other noise."""
        for group in self.param_groups:
            group["steps"] += by

    # The machinery.

    def _one_sample(self, sample: int) -> AbstractContextManager[None]:
        return self._sampling.sample(sample, self._params(), self.draw, self.absorb, self.collecting())

    def _run(self, closure: Callable[[], Tensor | float]) -> Tensor:
        """Run the closure under ``mc_samples`` weight samples; its mean loss."""
        params = self._params()
        losses: list[Tensor] = []
        for _ in range(self.param_groups[0]["mc_samples"]):
            with self._one_sample(self._sums.samples):
                with torch.enable_grad():
                    loss = closure()
                    if not isinstance(loss, Tensor | float | int):
                        raise TypeError(f"the closure must return the loss, not {type(loss).__name__}")
                    if (
                        isinstance(loss, Tensor)
                        and loss.requires_grad
                        and all(p.grad is None for p in params)
                    ):
                        loss.backward()  # type: ignore[no-untyped-call]
                losses.append(loss.detach() if isinstance(loss, Tensor) else torch.tensor(loss))
                self.guard.watch(losses[-1])
        self._sums.publish()
        return torch.stack(losses).mean(0)

    def _move(
        self,
        mean: Tensor,
        state: State,
        grad: Tensor,
        second: Tensor | None,
        weight: float,
        batch_size: int,
        step: int | Tensor,
        group: Group,
        keep: Tensor | None,
        ok: Tensor | None,
    ) -> None:
        """The rule, and its result written over mean and state: all in place, so that it fuses."""
        if second is None:
            new_mean, new_state = adam_update(mean, state, grad, step, group)
        else:
            second, none = second if weight == 1 else second / weight, second[:0]
            noise, squares = (second, none) if self.collects is None else (none, second)
            stats = Statistics(grad, noise, batch_size, step, squares)
            new_mean, new_state = self.update(mean, state, stats, group)
        if keep is not None:
            new_mean = new_mean * keep
        for old, new in [(mean, new_mean), *((state[key], value) for key, value in new_state.items())]:
            if ok is None:
                old.copy_(new)
            else:
                torch.where(ok, new, old, out=old)

    # Sizes are dynamic: one compilation serves all slabs.

    @cached_property
    def _fused_move(self) -> Callable[..., None]:
        return torch.compile(self._move, dynamic=True, options=_ONE_KERNEL)

    @cached_property
    def _fused_std(self) -> Callable[..., Tensor]:
        return torch.compile(self.std, dynamic=True, options=_ONE_KERNEL)

    def _ready(self) -> Sequence[Slab]:
        """The slabs, after giving a state to parameters that have none."""
        held = self._state_tensors()
        if (
            self._slabs
            and len(held) == len(self._held)
            and all(map(is_, held, self._held))
            and all(slab.locate() for slab in self._slabs)
        ):
            return self._slabs
        for group in self.param_groups:
            for p in group["params"]:
                state: State = self.state[p]
                if not state or needs_mean(p, state):
                    self._begin(p, state, group)
        with torch.inference_mode(False), torch.no_grad():
            self._slabs = list(slabs(self.param_groups, self.state, self.matrices))
        self._matrices = Blocks(self.param_groups, self.state, self.matrices)
        self._held = self._state_tensors()
        # What may fail in the middle of a step is not for a device alone to judge.
        self.guard.device = None if self.matrices else ahead_of(self._slabs)
        self.guard.ok = None
        self._generation = next(_generations)
        return self._slabs

    @torch.inference_mode(False)
    @torch.no_grad()
    def _begin(self, p: Tensor, state: State, group: Group) -> None:
        mean = p.detach().to(state_dtype(p), copy=True)
        if mean.dtype != p.dtype:
            state["mean"] = mean
        if "step" not in state:
            state["step"] = zero()
            state.update(adam_init(mean) if self._adams(group) else self.init(mean, None, group))

    def _state_tensors(self) -> list[Tensor]:
        return [value for state in self.state.values() for value in state.values()]

    def _mean(self, p: Tensor) -> Tensor:
        """The parameter itself, or its full-precision mean where it is kept in half precision."""
        mean = self.state[p].get("mean")
        return p.detach() if mean is None else mean

    def _adams(self, group: Group) -> bool:
        """Whether Adam trains a group, not the rule."""
        return bool(group["deterministic"]) and self.without_noise is None

    def _params(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def _blocks(self) -> Iterator[tuple[str, Tensor, Group]]:
        for group in self.param_groups:
            if not group["deterministic"]:
                for name, p in members(group):
                    yield name, p, group

    def _batch_size(self, group: Group, given: int | None) -> int:
        size = given if given is not None else group.get("batch_size")
        if not self.needs_batch_size or group["deterministic"]:
            return 0
        if size is None or size < 1:
            raise ValueError(
                f"{type(self).__name__} needs the number of examples behind each step, not {size}: "
                "pass step(..., batch_size=len(x)) or set batch_size once when building it"
            )
        return int(size)

    def _refuse_inside(self, call: str) -> None:
        if self._sampling.entered is not None:
            raise RuntimeError(f"{call} inside sampled_params() would see sampled weights: leave it first")

    def _take_back(self) -> str | None:
        """Uncount a step that was held back on the device; what was at fault, if it can still be told."""
        for slab, moved in self._moved:
            slab.count(moved, -1)
        self.advance(-1)
        return self._ledger.not_finite(self.param_groups)

    def _reset(self) -> None:
        self._sums.clear()
        self.guard.forget()
        self._sampling.finish()
        self._ledger.remember(self._params())
