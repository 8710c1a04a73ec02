"""Images made ready for a stream: how inputs are scaled decides how much is retained."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn.functional import pad

from posterity_lab.data import Dataset, Split


def padded(dataset: Dataset, size: int = 32) -> Dataset:
    """The same images in the middle of zeros, ``size`` pixels high and wide.

    Example:
        >>> from posterity_lab.data import load
        >>> padded(load("digits"), 12).train.x.shape
        torch.Size([1437, 1, 12, 12])
    """
    height, width = dataset.test.x.shape[-2:]
    if height > size or width > size:
        raise ValueError(f"{dataset.name} has images of {height}x{width}, which do not fit in {size}x{size}")
    top, left = (size - height) // 2, (size - width) // 2
    around = (left, size - width - left, top, size - height - top)
    return _changed(dataset, lambda x: pad(x, around))


def normalised(dataset: Dataset, mean: float = 0.1, std: float = 0.2752) -> Dataset:
    """Pixels less ``mean``, over ``std``; the defaults are those of MNIST padded to 32x32.

    Example:
        >>> from posterity_lab.data import load
        >>> ready = normalised(padded(load("digits")), mean=0.0, std=2.0)
        >>> float(ready.train.x.max())
        0.5
    """
    if not std > 0:
        raise ValueError(f"std must be greater than 0, not {std:g}")
    return _changed(dataset, lambda x: (x - mean) / std)


def _changed(dataset: Dataset, change: Callable[[Tensor], Tensor]) -> Dataset:
    train, test = (Split(change(split.x), split.y) for split in (dataset.train, dataset.test))
    return Dataset(dataset.name, train, test, dataset.classes)
