"""A step's sums, added up over processes: one collective per buffer, weighted by each process's examples.

With b examples in a process and B in all, the loss of the step is Σ (b / B) loss. So gradients, and their
products with the noise, have the weights b / B. An example's share of the gradient changes by that factor:
squares and factors of gradients by its square. Counts are sums.

Sums are sent times b, and divided by B afterwards, so neither they nor the host wait for B. A process sends
the same whether or not it replays a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn

from posterity.buffers import writable
from posterity.distributed import World
from posterity.optim.counting import asks_batch_size, behind_here
from posterity.optim.factors import sign, summed_factors
from posterity.optim.overlap import Flight, whole
from posterity.optim.statistics import times
from posterity.optim.step import row
from posterity.torch_private import foreach_copy_

if TYPE_CHECKING:
    from posterity.optim.optimizer import VariationalOptimizer


_CHANGED = (
    "overlap=True has sent gradients that were changed afterwards inside sampled_params(): put all backward "
    "passes of a step but the last inside no_sync(), and clip after the context; nothing was learned"
)
_FAILED = "another process raised an error inside sampled_params(), and nothing was learned from this step"


def pool(
    opt: VariationalOptimizer,
    losses: list[Tensor],
    behind: float | None = None,
    flight: Flight | None = None,
    failed: bool = False,
) -> list[Tensor]:
    """Add up the statistics of all processes since the last call, in the sums of the step.

    Every process calls it, even one without examples.

    Args:
        opt: The optimiser.
        losses: Of this process's samples, where they are known.
        behind: What its loss is a mean of, if the user says so; else it is weighted by its examples.
        flight: What was sent already, if sums are sent in pieces.
        failed: Whether this process has no step to take, so that none has.

    Returns:
        The mean loss of all processes, if there are any.
    """
    sent = pack(opt, losses, behind, flight, failed)
    if flight is None:
        opt.world.add_up(*sent)
    else:
        flight.land([*sent[1:], sent[0]])
    return unpack(opt, sent, losses)[0]


@torch.no_grad()
def pack(
    opt: VariationalOptimizer,
    losses: list[Tensor],
    behind: float | Tensor | None,
    flight: Flight | None = None,
    failed: bool = False,
) -> list[Tensor]:
    """This process's terms of a sum over all: counts and its loss, then the sums of each group.

    Args:
        opt: The optimiser.
        losses: Of its samples, where they are known.
        behind: What its loss is a mean of, if the user says so: a tensor in a captured step.
        flight: What was sent already, if sums are sent in pieces.
        failed: Whether this process has no step to take.
    """
    local, flats = opt.local, list(opt.cache.latest)
    idle = not any(sums.used for sums in local)
    here: Any = 0.0 if idle else behind_here(opt, behind)
    every = [local.of(flat, None) for flat in flats]
    for each in every:
        each.clean()
    left = whole(opt, every) if flight is None else flight.route()[flight.sent :]
    for piece in left:
        piece.multiply(local.missing(here, opt.collects is not None))
    local.layers = times(local.layers, local.parts, here * here / local.parts)
    used = [float(i in each.used) for each in every for i in range(len(each.group.params))]
    counts = [float(local.inputs or 0) * local.weight, float(local.inputs is None), float(local.examples)]
    counts += [float(failed), float(flight is not None and flight.changed(here))]
    numbers, poisons = [*counts, *sign(local), *used], [each.poison for each in every]
    meta = meeting(here, [] if idle else losses, numbers, flats[0].device, poisons, opt.numbers.row)
    return [meta, *(tensor for piece in left for tensor in piece.sent)]


@torch.no_grad()
def unpack(
    opt: VariationalOptimizer, sent: list[Tensor], losses: list[Tensor]
) -> tuple[list[Tensor], float | Tensor]:
    """Write the totals of all processes to the sums of the step; in a captured step the host reads nothing.

    Args:
        opt: The optimiser.
        sent: The result of :func:`pack`, added up.
        losses: Of this process's samples, where they are known.

    Returns:
        The mean loss of all processes, if there are any, and what it is a mean of.
    """
    world, local, flats = opt.world, opt.local, list(opt.cache.latest)
    found = opt.numbers.read(sent[0])
    total, weighted, poison, inputs, unknown, examples, failed, changed, signs, squares, *everywhere = found
    captured = isinstance(total, Tensor)
    if not captured and (failed or changed):
        opt.buffers.undo()
        opt.zero_grad()
        raise RuntimeError(_FAILED if failed else _CHANGED)
    if not captured and not total:
        raise RuntimeError("no process has taken a gradient inside sampled_params() in this step")
    share = 1.0 / total
    # Squares of one share's examples are gathered by all processes that its samples are split over.
    squared = share if opt.collects is None else world.split * share * share
    for flat in flats:
        sums = local.of(flat, None)
        if captured:
            refuse_unreached(flat.layout.names, flat.params, sums.used)
            union = sums.used
        else:
            union = {i for i in range(len(flat.params)) if everywhere[i]}
            sums.poison += poison
        everywhere = everywhere[len(flat.params) :]
        opt.sums.take(sums, union, share, squared if opt.collects is None else squared * local.parts)
    if not captured:
        layers = summed_factors(opt, local, squared, some=signs * signs != squares * world.size)
        opt.sums.add_weighted({key: replace(each, S=each.S * local.parts) for key, each in layers.items()})
    opt.sums.samples += local.samples
    opt.sums.weight, opt.sums.parts = local.weight, local.parts
    if local.examples or not captured:  # of a step that collects nothing there is no tensor either
        opt.sums.examples += _over(examples, world.split)
    uncounted = local.inputs is None if captured else unknown
    opt.sums.add_inputs(None if uncounted else _over(inputs, world.split * local.weight))
    local.clear()
    mean = weighted * share + (poison if captured else 0.0)  # else the host says which gradient it is
    return [torch.as_tensor(mean, dtype=each.dtype, device=each.device) for each in losses[:1]], total


def _over(number: Any, by: float) -> Any:
    """A quotient, without a kernel in a captured step when the divisor is 1."""
    return number if by == 1 else number / by


def meeting(
    here: float | Tensor,
    losses: list[Tensor],
    numbers: Sequence[float],
    device: torch.device,
    poisons: Sequence[Tensor] = (),
    row: Callable[..., Tensor] = row,
) -> Tensor:
    """The numbers that processes exchange about a step.

    It is what is behind the step; that times its mean loss; NaN if a sum is not finite, of which a captured
    step would not know otherwise; and numbers.

    Args:
        here: What is behind the step.
        losses: Of the samples.
        numbers: Of this process.
        device: Where all is wanted.
        poisons: Of its sums.
        row: Makes a tensor of numbers. A capture cannot copy them from the host.
    """
    meta = row([0.0 if isinstance(here, Tensor) else here, 0.0, 0.0, *numbers], device)
    if isinstance(here, Tensor):
        meta[0].copy_(here)
    if losses:
        every = losses[0] if len(losses) == 1 else torch.stack([each.to(meta) for each in losses])
        mean = every.to(meta.device).mean(dtype=meta.dtype)
        meta[1].copy_(mean * meta[0])
    for poison in poisons:
        meta[2].add_(poison.to(meta.device))
    return meta


def refuse_unreached(names: Sequence[str], params: Sequence[Tensor], used: Collection[int]) -> None:
    """Raise, in a capture, for a parameter that only other processes may update: a graph always updates the
    same ones."""
    for i, (name, p) in enumerate(zip(names, params, strict=True)):
        if p.requires_grad and i not in used:
            raise RuntimeError(f"{name!r} has no gradient in this process, and may have one in others")


@torch.no_grad()
def complete(opt: VariationalOptimizer) -> None:
    """With a wrapper that averages gradients, add up the rest: curvature and counts."""
    world, sums = opt.world, opt.sums
    if opt.collects is None and not asks_batch_size(opt):
        return
    device = next(iter(sums)).group.device
    counts = [float(sums.inputs or 0), float(sums.inputs is None), float(sums.examples)]
    meta = row(counts, device)
    world.add_up(meta)
    inputs, unknown, examples = meta.tolist()
    sums.inputs, sums.examples = (None if unknown else inputs / world.split), examples
    if opt.collects is None or not examples:
        return
    squared = 1.0 / world.size**2
    for each in sums:
        each.second.mul_(squared)
        world.add_up(each.second)
    sums.layers = summed_factors(opt, sums, squared, some=False)


@torch.no_grad()
def mean_loss(opt: VariationalOptimizer, losses: list[Tensor]) -> list[Tensor]:
    """The mean loss of all processes, with equal weights, as a wrapper has them.

    This way all processes see a non-finite loss even if its gradients are finite.
    """
    loss = torch.stack([each.double() for each in losses]).mean().to(opt.cache.latest[0].device)
    opt.world.add_up(loss)
    return [losses[0].new_tensor(float(loss) / opt.world.size)]


def summed(opt: VariationalOptimizer, number: float | None) -> float | None:
    """A user's count of this process's examples or terms, over all."""
    if number is None:
        return number
    both = torch.tensor([float(number)], dtype=torch.float64, device=opt.cache.latest[0].device)
    opt.world.add_up(both)
    return float(both) / opt.world.split


def share_buffers(world: World, module: nn.Module) -> None:
    """Set a module's buffers, such as BatchNorm's statistics, to the first process's values."""
    shared = SharedBuffers(world, module)
    world.add_up(*shared.joined)
    shared.spread()


