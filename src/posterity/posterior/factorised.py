"""Independent blocks: a posterior made of one leaf per block, and its file format."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias, cast, final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from posterity import noise
from posterity.arguments import MODULE, PATH, TENSORS, Kind, described, takes
from posterity.disk import replacing, write_tensors
from posterity.posterior.base import Posterior
from posterity.posterior.leaf import Leaf

Key: TypeAlias = str | tuple[str, ...]

_KEY = Kind(
    "a name or a tuple of names",
    lambda key: (
        isinstance(key, str) or (isinstance(key, tuple) and all(isinstance(each, str) for each in key))
    ),
)
_FORMAT = "posterity.Factorised"
# 2: the header has a digest, without which no file of this version is read.
_VERSION = 2


@final
class Factorised(Posterior):
    """A product of leaves, one per block.

    A block is a parameter tensor, or several that one leaf holds together, as K-FAC does a layer's weight and
    bias. All inputs and outputs use parameter names; only ``blocks`` uses block names, where a block of
    several tensors is called ``"fc.weight+fc.bias"``.

    Args:
        blocks: Leaf of every block, by the parameter's name in the model, or a tuple of names in the order
            of the leaf's ``shapes``.
        linearised: Whether it is a posterior of the model linearised around the means.

    Attributes:
        tensors: The names of every block's tensors, by the block's name.

    Example:
        >>> from posterity import DiagonalGaussian
        >>> q = Factorised({"fc.weight": DiagonalGaussian(torch.zeros(2, 3), 0.1)})
        >>> q.sample(5)["fc.weight"].shape
        torch.Size([5, 2, 3])
    """

    def __init__(
        self,
        blocks: Mapping[str, Leaf] | Mapping[tuple[str, ...], Leaf] | Mapping[Key, Leaf],
        *,
        linearised: bool = False,
    ) -> None:
        super().__init__()
        self.linearised = linearised
        if not (isinstance(blocks, Mapping) and all(isinstance(leaf, Leaf) for leaf in blocks.values())):
            raise TypeError(f"a posterior is made of leaves by name, not of {described(blocks)}")
        if not blocks:
            raise ValueError("a posterior needs at least one block")
        self.tensors: dict[str, tuple[str, ...]] = {}
        seen: set[str] = set()
        for key, leaf in blocks.items():
            if not _KEY.fits(key):
                raise TypeError(f"a block is called by {_KEY.words}, not {described(key)}")
            names = (key,) if isinstance(key, str) else key
            if len(names) != len(leaf.shapes):
                raise ValueError(f"{key!r} names {len(names)} tensors, and its leaf holds {len(leaf.shapes)}")
            if len({*names} - seen) < len(names):
                raise ValueError(f"a tensor of {key!r} is in the posterior twice: give it to one block")
            seen |= {*names}
            self.tensors["+".join(names)] = names
        # A module's children may not have dots in their names; parameters usually do.
        self._leaves = nn.ModuleList(blocks.values())

    def __repr__(self) -> str:
        kinds = Counter(type(leaf).__name__ for leaf in self.blocks.values())
        weights = sum(shape.numel() for shape in self.shapes().values())
        names = [*map(repr, self.tensors)]
        found = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
        ends = ", ".join(names if len(names) < 3 else (names[0], "…", names[-1]))
        linearised = ", linearised=True" if self.linearised else ""
        return (
            f"Factorised(blocks={len(names)}, weights={weights}, kinds=[{found}], names=[{ends}]{linearised})"
        )

    @property
    def blocks(self) -> dict[str, Leaf]:
        """The leaves by block name: the tensor's name, or several joined by ``+``."""
        return dict(zip(self.tensors, cast("list[Leaf]", list(self._leaves)), strict=True))

    @takes(name=_KEY)
    def block(self, name: Key) -> Leaf:
        """The leaf of one block, by its name or a tuple of its tensors' names."""
        called = name if isinstance(name, str) else "+".join(name)
        if called not in self.tensors:
            for block, tensors in self.tensors.items():
                if called in tensors:
                    raise KeyError(f"{called!r} is only part of a block: ask for {block!r}")
            raise KeyError(
                f"the posterior has no block {called!r}; its first is {next(iter(self.tensors))!r}"
            )
        return self.blocks[called]

    def split(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Convert one value per weight, given by block, to values by tensor; leading dimensions stay."""
        return {
            name: part
            for block, leaf in self.blocks.items()
            for name, part in zip(self.tensors[block], leaf.split(values[block]), strict=True)
        }

    @takes(values=TENSORS)
    def join(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Convert one value per weight, given by tensor, to values by block: the inverse of :meth:`split`."""
        leads: dict[torch.Size, str] = {}
        for name, shape in self.shapes().items():
            if name not in values:
                raise KeyError(f"{name!r} is missing: give values of every tensor of the posterior")
            given = values[name].shape
            lead = given[: len(given) - len(shape)]
            if given[len(lead) :] != shape:
                raise ValueError(f"{name!r} has shape {tuple(given)}, and the posterior's is {tuple(shape)}")
            leads.setdefault(lead, name)
        if len(leads) > 1:
            (one, first), (other, second) = list(leads.items())[:2]
            raise ValueError(
                f"{first!r} has leading dimensions {tuple(one)} and {second!r} {tuple(other)}: give all "
                "values the same"
            )
        return {
            block: leaf.join([values[name] for name in self.tensors[block]])
            for block, leaf in self.blocks.items()
        }

    def shapes(self) -> dict[str, torch.Size]:
        """The shape of every tensor."""
        names = chain.from_iterable(self.tensors.values())
        return dict(
            zip(names, chain.from_iterable(leaf.shapes for leaf in self.blocks.values()), strict=True)
        )

    def mean(self) -> dict[str, Tensor]:
        """The mean of every tensor."""
        return self.split({block: leaf.mean() for block, leaf in self.blocks.items()})

    def std(self) -> dict[str, Tensor]:
        """The standard deviation of every weight."""
        return self.split({block: leaf.std() for block, leaf in self.blocks.items()})

    def kept(self) -> dict[str, Tensor]:
        """The masks of the weights that are not pruned."""
        return self.split({block: leaf.kept for block, leaf in self.blocks.items()})

    def log_prob(self, params: Mapping[str, Tensor]) -> Tensor:
        """Log-density of the given weights, summed over them; leading dimensions are kept."""
        values = self.join(params)
        if other := [name for name in self.shapes() if params[name].dtype == torch.bool]:
            raise TypeError(f"{other[0]!r} must be given numbers, not booleans")
        return torch.stack([leaf.log_prob(values[block]) for block, leaf in self.blocks.items()]).sum(0)

    def frozen(self) -> Factorised:
        """A detached copy, to keep or to use as the next prior."""
        return self.rebuilt({name: leaf.copy() for name, leaf in self.blocks.items()}).requires_grad_(False)

    def rebuilt(self, leaves: Mapping[str, Leaf]) -> Factorised:
        """The same blocks with other leaves, given by the blocks' names."""
        blocks = {self.tensors[name]: leaf for name, leaf in leaves.items()}
        return Factorised(blocks, linearised=self.linearised)

    @takes(path=PATH)
    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a safetensors file atomically."""
        tensors = {
            f"{name}|{key}": value
            for name, leaf in self.blocks.items()
            for key, value in leaf.state_dict().items()
        }
        config = {
            name: {"family": type(leaf).__name__, "tensors": self.tensors[name], **leaf.config()}
            for name, leaf in self.blocks.items()
        }
        # One key: safetensors writes several in any order, and equal posteriors should give equal files.
        header: dict[str, Any] = {"version": _VERSION, "blocks": config}
        if self.linearised:
            header["linearised"] = True
        header["digest"] = _digest(header, tensors)
        target = Path(path)
        if not target.name:
            raise ValueError(f"{str(path)!r} names no file to write")
        with replacing(target) as unfinished:
            write_tensors(unfinished, tensors, {_FORMAT: json.dumps(header)})

    @classmethod
    @takes(path=PATH, model=MODULE)
    def load(cls, path: str | os.PathLike[str], model: nn.Module | None = None) -> Factorised:
        """Read a saved posterior; with a model, refuse one that does not fit it.

        A file in which even one bit has changed is refused by its digest, and so is one with invalid means or
        stds. Older files without a digest are read without that check.

        Example:
            >>> import tempfile, pathlib
            >>> from posterity import DiagonalGaussian
            >>> q = Factorised({"w": DiagonalGaussian(torch.zeros(2), 0.1)})
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     q.save(pathlib.Path(folder) / "q.safetensors")
            ...     Factorised.load(pathlib.Path(folder) / "q.safetensors").std()["w"]
            tensor([0.1000, 0.1000])
        """
        if not os.path.exists(path):
            raise FileNotFoundError(f"there is no file {str(path)!r}: a posterior is written by .save()")
        if os.path.isdir(path):
            raise ValueError(f"{path} is not a safetensors file, but a folder: name a file in it")
        tensors: dict[str, dict[str, Tensor]] = {}
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                for key in file.keys():  # noqa: SIM118 (the handle is no mapping)
                    name, _, part = key.rpartition("|")
                    tensors.setdefault(name, {})[part] = file.get_tensor(key)
        except SafetensorError as error:
            raise ValueError(f"{path} is not a safetensors file, or is cut short: {error}") from error
        if _FORMAT not in metadata:
            raise ValueError(f"{path} is a safetensors file but holds no posterior: save one with .save()")
        try:
            header = json.loads(metadata[_FORMAT])
            version = header["version"]
            if isinstance(version, int) and version > _VERSION:
                raise ValueError("it was written by a newer Posterity: update to read it")
            _refuse_changed(header, tensors)
            blocks = _restored(header["blocks"], tensors)
            posterior = cls(blocks, linearised=bool(header.get("linearised", False)))
        except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
            missing = f"it lacks {error}" if isinstance(error, KeyError) else " ".join(str(error).split())
            raise ValueError(f"{path} is damaged: {missing}") from error
        return posterior if model is None else posterior.check(model)

    def _sample(
        self, samples: range, seed: int, step: int, domain: noise.Domain = noise.Domain.SAMPLE
    ) -> dict[str, Tensor]:
        draws = {
            name: leaf.draw(leaf.noise(samples, block=name, seed=seed, step=step, domain=domain))
            for name, leaf in self.blocks.items()
        }
        return self.split(draws)


def _digest(header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of a file's header and of its tensors: names, types, shapes and bytes."""
    found = hashlib.sha256(json.dumps(dict(header)).encode())
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        found.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        if tensor.nbytes:  # as they lie in memory, not as a copy
            found.update((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()))
    return found.hexdigest()


def _refuse_changed(header: dict[str, Any], tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Raise if a file has changed since it was written; removes the digest from the header."""
    version, digest = header["version"], header.pop("digest", None)
    if type(version) is not int or version < 1:
        raise ValueError(f"its version is {version!r}, which no Posterity has written")
    if digest is None and version < 2:
        return
    flat = {f"{name}|{key}": value for name, own in tensors.items() for key, value in own.items()}
    if digest != _digest(header, flat):
        raise ValueError("its content does not fit its digest: restore it from a copy, or save it again")


def _restored(header: Mapping[str, Any], tensors: Mapping[str, Mapping[str, Tensor]]) -> dict[Key, Leaf]:
    """The leaves of a file, from its header and its tensors."""
    families = {family.__name__: family for family in _families(Leaf)}
    blocks: dict[Key, Leaf] = {}
    for name, config in header.items():
        if config["family"] not in families:
            raise ValueError(f"{name!r} has the family {config['family']}, which is unknown here")
        # Older files, without blocks of several tensors, do not have these names.
        names = tuple(config.get("tensors", [name]))
        if "+".join(names) != name:
            raise ValueError(f"the block {name!r} says that it holds {', '.join(names)}")
        try:
            blocks[names] = leaf = families[config["family"]].restored(tensors[name], config)
        except (RuntimeError, TypeError, ValueError) as error:
            raise ValueError(f"{name!r}: {error}") from error
        if not bool(torch.isfinite(leaf.mean()).all()):
            raise ValueError(f"{name!r} has means that are not finite")
    if unknown := tensors.keys() - header.keys():
        raise ValueError(f"it holds tensors of {min(unknown)!r}, which is none of its blocks")
    return blocks


def _families(base: type[Any]) -> Iterator[Any]:
    for family in base.__subclasses__():
        yield family
        yield from _families(family)
