"""Metrics against their definitions, written out with loops."""

import math

import pytest
import torch
from torch import Tensor

from posterity import Prediction, metrics

G = torch.Generator().manual_seed(0)
PROBS = torch.randn(4, 200, 5, generator=G).mul(2).softmax(-1)
TARGET = torch.randint(0, 5, (200,), generator=G)


def naive_ece(probs: Tensor, target: Tensor, bins: int) -> float:
    total = 0.0
    for b in range(bins):
        inside = [
            (float(p.max()), int(p.argmax()) == int(t))
            for p, t in zip(probs, target, strict=True)
            if b / bins <= float(p.max()) < (b + 1) / bins or (b == bins - 1 and float(p.max()) == 1.0)
        ]
        if inside:
            gap = sum(c for c, _ in inside) / len(inside) - sum(r for _, r in inside) / len(inside)
            total += len(inside) / len(target) * abs(gap)
    return total


def test_single_networks_are_averaged() -> None:
    for metric in (metrics.accuracy, metrics.nll, metrics.brier, metrics.ece):
        each = [metric(p, TARGET) for p in PROBS]
        assert metric(PROBS, TARGET) == pytest.approx(sum(each) / 4, rel=1e-5)
        assert len(set(each)) == 4


def test_against_the_definitions() -> None:
    p = PROBS[0]
    assert metrics.accuracy(p, TARGET) == pytest.approx(float((p.argmax(-1) == TARGET).float().mean()))
    assert metrics.nll(p, TARGET) == pytest.approx(
        -sum(math.log(float(p[i, t])) for i, t in enumerate(TARGET)) / 200, rel=1e-5
    )
    brier = (
        sum(sum((float(p[i, c]) - (c == int(t))) ** 2 for c in range(5)) for i, t in enumerate(TARGET)) / 200
    )
    assert metrics.brier(p, TARGET) == pytest.approx(brier, rel=1e-5)
    assert metrics.ece(p, TARGET, bins=10) == pytest.approx(naive_ece(p, TARGET, 10), abs=1e-5)


def test_calibration_gaps_are_absolute_and_weighted_by_bin_count() -> None:
    confidence = torch.tensor([0.6] * 4 + [0.9] * 2)
    probs, right = torch.stack([confidence, 1 - confidence], 1), torch.tensor([1, 1, 1, 1, 1, 0])
    # Too modest by 0.4 in four of six, too sure by 0.4 in two.
    assert metrics.ece(probs, 1 - right) == pytest.approx(0.4)
    assert metrics.ece(probs, torch.zeros(6, dtype=torch.long)) == pytest.approx((4 * 0.4 + 2 * 0.1) / 6)


def test_a_confidence_on_the_border_of_two_bins_is_in_the_upper_one() -> None:
    probs = torch.tensor([[0.5, 0.5], [0.75, 0.25], [1.0, 0.0]])
    assert metrics.reliability(probs, torch.zeros(3), bins=4).count.tolist() == [0, 0, 1, 2]


def test_the_reliability_table_gives_the_calibration_error() -> None:
    table = metrics.reliability(PROBS[1], TARGET, bins=12)
    filled = table.count > 0
    assert int(table.count.sum()) == 200
    gap = (table.count * (table.confidence - table.accuracy).abs())[filled].sum() / 200
    assert float(gap) == pytest.approx(metrics.ece(PROBS[1], TARGET, bins=12), abs=1e-5)
    assert torch.isnan(table.confidence[~filled]).all()
    pooled = metrics.reliability(PROBS, TARGET)
    assert int(pooled.count.sum()) == 800


def test_out_of_distribution_scores() -> None:
    inside, outside = torch.randn(300, generator=G) * 30, torch.randn(400, generator=G) * 30 + 25
    pairs = (outside[:, None] > inside[None]).double().mean()
    assert metrics.auroc(inside, outside) == pytest.approx(float(pairs), abs=1e-6)
    threshold = outside.sort(descending=True).values[math.ceil(0.95 * 400) - 1]
    assert metrics.fpr95(inside, outside) == pytest.approx(
        float((inside >= threshold).float().mean()), abs=1e-6
    )
    assert metrics.auroc(inside, inside) == pytest.approx(0.5)


