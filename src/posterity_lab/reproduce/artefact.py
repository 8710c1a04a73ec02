"""A unit's pruned net on disk, with its posterior and all that is needed to run it.

| file | what |
|---|---|
| ``posterior.safetensors`` | the pruned posterior, perhaps without biases and BatchNorm |
| ``net.safetensors`` | every parameter and buffer, at the posterior's means |
| ``unit.json`` | the unit: net, data, and all other settings |
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import nn

from posterity import Factorised
from posterity.compress import point_mass
from posterity.disk import replacing
from posterity_lab import nets
from posterity_lab.data import Split
from posterity_lab.reproduce.study import Unit
from posterity_lab.reproduce.training import prepared, splits
from posterity_lab.run_files import POSTERIOR, save_posterior

NET, UNIT = "net.safetensors", "unit.json"


def keep(folder: Path, unit: Unit, net: nn.Module, posterior: Factorised) -> None:
    """Write a pruned net to the folder of its unit.

    Example:
        >>> import tempfile
        >>> net = nets.build("mlp-8", [1, 8, 8], 10)
        >>> with tempfile.TemporaryDirectory() as name:
        ...     keep(Path(name), Unit("mine", "8", "sgd", 0, {"net": "mlp-8"}, ""), net, point_mass(net))
        ...     sorted(path.name for path in Path(name).iterdir())
        ['net.safetensors', 'posterior.safetensors', 'unit.json']
    """
    save_posterior(folder / POSTERIOR, posterior)
    state = {**net.state_dict(), **posterior.mean()}
    with replacing(folder / NET) as unfinished:
        save_file({name: value.detach().contiguous().cpu() for name, value in state.items()}, unfinished)
    with replacing(folder / UNIT) as unfinished:
        unfinished.write_text(json.dumps(asdict(unit), indent=1))


def read(folder: Path, device: str) -> tuple[Unit, nn.Module, Factorised, Split]:
    """The unit of a folder, its net, the posterior of all weights, and the test data.

    Args:
        folder: A folder written by `keep`.
        device: The device for all tensors.

    Example:
        >>> read(Path("nowhere"), "cpu")
        Traceback (most recent call last):
            ...
        FileNotFoundError: nowhere holds no pruned net (no unit.json): name the cache folder of a sparse unit
    """
    for name in (UNIT, NET, POSTERIOR):
        if not (folder / name).exists():
            raise FileNotFoundError(
                f"{folder} holds no pruned net (no {name}): name the cache folder of a sparse unit"
            )
    unit = Unit(**json.loads((folder / UNIT).read_text()))
    dataset = prepared(unit, device)
    train, test = splits(dataset, unit.config)
    net = nets.build(unit.config["net"], train.x.shape[1:], dataset.classes).to(device)
    net.load_state_dict(load_file(folder / NET))
    found = Factorised.load(folder / POSTERIOR).to(device)
    points = {name: leaf for name, leaf in point_mass(net).blocks.items() if name not in found.mean()}
    return unit, net, Factorised({**found.frozen().blocks, **points}), test
