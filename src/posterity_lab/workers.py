"""Processes that work for this one, and end with it."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context, parent_process
from multiprocessing.connection import wait
from threading import Thread


def pool(count: int, begin: Callable[[], object] = int) -> ProcessPoolExecutor:
    """So many spawned processes, which end when this one does, even if it is killed.

    Spawned, not forked: a fork copies torch's thread pools in an undefined state.

    Args:
        count: How many.
        begin: What each does first.

    Example:
        >>> with pool(1) as workers:
        ...     workers.submit(abs, -1).result()
        1
    """
    return ProcessPoolExecutor(count, get_context("spawn"), _begin, (begin,))


def _begin(begin: Callable[[], object]) -> None:
    Thread(target=_end_with_parent, daemon=True).start()
    begin()


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)  # not sys.exit, which would end this thread alone
