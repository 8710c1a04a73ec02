"""Odd values, drawn from a seed: what users pass by mistake, and what they should not."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

T = TypeVar("T")
_DTYPES = [torch.float32, torch.float32, torch.float64, torch.float16, torch.bfloat16]
_ODD_DTYPES = [torch.int64, torch.bool, torch.complex64, torch.uint8]
_SHAPES: list[tuple[int, ...]] = [
    (),
    (0,),
    (1,),
    (4,),
    (5,),
    (0, 3),
    (1, 3),
    (4, 3),
    (4, 2),
    (5, 7),
    (2, 4, 3),
    (3, 1, 1, 1),
]


class Draw(random.Random):
    """A source of odd values, which remembers whether it gave one that is not a finite number."""

    clean = True

    def one(self, values: Sequence[T]) -> T:
        """One of some values."""
        return self.choice(values)

    def number(self) -> Any:
        """What a user may pass for a number."""
        ordinary = [0.5, 1.0, 0.1, 2, 1, 0.9, 1e-3, 10.0]
        edge = [0, -1, -0.5, 1e-30, 1e30, 1e38, 1e-45, 1e300, 1e-300, 10**30, True, False]
        wild = [math.nan, math.inf, -math.inf]
        return self._seen(self._of(ordinary, edge, wild, self._things))

    def whole(self) -> Any:
        """What a user may pass for a small count."""
        return self._seen(
            self._of([1, 2, 3, 4, 16], [0, -1, 1.5, 2.0, True, -(10**20)], [math.nan, math.inf], self._things)
        )

    def text(self, *known: str) -> Any:
        """What a user may pass for one of some words."""
        return self._of(list(known), ["", known[0].upper(), "x" * 50], [None], self._things)

    def _of(self, ordinary: list[Any], edge: list[Any], wild: list[Any], things: Any) -> Any:
        kind = self.random()
        return (
            self.one(ordinary if kind < 0.35 else edge if kind < 0.65 else wild)
            if kind < 0.75
            else self.one(things())
        )

    def _things(self) -> list[Any]:
        return [
            *(None, "x", "0.1", b"", [], [1, 2], (0.9,), {}, 1 + 2j, object(), len, int, Ellipsis),
            *(
                Decimal("0.5"),
                Fraction(1, 3),
                np.float64(0.1),
                np.int64(3),
                np.float32("nan"),
                np.bool_(True),
            ),
            *(
                np.array(0.1),
                np.array([1.0, 2.0]),
                np.array("x"),
                torch.tensor(0.1),
                torch.tensor([0.1, 0.2]),
            ),
            *(
                torch.tensor(math.nan),
                torch.tensor(3),
                torch.empty(0),
                torch.tensor(1.0, device="meta"),
                nn.ReLU(),
            ),
        ]

    def tensor(self, *like: int, odd: float = 0.5) -> Any:
        """A tensor, most often of a given shape, of odd type, layout, values or shape otherwise."""
        shape = like if like and self.random() > odd else self.one(_SHAPES)
        dtype = self.one(_DTYPES if self.random() > 0.5 * odd else _ODD_DTYPES)
        generator = torch.Generator().manual_seed(self.randrange(1 << 30))
        value = torch.randn(shape, generator=generator).to(dtype)
        if self.random() > odd:
            return value
        kind = self.randrange(12)
        if kind == 0 and value.numel() and value.is_floating_point():
            value.view(-1)[0] = self.one([math.nan, math.inf, -math.inf])
        elif kind == 1:
            value = value * 1e30 if dtype in (torch.float32, torch.float64) else value
        elif kind == 2:
            value = value.to_sparse() if value.dim() else value
        elif kind == 3:
            value = value.to("meta")
        elif kind == 4 and value.dim() > 1:
            value = value.transpose(0, -1)
        elif kind == 5 and dtype != torch.bfloat16:
            value = value.numpy()
        elif kind == 6 and value.is_floating_point():
            value.requires_grad_()
        elif kind == 7:
            value = value.tolist()
        elif kind == 8:
            with torch.inference_mode():
                value = value.clone()
        elif kind == 9 and value.is_floating_point():
            value = value * 0.0
        elif kind == 10:
            value = self.one(self._things())
        return self._seen(value)

    def labels(self, count: int = 4, classes: int = 2) -> Any:
        """Labels, or what is none."""
        generator = torch.Generator().manual_seed(self.randrange(1 << 30))
        good = torch.randint(0, classes, (count,), generator=generator)
        kind = self.randrange(10)
        odd = [
            good[:-1],
            good + classes,
            good - 5,
            good.float(),
            good[:, None],
            good.bool(),
            good.numpy(),
            good.tolist(),
        ]
        return good if kind < 5 else self.tensor(count) if kind < 7 else self.one(odd)

    def some(self, make: dict[str, Any], most: int = 2) -> dict[str, Any]:
        """Odd values for some of the keywords, given what draws each."""
        names = self.sample(sorted(make), min(len(make), self.randint(0, most)))
        return {name: make[name]() for name in names}

    def _seen(self, value: Any) -> Any:
        self.clean = self.clean and finite(value)
        return value


def finite(value: Any) -> bool:
    """Whether a value holds no number that is not finite, nor one whose square would not be."""
    try:
        if isinstance(value, Tensor):
            dense = value.to_dense() if value.is_sparse else value
            return value.is_meta or not dense.is_floating_point() or bool((dense.abs() < 1e15).all())
        array = np.asarray(value, dtype=float)
        return bool((np.abs(array) < 1e15).all())
    except (TypeError, ValueError, OverflowError):
        return True
