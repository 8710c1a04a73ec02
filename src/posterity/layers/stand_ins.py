"""Stand-ins for the parameters of layers that draw their own outputs.

A linear layer or a convolution that gets a stand-in uses its estimator (:mod:`posterity.layers.estimators`);
every other operation gets one draw of the weight. A stand-in has no values of its own, so nothing can use a
weight at its mean by mistake.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol, Self, TypeAlias, final

import torch
from torch import Tensor

from posterity.torch_private import (
    DisableTorchFunctionSubclass,
    transforms,
    tree_flatten,
    tree_leaves,
    tree_unflatten,
)

Estimator: TypeAlias = Literal["weight", "local", "flipout"]


class Draws(Protocol):
    """The draws of some blocks in one forward pass, each made at first use.

    Attributes:
        estimator: ``"local"`` or ``"flipout"``.
        batch_dim: The axis of the examples, for layers with several axes.
        transforms: Levels of the torch.func transforms that the draws are for.
        scaled_axis: The axis of weights with scales for each example: 0 for outputs, 1 for inputs.
    """

    estimator: Estimator
    batch_dim: int
    transforms: list[int]
    scaled_axis: int | None

    def values(self) -> Sequence[Tensor]:
        """One draw of each of the blocks' tensors."""

    def parts(self) -> Sequence[tuple[Tensor, Tensor]]:
        """Mean and std of each tensor's weights with local, mean and deviation with flipout."""

    def normal(self, name: str, shape: Sequence[int]) -> Tensor:
        """Standard normals under a name."""

    def signs(self, name: str, shape: Sequence[int]) -> Tensor:
        """Random signs under a name."""

    def scales(self, examples: int) -> Tensor:
        """Scales ``[examples, size]`` of ``scaled_axis``; ``parts`` do not include them."""


@final
class Drawn:
    """One parameter in one forward pass: its draws, and how it was used.

    Args:
        name: The parameter's name.
        block: Name of its block.
        draws: The draws of its block, and perhaps of others.
        index: Its index among all tensors of these draws.
    """

    def __init__(self, name: str, block: str, draws: Draws, index: int) -> None:
        self.name, self.block, self.draws, self.index = name, block, draws, index
        self.estimator, self.batch_dim = draws.estimator, draws.batch_dim
        self._call: tuple[int, str] | None = None  # examples and signs of the layer that used its estimator
        self._used = False  # as one draw

    @property
    def by_example(self) -> bool:
        """Whether its estimator needs the axis of the examples."""
        return self.estimator == "flipout" or self.draws.scaled_axis is not None

    def serves(self, examples: int, signs: str) -> bool:
        """Whether its estimator applies to a call of a layer; if not, the call gets the one draw.

        Args:
            examples: Number of examples in the call.
            signs: Name of the signs that multiply the outputs.
        """
        if self._used or transforms() != self.draws.transforms:
            return False
        if self._call is not None and self.estimator == "local":
            raise RuntimeError(
                f"{self.name!r} is used twice in one forward pass, and estimator='local' would draw its "
                f"outputs as if from other weights each time: pass {self._instead()}, or estimator='flipout'"
            )
        if self._call not in (None, (examples, signs)):
            raise RuntimeError(
                f"{self.name!r} is used again in one forward pass, on other examples or with another layer's "
                f"weight, and estimator='flipout' has no signs for both: pass {self._instead()}"
            )
        self._call = examples, signs
        return True

    def mean(self) -> Tensor:
        """The weights' mean."""
        return self.draws.parts()[self.index][0]

    def spread(self) -> Tensor:
        """The weights' stds with local, their deviation from the mean with flipout."""
        return self.draws.parts()[self.index][1]

    def normal(self, what: str, shape: Sequence[int]) -> Tensor:
        """Its own standard normals, for a purpose."""
        return self.draws.normal(f"{self.name}|{what}", shape)

    def signs(self, what: str, shape: Sequence[int]) -> Tensor:
        """Its own random signs, for a purpose."""
        return self.draws.signs(f"{self.name}|{what}", shape)

    def value(self) -> Tensor:
        """The one draw of the weights."""
        return self.draws.values()[self.index]

    def use(self) -> None:
        """From here on, all operations get the one draw."""
        if self._call is not None:
            raise RuntimeError(
                f"{self.name!r} is used by a layer and then by another operation, to which estimator="
                f"{self.estimator!r} cannot give the same weights: pass {self._instead()}"
            )
        self._used = True

    def hidden(self, _: Tensor) -> None:
        """The hook on a stand-in: an operation that was not seen has used it."""
        raise RuntimeError(
            f"{self.name!r} is used by an operation that torch's function modes do not see (such as a "
            f"torch.autograd.Function): pass {self._instead()}"
        )

    def _instead(self) -> str:
        return f"estimator={{{self.block!r}: 'weight', '*': {self.estimator!r}}}"


@final
class StandIn(Tensor):
    """A tensor in place of a parameter; all its values are NaN.

    Attributes:
        drawn: The parameter that it stands for.
        origin: The tensor that it is a view of, with a hook for gradients that reach it.
    """

    drawn: Drawn
    origin: Tensor

    @classmethod
    def of(cls, drawn: Drawn, shape: Sequence[int], nothing: Tensor) -> Self:
        """A stand-in of a shape, made from a tensor with one value, NaN.

        Call it outside all torch.func transforms. A gradient that reaches a stand-in comes from an operation
        that was not seen.
        """
        empty = nothing.detach().expand(shape)
        if torch.is_grad_enabled():
            empty.requires_grad_().register_hook(drawn.hidden)  # type: ignore[no-untyped-call]
        found = empty.as_subclass(cls)
        found.drawn, found.origin = drawn, empty
        return found

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Give an operation without an estimator the draws."""
        if func.__name__ in _ABOUT:
            with DisableTorchFunctionSubclass():
                found = func(*args, **(kwargs or {}))
            if not isinstance(found, Tensor):
                return found
        args, kwargs, drawn = drawn_arguments(args, kwargs or {})
        out = func(*args, **kwargs)
        if not all(isinstance(each, int | str | torch.Size) for each in tree_leaves(out)):
            for each in drawn:
                each.use()
        return out


# Functions, by name, that only inspect a tensor: attributes, and methods that need no values.
_ABOUT = frozenset({"__get__", "__len__", "dim", "is_complex", "is_floating_point", "numel", "size"})


def drawn_arguments(args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any], list[Drawn]]:
    """The arguments with draws in place of stand-ins, and the parameters that were drawn."""
    leaves, shape = tree_flatten((args, kwargs))
    drawn = [each.drawn for each in leaves if isinstance(each, StandIn)]
    plain = [each.drawn.value() if isinstance(each, StandIn) else each for each in leaves]
    args, kwargs = tree_unflatten(plain, shape)
    return args, kwargs, drawn
