"""What taps and collectors tell each other: which parameters a layer uses, in which pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol, final

from torch import Tensor

from posterity.curvature.layers import Layer

if TYPE_CHECKING:
    from posterity.curvature.ends import Use


class Part(NamedTuple):
    """A named parameter, or some of its rows.

    Attributes:
        name: Of the parameter.
        rows: First one, end, and how many the parameter has; None for all.
        sample: Which of a stack's samples, where they are used one after another.
    """

    name: str
    rows: tuple[int, int, int] | None = None
    sample: int | None = None

    def meets(self, other: Part) -> bool:
        """Whether two parts have weights in common."""
        if self.name != other.name or self.sample != other.sample:
            return False
        if self.rows is None or other.rows is None:
            return True
        return self.rows[0] < other.rows[1] and other.rows[0] < self.rows[1]


class Place(NamedTuple):
    """Where a layer's inputs and outputs have their samples and examples.

    Attributes:
        examples: How many.
        axis: Of the examples, samples aside.
        folded: Whether they are one axis together with the positions, positions outside.
        samples: K, or 1.
        counted: The axis of the examples as the model has them around the layer; None if nothing tells.
    """

    examples: int
    axis: int = 0
    folded: bool = False
    samples: int = 1
    counted: int | None = None

    def front(self, x: Tensor, axis: int | None) -> Tensor:
        """``[K, B, …]`` of a tensor with its samples on some axis."""
        x = x[None] if axis is None else x.movedim(axis, 0)
        x = x.reshape(x.shape[0], -1, self.examples, *x.shape[2:]) if self.folded else x
        x = x if self.axis == 0 else x.movedim(self.axis + 1, 1)
        return x if x.shape[0] == self.samples else x.expand(self.samples, *[-1] * (x.dim() - 1))


@final
@dataclass(eq=False)
class Run:
    """A forward pass, as far as it is listened to.

    Attributes:
        place: Of the examples in the layer that told last; None if nothing is known.
        counted: Their axis, where a layer tells.
        used: What has told of its backward pass.
        names: Of these.
        heard: Samples whose backward pass has begun.
    """

    place: Place | None = None
    counted: int | None = None
    used: list[Part] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    heard: set[int | None] = field(default_factory=set)


@final
class Site:
    """Where a layer uses wanted parameters.

    Args:
        layer: What it is.
        weight: The wanted part that is its weight, if any.
        bias: The wanted part that is its bias, if any.
        place: Where inputs and outputs have their samples and examples.
        x_axis: Where inputs have their samples, if they have any.
        grad_axis: Where outputs have theirs; None outside vmap alone.

    Attributes:
        parts: What is wanted.
        names: Of the parameters.
        alone: Whether tensors are one sample's, ``[B, …]``, as they are.
    """

    __slots__ = ("alone", "bias", "grad_axis", "layer", "names", "parts", "place", "weight", "x_axis")

    def __init__(
        self,
        layer: Layer,
        weight: Part | None,
        bias: Part | None,
        place: Place,
        x_axis: int | None = None,
        grad_axis: int | None = None,
    ) -> None:
        self.layer, self.weight, self.bias, self.place = layer, weight, bias, place
        self.x_axis, self.grad_axis = x_axis, grad_axis
        self.parts = [part for part in (weight, bias) if part is not None]
        self.names = [part.name for part in self.parts]
        self.alone = grad_axis is None and place.axis == 0 and not place.folded

    def stacks(self, x: Tensor | None, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs and gradient ``[K, B, …]``, of tensors as the layer had them."""
        own = self.place.front(grad, self.grad_axis)
        # Where only a bias is wanted, nothing looks at the inputs.
        return own if x is None else self.place.front(x, self.x_axis), own


class Listener(Protocol):
    """Who asks for uses, and hears of their backward passes.

    Attributes:
        stacked: Whether wanted tensors are stacks of samples, to be used by vmap or one by one.
        parts: What is wanted, by id, and in the same place whatever has turned out to be some rows of it.
    """

    stacked: bool
    parts: dict[int, tuple[Tensor, Part]]

    def begin(self, site: Site) -> Run | None:
        """A layer is called: in which forward pass, if it is to be listened to."""

    def brings_gradient(self, layer: Layer) -> bool:
        """Whether heard() gives the gradient of such a layer's weight."""

    def heard(self, use: Use, x: Tensor | None, grad: Tensor, extras: Sequence[Tensor]) -> Tensor | None:
        """Inputs and gradient of a use, as the layer had them.

        Returns:
            The weight's gradient ``[K, *shape]``, or the one sample's of a use that is alone, if it brings
            it.
        """

    def refuse(self, names: Sequence[str], reason: str) -> None:
        """Parameters are used in a way that nothing can be collected from."""
