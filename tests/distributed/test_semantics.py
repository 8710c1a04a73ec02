"""Faults, refusals, saving and the rest of what several processes do, against one process."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_

import posterity
from distributed.runs import (
    BATCH,
    RULES,
    STEPS,
    WITHOUT_NOISE,
    alone,
    batches,
    learned,
    loss_of,
    model,
    share,
)
from distributed.semantics import (
    CASES,
    CLIP,
    FOUR,
    branches,
    by_gradient,
    in_parts,
    moments,
    normed,
    posterior,
    weights,
)
from distributed.test_together import compare
from posterity import VariationalOptimizer

Found = list[dict[str, Any]]


def one(
    rule: str,
    way: str,
    world: int = 2,
    *,
    net: nn.Module | None = None,
    leave: tuple[int, ...] = (),
    clip: float | None = None,
    loss: Callable[..., torch.Tensor] | None = None,
    begin: Callable[[VariationalOptimizer], object] = lambda opt: None,
    **settings: Any,
) -> dict[str, Any]:
    """One process, which takes a context for every share (mesh), or one for all of them (ddp)."""
    net = model() if net is None else net
    opt = RULES[rule](net, mc_samples=1, seed=7, **settings)
    loss = loss or (lambda net, x, y, rank: loss_of(net, x, y))
    for number, (x, y) in enumerate(batches()):
        if number in leave:
            continue
        if number == STEPS // 2:
            begin(opt)
        parts = [(share(x, rank, world, None), share(y, rank, world, None)) for rank in range(world)]
        opt.zero_grad()
        for window in [[each] for each in range(world)] if way == "mesh" else [range(world)]:
            with opt.sampled_params():
                for rank in window:
                    (loss(net, *parts[rank], rank) / world).backward()
        if clip is not None:
            clip_grad_norm_(net.parameters(), clip)
        opt.step(batch_size=BATCH)
    return moments(opt) | weights(opt)


def of(rule: str, way: str) -> dict[str, Any]:
    """The plain run of one process: its samples see parts (mesh), or there is one sample for all (ddp)."""
    return alone(rule, 2 if way == "mesh" else 1)


def cases(kind: str) -> list[str]:
    return [case for case in CASES if case.startswith(f"{kind} ")]


def learned_in(found: Found, case: str, key: str) -> Found:
    """One part of what every process returned."""
    assert not isinstance(found[0][case], str), found[0][case]
    return [{case: each[case][key]} for each in found]


@pytest.mark.parametrize("case", cases("options"))
def test_options_of_ddp_change_nothing(two: Found, case: str) -> None:
    compare(two, case, alone(case.split()[2]))


@pytest.mark.parametrize("case", cases("closure"))
def test_closure_under_ddp(two: Found, case: str) -> None:
    rule = case.split()[1]
    compare(two, case, alone(rule, 1, 1 if rule in WITHOUT_NOISE else 2))


@pytest.mark.parametrize("case", cases("unused"))
def test_parameters_that_some_processes_do_not_use(two: Found, case: str) -> None:
    _, way, rule = case.split()
    compare(two, case, unused_by_one(rule, way, 2))


def unused_by_one(rule: str, way: str, world: int) -> dict[str, Any]:
    return one(
        rule, way, world, net=branches(), loss=lambda net, x, y, rank: F.cross_entropy(net(x, rank), y)
    )


@pytest.mark.parametrize("case", cases("clipped"))
def test_clipping_uses_the_gradient_of_all_processes(two: Found, case: str) -> None:
    _, way, rule = case.split()
    compare(two, case, one(rule, way, clip=CLIP))


@pytest.mark.parametrize("case", cases("zeroed") + cases("looked"))
def test_nothing_is_left_of_dropped_contexts_and_of_looking(two: Found, case: str) -> None:
    _, way, rule = case.split()
    compare(two, case, of(rule, way))


@pytest.mark.parametrize("case", cases("deterministic"))
def test_deterministic_parameters(two: Found, case: str) -> None:
    _, way, rule = case.split()
    compare(two, case, one(rule, way, deterministic="0.*"))


@pytest.mark.parametrize("case", cases("loaded"))
def test_going_on_from_a_posterior(two: Found, case: str) -> None:
    _, way, rule = case.split()
    compare(two, case, one(rule, way, begin=lambda opt: opt.load_posterior(opt.posterior())))


@pytest.mark.parametrize("case", cases("ragged"))
def test_unlike_shares_weigh_by_what_is_in_them(two: Found, case: str) -> None:
    _, by, rule = case.split()
    net = model()
    opt = RULES[rule](net, mc_samples=1, seed=7)
    total = 0.0
    for x, y in batches():
        sizes = [BATCH - 3, 3] if by == "batch_size" else None
        parts = [[share(each, rank, 2, sizes) for each in (x, y)] for rank in range(2)]
        if by == "terms":
            for rank, (_, labels) in enumerate(parts):
                labels[: 2 * rank + 1] = -100
        terms = [int((y >= 0).sum()) for _, y in parts]
        opt.zero_grad()
        total = 0.0
        for (x, y), own in zip(parts, terms, strict=True):
            with opt.sampled_params():
                loss = loss_of(net, x, y) * own / sum(terms)
                loss.backward()
                total += float(loss.detach())
        opt.step(batch_size=BATCH, count=sum(terms))
    compare(two, case, learned(opt, total))


@pytest.mark.parametrize("case", cases("bad"))
def test_a_bad_batch_of_one_process_is_refused_by_all(two: Found, case: str) -> None:
    refused_by_all(two, case, 2)


def refused_by_all(found: Found, case: str, world: int) -> None:
    _, _, way, rule = case.split()
    for each in found:
        assert not isinstance(each[case], str), each[case]
        assert each[case]["same"]
        assert [m.split(":")[0] for m in each[case]["messages"]] == [
            "FloatingPointError" if number == 1 else "nothing" for number in range(STEPS)
        ]
        assert "the posterior was not touched" in each[case]["messages"][1]
    compare(learned_in(found, case, "learned"), case, one(rule, way, world, leave=(1,)))


@pytest.mark.parametrize("case", cases("halves"))
def test_state_is_that_of_one_process(two: Found, case: str) -> None:
    _, way, rule = case.split()
    for key in ("through", "resumed"):
        compare(learned_in(two, case, key), case, of(rule, way))
    first = two[0][case]
    for key, value in first["through"].items():
        assert torch.equal(value, first["resumed"][key]), f"resumed differs in {key}"
    assert first["names"] == [name for name, _ in model().named_parameters()]
    net = model()  # and one process goes on alone
    opt = RULES[rule](net, mc_samples=1, seed=1)
    net.load_state_dict(first["saved"]["model"])
    opt.load_state_dict(first["saved"]["opt"])
    step = posterity.compile_step(net, loss_of, opt, parts=2 if way == "mesh" else 1)
    for x, y in list(batches())[STEPS // 2 :]:
        step(x, y)
    want = moments(opt)
    for key, value in first["through"].items():
        torch.testing.assert_close(value, want[key], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("case", cases("resumed"))
def test_two_go_on_where_one_was(two: Found, case: str) -> None:
    _, way, rule = case.split()
    want = one_then(rule, way, 2)
    compare(two, case, want)


def one_then(rule: str, way: str, world: int) -> dict[str, Any]:
    """A whole shares the first half's batches, a part each for every process the second's."""
    net = model()
    opt = RULES[rule](net, mc_samples=1, seed=7)
    step = posterity.compile_step(net, loss_of, opt)
    parts = posterity.compile_step(net, loss_of, opt, parts=world if way == "mesh" else 1)
    for number, (x, y) in enumerate(batches()):
        (step if number < STEPS // 2 else parts)(x, y)
    return moments(opt)


@pytest.mark.parametrize("way", ["mesh", "ddp"])
def test_buffers_are_those_of_the_first_process(two: Found, way: str) -> None:
    net = normed()
    for x, _ in batches():
        net(share(x, 0, 2, None))
    for rank, each in enumerate(two if way == "mesh" else two[:1]):
        found = {name.removeprefix("module."): value for name, value in each[f"statistics {way}"].items()}
        for name, value in net.named_buffers():
            assert torch.equal(found[name], value), f"{name} in process {rank}"


def test_shares_with_different_numbers_of_parts_have_different_noise(two: Found) -> None:
    first, second = (each["numbers"] for each in two)
    assert first == {"rule": list(range(8)), "gradient": list(range(8))}
    assert second == {"rule": list(range(8, 12)), "gradient": list(range(8, 12))}


@pytest.mark.parametrize("case", cases("parts"))
def test_shares_in_unlike_numbers_of_parts(two: Found, case: str) -> None:
    alone = in_parts(case.split()[1], 0, 1)
    for each in two:
        assert not isinstance(each[case], str), each[case]
        for key, value in each[case].items():
            torch.testing.assert_close(value, two[0][case][key], rtol=0, atol=0)
            if "bgd" not in case:  # whose stds move by the noise
                torch.testing.assert_close(value, alone[key], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("case", cases("unlike"))
def test_unlike_processes_are_refused_by_name(two: Found, case: str) -> None:
    what = case.split()[1]
    named = {"weights": "the parameter 0.bias", "model": "the parameter 0.weight", "state": "the state"}
    for each in two:
        assert each[case]["same"]
        assert each[case]["message"].startswith("RuntimeError: processes differ in ")
        assert named.get(what, f"the optimiser's {what}") in each[case]["message"]


@pytest.mark.parametrize("way", ["mesh", "ddp"])
def test_all_draw_by_the_seed_of_the_first(two: Found, way: str) -> None:
    first, last = (each[f"unseeded {way}"] for each in two)
    assert first["first"] != last["first"]
    assert first["first"] == first["seed"] == last["seed"]


@pytest.mark.parametrize("case", cases("unwrapped"))
def test_gradients_that_nobody_averages_are_refused(two: Found, case: str) -> None:
    for each in two:
        assert "wrap the model in DistributedDataParallel" in each[case]["forgotten"]
        assert "no_sync()" in each[case]["apart"]


def test_wrappers_that_do_not_fit_are_refused(two: Found) -> None:
    for each in two:
        assert each["wrappers"]["mesh"].startswith(
            "ValueError: the model is wrapped in DistributedDataParallel"
        )
        for option in ("find_unused_parameters", "static_graph"):
            assert f"({option}=True)" in each["wrappers"][option]
            assert "VOGN" in each["wrappers"][option]


@pytest.mark.parametrize("kind", ["seeded", "unseeded"])
def test_gradient_methods_learn_what_one_learns(two: Found, kind: str) -> None:
    case = f"variational {kind}"
    found = learned_in(two, case, "learned")
    first, last = (each[case] for each in two)
    assert first["first"] == first["seed"] == last["seed"]
    assert (first["first"] == last["first"]) == (kind == "seeded")
    net = posterity.variational(model(), std_init=0.1, seed=first["seed"])
    compare(found, case, by_gradient(net, net, batches()))


def test_unlike_seeds_of_gradient_methods_are_refused(two: Found) -> None:
    for each in two:
        assert (
            "processes differ in the Variational's seed: 0 in process 0, 1" in each["unlike-draws"]["seeds"]
        )
        assert "DistributedDataParallel(variational(net))" in each["unlike-draws"]["inside"]


@pytest.mark.parametrize("keep", [True, False, None])
def test_prediction_of_several_processes(two: Found, keep: bool | None) -> None:
    for each in two:
        found = each[f"predicted {keep}"]
        assert "processes differ in predict's seed: 0 in process 0, 1 in process 1" in found["unlike"]
        for size, values in zip((2, 100), found["learned"], strict=True):
            x = next(batches())[0]
            p = posterity.predict(
                model(), posterior(), x, samples=5, batch_size=size, chunk=2, keep_samples=keep
            )
            assert torch.equal(values[0], p.probs)
            assert torch.equal(values[1], p.mutual_information)


@pytest.mark.parametrize("case", FOUR)
def test_four_processes(four: Found, case: str) -> None:
    kind, way, rule = case.split()[0], *case.split()[-2:]
    if kind == "bad":
        refused_by_all(four, case, 4)
    elif kind == "unused":
        compare(four, case, unused_by_one(rule, way, 4))
    else:  # two, then one, then four
        compare(four, case, two_then_four(rule, way))


def two_then_four(rule: str, way: str) -> dict[str, Any]:
    """What two processes begin and four go on with, by parts of one."""
    net = model()
    opt = RULES[rule](net, mc_samples=1, seed=7)
    first, then = (
        posterity.compile_step(net, loss_of, opt, parts=parts if way == "mesh" else 1) for parts in (2, 4)
    )
    for number, (x, y) in enumerate(batches()):
        (first if number < STEPS // 2 else then)(x, y)
    return moments(opt)
