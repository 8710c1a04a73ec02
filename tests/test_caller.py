"""Warnings name the user's own line."""

from __future__ import annotations

import _thread
import ast
import threading
import warnings
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import posterity
from posterity.caller import warn

FILES = sorted(Path(posterity.__file__).parent.rglob("*.py"))


def where(run: Callable[[], object]) -> list[tuple[str, int]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [(each.filename, each.lineno) for each in caught]


CODE = """
@contextmanager
def context():
    yield
    warn("over")

def hook(*args):
    warn("hook")

def thread(at_end):
    try:
        warn("alone")
    finally:
        at_end()
"""
# As if the library had written it.
LIBRARY: dict[str, Any] = {"warn": warn, "contextmanager": contextmanager}
exec(compile(CODE, str(Path(posterity.__file__).with_name("stand_in.py")), "exec"), LIBRARY)


def test_a_line_of_the_user_is_named_through_torch() -> None:
    layer = nn.Linear(2, 2)
    layer.register_forward_hook(LIBRARY["hook"])

    def run() -> None:
        layer(torch.zeros(1, 2))

    assert where(run) == [(__file__, run.__code__.co_firstlineno + 1)]


def test_the_end_of_a_with_statement_is_a_line_of_the_user() -> None:
    def run() -> None:
        with LIBRARY["context"]():
            pass

    assert where(run) == [(__file__, run.__code__.co_firstlineno + 1)]


def test_a_thread_without_lines_of_the_user_has_a_warning_too() -> None:
    def run() -> None:
        thread = threading.Thread(target=warn, args=("alone",))
        thread.start()
        thread.join()

    assert [Path(name).name for name, _ in where(run)] == ["threading.py"]

    def run_below() -> None:  # as the threads of autograd do
        lock = threading.Lock()
        lock.acquire()
        _thread.start_new_thread(LIBRARY["thread"], (lock.release,))
        assert lock.acquire(timeout=60)

    assert [Path(name).name for name, _ in where(run_below)] == ["stand_in.py"]


def test_a_line_in_no_module_has_a_warning_too() -> None:
    assert where(lambda: exec(compile("warn('alone')", "<input>", "exec"), {"warn": warn})) == [
        ("<input>", 1)
    ]


def test_repeated_warning_of_a_line_is_shown_once() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            warn("again")
    assert len(caught) == 1


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_library_warns_in_this_way_alone(path: Path) -> None:
    others = [
        node.lineno
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in ("warn", "warn_explicit")
    ]
    assert not others or path.name == "caller.py"
