"""Markdown tables, and numbers in their cells."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import mean, stdev


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    return "".join(f"| {' | '.join(row)} |\n" for row in [head, ["---"] * len(head), *rows])


def spread(values: Iterable[float], digits: int, scale: float = 1.0) -> str:
    """A mean, with the standard deviation over seeds if there are several: "1.75 ± 0.07"."""
    found = [scale * value for value in values]
    text = f"{mean(found):.{digits}f}"
    return f"{text} ± {stdev(found):.{digits}f}" if len(found) > 1 else text
