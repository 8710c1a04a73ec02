"""The tasks of a first try: data on the device, a net, and how long to train.

Batches and initial weights depend on the seed alone, so all methods of a seed start from the same weights and
see the same batches in the same order. There is no schedule of learning rates.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from posterity_lab import data, uci
from posterity_lab.data import Split
from posterity_lab.first_try.sequences import Transformer, majority
from posterity_lab.nets import lenet5, mlp
from posterity_lab.residual import resnet20
from posterity_lab.streams import permuted

Likelihood: TypeAlias = Literal["classification", "regression"]
# Per channel, over CIFAR-10's training images.
_CIFAR_MEAN, _CIFAR_STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


@dataclass(frozen=True)
class Problem:
    """The data and net of a task.

    Attributes:
        net: Makes the net, with torch's default weights.
        stages: Training data, one part after another; only a stream has several.
        test: Test data, of all stages.
        epochs: Passes over each stage.
        batch_size: Examples per step; the last step of an epoch has the rest.
        augmented: Augments a batch of inputs, with random numbers from the generator.
        scale: Scale of standardised targets: errors times this are in the data's own unit.
        likelihood: Likelihood of the targets: a class, or a Gaussian around the net's output.
    """

    net: Callable[[], nn.Module]
    stages: tuple[Split, ...]
    test: Split
    epochs: int
    batch_size: int
    augmented: Callable[[Tensor, torch.Generator], Tensor] | None = None
    scale: float = 1.0
    likelihood: Likelihood = "classification"

    @property
    def num_data(self) -> int:
        """Training examples, of all stages."""
        return sum(map(len, self.stages))

    @property
    def steps(self) -> int:
        """Steps of the whole training."""
        return sum(self.epochs * -(-len(stage) // self.batch_size) for stage in self.stages)

    def loss(self, model: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
        """Mean negative log-likelihood: cross-entropy, or that of a Gaussian of variance 1."""
        if self.likelihood == "classification":
            return F.cross_entropy(model(x), y)
        return 0.5 * F.mse_loss(model(x), y)

    def batches(self, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """All batches of the training, in order."""
        for number, stage in enumerate(self.stages):
            for epoch in range(number * self.epochs, (number + 1) * self.epochs):
                mixed = hashlib.blake2b(f"{seed} {epoch} augment".encode(), digest_size=4).digest()
                generator = torch.Generator().manual_seed(int.from_bytes(mixed, "big"))
                # All at once: otherwise a GPU would wait for the host in every step.
                seen = stage if self.augmented is None else Split(self.augmented(stage.x, generator), stage.y)
                yield from data.batches(seen, self.batch_size, seed=seed, epoch=epoch)


# From a seed and a device to the problem; only the splits of regression sets depend on the seed.
Task: TypeAlias = Callable[[int, str], Problem]


def digits_cnn() -> nn.Sequential:
    """Two convolutions with BatchNorm and a linear layer, for images of 8x8 pixels.

    Example:
        >>> digits_cnn()(torch.zeros(2, 1, 8, 8)).shape
        torch.Size([2, 10])
    """
    layers: list[nn.Module] = []
    for inputs, outputs in ((1, 16), (16, 32)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs)]
        layers += [nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * 2 * 2, 10))


def cropped_and_flipped(x: Tensor, generator: torch.Generator) -> Tensor:
    """Images shifted by up to 4 pixels, filled with zeros, and half of them mirrored.

    Args:
        x: Images ``[B, C, H, W]``.
        generator: A CPU generator, so that every device sees the same images.

    Example:
        >>> cropped_and_flipped(torch.ones(2, 3, 32, 32), torch.Generator().manual_seed(0)).shape
        torch.Size([2, 3, 32, 32])
    """
    count, _, height, width = x.shape
    down, right = torch.randint(0, 9, (2, count), generator=generator)
    mirrored = torch.rand(count, generator=generator) < 0.5
    rows = down[:, None] + torch.arange(height)
    across = torch.arange(width).expand(count, width)
    columns = right[:, None] + torch.where(mirrored[:, None], width - 1 - across, across)
    rows, columns, each = (index.to(x.device) for index in (rows, columns, torch.arange(count)))
    picked = F.pad(x, (4, 4, 4, 4))[each[:, None, None], :, rows[:, :, None], columns[:, None, :]]
    return picked.permute(0, 3, 1, 2).contiguous()


def _images(
    name: str, net: Callable[[], nn.Module], epochs: int, batch_size: int, seed: int, device: str
) -> Problem:
    found = data.load(name, device=device)
    return Problem(net, (found.train,), found.test, epochs, batch_size)


def _cifar10(seed: int, device: str) -> Problem:
    problem = _images("cifar10", partial(resnet20, 3, 10), 20, 128, seed, device)
    mean, std = (torch.tensor(each, device=device)[:, None, None] for each in (_CIFAR_MEAN, _CIFAR_STD))
    train, test = (Split((each.x - mean) / std, each.y) for each in (*problem.stages, problem.test))
    return replace(problem, stages=(train,), test=test, augmented=cropped_and_flipped)


def _sequences(seed: int, device: str) -> Problem:
    train, test = (majority(count, number).to(device) for number, count in enumerate((2000, 2000)))
    return Problem(Transformer, (train,), test, epochs=20, batch_size=64)


def _regression(name: str, epochs: int, seed: int, device: str) -> Problem:
    found = uci.load(name, split=seed, device=device)
    net = partial(mlp, found.train.x.shape[1], [50], 1)
    return Problem(net, (found.train,), found.test, epochs, 32, scale=found.scale, likelihood="regression")


def _stream(seed: int, device: str) -> Problem:
    tasks = permuted(data.load("digits", device=device), tasks=5, seed=0).items
    stages = tuple(task.seen(task.train) for task in tasks)
    tests = [task.seen(task.test) for task in tasks]
    test = Split(*(torch.cat([getattr(each, key) for each in tests]) for key in "xy"))
    return Problem(partial(mlp, 64, [100], 10), stages, test, epochs=10, batch_size=64)


TASKS: dict[str, Task] = {
    "digits-mlp": partial(_images, "digits", partial(mlp, 64, [100], 10), 20, 64),
    "digits-cnn": partial(_images, "digits", digits_cnn, 10, 64),
    "mnist-mlp": partial(_images, "mnist", partial(mlp, 784, [400, 400], 10), 5, 128),
    "mnist-lenet5": partial(_images, "mnist", partial(lenet5, 1, 28, 10), 5, 128),
    "cifar10-resnet20": _cifar10,
    "sequence-transformer": _sequences,
    "uci-energy": partial(_regression, "energy", 100),
    "uci-wine": partial(_regression, "wine-quality-red", 100),
    "uci-power": partial(_regression, "power-plant", 40),
    "permuted-digits": _stream,
}
