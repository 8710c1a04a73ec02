"""Every benchmark runs, on a CPU, in seconds; its times are not looked at."""

import json
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "benchmarks"


def test_train_step_writes_its_record(tmp_path: Path) -> None:
    out = tmp_path / "record.json"
    options = ["--widths", "8", "--samples", "2", "--steps", "2", "--rounds", "2", "--out", str(out)]
    command = [sys.executable, "-W", "error", str(FOLDER / "train_step.py"), *options]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "2x8, K = 2: loop over samples" in shown
    record = json.loads(out.read_text())
    assert set(record["rows"]["8"]) == {"loop over samples", "compile_step", "one Adam step"}
    assert all(
        column["lowest"] <= column["ms"] <= column["highest"] for column in record["rows"]["8"].values()
    )
    assert record["environment"]["torch"]
