"""What child processes of tests run: a child imports this file by name, as it cannot a test file."""

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Sequence
from multiprocessing.context import ForkServerContext
from pathlib import Path

import torch

from posterity_lab import disk, runs
from posterity_lab.cli import app
from posterity_lab.config import Config


def forked() -> ForkServerContext:
    """Processes that begin with everything imported."""
    context = multiprocessing.get_context("forkserver")
    modules = ("posterity_lab.cli", "posterity_lab.runs", "sklearn.datasets", "torchmetrics", "torch._dynamo")
    context.set_forkserver_preload([*modules, "sklearn.model_selection"])
    return context


def killed_at_the_first_rename(config: Config, folder: Path) -> None:
    disk.os.replace = lambda *paths: os.kill(os.getpid(), signal.SIGKILL)
    runs.train(config, folder)


def at_once(config: Config, folder: Path, start: float) -> None:
    time.sleep(max(0.0, start - time.time()))
    runs.train(config, folder)


def command(words: Sequence[str], start: float = 0.0) -> None:
    """``posterity WORDS`` at a time, in silence."""
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    time.sleep(max(0.0, start - time.time()))
    app(list(words))


def killed_before(words: Sequence[str], folder: Path, number: int) -> None:
    """``posterity WORDS``, killed before its so manyth change to files of a folder."""
    seen = 0

    def count(event: str, values: tuple[object, ...]) -> None:
        nonlocal seen
        changes = event in ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate")
        if event == "open":
            changes = isinstance(values[2], int) and bool(values[2] & (os.O_WRONLY | os.O_RDWR))
        if changes and isinstance(values[0], str | os.PathLike) and str(values[0]).startswith(str(folder)):
            seen += 1
            if seen == number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
    command(words)


def launched(rank: int, world: int, port: int, words: Sequence[str], said: Path, **more: str) -> None:
    """``posterity WORDS`` as torchrun starts it; what it says goes to a file."""
    handle = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "localhost"}
    own |= {"MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "test", **more}
    os.environ.update({name: str(value) for name, value in own.items()})
    dies_in = os.environ.get("DIES_IN_EPOCH")
    if dies_in is not None and rank == world - 1:
        epoch = runs._epoch

        def dying(method: object, training: object, config: Config, number: int, *rest: object) -> float:
            if number == int(dies_in):
                os.kill(os.getpid(), signal.SIGKILL)
            return epoch(method, training, config, number, *rest)

        runs._epoch = dying
    torch.set_num_threads(1)
    app(list(words))
