"""Break the library in one place at a time, and see whether its tests notice: ``make mutate``.

Every site of `sites.SITES` is a wrong line in place of a right one, with the tests that must then fail. It is
tried in a copy of ``src`` in which nothing else is changed; the working tree is left alone. Each trial is a
fork of one process that has imported torch already. The exit status is 0 if every mutation was killed by a
test that passes without one.
"""

from __future__ import annotations

import argparse
import compileall
import multiprocessing
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from importlib import import_module
from importlib.util import cache_from_source
from multiprocessing.connection import wait
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))  # as pytest has it

from mutation.sites import SITES, Site  # noqa: E402

# Seconds for the tests of a site: a mutation may make a loop endless.
_LIMIT = 300.0
# pytest's exit status; with others no test has run to its end.
_OUTCOMES = {0: "survived", 1: "killed"}
_FAILED = re.compile(r"^FAILED tests/(\S+)", re.MULTILINE)
# What most tests import and no mutation changes.
_COMMON = ("numpy", "pytest", "rich.console", "sklearn.model_selection", "torch.func", "typer.testing")
_COMMON += ("torchmetrics.functional.classification", "safetensors.torch", "torch._dynamo")


class Found(NamedTuple):
    """What became of a site.

    Attributes:
        outcome: ``"killed"``, ``"survived"``, ``"stale"``, ``"slow"`` or ``"broken"``.
        why: The test that failed, or the reason why nothing can be said.
    """

    outcome: str
    why: str = ""


def stale(site: Site) -> str | None:
    """Why a site cannot be mutated, if the source or the tests have changed since it was written."""
    path = ROOT / "src" / site.file
    if not path.is_file():
        return f"there is no src/{site.file}"
    if (count := path.read_text(encoding="utf-8").count(site.right)) != 1:
        return f"{site.right!r} is in src/{site.file} {count} times, not once"
    for test in site.tests:
        file, _, name = test.partition("::")
        path = ROOT / "tests" / file
        if not path.is_file() or (name and f"def {name}(" not in path.read_text(encoding="utf-8")):
            return f"there is no tests/{test}"
    return None


class Trial:
    """Tests that run in a process of their own, on a source with one mutation, or none.

    Args:
        pristine: The source without one.
        site: The mutation.
        tests: To run up to the first that fails.
    """

    def __init__(self, pristine: Path, site: Site | None, tests: Iterable[str]) -> None:
        self.site, self._start = site, time.perf_counter()
        self._folder = tempfile.TemporaryDirectory(prefix="posterity-mutation-")
        self._place = Path(self._folder.name)
        for each in ROOT.iterdir():
            if each.name != "src" and not each.name.startswith("."):
                (self._place / each.name).symlink_to(each)
        shutil.copytree(pristine, self._place / "src")  # with times, by which Python knows compiled files
        if site is not None:
            path = self._place / "src" / site.file
            text = path.read_text(encoding="utf-8")
            path.write_text(text.replace(site.right, site.wrong), encoding="utf-8")
            # Of an edit in the same second that leaves the size as it was, Python would not know.
            Path(cache_from_source(str(path))).unlink(missing_ok=True)
        (self._place / ".output").touch()
        fork = multiprocessing.get_context("fork")
        self.process = fork.Process(target=_child, args=(self._place, [f"tests/{test}" for test in tests]))
        self.process.start()

    @property
    def seconds(self) -> float:
        """Since it began."""
        return time.perf_counter() - self._start

    def end(self) -> Found:
        """What the tests say; a process that still runs is ended."""
        late = self.process.is_alive()
        if late:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid or 0, signal.SIGKILL)
        self.process.join()
        output = (self._place / ".output").read_text(encoding="utf-8", errors="replace")
        self._folder.cleanup()
        if late:
            return Found("slow", f"no test failed in {_LIMIT:g} s")
        outcome = _OUTCOMES.get(self.process.exitcode or 0, "broken")
        failed = _FAILED.search(output)
        return Found(outcome, failed[1] if failed else output[-2000:] if outcome == "broken" else "")


def _child(place: Path, tests: list[str]) -> None:
    """Run tests in a tree, in a fork."""
    os.setsid()  # with all processes that tests start it can be ended at once
    sys.stdout = sys.stderr = output = (place / ".output").open("w")
    for stream in (1, 2):
        os.dup2(output.fileno(), stream)
    os.chdir(place)
    os.environ["PYTHONPATH"] = str(place / "src")
    sys.path.insert(0, str(place / "src"))
    import pytest

    raise SystemExit(pytest.main(["-x", "-q", "-rf", "--tb=short", "-p", "no:cacheprovider", *tests]))


def trials(pristine: Path, sites: Sequence[Site], jobs: int) -> Iterator[tuple[Site | None, Found, float]]:
    """What becomes of every site, and without a mutation of all their tests, as they end."""
    for site in sites:
        if reason := stale(site):
            yield site, Found("stale", reason), 0.0
    fresh = [site for site in sites if not stale(site)]
    tests = dict.fromkeys(test for site in fresh for test in site.tests)
    waiting = deque[tuple[Site | None, Iterable[str]]]([(None, tests)] if fresh else [])
    waiting.extend((site, site.tests) for site in fresh)
    running: list[Trial] = []
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                running.append(Trial(pristine, *waiting.popleft()))
            wait([trial.process.sentinel for trial in running], timeout=1.0)
            for trial in [*running]:
                overdue = trial.site is not None and trial.seconds > _LIMIT
                if overdue or not trial.process.is_alive():
                    running.remove(trial)
                    seconds = trial.seconds
                    yield trial.site, trial.end(), seconds
    finally:
        for trial in running:  # after Ctrl-C
            trial.end()


def run(sites: Sequence[Site], jobs: int) -> bool:
    """Mutate the sites, print what becomes of each, and say whether all were killed."""
    start, counts, failing = time.perf_counter(), Counter[str](), ""
    with tempfile.TemporaryDirectory(prefix="posterity-mutation-") as folder:
        pristine = Path(folder) / "src"
        shutil.copytree(ROOT / "src", pristine, ignore=shutil.ignore_patterns("__pycache__"))
        compileall.compile_dir(pristine, quiet=1)
        for site, found, seconds in trials(pristine, sites, jobs):
            if site is not None:
                counts[found.outcome] += 1
                print(f"{found.outcome:8} {seconds:5.1f} s  {site.name}; {found.why}", flush=True)
            elif found.outcome != "survived":
                failing = found.why
    numbers = ", ".join(
        f"{counts[kind]} {kind}" for kind in ("killed", "survived", "stale", "slow", "broken")
    )
    print(f"{len(sites)} sites: {numbers}; {time.perf_counter() - start:.0f} s")
    if failing:
        print(f"without a mutation tests fail too, so that killed means nothing: {failing}")
    return counts["killed"] == len(sites) and not failing


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", default=[""], help="texts in names of sites; all if not given")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="sites at a time")
    asked = parser.parse_args(arguments)
    if asked.jobs < 1:
        parser.error(f"--jobs must be at least 1, not {asked.jobs}")
    sites = [site for site in SITES if any(text in site.name for text in asked.only)]
    if not sites:
        parser.error(f"no site has a name with {' or '.join(map(repr, asked.only))} in it")
    return 0 if run(sites, asked.jobs) else 1


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"  # a fork of a process with threads would lack these
    for name in _COMMON:
        import_module(name)
    raise SystemExit(main())
