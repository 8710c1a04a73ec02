"""What taps and collectors tell each other: which parameters a layer uses, in which pass."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, final

from torch import Tensor

from posterity.curvature.layers import Layer


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
        """Whether two parts of one parameter have weights in common."""
        if self.sample != other.sample:
            return False
        if self.rows is None or other.rows is None:
            return True
        return self.rows[0] < other.rows[1] and other.rows[0] < self.rows[1]


@final
@dataclass(eq=False)
class Run:
    """A forward pass, as far as it is listened to.

    Attributes:
        examples: In it; 0 if nothing is known.
        counted: Their axis, where a layer tells.
        used: What has told of its backward pass, by name.
        heard: Samples whose backward pass has begun.
    """

    examples: int = 0
    counted: int | None = None
    used: defaultdict[str, list[Part]] = field(default_factory=lambda: defaultdict(list))
    heard: set[int | None] = field(default_factory=set)


@final
@dataclass(eq=False)
class Use:
    """One use of wanted parameters by a layer.

    Attributes:
        layer: What it is.
        weight: The wanted part that is its weight, if any.
        bias: The wanted part that is its bias, if any.
        run: In which forward pass.
        fresh: Whether its backward pass has not come yet; a graph that is kept may bring several.
        examples: That it was called with.
        counted: The axis of the examples around it; None if nothing tells.
        parts: What is wanted.
    """

    layer: Layer
    weight: Part | None
    bias: Part | None
    run: Run = field(init=False)
    fresh: bool = True
    examples: int = 0
    counted: int | None = None

    def __post_init__(self) -> None:
        self.parts = [part for part in (self.weight, self.bias) if part is not None]

    @property
    def names(self) -> list[str]:
        """Of the parameters."""
        return [part.name for part in self.parts]


class Listener(Protocol):
    """Who asks for uses, and hears of their backward passes.

    Attributes:
        stacked: Whether wanted tensors are stacks of samples, to be used by vmap or one by one.
        parts: What is wanted, by id, and in the same place whatever has turned out to be some rows of it.
    """

    stacked: bool
    parts: dict[int, tuple[Tensor, Part]]

    def begin(self, use: Use, examples: int, counted: int | None) -> bool:
        """A layer is called with so many examples; whether to listen."""

    def brings_gradient(self, use: Use) -> bool:
        """Whether heard() gives the weight's gradient."""

    def heard(self, use: Use, x: Tensor, grad: Tensor, extras: Sequence[Tensor]) -> Tensor | None:
        """Inputs and gradient ``[K, B, …]`` of a use; the weight's ``[K, *shape]``, if it brings it."""

    def refuse(self, names: Sequence[str], reason: str) -> None:
        """Parameters are used in a way that nothing can be collected from."""
