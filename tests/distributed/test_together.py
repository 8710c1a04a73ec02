"""Two and four processes learn the posterior that one process learns."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from distributed.runs import CASES, FOUR, WITHOUT_NOISE, accumulated_alone, alone

HERE = Path(__file__).parent


def together(folder: Path, world: int, *cases: str) -> list[dict[str, Any]]:
    """What every process has learned."""
    (folder / "store").unlink(missing_ok=True)
    line = [sys.executable, str(HERE / "runs.py"), str(folder)]
    started = [
        subprocess.Popen([*line, str(rank), str(world), *cases], stderr=subprocess.PIPE, text=True)
        for rank in range(world)
    ]
    for each in started:
        _, said = each.communicate(timeout=120)
        assert each.returncode == 0, said
    return [torch.load(folder / f"{rank}.pt") for rank in range(world)]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return together(tmp_path_factory.mktemp("two"), 2)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return together(tmp_path_factory.mktemp("four"), 4)


def compare(found: list[dict[str, Any]], case: str, want: dict[str, torch.Tensor]) -> None:
    first = found[0][case]
    assert not isinstance(first, str), first
    for other in found[1:]:
        assert not isinstance(other[case], str), other[case]
        for key in first:
            assert torch.equal(first[key], other[case][key]), f"processes differ in {key}"
    for key, value in first.items():
        torch.testing.assert_close(
            value, want[key].double(), rtol=1e-12, atol=1e-12, msg=lambda m, key=key: f"{key}: {m}"
        )


# Parts and weight samples of the one process.
ALONE = {
    "mesh loop": (2, 1),
    "mesh closure": (2, 2),
    "mesh compiled": (2, 2),
    "mesh split": (1, 2),
    "mesh idle": (1, 1),
    "ddp loop": (1, 1),
    "ddp samples": (1, 2),
    "ddp ragged": (1, 2),
}


@pytest.mark.parametrize("case", CASES)
def test_two_processes_learn_what_one_learns(two: list[dict[str, Any]], case: str) -> None:
    kind, rule = case.rsplit(" ", 1)
    if kind == "mesh accumulated":
        compare(two, case, accumulated_alone(rule, 2))
        return
    compare(two, case, alone(rule, *(1, 1) if rule in WITHOUT_NOISE else ALONE[kind]))


@pytest.mark.parametrize("case", FOUR)
def test_four_processes_learn_what_one_learns(four: list[dict[str, Any]], case: str) -> None:
    kind, rule = case.rsplit(" ", 1)
    compare(
        four, case, alone(rule, *{"mesh compiled": (4, 2), "mesh both": (2, 2), "ddp loop": (1, 1)}[kind])
    )
