"""What collectors give, and what they raise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, final

from torch import Tensor


class Uncollected(RuntimeError):
    """A parameter is used in a way that nothing can be collected from.

    Attributes:
        reason: Which, and how.

    Example:
        >>> Uncollected("'weight' is used twice").reason
        "'weight' is used twice"
    """

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(
            f"{reason}, from which no single examples' gradients can be collected: do not watch it, or see "
            "curvature.vmap_squares"
        )


@final
class NothingCollected(RuntimeError):
    """No layer of a watched parameter reported anything inside a collector's context.

    Example:
        >>> issubclass(NothingCollected, RuntimeError)
        True
    """


@final
@dataclass(frozen=True)
class Kronecker:
    """The factors of one block, see :class:`Factors`.

    Attributes:
        weight: Its parameter's name.
        bias: Its bias's name, if that is part of the block.
        rows: Which rows of both, if not all.
        A: Of inputs, ``[I, I]``, or ``[I + 1, I + 1]`` with a bias.
        S: Of gradients of the outputs, ``[O, O]``.
        examples: Behind A. A layer may see some of the examples only; the others have no part in A, and none
            but zeros in S.
    """

    weight: str
    bias: str | None
    rows: tuple[int, int] | None
    A: Tensor
    S: Tensor
    examples: float = 1.0


class Curvature(NamedTuple):
    """Means over examples, by the name of a parameter.

    Attributes:
        kronecker: Blocks that have factors.
        diagonal: The other parameters.
    """

    kronecker: dict[str, Kronecker]
    diagonal: dict[str, Tensor]
