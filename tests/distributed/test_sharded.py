"""A model that is sharded among processes learns the posterior that one process learns."""

import math
from typing import Any

import pytest
import torch

import posterity
from distributed.runs import BATCH, RULES, STEPS, batches, loss_of, model
from distributed.runs import alone as whole_batches
from distributed.sharded import CASES, CLIP, FOUR, GRADIENT, TRAPS, by_gradient, found, one, words
from distributed.test_semantics import learned_in
from distributed.test_together import compare

Found = list[dict[str, Any]]


def alone(kind: str, rule: str) -> dict[str, torch.Tensor]:
    """One process with the whole batch."""
    net = words() if kind == "sharded-words" else model()
    settings: dict[str, Any] = {"mc_samples": 2 if kind == "sharded-samples" else 1}
    if kind in ("sharded-adam", "sharded-saved"):
        settings["deterministic"] = "0.*" if kind == "sharded-adam" else "2.bias"
    opt = RULES[rule](net, seed=7, **settings)
    return one(net, opt, batches(), clip=CLIP if kind == "sharded-clipped" else None)


def cases(*kinds: str, of: Any = CASES) -> list[str]:
    return [case for case in of if case.split()[0] in kinds]


PLAIN = ("sharded", "sharded-samples", "sharded-clipped", "sharded-adam", "sharded-words", "sharded-passes")


@pytest.mark.parametrize("case", cases(*PLAIN))
def test_two_processes_learn_what_one_learns(two: Found, case: str) -> None:
    kind, _, rule = case.split()
    compare(two, case, alone(kind, rule))


@pytest.mark.parametrize("case", cases(*PLAIN, of=FOUR))
def test_four_processes_learn_what_one_learns(four: Found, case: str) -> None:
    kind, _, rule = case.split()
    compare(four, case, alone(kind, rule))


@pytest.mark.parametrize("case", cases("sharded-closure"))
def test_closures(two: Found, case: str) -> None:
    compare(two, case, whole_batches(case.split()[2], 1, 2))


@pytest.mark.parametrize("case", cases("sharded-contexts"))
def test_a_context_for_each_micro_batch(two: Found, case: str) -> None:
    net = model()
    opt = RULES[case.split()[2]](net, mc_samples=1, seed=7)
    for x, y in batches():
        opt.zero_grad()
        for micro in range(2):
            with opt.sampled_params():
                for rank in range(2):
                    rows = slice(6 * rank + 3 * micro, 6 * rank + 3 * micro + 3)
                    (loss_of(net, x[rows], y[rows]) / 4).backward()
        opt.step(batch_size=BATCH)
    compare(two, case, found(opt))


@pytest.mark.parametrize("trap", TRAPS)
def test_no_gathered_weight_is_stale(two: Found, trap: str) -> None:
    compare(two, f"sharded-trap {trap} ivon", alone("sharded", "ivon"))


@pytest.mark.parametrize("case", cases("sharded-bad"))
def test_what_is_not_finite_in_one_shard_stops_all(two: Found, case: str) -> None:
    for each in two:
        assert not isinstance(each[case], str), each[case]
        messages = each[case]["messages"]
        assert [message.split(":")[0] for message in messages] == [
            "FloatingPointError" if number == 1 else "nothing" for number in range(STEPS)
        ]
        assert "the posterior was not touched" in messages[1]
        assert each[case]["same"]
    rule, net = case.split()[2], model()
    opt = RULES[rule](net, mc_samples=1, seed=7, max_step=math.inf)
    pairs = [pair for number, pair in enumerate(batches()) if number != 1]
    compare(learned_in(two, case, "learned"), case, one(net, opt, pairs))


@pytest.mark.parametrize("case", cases("sharded-reloaded"))
def test_going_on_from_a_posterior_and_from_a_state_dict(two: Found, case: str) -> None:
    net, pairs = model(), list(batches())
    opt = RULES[case.split()[2]](net, mc_samples=1, seed=7)
    one(net, opt, pairs[: STEPS // 2])
    opt.load_posterior(opt.posterior())
    compare(learned_in(two, case, "learned"), case, one(net, opt, pairs[STEPS // 2 :]))
    for each in two:
        for key, value in each[case]["learned"].items():
            assert torch.equal(value, each[case]["again"][key]), key


@pytest.mark.parametrize("case", cases("sharded-saved"))
def test_sharded_checkpoints_resume_in_one_and_four_processes(two: Found, four: Found, case: str) -> None:
    assert learned_in(two, case, "fresh")[0][case]
    whole = alone("sharded-saved", case.split()[2])
    compare(learned_in(four, case, "learned"), case, whole)


@pytest.mark.parametrize("case", cases("sharded-gradient"))
def test_gradient_methods(two: Found, case: str) -> None:
    settings, prior = GRADIENT[case.split()[1]]
    plain = posterity.variational(model(), std_init=0.1, seed=7, **settings)
    found = two
    if case == "sharded-gradient resharded ffg":
        assert 'register_fsdp_forward_method(model, "kl")' in two[0][case]["message"]
        found = learned_in(two, case, "learned")
    compare(found, case, by_gradient(plain, plain, batches(), prior))


def test_a_context_whose_gradients_do_not_travel_is_refused(two: Found) -> None:
    for each in two:
        assert "has left no gradient: take all backward passes" in each["sharded-unsynced"]["message"]


def test_what_a_sharded_model_cannot_have_is_refused_by_name(two: Found) -> None:
    wanted = {
        **dict.fromkeys(("vogn", "ogn", "kfac", "noisy-kfac"), "collects curvature only from layers"),
        "mesh": "leave mesh= out",
        "names": "pass the module itself",
        "compiled": "use a loop with sampled_params()",
        "variational": "fully_shard(variational(net))",
        "predict": "call model.unshard() in all processes first",
    }
    for each in two:
        said = each["sharded-refused"]
        assert said.keys() == wanted.keys()
        for what, reason in wanted.items():
            assert said[what].startswith("TypeError: ")
            assert reason in said[what]
