"""The shell that every learning rule runs in: what a user calls.

One training step is: draw weights around the means (:meth:`VariationalOptimizer.sampled_params`), run forward
and backward there, put the means back, add up the statistics; after the last sample, hand their averages to
the method's rule (:meth:`VariationalOptimizer.step`). What is drawn, added up and moved is the engine's; a
method adds only pure functions of one block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from posterity.names import NameFilter, select
from posterity.noise import new_seed
from posterity.optim.checkpoint import refuse_mismatch, saved_states
from posterity.optim.engine import Engine
from posterity.optim.entries import refuse_misspelt
from posterity.optim.gradients import refuse_missing, refuse_not_finite
from posterity.optim.groups import Group, Params, checked_group, members, named_groups, split_groups
from posterity.optim.handover import states_from
from posterity.optim.statistics import state_dtype
from posterity.posterior import Factorised, Leaf
from posterity.posterior.factorised import Key

# Numbers of samples that are drawn to look, not to learn: far from those of any step.
_PEEKS = 1 << 30


class VariationalOptimizer(Engine):
    """A torch optimiser whose state is a posterior over the parameters it was given.

    The model's parameters are the posterior's means whenever no sample is drawn, so evaluation, saving and
    everything else that reads a model works as ever.

    Args:
        params: A module, or what torch.optim takes: (named) parameters or groups of them.
        defaults: The method's hyper-parameters, for groups that do not set their own.
        mc_samples: Weight samples per ``step(closure)``.
        seed: Seed of the weight noise. By default one number is drawn from torch's generator here, as when a
            layer is built; training never draws from it.
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

    # Makes a GradScaler announce itself, so that step() can refuse it.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Params,
        defaults: Group,
        *,
        mc_samples: int,
        seed: int | None,
        deterministic: NameFilter = (),
        deterministic_lr: float = 1e-3,
    ) -> None:
        self._module = params if isinstance(params, nn.Module) else None
        self._deterministic_lr = deterministic_lr
        groups = named_groups(params)
        chosen = select([name for group in groups for name, _ in group["params"]], deterministic)
        shared: Group = {"mc_samples": mc_samples, "steps": 0, "deterministic": False}
        # One for all groups, and saved with them: a resumed run goes on with the noise that it had.
        shared["seed"] = new_seed() if seed is None else seed
        if self.matrices:
            shared["blocks"] = ()  # which tensors are one, once their layers have told
        super().__init__(split_groups(groups, chosen, self.without_noise), {**defaults, **shared})
        self.__setstate__({})

    # One training step.

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
        self.check_changed()
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
        self.check_changed()
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
                if self.guard.ok is not None:
                    self._sampling.restore_unless(self.guard.ok)
            self.apply(sizes)
        except BaseException:
            self._sampling.restore()
            self._reset()
            raise
        if check is not None:
            self.guard.expect(check)
        self.advance()
        self._reset()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients: inside a sampling context what it has added so far, outside everything."""
        if set_to_none:
            for p in self._params():
                p.grad = None  # torch's own way takes longer than this
        else:
            super().zero_grad(set_to_none=False)
        self._collecting.clear()
        if self._sampling.entered is None:
            self._reset()

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

    def _batch_size(self, group: Group, given: int | None) -> int:
        size = given if given is not None else group.get("batch_size")
        if not self.needs_batch_size or group["deterministic"]:
            return 0
        if size is None or size < 1:
            raise ValueError(
                f"{type(self).__name__} needs the number of examples behind each step, not {size}: "
                "pass step(..., batch_size=len(x)), or give the optimiser batch_size= once"
            )
        return int(size)

    # The posterior, shown and taken up.

    def posterior(self) -> Factorised:
        """The posterior as it stands, as a copy that training no longer changes."""
        self._refuse_inside("posterior()")
        self.check_changed()
        self.guard.settle()
        leaves: dict[Key, Leaf] = {}
        self._ready()
        within = self._matrices.by_name()
        for name, p, group in self._blocks():
            block, state = within.get(name), self.state[p]
            if block is None:
                leaves[name] = self.leaf([state.get("mean", p.detach())], state, state.get("keep"), group)
            elif name == block.names[0]:
                leaves[block.names] = self.leaf(block.means(), state, block.keep(), group)
        return Factorised(leaves)

    @torch.no_grad()
    def load_posterior(self, posterior: Factorised) -> None:
        """Go on from a posterior: its means, its stds, and its pruned weights, which stay zero."""
        self._refuse_inside("load_posterior()")
        self.check_changed()
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

    def _blocks(self) -> Iterator[tuple[str, Tensor, Group]]:
        for group in self.param_groups:
            if not group["deterministic"]:
                for name, p in members(group):
                    yield name, p, group

    # What torch.optim has besides.

    def add_param_group(self, param_group: Group) -> None:
        """Add a group; it is checked as a whole before anything is added."""
        if self._slabs and self._sums.samples:
            raise RuntimeError("samples are waiting: call step() or zero_grad() before add_param_group()")
        if self._slabs:
            self.guard.settle()
        defaults = self.defaults
        if param_group.get("deterministic"):
            adam = {"lr": self._deterministic_lr, "betas": (0.9, 0.999)}
            defaults = {**defaults, **(adam if self.without_noise is None else self.without_noise)}
        refuse_misspelt(param_group, defaults)
        group = checked_group({**defaults, **param_group}, self.param_groups)
        self._check([*self.param_groups, group])
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
            self._check(given["param_groups"])
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
        super().__setstate__(state)
        self._peeks: int = 0  # sampling contexts without gradients
