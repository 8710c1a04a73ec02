"""A step's sums, added up over processes: one collective per buffer, weighted by each process's examples.

With b examples in a process and B in all, the loss of the step is Σ (b / B) loss. So gradients, and their
products with the noise, have the weights b / B. An example's share of the gradient changes by that factor:
squares and factors of gradients by its square. Counts are sums.

Sums travel times b, and are divided by B afterwards: so they need not wait for B, nor does the host. What a
process sends does not depend on whether it replays a graph.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from posterity.buffers import writable
from posterity.curvature import Kronecker
from posterity.distributed import Fingerprint, World, fingerprint
from posterity.optim.overlap import Flight, whole
from posterity.optim.statistics import Accumulator
from posterity.optim.step import row
from posterity.sharding import is_sharded
from posterity.torch_private import foreach_copy_

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from posterity.optim.optimizer import VariationalOptimizer


_UNWRAPPED = (
    "wrap the model in DistributedDataParallel and take the backward passes of a step that are inside its "
    "no_sync() in one context with the last, or give the optimiser mesh="
)

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
    """Add what all processes have gathered since this was last called to the sums of the step.

    Every process calls it, also one that has seen no example.

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
    """What a process brings to a sum over all: counts and its loss, then the sums of each group.

    Args:
        opt: The optimiser.
        losses: Of its samples, where they are known.
        behind: What its loss is a mean of, if the user says so: a tensor in a captured step.
        flight: What was sent already, if sums are sent in pieces.
        failed: Whether this process has no step to take.
    """
    local, flats = opt.local, list(opt.cache.latest)
    idle = not any(sums.used for sums in local)
    here: Any = 0.0 if idle else opt.behind_here(behind)
    every = [local.of(flat, None) for flat in flats]
    for each in every:
        each.clean()
    left = whole(opt, every) if flight is None else flight.route()[flight.sent :]
    for piece in left:
        piece.multiply(local.missing(here, opt.collects is not None))
    square = here * here / local.parts
    local.layers = {
        key: replace(each, A=each.A * local.parts, S=each.S * square, examples=each.examples * local.parts)
        for key, each in local.layers.items()
    }
    used = [float(i in each.used) for each in every for i in range(len(each.group.params))]
    counts = [float(local.inputs or 0) * local.weight, float(local.inputs is None), float(local.examples)]
    counts += [float(failed), float(flight is not None and flight.changed(here))]
    numbers, poisons = [*counts, *_sign(local), *used], [each.poison for each in every]
    meta = meeting(here, [] if idle else losses, numbers, flats[0].device, poisons, opt.numbers.row)
    return [meta, *(tensor for piece in left for tensor in piece.sent)]


@torch.no_grad()
def unpack(
    opt: VariationalOptimizer, sent: list[Tensor], losses: list[Tensor]
) -> tuple[list[Tensor], float | Tensor]:
    """Add what all processes have brought to the sums of the step; in a captured one the host does not look.

    Args:
        opt: The optimiser.
        sent: What :func:`pack` gave, once it is added up.
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
        layers = _layers(opt, local, squared, some=signs * signs != squares * world.size)
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
    """What processes tell each other of a step.

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
    """Raise, in a capture, for a parameter that other processes may move: a graph always moves the same."""
    for i, (name, p) in enumerate(zip(names, params, strict=True)):
        if p.requires_grad and i not in used:
            raise RuntimeError(f"{name!r} has no gradient in this process, and may have one in others")


@torch.no_grad()
def complete(opt: VariationalOptimizer, first: bool) -> None:
    """Where a wrapper has averaged the gradients, add up what it knows nothing of: curvature and counts.

    Args:
        opt: The optimiser.
        first: Whether to look, before that, if there is a wrapper.
    """
    world, sums = opt.world, opt.sums
    if first:
        plain = ((name, p.grad) for name, p in opt.named() if not is_sharded(p))
        mine = {name: "none" if grad is None else fingerprint(grad) for name, grad in plain}
        world.refuse_others(mine, "the gradient of", _UNWRAPPED)
    if opt.collects is None and not opt.asks_batch_size():
        return
    device = next(iter(sums)).group.device
    counts = [float(sums.inputs or 0), float(sums.inputs is None), float(sums.examples)]
    meta = torch.tensor(counts, dtype=torch.float64, device=device)
    world.add_up(meta)
    inputs, unknown, examples = meta.tolist()
    sums.inputs, sums.examples = (None if unknown else inputs / world.split), examples
    if opt.collects is None or not examples:
        return
    squared = 1.0 / world.size**2
    for each in sums:
        each.second.mul_(squared)
        world.add_up(each.second)
    sums.layers = _layers(opt, sums, squared, some=False)


