"""Records of results and of the runs that made them, sealed by a digest of their own content.

A run writes its whole record. Nothing is filled in or edited afterwards: what is not known is absent, and a
record whose content does not fit its digest is refused.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import secrets
import sys
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

import posterity
from posterity_lab import source
from posterity_lab.disk import alive, append, replace

DIGEST = "digest"
LOOKS = "looks.jsonl"


@final
class Provenance:
    """When, where and from which source a record is made; it begins when this is built.

    Args:
        device: What the run computes on.
        jobs: Runs at a time that the command asks for.
        seeds: Of the run.

    Example:
        >>> made = Provenance("cpu", seeds=[0]).content()
        >>> made["seeds"], made["started"] <= made["ended"]
        ([0], True)
    """

    def __init__(self, device: str, *, jobs: int = 1, seeds: Sequence[int] = ()) -> None:
        self._shared = _present(self, device)
        self._begun = {
            "started": _time(),
            "source": source.digest(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "posterity": posterity.__version__,
            "platform": platform.platform(),
            "processor": _processor(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
            "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
            "jobs": jobs,
            "seeds": list(seeds),
        }

    def content(self) -> dict[str, Any]:
        """All of it, as it is when this is called.

        ``shared`` says whether another run of ours has been on the device meanwhile; None where that is not
        known.
        """
        shared = None if self._shared is None else self._shared.exists()
        return {**self._begun, "ended": _time(), "shared": shared}


def digest(value: object) -> str:
    """Of a value made of dicts, lists, numbers, text and tensors: the same for equal values.

    Example:
        >>> digest({"a": 1, "b": [2.0]}) == digest({"b": [2.0], "a": 1})
        True
        >>> digest({"a": 1}) == digest({"a": 1.0})
        False
        >>> digest(torch.zeros(2)) == digest(torch.zeros(2, 1))
        False
    """
    sha = hashlib.sha256()

    def feed(value: object) -> None:
        if isinstance(value, Mapping):
            sha.update(b"{%d" % len(value))
            for key in sorted(value, key=repr):
                feed(key)
                feed(value[key])
        elif isinstance(value, list | tuple):
            sha.update(b"[%d" % len(value))
            for each in value:
                feed(each)
        elif isinstance(value, Tensor):
            sha.update(f"tensor {value.dtype} {list(value.shape)} ".encode())
            # Of bytes, because NumPy has no bfloat16.
            sha.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        else:
            text = f"{type(value).__name__} {value!r}".encode()
            sha.update(b"%d " % len(text) + text)

    feed(value)
    return sha.hexdigest()


def sealed(content: Mapping[str, Any]) -> dict[str, Any]:
    """A record with the digest of its content.

    Example:
        >>> fits(sealed({"accuracy": 0.5})), fits({**sealed({"accuracy": 0.5}), "accuracy": 0.6})
        (True, False)
    """
    # As it will be read: JSON has neither tuples nor keys that are numbers.
    plain: dict[str, Any] = json.loads(json.dumps({k: v for k, v in content.items() if k != DIGEST}))
    return {**plain, DIGEST: digest(plain)}


def fits(record: Mapping[str, Any]) -> bool:
    """Whether a record is as its run left it."""
    return record.get(DIGEST) == digest({key: value for key, value in record.items() if key != DIGEST})


def write(path: Path, content: Mapping[str, Any]) -> dict[str, Any]:
    """Seal a record and write it, whole or not at all."""
    record = sealed(content)
    replace(path, json.dumps(record, indent=1) + "\n")
    return record


def look(folder: Path, row: str, seed: int, config: Mapping[str, Any]) -> dict[str, int]:
    """Count that a row is evaluated on test data; how often that makes it, this time included.

    Every evaluation is a line of ``looks.jsonl`` in the folder of the records.

    Args:
        folder: Where the records are.
        row: What a table shows as one line, over all seeds.
        seed: Of this run.
        config: All else that decides the result.

    Returns:
        ``configs``, with how many configs the row was looked at; ``evaluations``, how often with this seed.

    Example:
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     for lr in (0.1, 0.1, 0.2):
        ...         print(look(Path(folder), "400 sgd", 0, {"lr": lr}))
        {'configs': 1, 'evaluations': 1}
        {'configs': 1, 'evaluations': 2}
        {'configs': 2, 'evaluations': 3}
    """
    line = {"row": row, "seed": seed, "config": digest(json.loads(json.dumps(dict(config)))), "time": _time()}
    folder.mkdir(parents=True, exist_ok=True)
    append(folder / LOOKS, line)
    return looks(folder, row, seed)


def looks(folder: Path, row: str, seed: int) -> dict[str, int]:
    """How often a row was evaluated on test data so far; see `look`.

    Example:
        >>> looks(Path("nowhere"), "400 sgd", 0)
        {'configs': 0, 'evaluations': 0}
    """
    path = folder / LOOKS
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    try:
        own = [entry for entry in map(json.loads, lines) if entry["row"] == row]
        return {
            "configs": len({entry["config"] for entry in own}),
            "evaluations": sum(entry["seed"] == seed for entry in own),
        }
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{path} is damaged: restore it from the last commit") from None


def _time() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _present(owner: object, device: str) -> Path | None:
    """Tell other runs on this machine of this one; the file that exists once two have been there at a time.

    Each run that comes marks itself and all that it finds, so that one which comes and goes in between is
    not missed. A run's parent, which waits for it, does not count. None where no file can be written.
    """
    folder = Path(tempfile.gettempdir()) / f"posterity-{os.getuid()}"
    mine = folder / f"{device}.{os.getpid()}.{secrets.token_hex(4)}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.stat().st_uid != os.getuid():
            return None
        mine.touch()
        for other in folder.glob(f"{device}.*.*"):
            pid = int(other.name.split(".")[1])
            if not alive(pid):
                other.unlink(missing_ok=True)
            elif other.suffix != ".shared" and pid not in (os.getpid(), os.getppid()):
                _mark(other).touch()
                _mark(mine).touch()
    except (OSError, ValueError):
        return None
    weakref.finalize(owner, _leave, mine)
    return _mark(mine)


def _mark(entry: Path) -> Path:
    return entry.with_name(entry.name + ".shared")


def _leave(entry: Path) -> None:
    for path in (entry, _mark(entry)):
        with suppress(OSError):
            path.unlink()


def _processor() -> str:
    """The CPU's name; platform.processor() has none on Linux."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
