"""Files and folders under processes that write at the same time, and are killed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from posterity_lab import disk

WRITER = """
import sys
from pathlib import Path
from posterity_lab.disk import replace
print("ready", flush=True)
while True:
    replace(Path(sys.argv[1]), sys.argv[2].encode() * 200_000)
"""
HOLDER = """
import sys, time
from pathlib import Path
from posterity_lab.disk import locked
with locked(Path(sys.argv[1])):
    print("ready", flush=True)
    time.sleep(60)
"""


def started(code: str, *words: str) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", code, *words], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def ended(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def test_readers_never_see_a_torn_file_of_two_writers(tmp_path: Path) -> None:
    path = tmp_path / "file"
    writers = [started(WRITER, str(path), letter) for letter in "ab"]
    try:
        while not path.exists():
            time.sleep(0.001)
        end, seen = time.monotonic() + 1.0, set()
        while time.monotonic() < end:
            content = path.read_bytes()
            assert len(content) == 200_000
            assert len(set(content)) == 1
            seen.add(content[:1])
        assert seen == {b"a", b"b"}
        assert all(writer.poll() is None for writer in writers)
    finally:
        for writer in writers:
            ended(writer)


def test_a_second_process_is_refused_until_the_first_is_killed(tmp_path: Path) -> None:
    holder = started(HOLDER, str(tmp_path))
    try:
        message = f"is in use by process {holder.pid} on .*: wait until that has ended$"
        with pytest.raises(ValueError, match=message), disk.locked(tmp_path):
            pass
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.communicate()
    assert json.loads((tmp_path / "lock").read_text())["pid"] == holder.pid
    (tmp_path / "config.json.0123456789abcdef.partial").write_text("{")
    (tmp_path / "mine.partial").write_text("kept")
    with disk.locked(tmp_path):
        assert json.loads((tmp_path / "lock").read_text())["pid"] == os.getpid()
    assert [path.name for path in tmp_path.iterdir()] == ["mine.partial"]


def test_a_lock_of_another_machine_is_never_taken(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text(json.dumps({"pid": 1, "host": "elsewhere"}))
    message = r"in use by process 1 on elsewhere: wait until that has ended, or delete .*lock if it no longer"
    with pytest.raises(ValueError, match=message), disk.locked(tmp_path):
        pass
    assert json.loads((tmp_path / "lock").read_text())["host"] == "elsewhere"


@pytest.mark.parametrize("content", ["", "[1]", '{"pid": 3'])
def test_a_lock_cut_short_by_a_kill_is_taken_over(tmp_path: Path, content: str) -> None:
    (tmp_path / "lock").write_text(content)
    with disk.locked(tmp_path):
        pass
    assert not (tmp_path / "lock").exists()


def test_only_one_of_many_processes_holds_a_folder_at_a_time(tmp_path: Path) -> None:
    code = """
import sys, time
from pathlib import Path
from posterity_lab.disk import locked
folder, held = Path(sys.argv[1]), 0
print("ready", flush=True)
sys.stdin.readline()
end = time.monotonic() + 1.0
while time.monotonic() < end:
    try:
        with locked(folder):
            (folder / "one").mkdir()  # fails where another is inside
            (folder / "one").rmdir()
            held += 1
    except ValueError:
        pass
print(held)
"""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path / "run")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    for process in processes:
        assert process.stdout is not None
        process.stdout.readline()
    counts = []
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in processes:
        out, _ = process.communicate()
        counts.append((process.returncode, int(out or 0)))
    assert [code for code, _ in counts] == [0, 0, 0]
    assert sum(held for _, held in counts) > 10


def test_workers_end_with_a_killed_parent() -> None:
    code = """
import os, time
from posterity_lab.workers import pool
with pool(1) as workers:
    print("ready", flush=True)
    print(workers.submit(os.getpid).result(), flush=True)
    workers.submit(time.sleep, 60).result()
"""
    parent = started(code)
    assert parent.stdout is not None
    worker = int(parent.stdout.readline())
    try:
        assert disk.alive(worker)
        parent.kill()
        end = time.monotonic() + 10.0
        while disk.alive(worker) and time.monotonic() < end:
            time.sleep(0.01)
        assert not disk.alive(worker)
    finally:
        if disk.alive(worker):
            os.kill(worker, signal.SIGKILL)
        parent.communicate()


@pytest.mark.parametrize("group", [True, False])
def test_workers_end_after_ctrl_c(group: bool) -> None:
    """A terminal sends it to all processes; other programs to the parent alone."""
    code = """
import os, signal, sys, time
from posterity_lab.workers import pool
signal.signal(signal.SIGINT, signal.default_int_handler)
if sys.argv[1] == "True":
    os.setpgrp()
try:
    with pool(1) as workers:
        print("ready", flush=True)
        print(workers.submit(os.getpid).result(), flush=True)
        for waiting in [workers.submit(time.sleep, 60) for _ in range(3)]:
            waiting.result()
except KeyboardInterrupt:
    print("stopped", flush=True)
"""
    parent = started(code, str(group))
    assert parent.stdout is not None
    worker = int(parent.stdout.readline())
    try:
        time.sleep(0.5)
        (os.killpg if group else os.kill)(parent.pid, signal.SIGINT)
        assert parent.communicate(timeout=10) == ("stopped\n", None)
        assert not disk.alive(worker)
    finally:
        if disk.alive(worker):
            os.kill(worker, signal.SIGKILL)
        parent.kill()
        parent.communicate()


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    disk.replace(tmp_path / "file", "old")
    with pytest.raises(KeyboardInterrupt), disk.replacing(tmp_path / "file") as unfinished:
        unfinished.write_text("half")
        raise KeyboardInterrupt
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"file": "old"}
