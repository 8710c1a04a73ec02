"""What a fit looks at: batches and their targets, and a model that is to be left as it was."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from posterity import buffers

Batches: TypeAlias = Iterable[Sequence[Tensor]] | tuple[Tensor, Tensor]


def batches(data: Batches, batch_size: int) -> Iterable[Sequence[Tensor]]:
    """The batches themselves, or those of a pair of tensors."""
    if isinstance(data, Dataset):
        raise TypeError("a Dataset gives single examples: pass DataLoader(dataset, batch_size=…)")
    if not isinstance(data, Sequence) or len(data) != 2 or not all(isinstance(each, Tensor) for each in data):
        return cast("Iterable[Sequence[Tensor]]", data)
    x, y = pair(cast("Sequence[Tensor]", data))
    return [*zip(torch.split(x, batch_size), torch.split(y, batch_size), strict=True)]


def pair(batch: Sequence[Tensor], device: torch.device | None = None) -> tuple[Tensor, Tensor]:
    """Inputs and targets, on a device."""
    if not isinstance(batch, Sequence) or len(batch) != 2 or not all(isinstance(b, Tensor) for b in batch):
        raise TypeError(
            f"a batch must be a pair of tensors (x, y), not {type(batch).__name__}: adapt the loader"
        )
    x, y = batch
    if len(x) != len(y):
        raise ValueError(f"a batch has {len(x)} inputs and {len(y)} targets: give one for each")
    if len(x) == 0:
        raise ValueError("there are no examples to fit: the data are empty, or a batch of the loader is")
    return (x, y) if device is None else (x.to(device), y.to(device))


def log_probs(out: Tensor, y: Tensor, noise_variance: float | None) -> Tensor:
    """log p(y | out), ``[..., B]``, of outputs ``[..., B, C]``; of classes if there is no noise."""
    if noise_variance is None:
        return out.double().log_softmax(-1)[..., torch.arange(len(y), device=y.device), y.long()]
    terms = (out.double() - y).square() / noise_variance + math.log(2.0 * math.pi * noise_variance)
    return -0.5 * terms.sum(-1)


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Evaluation mode; afterwards mode, buffers and torch's random numbers are as they were."""
    training = [module for module in model.modules() if module.training]
    tensors = [*model.parameters(), *model.buffers()]
    kept = buffers.snapshot(model)
    # Loaders draw a seed whenever they start, shuffled or not.
    with torch.random.fork_rng({each.device.index for each in tensors if each.is_cuda}):
        model.eval()
        try:
            yield
        finally:
            buffers.restore(model, kept)
            for module in training:
                module.training = True
