"""Two and four processes learn the posterior that one process learns."""

from typing import Any

import pytest
import torch

from distributed.runs import CASES, FOUR, WITHOUT_NOISE, accumulated_alone, alone


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
