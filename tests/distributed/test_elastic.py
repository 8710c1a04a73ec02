"""A worker or a node that is killed changes nothing: torchrun starts all again, from the last checkpoint."""

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from distributed.runs import STEPS, alone

HERE = Path(__file__).parent
RULE = "vogn"
# Seconds after which a node that is silent is lost, and for which the others then wait for more.
PATIENCE = "keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=4"


def started(folder: Path, options: list[str], *fate: str) -> subprocess.Popen[str]:
    """A torchrun whose workers save their work to a folder."""
    folder.mkdir(exist_ok=True)
    paths = os.pathsep.join([str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    # Without it torch 2.13 cannot start gloo's processes again.
    env = {**os.environ, "PYTHONPATH": paths, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--monitor-interval=0.1", *options]
    line = [*torchrun, str(HERE / "elastic.py"), str(folder), RULE, *fate]
    with (folder / f"said{len(fate)}").open("w") as said:
        return subprocess.Popen(line, env=env, stdout=said, stderr=subprocess.STDOUT, text=True)


def two_workers(folder: Path, *fate: str) -> list[subprocess.Popen[str]]:
    """One node with two of them."""
    return [started(folder, ["--standalone", "--nproc-per-node=2", "--max-restarts=1"], *fate)]


def two_nodes(folder: Path) -> list[subprocess.Popen[str]]:
    """One worker each; the second node is lost before the last step."""
    with socket.socket() as found:
        found.bind(("localhost", 0))
        place = f"localhost:{found.getsockname()[1]}"
    options = ["--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=3", "--rdzv-backend=c10d"]
    options += [f"--rdzv-endpoint={place}", "--rdzv-id=test"]
    fates = [(f"{STEPS - 1}", "node"), ()]
    lost, stays = (  # which waits for the other if it is there first
        started(folder, [*options, f"--rdzv-conf=is_host={int(not fate)},{PATIENCE}"], *fate)
        for fate in fates
    )
    return [stays, lost]


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What each run has left, and its lives; they wait more than they compute, and so run at once."""
    folder = tmp_path_factory.mktemp("elastic")
    runs = {
        "undisturbed": two_workers(folder / "undisturbed"),
        "worker": two_workers(folder / "worker", f"{STEPS - 1}"),
        "node": two_nodes(folder / "node"),
    }
    try:
        for name, (first, *_) in runs.items():
            assert first.wait(timeout=120) == 0, "\n".join(
                path.read_text() for path in (folder / name).glob("said*")
            )
    finally:
        for each in (each for some in runs.values() for each in some):
            each.kill()
            each.wait()
    return {
        name: {
            "learned": torch.load(folder / name / "learned.pt"),
            "lives": (folder / name / "lives").read_text().splitlines(),
        }
        for name in runs
    }


def test_a_killed_worker_changes_nothing(learned: dict[str, Any]) -> None:
    whole, again = learned["undisturbed"], learned["worker"]
    assert again["lives"] == ["2 from 0", "2 from 2"]
    for kind, values in whole["learned"].items():
        for name, value in values.items():
            assert torch.equal(value, again["learned"][kind][name]), f"{kind} of {name}"


@pytest.mark.parametrize(
    ("run", "lives"), [("undisturbed", ["2 from 0"]), ("node", ["2 from 0", "1 from 2"])]
)
def test_runs_with_and_without_a_lost_node_match_one_process(
    learned: dict[str, Any], run: str, lives: list[str]
) -> None:
    assert learned[run]["lives"] == lives
    want = alone(RULE)
    for kind, values in learned[run]["learned"].items():
        for name, value in values.items():
            torch.testing.assert_close(value, want[f"{kind} {name}"], rtol=1e-12, atol=1e-12)
