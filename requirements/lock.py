"""Write the lock files beside this one: every package of the set-up, with the hashes of all its files.

    make lock                     # keeps versions, adds what pyproject.toml has gained
    make lock OPTIONS=--upgrade   # takes the latest versions that fit

``test.txt`` has all packages but torch. ``torch.txt`` has torch, of which registries hold several builds of
one version, for CPUs and for CUDA: its hashes are all of the public registry, and that of the build which pip
finds here. No file names a registry: pip's own settings say where to look.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from urllib.request import urlopen

FOLDER = Path(__file__).parent
ROOT = FOLDER.parent
HEAD = "# Written by requirements/lock.py (make lock). Do not edit.\n"


def pip(*words: str) -> str:
    done = subprocess.run([sys.executable, "-m", "pip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    return done.stdout


def versions(upgrade: bool) -> dict[str, str]:
    """What the extra ``test`` and the build need, by pip's own resolution."""
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    # Of hatchling, which needs it to install the project in place.
    wanted = [f"{ROOT}[test]", *build, "editables"]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as kept:
        if not upgrade:
            kept.write("".join(f"{name}=={version}\n" for name, version in before().items()))
            kept.flush()
        report = pip(
            *("install", "--dry-run", "--ignore-installed", "--quiet", "--report", "-"),
            *("--constraint", kept.name, *wanted),
        )
    found = {
        re.sub(r"[-_.]+", "-", each["metadata"]["name"]).lower(): each["metadata"]["version"].partition("+")[
            0
        ]
        for each in json.loads(report)["install"]
    }
    return {name: version for name, version in sorted(found.items()) if name != "posterity"}


def before() -> dict[str, str]:
    """The versions that the lock files have."""
    lines = [line for path in FOLDER.glob("*.txt") for line in path.read_text().splitlines()]
    return dict(re.findall(r"^([a-z0-9-]+)==(\S+)", "\n".join(lines), re.MULTILINE))


def registry() -> str:
    """Where pip looks first."""
    settings = dict(re.findall(r"^(\S+?)='(.*)'$", pip("config", "list"), re.MULTILINE))
    from pip._internal.models.index import PyPI

    named = (settings.get(f"{place}.index-url") for place in (":env:", "install", "global"))
    return next(filter(None, named), PyPI.simple_url)


def published(name: str, version: str, index: str) -> set[str]:
    """Hashes of all files that the registry has of a version."""
    with urlopen(f"{index.rstrip('/')}/{name}/", timeout=60) as page:
        links = re.findall(r'href="[^"#]*/([^"#/]+)#sha256=([0-9a-f]{64})"', page.read().decode())
    start = rf"{re.sub('-', '[-_.]', name)}-{re.escape(version)}(-|\.tar|\.zip)"
    return {sha for file, sha in links if re.match(start, file, re.IGNORECASE)}


def builds(name: str, version: str) -> set[str]:
    """Hash of the file that pip takes here, which the registry may not have."""
    with tempfile.TemporaryDirectory() as folder:
        pip("download", "--quiet", "--no-deps", "--dest", folder, f"{name}=={version}")
        return {hashlib.sha256(path.read_bytes()).hexdigest() for path in Path(folder).iterdir()}


def kept(name: str, version: str) -> set[str]:
    """Hashes of a version in the lock file: other machines found other builds."""
    path = FOLDER / f"{name}.txt"
    text = path.read_text() if path.exists() else ""
    return set(re.findall(r"[0-9a-f]{64}", text)) if f"{name}=={version} " in text else set()


def write(path: Path, pins: Mapping[str, str], hashes: Mapping[str, Iterable[str]]) -> None:
    entries = [
        " \\\n".join([f"{name}=={version}", *(f"    --hash=sha256:{sha}" for sha in sorted(hashes[name]))])
        for name, version in pins.items()
    ]
    path.write_text(HEAD + "\n".join(entries) + "\n")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--upgrade", action="store_true", help="take the latest versions that fit")
    pins, index = versions(options.parse_args().upgrade), registry()
    hashes = {name: published(name, version, index) for name, version in pins.items()}
    torch = {"torch": pins.pop("torch")}
    hashes["torch"] |= builds("torch", torch["torch"]) | kept("torch", torch["torch"])
    if missing := [name for name in pins if not hashes[name]]:
        sys.exit(f"{index} has no hashes of {', '.join(missing)}")
    write(FOLDER / "test.txt", pins, hashes)
    write(FOLDER / "torch.txt", torch, hashes)


if __name__ == "__main__":
    main()
