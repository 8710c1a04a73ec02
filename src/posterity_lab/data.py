"""Data sets held in memory: read from their files, checked, and cut into batches.

The set ``digits`` comes with scikit-learn and needs no file.
"""

import gzip
import hashlib
import io
import math
import pickle
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from posterity_lab.files import (
    SETS,
    DataError,
    File,
    content_of,
    files_of,
    folder_of,
    known_md5,
    locate,
    remedy,
)

_Arrays = dict[str, NDArray[np.uint8]]
_UNREADABLE = (
    *(ValueError, KeyError, OSError, EOFError, zlib.error, zipfile.BadZipFile, pickle.PickleError),
    *(MemoryError, OverflowError, RuntimeError, struct.error),  # of headers that ask for too much
)


@dataclass(frozen=True, eq=False)
class Split:
    """Examples `x` (float32; images [N, C, H, W], pixels in [0, 1]) with labels `y` (int64), on one device.

    Features that are no images are `[N, D]`.

    >>> split = Split(torch.zeros(3, 1, 8, 8), torch.tensor([2, 0, 1]))
    >>> len(split), split.to("cpu").subset([0, 2]).y.tolist()
    (3, [2, 1])
    """

    x: Tensor
    y: Tensor

    def __len__(self) -> int:
        return len(self.y)

    def to(self, device: torch.device | str) -> "Split":
        """The same examples on `device`."""
        return Split(self.x.to(device), self.y.to(device))

    def subset(self, indices: Tensor | Sequence[int]) -> "Split":
        """The examples at `indices`, in that order, or those where a boolean mask is true."""
        index = torch.as_tensor(indices, device=self.y.device)
        index = index if index.numel() else index.long()  # an empty list becomes floats, which cannot index
        return Split(self.x[index], self.y[index])


@dataclass(frozen=True, eq=False)
class Dataset:
    """A named data set; `train` is empty where a set is for testing only, `test` where it has no split.

    >>> digits = load("digits")
    >>> digits.name, digits.classes, len(digits.train), len(digits.test)
    ('digits', 10, 1437, 360)
    """

    name: str
    train: Split
    test: Split
    classes: int


def load(name: str, root: Path | None = None, device: torch.device | str = "cpu") -> Dataset:
    """Read the data set `name` (one of `files.NAMES`) onto `device`.

    Raises:
        DataError: A file is missing or damaged, or there is no such set.

    >>> load("digits").train.x.shape
    torch.Size([1437, 1, 8, 8])
    """
    files, folder = files_of(name), folder_of(root)
    if name == "digits":
        return _digits(device)
    train_files = [file for file in files if file.split == "train"]
    test_files = [file for file in files if file.split == "test"]
    if not test_files:
        train = _read_split(name, train_files, folder, device)
        return Dataset(name, train, train.subset([]), SETS[name].classes)
    test = _read_split(name, test_files, folder, device)
    train = _read_split(name, train_files, folder, device) if train_files else test.subset([])
    return Dataset(name, train, test, SETS[name].classes)


