"""A rule, such as BGD or VOGN, as a training step sees it."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from posterity.optim import VariationalOptimizer
from posterity.optim.counting import Behind, behind
from posterity.optim.statistics import Sink
from posterity.optim.step import absorb, apply, collecting, draw
from posterity.train.cuda_graph import DeviceNumbers
from posterity.train.learner import Drawn, Learner, Replays

# Entries of a group that a graph does not read.
_UNREAD = ("params", "param_names", "initial_lr", "steps")


@final
class ByRule(Learner):
    """A rule's optimiser and the module that holds its parameters.

    Args:
        module: The module.
        opt: The optimiser.
    """

    def __init__(self, module: nn.Module, opt: VariationalOptimizer) -> None:
        self.module, self.opt, self.batch_dim = module, opt, opt.batch_dim
        self.listens = opt.collects is not None
        held = set(module.parameters())
        for group in opt.param_groups:
            for name, p in zip(group["param_names"], group["params"], strict=True):
                if p not in held:
                    raise ValueError(f"the optimiser holds {name!r}, which is no parameter of this model")

    # Those of the optimiser are made anew when it is loaded.
    @property
    def sums(self) -> Any:  # type: ignore[override]
        """The optimiser's."""
        return self.opt.sums

    @property
    def terms(self) -> Any:  # type: ignore[override]
        """The optimiser's."""
        return self.opt.terms

    def parameters(self) -> list[Tensor]:
        """Those that the optimiser holds."""
        return self.opt.parameters()

    def samples(self) -> int:
        """What all groups have as ``mc_samples``, if one of them draws."""
        groups = self.opt.param_groups
        draws = self.opt.draws and not all(group["deterministic"] for group in groups)
        return int(groups[0]["mc_samples"]) if draws else 0

    def check(self) -> None:
        """Refuse entries of groups that no rule can use."""
        self.opt.check_changed()

    def begin(self, examples: int | None, count: float | Tensor | None) -> None:
        """Refuse samples of contexts, and gradients from elsewhere."""
        if self.opt.sums.samples:
            raise RuntimeError("samples of sampled_params() are waiting: call step() or zero_grad() first")
        self.opt.refuse_foreign()

    def expect(self, behind: Behind) -> None:
        """A rule is told when it moves."""

    def draw(self, rows: range, weight: float) -> Drawn:
        """Weights by the rule's stds."""
        opt, one = self.opt, len(rows) == 1
        sources = draw(opt, rows, weight)
        weights: dict[Tensor, Tensor] = {}
        sinks: dict[Tensor, Sink] = {}
        for each in sources:
            views = each.group.layout.views(each.flat) if one else each.weights()
            for block, (p, own) in enumerate(zip(each.group.params, views, strict=True)):
                weights[p] = own.requires_grad_(p.requires_grad)
                if p.requires_grad and opt.collects is None:
                    sinks[own] = Sink(opt.sums, each.group, each.noise, block)
        return Drawn(weights, sinks, sources)

    def collecting(self, drawn: Drawn, *, stacked: bool) -> AbstractContextManager[object]:
        """Layers report the curvature that the rule wants."""
        return collecting(self.opt, drawn.weights, stacked=stacked)

    def absorb(self, grads: Mapping[Tensor, Tensor | None], drawn: Drawn, rows: range, weight: float) -> None:
        """Add to the optimiser's statistics."""
        found = [grads.get(p) for p in self.opt.parameters()]
        absorb(self.opt, found, drawn.sources, len(rows), weight)

    def publish(self, max_norm: float | None) -> None:
        """E[g] goes to ``p.grad``."""
        self.opt.sums.publish(last=True)
        if max_norm is not None:
            clip_grad_norm_(self.opt.parameters(), max_norm)

    def learn(self, losses: Tensor, examples: int | None, count: float | Tensor | None) -> Tensor:
        """The optimiser's own step."""
        sums, loss = self.opt.sums, losses.mean()
        sums.losses.append(loss)
        sums.add_inputs(None if examples is None else examples * sums.samples)
        self.opt.step(count=count)
        return loss

    def behind(self, examples: int | None, count: float | None) -> Behind:
        """As the optimiser has it."""
        return behind(self.opt, None, examples, count)

    def overshot(self) -> str:
        """The optimiser's own sentence."""
        return self.opt.overshot()

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
        """As the rule says."""
        return self.opt.captures()

    def settle(self) -> None:
        """Verdicts that wait, and gradients from elsewhere."""
        self.opt.settle_step()
        self.opt.refuse_foreign()

    def fixed(self) -> tuple[object, ...]:
        """The cache of state, and entries of groups."""
        unread = (*_UNREAD, *self.opt.scheduled)
        return (
            self.opt.cache.generation,
            tuple(
                value if isinstance(value, Hashable) else str(value)
                for group in self.opt.param_groups
                for key, value in group.items()
                if key not in unread
            ),
        )

    @property
    def generation(self) -> int:
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
        """Hand the means to the rule."""
        apply(self.opt, behind, ok)

    def reset(self) -> None:
        """Drop the sums."""
        self.opt.reset()

    def seen(self, loss: float) -> None:
        """The optimiser's watch looks at every loss."""
        self.opt.watch(loss)


