"""Steps of which some processes replay a graph are those of processes that do not."""

from typing import Any

import pytest
import torch

from distributed.captured import BAD, CASES
from posterity.distributed import fingerprint


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("captured")])
def test_processes_that_replay_learn_what_others_learn(two: list[dict[str, Any]], case: str) -> None:
    for each in two:
        assert not isinstance(each[case], str), each[case]
        plain, graphs = each[case]["plain"], each[case]["graphs"]
        # A graph's numbers are in single precision, the sums of a step are not.
        loose = 1e-5 if "gradient" in case else 1e-6
        for key in plain.keys() - {"said", "replayed", "losses"}:
            torch.testing.assert_close(
                graphs[key].double(),
                plain[key].double(),
                rtol=loose,
                atol=loose,
                msg=lambda m, key=key: f"{key}: {m}",
            )
        if "bad" not in case:
            assert graphs["said"] == plain["said"] == ["nothing"] * len(plain["said"])
            torch.testing.assert_close(
                graphs["losses"].double(), plain["losses"].double(), rtol=loose, atol=loose
            )
    first, last = (each[case]["graphs"]["replayed"] for each in two)
    kinds = set(zip(first, last, strict=True))
    assert (True, True) in kinds
    assert {(True, False), (False, True)} & kinds or "kfac" in case
    assert any(first)
    assert any(last)


@pytest.mark.parametrize("case", [case for case in CASES if "bad" in case])
def test_bad_batch_in_one_process_raises_at_the_next_call_in_all(
    two: list[dict[str, Any]], case: str
) -> None:
    for each in two:
        said = each[case]["graphs"]["said"]
        wrong = [call for call, message in enumerate(said) if message != "nothing"]
        assert wrong == [BAD[case.split()[-1]][0] + 1]
        assert "not touched" in said[wrong[0]]


@pytest.mark.parametrize("rule", ["vogn", "noisy-kfac"])
def test_a_bad_batch_is_raised_by_the_posterior_of_all(two: list[dict[str, Any]], rule: str) -> None:
    for each in two:
        found = each[f"shown {rule}"]
        assert not isinstance(found, str), found
        assert found["raised"] == [True, False, False, False]
    assert {each[f"shown {rule}"]["replayed"] for each in two} == {True, False}


def test_steps_that_do_not_reach_all_parameters_are_not_captured(two: list[dict[str, Any]]) -> None:
    for each in two:
        found = each["unreached"]
        assert not isinstance(found, str), found
        assert found["graphs"] == found["made"] == 0
        (message,) = found["said"]
        assert "'unused' has no gradient in this process, and may have one in others" in message


@pytest.mark.parametrize("way", ["rule", "gradient"])
def test_posteriors_that_differ_by_rounding_are_handed_over(two: list[dict[str, Any]], way: str) -> None:
    first, last = (each[f"handed over {way}"] for each in two)
    assert not isinstance(first, str), first
    before, after = first["before"], first["after"]
    assert any(not torch.equal(value, last["before"][key]) for key, value in before.items())
    assert any(not torch.equal(value, after[key]) for key, value in before.items())
    torch.testing.assert_close(after, last["after"], rtol=1e-5, atol=1e-6)


def test_a_fingerprint_sees_past_rounding_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    mine, other = torch.randn(2, 1000, generator=generator)
    assert fingerprint(mine) == fingerprint(mine + 1e-6 * other)
    for unlike in (other, mine + 0.01 * other, 1.01 * mine, mine.view(10, 100), mine * torch.nan):
        assert fingerprint(mine) != fingerprint(unlike)
    assert fingerprint(torch.arange(1000)) != fingerprint(torch.arange(1000) + 1)
    assert fingerprint(mine * torch.nan) == fingerprint(mine * torch.nan)
    assert fingerprint(mine) != "nothing"
