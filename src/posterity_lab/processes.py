"""Commands that torchrun starts several times: which of these processes this is, and what they do together.

The first writes all files and says what there is to say.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import distributed

from posterity.distributed import World


def launched() -> tuple[int, int]:
    """The number of this process among those that torchrun has started, and how many there are.

    Example:
        >>> launched()
        (0, 1)
    """
    if not distributed.is_available() or not distributed.is_torchelastic_launched():
        return 0, 1
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def restarted() -> bool:
    """Whether torchrun has started this process anew, after a fault.

    Example:
        >>> restarted()
        False
    """
    return launched()[1] > 1 and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


def own_gpu(device: str) -> None:
    """Let ``"cuda"`` be this process's own GPU among those of its machine."""
    if device == "cuda" and launched()[1] > 1:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())


@contextmanager
def together(device: str) -> Iterator[World]:
    """Inside, the processes that torchrun has started know each other.

    Example:
        >>> with together("cpu") as world:
        ...     world.size
        1
    """
    begun = launched()[1] > 1 and not distributed.is_initialized()
    if begun:
        own_gpu(device)
        distributed.init_process_group("nccl" if device.startswith("cuda") else "gloo")
    try:
        yield World(None)
    finally:
        if begun:
            distributed.destroy_process_group()


@contextmanager
def agreed(world: World) -> Iterator[None]:
    """An error inside, in one process, stops all of them; the first that has one raises it.

    Example:
        >>> with agreed(World(None)):
        ...     raise ValueError("no")
        Traceback (most recent call last):
            ...
        ValueError: no
    """
    mine: Exception | None = None
    try:
        yield
    except Exception as error:
        mine = error
    failed = world.gathered(mine is not None)
    if any(failed) and world.rank != failed.index(True):
        raise SystemExit(2)
    if mine is not None:
        raise mine
