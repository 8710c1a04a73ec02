"""Flows of several layers stacked, so that one operation handles all of them (MNF).

The layers' scales are padded to the size of the largest layer, with scales that never change, and every
product of a flow becomes a batched product. The weights of all layers lie end to end.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.functional import softplus

from posterity.flat import Layout, of_shapes
from posterity.fusing import fusible
from posterity.posterior.algebra import full_precision
from posterity.posterior.scaled import Scales
from posterity.torch_private import lasting


class Stack(NamedTuple):
    """A step of all flows, from the layers' parameters.

    Attributes:
        stays: 1 for scales that this step does not change, 0 for others, ``[L, 1, W]``.
        open: ∞ where a scale does not change, 0 elsewhere: added to the logits of a gate, it opens the gate
            and blocks its gradient.
    """

    stays: Tensor
    open: Tensor
    inner: Tensor
    inner_bias: Tensor
    outer: Tensor
    outer_bias: Tensor

    def __call__(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """The next z ``[L, n, W]``, and the log-determinant ``[n]`` of all flows together."""
        hidden = torch.baddbmm(self.inner_bias, z * self.stays, self.inner).tanh()
        both = torch.baddbmm(self.outer_bias, hidden, self.outer)
        raw, shift = torch.split(both, z.shape[-1], -1)
        z, log_gate = gated(z, raw + self.open, shift)
        return z, log_gate.sum((0, -1))


def gated(z: Tensor, raw: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
    """``g ⊙ z + (1 − g) ⊙ t`` and log g with g = sigmoid(raw): z does not change where raw is ∞."""
    return torch.lerp(shift, z, torch.sigmoid(raw)), torch.nn.functional.logsigmoid(raw)


def through(steps: Iterable[Any], z: Tensor) -> tuple[Tensor, Tensor | float]:
    """z after some steps, and the log-determinant ``[n]``; 0 without steps."""
    log_det: Tensor | float = 0.0
    for step in steps:
        z, change = step(z)
        log_det = log_det + change
    return z, log_det


def base_logs(eps: Tensor, std: Tensor) -> Tensor:
    """log N of ``std · eps`` around its mean."""
    return -0.5 * eps.square() - std.log() - 0.5 * math.log(2.0 * math.pi)


def auxiliary_logs(z: Tensor, a: Tensor, mean: Tensor, b1: Tensor, precision: Tensor, b2: Tensor) -> Tensor:
    """log N(z; mean + b1 · a, 1 / precision) with log-precisions ``precision + b2 · tanh(a)``."""
    log_precision = precision + b2 * torch.tanh(a)
    error = z - mean - b1 * a
    return 0.5 * (log_precision - log_precision.exp() * error.square() - math.log(2.0 * math.pi))


@fusible
def _drawn(
    eps: Tensor, centre: Tensor, raw: Tensor, steps: Sequence[Stack], real: Tensor
) -> tuple[Tensor, Tensor]:
    """Scales ``[L, n, W]`` from normals, and log q(z) ``[n]`` of each whole draw."""
    std = softplus(raw)
    z, log_det = through(steps, torch.addcmul(centre, std, eps))
    return z, (base_logs(eps, std) * real).sum((0, -1)) - log_det


@fusible
def _auxiliary(
    z: Tensor, sums: Tensor, steps: Sequence[Stack], own: Sequence[Tensor], share: Tensor, real: Tensor
) -> Tensor:
    """log r(z | w), ``[n]``, from the sum of the weights of each scale."""
    z, log_det = through(steps, z)
    c, *numbers = own
    a = (sums * c).sum(-1, keepdim=True) * share
    return (auxiliary_logs(z, a, *numbers) * real).sum((0, -1)) + log_det


@final
class Flows(Scales):
    """The scales of several layers: one row of ``[n, L, W]`` for each, with W scales as in the largest layer.

    Args:
        flows: Flows of single layers, all with the same numbers of steps and hidden units.
        shapes: Shapes of the layers' weights.
    """

    def __init__(self, flows: Sequence[Any], shapes: Sequence[torch.Size]) -> None:
        super().__init__(torch.Size([sum(flow.shape.numel() for flow in flows)]))
        first = flows[0]
        form = Form(len(first.steps), len(first.auxiliary.steps), first.hidden, first.auxiliary.hidden)
        self.places = _places(
            first, tuple(flow.shape for flow in flows), tuple(shapes), form, first.raw.device, first.raw.dtype
        )
        steps = [step for flow in flows for step in (*flow.steps, *flow.auxiliary.steps)]
        masks = torch.cat([*(step.mask for step in steps), first.raw.new_ones(1, dtype=torch.bool)])
        stays = masks.index_select(0, self.places.masks).view(-1, *self.places.real.shape)
        opened = torch.zeros_like(stays, dtype=first.raw.dtype).masked_fill_(stays, math.inf)
        numbers = [each for flow in flows for each in flow.numbers()]
        padded: Any = _Padded.apply(self.places, of_shapes(tuple(each.shape for each in numbers)), *numbers)  # type: ignore[no-untyped-call]
        self.values = dict(zip(self.places.shapes, padded, strict=True))
        stacks = [
            Stack(*masks, *(self.values[f"{number}.{name}"] for name in Stack._fields[2:]))
            for number, masks in enumerate(zip(stays.to(opened.dtype), opened, strict=True))
        ]
        self.steps, self.of_auxiliary = stacks[: form.steps], stacks[form.steps :]

    @full_precision
    def draw(self, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Scales ``[n, L, W]`` from normals ``[n, size]``, and log q(z) ``[n]`` of each whole draw."""
        eps, values = self.places.rows(noise), self.values
        z, log_q = _drawn(eps, values["centre"], values["raw"], self.steps, self.places.real)
        return z.transpose(0, 1), log_q

    def log_prob(self, z: Tensor) -> Tensor:
        """Not available: only single flows have it."""
        raise NotImplementedError

    @full_precision
    def log_auxiliary(self, z: Tensor, weights: Tensor) -> Tensor:
        """log r(z | w), ``[n]``, for weights ``[n, size]``."""
        sums: Tensor = _Across.apply(weights, self.places, False)  # type: ignore[no-untyped-call]
        own = [self.values[name] for name in ("c", "mean", "b1", "precision", "b2")]
        return _auxiliary(
            z.transpose(0, 1), sums, self.of_auxiliary, own, self.places.share, self.places.real
        )

    def spread(self, z: Tensor) -> Tensor:
        """The scale of each weight, ``[n, size]``."""
        each: Tensor = _Across.apply(z.transpose(0, 1), self.places, True)  # type: ignore[no-untyped-call]
        return each


