"""Checks of a step: gradients from outside, curvature that no layer reported, non-finite values."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor

from posterity.curvature import Collector
from posterity.distributed import World
from posterity.flat import largest
from posterity.noise import kernels
from posterity.optim.adam import ADAM
from posterity.optim.groups import check_all, plain
from posterity.optim.state import Group, members
from posterity.optim.statistics import Accumulator
from posterity.optim.watch import UNTOUCHED, LossWatch
from posterity.sharding import gradient, local
from posterity.torch_private import foreach_norm

if TYPE_CHECKING:
    from posterity.optim.apply import Moved
    from posterity.optim.optimizer import VariationalOptimizer

_GRADIENT = "a gradient"


@final
class Entries:
    """The settings in an optimiser's groups at the last check; users and schedulers may change them."""

    def __init__(self, opt: VariationalOptimizer) -> None:
        # Those that only users change, including Adam's.
        self._keys = sorted({*opt.defaults, *ADAM} - {"steps", "blocks"})
        self._checked = self._now(opt)

    def check(self, opt: VariationalOptimizer) -> None:
        """Refuse invalid entries, if one has changed."""
        entries = self._now(opt)
        try:
            changed = bool(entries != self._checked)
        except (RuntimeError, ValueError):  # an entry that holds several numbers: invalid, and refused below
            changed = True
        if changed:
            for group in opt.param_groups:
                group.update({key: plain(group[key]) for key in self._keys if key in group})
            entries = self._now(opt)
            check_all(opt, opt.param_groups)
            self._checked = entries

    def _now(self, opt: VariationalOptimizer) -> list[list[object]]:
        return [
            # A number may be in a tensor, and change in place.
            [*[getattr(group[key], "_version", None) for key in opt.scheduled], *map(group.get, self._keys)]
            for group in opt.param_groups
        ]