@final
class SharedBuffers:
    """A module's buffers on their way from the first process to all.

    Args:
        world: All processes.
        module: Whose buffers.

    Attributes:
        joined: To be added up: those of the first process, and zeros; a tensor for each device.
    """

    @torch.no_grad()
    def __init__(self, world: World, module: nn.Module) -> None:
        places: dict[torch.device, list[Tensor]] = {}
        for buffer in writable(module).values():
            places.setdefault(buffer.device, []).append(buffer)
        self._first = world.rank == 0
        # The longest words first, so that all begin at whole addresses.
        self._places = [sorted(each, key=lambda buffer: -buffer.itemsize) for each in places.values()]
        self.joined = [
            torch.cat([buffer.reshape(-1).view(torch.uint8) for buffer in buffers])  # whatever their types
            for buffers in self._places
        ]
        if not self._first:
            for each in self.joined:
                each.zero_()

    @torch.no_grad()
    def spread(self) -> None:
        """Write the first process's values over those of the others."""
        if self._first:
            return
        for buffers, joined in zip(self._places, self.joined, strict=True):
            sizes = [buffer.numel() * buffer.itemsize for buffer in buffers]
            parts = torch.split(joined, sizes)
            for _, alike in groupby(zip(buffers, parts, strict=True), key=lambda pair: pair[0].dtype):
                own, values = zip(*alike, strict=True)
                given = [value.view(b.dtype).view(b.shape) for b, value in zip(own, values, strict=True)]
                foreach_copy_(list(own), given)
