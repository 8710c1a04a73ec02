"""The runs that the demo is made of: one learns a stream of tasks, the other learns plain digits.

Each is a function of sizes, method and seed alone, so that they can run in any process and order.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from posterity import DiagonalGaussian, DivergenceWarning, Factorised, Prediction, metrics, predict, prune
from posterity.predict import Mode
from posterity_lab import methods, nets
from posterity_lab.config import Config
from posterity_lab.data import Dataset, Split, batches, load
from posterity_lab.methods import Method
from posterity_lab.streams import permuted, stream

Results: TypeAlias = dict[str, Any]

FRACTIONS = (0.0, 0.5, 0.75, 0.9, 0.95, 0.98)
ENTROPY_BINS = torch.linspace(0.0, math.log(10), 17)
STD_BINS = torch.logspace(-3, 0, 49)


@dataclass(frozen=True)
class Sizes:
    """How much the demo does; equal for all methods."""

    hidden: tuple[int, ...] = (100, 100)
    tasks: int = 5
    epochs: int = 6
    batch_size: int = 64
    samples: int = 10
    seeds: tuple[int, ...] = (0, 1, 2)
    # Not one of the seeds: the permutations that the grid is tuned on are not those of the final runs.
    tuning_seed: int = 100
    validation: int = 287
    plain_epochs: int = 15
    eval_samples: int = 20
    train_images: int | None = None
    workers: int = 2


QUICK = Sizes((16,), 2, 1, 64, 2, (0, 1), 100, 64, 1, 4, 320, 1)

# One number is tuned for each method. BGD's lr below 1 forgets less; SGD is the plain one.
GRIDS: dict[str, tuple[str, tuple[float, ...]]] = {
    "bgd": ("std_init", (0.02, 0.05, 0.1, 0.15, 0.25)),
    "sgd": ("lr", (0.003, 0.01, 0.03, 0.1, 0.3)),
    "adam": ("lr", (3e-5, 1e-4, 3e-4, 1e-3, 3e-3)),
}
# The paper's rule has no bound on steps.
_PAPER = {"max_step": math.inf}
FIXED: dict[str, dict[str, float]] = {"bgd": {"lr": 0.3, **_PAPER}, "sgd": {"momentum": 0.0}, "adam": {}}
# Plain digits: nothing has to be kept for later, so BGD takes the paper's step, and Adam its usual one.
PLAIN: dict[str, dict[str, float]] = {
    "bgd": {"std_init": 0.15, "lr": 1.0, **_PAPER},
    "adam": {"lr": 1e-3},
}


def stream_run(sizes: Sizes, method: str, value: float, seed: int, validation: bool = False) -> Results:
    """Learn the stream once: accuracy on every task after each task, at the mean weights.

    A run that diverges stops learning; what the net can do then is what counts.
    """
    dataset = standardised(held_out(sizes) if validation else digits(sizes))
    tasks = permuted(dataset, sizes.tasks, seed)
    shown = stream(tasks, epochs=sizes.epochs, batch_size=sizes.batch_size, seed=seed)
    learner = _learner(sizes, method, seed, {GRIDS[method][0]: value, **FIXED[method]})
    curve: list[list[float]] = []
    diverged, seconds = False, 0.0
    for number, (x, y) in enumerate(shown, start=1):
        start = time.perf_counter()
        diverged = diverged or not _step(learner, x, y)
        seconds += time.perf_counter() - start
        if number in shown.ends:
            curve.append([_accuracy(learner, test) for test in shown.tests])
    return {"accuracy": curve, "diverged": diverged, "ms_per_step": 1000 * seconds / len(shown)}


def plain_run(sizes: Sizes, seed: int, out: Path) -> Results:
    """Learn plain digits by BGD and Adam: pruning, uncertainty, and the first seed's posterior as a file."""
    raw = digits(sizes)
    dataset = standardised(raw)
    outside = {
        name: standardised(Dataset(name, raw.train, Split(x, raw.test.y), raw.classes)).test.x
        for name, x in strange(raw.test.x, seed).items()
    }
    result: Results = {"diverged": False, "pruning": {}, "ood": {}, "entropy": {}}
    for method, settings in PLAIN.items():
        learner = _learner(sizes, method, seed, settings)
        for epoch in range(sizes.plain_epochs):
            for x, y in batches(dataset.train, sizes.batch_size, seed=seed, epoch=epoch):
                result["diverged"] = result["diverged"] or not _step(learner, x, y)
        # With one std for all weights the order of the ratios is that of the magnitudes.
        point = {name: DiagonalGaussian(p.detach(), 1.0) for name, p in learner.model.named_parameters()}
        learned = learner.posterior()
        posterior = Factorised(point) if learned is None else learned
        ask = partial(_ask, sizes, learner, "mean" if learned is None else "average")
        result["pruning"][method] = [
            metrics.accuracy(ask(prune(posterior, fraction), dataset.test.x).probs, dataset.test.y)
            for fraction in FRACTIONS
        ]
        inside = ask(posterior, dataset.test.x)
        others = {name: ask(posterior, x) for name, x in outside.items()}
        scores = ["entropy"] if learned is None else ["entropy", "mutual_information"]
        for score in scores:
            result["ood"][f"{method} {score}"] = {
                name: {
                    "auroc": metrics.auroc(getattr(inside, score), getattr(other, score)),
                    "fpr95": metrics.fpr95(getattr(inside, score), getattr(other, score)),
                }
                for name, other in others.items()
            }
        result["entropy"][method] = {
            name: _counts(prediction.entropy, ENTROPY_BINS)
            for name, prediction in {"digits": inside, **others}.items()
        }
        if learned is not None:
            result["std"] = _counts(torch.cat([std.flatten() for std in learned.std().values()]), STD_BINS)
            if seed == sizes.seeds[0]:
                path = out / "posterior.safetensors"
                learned.save(path)
                again = ask(Factorised.load(path, learner.model), dataset.test.x)
                result["reloaded"] = torch.equal(again.samples, inside.samples)
                result["reloaded_accuracy"] = metrics.accuracy(again.probs, dataset.test.y)
                if not result["reloaded"]:
                    raise RuntimeError(f"{path} does not predict what the posterior saved in it did")
    return result


