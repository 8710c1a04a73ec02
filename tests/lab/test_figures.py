"""Figures show the data that they are given."""

import re
from inspect import getsource
from types import ModuleType

import pytest
import torch

pytest.importorskip("matplotlib")

from posterity.diagnostics import Histogram
from posterity_lab import errors, figures, report, theory
from posterity_lab.errors import PruningCurve


def curve(*errors: float) -> PruningCurve:
    return PruningCurve((0.0, 0.5, 0.9), (100, 50, 10), errors, unpruned=errors[0])


def test_ratios_are_means_over_runs() -> None:
    _, (axes,) = report.figure()
    figures.error_ratios(
        axes, {"BGD": [curve(0.02, 0.02, 0.04), curve(0.01, 0.02, 0.04)], "SGD": [curve(0.1, 0.2, 0.9)]}
    )
    bgd, sgd, one = axes.get_lines()
    assert bgd.get_ydata().tolist() == pytest.approx([1.0, 1.5, 3.0])
    assert sgd.get_ydata().tolist() == pytest.approx([1.0, 2.0, 9.0])
    assert list(bgd.get_xdata()) == pytest.approx([1.0, 0.5, 0.1])
    assert one.get_ydata() == [1.0, 1.0]
    assert [axes.xaxis.get_major_formatter()(left, None) for left in (1.0, 0.5, 0.1)] == ["0%", "50%", "90%"]
    low, high = axes.get_ylim()
    assert low < 1.0
    assert high > 9.0


def test_curves_of_other_fractions_are_refused() -> None:
    other = PruningCurve((0.0, 0.8), (100, 20), (0.1, 0.1), unpruned=0.1)
    with pytest.raises(ValueError, match="the same fractions"):
        figures.error_ratios(report.figure()[1][0], {"a": [curve(0.1, 0.1, 0.1)], "b": [other]})


def test_every_mode_and_reference_has_its_row() -> None:
    _, (axes,) = report.figure()
    runs = [
        {"average": 0.02, "mean": 0.03, "single": 0.05, "vote": 0.04},
        {"average": 0.04, "mean": 0.03, "single": 0.05, "vote": 0.04},
    ]
    figures.mode_comparison(axes, runs, {"SGD": [0.06, 0.08, 0.1]})
    labels = [tick.get_text() for tick in axes.get_yticklabels()]
    means = {labels[int(line.get_ydata()[0])]: line.get_xdata()[0] for line in axes.get_lines()[1::2]}
    assert means == pytest.approx(
        {
            "single networks": 0.05,
            "mean weights": 0.03,
            "averaged probabilities": 0.03,
            "majority vote": 0.04,
            "SGD": 0.08,
        }
    )


def test_rows_of_histograms_are_scaled_to_their_peaks() -> None:
    _, (axes,) = report.figure()
    edges = torch.tensor([0.01, 0.1, 1.0])
    counts = {"first": torch.tensor([1, 2]), "second": torch.tensor([100, 0]), "pruned": torch.tensor([0, 0])}
    figures.histograms(axes, Histogram(edges, counts), "σ", start=0.1)
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["first", "second", "pruned"]
    heights = [(patch.get_data().baseline - patch.get_data().values).tolist() for patch in axes.patches]
    assert heights == [pytest.approx([0.425, 0.85]), pytest.approx([0.85, 0.0]), [0.0, 0.0]]
    assert axes.get_ylim()[0] > axes.get_ylim()[1]  # the first layer is the top row


def test_the_theory_figure_shows_falling_and_growing_sigmas() -> None:
    convex, concave, _, scatter = figures.bgd_theory(steps=10, pairs=20).axes
    for line in convex.get_lines()[:2]:
        assert (torch.tensor(line.get_ydata()).diff() < 0).all()
    for line in concave.get_lines():
        assert (torch.tensor(line.get_ydata()).diff() > 0).all()
    assert all(
        axes.get_xlabel() and axes.get_ylabel() and axes.get_title() for axes in (convex, concave, scatter)
    )


def test_the_scatter_has_a_point_per_weight() -> None:
    _, (axes,) = report.figure()
    hessian, estimate = torch.tensor([1.0, -2.0]), torch.tensor([1.1, -2.2])
    figures.curvature_scatter(axes, theory.Curvature(hessian, estimate, torch.tensor([0.1, 0.1])))
    points = axes.get_lines()[1]
    assert list(points.get_xdata()) == [1.0, -2.0]
    assert list(points.get_ydata()) == pytest.approx([1.1, -2.2])


@pytest.mark.parametrize("module", [errors, theory])
def test_numbers_need_no_matplotlib(module: ModuleType) -> None:
    assert not re.search(
        r"import.*(matplotlib|report|figures)|from.*(matplotlib|report|figures)", getsource(module)
    )
