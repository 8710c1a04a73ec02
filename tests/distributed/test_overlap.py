"""Sums that travel during the backward pass are those that travel after it."""

from typing import Any

import pytest
import torch
from torch import nn

import posterity
from distributed.overlap import CASES, FOUR
from distributed.runs import STEPS, alone
from distributed.test_semantics import learned_in, one
from distributed.test_together import compare

Found = list[dict[str, Any]]
ALONE = {"loop": (2, 1), "idle": (1, 1), "closure": (2, 2)}


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("overlap ")])
def test_overlap_does_not_change_what_is_learned(two: Found, case: str) -> None:
    _, kind, rule = case.split()
    found = learned_in(two, case, "learned")
    compare(found, case, two[0][case]["plain"]["learned"])
    if kind in ALONE:
        compare(found, case, alone(rule, *ALONE[kind]))


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("overlap ")])
def test_all_processes_send_the_same(two: Found, case: str) -> None:
    first, last = ([each for each in found[case]["events"] if "sent" in each] for found in two)
    assert first == last


@pytest.mark.parametrize("rule", ["bgd", "ivon"])
def test_last_layers_are_sent_before_the_first_have_their_gradients(two: Found, rule: str) -> None:
    # E[g] and E[g·eps] of biases and weights with 3 outputs of 6 inputs, and with 6 outputs of 5.
    last, first = ["sent 3"] * 2 + ["sent 18"] * 2, ["sent 6"] * 2 + ["sent 30"] * 2
    for each in two:
        events = each[f"overlap loop {rule}"]["events"]
        begun = 0
        for _ in range(STEPS):
            end = events.index("backward", begun)
            step, begun = events[begun:end], end + 1
            passed = step.index("first layer")
            assert [event for event in step[:passed] if event in last] == last
            assert [event for event in step[-len(first) - 1 :] if event in first] == first


@pytest.mark.parametrize("rule", ["bgd", "ivon"])
def test_number_of_collectives_is_fixed(two: Found, rule: str) -> None:
    for kind in ("loop", "idle", "clipped", "closure", "contexts", "passes"):
        for each in two:
            sent = [event for event in each[f"overlap {kind} {rule}"]["events"] if "sent" in event]
            assert len(sent) == STEPS * (8 + 1), (kind, sent)


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("spoilt ")])
def test_a_spoilt_step_of_one_process_is_refused_by_all(two: Found, case: str) -> None:
    *_, what, rule = case.replace("raises early", "raises").split()
    said = {
        "input": ("the posterior was not touched",) * 2,
        "raises": ("another process raised an error inside sampled_params()", "ValueError: of the user"),
    }.get(what, ("overlap=True has sent gradients that were changed afterwards",) * 2)
    for each, expected in zip(two, said, strict=True):
        found = each[case]
        assert not isinstance(found, str), found
        assert expected in found["messages"][1]
        assert found["messages"][:1] + found["messages"][2:] == ["nothing"] * (STEPS - 1)
        assert found["same"]
        assert not found["hooks"]
    assert two[0][case]["collectives"] == two[1][case]["collectives"]
    compare(learned_in(two, case, "learned"), case, one(rule, "mesh", leave=(1,)))


@pytest.mark.parametrize("case", FOUR)
def test_samples_of_a_share_are_split_over_processes(four: Found, case: str) -> None:
    compare(four, case, alone(case.split()[2], 2, 2))


def test_overlap_without_a_mesh_is_refused() -> None:
    with pytest.raises(ValueError, match="overlap=True needs mesh="):
        posterity.IVON(nn.Linear(2, 1), num_data=1, overlap=True)


def test_overlap_is_refused_for_rules_with_late_gradients() -> None:
    with pytest.raises(TypeError, match="VOGN has no overlap"):
        posterity.VOGN(nn.Linear(2, 1), num_data=1, overlap=True)


def test_pieces_cover_all_blocks_once(monkeypatch: pytest.MonkeyPatch) -> None:
    net = nn.Sequential(*(nn.Linear(size, size) for size in (3, 20, 5, 40)))
    opt = posterity.IVON(net, num_data=1)
    flats = opt.cache.groups()
    for size in (1, 400, 1 << 20):
        monkeypatch.setattr(posterity.optim.overlap, "PIECE", size)
        every = [opt.sums.of(flat, None) for flat in flats]
        found = posterity.optim.overlap.pieces(opt, every)
        assert [i for piece in reversed(found) for i in piece.blocks] == list(range(8))
        for each in every:
            each.both.zero_()
        for piece in found:
            for sent in piece.sent:
                sent += 1
        views = [view for each in every for both in each.both for view in each.group.layout.views(both)]
        assert all(torch.equal(view, torch.ones_like(view)) for view in views)
        assert len(found) == {1: 8, 1 << 20: 1}.get(size, len(found))
