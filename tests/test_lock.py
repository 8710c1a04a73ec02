"""The lock files of the set-up: complete, with hashes, and without what must not be in them."""

import re
import tomllib
from itertools import pairwise

import pytest

from posterity_lab import bench

ROOT = bench.FOLDER.parent
LOCKS = sorted((ROOT / "requirements").glob("*.txt"))
pytestmark = pytest.mark.skipif(not LOCKS, reason="needs a checkout")


def packages() -> dict[str, str]:
    text = "".join(path.read_text() for path in LOCKS)
    return dict(re.findall(r"^([a-z0-9-]+)==(\S+) \\$", text, re.MULTILINE))


def test_every_package_has_hashes_and_no_registry_is_named() -> None:
    for path in LOCKS:
        _, *lines = path.read_text().splitlines()
        assert lines
        for before, line in pairwise(lines):
            last = not before.endswith("\\")
            assert re.fullmatch(
                r"[a-z0-9-]+==\S+ \\" if last else r"    --hash=sha256:[0-9a-f]{64}( \\)?", line
            )
        assert "://" not in path.read_text()


def test_what_the_tests_need_is_locked() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras, found = project["optional-dependencies"], packages()

    def needed(entries: list[str]) -> set[str]:
        names = set()
        for entry in entries:
            name, inner = re.match(r"([\w.-]+)(?:\[([^\]]*)\])?", entry).groups()
            if name == "posterity":
                for extra in inner.split(","):
                    names |= needed(extras[extra])
            elif ";" not in entry:  # else for some systems only
                names.add(re.sub(r"[-_.]+", "-", name).lower())
        return names

    assert needed([*project["dependencies"], *extras["test"]]) <= found.keys()


def test_the_gpl_peer_comes_with_the_extra_bench_alone() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert [name for name, entries in extras.items() if any("ivon" in each for each in entries)] == ["bench"]
    assert [name for name, entries in extras.items() if any("bench" in each for each in entries)] == []
    assert not [name for name in packages() if "ivon" in name or "backpack" in name]
