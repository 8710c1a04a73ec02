"""Errors by every way of inference, and after pruning."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from posterity import BGD, DiagonalGaussian, Factorised, predict, prune
from posterity.compress import point_mass, sparsity
from posterity_lab.errors import PruningCurve, mode_errors, pruning_curve


def make() -> tuple[nn.Module, Factorised, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    return model, BGD(model, std_init=0.5).posterior(), torch.randn(50, 4), torch.randint(0, 3, (50,))


def wrong(labels: Tensor, y: Tensor) -> float:
    return float((labels != y).float().mean())


def test_modes_are_those_of_predict() -> None:
    model, q, x, y = make()
    errors = mode_errors(model, q, x, y, samples=7, seed=3)
    for mode, error in errors.items():
        p = predict(model, q, x, samples=7, seed=3, mode=mode)
        assert error == pytest.approx(wrong(p.label, y), abs=1e-6)
    singles = predict(model, q, x, samples=7, seed=3).samples.argmax(-1)
    assert errors["single"] == pytest.approx(sum(wrong(each, y) for each in singles) / 7, abs=1e-6)
    assert len(set(errors.values())) == 4  # else the test could not tell the modes apart


def test_weights_are_drawn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, q, x, y = make()
    drawn: list[range] = []
    sample = Factorised._sample
    monkeypatch.setattr(
        Factorised, "_sample", lambda self, rows, *where: drawn.append(rows) or sample(self, rows, *where)
    )
    mode_errors(model, q, x, y, samples=7)
    assert drawn == [range(7)]


def test_a_curve_is_the_error_of_each_pruned_net() -> None:
    model, q, x, y = make()
    fractions = [0.0, 0.5, 0.9]
    curve = pruning_curve(model, q, x, y, fractions, samples=5, mode="vote", seed=2)
    for fraction, weights, error in zip(fractions, curve.weights, curve.errors, strict=True):
        small = prune(q, fraction)
        assert weights == sum(int(leaf.keep.sum()) for leaf in small.blocks.values())
        label = predict(model, small, x, samples=5, mode="vote", seed=2).label
        assert error == pytest.approx(wrong(label, y), abs=1e-6)
    assert curve.ratios[0] == 1.0
    assert curve.ratios[2] == pytest.approx(curve.errors[2] / curve.errors[0])


def test_a_plain_net_and_other_ways_to_prune() -> None:
    model, _, x, y = make()
    with torch.no_grad():
        label = model(x).argmax(-1)
    by_layer = partial(prune, scope="layer", spare="*bias")
    curve = pruning_curve(model, point_mass(model), x, y, [0.5], mode="mean", pruner=by_layer)
    assert curve.unpruned == pytest.approx(wrong(label, y), abs=1e-6)
    assert curve.weights == (12 + 9 + 9,)
    assert sparsity(by_layer(point_mass(model), 0.5))["0.bias"] == 0.0


def test_pruning_weak_weights_keeps_the_errors_of_strong_ones() -> None:
    # Ten of a hundred weights make the label, the others are noise around zero.
    mean = torch.zeros(2, 50)
    mean[0, :5], mean[1, :5] = 3.0, -3.0
    std = torch.full_like(mean, 0.5)
    model = nn.Linear(50, 2, bias=False)
    x = torch.randn(400, 50)
    y = (x[:, :5].sum(1) < 0).long()
    q = Factorised({"weight": DiagonalGaussian(mean, std)})
    curve = pruning_curve(model, q, x, y, [0.9, 0.95], samples=4, mode="single")
    assert curve.errors[0] < 0.7 * curve.unpruned  # the noise went with the weights
    assert curve.errors[1] > curve.errors[0]


def test_no_ratio_without_an_error_and_no_net_without_weights() -> None:
    with pytest.raises(ValueError, match="no error before pruning"):
        _ = PruningCurve((0.5,), (10,), (0.1,), unpruned=0.0).ratios
    model, q, x, y = make()
    with pytest.raises(ValueError, match=r"at least 0 and less than 1, not 1\.0"):
        pruning_curve(model, q, x, y, [0.5, 1.0])
