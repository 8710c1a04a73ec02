"""Processes that work for this one, and end with it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import active_children, get_context, parent_process
from multiprocessing.connection import wait
from threading import Thread


@contextmanager
def pool(count: int, begin: Callable[[], object] = int) -> Iterator[ProcessPoolExecutor]:
    """So many spawned processes, which end when this one does, even if it is killed.

    After an error what waits is dropped, and what runs comes to its end; after Ctrl-C that ends at once.

    Spawned, not forked: a fork copies torch's thread pools in an undefined state.

    Args:
        count: How many.
        begin: What each does first.

    Example:
        >>> with pool(1) as workers:
        ...     workers.submit(abs, -1).result()
        1
    """
    others = set(active_children())
    with ProcessPoolExecutor(count, get_context("spawn"), _begin, (begin,)) as workers:
        try:
            yield workers
        except BaseException as error:
            workers.shutdown(wait=False, cancel_futures=True)
            if not isinstance(error, Exception):
                for each in set(active_children()) - others:
                    each.terminate()
            raise


def _begin(begin: Callable[[], object]) -> None:
    # Ctrl-C reaches all processes: as an exception it would end a worker's unit, and the next would begin.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    Thread(target=_end_with_parent, daemon=True).start()
    begin()


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)  # not sys.exit, which would end this thread alone
