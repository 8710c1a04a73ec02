"""Downloads with a size limit that can resume, and are kept only if they are the published file."""

from __future__ import annotations

import errno
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from posterity_lab.disk import md5_of

_PATIENCE = 30.0  # seconds without a byte
_CHUNK = 1 << 16


class DownloadError(OSError):
    """What a server sent, or did not send: the network is to blame, not the disk."""


def download(url: str, part: Path, md5: str, largest: int) -> None:
    """Bring a file to ``part``, going on with what is there of it.

    A part that cannot become the file is removed: one that is too large, or has another checksum. One whose
    connection broke stays, and the next call asks for the rest alone.

    Args:
        url: Of the file.
        part: Where it is put, under a name that no other file has.
        md5: What was published of it.
        largest: No more bytes than this are taken.

    Raises:
        DownloadError: The server cannot be reached, or does not have this file.
        OSError: The disk cannot hold it.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     source, part = Path(folder) / "source", Path(folder) / "part"
        ...     _ = source.write_bytes(b"data")
        ...     download(source.as_uri(), part, "8d777f385d3dfec8815d20f7496026dc", largest=4)
        ...     part.read_bytes()
        b'data'
    """
    while True:
        begun = _size(part)
        if begun and md5_of(part) == md5:
            return
        try:
            seen = md5_of(part) if _receive(url, part, largest) else None
        except DownloadError:
            if not _size(part):
                part.unlink(missing_ok=True)
            raise
        except OSError:
            part.unlink(missing_ok=True)
            raise
        if seen == md5:
            return
        part.unlink()
        if not begun:  # else what was there may have been of another file
            raise DownloadError(f"it sent a file of md5 {seen}, not {md5}, which was not kept")


def _size(part: Path) -> int:
    return part.stat().st_size if part.exists() else 0


def _receive(url: str, part: Path, largest: int) -> bool:
    """Take what is missing of a file; False where its server does not go on with what is there of it."""
    have = _size(part)
    request = Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    try:
        with urlopen(request, timeout=_PATIENCE) as response:
            if getattr(response, "status", None) != 206:
                have = 0
            elif not response.headers.get("Content-Range", "").startswith(f"bytes {have}-"):
                return False
            _copy(response, part, have, largest)
    except HTTPError as error:
        if have and error.code == 416:  # there is nothing behind what is there
            return False
        raise DownloadError(f"HTTP status {error.code}, {error.reason}") from error
    except (URLError, HTTPException, TimeoutError, ConnectionError) as error:
        raise DownloadError(str(getattr(error, "reason", error)) or type(error).__name__) from error
    return True


def _copy(response: HTTPResponse, part: Path, have: int, largest: int) -> None:
    """Add a response to the bytes that are there."""
    length = response.headers.get("Content-Length", "")
    total = have + int(length) if length.isdecimal() else None
    enough = total is not None and total > largest
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar, part.open("ab" if have else "wb") as out:
        task = bar.add_task(response.url.rpartition("/")[2], total=total, completed=have)
        while not enough and (chunk := _read(response)):
            have += len(chunk)
            enough = have > largest
            out.write(chunk)
            bar.update(task, completed=have)
    if enough:
        part.unlink()
        raise DownloadError(f"it sent more than the {largest} bytes that the file may have")
    if total is not None and have < total:
        raise DownloadError(f"the connection broke after {have} of {total} bytes")


def _read(response: HTTPResponse) -> bytes:
    try:
        return response.read(_CHUNK)
    except OSError as error:  # told apart from those of the disk
        raise DownloadError(str(error) or type(error).__name__) from error


def disk_is_to_blame(error: OSError) -> bool:
    """Whether an error is of the disk, not of the network: errors of a connection name no file.

    Example:
        >>> disk_is_to_blame(OSError(errno.ENOSPC, "No space left on device"))
        True
        >>> disk_is_to_blame(DownloadError("the connection broke"))
        False
    """
    if isinstance(error, DownloadError):
        return False
    return error.filename is not None or error.errno in (errno.ENOSPC, errno.EDQUOT)
