"""The digest of the source, the commits that have it, and repositories that are not ours."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from posterity_lab import bench, source

PACKAGES = source._PACKAGES


def git(folder: Path, *words: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", "-C", folder, *who, *words], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def checkout(folder: Path) -> Path:
    """A repository of the project with one commit."""
    for package in PACKAGES:
        shutil.copytree(package, folder / "src" / package.name, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "benchmarks").mkdir()
    (folder / "benchmarks" / "speed.py").write_text("print(1)\n")
    (folder / "pyproject.toml").write_text('[project]\nname = "posterity"\n')
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "All")
    return folder


def packages(folder: Path) -> dict[str, str]:
    return {k: v for each in PACKAGES for k, v in source.files_of(folder / "src" / each.name).items()}


def test_digest_depends_on_content_alone(tmp_path: Path) -> None:
    for place in ("one", "two"):
        for package in PACKAGES:
            shutil.copytree(package, tmp_path / place / "src" / package.name)
    one, two = tmp_path / "one", tmp_path / "two"
    module = two / "src" / "posterity" / "__init__.py"
    (module.parent / "__pycache__").mkdir(exist_ok=True)
    (module.parent / "__pycache__" / "more.pyc").write_bytes(b"x")
    os.utime(module)
    assert packages(one) == packages(two) == source._FILES
    assert "src/posterity/presets.toml" in packages(one)
    module.write_text(module.read_text() + "\n")
    assert source.digest_of(packages(one)) != source.digest_of(packages(two))


def test_digests_are_resolved_to_the_commit_that_has_them(tmp_path: Path) -> None:
    folder = checkout(tmp_path / "checkout")
    first = git(folder, "rev-parse", "HEAD")
    found = source._commits(folder)
    assert found[source.digest_of(packages(folder))] == first
    scripts = {"benchmarks/speed.py": source.blob(b"print(1)\n")}
    assert found[source.digest_of(packages(folder) | scripts)] == first
    source._commits.cache_clear()
    (folder / "notes.md").write_text("more")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "No source")
    assert source._commits(folder)[source.digest_of(packages(folder))] == first
    (folder / "src" / "posterity" / "__init__.py").write_text("# edited\n")
    assert source.digest_of(packages(folder)) not in source._commits(folder)
    source._commits.cache_clear()


def test_records_name_their_commit_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "commits", lambda: {"abc": "0123456789abcdef"})
    assert source.named({"source": "abc"}) == "commit 0123456789ab"
    assert source.named({"source": "abd"}) == "uncommitted"
    assert source.named({"commit": "0123456789abcdef-dirty"}) == "commit 0123456789ab-dirty"
    assert source.named({"commit": None}) == "source unknown"


def test_scripts_count_in_the_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*argv: str) -> str:
        monkeypatch.setattr(sys, "argv", list(argv))
        return source.digest()

    command = started("/usr/bin/posterity", "reproduce")
    assert command == source.digest_of(source._FILES) == started(source.__file__)
    script = tmp_path / "rep.py"
    script.write_text("1")
    one = started(str(script))
    script.write_text("2")
    assert len({command, one, started(str(script)), started("-c")}) == 4
    if bench.FOLDER.is_dir():
        assert started(str(bench.FOLDER / "mnist.py")) == started(str(bench.FOLDER / "memory.py")) != command


def hostile(folder: Path, marker: Path) -> None:
    """Make a repository run a program whenever git asks who has changed, or logs."""
    program = folder / "evil.sh"
    program.write_text(f"#!/bin/sh\ntouch {marker}\n")
    program.chmod(0o755)
    for key in ("core.fsmonitor", "core.pager", "gpg.program", "core.sshCommand"):
        git(folder, "config", key, str(program))
    git(folder, "config", "log.showSignature", "true")
    hooks = folder / ".git" / "hooks"
    for name in ("post-index-change", "reference-transaction"):
        shutil.copy(program, hooks / name)


def test_a_surrounding_repository_is_neither_asked_nor_named(tmp_path: Path) -> None:
    stranger, marker = tmp_path / "stranger", tmp_path / "marker"
    stranger.mkdir()
    git(stranger, "init", "-q")
    site = stranger / "lib" / "site-packages"
    for package in PACKAGES:
        shutil.copytree(package, site / package.name, ignore=shutil.ignore_patterns("__pycache__"))
    git(stranger, "add", ".")
    git(stranger, "commit", "-q", "-m", "Theirs")
    commit = git(stranger, "rev-parse", "HEAD")
    hostile(stranger, marker)
    git(stranger, "status")
    assert marker.exists(), "the repository is not hostile"
    marker.unlink()
    code = (
        "import json; from posterity_lab.record import Provenance; from posterity_lab import source; "
        "made = Provenance('cpu').content(); print(json.dumps([made, source.named(made)]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(site)},
        cwd=stranger,
        capture_output=True,
        text=True,
        check=True,
    )
    assert commit not in done.stdout
    assert '"uncommitted"' in done.stdout
    assert not marker.exists()


def test_settings_of_our_own_checkout_run_nothing(tmp_path: Path) -> None:
    folder, marker = checkout(tmp_path / "checkout"), tmp_path / "marker"
    hostile(folder, marker)
    found = source._commits(folder)
    assert source.digest_of(packages(folder)) in found
    assert not marker.exists()
    (folder / "pyproject.toml").write_text('[project]\nname = "another"\n')
    source._commits.cache_clear()
    assert source._commits(folder) == {}
    inner = folder / "src"  # below the top of a repository
    assert source._commits(inner) == {}
    source._commits.cache_clear()
