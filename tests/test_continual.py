"""Metrics of an accuracy matrix, by hand."""

import pytest
import torch

from posterity.continual import average_accuracy, backward_transfer, forgetting, forward_transfer

# Task 0 is at its best after task 1, and task 2 gains from what came before.
MATRIX = torch.tensor(
    [
        [0.80, 0.20, 0.10],
        [0.90, 0.70, 0.30],
        [0.60, 0.65, 0.95],
    ],
    dtype=torch.float64,
)
UNTRAINED = torch.tensor([0.10, 0.05, 0.15], dtype=torch.float64)


def test_by_hand() -> None:
    assert average_accuracy(MATRIX) == pytest.approx((0.60 + 0.65 + 0.95) / 3)
    assert forgetting(MATRIX) == pytest.approx(((0.90 - 0.60) + (0.70 - 0.65)) / 2)
    assert backward_transfer(MATRIX) == pytest.approx(((0.60 - 0.80) + (0.65 - 0.70)) / 2)
    assert forward_transfer(MATRIX, UNTRAINED) == pytest.approx(((0.20 - 0.05) + (0.30 - 0.15)) / 2)


def test_the_average_needs_no_row_for_every_task() -> None:
    assert average_accuracy(MATRIX[-1:]) == pytest.approx((0.60 + 0.65 + 0.95) / 3)


@pytest.mark.parametrize("wrong", [MATRIX[:2], MATRIX[:1, :1]])
def test_transfer_without_all_rows_is_refused(wrong: torch.Tensor) -> None:
    for metric in (forgetting, backward_transfer, lambda matrix: forward_transfer(matrix, UNTRAINED)):
        with pytest.raises(ValueError, match="a row for every task, and two tasks or more"):
            metric(wrong)


@pytest.mark.parametrize("metric", [average_accuracy, forgetting, backward_transfer])
def test_what_is_no_matrix_of_accuracies_is_refused(metric) -> None:
    with pytest.raises(ValueError, match=r"must be a matrix \[tasks, tasks\], not \[3\]"):
        metric(MATRIX[0])
    with pytest.raises(ValueError, match="not whole, or in percent"):
        metric(100 * MATRIX)
    with pytest.raises(ValueError, match="not whole, or in percent"):
        metric(MATRIX.clone().index_fill(0, torch.tensor([1]), float("nan")))


def test_another_number_of_untrained_accuracies_is_refused() -> None:
    with pytest.raises(ValueError, match=r"each of 3 tasks, not \[2\]"):
        forward_transfer(MATRIX, UNTRAINED[:2])


def test_whole_numbers_and_booleans_are_accuracies_too() -> None:
    right, untrained = torch.tensor([[1, 1], [0, 1]]), torch.tensor([0.25, 0.25])
    for matrix in (right, right.bool()):
        assert forward_transfer(matrix, untrained) == 0.75
