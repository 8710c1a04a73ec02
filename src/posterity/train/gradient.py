"""Training steps of a posterior by gradient, with any torch optimiser.

The loss is that of :func:`~posterity.elbo`: mean NLL + factor · KL / num_data, with an expectation over drawn
weights that is estimated from ``mc_samples`` draws. Its gradients equal those of autograd, but all weights
lie in a few flat buffers (:mod:`posterity.train.blocks`).
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
        model: The trained model.
        optimizer: The optimiser of all parameters of the model that require gradients.
        prior: The prior; the model's own if None.
        num_data: Training examples.
        factor: Factor of the KL / num_data, or a function of ``model.draws`` that gives it.
        mc_samples: Weight samples per step.
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

    # Blocks and parameters.

    def check(self) -> None:
        """Refuse missing and foreign parameters, and rebuild all blocks if one has changed."""
        held = self._held()
        fits = len(held) == len(self._found) and all(map(is_, held, self._found))
        if not fits or not all(flat.locate() for flat in self.blocks.flats()):
            self.optimizer.refuse_unfit(dict(self.model.named_parameters()))
            self._build()
            self._found = held
        for each in self.blocks.diagonal:
            each.follow()

    def _held(self) -> list[object]:
        """The parts of the blocks: a new leaf, tensor, prior or parameter means that blocks are rebuilt."""
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
                    f"the prior holds {name!r} as one block, which compile_step does not support: train in a "
                    "plain loop with model.kl(), or use a prior of single tensors, such as that of "
                    "laplace.fit(structure='diagonal')"
                )
        with torch.no_grad():  # raises for a prior that does not fit
            kl(q, self._prior, seed=self.model.seed)
        self.blocks = blocks_of(self.model, priors)
        self._named: dict[str, Tensor] = dict(self.module.named_parameters())
        self._params: list[Tensor] = list(self.module.parameters())
        # Collecting these takes longer than a step.
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
        """The module's own parameters."""
        return self._params

    def samples(self) -> int:
        """The number of weight samples per step."""
        return self._samples

    # Several processes, each with its share of the batch, and the same drawn weights.

    def pack(self, losses: Tensor) -> list[Tensor]:
        """Number of examples, loss, reached parameters, then all gradients of the loss times the examples."""
        self._shares = Shares(self.blocks, self._values, float(self._behind.batch_size or 1))
        return self._shares.pack(losses, self._row)

    def unpack(self, sent: list[Tensor], losses: Tensor) -> Tensor:
        """Take in the sums over the examples of all processes."""
        self._behind = self._behind._replace(scale=None)  # the sums include it
        return self._shares.unpack(sent, losses, captured=isinstance(self._clock, Tensor))

    def postponed(self, step: Any) -> None:
        """Nothing: the next call raises the error."""

    def together(self, behind: Behind) -> Behind:
        """The same: torch's optimisers do not use it."""
        return behind

    def shared_buffers(self) -> SharedBuffers | None:
        """The module's buffers, if several processes share them."""
        return None if self.world is None else SharedBuffers(self.world, self.module)

    # A step.

    def _share_now(self) -> float:
        """The weight of the KL in the loss of the next step."""
        return factor_at(self._factor, self.model.draws) / self._num_data

    def begin(self, examples: int | None, count: float | Tensor | None) -> None:
        """Store this step's numbers."""
        self.world = World(None) if several() else None
        if self.world is not None and not self._met:
            self._meet(self.world)
        self._behind = self.behind(examples, as_count(count))
        self._share, self._clock = self._share_now(), self.model.draws

    @torch.enable_grad()
    def _meet(self, world: World) -> None:
        """Before the first step: refuse processes that differ, and give all of them one seed."""
        self.model._meet()
        settings = {"mc_samples": self._samples, "num_data": self._num_data}
        refuse_unlike(world, dict(self.model.named_parameters()), self.optimizer.optimizer, settings)
        self._met = True

    def expect(self, examples: int | None, behind: Behind) -> None:
        """Store this step's numbers in a captured step."""
        self._behind = behind

    @property
    def _at(self) -> dict[str, Any]:
        """The noise address of this step."""
        return {"seed": self.model.seed, "step": self._clock, "domain": Domain.TRAIN}

    @property
    def _values(self) -> StepValues:
        """This step's values, for all blocks."""
        return StepValues(self.sums, self._share, self._behind.scale, self._at, self.world is not None)

    def draw(self, rows: range, weight: float) -> Drawn:
        """Draw the weights of all blocks."""
        self._origins = []
        self._ahead = self.world.rank * self.parts * self._samples if self.world else 0
        drawn, step = Drawn({}, {}, [], {}, self._origins), self._values
        sources = [block.draw(rows, weight, step, drawn) for block in self.blocks.drawn()]
        self._origins += [p for p in self._learned if p.requires_grad and drawn.leaves.get(p) is not p]
        return drawn._replace(sources=sources)

    def collecting(self, drawn: Drawn, *, stacked: bool) -> AbstractContextManager[object]:
        """No context: only gradients are collected."""
        return nullcontext()

    def absorb(self, grads: Mapping[Tensor, Tensor | None], drawn: Drawn, rows: range, weight: float) -> None:
        """Add gradients to the sums, with the KL's at these weights."""
        self.sums.samples += len(rows)
        step = self._values
        for block, source in zip(self.blocks.drawn(), drawn.sources, strict=True):
            block.absorb(grads, source, rows, weight, step)
        for flat in self.blocks.plain:
            own = {i: grad for i, p in enumerate(flat.params) if (grad := grads.get(p)) is not None}
            if own:
                self.sums.of(flat, None).add(own, None, weight)

    def publish(self, losses: Tensor, max_norm: float | None) -> Tensor:
        """Keep ``max_norm``: gradients are complete only at the end."""
        self._max_norm = max_norm
        return losses

    def finish(self, losses: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Give all parameters their gradients, and return the mean NLL."""
        loss, _ = self._give_gradients(losses)
        poisons = [sums.poison for sums in self.sums]
        poisons.append(0.0 * self._divergence)
        if unsummed := [grad for block in self.blocks.drawn() for grad in block.unsummed()]:
            poisons.append(0.0 * torch.stack(foreach_norm(unsummed)).sum())
        return loss[None], poisons

    def objective(self, loss: Tensor) -> Tensor:
        """The negative ELBO, in the wider dtype: a mean in half precision would hide a change."""
        return loss + self._divergence

    @torch.no_grad()
    def _give_gradients(self, losses: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Set all gradients without checking them; the mean NLL, and the gradients in a few tensors."""
        step = self._values
        loss = losses.mean() if step.scale is None else losses.mean() * step.scale
        for p in self._own:
            p.grad = None  # of the last step, or from before it was frozen
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
        """Take the step if loss and gradients are finite."""
        nll, grads = self._give_gradients(losses)
        if self.world is not None:
            share_buffers(self.world, self.module)
        loss = self.objective(nll)
        # A sum is non-finite if an entry is; a norm takes ten times as long on a CPU.
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
        """The examples behind the loss, and the scale that makes it a mean over them."""
        if count is None:
            return Behind(examples or 0)
        if not examples:
            raise ValueError(
                f"count={count:g} needs the number of examples too: let the batch start with a tensor that "
                "has them on its first axis"
            )
        return Behind(examples, count / examples)

    def move(self, behind: Behind, ok: Tensor | None) -> None:
        """A step of the optimiser."""
        self.optimizer.step(ok)
        torch.clear_autocast_cache()  # it holds casts of the old weights
        self.model.draws += 1

    def overshot(self) -> str:
        """The error for a non-finite step: only the optimiser's lr makes steps smaller."""
        return "the step would give a mean or a std that is not finite: lower the optimiser's lr"

    def drop(self) -> None:
        """Drop sums and gradients."""
        self.optimizer.optimizer.zero_grad()
        self.reset()

    def reset(self) -> None:
        """Drop the sums."""
        self.sums.clear()
        self.terms.clear()
        for block in self.blocks.drawn():
            block.clear()

    # Captured steps.

    def devices(self) -> set[torch.device]:
        """The devices of all parameters."""
        return {p.device for p in self._own}

    def captures(self) -> bool:
        """Whether the optimiser reads its settings on the device; several processes take one step before."""
        return self.optimizer.captures() and (self._met or not several())

    def settle(self) -> None:
        """Nothing: no result is pending."""

    def fixed(self) -> tuple[object, ...]:
        """Addresses of parameters and of the optimiser's state, and its settings."""
        return (
            self.generation,
            tuple(mask._version for mask in self._masks),  # a graph holds a copy of joined leaves' masks
            tuple(tensor.data_ptr() for tensor in chain(self._own, self.optimizer.state())),
            tuple(p.requires_grad for p in self._own),
            self.optimizer.settings(),
        )

    def tensors(self) -> list[Tensor]:
        """Parameters and the optimiser's state."""
        return self.optimizer.tensors()

    def replays(self, device: torch.device) -> Replays:
        """The replays, with learning rates and the KL's weight."""
        return GradientReplays(self, device)

    def seen(self, loss: float) -> None:
        """Watch the NLL of a step: in the ELBO, the KL may rise by its schedule."""
        self.watch(loss)
