"""The training step's interface for a rule, such as BGD or VOGN."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from posterity.distributed import World, several
from posterity.optim import VariationalOptimizer
from posterity.optim.apply import apply
from posterity.optim.checks import overshot
from posterity.optim.counting import Behind, as_count, behind
from posterity.optim.pooling import SharedBuffers, pack, unpack
from posterity.optim.statistics import Accumulator, Sink
from posterity.optim.step import absorb, collecting, draw, multiplies
from posterity.train.learner import Drawn, Learner, Replays, settings
from posterity.train.replays import RuleReplays

# Entries of a group that a graph does not read.
_UNREAD = ("params", "param_names", "initial_lr", "steps")


@contextmanager
def _pooling(opt: VariationalOptimizer) -> Iterator[None]:
    """A context in which an optimiser, not a wrapper, adds up the sums of processes."""
    before = opt.pools, opt.local
    opt.pools, opt.local = True, Accumulator()
    try:
        yield
    finally:
        opt.pools, opt.local = before


@final
class ByRule(Learner):
    """A rule's optimiser and the module that holds its parameters.

    Args:
        module: The module.
        opt: The optimiser.
    """

    def __init__(self, module: nn.Module, opt: VariationalOptimizer) -> None:
        # A wrapper's averaging is bypassed.
        self.module = module.module if isinstance(module, DistributedDataParallel) else module
        self.opt, self.batch_dim = opt, opt.batch_dim
        self.listens = opt.collects is not None
        self._given: tuple[int | None, float | Tensor | None] = None, None
        self._terms: float | Tensor = 0.0
        held = set(self.module.parameters())
        for group in opt.param_groups:
            for name, p in zip(group["param_names"], group["params"], strict=True):
                if p not in held:
                    raise ValueError(f"the optimiser has {name!r}, which is not a parameter of this model")

    # Not stored, since loading the optimiser replaces its sums.
    @property
    def sums(self) -> Any:  # type: ignore[override]
        """The optimiser's sums in this process."""
        return self.opt.local

    @property
    def terms(self) -> Any:  # type: ignore[override]
        """The optimiser's."""
        return self.opt.terms

    def parameters(self) -> list[Tensor]:
        """The optimiser's parameters."""
        return self.opt.parameters()

    def samples(self) -> int:
        """``mc_samples`` of all groups, if one of them draws."""
        groups = self.opt.param_groups
        draws = self.opt.draws and not all(group["deterministic"] for group in groups)
        return self.opt.own_samples() if draws else 0

    def check(self) -> None:
        """Refuse entries of groups that no rule can use."""
        self.opt.check_changed()

    def begin(self, examples: int | None, count: float | Tensor | None) -> None:
        """Refuse samples of contexts, and gradients from outside."""
        if self.opt.taken():
            raise RuntimeError(
                "the current step already has samples of sampled_params(): call step() or zero_grad() first"
            )
        self.opt.refuse_foreign()
        self._given = examples, as_count(count)

    def pooling(self) -> AbstractContextManager[object]:
        """With several processes the optimiser adds up the sums itself."""
        return nullcontext() if self.opt.world.size == 1 else _pooling(self.opt)

    @property
    def world(self) -> World | None:  # type: ignore[override]
        """The optimiser's processes, if it has a mesh or there are several."""
        opt = self.opt
        return opt.world if opt.mesh is not None or opt.world.size > 1 else None

    def pack(self, losses: Tensor) -> list[Tensor]:
        """Counts, losses and the optimiser's sums."""
        local, (examples, count) = self.opt.local, self._given
        local.add_inputs(None if examples is None else examples * local.samples)
        sent = pack(self.opt, [losses], count)
        # A user's count as the end of an eager step sends it.
        return [*sent, sent[0][:1].clone()] if isinstance(count, Tensor) else sent

    def unpack(self, sent: list[Tensor], losses: Tensor) -> Tensor:
        """Set the optimiser's sums to the totals."""
        (loss,), self._terms = unpack(self.opt, sent, [losses])
        return loss[None]

    def postponed(self, step: Any) -> None:
        """Reading or saving the posterior raises the error, too."""
        self.opt.graphs.add(step)

    def together(self, behind: Behind) -> Behind:
        """Examples and terms of all processes."""
        sums = self.opt.sums
        size = behind.batch_size if sums.inputs is None else sums.inputs * sums.weight
        scale = None if behind.scale is None else self._terms / self.opt.world.split / size
        return Behind(size, scale)

    def shared_buffers(self) -> SharedBuffers | None:
        """Buffers of the optimiser's module, if it has one."""
        return None if self.opt.module is None else SharedBuffers(self.opt.world, self.opt.module)

    def expect(self, examples: int | None, behind: Behind) -> None:
        """Store the step's examples and terms, which weight the sums that are sent."""
        scale = behind.scale
        self._given = examples, None if scale is None else scale * behind.batch_size

    def draw(self, rows: range, weight: float) -> Drawn:
        """Weights by the rule's stds."""
        opt, one = self.opt, len(rows) == 1
        if self.world is not None:
            examples, count = self._given
            terms = examples if count is None else count
            opt.local.scale = 1.0 if isinstance(terms, Tensor) else float(terms or 1.0)
        sources = draw(opt, opt.world.numbered(rows, self.parts * opt.own_samples()), weight)
        weights: dict[Tensor, Tensor] = {}
        sinks: dict[Tensor, Sink] = {}
        wanted = multiplies(opt)
        for each in sources:
            views = each.group.layout.views(each.flat) if one else each.weights()
            for block, (p, own) in enumerate(zip(each.group.params, views, strict=True)):
                weights[p] = own.requires_grad_(p.requires_grad)
                if p.requires_grad and wanted:
                    sinks[own] = Sink(opt.local, each.group, each.noise, block)
        return Drawn(weights, sinks, sources, {}, [])

    def collecting(self, drawn: Drawn, *, stacked: bool) -> AbstractContextManager[object]:
        """Layers report the curvature that the rule needs."""
        return collecting(self.opt, drawn.weights, stacked=stacked)

    def absorb(self, grads: Mapping[Tensor, Tensor | None], drawn: Drawn, rows: range, weight: float) -> None:
        """Add to the optimiser's statistics."""
        found = [grads.get(p) for p in self.opt.parameters()]
        absorb(self.opt, found, drawn.sources, len(rows), weight)

    def publish(self, losses: Tensor, max_norm: float | None) -> Tensor:
        """E[g] goes to ``p.grad``."""
        self.opt.sums.publish(last=True)
        if max_norm is not None:
            clip_grad_norm_(self.opt.parameters(), max_norm)
        return losses

    def learn(self, losses: Tensor, examples: int | None, count: float | Tensor | None) -> Tensor:
        """The optimiser's own step."""
        sums, loss = self.opt.sums, losses.mean()
        sums.losses.append(loss)
        if not self.opt.pools:
            sums.add_inputs(None if examples is None else examples * sums.samples)
        self.opt.step(count=count)
        return loss

    def behind(self, examples: int | None, count: float | None) -> Behind:
        """The optimiser's count."""
        return behind(self.opt, None, examples, count)

    def overshot(self) -> str:
        """The optimiser's own message."""
        return overshot(self.opt)

    def drop(self) -> None:
        """Forget samples and gradients."""
        self.opt.zero_grad()

    @property
    def ok(self) -> Tensor | None:
        """The optimiser's flag."""
        return self.opt.ok

    def devices(self) -> set[torch.device]:
        """Of all parameters."""
        return {p.device for p in self.opt.parameters()}

    def captures(self) -> bool:
        """As the rule says; with several processes not before their first exchange."""
        return (self.opt.met or not several()) and self.opt.captures()

    def settle(self) -> None:
        """Raise pending errors, and refuse gradients from outside."""
        self.opt.settle_step()
        self.opt.refuse_foreign()

    def fixed(self) -> tuple[object, ...]:
        """The cache of state, and entries of groups."""
        unread = (*_UNREAD, *self.opt.scheduled)
        return self.opt.cache.generation, settings(self.opt.param_groups, unread)

    @property
    def generation(self) -> int:  # type: ignore[override]
        """Of the cache of state."""
        return self.opt.cache.generation

    def tensors(self) -> list[Tensor]:
        """Means and state."""
        self.opt.cache.groups()  # else a capture would begin with what the cache reads anew
        return [*self.opt.parameters(), *self.opt.cache.tensors()]

    def replays(self, device: torch.device) -> Replays:
        """Counts of updates, gradients, and what is scheduled."""
        return RuleReplays(self.opt, device)

    def finish(self, losses: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Sums become means."""
        self.opt.sums.finish()
        return losses, [sums.poison for sums in self.opt.sums]

    def move(self, behind: Behind, ok: Tensor | None) -> None:
        """Pass the means to the rule."""
        apply(self.opt, behind, ok)

    def reset(self) -> None:
        """Drop the sums."""
        self.opt.reset()

    def seen(self, loss: float) -> None:
        """Pass the loss to the optimiser's watch."""
        self.opt.watch(loss)
