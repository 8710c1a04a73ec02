"""One data set in parts that arrive one by one: Bayesian incremental learning, also with pretraining.

Kochurov, Garipov, Podoprikin, Molchanov, Ashukha, Vetrov: "Bayesian Incremental Learning for Deep Neural
Networks", ICLR workshop 2018. The posterior of the parts so far is the prior of the next one. The number of
parts, the epochs and all rates are our own choice: the paper's remaining figures do not show them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from posterity import ByName, IsotropicGaussian, around, laplace
from posterity_lab import baselines, continual, data, nets
from posterity_lab.data import Dataset, Split
from posterity_lab.reproduce.learners import FAMILIES, learner
from posterity_lab.reproduce.study import Cell, Outcome, Show, Study, Unit, Values, grid
from posterity_lab.reproduce.training import prepared
from posterity_lab.streams import held_out, joint, parts, stream

_HEAD_STD = 1.0  # std of the output layer's prior, which has no pretraining


def learn(unit: Unit, device: str, cache: Path, show: Show) -> Outcome:
    """Learn the parts in order, and test on the whole test set after each of them.

    Args:
        unit: The unit to run. Its config has ``parts``. If some classes come first, ``pretraining`` is the
            number of epochs on them, and ``prior`` their prior: ``"none"``, ``"grid"`` or ``"laplace"``.
        device: Device of the computation.
        cache: Folder for the checkpoint, written after every part.
        show: Called at the end; before, `continual.run` shows its own progress bar.

    Example:
        >>> import tempfile
        >>> cell = mnist_cells(quick=True)[0]
        >>> unit = Unit("mnist", cell.setting, cell.method, 0, {**cell.config, "epochs": 1}, "")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     outcome = learn(unit, "cpu", Path(folder), lambda done, total, what: None)
        >>> [each["part"] for each in outcome.metrics["curve"]]
        [1, 2, 3]
    """
    config, seed = unit.config, unit.seed
    dataset, prior, weights = prepared(unit, device), None, dict[str, Tensor]()
    if "pretraining" in config:
        first, dataset = halves(dataset, seed)
        if config["prior"] != "none":
            weights, prior = pretrained(first, config, seed)
    tasks = parts(dataset, config["parts"], seed)
    tasks = held_out(tasks, config["held_out"], seed=0) if config["held_out"] else tasks
    model = nets.initialise(nets.build(config["net"], dataset.train.x.shape[1:], tasks.classes), seed)
    model.load_state_dict(weights, strict=False)
    torch.manual_seed(seed)  # for the family's initial draws
    method = learner(
        unit.method, config, model.to(device), num_data=len(tasks.items[0].train), seed=seed, prior=prior
    )
    made = joint if unit.method == "joint" else stream
    shown = made(tasks, epochs=config["epochs"], batch_size=config["batch_size"], seed=seed)
    scores = continual.run(method, shown, samples=config["networks"], seed=seed, folder=cache, resume=True)
    rows = zip(*(getattr(scores, key).mean(1).tolist() for key in _SCORES), strict=True)
    done = [len(tasks)] if unit.method == "joint" else range(1, len(tasks) + 1)
    curve = [
        {"part": part, **dict(zip(_SCORES, row, strict=True))} for part, row in zip(done, rows, strict=True)
    ]
    last = {key: curve[-1][key] for key in _SCORES}
    show(1, 1, f"parts, accuracy {last['accuracy']:.2%}")
    return Outcome({**last, "curve": curve}, len(dataset.test) or sum(len(task.test) for task in tasks.items))


def halves(dataset: Dataset, seed: int) -> tuple[Dataset, Dataset]:
    """Half of the classes, chosen at random, and the others, each labelled from 0.

    Example:
        >>> from posterity_lab.data import load
        >>> first, rest = halves(load("digits"), seed=0)
        >>> first.classes, rest.classes, len(first.train) + len(rest.train)
        (5, 5, 1437)
    """
    order = torch.randperm(dataset.classes, generator=torch.Generator().manual_seed(seed))
    half = len(order) // 2
    one, other = (
        Dataset(dataset.name, _among(dataset.train, classes), _among(dataset.test, classes), len(classes))
        for classes in (order[:half].tolist(), order[half:].tolist())
    )
    return one, other


def _among(split: Split, classes: Sequence[int]) -> Split:
    numbers = torch.full((max(int(split.y.max()), *classes) + 1,), -1, device=split.y.device)
    numbers[torch.tensor(classes, device=split.y.device)] = torch.arange(len(classes), device=split.y.device)
    labels = numbers[split.y]
    chosen = labels >= 0
    return Split(split.x[chosen], labels[chosen])


def pretrained(first: Dataset, config: Values, seed: int) -> tuple[dict[str, Tensor], ByName]:
    """Weights trained on the first classes, and the prior that they give; the output layer is left out.

    That layer's prior is N(0, 1), because the later classes are different. The other weights have N(w*, σ²),
    with one σ for all or, from a Laplace approximation, one for each, with the prior precision of the largest
    evidence.

    Example:
        >>> from posterity_lab.data import load
        >>> config = {"net": "mlp-4", "pretraining": 1, "batch_size": 64, "prior": "grid", "prior_std": 0.1}
        >>> weights, prior = pretrained(halves(load("digits"), 0)[0], config, seed=0)
        >>> sorted(weights), prior.block("1.weight").std().max(), prior.block("3.weight").std
        (['1.bias', '1.weight'], tensor(0.1000), 1.0)
    """
    x, y = first.train.x, first.train.y
    model = nets.initialise(nets.build(config["net"], x.shape[1:], first.classes), seed).to(x.device)
    method = baselines.adam(model, lr=1e-3)
    for epoch in range(config["pretraining"]):
        for batch in data.batches(first.train, config["batch_size"], seed=seed, epoch=epoch):
            method.step(*batch)
    known = (
        laplace.fit(model, (x, y), structure="diagonal", names="*", prior_precision="marginal").posterior()
        if config["prior"] == "laplace"
        else around(model, config["prior_std"])
    )
    weights = {name: p.detach() for name, p in model.named_parameters()}
    head = list(weights)[-2:]
    for name in head:
        del weights[name]
    return weights, ByName({**dict.fromkeys(head, IsotropicGaussian(_HEAD_STD)), "*": known})


def _cells(setting: str, base: Values, families: Iterable[str] = FAMILIES) -> list[Cell]:
    """Every family, plain training part by part, and plain training on all of it at once."""
    trial, rates = {"held_out": 0.1}, [1e-4, 3e-4, 1e-3]
    family = {**base, "lr": 1e-3, "std_init": 0.02, "kl_factor": 0.1}
    plain = {**base, "lr": 1e-3}
    return [
        *(Cell(setting, name, family, grid(kl_factor=[1.0, 0.1, 0.01]), trial) for name in families),
        *(Cell(setting, name, plain, grid(lr=rates), trial) for name in ("fine-tuning", "joint")),
    ]


def _quick(base: dict[str, Any]) -> dict[str, Any]:
    small = {"data": "digits", "mean": 0.3, "std": 0.4, "pad": 16, "net": "lenet5"}
    return {**base, **small, "batch_size": 64, "epochs": 2, "parts": 3, "networks": 3}


def mnist_cells(quick: bool) -> list[Cell]:
    """LeNet-5 on MNIST in ten parts of 6,000 images, ten epochs a part.

    A trial is a whole run, tested on a tenth of every part's training images, which is held out.

    Example:
        >>> {cell.config["parts"] for cell in mnist_cells(quick=False)}
        {10}
    """
    base: dict[str, Any] = {
        "data": "mnist",
        "mean": 0.1307,
        "std": 0.3081,
        "net": "lenet5",
        "parts": 10,
        "epochs": 10,
        "batch_size": 128,
        "networks": 10,
        "held_out": 0.0,
    }
    name = "digits" if quick else "mnist"
    return _cells(name, _quick(base) if quick else base)


def cifar10_cells(quick: bool) -> list[Cell]:
    """3Conv3FC on CIFAR-10 in ten parts of 5,000 images, thirty epochs a part; trials as for MNIST.

    Example:
        >>> {cell.config["net"] for cell in cifar10_cells(quick=False)}
        {'conv3fc3'}
    """
    base = _cifar10(30)
    return _cells("digits", _quick(base), ["ffg"]) if quick else _cells("cifar10", base)


def _cifar10(epochs: int) -> dict[str, Any]:
    return {
        "data": "cifar10",
        "mean": 0.473,
        "std": 0.251,
        "net": "conv3fc3",
        "parts": 10,
        "epochs": epochs,
        "batch_size": 128,
        "networks": 10,
        "held_out": 0.0,
    }


def pretrained_cells(quick: bool) -> list[Cell]:
    """3Conv3FC: five classes of CIFAR-10 chosen at random first, then the other five in ten parts.

    Test images are those of the other five. The std of the prior around pretrained weights is found by a grid
    or by a Laplace approximation; fine-tuning starts from the pretrained weights or from scratch.

    Example:
        >>> [(cell.setting, cell.method) for cell in pretrained_cells(quick=False)][:2]
        [('from scratch', 'ffg'), ('from scratch', 'fine-tuning')]
    """
    base = {**_cifar10(30), "pretraining": 30}
    base = {**_quick(base), "pretraining": 2} if quick else base
    trial, rates = {"held_out": 0.1}, grid(lr=[1e-4, 3e-4, 1e-3])
    family = {"lr": 1e-3, "std_init": 0.02, "kl_factor": 0.1}
    stds, factors = [0.01, 0.03, 0.1, 0.3], [0.1, 0.01]
    none, plain = {**base, "prior": "none"}, {**base, "lr": 1e-3}
    tuned = {**base, **family, "prior": "grid", "prior_std": 0.1}
    return [
        Cell("from scratch", "ffg", {**none, **family}, grid(kl_factor=[1.0, *factors]), trial),
        Cell("from scratch", "fine-tuning", {**none, "lr": 1e-3}, rates, trial),
        Cell("pretrained", "ffg", tuned, grid(prior_std=stds, kl_factor=factors), trial),
        Cell(
            "pretrained",
            "ffg-laplace",
            {**base, **family, "prior": "laplace"},
            grid(kl_factor=[1.0, *factors]),
            trial,
        ),
        Cell("pretrained", "fine-tuning", {**plain, "prior": "grid", "prior_std": 1.0}, rates, trial),
    ]


_SCORES = ("accuracy", "nll", "ece")
_METRICS = (*_SCORES, "curve")
MNIST = Study("incremental-mnist", mnist_cells, learn, _METRICS)
CIFAR10 = Study("incremental-cifar10", cifar10_cells, learn, _METRICS)
PRETRAINED = Study("incremental-pretrained", pretrained_cells, learn, _METRICS)
