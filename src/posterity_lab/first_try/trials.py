"""One trial: a method on a task with a seed, from the data to the test metrics and the time of a step."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor, nn

from posterity import Factorised, Prediction, metrics, predict
from posterity_lab.bench import Column, measure
from posterity_lab.first_try.methods import METHODS, Learner, Setup
from posterity_lab.first_try.tasks import TASKS, Problem

# Number of networks whose predictions are averaged.
SAMPLES = 20
STEP, ADAMW, ADAMW_GRAPH = "step", "AdamW", "AdamW in a CUDA graph"
# Precision is torch's default: on a GPU, tf32 in convolutions.
SETTING = "torch's defaults"
# Number of batches that the timed steps repeat.
_TIMED = 8


def trial(
    task: str,
    method: str,
    seed: int,
    device: str = "cpu",
    epochs: int | None = None,
    rounds: int = 5,
    round_seconds: float = 0.2,
) -> dict[str, Any]:
    """Train, test, and time a step next to AdamW's.

    An error in training, or a non-finite metric, becomes the entry ``failure``; warnings are in ``warnings``.

    Args:
        task: One of ``TASKS``.
        method: One of ``METHODS``.
        seed: Seed of initial weights, batches and weight noise; also the number of a regression set's split.
        device: ``"cpu"`` or ``"cuda"``.
        epochs: Passes over the data, if not the task's own.
        rounds: Number of timing rounds, which may be 0.
        round_seconds: Length of a round.

    Returns:
        The entries of a row of the record, as JSON types.

    Example:
        >>> found = trial("digits-mlp", "adamw", seed=0, epochs=1, rounds=0)
        >>> sorted(found["metrics"]), found["failure"]
        (['accuracy', 'ece', 'nll', 'nll_error'], None)
    """
    problem = TASKS[task](seed, device)
    problem = problem if epochs is None else replace(problem, epochs=epochs)
    row: dict[str, Any] = {"task": task, "method": method, "seed": seed, "device": device}
    row |= {"epochs": problem.epochs, "batch_size": problem.batch_size, "steps": problem.steps}
    row |= {"likelihood": problem.likelihood, "test_examples": len(problem.test), "samples": SAMPLES}
    model, _ = _begin(problem, "adamw", seed, device)
    row["parameters"] = sum(p.numel() for p in model.parameters())
    row |= {"metrics": None, "at_mean": None, "failure": None, "columns": {}, "cost": {}}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            row |= _trained(problem, method, seed, device)
        except Exception as error:  # any error that a newcomer would see
            row["failure"] = f"diverged: {_said(error)}"
    row["warnings"] = sorted({f"{each.category.__name__}: {each.message}" for each in caught})
    if rounds and row["failure"] is None:
        row |= _timed(problem, method, seed, device, rounds, round_seconds, row["posterior_seconds"])
    return row


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _begin(
    problem: Problem, method: str, seed: int, device: str, graph: bool = True
) -> tuple[nn.Module, Learner]:
    """The net with the seed's initial weights, and an untrained method."""
    torch.manual_seed(seed)
    model = problem.net().to(device)
    setup = Setup(model, problem.loss, problem.num_data, problem.likelihood, graph)
    return model, METHODS[method](setup)


def _trained(problem: Problem, method: str, seed: int, device: str) -> dict[str, Any]:
    model, learner = _begin(problem, method, seed, device)
    wait: Callable[[], None] = torch.cuda.synchronize if device == "cuda" else lambda: None
    start = time.perf_counter()
    for x, y in problem.batches(seed):
        learner.step(x, y)
    wait()
    trained = time.perf_counter()
    posterior = learner.posterior(problem.stages[-1])
    wait()
    fitted = time.perf_counter()
    found = evaluated(problem, partial(_predicted, model, posterior))
    row: dict[str, Any] = {"training_seconds": trained - start, "posterior_seconds": fitted - trained}
    row["prediction_seconds"] = time.perf_counter() - fitted
    row["metrics"] = found
    bad = [name for name, value in found.items() if not math.isfinite(value)]
    if posterior is not None:
        row["at_mean"] = evaluated(problem, lambda x: predict(model, posterior, x, mode="mean"))
        bad += [f"{name} at the mean" for name, value in row["at_mean"].items() if not math.isfinite(value)]
    if bad:
        raise FloatingPointError(f"{', '.join(bad)} not finite")
    return row


def _predicted(model: nn.Module, posterior: Factorised | None, x: Tensor) -> Prediction:
    return predict(model, x=x) if posterior is None else predict(model, posterior, x, samples=SAMPLES)


def evaluated(problem: Problem, prediction: Callable[[Tensor], Prediction]) -> dict[str, float]:
    """Metrics on the test data.

    For classes: accuracy, NLL, ECE. For numbers: RMSE and NLL in the data's own unit; the variance in the NLL
    is the mean squared error on the training data plus the epistemic variance of each test example.
    ``nll_error`` is the standard error of the NLL due to the number of test examples.

    Args:
        problem: The task.
        prediction: A function from inputs to a prediction.
    """
    found, y = prediction(problem.test.x), problem.test.y
    if problem.likelihood == "classification":
        each = -found.log_probs.gather(1, y[:, None])
        own = {"accuracy": metrics.accuracy(found.probs, y), "ece": metrics.ece(found.probs, y)}
    else:
        noise = torch.cat([prediction(stage.x).mean - stage.y for stage in problem.stages]).square().mean()
        squares, variance = (found.mean - y).square(), noise + found.variance
        each = 0.5 * (squares / variance + (2 * math.pi * problem.scale**2 * variance).log())
        own = {"rmse": problem.scale * float(squares.mean().sqrt())}
    return {**own, "nll": float(each.mean()), "nll_error": float(each.std()) / math.sqrt(len(y))}


def _timed(
    problem: Problem,
    method: str,
    seed: int,
    device: str,
    rounds: int,
    round_seconds: float,
    posterior_seconds: float,
) -> dict[str, Any]:
    """Times of a step of the method and of AdamW, alternately, each from the initial weights.

    If these steps, which repeat a few batches, raise an error, there are no times: the training did not fail.
    """
    batches = list(islice(problem.batches(seed), min(_TIMED, len(problem.stages[0]) // problem.batch_size)))

    def column(name: str, graph: bool = True) -> Column:
        learner = _begin(problem, name, seed, device, graph)[1]
        around: Iterator[tuple[Tensor, Tensor]] = cycle(batches)
        return Column(lambda: learner.step(*next(around)), SETTING)

    columns = {STEP: column(method), ADAMW: column("adamw", graph=False)}
    if device == "cuda":
        columns[ADAMW_GRAPH] = column("adamw")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            times = measure(columns, device, rounds, round_seconds, row_seconds=20.0)
        except Exception as error:
            return {"cost_failure": _said(error)}
    # All of the training: Laplace's work comes after the last step.
    whole = times[STEP]["value"] * problem.steps + 1000.0 * posterior_seconds
    cost = {name: whole / (times[name]["value"] * problem.steps) for name in times if name != STEP}
    return {"columns": times, "cost": cost}