class Form(NamedTuple):
    """Numbers of steps and hidden units, of a flow and of its auxiliary density."""

    steps: int
    auxiliary_steps: int
    hidden: int
    auxiliary_hidden: int


@final
class Places:
    """Indices from flows to padded stacks and back, and from weights to their scales.

    Args:
        scales: Shapes of the layers' scales.
        weights: Shapes of their weights.
        form: The form of the flows.
        device: The device of the indices.
        dtype: The flows' dtype.

    Attributes:
        shapes: Shapes of the padded stacks, by name.
        index: For each entry of the joined padded stacks, its index in the flows' joined parameters; padding
            has the index after the last one, which holds a zero.
        back: The inverse.
        owners: For each of the flows' tensors, the number of its stack.
        masks: Like ``index``, for the masks of all steps, ``[steps · L · W]``.
        real: 0 for padding, otherwise 1, ``[L, 1, W]``.
        share: One over the number of weights of each scale, ``[L, 1, 1]``.
    """

    def __init__(
        self,
        scales: Sequence[torch.Size],
        weights: Sequence[torch.Size],
        form: Form,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.scales, self.weights = scales, weights
        sizes = [shape.numel() for shape in scales]
        self.count, self.wide = len(sizes), max(sizes)
        self.shapes = _shapes(self.count, self.wide, form)
        starts = Layout(list(self.shapes), list(self.shapes.values()), align=1)
        index = torch.full((starts.size,), -1)
        stacks = dict(zip(self.shapes, starts.views(index), strict=True))
        end, self.owners = 0, list[int]()
        for row, size in enumerate(sizes):
            for name, part in _parts(stacks, row, size, form):
                self.owners.append(list(self.shapes).index(name))
                part.copy_(torch.arange(end, end + part.numel()).view(part.shape))
                end += part.numel()
        back = torch.empty(end, dtype=torch.long)
        inside = (index >= 0).nonzero().squeeze(1)
        back[index[inside]] = inside
        self.parts = list(self.shapes.values())
        self.sizes = starts.sizes
        self.index, self.back = torch.where(index < 0, end, index).to(device), back.to(device)

        steps = form.steps + form.auxiliary_steps
        masks = torch.full((steps, self.count, 1, self.wide), steps * sum(sizes))
        rows = torch.zeros(self.count, self.wide, dtype=torch.long)
        real = torch.zeros(self.count, 1, self.wide, dtype=torch.bool)
        at, first = [], 0
        for row, size in enumerate(sizes):
            own = torch.arange(first, first + size)
            masks[:, row, 0, :size] = steps * first + torch.arange(steps * size).view(steps, size)
            rows[row, :size], real[row, :, :size] = own, True
            at.append((own - first + row * self.wide).view(scales[row]).expand(weights[row]).reshape(-1))
            first += size
        self.masks, self.real = masks.view(-1).to(device), real.to(device, dtype)
        self._rows, self._at = rows.view(-1).to(device), torch.cat(at).to(device)
        per = [size / shape.numel() for size, shape in zip(sizes, weights, strict=True)]
        self.share = torch.tensor(per, dtype=dtype).view(-1, 1, 1).to(device)

    def rows(self, values: Tensor) -> Tensor:
        """``[L, n, W]`` from one value for each scale, ``[n, size]``; padding has arbitrary values."""
        return values.index_select(1, self._rows).view(len(values), self.count, self.wide).transpose(0, 1)

    def spread(self, z: Tensor) -> Tensor:
        """The scale of each weight, ``[n, size]``."""
        return z.transpose(0, 1).flatten(1).index_select(1, self._at)

    def sums(self, values: Tensor) -> Tensor:
        """Sums ``[L, n, W]`` over the weights of each scale: the adjoint of :meth:`spread`."""
        found = []
        parts = torch.split(values, [shape.numel() for shape in self.weights], 1)
        for part, shape, scales in zip(parts, self.weights, self.scales, strict=True):
            shared = [axis for axis, size in enumerate(scales, 1) if size == 1]
            each = part.reshape(-1, *shape)
            found.append((each.sum(shared, keepdim=True) if shared else each).flatten(1))
        return self.rows(torch.cat(found, 1))


# Keyed by the first flow, so that indices on a device are freed with its model.
_HELD: WeakKeyDictionary[Any, tuple[tuple[object, ...], Places]] = WeakKeyDictionary()


@lasting()
def _places(
    first: Any,
    scales: tuple[torch.Size, ...],
    weights: tuple[torch.Size, ...],
    form: Form,
    device: torch.device,
    dtype: torch.dtype,
) -> Places:
    key = scales, weights, form, device, dtype
    held = _HELD.get(first)
    if held is None or held[0] != key:
        held = _HELD[first] = key, Places(*key)
    return held[1]


_VECTORS = ("centre", "raw", "c", "mean", "b1", "precision", "b2")


def _shapes(count: int, wide: int, form: Form) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(_VECTORS, (count, 1, wide))
    for step in range(form.steps + form.auxiliary_steps):
        hidden = form.hidden if step < form.steps else form.auxiliary_hidden
        # In the layout of the products, so that gradients have it too.
        shapes[f"{step}.inner"], shapes[f"{step}.inner_bias"] = (count, wide, hidden), (count, 1, hidden)
        shapes[f"{step}.outer"], shapes[f"{step}.outer_bias"] = (
            (count, hidden, 2 * wide),
            (count, 1, 2 * wide),
        )
    return shapes


def _parts(stacks: dict[str, Tensor], row: int, size: int, form: Form) -> Iterator[tuple[str, Tensor]]:
    """The name of the stack and the view of it for each tensor of one flow, as in ``Flow.numbers()``."""
    for name in _VECTORS:
        yield name, stacks[name][row, 0, :size]
    for step in range(form.steps + form.auxiliary_steps):
        inner, outer = f"{step}.inner", f"{step}.outer"
        yield inner, stacks[inner][row, :size].mT
        yield f"{inner}_bias", stacks[f"{inner}_bias"][row, 0]
        half = stacks[outer].shape[-1] // 2
        for first in (0, half):  # of gates, of shifts
            yield outer, stacks[outer][row, :, first : first + size].mT
            yield f"{outer}_bias", stacks[f"{outer}_bias"][row, 0, first : first + size]


@final
class _Padded(torch.autograd.Function):
    """Parameters of flows, copied to padded stacks."""

    generate_vmap_rule = True

    @staticmethod
    def forward(places: Places, layout: Layout, *numbers: Tensor) -> tuple[Tensor, ...]:
        flat = torch.cat([*(each.reshape(-1) for each in numbers), numbers[0].new_zeros(1)])
        parts = torch.split(flat.index_select(0, places.index), places.sizes)
        return tuple(part.view(shape) for part, shape in zip(parts, places.parts, strict=True))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.places, ctx.layout = inputs[:2]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        places, like = ctx.places, next((grad for grad in grads if grad is not None), None)
        if like is None:
            return (None,) * (2 + len(places.owners))
        sizes = zip(grads, places.sizes, strict=True)
        every = [like.new_zeros(size) if grad is None else grad.reshape(-1) for grad, size in sizes]
        views = ctx.layout.views(torch.cat(every).index_select(0, places.back))
        # Unused parts have no gradient, such as the auxiliary density if the prior also has scales.
        used = (grads[owner] is not None for owner in places.owners)
        return None, None, *(view if own else None for view, own in zip(views, used, strict=True))


@final
class _Across(torch.autograd.Function):
    """The scale of each weight, or the sum of each scale's weights: each one is the other's gradient."""

    generate_vmap_rule = True

    @staticmethod
    def forward(values: Tensor, places: Places, to_weights: bool) -> Tensor:
        return places.spread(values) if to_weights else places.sums(values)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.places, ctx.to_weights = inputs[1:]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _Across.apply(grad, ctx.places, not ctx.to_weights), None, None  # type: ignore[no-untyped-call]
