"""Lightning, accelerate and transformers in two processes learn what one process learns."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from distributed.clients import RULE
from distributed.runs import alone

HERE = Path(__file__).parent


@pytest.mark.parametrize("client", ["lightning", "accelerate", "transformers"])
def test_loops_of_others(tmp_path: Path, client: str) -> None:
    pytest.importorskip(client)
    paths = os.pathsep.join([str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*line, str(HERE / "clients.py"), client, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    want = alone(RULE)
    first, last = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    for key, value in first.items():
        assert torch.equal(value, last[key]), f"processes differ in {key}"
        torch.testing.assert_close(value, want[key], rtol=1e-6, atol=1e-6)
