"""What every record of a result says of where it was made."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import posterity


def environment() -> dict[str, Any]:
    """Time, versions, commit, hardware and command.

    Example:
        >>> sorted(environment())[:3]
        ['command', 'commit', 'cores']
    """
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "posterity": posterity.__version__,
        "commit": _commit(),
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
    }


def _processor() -> str:
    """The CPU's name; platform.processor() has none on Linux."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _commit() -> str | None:
    """The commit of the source in use, marked where files differ from it; None outside a checkout."""
    here = str(Path(__file__).parent)
    git = ["git", "-C", here, "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
