"""A saved posterior is what was saved, or it is refused, by the name of what is wrong."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from posterity import DiagonalGaussian, Factorised, MatrixGaussian, point_mass, prune

KEY = "posterity.Factorised"
LEAF = {"family": "DiagonalGaussian", "trainable": False, "tensors": ["w"]}


def posterior() -> Factorised:
    torch.manual_seed(0)
    matrix = MatrixGaussian((torch.randn(2, 3), torch.randn(2)), 0.1 * torch.eye(2), torch.eye(4))
    blocks = {"a": DiagonalGaussian(torch.randn(4, 5), 0.1), ("b.weight", "b.bias"): matrix}
    return prune(Factorised(blocks), 0.3)


def test_any_flipped_bit_is_noticed(tmp_path: Path) -> None:
    """Of 300 bits, 298 were not, in files without a digest."""
    path, draw = tmp_path / "q", random.Random(0)
    posterior().save(path)
    whole = path.read_bytes()
    for place in [
        *draw.sample(range(8 * len(whole)), 300),
        *range(64),
        *range(8 * len(whole) - 8, 8 * len(whole)),
    ]:
        flipped = bytearray(whole)
        flipped[place // 8] ^= 1 << place % 8
        path.write_bytes(flipped)
        with pytest.raises(ValueError, match=r"damaged|not a safetensors file|holds no posterior") as refusal:
            Factorised.load(path)
        assert "\n" not in str(refusal.value)
    path.write_bytes(whole)
    Factorised.load(path)


def written(path: Path, tensors: dict[str, Tensor], header: Any) -> Path:
    """A file as it was before there were digests."""
    save_file(tensors, path, {KEY: header if isinstance(header, str) else json.dumps(header)})
    return path


def test_the_same_numbers_in_another_shape_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "q"
    Factorised({"w": DiagonalGaussian(torch.randn(2, 3), 0.1)}).save(path)
    with safe_open(path, framework="pt") as file:
        metadata, tensors = file.metadata(), {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    save_file({key: value.reshape(3, 2) for key, value in tensors.items()}, path, metadata)
    with pytest.raises(ValueError, match="its content does not fit its digest"):
        Factorised.load(path)


def plain(loc: Tensor | None = None, raw: Tensor | None = None) -> dict[str, Tensor]:
    return {
        "w|loc": torch.ones(3) if loc is None else loc,
        "w|raw": torch.full((3,), 0.1) if raw is None else raw,
    }


def test_a_file_of_before_there_were_digests_is_read(tmp_path: Path) -> None:
    q = Factorised.load(written(tmp_path / "q", plain(), {"version": 1, "blocks": {"w": LEAF}}))
    assert torch.equal(q.mean()["w"], torch.ones(3))
    old = {"family": "DiagonalGaussian", "trainable": False}
    Factorised.load(written(tmp_path / "q", plain(), {"version": 1, "blocks": {"w": old}}))


def nan_at(values: Tensor, value: float) -> Tensor:
    values = values.clone()
    values.view(-1)[-1] = value
    return values


ONES, STD = torch.ones(3), torch.full((3,), 0.1)
HEADER = {"version": 1, "blocks": {"w": LEAF}}
BAD: dict[str, tuple[dict[str, Tensor], Any, str]] = {
    "nan mean": (plain(nan_at(ONES, math.nan)), HEADER, "'w' has means that are not finite"),
    "infinite mean": (plain(nan_at(ONES, math.inf)), HEADER, "'w' has means that are not finite"),
    "nan std": (plain(None, nan_at(STD, math.nan)), HEADER, "'w': a saved std is nan"),
    "infinite std": (plain(None, nan_at(STD, math.inf)), HEADER, "'w': a saved std is inf"),
    "negative std": (plain(None, nan_at(STD, -0.1)), HEADER, "'w': a saved std is -0.1"),
    "empty": ({"w|loc": ONES}, {"version": 1, "blocks": {}}, "it holds tensors of 'w', which is none of its"),
    "newer": (plain(), {**HEADER, "version": 3}, "it was written by a newer Posterity"),
    "version 0": (plain(), {**HEADER, "version": 0}, "its version is 0"),
    "version text": (plain(), {**HEADER, "version": "1"}, "its version is '1'"),
    "version 2 without digest": (plain(), {**HEADER, "version": 2}, "does not fit its digest"),
    "wrong digest": (plain(), {**HEADER, "digest": "0"}, "does not fit its digest"),
    "no version": (plain(), {"blocks": {"w": LEAF}}, "it lacks 'version'"),
    "no blocks": (plain(), {"version": 1}, "it lacks 'blocks'"),
    "no tensors": ({"w|raw": STD}, HEADER, "it lacks 'loc'"),
    "family": (
        plain(),
        {"version": 1, "blocks": {"w": {**LEAF, "family": "Other"}}},
        "has the family Other, which is unknown",
    ),
    "whole numbers": (plain(ONES.int()), HEADER, "means must be floating-point numbers"),
    "list": (plain(), [], "is damaged"),
    "no json": (plain(), "{", "is damaged"),
    "names": (
        plain(),
        {"version": 1, "blocks": {"w": {**LEAF, "tensors": ["v"]}}},
        "'w' says that it holds v",
    ),
    "twice": (
        {**plain(), "w+w|loc": torch.ones(2, 2), "w+w|rows": torch.eye(2), "w+w|columns": torch.eye(2)},
        {
            "version": 1,
            "blocks": {
                "w": LEAF,
                "w+w": {"family": "MatrixGaussian", "shapes": [[2, 1], [2, 1]], "tensors": ["w", "w"]},
            },
        },
        "is in the posterior twice",
    ),
    "more": ({**plain(), "v|loc": ONES}, HEADER, "it holds tensors of 'v', which is none of its blocks"),
    "more of a block": ({**plain(), "w|other": ONES}, HEADER, "'w': .*other"),
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_what_no_posterior_has_is_refused_by_name(bad: tuple[Any, Any, str], tmp_path: Path) -> None:
    tensors, header, match = bad
    path = written(tmp_path / "q", tensors, header)
    with pytest.raises(ValueError, match=match) as refusal:
        Factorised.load(path)
    assert str(refusal.value).startswith(f"{path} is damaged: ")
    assert "\n" not in str(refusal.value)


def test_pruned_weights_and_point_masses_have_no_std(tmp_path: Path) -> None:
    header = {"version": 1, "blocks": {"w": LEAF}}
    keep = torch.tensor([True, True, False])
    tensors = {**plain(nan_at(ONES, math.nan), nan_at(STD, -1.0)), "w|keep": keep}
    assert Factorised.load(written(tmp_path / "q", tensors, header)).std()["w"].tolist()[2] == 0.0
    point_mass(torch.nn.Linear(2, 2)).save(tmp_path / "point")
    assert not Factorised.load(tmp_path / "point").std()["weight"].any()


@pytest.mark.parametrize(
    "make", [lambda: torch.randn(6, 4).t(), lambda: torch.randn(()), lambda: torch.zeros(0, 3)]
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_the_digest_is_of_values_not_of_their_memory(
    make: Callable[[], Tensor], dtype: torch.dtype, tmp_path: Path
) -> None:
    mean = make().to(dtype)
    for i, each in enumerate((mean, mean.clone(memory_format=torch.contiguous_format))):
        Factorised({"w": DiagonalGaussian(each, 0.5)}).save(tmp_path / str(i))
        assert torch.equal(Factorised.load(tmp_path / str(i)).mean()["w"], mean)
    assert (tmp_path / "0").read_bytes() == (tmp_path / "1").read_bytes()
