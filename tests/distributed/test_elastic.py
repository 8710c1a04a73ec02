"""A worker that is killed changes nothing: torchrun starts all again, from the last checkpoint."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from distributed.runs import alone

HERE = Path(__file__).parent


def run(folder: Path, rule: str, *dies_at: str) -> dict[str, Any]:
    folder.mkdir()
    paths = os.pathsep.join([str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    # Without it torch 2.13 cannot start gloo's processes again.
    env = {**os.environ, "PYTHONPATH": paths, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    options = ["--standalone", "--nproc-per-node=2", "--max-restarts=1", "--monitor-interval=0.1"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", *options]
    line = [*torchrun, str(HERE / "elastic.py"), str(folder), rule, *dies_at]
    done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = torch.load(folder / "learned.pt")
    return found


def test_a_killed_worker_changes_nothing(tmp_path: Path) -> None:
    whole, again = run(tmp_path / "whole", "vogn"), run(tmp_path / "again", "vogn", "3")
    assert (whole["lives"], again["lives"]) == ("0", "1")
    want = alone("vogn")
    for kind, values in whole["learned"].items():
        for name, value in values.items():
            assert torch.equal(value, again["learned"][kind][name]), f"{kind} of {name}"
            torch.testing.assert_close(value, want[f"{kind} {name}"], rtol=1e-12, atol=1e-12)