@torch.no_grad()
def mean_loss(opt: VariationalOptimizer, losses: list[Tensor]) -> list[Tensor]:
    """The mean loss of all processes, where a wrapper gives each the same weight.

    Only so do all know of a loss that is not finite but has gradients that are.
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
    """Give a module's buffers, such as BatchNorm's statistics, the values that the first process has."""
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


def unwrapped(
    wrapper: DistributedDataParallel, rule: str, collects: bool, mesh: DeviceMesh | None
) -> nn.Module:
    """The module in a wrapper that averages gradients as a rule needs them; others are refused."""
    if mesh is not None:
        raise ValueError(
            "the model is in DistributedDataParallel, which averages gradients of all processes, as mesh= "
            "would: pass wrapper.module, and call that, or leave mesh= out"
        )
    for option, on in (
        ("find_unused_parameters", wrapper.find_unused_parameters),
        ("static_graph", wrapper.static_graph),
    ):
        if collects and on:
            raise ValueError(
                f"DistributedDataParallel({option}=True) follows autograd's graph, in which weights have no "
                f"place whose layers report single examples to {rule}: leave it out, or the wrapper, and "
                "pass mesh="
            )
    module: nn.Module = wrapper.module
    return module


def meet(opt: VariationalOptimizer) -> None:
    """Before the first step: refuse processes that differ, and let all draw by one seed."""
    if opt.mesh is None:  # processes may have come together after this was built
        opt.world = opt.all_processes()
    opt.met = True
    if opt.world.size == 1:
        return
    if not opt.seeded and not opt.param_groups[0]["steps"]:
        seed = opt.world.gathered(opt.param_groups[0]["seed"])[0]
        for group in opt.param_groups:
            group["seed"] = seed
    _refuse_unlike(opt)


def _refuse_unlike(opt: VariationalOptimizer) -> None:
    """Raise in all processes if they differ in what a posterior of all of them is made of."""
    settings = {
        f"{key} of group {number}": repr(value)
        for number, group in enumerate(opt.param_groups)
        for key, value in group.items()
        if key not in ("params", "param_names")
    }
    own = {"rule": type(opt).__name__, "overlap": opt.overlap}
    opt.world.refuse_others({**own, **settings}, "the optimiser's")
    opt.world.refuse_others({name: _described(p) for name, p in opt.named()}, "the parameter")
    states = {
        f"{key} of {name}": _described(value)
        for name, p in opt.named()
        for key, value in opt.state.get(p, {}).items()
    }
    opt.world.refuse_others(states, "the state")


def _described(tensor: Tensor) -> str | Fingerprint:
    """What is the same in all processes: of a sharded tensor, how it is sharded."""
    own: Any = tensor
    return f"{list(own.shape)} {own.placements}" if is_sharded(tensor) else fingerprint(tensor)


def _sign(sums: Accumulator) -> tuple[float, float]:
    """A number that tells which layers have factors, and its square; sums of both tell if all agree."""
    known = sorted((key, len(each.A), len(each.S)) for key, each in sums.layers.items())
    number = zlib.crc32(repr(known).encode()) % (1 << 20)  # squares are exact, and their sums
    return float(number), float(number * number)


def _layers(opt: VariationalOptimizer, sums: Accumulator, squared: float, some: bool) -> dict[str, Kronecker]:
    """Kronecker factors of all processes, by their upper triangles in one buffer.

    Args:
        opt: The optimiser.
        sums: Of this process.
        squared: What its factors of gradients are multiplied by.
        some: Whether processes may know of other layers than this one.
    """
    mine = {
        key: replace(each, A=each.A.new_empty(()), S=each.S.new_empty(()))
        for key, each in sums.layers.items()
    }
    sizes = {key: (len(each.A), len(each.S)) for key, each in sums.layers.items()}
    if some:
        for others, theirs in opt.world.gathered((mine, sizes)):
            mine, sizes = {**others, **mine}, {**theirs, **sizes}
    if not mine:
        return {}
    flat = opt.cache.latest[0]
    like = flat.mean.new_zeros(())
    parts: list[Tensor] = []
    for key in sorted(mine):
        each = sums.layers.get(key)
        for size, factor in zip(
            sizes[key], (None, None) if each is None else (each.A, each.S * squared), strict=True
        ):
            empty = like.new_zeros(size, size) if factor is None else factor
            parts.append(empty[_triangle(size)])
        parts.append(like.new_tensor([0.0 if each is None else each.examples]))
    joined = torch.cat(parts)
    opt.world.add_up(joined)
    found, split = {}, iter(torch.split(joined, [len(part) for part in parts]))
    for key in sorted(mine):
        A, S = (_symmetric(next(split), size) for size in sizes[key])
        found[key] = replace(mine[key], A=A, S=S, examples=float(next(split)))
    return found


def _triangle(size: int) -> tuple[Tensor, Tensor]:
    rows, columns = torch.triu_indices(size, size)
    return rows, columns


def _symmetric(triangle: Tensor, size: int) -> Tensor:
    whole = triangle.new_zeros(size, size)
    whole[_triangle(size)] = triangle
    return whole + whole.triu(1).mT
