"""Sharded tensors: DTensors, as made by fully_shard() and parallelize_module().

A rule is a function of single weights, so each process updates its own shard, and draws its slice of the
noise: together they do what one process would. Sharded state is kept as DTensors, which
``torch.distributed.checkpoint`` saves by shards and loads into any number of processes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast, final

import torch
from torch import Tensor, nn

from posterity.torch_private import fsdp_drop_gathered, fsdp_holds_gradients, fsdp_shares, shard_place

_PLAIN = (Tensor, nn.Parameter)


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor; checked by its attributes, since importing the class takes a second.

    Example:
        >>> is_sharded(torch.zeros(2))
        False
    """
    return type(tensor) not in _PLAIN and hasattr(tensor, "placements")


def local(tensor: Tensor) -> Tensor:
    """This process's part of a tensor, in the same memory; the whole tensor if it is not a DTensor.

    Example:
        >>> local(torch.ones(2))
        tensor([1., 1.])
    """
    if not is_sharded(tensor):
        return tensor
    with torch.no_grad():
        return cast(Tensor, cast(Any, tensor).to_local())


@torch.no_grad()
def whole(tensor: Tensor) -> Tensor:
    """The whole tensor, in every process; call it in all of them.

    Example:
        >>> whole(torch.ones(2))
        tensor([1., 1.])
    """
    return cast(Tensor, cast(Any, tensor).full_tensor()) if is_sharded(tensor) else tensor


def gradient(p: Tensor) -> Tensor | None:
    """This process's part of a parameter's gradient."""
    grad = p.grad
    if grad is None or not is_sharded(grad):
        return grad
    return local(_placed(grad, p))


def offset(tensor: Tensor) -> tuple[int, ...]:
    """Where in the whole tensor this process's part begins, along every axis.

    Example:
        >>> offset(torch.ones(2, 3))
        (0, 0)
    """
    if not is_sharded(tensor):
        return (0,) * tensor.dim()
    return shard_place(tensor)[1]


@torch.no_grad()
def beside(part: Tensor, tensor: Tensor) -> Tensor:
    """A tensor sharded like another, with the given part in this process."""
    from torch.distributed.tensor import DTensor

    own: Any = tensor
    at: dict[str, Any] = {"shape": own.shape, "stride": own.stride()}
    return DTensor.from_local(part, own.device_mesh, own.placements, run_check=False, **at)


@torch.no_grad()
def as_in(value: Tensor, tensor: Tensor) -> Tensor:
    """A value, whole or sharded, converted to the sharding of a given tensor."""
    if not is_sharded(tensor):
        return whole(value)
    if is_sharded(value):
        return _placed(value, tensor)
    part = value
    for axis, (first, size) in enumerate(zip(offset(tensor), local(tensor).shape, strict=True)):
        part = part.narrow(axis, first, size)
    return beside(part.clone(memory_format=torch.contiguous_format), tensor)


@torch.no_grad()
def _placed(value: Any, tensor: Any) -> Tensor:
    """A DTensor sharded like another; a replicated parameter's gradient may be a partial sum."""
    alike = value.placements == tensor.placements
    return cast(Tensor, value if alike else value.redistribute(placements=tensor.placements))


@final
class ShardedModel:
    """A model with sharded parameters, and its gathered copies of them.

    Args:
        module: The model; its parameters are gathered only inside modules that fully_shard() was applied to.

    Attributes:
        shares: The number of shares of a batch: tensor-parallel processes, which hold shards of the same
            layers, see the same examples.
    """

    def __init__(self, module: nn.Module) -> None:
        from torch.distributed.fsdp import FSDPModule

        self._modules = [each for each in module.modules() if isinstance(each, FSDPModule)]
        self.shares = max(map(fsdp_shares, self._modules), default=1)

    def holds_gradients(self) -> bool:
        """Whether gradients are waiting to be reduced, after set_requires_gradient_sync(False)."""
        return any(map(fsdp_holds_gradients, self._modules))

    def drop_gathered(self, failed: bool) -> None:
        """Drop gathered parameters, so that the next pass gathers the current ones.

        FSDP2 keeps them after a forward pass without a backward pass, if the user asks for it, and after an
        error in the modules that were running.

        Args:
            failed: Whether there was an error.
        """
        for module in self._modules:
            fsdp_drop_gathered(module, failed)


def refuse_shards(name: str, p: Tensor, rule: str, collects: bool, mesh: object, module: object) -> None:
    """Raise for a DTensor that a rule cannot train.

    Args:
        name: The parameter's name.
        p: The parameter.
        rule: Name of the optimiser.
        collects: Whether it needs per-example gradients from layers.
        mesh: The optimiser's mesh.
        module: The module that it was built from.
    """
    what = f"{name!r} is a DTensor, as fully_shard() and parallelize_module() make them"
    if collects:
        raise TypeError(
            f"{what}, but {rule} collects curvature only from layers with whole weights: use IVON or "
            "BGD, or wrap the model in DistributedDataParallel"
        )
    if mesh is not None:
        raise TypeError(f"{what}, whose gradients are already averaged over processes: leave mesh= out")
    if module is None:
        raise TypeError(
            f"{what}: pass the module itself, so that its weights can be gathered again at every draw"
        )
    if any(each.is_partial() for each in cast(Any, p).placements):
        raise TypeError(f"{what} with a partial sum in each process: shard or replicate it")


def sharded_model(module: nn.Module | None, params: Iterable[Tensor]) -> ShardedModel | None:
    """The model's :class:`ShardedModel`, if some of its parameters are sharded."""
    return ShardedModel(module) if module is not None and any(map(is_sharded, params)) else None
