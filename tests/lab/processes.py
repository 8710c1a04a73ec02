"""What child processes of tests run: a child imports this file by name, as it cannot a test file."""

import os
import signal
import time
from pathlib import Path

from posterity_lab import disk, runs
from posterity_lab.config import Config


def killed_at_the_first_rename(config: Config, folder: Path) -> None:
    disk.os.replace = lambda *paths: os.kill(os.getpid(), signal.SIGKILL)
    runs.train(config, folder)


def at_once(config: Config, folder: Path, start: float) -> None:
    time.sleep(max(0.0, start - time.time()))
    runs.train(config, folder)
