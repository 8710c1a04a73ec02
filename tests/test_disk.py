"""Files that are whole or absent, and cost no memory beside what is in them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save

import posterity
from posterity import disk

TENSORS = {
    "weights": torch.randn(3, 4),
    "columns": torch.randn(4, 3).T,
    "part": torch.randn(9)[::2],
    "half": torch.randn(5).bfloat16(),
    "double": torch.randn(2, 2, dtype=torch.float64),
    "mask": torch.tensor([True, False, True]),
    "count": torch.tensor(7),
    "nothing": torch.zeros(0, 3),
    "wide": torch.ones(1).expand(4),
    "trained": torch.randn(2, requires_grad=True),
    "bytes": torch.arange(5, dtype=torch.uint8),
}
METADATA = {"key": '{"a": "ü \\" quoted"}'}
PEAK = """
import resource, sys, torch
from pathlib import Path
from posterity import DiagonalGaussian, Factorised
blocks = {f"w{k}": DiagonalGaussian(torch.zeros(4_000_000), 0.1) for k in range(4)}
posterior = Factorised(blocks)
posterior.block("w0").std()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
posterior.save(Path(sys.argv[1]))
print(before, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def test_a_missing_folder_is_refused_by_name(tmp_path: Path) -> None:
    posterior = posterity.point_mass(torch.nn.Linear(2, 2))
    with pytest.raises(FileNotFoundError, match=r"^there is no folder .*nowhere: make it first$"):
        posterior.save(tmp_path / "nowhere" / "posterior.safetensors")


def test_a_file_is_as_safetensors_would_write_it(tmp_path: Path) -> None:
    disk.write_tensors(tmp_path / "file", TENSORS, METADATA)
    loaded = load_file(tmp_path / "file")
    assert loaded.keys() == TENSORS.keys()
    for name, value in TENSORS.items():
        assert loaded[name].dtype == value.dtype
        assert torch.equal(loaded[name], value.detach())
    own = (tmp_path / "file").read_bytes()
    theirs = save({name: value.detach().clone().contiguous() for name, value in TENSORS.items()}, METADATA)
    headers = []
    for content in (own, theirs):
        length = int.from_bytes(content[:8], "little")
        headers.append((json.loads(content[8 : 8 + length]), content[8 + length :]))
        assert length % 8 == 0
    assert headers[0] == headers[1]


def test_a_type_that_safetensors_lacks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"'z' is of type torch.complex64, which is not saved"):
        disk.write_tensors(tmp_path / "file", {"z": torch.zeros(2, dtype=torch.complex64)}, {})
    assert not [*tmp_path.iterdir()]


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    with pytest.raises(KeyboardInterrupt), disk.replacing(tmp_path / "file") as unfinished:
        unfinished.write_text("half")
        raise KeyboardInterrupt
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"file": "old"}


def test_what_is_written_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    sync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda handle: done.append("sync") or sync(handle))
    monkeypatch.setattr(os, "replace", lambda *paths: done.append("replace") or replace(*paths))
    with disk.replacing(tmp_path / "file") as unfinished:
        unfinished.write_text("new")
        with disk.replacing(tmp_path / "file") as other:  # no two writers share a path
            other.write_text("other")
        assert unfinished != other
    assert (tmp_path / "file").read_text() == "new"
    assert done == ["sync", "replace", *(["sync"] if os.name == "posix" else [])] * 2


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in kB on Linux alone")
def test_saving_takes_no_memory_beside_the_posterior(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PEAK, str(tmp_path / "q")]
    found = subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ)
    before, peak = (1024 * int(each) for each in found.stdout.split())
    assert peak - before < 0.2 * (tmp_path / "q").stat().st_size
