"""Independent blocks: a posterior made of one leaf per block, and its file format."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast, final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from posterity import noise
from posterity.posterior.base import Leaf, Posterior

_FORMAT = "posterity.Factorised"
_VERSION = 1


@final
class Factorised(Posterior):
    """A product of leaves, one per named parameter tensor.

    Args:
        blocks: Leaf of every parameter, by the parameter's name in the model.

    Example:
        >>> from posterity import DiagonalGaussian
        >>> q = Factorised({"fc.weight": DiagonalGaussian(torch.zeros(2, 3), 0.1)})
        >>> q.sample(5)["fc.weight"].shape
        torch.Size([5, 2, 3])
    """

    def __init__(self, blocks: Mapping[str, Leaf]) -> None:
        super().__init__()
        if not blocks:
            raise ValueError("a posterior needs at least one block")
        self._names = tuple(blocks)
        # A module's children may not have dots in their names; parameters usually do.
        self._leaves = nn.ModuleList(blocks.values())

    @property
    def blocks(self) -> dict[str, Leaf]:
        """The leaves by parameter name."""
        return dict(zip(self._names, cast("list[Leaf]", list(self._leaves)), strict=True))

    def block(self, name: str) -> Leaf:
        """The leaf of one parameter."""
        if name not in self._names:
            raise KeyError(f"the posterior has no block {name!r}; its first is {self._names[0]!r}")
        return self.blocks[name]

    def mean(self) -> dict[str, Tensor]:
        """The mean of every tensor."""
        return {name: leaf.mean() for name, leaf in self.blocks.items()}

    def std(self) -> dict[str, Tensor]:
        """The standard deviation of every weight."""
        return {name: leaf.std() for name, leaf in self.blocks.items()}

    def log_prob(self, params: Mapping[str, Tensor]) -> Tensor:
        """Log-density of the given weights, summed over them; leading dimensions are kept."""
        missing = [name for name in self._names if name not in params]
        if missing:
            raise KeyError(f"log_prob needs every block's weights; {missing[0]!r} is missing")
        return torch.stack([leaf.log_prob(params[name]) for name, leaf in self.blocks.items()]).sum(0)

    def frozen(self) -> Factorised:
        """A detached copy, for use as the next prior or for keeping."""
        return Factorised(
            {
                name: type(leaf).restore(_copied(leaf.state_dict()), leaf.config())
                for name, leaf in self.blocks.items()
            }
        ).requires_grad_(False)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a safetensors file, whole or not at all."""
        tensors = {
            f"{name}|{key}": value.contiguous()
            for name, leaf in self.blocks.items()
            for key, value in _copied(leaf.state_dict()).items()
        }
        config = {
            name: {"family": type(leaf).__name__, **leaf.config()} for name, leaf in self.blocks.items()
        }
        # One key: safetensors writes several in any order, and equal posteriors should give equal files.
        metadata = {_FORMAT: json.dumps({"version": _VERSION, "blocks": config})}
        target = Path(path)
        partial = target.with_name(target.name + ".partial")
        # Written by Python, so that the file has the permissions of any other.
        partial.write_bytes(save(tensors, metadata))
        os.replace(partial, target)

    @classmethod
    def load(cls, path: str | os.PathLike[str], model: nn.Module | None = None) -> Factorised:
        """Read a saved posterior; with a model, refuse one that does not fit it.

        Example:
            >>> import tempfile, pathlib
            >>> from posterity import DiagonalGaussian
            >>> q = Factorised({"w": DiagonalGaussian(torch.zeros(2), 0.1)})
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     q.save(pathlib.Path(folder) / "q.safetensors")
            ...     Factorised.load(pathlib.Path(folder) / "q.safetensors").std()["w"]
            tensor([0.1000, 0.1000])
        """
        tensors: dict[str, dict[str, Tensor]] = {}
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                for key in file.keys():  # noqa: SIM118 (the handle is no mapping)
                    name, _, part = key.rpartition("|")
                    tensors.setdefault(name, {})[part] = file.get_tensor(key)
        except (SafetensorError, IsADirectoryError) as error:
            raise ValueError(f"{path} is not a safetensors file, or is cut short: {error}") from error
        if _FORMAT not in metadata:
            raise ValueError(f"{path} is a safetensors file but holds no posterior: save one with .save()")
        try:
            return cls._restored(json.loads(metadata[_FORMAT]), tensors, path, model)
        except (json.JSONDecodeError, KeyError, RuntimeError) as error:
            raise ValueError(f"{path} is damaged: {error}") from error

    @classmethod
    def _restored(
        cls,
        header: dict[str, Any],
        tensors: Mapping[str, Mapping[str, Tensor]],
        path: str | os.PathLike[str],
        model: nn.Module | None,
    ) -> Factorised:
        if header["version"] > _VERSION:
            raise ValueError(f"{path} was written by a newer Posterity: update to read it")
        families = {family.__name__: family for family in Leaf.__subclasses__()}
        blocks = {}
        for name, config in header["blocks"].items():
            if config["family"] not in families:
                raise ValueError(f"{path}: {name!r} is of the family {config['family']}, unknown here")
            blocks[name] = families[config["family"]].restore(tensors[name], config)
        posterior = cls(blocks)
        return posterior if model is None else posterior.check(model)

    def _sample(self, samples: range, seed: int, step: int) -> dict[str, Tensor]:
        return {
            name: leaf.draw(
                noise.normal(
                    samples,
                    leaf.shape,
                    seed=seed,
                    step=step,
                    block=name,
                    device=leaf.device,
                    dtype=leaf.dtype,
                )
            )
            for name, leaf in self.blocks.items()
        }


def _copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Detached copies: a trainable leaf may share its means with a model."""
    return {key: value.detach().clone() for key, value in tensors.items()}
