"""Stand-ins: what a model gets in the place of parameters whose layers draw their own outputs.

A linear layer or a convolution that is given one has its estimator (:mod:`posterity.layers.estimators`);
every other operation gets the one draw of the weight that the stand-in stands for. A stand-in has no numbers
of its own, so nothing can use a weight at its mean by mistake.
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
    """The draws of some blocks in one forward pass, each made when it is first asked for.

    Attributes:
        estimator: ``"local"`` or ``"flipout"``.
        batch_dim: The axis that counts examples, where a layer leaves a choice.
        transforms: Levels of the transforms of torch.func that the draws are for.
        scaled_axis: The axis of weights that each example has scales of, 0 for outputs and 1 for inputs.
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
        """Standard normals that belong to a name."""

    def signs(self, name: str, shape: Sequence[int]) -> Tensor:
        """Random signs that belong to a name."""

    def scales(self, examples: int) -> Tensor:
        """Scales ``[examples, size]`` of ``scaled_axis``, which ``parts`` are without."""


@final
class Drawn:
    """One parameter in one forward pass: how it may be used, and how it was.

    Args:
        name: Of the parameter.
        block: Name of its block.
        draws: Of its block, and perhaps others.
        index: Its number among all tensors of these.
    """

    def __init__(self, name: str, block: str, draws: Draws, index: int) -> None:
        self.name, self.block, self.draws, self.index = name, block, draws, index
        self.estimator, self.batch_dim = draws.estimator, draws.batch_dim
        self._call: tuple[int, str] | None = None  # examples and signs of the layer that it served
        self._used = False  # as one draw

    @property
    def by_example(self) -> bool:
        """Whether it must know which axis counts examples."""
        return self.estimator == "flipout" or self.draws.scaled_axis is not None

    def serves(self, examples: int, signs: str) -> bool:
        """Whether its estimator serves a call of a layer; if not, the call is to have the one draw.

        Args:
            examples: How many the call has.
            signs: Name of those that it multiplies outputs with.
        """
        if self._used or transforms() != self.draws.transforms:
            return False
        if self._call is not None and self.estimator == "local":
            raise RuntimeError(
                f"{self.name!r} is used twice in one forward pass, and estimator='local' would draw its "
                f"outputs as if of other weights each time: pass {self._instead()}, or estimator='flipout'"
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
        """Standard normals of its own, for a purpose."""
        return self.draws.normal(f"{self.name}|{what}", shape)

    def signs(self, what: str, shape: Sequence[int]) -> Tensor:
        """Random signs of its own, for a purpose."""
        return self.draws.signs(f"{self.name}|{what}", shape)

    def value(self) -> Tensor:
        """The one draw of the weights."""
        return self.draws.values()[self.index]

    def use(self) -> None:
        """From here on, the one draw is what all operations get."""
        if self._call is not None:
            raise RuntimeError(
                f"{self.name!r} is used by a layer and then by something else, which estimator="
                f"{self.estimator!r} cannot give the same weights: pass {self._instead()}"
            )
        self._used = True

    def hidden(self, _: Tensor) -> None:
        """The hook on a stand-in: no operation that was seen has used it."""
        raise RuntimeError(
            f"{self.name!r} is used by an operation that torch's function modes do not see (such as a "
            f"torch.autograd.Function): pass {self._instead()}"
        )

    def _instead(self) -> str:
        return f"estimator={{{self.block!r}: 'weight', '*': {self.estimator!r}}}"


@final
class StandIn(Tensor):
    """What a model gets in the place of a parameter; all its numbers are NaN.

    Attributes:
        drawn: What it stands for.
        origin: The tensor that it is a view of, whose hook hears of gradients that reach it.
    """

    drawn: Drawn
    origin: Tensor

    @classmethod
    def of(cls, drawn: Drawn, shape: Sequence[int], nothing: Tensor) -> Self:
        """A stand-in of a shape, made of a tensor that has one number, NaN.

        Made where no transform of torch.func runs. A gradient that reaches it comes from an operation that
        nobody has seen.
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
        """An operation that has no estimator gets the draws."""
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


# Functions that may only ask what a tensor is, by name: attributes, and methods that need no numbers.
_ABOUT = frozenset({"__get__", "__len__", "dim", "is_complex", "is_floating_point", "numel", "size"})


def drawn_arguments(args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any], list[Drawn]]:
    """The arguments with the draws in the places of stand-ins, and what was drawn."""
    leaves, shape = tree_flatten((args, kwargs))
    drawn = [each.drawn for each in leaves if isinstance(each, StandIn)]
    plain = [each.drawn.value() if isinstance(each, StandIn) else each for each in leaves]
    args, kwargs = tree_unflatten(plain, shape)
    return args, kwargs, drawn