def standardised(dataset: Dataset) -> Dataset:
    """Pixels less the training images' mean, over their std: input scaling decides how much BGD retains."""
    mean, std = dataset.train.x.mean(), dataset.train.x.std()
    train, test = (Split((split.x - mean) / std, split.y) for split in (dataset.train, dataset.test))
    return Dataset(dataset.name, train, test, dataset.classes)


def held_out(sizes: Sizes) -> Dataset:
    """Digits whose test set is a part of the training images, which is then not learned from."""
    dataset = digits(sizes)
    order = torch.randperm(len(dataset.train), generator=torch.Generator().manual_seed(sizes.tuning_seed))
    held, rest = order[: sizes.validation], order[sizes.validation :]
    return Dataset(dataset.name, dataset.train.subset(rest), dataset.train.subset(held), dataset.classes)


def strange(x: Tensor, seed: int) -> dict[str, Tensor]:
    """Images in [0, 1] that are no digits: inverted, with shuffled pixels (each its own way), and noise.

    Example:
        >>> sorted(strange(torch.rand(2, 1, 8, 8), seed=0))
        ['inverted', 'noise', 'shuffled']
    """
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(x.flatten(1).shape, generator=generator).argsort(1)
    shuffled = x.flatten(1).gather(1, order).view_as(x)
    return {"inverted": 1 - x, "shuffled": shuffled, "noise": torch.rand(x.shape, generator=generator)}


def digits(sizes: Sizes) -> Dataset:
    """The digits, or the first training images of them."""
    dataset = load("digits")
    train = dataset.train.subset(range(sizes.train_images or len(dataset.train)))
    return Dataset(dataset.name, train, dataset.test, dataset.classes)


def _learner(sizes: Sizes, method: str, seed: int, settings: Mapping[str, float]) -> Method:
    model = nets.initialise(nets.mlp(64, sizes.hidden, 10), seed)
    given: dict[str, Any] = {**settings, **({"samples": sizes.samples} if method == "bgd" else {})}
    return methods.build(Config(method=method, seed=seed, **given), model, num_data=1)


def _step(learner: Method, x: Tensor, y: Tensor) -> bool:
    """Whether the step could be taken; the loss of one that could not was not finite."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DivergenceWarning)
        try:
            learner.step(x, y)
        except FloatingPointError:
            return False
    return True


@torch.no_grad()
def _accuracy(learner: Method, test: Split) -> float:
    # By hand: the outputs of a diverged net may overflow, which metrics.accuracy refuses.
    return float((learner.model(test.x).argmax(-1) == test.y).float().mean())


def _ask(sizes: Sizes, learner: Method, mode: Mode, posterior: Factorised, x: Tensor) -> Prediction:
    return predict(learner.model, posterior, x, samples=sizes.eval_samples, mode=mode, keep_samples=True)


def _counts(values: Tensor, edges: Tensor) -> list[int]:
    """How many values each bin holds; those beyond the ends count in the outermost bins."""
    inside = values.detach().clamp(float(edges[0]), float(edges[-1]))
    return torch.bincount(torch.bucketize(inside, edges[1:-1], right=True), minlength=len(edges) - 1).tolist()
