"""One training step over all weight samples, in one pass."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.func import functional_call

from posterity import buffers
from posterity.arguments import described
from posterity.inputs import moved
from posterity.layers import Intercept
from posterity.layers.stacks import inside, level_of
from posterity.mc import chunks, stacked_pass
from posterity.optim.counting import both_axes, examples_of
from posterity.train.learner import Learner

LossFn: TypeAlias = Callable[..., Tensor]
# A key beside parameter names: the numbers of the samples, stacked like weights.
_SAMPLE = "number of the sample"


@final
class TrainStep:
    """One training step over all weight samples, as a function of a batch."""

    def __init__(
        self, learner: Learner, loss_fn: LossFn, max_norm: float | None, chunk: int | None, parts: int
    ) -> None:
        if max_norm is not None and not max_norm > 0:
            raise ValueError(f"max_norm must be greater than 0, not {max_norm}")
        if not isinstance(parts, int) or parts < 1:
            raise ValueError(f"parts must be a whole number of at least 1, not {parts}")
        if parts > 1 and learner.batch_dim:
            raise ValueError(f"parts={parts} splits axis 0, but examples are on axis {learner.batch_dim}")
        self.target, self.learner = _Loss(learner.module, loss_fn), learner
        self.max_norm, self.chunk, self.parts = max_norm, chunk, parts
        learner.parts = parts
        self._keeper = buffers.Keeper(self.target)
        self._ones: dict[tuple[object, ...], Tensor] = {}
        self.names: dict[Tensor, str] = {p: name for name, p in self.target.named_parameters()}
        self._held: list[tuple[Mapping[str, Any], str, Any]] = [
            (held, name, each)
            for module in self.target.modules()
            for held in (module._modules, module._parameters)
            for name, each in held.items()
        ]

    def refuse_changed(self) -> None:
        """Raise if modules or parameters were replaced: drawn weights are put in by name."""
        if any(held.get(name) is not each for held, name, each in self._held):
            raise RuntimeError(
                "the model has other modules or parameters than before: call compile_step again"
            )

    def __call__(self, *batch: Any, count: float | Tensor | None = None) -> Tensor:
        """Learn from a batch whose loss is a mean of ``count`` terms; returns the loss, averaged over
        samples."""
        learner = self.learner
        self.refuse_changed()
        learner.check()
        batch = self.as_tensors(batch)
        size = self.examples(batch)  # loss functions may take things out of dicts
        learner.begin(size, count)
        if size == 0 and learner.world is None:  # others would wait for this process, which goes on with nan
            raise ValueError(f"the batch has 0 examples on axis {learner.batch_dim}: skip empty batches")
        self._keeper.keep()
        try:
            with learner.pooling():
                losses = self.gather(self._keeper.copies, batch)
                if learner.world is not None:
                    sent = learner.pack(losses)
                    learner.world.add_up(*sent)
                    losses = learner.unpack(sent, losses)
                loss = learner.learn(learner.publish(losses, self.max_norm), size, count)
        except BaseException:
            self._keeper.restore()
            learner.drop()
            raise
        if learner.ok is not None:
            self._keeper.restore_unless(learner.ok)
        return loss

    def as_tensors(self, batch: tuple[Any, ...]) -> tuple[Any, ...]:
        """The batch with NumPy arrays as tensors on the model's device, alone or in dicts and lists."""
        for x in batch:
            if isinstance(x, Tensor) and (x.is_meta or x.layout is not torch.strided):
                raise TypeError(f"a batch is made of dense tensors, not of {described(x)}")
        if any(isinstance(x, Tensor) and x.is_inference() for x in batch):  # no backward pass could keep them
            batch = tuple(x.clone() if isinstance(x, Tensor) and x.is_inference() else x for x in batch)
        return batch if all(isinstance(x, Tensor) for x in batch) else moved(batch, self.target)

    def examples(self, batch: tuple[Any, ...]) -> int | None:
        """The number of examples of the first tensor that has their axis."""
        return examples_of(batch, self.learner.batch_dim)

    @torch.enable_grad()
    def gather(self, before: Mapping[str, Tensor], batch: tuple[Any, ...]) -> Tensor:
        """Draw, run forward and backward, pass the statistics to the optimiser; returns the samples'
        losses."""
        losses: list[Tensor] = []
        learner = self.learner
        params, asked = learner.parameters(), learner.samples()
        parts = self._dealt_to(batch) if asked else 1
        samples = parts * asked or 1
        learner.sums.parts = parts
        size, beside = both_axes(batch, learner.batch_dim)
        notes = learner.terms.notes(lambda: (size and size // parts, beside))
        for rows in chunks(samples, self.chunk):
            drawn = learner.draw(rows, 1 / samples)
            one = len(rows) == 1
            for p in params:
                p.grad = None  # of the last step
            named = self._named(drawn.weights)
            seen = batch if parts == 1 else tuple(_dealt(x, parts, samples // parts, rows) for x in batch)
            leaves = {p: drawn.weights.get(p, p) for p in params} | drawn.leaves
            leaves = {p: leaf for p, leaf in leaves.items() if leaf.requires_grad}
            drawn.past.extend(p for p, leaf in leaves.items() if p is not leaf and p.requires_grad)
            if not leaves:
                raise RuntimeError("no parameter of this optimiser requires a gradient: unfreeze one")
            wanted = list(leaves.values())
            with ExitStack() as modes:
                if not one or notes is not None or learner.estimates:
                    modes.enter_context(Intercept(drawn.sinks, notes))
                modes.enter_context(learner.collecting(drawn, stacked=not one))
                if one:  # nothing to stack; the first sample moves the model's own buffers
                    state = buffers.copied(before) if rows.start else {}
                    mine = tuple(x[0] for x in seen) if parts > 1 else seen
                    # Layers that run again in the backward pass (checkpointing) must find the drawn weights,
                    # too.
                    then = {"then": partial(self._backward, wanted, drawn.past, samples=1)}
                    named |= self._named(learner.stand_ins(rows, None))
                    loss, grads = functional_call(self.target, {**named, **state}, mine, then)
                else:
                    more = self._stacked_stand_ins if learner.estimates else None
                    if more:
                        named[_SAMPLE] = torch.arange(rows.start, rows.stop)
                    loss, moved = stacked_pass(
                        self.target, named, before, seen, {}, stacked=True, own=parts > 1, more=more
                    )
                    if rows.start == 0 and moved is not None:
                        buffers.restore(self.target, moved)
                    if not learner.listens:
                        modes.close()  # the backward pass has nobody to tell
                    loss, grads = self._backward(wanted, drawn.past, loss, len(rows))
                losses.append(loss.detach())
            learner.absorb(dict(zip(leaves, grads, strict=True)), drawn, rows, 1 / samples)
        return torch.cat(losses) if len(losses) > 1 else losses[0]

    def _named(self, tensors: Mapping[Tensor, Tensor]) -> dict[str, Tensor]:
        """Values given by parameter, by name instead."""
        return {self.names[p]: each for p, each in tensors.items()}

    def _stacked_stand_ins(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The parameters of one pass over samples, from their numbers and the drawn weights."""
        numbers = inside(weights[_SAMPLE]).reshape(-1).tolist()
        samples, level = range(numbers[0], numbers[-1] + 1), level_of(weights[_SAMPLE])
        drawn = {name: each for name, each in weights.items() if name != _SAMPLE}
        return drawn | self._named(self.learner.stand_ins(samples, level))

    def _backward(
        self, leaves: list[Tensor], past: list[Tensor], loss: Tensor, samples: int
    ) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        """The samples' losses, and the gradients of their sum with respect to the weights."""
        losses = loss[None] if samples == 1 else loss
        if losses.dim() != 1:
            shape = list(losses.shape[1:])
            raise ValueError(f"loss_fn must return the mean loss of a batch, one number, not shape {shape}")
        if not losses.requires_grad:
            raise ValueError("the loss depends on no weight that requires a gradient: check loss_fn")
        # Of some only to hear whether there are any, which stand-ins refuse by hooks of their own.
        grads = torch.autograd.grad(losses, [*leaves, *past], self._ones_like(losses), allow_unused=True)
        if any(grad is not None for grad in grads[len(leaves) :]):
            raise ValueError(
                "the loss depends on parameters other than through the drawn weights: in loss_fn use "
                "only the model that it is given, and leave out kl(), which compile_step adds"
            )
        return losses, grads[: len(leaves)]

    def _dealt_to(self, batch: tuple[Any, ...]) -> int:
        """The number of parts of a batch."""
        if self.parts == 1:
            return 1
        if not all(isinstance(x, Tensor) for x in batch):
            raise TypeError(f"parts={self.parts} splits tensors: pass each by itself, as train_step(x, y)")
        if len({x.shape[:1] for x in batch}) > 1:
            raise ValueError(f"parts={self.parts} splits all tensors of a batch: give them the same length")
        return math.gcd(self.parts, len(batch[0]))

    def _ones_like(self, loss: Tensor) -> Tensor:
        """The initial gradient of the backward pass, made once, so that it exists before a graph is
        captured."""
        key = (loss.shape, loss.dtype, loss.device)
        if key not in self._ones:
            self._ones[key] = torch.ones_like(loss)
        return self._ones[key]


def _dealt(x: Tensor, parts: int, each: int, rows: range) -> Tensor:
    """The part of a batch's tensor that each sample gets: ``[samples, B / parts, ...]``."""
    cut = x.reshape(parts, -1, *x.shape[1:])
    dealt = [number // each for number in rows]
    return cut if dealt == list(range(parts)) else torch.stack([cut[part] for part in dealt])


@final
class _Loss(nn.Module):
    """A loss function as a module, so that its model's weights can be swapped."""

    def __init__(self, model: nn.Module, loss_fn: LossFn) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn
        self.title = type(model).__name__

    def forward(self, *batch: Any, then: Callable[[Tensor], Any] | None = None) -> Any:
        try:
            loss = self.loss_fn(self.model, *batch)
        except TypeError as error:
            if _takes(self.loss_fn, 1 + len(batch)):
                raise
            raise TypeError(
                f"loss_fn is {described(self.loss_fn)} that does not take (model, *batch), here "
                f"{1 + len(batch)} arguments: pass a function such as lambda model, x, y: "
                "F.cross_entropy(model(x), y)"
            ) from error
        if not isinstance(loss, Tensor):
            raise TypeError(f"loss_fn must return the loss as a tensor, not {type(loss).__name__}")
        return loss if then is None else then(loss)


def _takes(call: Any, number: int) -> bool:
    """Whether a function or module takes this number of arguments, according to its signature."""
    try:
        inspect.signature(call.forward if isinstance(call, nn.Module) else call).bind(*range(number))
    except TypeError:
        return False
    except ValueError:  # it has no signature
        pass
    return True
