"""Which source ran: a digest of its files, and the commit of the project's own checkout that has them.

The digest is over pairs of a path and git's id of the content, so that a commit's digest needs no checkout.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import posterity

_PACKAGES = (Path(posterity.__file__).parent, Path(__file__).parent)
_ROOT = Path(__file__).parents[2]
_SCRIPTS = "benchmarks"
_SUFFIXES = (".py", ".toml")
# No hook, monitor or setting of a repository may run a program.
_GIT = ("git", "-c", "core.fsmonitor=false", "-c", f"core.hooksPath={os.devnull}", "--no-pager")


def blob(content: bytes) -> str:
    """Git's id of a file's content.

    Example:
        >>> blob(b"")
        'e69de29bb2d1d6434b8b29ae775ad8c2e48c5391'
    """
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def digest_of(files: Mapping[str, str]) -> str:
    """The digest of some files, from their paths in the checkout and git's ids of them.

    Example:
        >>> digest_of({"src/a.py": blob(b""), "src/b.py": blob(b"")})[:12]
        'd0c2919936d3'
        >>> digest_of({"src/b.py": blob(b""), "src/a.py": blob(b"")})[:12]
        'd0c2919936d3'
    """
    lines = "".join(f"{path} {files[path]}\n" for path in sorted(files))
    return hashlib.sha256(lines.encode()).hexdigest()


def files_of(package: Path) -> dict[str, str]:
    """The source files of a package, by the paths that they have in a checkout."""
    return {
        f"src/{package.name}/{path.relative_to(package).as_posix()}": blob(path.read_bytes())
        for path in package.rglob("*")
        if path.suffix in _SUFFIXES
    }


# Read when this is first imported: a run may outlast an edit of the source.
_FILES = {path: each for package in _PACKAGES for path, each in files_of(package).items()}


def digest() -> str:
    """Of the packages ``posterity`` and ``posterity_lab`` and of what Python was started with.

    A benchmark counts with all scripts of its folder, which import each other. Any other script counts too,
    so that its digest is that of no commit.

    Example:
        >>> len(digest())
        64
    """
    return digest_of(_FILES | _script(Path(sys.argv[0])))


def commits() -> Mapping[str, str]:
    """For every digest in the history of the project's own checkout, the first commit that has it.

    Empty outside a checkout; of a repository that merely surrounds the packages nothing is read.

    Example:
        >>> commits().get("of no commit") is None
        True
    """
    return _commits(_ROOT)


def named(environment: Mapping[str, Any]) -> str:
    """What a page says of the source of a record.

    Example:
        >>> named({"source": "of no commit"})
        'uncommitted'
        >>> named({"commit": "0123456789abcdef-dirty", "reconstructed": ["commit"]})
        'commit 0123456789ab-dirty (reconstructed)'
    """
    if "source" in environment:
        commit = commits().get(environment["source"])
        return "uncommitted" if commit is None else f"commit {commit[:12]}"
    return recorded(environment)


def recorded(environment: Mapping[str, Any]) -> str:
    """The same, from the record alone: the digest itself where there is one.

    Example:
        >>> recorded({"source": "0123456789abcdef"})
        'source 0123456789ab'
    """
    if "source" in environment:
        return f"source {environment['source'][:12]}"
    if not environment.get("commit"):
        return "source unknown"
    commit, dirty, _ = environment["commit"].partition("-dirty")
    filled_in = " (reconstructed)" if "commit" in environment.get("reconstructed", ()) else ""
    return f"commit {commit[:12]}{dirty}{filled_in}"


def _script(path: Path) -> dict[str, str]:
    """What Python was started with, where that is neither the command nor in a package."""
    place = path.resolve()
    if path.stem == "posterity" or any(place.is_relative_to(package) for package in _PACKAGES):
        return {}
    if place.parent == _ROOT / _SCRIPTS:
        return {f"{_SCRIPTS}/{each.name}": blob(each.read_bytes()) for each in place.parent.glob("*.py")}
    return {path.name: blob(place.read_bytes()) if place.is_file() else "unknown"}


@cache
def _commits(root: Path) -> dict[str, str]:
    found: dict[str, str] = {}
    if not _ours(root):
        return found
    # All parents of merges: else a branch whose changes were merged away would be left out.
    listed = _git(root, "rev-list", "--reverse", "--full-history", "HEAD", "--", "src", _SCRIPTS)
    for commit in listed.split():
        files = {}
        for entry in _git(root, "ls-tree", "-r", "-z", commit, "src", _SCRIPTS).split("\0"):
            head, _, path = entry.partition("\t")
            if path.endswith(_SUFFIXES):
                files[path] = head.split()[2]
        packages = {path: each for path, each in files.items() if path.startswith("src/")}
        scripts = {path: each for path, each in files.items() if _is_script(path)}
        for one in (packages, packages | scripts):
            found.setdefault(digest_of(one), commit)
    return found


def _is_script(path: str) -> bool:
    return path.startswith(f"{_SCRIPTS}/") and path.count("/") == 1 and path.endswith(".py")


def _ours(root: Path) -> bool:
    """Whether a folder is the top of a checkout of this project, found without asking git."""
    try:
        project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8")).get("project", {})
    except (OSError, ValueError):
        return False
    tracked = f"HEAD:src/posterity_lab/{Path(__file__).name}"
    return (
        project.get("name") == "posterity"
        and (root / ".git").exists()
        and _git(root, "cat-file", "-t", tracked).strip() == "blob"
    )


def _git(root: Path, *command: str) -> str:
    """What git says in the checkout at ``root``, and only there; nothing where it fails."""
    settings = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    settings |= {"GIT_CEILING_DIRECTORIES": str(root.parent), "GIT_OPTIONAL_LOCKS": "0"}
    try:
        done = subprocess.run(
            [*_GIT, "-C", str(root), *command], capture_output=True, env=settings, check=True, timeout=60
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.decode(errors="replace")
