"""Continual learning: metrics of an accuracy matrix.

``accuracy[i, j]`` is the accuracy on task j after task i has been learned, ``[tasks, tasks]``.

Nothing here passes a posterior on: BGD always takes each batch's posterior as the next one's prior, VOGN does
at ``hand_over()``, ``optimizer.load_posterior(q)`` continues from a saved one, and for gradient methods
``kl(q, last)`` with ``last = q.frozen()`` is the prior's term.

References: Lopez-Paz and Ranzato 2017 (backward and forward transfer), Chaudhry et al. 2018 (forgetting).
"""

from __future__ import annotations

from torch import Tensor

from posterity.arguments import TENSOR, takes


@takes(accuracy=TENSOR)
def average_accuracy(accuracy: Tensor) -> float:
    """Mean accuracy over all tasks at the end: the mean of the last row.

    Example:
        >>> import torch
        >>> average_accuracy(torch.tensor([[1.0, 0.0], [0.5, 1.0]]))
        0.75
    """
    return float(_checked(accuracy)[-1].mean())


@takes(accuracy=TENSOR)
def forgetting(accuracy: Tensor) -> float:
    """How much worse a task is at the end than it was at its best, mean over all tasks but the last.

    Example:
        >>> import torch
        >>> forgetting(torch.tensor([[1.0, 0.0], [0.5, 1.0]]))
        0.5
    """
    matrix = _square(accuracy)
    return float((matrix[:-1, :-1].max(0).values - matrix[-1, :-1]).mean())


@takes(accuracy=TENSOR)
def backward_transfer(accuracy: Tensor) -> float:
    """What later tasks did to a task after it was learned, mean over all but the last; below 0 is forgetting.

    Example:
        >>> import torch
        >>> backward_transfer(torch.tensor([[1.0, 0.0], [0.5, 1.0]]))
        -0.5
    """
    matrix = _square(accuracy)
    return float((matrix[-1] - matrix.diagonal())[:-1].mean())


@takes(accuracy=TENSOR, untrained=TENSOR)
def forward_transfer(accuracy: Tensor, untrained: Tensor) -> float:
    """What earlier tasks did for a task before it was learned, mean over all tasks but the first.

    Args:
        accuracy: The matrix.
        untrained: Accuracy of the network on every task before it learned anything, ``[tasks]``.

    Example:
        >>> import torch
        >>> forward_transfer(torch.tensor([[1.0, 0.5], [0.5, 1.0]]), torch.tensor([0.25, 0.25]))
        0.25
    """
    matrix = _square(accuracy)
    untrained = untrained.to(matrix)  # whose numbers are floats, whatever those of accuracy are
    if untrained.shape != matrix[0].shape:
        raise ValueError(
            f"untrained must have one accuracy for each of {len(matrix)} tasks, not {list(untrained.shape)}"
        )
    return float((matrix.diagonal(1) - untrained[1:]).mean())


def _square(accuracy: Tensor) -> Tensor:
    matrix = _checked(accuracy)
    rows, columns = matrix.shape
    if rows != columns or rows < 2:
        raise ValueError(f"transfer needs a row for every task, and two tasks or more, not {rows}x{columns}")
    return matrix


def _checked(accuracy: Tensor) -> Tensor:
    accuracy = accuracy if accuracy.is_floating_point() else accuracy.float()
    if accuracy.dim() != 2 or accuracy.numel() == 0:
        raise ValueError(f"accuracy must be a matrix [tasks, tasks], not {list(accuracy.shape)}")
    if not bool(((accuracy >= 0) & (accuracy <= 1)).all()):
        raise ValueError("accuracies must lie in 0 … 1: the matrix is not whole, or in percent")
    return accuracy
