"""Atomic writing of files, and locks for folders that one process at a time may write to."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from posterity.disk import replacing

LOCK = "lock"
# To claim a folder that others make and remove meanwhile.
_TRIES = 1000
_LEFTOVER = re.compile(r"\.[0-9a-f]{16}\.partial")


def replace(path: Path, content: bytes | str) -> None:
    """Write a file atomically, even if the process or the machine stops.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     replace(Path(folder) / "note", "kept")
        ...     [path.name for path in Path(folder).iterdir()]
        ['note']
    """
    with replacing(path) as unfinished:
        unfinished.write_bytes(content if isinstance(content, bytes) else content.encode())


def md5_of(path: Path) -> str:
    """Checksum of a file."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def append(path: Path, record: dict[str, Any]) -> None:
    """Add a line of JSON to a file in one write, safe on the disk when this returns."""
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        os.write(handle, (json.dumps(record) + "\n").encode())
        os.fsync(handle)
    finally:
        os.close(handle)


def strangers(folder: Path) -> list[Path]:
    """What a folder holds beside a lock and what a killed process left half written.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     for name in ("lock", "config.json.0123456789abcdef.partial", "mine.partial"):
        ...         (Path(folder) / name).touch()
        ...     [path.name for path in strangers(Path(folder))]
        ['mine.partial']
    """
    return [each for each in folder.iterdir() if each.name != LOCK and not _LEFTOVER.search(each.name)]


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a folder for this process, and remove what a killed one left half written in it.

    The lock file names the owner. The kernel drops a dead process's claim, so its lock is taken over; the
    claims of other machines are not seen by all file systems, so a lock of another machine is never taken.

    Args:
        folder: Made if there is none, and removed again if nothing was left in it.

    Raises:
        ValueError: Another process holds the folder.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder, locked(Path(folder)):
        ...     [path.name for path in Path(folder).iterdir()]
        ['lock']
    """
    created = not folder.exists()
    handle = _claimed(folder)
    try:
        for each in folder.iterdir():
            if _LEFTOVER.search(each.name):
                each.unlink(missing_ok=True)
        yield
    finally:
        (folder / LOCK).unlink(missing_ok=True)  # while it is held: who opened it before finds it gone
        os.close(handle)
        if created:
            with suppress(OSError):  # it is not empty
                folder.rmdir()


def alive(pid: int) -> bool:
    """Whether a process of this machine runs; one that ended and was not waited for does not.

    Example:
        >>> alive(os.getpid())
        True
    """
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:  # no such file on this system
        return True


def _claimed(folder: Path) -> int:
    """The open lock file of a folder, claimed for this process."""
    path, host = folder / LOCK, socket.gethostname()
    for left in reversed(range(_TRIES)):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except FileNotFoundError:  # another process has just removed the folder, or none can be made there
            if not left:
                raise
            continue
        except FileExistsError:  # of a file; or mkdir() has found a folder that was gone when it looked again
            if not left or (os.path.lexists(folder) and not folder.is_dir()):
                raise
            continue
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(f"{folder} is in use{_named(handle)}: wait until that has ended") from None
            if _owner(handle).get("host", host) != host:
                raise ValueError(
                    f"{folder} is in use{_named(handle)}: wait until that has ended, or delete {path} if it "
                    "no longer runs"
                )
            with suppress(FileNotFoundError):
                if os.path.samestat(os.stat(path), os.fstat(handle)):
                    os.ftruncate(handle, 0)
                    os.pwrite(handle, json.dumps({"pid": os.getpid(), "host": host}).encode(), 0)
                    os.fsync(handle)
                    return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)  # its owner has just ended and removed the file: another may be there
    raise ValueError(f"{folder} keeps being created and removed by other processes: choose another folder")


def _owner(handle: int) -> dict[str, Any]:
    try:
        owner = json.loads(os.pread(handle, 4096, 0))
    except ValueError:  # its owner was killed, or has not written yet
        return {}
    return owner if isinstance(owner, dict) else {}


def _named(handle: int) -> str:
    owner = _owner(handle)
    return f" by process {owner['pid']} on {owner['host']}" if {"pid", "host"} <= owner.keys() else ""
