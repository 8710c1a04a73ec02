"""Imports go one way, and the core needs torch and safetensors alone."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src"

# What each room of the library may import; the rest of the house is above it.
MAY_IMPORT = {
    "arguments": set(),  # which all may
    "caller": set(),  # which all may
    "names": set(),
    "disk": set(),
    "torch_private": set(),
    "buffers": {"torch_private", "flat", "noise"},
    "flat": set(),
    "fusing": {"torch_private"},
    "sharding": {"torch_private"},
    "noise": {"torch_private", "flat", "kernels"},
    "kernels": {"flat", "noise"},
    "posterior": {"disk", "flat", "fusing", "names", "noise", "torch_private"},
    "layers": {"noise", "torch_private"},
    "curvature": {"inputs", "layers", "names", "noise", "torch_private"},
    "distributed": set(),
    "optim": {
        "torch_private",
        "buffers",
        "curvature",
        "distributed",
        "flat",
        "layers",
        "names",
        "noise",
        "posterior",
        "sharding",
    },
    "estimators": {"flat", "layers", "names", "noise", "posterior", "torch_private"},
    "objective": {"optim", "posterior"},
    "metrics": set(),
    "continual": set(),
    "compress": {"buffers", "disk", "inputs", "names", "posterior", "prediction", "replica", "torch_private"},
    "diagnostics": {"optim", "posterior"},
    "inputs": set(),
    "replica": {"torch_private", "buffers", "sharding"},
    "mc": {"torch_private", "buffers", "inputs", "layers", "replica"},
    "train": {
        "torch_private",
        "fusing",
        "buffers",
        "distributed",
        "estimators",
        "flat",
        "inputs",
        "layers",
        "mc",
        "noise",
        "objective",
        "optim",
        "posterior",
        "sharding",
        "variational",
    },
    "variational": {
        "distributed",
        "torch_private",
        "estimators",
        "layers",
        "names",
        "noise",
        "objective",
        "optim",
        "posterior",
        "mc",
        "replica",
        "sharding",
    },
    "dropout": {"noise", "posterior"},
    "prediction": set(),
    "predict": {"distributed", "names", "inputs", "mc", "posterior", "prediction", "replica", "variational"},
    "laplace": {
        "torch_private",
        "buffers",
        "curvature",
        "inputs",
        "layers",
        "mc",
        "names",
        "posterior",
        "predict",
        "prediction",
        "replica",
        "variational",
    },
}
FILES = sorted((SRC / "posterity").rglob("*.py"))


def imported(path: Path) -> set[str]:
    """Top-level and function-level imports of one file, as dotted names."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SRC)))
def test_every_room_imports_only_what_it_may(path: Path) -> None:
    room = path.relative_to(SRC / "posterity").parts[0].removesuffix(".py")
    names = imported(path)
    assert not any(name.startswith("posterity_lab") for name in names)
    if room != "__init__":
        rooms = {name.split(".")[1] for name in names if name.startswith("posterity.")}
        assert rooms <= MAY_IMPORT[room] | {room, "arguments", "caller"}


def test_the_core_imports_torch_and_safetensors_alone() -> None:
    code = "import sys, posterity; print(*{name.partition('.')[0] for name in sys.modules})"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert "posterity" in loaded
    assert not {"torchmetrics", "rich", "typer", "matplotlib", "sklearn", "scipy"} & set(loaded)


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    import posterity

    monkeypatch.setitem(sys.modules, "torchmetrics.functional.classification", None)
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    with pytest.raises(ImportError, match=r"pip install 'posterity\[metrics\]'"):
        posterity.metrics.auroc(torch.zeros(1), torch.ones(1))
    model = torch.nn.Linear(2, 2)
    with pytest.raises(ImportError, match=r"pip install 'posterity\[lab\]'"):
        posterity.predict(model, posterity.BGD(model).posterior(), torch.ones(1, 2), progress=True)
