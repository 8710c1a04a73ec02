"""Regression data sets of the UCI repository, with the train and test splits that papers use.

Files are looked for as for the image sets: in the folder ``uci`` of ``POSTERITY_DATA``, else of
``~/.cache/posterity``. The splits are those of Hernández-Lobato and Adams (2015).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from posterity_lab.data import Split
from posterity_lab.disk import md5_of
from posterity_lab.files import DataError, folder_of
from posterity_lab.hints import hint

MD5 = {
    "bostonHousing": "88b98b73532a30ed2b1d64ae55e0211d",
    "energy": "f20bae473bb3778c64f324f257a788c2",
    "naval-propulsion-plant": "9aae7e5274dc66110ae68e5c05fed339",
    "power-plant": "5f94e68a4021c0803c2809f13121864e",
    "protein-tertiary-structure": "a43ade45b0540219ea37622af96b8a78",
    "wine-quality-red": "5c556549269c18e1b9354a538061539b",
}


@dataclass(frozen=True, eq=False)
class Regression:
    """Inputs ``[N, D]`` and targets ``[N, 1]``, standardised by the training examples.

    Attributes:
        train: What to learn from.
        test: What to be tested on.
        scale: Standard deviation of the training targets: errors times this are in the set's own unit.
    """

    train: Split
    test: Split
    scale: float


def load(name: str, split: int, root: Path | None = None, device: torch.device | str = "cpu") -> Regression:
    """Read a data set by one of its splits.

    Args:
        name: One of ``MD5``.
        split: Number of the split, from 0.
        root: The data folder, if not the usual one.
        device: Where to put the tensors.

    Raises:
        DataError: The file is missing or damaged, or there is no such set or split.

    Example:
        >>> load("enregy", 0)
        Traceback (most recent call last):
            ...
        posterity_lab.files.DataError: there is no regression set 'enregy', did you mean 'energy'?
    """
    if name not in MD5:
        raise DataError(f"there is no regression set {name!r}{hint(name, list(MD5))}")
    path = folder_of(root) / "uci" / f"{name}.npz"
    if not path.is_file():
        raise DataError(f"{path} is missing: put it there, or set POSTERITY_DATA to a folder that has it")
    if (seen := md5_of(path)) != MD5[name]:
        raise DataError(f"{path} has the md5 {seen}, not {MD5[name]}: replace it")
    with np.load(path, allow_pickle=False) as arrays:
        if f"test_{split}" not in arrays:
            raise DataError(f"{name} has no split {split}: choose a lower number")
        rows = torch.from_numpy(arrays["data"])
        x, y = (rows[:, torch.from_numpy(arrays[key]).long()] for key in ("features", "target"))
        held_out = torch.zeros(len(rows), dtype=torch.bool)
        held_out[torch.from_numpy(arrays[f"test_{split}"]).long()] = True
    centre, spread = x[~held_out].mean(0), x[~held_out].std(0)
    x = (x - centre) / torch.where(spread > 0, spread, 1.0)  # a feature may be constant in a split
    scale = y[~held_out].std()
    y = (y - y[~held_out].mean()) / scale
    train, test = (Split(x[chosen].float(), y[chosen].float()).to(device) for chosen in (~held_out, held_out))
    return Regression(train, test, float(scale))
