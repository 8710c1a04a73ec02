"""Runs that are killed at any time, and processes that meet in one folder.

``POSTERITY_SLOW=1 pytest tests/lab/test_kills.py -s`` kills often, and prints how often.
"""

import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest

from lab.processes import command, forked, killed_before
from posterity import Factorised
from posterity_lab import record
from posterity_lab.run_files import load

SLOW = bool(os.environ.get("POSTERITY_SLOW"))
EPOCHS = 12
TRAIN = ("train", "--data", "digits", "--net", "mlp-8", "--batch-size", "300", "--eval-samples", "2")
FILES = {
    *("config.json", "environment.json", "metrics.jsonl", "checkpoint.pt", "posterior.safetensors"),
    "looks.jsonl",
}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


def words(folder: Path, epochs: int = EPOCHS, resume: bool = False) -> tuple[str, ...]:
    again = ("--resume",) if resume else ("--epochs", str(epochs))
    return (*TRAIN, *again, "--out", str(folder))


def ended(folder: Path, epochs: int = EPOCHS) -> None:
    """Run a command to its end, going on where there is something to go on from."""
    process = forked().Process(
        target=command, args=(words(folder, epochs, (folder / "config.json").exists()),)
    )
    process.start()
    process.join()
    assert process.exitcode == 0


def readable(folder: Path) -> str:
    """Read whatever is there, as another process may at any time; says what was found."""
    if (folder / "config.json").exists():
        json.loads((folder / "config.json").read_text())
    if (folder / "environment.json").exists():
        assert record.fits(json.loads((folder / "environment.json").read_text()))
    if (folder / "posterior.safetensors").exists():
        Factorised.load(folder / "posterior.safetensors")
        return "with a posterior"
    if (folder / "checkpoint.pt").exists():
        assert load(folder / "checkpoint.pt", "cpu")["epoch"] >= 1
        return "with a checkpoint"
    return "with a config" if (folder / "config.json").exists() else "before its config"


def outcome(folder: Path) -> dict[str, object]:
    """What a run has left, without times."""
    assert {path.name for path in folder.iterdir()} == FILES
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    state = load(folder / "checkpoint.pt", "cpu")
    return {
        "metrics": [{key: value for key, value in line.items() if key != "seconds"} for line in lines],
        "method": record.digest(state["method"]),
        "posterior": record.digest((folder / "posterior.safetensors").read_bytes().hex()),
    }


def epochs_of(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def holds(folder: Path, process: ForkServerProcess) -> bool:
    """Whether a process, not one that was killed before it, has the folder."""
    try:
        return json.loads((folder / "lock").read_text())["pid"] == process.pid
    except (OSError, ValueError):
        return False


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    folder = tmp_path_factory.mktemp("whole") / "run"
    ended(folder)
    return outcome(folder)


def test_runs_killed_at_random_times_end_as_if_they_had_not_been(
    tmp_path: Path, whole: dict[str, object]
) -> None:
    chance, kills, found, reads = random.Random(0), 60 if SLOW else 3, Counter[str](), Counter[str]()

    def begin(folder: Path) -> ForkServerProcess:
        again = (folder / "config.json").exists()
        process = forked().Process(target=command, args=(words(folder, resume=again),))
        process.start()
        return process

    def until(folder: Path, process: ForkServerProcess, epoch: int, seconds: float = 0.0) -> float:
        """Read what is there until so long after an epoch, or after the process has taken the folder."""
        reached = 0.0
        while process.is_alive() and (not reached or time.perf_counter() < reached + seconds):
            if not reached and holds(folder, process) and epochs_of(folder) >= epoch:
                reached = time.perf_counter()
            reads[readable(folder)] += 1
        return reached

    timed = begin(tmp_path / "timed")
    first, last = (until(tmp_path / "timed", timed, epoch) for epoch in (1, EPOCHS))
    timed.join()
    number = 0
    while found.total() < kills:
        folder = tmp_path / f"run{number}"
        number += 1
        for _ in range(chance.randint(1, 4)):
            process = begin(folder)
            until(
                folder, process, chance.randint(0, EPOCHS), chance.uniform(0.0, 2 * (last - first) / EPOCHS)
            )
            process.kill()
            process.join()
            if process.exitcode == -signal.SIGKILL:
                found[readable(folder)] += 1
        ended(folder)
        assert outcome(folder) == whole
    print(f"\n{found.total()} kills in {number} runs, which all end alike: {dict(found)}")
    print(f"{reads.total()} reads meanwhile, none of a torn file: {dict(reads)}")
    assert len(found) == 4 or not SLOW


def test_runs_killed_before_each_file_change_end_like_uninterrupted_runs(tmp_path: Path) -> None:
    ended(tmp_path / "whole", epochs=2)
    expected, found, number = outcome(tmp_path / "whole"), Counter[str](), 1
    while True:
        folder = tmp_path / f"run{number}"
        process = forked().Process(target=killed_before, args=(words(folder, 2), folder, number))
        process.start()
        process.join()
        if process.exitcode != -signal.SIGKILL:
            break
        found[readable(folder)] += 1
        ended(folder, epochs=2)
        assert outcome(folder) == expected
        number += 1 if SLOW else 9
    print(f"\n{found.total()} kills, all ended alike: {dict(found)}")
    assert process.exitcode == 0
    assert len(found) == 4 or not SLOW
    assert found


def test_of_processes_started_at_once_one_trains(tmp_path: Path, whole: dict[str, object]) -> None:
    pairs, exits = 20 if SLOW else 1, Counter[str]()
    for number in range(pairs):
        folder, start = tmp_path / f"run{number}", time.time() + 0.2
        processes = [forked().Process(target=command, args=(words(folder), start)) for _ in range(2)]
        for process in processes:
            process.start()
        while any(process.is_alive() for process in processes):
            readable(folder)
        codes = sorted(process.exitcode for process in processes)
        exits[str(codes)] += 1
        assert codes == [0, 2]
        assert outcome(folder) == whole
    print(f"\n{pairs} pairs, exit codes: {dict(exits)}")
