"""Break the library in one place at a time, and see whether its tests notice: ``make mutate``.

Every site of `sites.SITES` is a wrong line in place of a right one, with the tests that must then fail. It
is tried in a copy of ``src`` in which nothing else is changed; the working tree is left alone. The exit
status is 0 if every mutation was killed by a test that passes without one.
"""

from __future__ import annotations

import argparse
import compileall
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from importlib.util import cache_from_source
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))  # as pytest has it

from mutation.sites import SITES, Site  # noqa: E402

# Seconds for the tests of a site: a mutation may make a loop endless.
_LIMIT = 300.0
_OUTCOMES = {0: "survived", 1: "killed"}  # pytest's exit status; with others no test has run to its end
_FAILED = re.compile(r"^FAILED tests/(\S+)", re.MULTILINE)


class Found(NamedTuple):
    """What became of a site: ``"killed"`` by a test, ``"survived"``, ``"stale"``, ``"slow"`` or ``"broken"``.

    Attributes:
        outcome: One of these words.
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


@contextmanager
def tree(pristine: Path) -> Iterator[Path]:
    """A checkout in which only ``src`` is a copy: all else is linked to."""
    with tempfile.TemporaryDirectory(prefix="posterity-mutation-") as folder:
        place = Path(folder)
        for each in ROOT.iterdir():
            if each.name != "src" and not each.name.startswith("."):
                (place / each.name).symlink_to(each)
        shutil.copytree(pristine, place / "src")  # with times, by which Python knows compiled files
        yield place


def judged(place: Path, tests: Iterable[str], limit: float | None) -> Found:
    """What some tests say of the source of a tree, up to the first that fails."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-rf", "--tb=short", "-p", "no:cacheprovider"]
    try:
        done = subprocess.run(
            [*command, *(f"tests/{test}" for test in tests)],
            cwd=place,
            env={**os.environ, "PYTHONPATH": str(place / "src"), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=limit,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Found("slow", f"no test failed in {limit:g} s")
    outcome = _OUTCOMES.get(done.returncode, "broken")
    failed = _FAILED.search(done.stdout)
    if outcome == "killed" and failed:
        return Found(outcome, failed[1])
    return Found(outcome, (done.stdout + done.stderr)[-2000:] if outcome == "broken" else "")


def mutated(pristine: Path, site: Site) -> tuple[Site, Found, float]:
    """A site, what its tests made of the mutation, and how long they took."""
    start = time.perf_counter()
    if reason := stale(site):
        return site, Found("stale", reason), 0.0
    with tree(pristine) as place:
        path = place / "src" / site.file
        path.write_text(path.read_text(encoding="utf-8").replace(site.right, site.wrong), encoding="utf-8")
        # Of an edit in the same second that leaves the size as it was, Python would not know.
        Path(cache_from_source(str(path))).unlink(missing_ok=True)
        return site, judged(place, site.tests, _LIMIT), time.perf_counter() - start


def run(sites: Sequence[Site], jobs: int) -> bool:
    """Mutate the sites, print what becomes of each, and say whether all were killed."""
    start, counts = time.perf_counter(), Counter[str]()
    with tempfile.TemporaryDirectory(prefix="posterity-mutation-") as folder:
        pristine = Path(folder) / "src"
        shutil.copytree(ROOT / "src", pristine, ignore=shutil.ignore_patterns("__pycache__"))
        compileall.compile_dir(pristine, quiet=1)
        tests = dict.fromkeys(test for site in sites if not stale(site) for test in site.tests)
        with tree(pristine) as place, ThreadPoolExecutor(jobs) as pool:  # each waits for a process of its own
            unchanged = pool.submit(judged, place, tests, limit=None) if tests else None
            for site, found, seconds in pool.map(partial(mutated, pristine), sites):
                counts[found.outcome] += 1
                print(f"{found.outcome:8} {seconds:5.1f} s  {site.name}; {found.why}", flush=True)
            before = Found("survived") if unchanged is None else unchanged.result()
    numbers = ", ".join(
        f"{counts[kind]} {kind}" for kind in ("killed", "survived", "stale", "slow", "broken")
    )
    print(f"{len(sites)} sites: {numbers}; {time.perf_counter() - start:.0f} s")
    if before.outcome != "survived":
        print(f"without a mutation, tests fail too, so that killed means nothing: {before.why}")
    return counts["killed"] == len(sites) and before.outcome == "survived"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", default=[""], help="texts in names of sites; all if not given")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="sites at a time")
    asked = parser.parse_args(arguments)
    sites = [site for site in SITES if any(text in site.name for text in asked.only)]
    if not sites:
        parser.error(f"no site has a name with {' or '.join(map(repr, asked.only))} in it")
    return 0 if run(sites, asked.jobs) else 1


if __name__ == "__main__":
    raise SystemExit(main())