class GradientLedger:
    """Distinguishes gradients that a step has used from later ones."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[int, int]] = {}

    def remember(self, params: Iterable[Tensor]) -> None:
        """Remember the current gradients."""
        grads = ((p, p.grad) for p in params)
        self._known = {id(p): (id(grad), local(grad)._version) for p, grad in grads if grad is not None}

    def refuse_foreign(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Raise for a new gradient: it was taken at the means, and would be lost."""
        for name, p in named:
            # A gradient that was zeroed in place loses nothing.
            if p.grad is not None and not self._knows(p) and bool(p.grad.any()):
                raise RuntimeError(
                    f"{name!r} has a gradient from outside sampled_params(): take it inside the context, "
                    "or drop it with zero_grad()"
                )

    def refuse_changed(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Raise for a gradient that was changed after a context: the next context would not see the
        change."""
        for name, p in named:
            if (p.grad is not None or id(p) in self._known) and not self._knows(p):
                raise RuntimeError(
                    f"the gradient of {name!r} was changed between two contexts of one step: change it after "
                    "the last one, or call zero_grad() first"
                )

    def not_finite(self, named: Iterable[tuple[str, Tensor]]) -> str | None:
        """The first non-finite gradient among those that the last step has used, in words."""
        return bad_gradient((name, p) for name, p in named if self._knows(p))

    def _knows(self, p: Tensor) -> bool:
        return p.grad is not None and self._known.get(id(p)) == (id(p.grad), local(p.grad)._version)


def bad_gradient(named: Iterable[tuple[str, Tensor]]) -> str | None:
    """The first non-finite gradient of some parameters, in words."""
    for name, p in named:
        grad = gradient(p)
        if grad is not None and not torch.isfinite(grad).all():
            return f"the gradient of {name!r}"
    return None


def refuse_missing(groups: Sequence[Group], sums: Accumulator, optimizer: str) -> None:
    """Raise, before anything changes, if there is no sample, or only a gradient from outside."""
    if sums.samples == 0 or all(p.grad is None for group in groups for p in group["params"]):
        raise RuntimeError(
            f"{optimizer}.step() has no gradient at sampled weights: put "
            "`with optimizer.sampled_params():` around forward and backward, or pass a closure"
        )
    refuse_partial(groups, sums, optimizer)
    if sum(len(each.used) for each in sums) == sum(len(group["params"]) for group in groups):
        return
    used = {id(each.group.params[i]) for each in sums for i in each.used}
    for group in groups:
        for name, p in members(group):
            if id(p) not in used and p.grad is not None:
                raise RuntimeError(
                    f"{name!r} has a gradient from outside sampled_params() only: take it inside the context"
                )


def refuse_partial(groups: Sequence[Group], sums: Accumulator, optimizer: str) -> None:
    """Raise if the number of samples is not a multiple of the number that a step averages."""
    batches, wanted = sums.samples * sums.weight, groups[0]["mc_samples"]
    if abs(batches - round(batches)) * wanted > 0.5:
        raise RuntimeError(
            f"{optimizer} averages mc_samples={wanted} weight samples and has {sums.samples}: enter "
            f"sampled_params() {wanted} times for every micro-batch, pass a closure, or build the optimiser "
            "with mc_samples=1"
        )


def refuse_unreported(collector: Collector, grads: Mapping[str, Tensor], rule: str) -> None:
    """Raise for a gradient whose curvature no layer has reported.

    Args:
        collector: After the passes.
        grads: The gradients, by name.
        rule: The rule's name.
    """
    inside = {name for each in collector.blocks.values() for name in (each.weight, each.bias)}
    for name in collector.several() & grads.keys():
        if grads[name]._version == 0:  # else the passes' gradients were added in it
            raise RuntimeError(
                f"the gradient of {name!r} was dropped or changed after {rule} had collected its "
                "curvature: drop gradients with the optimiser's own zero_grad(), and call "
                "torch.autograd.grad() outside the context"
            )
    # A gradient may have been lost with its report.
    wrong = {
        name: collector.refused.get(name, "has a gradient that no layer reported")
        for name in dict.fromkeys((*grads, *collector.refused))
        if not (name in collector.sums or name in inside) or name in collector.refused
    }
    for name, reason in wrong.items():
        raise RuntimeError(
            f"{name!r} {reason}, so {rule} has no per-example gradients of it: {_advice(wrong, grads)}"
        )
    for each in collector.blocks.values():
        if each.rows is not None:
            raise RuntimeError(
                f"{each.weight!r} is used in parts (some of its rows at a time), for which {rule} has "
                f"no blocks: {_advice([each.weight], grads)}"
            )


def _advice(wrong: Collection[str], names: Iterable[str]) -> str:
    """Advice for all refused parameters, so that the next step does not refuse another one."""
    patterns = []
    for name in wrong:
        module = name.rpartition(".")[0]
        whole = {each for each in names if module and each.startswith(f"{module}.")}
        patterns.append(f"{module}.*" if len(whole) > 1 and whole <= {*wrong} else name)
    chosen = list(dict.fromkeys(patterns))
    which = repr(chosen[0] if len(chosen) == 1 else chosen)
    it = "it" if len(wrong) == 1 else f"all {len(wrong)} such parameters"
    return (
        f"leave {it} without noise and let Adam train {'it' if len(wrong) == 1 else 'them'} "
        f"(deterministic={which}, deterministic_lr=1e-3), or freeze {'it' if len(wrong) == 1 else 'them'}"
    )


def refuse_scaler(optimizer: object) -> None:
    """Raise if a GradScaler is in use; its mark is removed, or every later step would be refused."""
    if hasattr(optimizer, "grad_scale"):
        for name in ("grad_scale", "found_inf"):
            delattr(optimizer, name)
        raise RuntimeError(
            f"{type(optimizer).__name__} takes its statistics before a GradScaler unscales the gradients; "
            "use torch.autocast(dtype=torch.bfloat16), which needs no scaler"
        )


@final
class Verdict:
    """The finiteness check of a step: known to the device at once, to the host later.

    Args:
        sums: The step's sums.
        world: The processes with the other shards of sharded parameters, if any.

    Attributes:
        ok: A flag on the device, which is cleared later if a result is invalid.
    """

    def __init__(self, sums: Accumulator, world: World | None = None) -> None:
        pairs = [each.judged() for each in sums if each.both.numel() or each.group.sharded]
        second = "the mean of squared gradients" if sums.examples else "E[gradient · noise]"
        layers = [f"a Kronecker factor of {name!r}" for name in sums.layers]
        # The name of each number, and the order of naming if several are bad.
        self._names = [_GRADIENT, second] * len(pairs) + [name for name in layers for _ in "AS"]
        self._order = [_GRADIENT, *layers, second]
        if factors := [factor for each in sums.layers.values() for factor in (each.A, each.S)]:
            pairs.append(torch.stack(foreach_norm(factors, math.inf)))
        parts = [*pairs, *(loss.reshape(1) for loss in sums.losses)]
        if len({each.device for each in parts}) > 1:
            parts = [each.cpu() for each in parts]
        self._numbers = parts[0] if len(parts) == 1 else torch.cat(parts) if parts else torch.zeros(1)
        if world is not None:
            self._numbers = self._numbers.clone()  # for it may be part of the sums
            world.worst(self._numbers)
        self.ok, self._losses = finite(self._numbers), len(sums.losses)
        self._read: Callable[[], list[float]] = self._numbers.tolist

    def send(self) -> None:
        """Start copying everything, including the final flag, to the host, without waiting."""
        self._read = sent(torch.cat([self._numbers, self.ok.to(self._numbers.dtype).reshape(1)]))

    @property
    def passed(self) -> bool:
        """Whether the step was accepted; the host waits for it."""
        *numbers, ok = [*self._values, 1.0] if len(self._values) == len(self._numbers) else self._values
        return bool(ok) and all(map(math.isfinite, numbers))

    def report(self, watch: LossWatch, bad: str | None, unfit: str = "", when: str = "") -> None:
        """Raise for non-finite values, and warn about a diverging loss.

        Args:
            watch: Watches the losses.
            bad: The offending gradient, if it can be named.
            unfit: The message for an invalid result.
            when: Which step.
        """
        losses = self._values[len(self._names) :][: self._losses]
        named = list(zip(self._names, self._values, strict=False))
        gradients = (value for name, value in named if name == _GRADIENT)
        watch(sum(losses) / len(losses) if losses else None, max(gradients, default=0.0))
        if wrong := {name for name, value in named if not math.isfinite(value)}:
            what = next(name for name in self._order if name in wrong)
            what = bad or what if what == _GRADIENT else what
            raise FloatingPointError(f"{what}{when} is not finite; {UNTOUCHED}")
        if not self.passed:
            raise FloatingPointError(unfit)

    @cached_property
    def _values(self) -> list[float]:
        return self._read()


# What a rule returns.


def refuse_unfit(
    opt: VariationalOptimizer, everything: Iterable[Moved], blocks: Mapping[str, Sequence[Tensor]]
) -> None:
    """Raise for a result that is not finite, or a std that is not above 0.

    Args:
        opt: The optimiser.
        everything: The rule's results for single weights, in the cache.
        blocks: Its results for matrix blocks, by name.
    """
    complaint = _first_unfit(opt, everything, blocks)
    if opt.sharded is not None and opt.world.size > 1:  # others may have nothing to complain of
        complaint = opt.world.complaint(complaint, opt.cache.latest[0].device)
    if complaint:
        raise FloatingPointError(overshot(opt, complaint))


def overshot(opt: VariationalOptimizer, what: str = "a mean, a state or a std that is not finite") -> str:
    """The error message for an invalid result of a step: what is wrong, and which settings to lower."""
    group = opt.param_groups[0]
    wide, lr = opt.narrower, float(group["lr"])
    if group.get("std_init") is not None:
        wide = wide.replace("std_scale", f"std_init={group['std_init']:g}")
    return (
        f"{type(opt).__name__}'s step would give {what}; the posterior was not touched: lower "
        f"lr={lr:g}, or {wide}, or look for huge values in the batch"
    )


def _first_unfit(
    opt: VariationalOptimizer, everything: Iterable[Moved], blocks: Mapping[str, Sequence[Tensor]]
) -> str | None:
    """What is wrong with a result, in words."""
    for name, parts in blocks.items():
        if not bool(torch.stack([largest(each) for each in parts]).max() < math.inf):
            return f"a value of {name!r} that is not finite"
    for flat, numbers, spans, _ in everything:
        group = opt.param_groups[flat.number]
        values = {key: value for key, value in flat.state.items() if key != "keep"} | {"mean": flat.mean}
        for span in spans:
            ends = {key: _ends(value if span is None else value[span]) for key, value in values.items()}
            if unfit(opt, ends, group, flat.dtype) is None:
                continue
            for i in numbers:  # ends of two tensors may be of different weights, and no weight is unfit
                own = {key: value[flat.layout.span(i)] for key, value in values.items()}
                if what := unfit(opt, own, group, flat.dtype):
                    return f"{flat.layout.names[i]!r} {what}"
    return None


def _ends(values: Tensor) -> Tensor:
    """The smallest and the largest value; the std is monotone in each state value."""
    return torch.stack(torch.aminmax(values)) if values.numel() else values


def unfit(
    opt: VariationalOptimizer, values: Mapping[str, Tensor], group: Group, dtype: torch.dtype
) -> str | None:
    """What is wrong with the mean, for a parameter of a given dtype, and its state."""
    for key, value in values.items():
        most = torch.finfo(dtype if key == "mean" else value.dtype).max
        if not bool(largest(value) <= most):
            return f"a {_CALLED.get(key, key)} that is not finite"
    if not (opt.by_adam(group) or group["deterministic"]):
        std = opt.std(dict(values), group)
        if not bool(((std > 0) & (std < math.inf)).all()):
            return "a std that is not a positive number"
    return None


_CALLED = {"hess": "curvature"}


def hold_back(
    ok: Tensor,
    everything: Iterable[Moved],
    blocks: Mapping[str, Sequence[Tensor]],
    world: World | None = None,
) -> None:
    """Clear a flag on the device if a result is invalid, as marked in its mean; the host does not wait.

    Args:
        ok: The flag.
        everything: The rule's results for single weights, marked.
        blocks: Its results for matrix blocks, by name.
        world: The processes with the other shards of sharded parameters, if any.
    """
    for flat, _, spans, results in everything:
        most = torch.finfo(flat.dtype).max
        for span, (mean, _) in zip(spans, results, strict=True):
            if span is None and kernels is not None and mean.is_cuda and mean.dtype == torch.float32:
                kernels.judge(flat.layout, mean, most, ok)  # what lies between the blocks may be anything
            else:
                ok.logical_and_(largest(mean) <= most)
    if values := [each for some in blocks.values() for each in some]:
        ok.logical_and_(torch.stack(foreach_norm(values, math.inf)).max() < math.inf)
    if world is not None:
        bad = 1.0 - ok.to(torch.float32)
        world.worst(bad)
        ok.logical_and_(bad == 0)


def finite(numbers: Tensor) -> Tensor:
    """Whether all numbers are finite, as a flag on their device."""
    if kernels is not None and numbers.is_cuda:
        ok: Tensor = kernels.finite(numbers)
    else:
        ok = torch.linalg.vector_norm(numbers, math.inf) < math.inf
    return ok


def sent(numbers: Tensor) -> Callable[[], list[float]]:
    """Start copying numbers to the host; calling the result waits for them."""
    if not numbers.is_cuda:
        return numbers.tolist
    host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
    host.copy_(numbers, non_blocking=True)
    there = torch.cuda.Event()  # type: ignore[no-untyped-call]
    there.record(torch.cuda.current_stream(numbers.device))

    def read() -> list[float]:
        there.synchronize()
        values: list[float] = host.tolist()
        return values

    return read


def runs_ahead_of(devices: Collection[torch.device]) -> bool:
    """Whether the host need not wait for checks: all parameters are on one GPU."""
    return len(devices) == 1 and all(device.type == "cuda" for device in devices)
