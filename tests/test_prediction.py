"""Statistics of networks' outputs are those of the kept outputs, however many networks come at a time."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import posterity
from posterity import Prediction, metrics
from posterity import predict as predict_function
from posterity.prediction import Classes, Statistics

EXACT: dict[str, Any] = {"rtol": 1e-12, "atol": 1e-13}
OF_CLASSES = ("probs", "log_probs", "vote", "label", "entropy", "expected_entropy", "mutual_information")
OF_OUTPUTS = ("mean", "variance")


def outputs(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)


def streamed(samples: Tensor, sizes: list[int], rows: int, **given: Any) -> Prediction:
    """A prediction from statistics of so many networks, and so many inputs, at a time."""
    classes = Classes(given.get("class_dim"), given.get("binary", False))
    found = []
    for batch in samples.split(rows, 1):
        first, *others = batch.split(sizes)
        statistics = Statistics(first, classes)
        for other in others:
            statistics.add(Statistics(other, classes))
        found.append(statistics)
    return Prediction(Statistics.joined(found), **given)


@pytest.mark.parametrize("sizes", [[7], [1] * 7, [3, 3, 1], [1, 6]], ids=str)
@pytest.mark.parametrize(
    ("shape", "given"),
    [
        ((7, 10, 4), {}),
        ((7, 10, 4), {"mode": "vote"}),
        ((7, 10), {"binary": True}),
        ((7, 10, 1), {"binary": True}),
        ((7, 10, 4, 3, 2), {"class_dim": 1}),
        ((7, 10, 3, 4), {"class_dim": -1}),
    ],
    ids=str,
)
def test_streamed_statistics_are_those_of_kept_outputs(
    shape: tuple[int, ...], given: dict[str, Any], sizes: list[int]
) -> None:
    samples = 3 * outputs(*shape)
    kept, p = Prediction(samples, **given), streamed(samples, sizes, 4, **given)
    assert p.networks == kept.networks == 7
    for name in (*OF_CLASSES, *OF_OUTPUTS):
        found = getattr(p, name)
        torch.testing.assert_close(found, getattr(kept, name), **EXACT)


def test_several_labels_are_told_where_their_probabilities_are() -> None:
    with pytest.raises(ValueError, match=r"have 3 on .*predict\(\.\.\., output=torch.sigmoid\).mean"):
        _ = Prediction(outputs(2, 10, 3), binary=True).probs


def test_regression_has_no_probabilities_and_says_so_streamed_too() -> None:
    samples = outputs(5, 10, 1) + 1e6  # far from 0, where squares would cancel
    p, kept = streamed(samples, [1] * 5, 3), Prediction(samples)
    torch.testing.assert_close(p.mean, samples.mean(0), **EXACT)
    torch.testing.assert_close(p.variance, samples.var(0), rtol=1e-8, atol=0)
    for name in OF_CLASSES:
        with pytest.raises(ValueError, match="for regression see") as streamed_error:
            getattr(p, name)
        with pytest.raises(ValueError, match="for regression see") as kept_error:
            getattr(kept, name)
        assert str(streamed_error.value) == str(kept_error.value)
    alone = streamed(samples[:1], [1], 3)
    assert alone.variance.tolist() == [[0.0]] * 10
    same = streamed(samples[:1].expand(5, 10, 1), [1] * 5, 3)
    assert same.variance.tolist() == [[0.0]] * 10


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_streaming_a_thousand_networks_rounds_once(dtype: torch.dtype) -> None:
    samples = outputs(1000, 5, 3, dtype=dtype)
    exact, p = Prediction(samples.double()), streamed(samples, [1] * 1000, 5)
    for name in (*OF_CLASSES, *OF_OUTPUTS):
        found = getattr(p, name)
        assert found.dtype in (torch.float32, torch.int64)
        torch.testing.assert_close(found.double(), getattr(exact, name).double(), rtol=1e-6, atol=2e-7)


def test_log_probs_do_not_saturate_and_nan_stays_nan() -> None:
    samples = torch.tensor([[[0.0, 2000.0]], [[0.0, 3000.0]]], dtype=torch.float64)
    p = streamed(samples, [1, 1], 1)
    assert p.log_probs[0, 0].item() == pytest.approx(-2000.0 - math.log(2), abs=1e-9)
    assert metrics.nll(p, torch.tensor([0])) == pytest.approx(2000.0 + math.log(2))
    odd = torch.tensor([[[1.0, -math.inf]], [[1.0, 2.0]], [[math.nan, 2.0]]]).double()
    for rows in (2, 3):
        kept, p = Prediction(odd[:rows]), streamed(odd[:rows], [1] * rows, 1)
        for name in ("probs", "log_probs", "vote", "entropy", "mean"):
            torch.testing.assert_close(getattr(p, name), getattr(kept, name), equal_nan=True)


def make() -> tuple[nn.Module, posterity.Factorised, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    return model, posterity.BGD(model, std_init=0.5).posterior(), torch.randn(10, 4).double()


@pytest.mark.parametrize("loader", [False, True])
@pytest.mark.parametrize("chunk", [None, 1, 3])
def test_predict_streams_what_it_does_not_keep(
    loader: bool, chunk: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, q, x = make()
    options: dict[str, Any] = {"samples": 5, "batch_size": 4, "chunk": chunk}
    kept = posterity.predict(model, q, x, **options, keep_samples=True)
    inputs = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), batch_size=4) if loader else x
    not_kept = posterity.predict(model, q, inputs, **options, keep_samples=False)
    # 3 networks · 4 inputs · 3 classes · 8 bytes pass; what was kept until then is not lost.
    monkeypatch.setattr(sys.modules["posterity.predict"], "_SMALL", 300)
    switched = posterity.predict(model, q, inputs, **options)
    for p in (not_kept, switched):
        assert isinstance(p.outputs, Statistics)
        for name in (*OF_CLASSES, *OF_OUTPUTS):
            torch.testing.assert_close(getattr(p, name), getattr(kept, name), **EXACT)
    with pytest.raises(
        ValueError,
        match=r"outputs of all 5 networks, .* GiB, were not kept: call predict\(..., keep_samples=True",
    ):
        _ = switched.samples
    with pytest.raises(ValueError, match="were not kept"):
        _ = replace(switched, mode="single").probs
    assert torch.equal(replace(switched, mode="vote").probs, switched.vote)
    with pytest.raises(ValueError, match=r"give class_dim= and binary= to predict\(\), or keep_samples=True"):
        _ = replace(switched, class_dim=1).probs


def test_outputs_are_kept_where_they_are_few_or_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    model, q, x = make()
    assert posterity.predict(model, q, x).samples.shape == (10, 10, 3)
    monkeypatch.setattr(sys.modules["posterity.predict"], "_SMALL", 0)
    assert posterity.predict(model, q, x, mode="single").probs.shape == (10, 10, 3)
    for source in (q, None):
        kept = posterity.predict(model, source, x, keep_samples=True, chunk=4, batch_size=3)
        whole = posterity.predict(model, source, x, keep_samples=True)
        torch.testing.assert_close(kept.samples, whole.samples, **EXACT)
    with pytest.raises(ValueError, match="mode='single' needs the outputs of every network"):
        posterity.predict(model, q, x, mode="single", keep_samples=False)


def test_large_outputs_are_looked_at_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = outputs(5, 10, 3)
    whole = {name: getattr(Prediction(samples), name) for name in (*OF_CLASSES, *OF_OUTPUTS)}
    monkeypatch.setattr(sys.modules["posterity.prediction"], "_AT_ONCE", 40)
    for name, value in whole.items():
        torch.testing.assert_close(getattr(Prediction(samples), name), value, **EXACT)


def test_networks_are_drawn_in_parts_that_fit_into_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    model, q, x = make()
    whole = posterity.predict(model, q, x, samples=5).samples
    drawn: list[range] = []
    sample = posterity.Factorised._sample
    monkeypatch.setattr(
        posterity.Factorised,
        "_sample",
        lambda self, rows, *where: drawn.append(rows) or sample(self, rows, *where),
    )
    numbers = sum(p.numel() for p in model.parameters()) + x.numel()
    monkeypatch.setattr(sys.modules["posterity.predict"], "_AT_ONCE", 2 * numbers)
    torch.testing.assert_close(posterity.predict(model, q, x, samples=5).samples, whole)
    assert drawn == [range(2), range(2, 4), range(4, 5)]
    assert predict_function is posterity.predict


PEAK = """
import resource, torch, posterity
torch.set_num_threads(1)
model = torch.nn.Linear(4, 10)
q, x = posterity.BGD(model).posterior(), torch.randn(20_000, 4)
posterity.predict(model, q, x[:2048], samples=100, keep_samples=False).probs
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
p = posterity.predict(model, q, x, samples=100, keep_samples=False)
p.probs, p.mutual_information, p.vote, p.log_probs, p.variance
print(before, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in kB on Linux alone")
def test_memory_does_not_grow_with_the_number_of_inputs() -> None:
    found = subprocess.run(
        [sys.executable, "-c", PEAK], check=True, capture_output=True, text=True, env=os.environ
    )
    before, peak = (1024 * int(each) for each in found.stdout.split())
    assert peak - before < 20_000 * 100 * 10 * 4  # one copy of all outputs; they took four


def test_repr_is_one_line_without_the_outputs() -> None:
    outputs = torch.zeros(10, 5, 2)
    assert repr(Prediction(outputs)) == "Prediction(networks=10, outputs=[5, 2], mode='average')"
    p = Prediction(Statistics(outputs, Classes(1)), "vote", class_dim=1)
    assert repr(p) == "Prediction(networks=10, outputs=[5, 2], mode='vote', keep_samples=False, class_dim=1)"
    assert repr(Prediction(outputs[..., :1], binary=True)).endswith(
        "outputs=[5, 1], mode='average', binary=True)"
    )
