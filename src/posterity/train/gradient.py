"""A posterior that is trained by gradient, with any torch optimiser, as a training step sees it.

The loss is that of :func:`~posterity.elbo`: mean NLL + factor · KL / num_data, its expectation over drawn
weights estimated from ``mc_samples`` of them. It has the gradients that autograd would give it, with all
weights in a few flat buffers (:mod:`posterity.train.blocks`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from itertools import chain, count
from operator import is_
from typing import Any, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from posterity.distributed import World, several
from posterity.estimators import parameters_of
from posterity.layers.stand_ins import StandIn
from posterity.noise import Domain
from posterity.objective import Factor, factor_at, loss_watch, refuse_num_data
from posterity.optim.checks import bad_gradient
from posterity.optim.counting import Behind, LossTerms, as_count
from posterity.optim.pooling import SharedBuffers, share_buffers
from posterity.optim.statistics import Accumulator
from posterity.optim.step import row
from posterity.optim.watch import UNTOUCHED
from posterity.posterior import ByName, Density, Posterior, kl
from posterity.posterior.matching import Prior, matched, sources_of
from posterity.torch_private import foreach_norm
from posterity.train.blocks import StepValues, give
from posterity.train.estimated import EstimatedDiagonal, EstimatedOther
from posterity.train.learner import Drawn, Learner, Replays
from posterity.train.partition import blocks_of
from posterity.train.replays import GradientReplays
from posterity.train.shares import Shares, refuse_unlike
from posterity.train.torch_optimizer import TorchOptimizer
from posterity.variational import Variational

_generations = count()


@final
class ByGradient(Learner):
    """A :class:`~posterity.Variational`, and the torch optimiser of its parameters.

    Args:
        model: The model that is trained.
        optimizer: Of all parameters of the model that want gradients.
        prior: The model's own if None.
        num_data: Training examples.
        factor: What the KL counts for, times ``num_data``, or a function of ``model.draws`` that gives it.
        mc_samples: Weight samples of a step.
    """

    listens = False
    batch_dim = 0

    def __init__(
        self,
        model: Variational,
        optimizer: Optimizer,
        *,
        prior: Posterior | Density | ByName | None,
        num_data: int | None,
        factor: Factor,
        mc_samples: int | None,
    ) -> None:
        self.optimizer = TorchOptimizer(optimizer)
        if num_data is None:
            raise ValueError("num_data is missing: pass the number of training examples, which scales the KL")
        refuse_num_data(num_data)
        samples = 1 if mc_samples is None else mc_samples
        if not isinstance(samples, int) or samples < 1:
            raise ValueError(f"mc_samples must be a whole number of at least 1, not {mc_samples}")
        self.model, self.module = model, model.module
        self.estimates = not model.one_draw
        self._origins: list[Tensor] = []
        self.sums, self.terms = Accumulator(), LossTerms("the ELBO")
        self._prior = model.prior if prior is None else prior
        self._num_data, self._factor, self._samples = num_data, factor, samples
        self._max_norm: float | None = None
        self._behind = Behind(0)
        self._share: float | Tensor = self._share_now()
        self._clock: int | Tensor = model.draws
        self._row: Callable[..., Tensor] = row
        self._found: list[object] = []
        self.world: World | None = None
        self._met, self._ahead = False, 0
        self._divergence = torch.zeros(())
        self.check()
        self.watch = loss_watch(model, self.optimizer.name)

    # What is drawn and moved.

    def check(self) -> None:
        """Refuse missing and foreign parameters, and find all blocks again if one has changed."""
        held = self._held()
        fits = len(held) == len(self._found) and all(map(is_, held, self._found))
        if not fits or not all(flat.locate() for flat in self.blocks.flats()):
            self.optimizer.refuse_unfit(dict(self.model.named_parameters()))
            self._build()
            self._found = held
        for each in self.blocks.diagonal:
            each.follow()

    def _held(self) -> list[object]:
        """What blocks are made of: if a leaf, tensor, prior or parameter is new, they are found again."""
        leaves = list(self.model.posterior._leaves)
        parts = chain.from_iterable((*leaf._parameters.values(), *leaf._buffers.values()) for leaf in leaves)
        return [*leaves, *parts, *sources_of(self._prior), *self.optimizer.parameters()]

    def _build(self) -> None:
        q = self.model.posterior
        priors: dict[str, Prior] = {}
        for name, leaf, prior in matched(q, self._prior):
            priors[name] = prior
            if leaf is not q.blocks.get(name):
                raise ValueError(
                    f"the prior holds {name!r} as one block, which compile_step does not take: train in a "
                    "plain loop with model.kl(), or take a prior of single tensors, such as that of "
                    "laplace.fit(structure='diagonal')"
                )
        with torch.no_grad():  # refuses a prior that does not fit
            kl(q, self._prior, seed=self.model.seed)
        self.blocks = blocks_of(self.model, priors)
        self._named: dict[str, Tensor] = dict(self.module.named_parameters())
        self._params: list[Tensor] = list(self.module.parameters())
        # Looking for them takes longer than a step.
        self._own: list[Tensor] = list(self.model.parameters())
        self._learned: list[Tensor] = list(q.parameters())
        masks = (mask for leaf in q.blocks.values() for mask in (leaf.keep, leaf.held) if mask is not None)
        self._masks = [mask for mask in masks if not mask.is_inference()]  # others have no versions
        self.generation = next(_generations)

    def stand_ins(self, samples: range, level: int | None) -> dict[Tensor, Tensor]:
        """Stand-ins for weights whose layers have estimators."""
        found: dict[Tensor, Tensor] = {}
        for block in self.blocks.drawn():
            if isinstance(block, EstimatedDiagonal | EstimatedOther):
                made = parameters_of(
                    block.given,
                    self.model.posterior.tensors,
                    dict.fromkeys(block.names(), block.estimator),
                    samples,
                    level=level,
                    batch_dim=self.model.batch_dim,
                    ahead=self._ahead,
                    **self._at,
                )
                found |= {self._named[name]: value for name, value in made.items()}
        origins = (each.origin for each in found.values() if isinstance(each, StandIn))
        self._origins += [each for each in origins if each.requires_grad]
        return found

    def parameters(self) -> list[Tensor]:
        """The module's own."""
        return self._params

    def samples(self) -> int:
        """As the user has it."""
        return self._samples

    # Several processes, each with its share of the batch and the same drawn weights.

    def pack(self, losses: Tensor) -> list[Tensor]:
        """Examples, loss and reached parameters, then all gradients of the loss, times the examples."""
        self._shares = Shares(self.blocks, self._values, float(self._behind.batch_size or 1))
        return self._shares.pack(losses, self._row)

    def unpack(self, sent: list[Tensor], losses: Tensor) -> Tensor:
        """The sums over the examples of all."""
        self._behind = self._behind._replace(scale=None)  # which is in the sums
        return self._shares.unpack(sent, losses, captured=isinstance(self._clock, Tensor))

    def postponed(self, step: Any) -> None:
        """The next call raises it."""

    def together(self, behind: Behind) -> Behind:
        """The optimiser does not ask."""
        return behind

    def shared_buffers(self) -> SharedBuffers | None:
        """Of the module."""
        return None if self.world is None else SharedBuffers(self.world, self.module)

    # A step.

    def _share_now(self) -> float:
        """Factor of the KL in the loss of the next step."""
        return factor_at(self._factor, self.model.draws) / self._num_data

    def begin(self, examples: int | None, count: float | Tensor | None) -> None:
        """Take note of this step's numbers."""
        self.world = World(None) if several() else None
        if self.world is not None and not self._met:
            self._meet(self.world)
        self._behind = self.behind(examples, as_count(count))
        self._share, self._clock = self._share_now(), self.model.draws

    @torch.enable_grad()
    def _meet(self, world: World) -> None:
        """Before the first step: refuse processes that differ, and let all draw by one seed."""
        self.model._meet()
        settings = {"mc_samples": self._samples, "num_data": self._num_data}
        refuse_unlike(world, dict(self.model.named_parameters()), self.optimizer.optimizer, settings)
        self._met = True

    def expect(self, examples: int | None, behind: Behind) -> None:
        """The same, in a captured step."""
        self._behind = behind

    @property
    def _at(self) -> dict[str, Any]:
        """Where the noise of this step is."""
        return {"seed": self.model.seed, "step": self._clock, "domain": Domain.TRAIN}

    @property
    def _values(self) -> StepValues:
        """Of this step, for all blocks."""
        return StepValues(self.sums, self._share, self._behind.scale, self._at, self.world is not None)

    def draw(self, rows: range, weight: float) -> Drawn:
        """Weights of all blocks."""
        self._origins = []
        self._ahead = self.world.rank * self.parts * self._samples if self.world else 0
        drawn, step = Drawn({}, {}, [], {}, self._origins), self._values
        sources = [block.draw(rows, weight, step, drawn) for block in self.blocks.drawn()]
        self._origins += [p for p in self._learned if p.requires_grad and drawn.leaves.get(p) is not p]
        return drawn._replace(sources=sources)

    def collecting(self, drawn: Drawn, *, stacked: bool) -> AbstractContextManager[object]:
        """Nothing but gradients."""
        return nullcontext()

    def absorb(self, grads: Mapping[Tensor, Tensor | None], drawn: Drawn, rows: range, weight: float) -> None:
        """Add them to the sums, and what the KL says of these weights."""
        self.sums.samples += len(rows)
        step = self._values
        for block, source in zip(self.blocks.drawn(), drawn.sources, strict=True):
            block.absorb(grads, source, rows, weight, step)
        for flat in self.blocks.plain:
            own = {i: grad for i, p in enumerate(flat.params) if (grad := grads.get(p)) is not None}
            if own:
                self.sums.of(flat, None).add(own, None, weight)

    def publish(self, losses: Tensor, max_norm: float | None) -> Tensor:
        """Gradients are complete in the end only."""
        self._max_norm = max_norm
        return losses

    def finish(self, losses: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Give all parameters their gradients; the mean NLL."""
        loss, _ = self._give_gradients(losses)
        poisons = [sums.poison for sums in self.sums]
        poisons.append(0.0 * self._divergence)
        if unsummed := [grad for block in self.blocks.drawn() for grad in block.unsummed()]:
            poisons.append(0.0 * torch.stack(foreach_norm(unsummed)).sum())
        return loss[None], poisons

    def objective(self, loss: Tensor) -> Tensor:
        """The negative ELBO, of the wider of both types: a mean in half precision would hide a change."""
        return loss + self._divergence

    @torch.no_grad()
    def _give_gradients(self, losses: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The same, without checking whether all is finite; and gradients, in few tensors."""
        step = self._values
        loss = losses.mean() if step.scale is None else losses.mean() * step.scale
        for p in self._own:
            p.grad = None  # of the last step, or of before it was frozen
        found = list(chain.from_iterable(block.finish(step) for block in self.blocks.drawn()))
        for flat in self.blocks.plain:
            mine = self.sums.of(flat, None)
            if step.scale is not None:
                mine.grad.mul_(step.scale)
            views = flat.layout.views(mine.grad.to(flat.dtype))
            for i in mine.used:
                give(flat.params[i], views[i])
                found.append(views[i])
        if self._max_norm is not None:
            self.optimizer.clip(self._max_norm)
        parts = [torch.as_tensor(step.share * block.divergence) for block in self.blocks.drawn()]
        each = [part.to(loss.device) for part in parts]
        self._divergence = each[0] if len(each) == 1 else torch.stack(each).sum()
        return loss, found

    def learn(self, losses: Tensor, examples: int | None, count: float | Tensor | None) -> Tensor:
        """Move, if loss and gradients are finite."""
        nll, grads = self._give_gradients(losses)
        if self.world is not None:
            share_buffers(self.world, self.module)
        loss = self.objective(nll)
        # Sums, which are not finite either; a norm takes a CPU ten times as long.
        judged = [loss, *(grad.sum(dtype=loss.dtype).to(loss.device) for grad in grads)]
        value, worst = torch.stack([nll.to(loss.dtype), torch.stack(judged).abs().sum()]).tolist()
        self.watch(value)
        if not math.isfinite(worst):
            if not math.isfinite(divergence := float(self._divergence)):
                raise FloatingPointError(f"the KL is {divergence:g}; {UNTOUCHED}")
            what = bad_gradient(self.model.named_parameters()) or "a gradient"
            raise FloatingPointError(f"{what} is not finite; {UNTOUCHED}")
        self.terms.judge(float(self._behind.batch_size), examples, counted=count is not None)
        self.watch.guess = self.terms.guess
        self.move(self._behind, None)
        self.reset()
        return loss

    def behind(self, examples: int | None, count: float | None) -> Behind:
        """The loss becomes a mean over examples."""
        if count is None:
            return Behind(examples or 0)
        if not examples:
            raise ValueError(
                f"count={count:g} needs the number of examples beside it: let the batch begin with a tensor "
                "that has them on its first axis"
            )
        return Behind(examples, count / examples)

    def move(self, behind: Behind, ok: Tensor | None) -> None:
        """A step of the optimiser."""
        self.optimizer.step(ok)
        torch.clear_autocast_cache()  # of weights that were
        self.model.draws += 1

    def overshot(self) -> str:
        """No setting but the optimiser's lr makes its steps smaller."""
        return "the step would give a mean or a std that is not finite: lower the optimiser's lr"

    def drop(self) -> None:
        """Forget sums and gradients."""
        self.optimizer.optimizer.zero_grad()
        self.reset()

    def reset(self) -> None:
        """Forget the sums."""
        self.sums.clear()
        self.terms.clear()
        for block in self.blocks.drawn():
            block.clear()

    # Captured steps.

    def devices(self) -> set[torch.device]:
        """Of all parameters."""
        return {p.device for p in self._own}

    def captures(self) -> bool:
        """Whether the optimiser reads its numbers on the device; of several processes once they have met."""
        return self.optimizer.captures() and (self._met or not several())

    def settle(self) -> None:
        """Nothing waits."""

    def fixed(self) -> tuple[object, ...]:
        """Where parameters and the optimiser's state lie, and its settings."""
        return (
            self.generation,
            tuple(mask._version for mask in self._masks),  # of leaves end to end a graph has a copy
            tuple(tensor.data_ptr() for tensor in chain(self._own, self.optimizer.state())),
            tuple(p.requires_grad for p in self._own),
            self.optimizer.settings(),
        )

    def tensors(self) -> list[Tensor]:
        """Parameters, and the optimiser's state."""
        return self.optimizer.tensors()

    def replays(self, device: torch.device) -> Replays:
        """Learning rates and the KL's share."""
        return GradientReplays(self, device)

    def seen(self, loss: float) -> None:
        """Look at the NLL of a step, which tells more than the ELBO, whose KL may rise by schedule."""
        self.watch(loss)
