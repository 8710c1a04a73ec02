"""One launch of two processes and one of four, which all tests look at."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import posterity
from distributed import sharded
from distributed.runs import RULES, STEPS, batches, loss_of, model

HERE = Path(__file__).parent
SAVED = ("ivon", "ivon-seldom", "vogn", "noisy-kfac")


def together(folder: Path, world: int, *cases: str) -> list[dict[str, Any]]:
    """What every process has learned."""
    (folder / "store").unlink(missing_ok=True)
    line = [sys.executable, str(HERE / "runs.py"), str(folder)]
    paths = os.pathsep.join([str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    started = [
        subprocess.Popen(
            [*line, str(rank), str(world), *cases],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": paths},
        )
        for rank in range(world)
    ]
    said = [each.communicate(timeout=240)[1] for each in started]
    assert not any(each.returncode for each in started), "\n".join(said)
    return [torch.load(folder / f"{rank}.pt") for rank in range(world)]


@pytest.fixture(scope="session")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("two")
    for rule in SAVED:
        torch.save(begun(rule), folder / f"one {rule}.pt")
    return [each | {"folder": folder} for each in together(folder, 2)]


@pytest.fixture(scope="session")
def four(tmp_path_factory: pytest.TempPathFactory, two: list[dict[str, Any]]) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("four")
    for way in ("mesh", "ddp"):
        for rule in SAVED:
            torch.save(
                through_one(rule, two[0][f"halves {way} {rule}"]["saved"]), folder / f"two {way} {rule}.pt"
            )
    for rule in sharded.SHARDED:
        sharded.through_one(rule, two[0]["folder"], folder)
    return together(folder, 4)


def begun(rule: str) -> dict[str, Any]:
    """What one process has after the first half of a run."""
    net = model()
    opt = RULES[rule](net, mc_samples=1, seed=7)
    step = posterity.compile_step(net, loss_of, opt)
    for x, y in list(batches())[: STEPS // 2]:
        step(x, y)
    return {"model": net.state_dict(), "opt": opt.state_dict()}


def through_one(rule: str, saved: dict[str, Any]) -> dict[str, Any]:
    """The same, loaded and saved again by one process."""
    net = model()
    opt = RULES[rule](net, mc_samples=1, seed=1)
    net.load_state_dict(saved["model"])
    opt.load_state_dict(saved["opt"])
    return {"model": net.state_dict(), "opt": opt.state_dict()}
