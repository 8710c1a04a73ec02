"""Output of commands: tables, and one sentence for an error, a warning or an interruption."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer.core import TyperCommand, TyperGroup

_EXPECTED = (ValueError, OSError, FloatingPointError, ImportError)


class OneSentence(TyperGroup):
    """Shows an error as one red sentence and exits with 2; shows a warning as one yellow sentence."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command; POSTERITY_TRACEBACK=1 shows where an error came from."""
        try:
            with warnings.catch_warnings():  # restores showwarning too
                warnings.showwarning = _warn
                return super().invoke(ctx)
        except Exception as error:
            if os.environ.get("POSTERITY_TRACEBACK") or not _expected(error):
                raise
            _say(sentence(error), "red")
            raise typer.Exit(2) from error


class Lists(TyperCommand):
    """Takes several values after one option: ``--seeds 0 1 2``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Repeat the name of a list option before each of its values."""
        several = {name for each in self.params if getattr(each, "multiple", False) for name in each.opts}
        spread: list[str] = []
        option: str | None = None
        for word in args:
            if word.startswith("--"):
                option = word if word in several else None
            elif option is not None and spread[-1] != option:
                spread.append(option)
            spread.append(word)
        return super().parse_args(ctx, spread)


@contextmanager
def stoppable(how: str) -> Iterator[None]:
    """After Ctrl-C, show how to resume."""
    try:
        yield
    except KeyboardInterrupt:
        _say(f"stopped: {how}", "yellow")
        raise typer.Exit(130) from None


def _say(sentence: str, style: str) -> None:
    Console(stderr=True).print(Text(sentence, style=style), soft_wrap=True)


def _warn(message: Warning | str, *where: Any, **more: Any) -> None:
    """A replacement for warnings.showwarning without path and line of code."""
    _say(" ".join(str(message).split()), "yellow")


def sentence(error: Exception) -> str:
    """The message for an error, with what to do added to Python's errors about files and modules."""
    if isinstance(error, OSError) and error.strerror:
        if error.filename is None:
            return f"the disk cannot be used ({error.strerror}): choose another path"
        return f"{error.filename} cannot be used ({error.strerror}): choose another path"
    if isinstance(error, ModuleNotFoundError) and error.name:
        return f"the command line needs {error.name}: pip install 'posterity[lab]'"
    return str(error)


def _expected(error: Exception) -> bool:
    files = sys.modules.get("posterity_lab.files")  # importing it here would import torch
    return isinstance(error, _EXPECTED if files is None else (*_EXPECTED, files.DataError))


def table(title: str, rows: dict[str, dict[str, float]]) -> Table:
    """A table of numbers by row and column."""
    made = Table("", *next(iter(rows.values())), title=title)
    for name, values in rows.items():
        made.add_row(name, *(f"{value:.4f}" for value in values.values()))
    return made


def counted(number: int, thing: str) -> str:
    """A number and its noun, in the plural if needed."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"
