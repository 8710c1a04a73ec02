"""Many threads predict with one model, beside plain calls, and each gets what it would have got alone."""

from __future__ import annotations

import os
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import posterity
from posterity import MCDropout, laplace, predict, run
from posterity.torch_private import no_fallback_warnings

X = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))
THREADS, CALLS = 8, 1_000 if os.environ.get("POSTERITY_SLOW") else 20


@pytest.fixture(autouse=True)
def often_interrupted() -> Iterator[None]:
    """Threads take turns a hundred times as often, and each has one core: so faults show in seconds."""
    interval, cores = sys.getswitchinterval(), torch.get_num_threads()
    sys.setswitchinterval(5e-5)
    torch.set_num_threads(1)
    yield
    sys.setswitchinterval(interval)
    torch.set_num_threads(cores)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    found = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3))
    found(torch.randn(64, 6))
    return found


def in_threads(call: Callable[[int], Any], threads: int = THREADS) -> list[Any]:
    """What calls with the numbers of threads give, or raise, together."""
    found: list[Any] = [None] * threads
    ready = threading.Barrier(threads)

    def work(number: int) -> None:
        ready.wait()
        try:
            found[number] = call(number)
        except Exception as error:
            found[number] = error

    working = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for thread in working:
        thread.start()
    for thread in working:
        thread.join()
    return found


def wrong_answers(ways: dict[str, Callable[[], Tensor]], right: dict[str, Tensor]) -> Counter[str]:
    """How often each way was wrong, or what it raised, in several threads at once."""
    wrong: Counter[str] = Counter()

    def work(number: int) -> None:
        names = list(ways)
        for k in range(CALLS):
            name = names[(k + number) % len(names)]
            try:
                if not torch.allclose(ways[name](), right[name], rtol=1e-4, atol=1e-6):
                    wrong[name] += 1
            except Exception as error:
                wrong[f"{name}: {error}"] += 1

    in_threads(work)
    return wrong


@pytest.mark.parametrize("training", [True, False])
def test_every_way_to_predict_is_thread_safe_beside_plain_calls(training: bool) -> None:
    model, twin, stop = net().train(training), net().eval(), threading.Event()
    other = nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3)).train(training)
    q = posterity.BGD(model, std_init=0.3, seed=0).posterior()
    learned = posterity.variational(net().eval(), seed=0).eval()
    weights = q.sample(4, seed=1)
    ways: dict[str, Callable[[], Tensor]] = {
        "stack": lambda: predict(model, q, X, samples=4).probs,
        "loop": lambda: predict(model, q, X, samples=4, how="loop").probs,
        "mean": lambda: predict(model, q, X, mode="mean").probs,
        "linear": lambda: predict(model, q, X, samples=3, linearise=True).probs,
        "linear loop": lambda: predict(model, q, X, samples=3, linearise=True, how="loop").probs,
        "dropout": lambda: predict(model, MCDropout(), X, samples=3).probs,
        "ensemble": lambda: predict([model, other], x=X).probs,
        "variational": lambda: predict(learned, learned.posterior, X).probs,
        "moments": lambda: laplace.moments(model, q, X).variance,
        "run": lambda: run(twin, weights, X).detach(),
        "run linear": lambda: run(twin, weights, X, around=q.mean()).detach(),
    }
    right = {name: way() for name, way in ways.items()}
    own, plain = [model, other, twin, learned.module], twin(X).detach()
    before = [{key: value.clone() for key, value in each.state_dict().items()} for each in own]
    parts, modes = [[*each.parameters()] for each in own], [each.training for each in own]
    filters, disturbed = list(warnings.filters), [0]

    def beside() -> None:
        while not stop.is_set():
            with torch.no_grad():
                disturbed[0] += not torch.equal(twin(X), plain)

    bystander = threading.Thread(target=beside)
    bystander.start()
    wrong = wrong_answers(ways, right)
    stop.set()
    bystander.join()
    assert not wrong
    assert disturbed == [0]
    for each, state, params, mode in zip(own, before, parts, modes, strict=True):
        assert all(torch.equal(value, state[key]) for key, value in each.state_dict().items())
        assert all(a is b for a, b in zip(each.parameters(), params, strict=True))
        assert each.training is mode
    assert list(warnings.filters) == filters


def test_attention_is_linearised_in_threads_and_no_switch_is_left() -> None:
    torch.manual_seed(0)
    block = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)
    model, x = nn.Sequential(block, nn.Flatten(), nn.Linear(18, 2)).eval(), torch.randn(4, 3, 6)
    q = posterity.BGD(model, std_init=0.1, seed=0).posterior()
    ways: dict[str, Callable[[], Tensor]] = {
        "linear": lambda: predict(model, q, x, samples=2, linearise=True).probs,
        "moments": lambda: laplace.moments(model, q, x).variance,
        "stack": lambda: predict(model, q, x, samples=2).probs,
    }
    right = {name: way() for name, way in ways.items()}
    switches = (
        torch.backends.mha.get_fastpath_enabled,
        torch.backends.cuda.flash_sdp_enabled,
        torch.backends.cuda.math_sdp_enabled,
        torch.backends.cuda.mem_efficient_sdp_enabled,
    )
    before, seen, stop = [switch() for switch in switches], set(), threading.Event()

    def watch() -> None:
        while not stop.is_set():
            seen.add(tuple(switch() for switch in switches))

    watching = threading.Thread(target=watch)
    watching.start()
    wrong = wrong_answers(ways, right)
    stop.set()
    watching.join()
    assert not wrong
    assert seen == {tuple(before)}


@pytest.mark.parametrize("estimator", ["weight", "local"])
def test_threads_draw_each_number_of_a_variational_model_once(estimator: Any) -> None:
    model = posterity.variational(nn.Linear(6, 2), std_init=0.5, seed=0, estimator=estimator).eval()

    def calls(number: int) -> list[Tensor]:
        with torch.no_grad():
            drawn = [model.outputs(X, samples=1)[0] for _ in range(CALLS)]
            return [*drawn, *(model(X) for _ in range(CALLS))]

    outputs = torch.stack([each for own in in_threads(calls) for each in own])
    assert len(outputs.unique(dim=0)) == len(outputs)
    assert model.draws == len(outputs)


def test_prediction_does_not_rewind_generators_of_other_threads() -> None:
    class Noisy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.rand(())

    torch.manual_seed(0)
    predicted, drawn = threading.Event(), threading.Event()

    class Waits(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            torch.rand(())
            predicted.set()
            drawn.wait(10)
            return x

    thread = threading.Thread(target=lambda: predict(Waits(), x=X))
    thread.start()
    predicted.wait(10)
    first = torch.rand(3)
    drawn.set()
    thread.join()
    assert not torch.equal(torch.rand(3), first)
    before = torch.get_rng_state()
    predict(Noisy(), x=X)
    assert torch.equal(torch.get_rng_state(), before)


def test_operations_without_a_batching_rule_do_not_warn_in_threads() -> None:
    torch.manual_seed(0)

    class Renormed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return torch.renorm(self.fc(x), 2, 0, 1.0)

    model = Renormed()
    q = posterity.BGD(model, std_init=0.3, seed=0).posterior()
    right = {"stack": predict(model, q, X, how="loop").probs}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not wrong_answers({"stack": lambda: predict(model, q, X).probs}, right)
        with no_fallback_warnings(), no_fallback_warnings():
            pass
        with pytest.warns(UserWarning, match="There is a performance drop"):
            torch.vmap(lambda x: torch.renorm(x, 2, 0, 1.0))(torch.randn(2, 3, 4))