def test_rounding_and_integer_types_do_not_matter() -> None:
    probs = PROBS[0].clone()
    probs[0] = torch.tensor([1.0000001, 0.0, 0.0, 0.0, 0.0])
    exact = probs.clamp_max(1.0)
    for metric in (metrics.accuracy, metrics.nll, metrics.brier, metrics.ece):
        assert metric(probs, TARGET) == pytest.approx(metric(exact, TARGET), rel=1e-5)
        assert metric(probs, TARGET.int()) == pytest.approx(metric(probs, TARGET), rel=1e-6)


def test_certain_and_wrong_is_finite() -> None:
    assert math.isfinite(metrics.nll(torch.tensor([[1.0, 0.0]]), torch.tensor([1])))


def test_what_is_not_probabilities_is_refused() -> None:
    y = torch.tensor([0, 1])
    with pytest.raises(ValueError, match="pass probabilities, not logits"):
        metrics.accuracy(torch.tensor([[-1.0, 2.0], [0.0, 1.0]]), y)
    with pytest.raises(ValueError, match="pass probabilities, not logits"):
        metrics.nll(torch.tensor([[3.0, 2.0], [0.0, 1.0]]), y)
    with pytest.raises(ValueError, match="one of the two sets are empty"):
        metrics.auroc(torch.zeros(0), torch.ones(1))
    with pytest.raises(ValueError, match="must be finite"):
        metrics.nll(torch.tensor([[torch.nan, 2.0], [0.0, 1.0]]), y)
    with pytest.raises(ValueError, match=r"not \(2, 2\) and \(3,\)"):
        metrics.brier(torch.ones(2, 2) / 2, torch.zeros(3, dtype=torch.long))
    with pytest.raises(ValueError, match="targets must lie in 0 … 1"):
        metrics.ece(torch.ones(2, 2) / 2, torch.tensor([0, 2]))
    with pytest.raises(ValueError, match="at least one"):
        metrics.nll(torch.ones(0, 2), torch.zeros(0, dtype=torch.long))
    with pytest.raises(ValueError, match="scores must be finite"):
        metrics.auroc(torch.tensor([torch.nan]), torch.ones(1))


def test_who_is_sure_is_in_the_last_bin() -> None:
    probs, target = torch.tensor([[1.0, 0], [1, 0], [0.95, 0.05], [0.95, 0.05]]), torch.tensor([0, 1, 0, 0])
    assert metrics.ece(probs, target) == pytest.approx(naive_ece(probs, target, 15))
    assert metrics.ece(probs, target) == pytest.approx(0.225)
    for metric in (metrics.ece, metrics.reliability):
        with pytest.raises(ValueError, match="bins must be at least 1, not 0"):
            metric(probs, target, bins=0)


def test_nll_of_a_prediction_does_not_saturate() -> None:
    logits = torch.tensor([[[0.0, 300.0]], [[0.0, 200.0]]])
    wrong = torch.tensor([0])
    assert metrics.nll(Prediction(logits).probs, wrong) < 88
    exact = -(logits.double().log_softmax(-1)[..., 0].logsumexp(0) - math.log(2)).item()
    assert metrics.nll(Prediction(logits), wrong) == pytest.approx(exact)
    assert metrics.nll(Prediction(logits, "single"), wrong) == pytest.approx(250.0)
    with pytest.raises(ValueError, match=r"labels|target"):
        metrics.nll(Prediction(logits), torch.tensor([5]))


def test_what_is_no_tensor_is_refused() -> None:
    with pytest.raises(TypeError, match=r"metrics take tensors, such as prediction.probs, not a Prediction"):
        metrics.accuracy(Prediction(PROBS.log()), TARGET)
    with pytest.raises(TypeError, match=r"metrics take tensors, .* not a ndarray"):
        metrics.nll(PROBS, TARGET.numpy())
