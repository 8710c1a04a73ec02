"""Downloads from servers that break, lie, send too much, or cannot go on."""

import hashlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from posterity_lab.disk import locked
from posterity_lab.download import DownloadError, download
from posterity_lab.files import DataError, fetch

CONTENT = bytes(range(256)) * 1000
MD5 = hashlib.md5(CONTENT, usedforsecurity=False).hexdigest()


@dataclass
class Server:
    """What it does, and what it was asked for.

    Attributes:
        breaks_after: Bytes of a response after which the connection breaks, one entry per response.
        ranges: Whether it sends the rest of a file alone.
        content: The file.
        headers: In place of the right ones.
        asked: The ranges of the requests.
    """

    url: str = ""
    breaks_after: list[int] = field(default_factory=list)
    ranges: bool = True
    content: bytes = CONTENT
    headers: dict[str, str] = field(default_factory=dict)
    asked: list[str | None] = field(default_factory=list)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    state = Server()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked = self.headers.get("Range")
            state.asked.append(asked)
            start = int(asked.removeprefix("bytes=").removesuffix("-")) if asked and state.ranges else 0
            if start >= len(state.content):
                self.send_error(416)
                return
            body = state.content[start:]
            self.send_response(206 if start else 200)
            headers = {"Content-Length": str(len(body))}
            if start:
                headers["Content-Range"] = f"bytes {start}-{len(state.content) - 1}/{len(state.content)}"
            for key, value in {**headers, **state.headers}.items():
                if value:
                    self.send_header(key, value)
            self.end_headers()
            self.wfile.write(body[: state.breaks_after.pop(0) if state.breaks_after else None])

        def log_message(self, *_: Any) -> None:
            pass

    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        thread = threading.Thread(target=listening.serve_forever, args=(0.01,))
        thread.start()
        state.url = f"http://127.0.0.1:{listening.server_port}/file"
        yield state
        listening.shutdown()
        thread.join()


def take(server: Server, folder: Path, largest: int = len(CONTENT)) -> bytes:
    download(server.url, folder / "part", MD5, largest)
    return (folder / "part").read_bytes()


def test_interrupted_download_resumes(tmp_path: Path, server: Server) -> None:
    server.breaks_after = [1000, 50_000]
    for there in (1000, 51_000):
        with pytest.raises(
            DownloadError, match=f"the connection broke after {there} of {len(CONTENT)} bytes"
        ):
            take(server, tmp_path)
    assert take(server, tmp_path) == CONTENT
    assert server.asked == [None, "bytes=1000-", "bytes=51000-"]


def test_a_server_without_ranges_sends_the_file_again(tmp_path: Path, server: Server) -> None:
    server.ranges, server.breaks_after = False, [1000]
    with pytest.raises(DownloadError, match="the connection broke after 1000"):
        take(server, tmp_path)
    assert take(server, tmp_path) == CONTENT


@pytest.mark.parametrize("there", [b"another file", CONTENT + b"and more", b"x" * len(CONTENT)])
def test_a_part_of_another_file_is_thrown_away(tmp_path: Path, server: Server, there: bytes) -> None:
    (tmp_path / "part").write_bytes(there)
    assert take(server, tmp_path, largest=2 * len(CONTENT)) == CONTENT


def test_a_whole_part_is_taken_as_it_is(tmp_path: Path, server: Server) -> None:
    (tmp_path / "part").write_bytes(CONTENT)
    assert take(server, tmp_path) == CONTENT
    assert server.asked == []


def test_an_answer_from_another_place_is_not_added(tmp_path: Path, server: Server) -> None:
    (tmp_path / "part").write_bytes(CONTENT[:1000])
    server.headers = {"Content-Range": f"bytes 7-{len(CONTENT) - 1}/{len(CONTENT)}"}
    assert take(server, tmp_path) == CONTENT
    assert server.asked == ["bytes=1000-", None]


@pytest.mark.parametrize("headers", [{}, {"Content-Length": ""}, {"Content-Length": "many"}])
def test_no_more_is_taken_than_the_file_may_have(
    tmp_path: Path, server: Server, headers: dict[str, str]
) -> None:
    server.headers = headers
    with pytest.raises(DownloadError, match="it sent more than the 100000 bytes that the file may have"):
        take(server, tmp_path, largest=100_000)
    assert not list(tmp_path.iterdir())


def test_a_file_without_a_length_is_taken_whole(tmp_path: Path, server: Server) -> None:
    server.headers = {"Content-Length": ""}
    assert take(server, tmp_path) == CONTENT


@pytest.mark.parametrize("content", [b"", b"not the file", CONTENT[:-1]])
def test_another_file_is_not_kept(tmp_path: Path, server: Server, content: bytes) -> None:
    server.content = content
    with pytest.raises(DownloadError, match=r"it sent a file of md5 .*, which was not kept|HTTP status 416"):
        take(server, tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_next_call_of_fetch_goes_on(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    from posterity_lab import files

    file = files.File("mnist", "test", "MNIST/raw/file", MD5)
    known = files.Set(10, server.url.removesuffix("file"), largest=len(CONTENT))
    monkeypatch.setattr(files, "FILES", (file,))
    monkeypatch.setitem(files.SETS, "mnist", known)
    server.breaks_after = [1000]
    with pytest.raises(
        DataError, match=r"broke after 1000 of .*run this again to go on, or download it where"
    ):
        fetch("mnist", tmp_path / "root")
    assert [path.name for path in (tmp_path / "root").iterdir()] == [f".fetch-{MD5}"]
    with (
        locked(tmp_path / "root"),
        pytest.raises(ValueError, match=r"root is in use by process \d+ on .*: wait until that has ended"),
    ):
        fetch("mnist", tmp_path / "root")
    assert fetch("mnist", tmp_path / "root") == [tmp_path / "root" / file.path]
    assert [path.name for path in (tmp_path / "root").iterdir()] == ["MNIST"]
    assert server.asked == [None, "bytes=1000-"]


def test_a_failure_leaves_not_even_the_folder(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    from posterity_lab import files

    monkeypatch.setattr(files, "FILES", (files.File("mnist", "test", "MNIST/raw/file", "0" * 32),))
    monkeypatch.setitem(files.SETS, "mnist", files.Set(10, server.url.removesuffix("file"), largest=10**6))
    with pytest.raises(DataError, match="which was not kept"):
        fetch("mnist", tmp_path / "root")
    assert not (tmp_path / "root").exists()