@final
class RuleReplays(Replays):
    """What surrounds the replays of a rule's step.

    Args:
        opt: The rule's optimiser.
        device: Of its parameters.
    """

    def __init__(self, opt: VariationalOptimizer, device: torch.device) -> None:
        self.opt, self.numbers = opt, DeviceNumbers(opt, device)

    @property
    def clock(self) -> Tensor:  # type: ignore[override]
        """The optimiser's count of steps."""
        return self.numbers.clock

    @contextmanager
    def inside(self) -> Iterator[None]:
        """The optimiser has numbers of the device."""
        eager, self.opt.numbers = self.opt.numbers, self.numbers
        try:
            yield
        finally:
            self.opt.numbers = eager

    def captured(self, graph: Any) -> None:
        """What every replay writes anew, and which parameters it moves."""
        opt, params = self.opt, self.opt.parameters()
        self.grads = [(p, p.grad, p.grad._version) for p in params if p.grad is not None]
        self.unused = [p for p in params if p.grad is None]
        self.moved = [
            (flat, [i for i, p in enumerate(flat.params) if p.grad is not None])
            for flat in opt.cache.groups()
        ]
        opt.graphs.add(graph)

    def restored(self) -> None:
        """How far updates are ahead of steps."""
        self.counts = self._counts()

    def stale(self) -> bool:
        """Whether a parameter that it moves was left out of steps since: its count of updates is fixed."""
        return self._counts() != self.counts

    def _counts(self) -> list[int]:
        """How far each moved parameter's updates are ahead of the optimiser's steps."""
        steps = self.opt.param_groups[0]["steps"]
        return [int(flat.steps[i]) - steps for flat, moved in self.moved for i in moved]

    def refuse(self) -> None:
        """Gradients that a replay would lose."""
        self.opt.refuse_inside("a training step")
        changed = not all(p.grad is grad and grad._version == version for p, grad, version in self.grads)
        self._fresh = changed or any(p.grad is not None for p in self.unused)
        if self._fresh:  # something happened to the gradients since the last replay
            self.opt.refuse_foreign()
        self.opt.settle_step()

    def refresh(self) -> None:
        """Learning rates and their like."""
        self.numbers.refresh(self.opt)

    def replayed(self) -> None:
        """Count updates, and show the gradients."""
        for flat, moved in self.moved:
            flat.count(moved)
        self.opt.advance()
        if self._fresh:
            self.grads = [(p, grad, grad._version) for p, grad, _ in self.grads]
            for p, grad, _ in self.grads:
                p.grad = grad
            self.opt.reset()