def batches(split: Split, batch_size: int, *, seed: int, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """One shuffled pass over `split`; the order depends on `seed` and `epoch` alone.

    >>> [len(y) for x, y in batches(load("digits").test, 150, seed=0, epoch=0)]
    [150, 150, 60]
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    # torch's CPU generator keeps only the low 32 bits of a seed, so both numbers are hashed into them.
    mixed = int.from_bytes(hashlib.blake2b(f"{seed} {epoch}".encode(), digest_size=4).digest(), "big")
    order = torch.randperm(len(split), generator=torch.Generator().manual_seed(mixed)).to(split.y.device)
    chunks = (order[start : start + batch_size] for start in range(0, len(split), batch_size))
    return ((split.x.index_select(0, chunk), split.y.index_select(0, chunk)) for chunk in chunks)


def _read_idx(content: bytes, file: File) -> _Arrays:
    key, dims = ("x", 3) if "-idx3-" in file.path else ("y", 1)
    content = gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content
    start = 4 + 4 * dims
    if len(content) < start or content[:4] != bytes((0, 0, 8, dims)):
        raise ValueError(f"no idx header for bytes in {dims} dimension(s)")
    shape = np.frombuffer(content[4:start], ">u4").tolist()
    if len(content) - start != math.prod(shape):
        raise ValueError(f"{len(content) - start} bytes of data where its header says {math.prod(shape)}")
    array = np.frombuffer(content, np.uint8, offset=start).reshape(shape)
    return {key: array[:, None] if dims == 3 else array}


class _ArraysOnly(pickle.Unpickler):
    _reconstruct = np.empty(0).__reduce__()[0]
    _allowed: dict[tuple[str, str], Any] = {
        ("numpy", "ndarray"): np.ndarray,
        # Pickles as old as CIFAR's pass 0 and 1 for these two booleans, at which np.dtype warns.
        ("numpy", "dtype"): lambda spec, align, copy: np.dtype(spec, align=bool(align), copy=bool(copy)),
        ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
        ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._allowed:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no array needs")
        return self._allowed[module, name]


def _read_cifar(content: bytes, file: File) -> _Arrays:
    batch = _ArraysOnly(io.BytesIO(content), encoding="latin1").load()
    labels = batch["fine_labels"] if "fine_labels" in batch else batch["labels"]
    return {"x": batch["data"].reshape(-1, 3, 32, 32), "y": np.asarray(labels, np.uint8)}


def _read_npz(content: bytes, file: File) -> _Arrays:
    with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
        images, labels = arrays["images"], arrays["labels"]
    if images.dtype != np.uint8 or labels.dtype != np.uint8:
        raise ValueError(f"{images.dtype} images and {labels.dtype} labels where both must be uint8")
    return {"x": np.ascontiguousarray(images.transpose(0, 3, 1, 2)), "y": labels}


def _read_mushrooms(content: bytes, file: File) -> _Arrays:
    """One-hot features of every value that occurs, 117 in all; poisonous is 1, edible 0."""
    rows = np.array([line.split(",") for line in content.decode().splitlines()])
    hot = [column[:, None] == np.unique(column) for column in rows[:, 1:].T]
    return {
        "x": 255 * np.concatenate(hot, 1).astype(np.uint8),  # pixels are divided by this
        "y": (rows[:, 0] == "p").astype(np.uint8),
    }


_READERS: dict[str, Callable[[bytes, File], _Arrays]] = {
    "mnist": _read_idx,
    "cifar10": _read_cifar,
    "cifar100": _read_cifar,
    "notmnist": _read_idx,
    "omniglot": _read_idx,
    "mushrooms": _read_mushrooms,
    "svhn": _read_npz,
}


def _read_split(name: str, files: list[File], folder: Path, device: torch.device | str) -> Split:
    parts, classes = list[_Arrays](), SETS[name].classes
    for file in files:
        path = locate(folder, file)
        if path is None:
            raise DataError(f"{name} needs {file.path}, which is not in {folder}: {remedy(name, folder)}")
        try:
            parts.append(_READERS[name](_checked(path, file), file))
        except _UNREADABLE as error:
            raise DataError(f"{path} is damaged ({error}): {remedy(name, folder)}") from error
    images, labels = (np.concatenate([part[key] for part in parts if key in part]) for key in "xy")
    highest = labels.max(initial=0)
    if len(images) != len(labels) or highest >= classes:
        found = f"{len(images)} images and {len(labels)} labels up to {highest}, for {classes} classes"
        paths = " and ".join(file.path for file in files)
        raise DataError(f"{paths} in {folder} do not belong together ({found}): {remedy(name, folder)}")
    pixels = torch.from_numpy(images).to(device)
    return Split(pixels.float().div_(255), torch.from_numpy(labels).to(device).long())


def _checked(path: Path, file: File) -> bytes:
    """The content of a file that is the known one; nothing else is parsed, or unpickled."""
    content = content_of(path, file)
    if (seen := hashlib.md5(content, usedforsecurity=False).hexdigest()) != (md5 := known_md5(path, file)):
        raise ValueError(f"its md5 is {seen}, not the known {md5}")
    return content


def _digits(device: torch.device | str) -> Dataset:
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    digits = load_digits()
    parts = train_test_split(
        digits.images / 16, digits.target, test_size=0.2, stratify=digits.target, random_state=0
    )
    x_train, x_test = (torch.tensor(x, dtype=torch.float32, device=device)[:, None] for x in parts[:2])
    y_train, y_test = (torch.tensor(y, dtype=torch.int64, device=device) for y in parts[2:])
    return Dataset("digits", Split(x_train, y_train), Split(x_test, y_test), classes=10)
