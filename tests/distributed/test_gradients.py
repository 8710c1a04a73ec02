"""Gradient methods learn in two processes what they learn in one."""

from typing import Any

import pytest
import torch

import posterity
from distributed.gradients import (
    CASES,
    bad_alone,
    compiled_alone,
    flipout_alone,
    made,
)
from distributed.runs import batches, loss_of
from distributed.test_together import compare

Found = list[dict[str, Any]]


def cases(kind: str) -> list[str]:
    return [case for case in CASES if case.startswith(f"{kind} ")]


@pytest.mark.parametrize("case", cases("compiled") + cases("wrapped") + cases("terms"))
def test_compiled_steps_on_ragged_shares_are_those_of_one_process(two: Found, case: str) -> None:
    kind, *setting = case.split()
    compare(two, case, compiled_alone(*setting, terms=kind == "terms"))


@pytest.mark.parametrize("family", ["ffg", "gnj"])
@pytest.mark.parametrize("how", ["compiled", "loop"])
def test_examples_of_each_process_have_noise_of_their_own(two: Found, how: str, family: str) -> None:
    m = made("local", family)
    opt = torch.optim.Adam(m.parameters(), lr=0.05)
    step = posterity.compile_step(m, loss_of, opt, num_data=96, parts=2)  # a sample of each part
    for x, y in batches():
        step(x, y)
    want = {name: p.detach() for name, p in m.named_parameters()}
    first = two[0][f"own {how} {family}"]
    assert not isinstance(first, str), first
    for each in two:
        for name, value in want.items():
            torch.testing.assert_close(each[f"own {how} {family}"][name], value, rtol=1e-12, atol=1e-12)


def test_flipout_signs_differ_between_processes_and_the_deviation_is_shared(two: Found) -> None:
    compare(two, "flipout loop", flipout_alone(2))


def test_statistics_and_parameters_that_are_not_drawn(two: Found) -> None:
    first, last = (each["normed gradient"] for each in two)
    assert not isinstance(first, str), first
    for name, value in first.items():
        assert torch.equal(value, last[name]), name
    assert float(first["module.scale"]) != 1.0
    assert int(first["module.norm.num_batches_tracked"]) == len(list(batches()))


def test_a_bad_batch_of_one_process_moves_nothing(two: Found) -> None:
    for each in two:
        found = each["bad gradient"]
        assert not isinstance(found, str), found
        assert [message == "nothing" for message in found["messages"]] == [True, False, True, True]
        assert "the loss is nan; the posterior was not touched" in found["messages"][1]
        assert found["same"]
    compare([{"bad": each["bad gradient"]["learned"]} for each in two], "bad", bad_alone())


@pytest.mark.parametrize("case", cases("unlike-gradient"))
def test_unlike_processes_are_refused_by_name(two: Found, case: str) -> None:
    named = {"weights": "the parameter module.0.bias", "lr": "the optimiser's lr", "num_data": "num_data"}
    for each in two:
        assert each[case].startswith("processes differ in ")
        assert named[case.split()[1]] in each[case]
