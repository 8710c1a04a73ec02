"""The tables of docs/families.md are what the code does."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from posterity import (
    ARD,
    Density,
    DiagonalGaussian,
    EigenGaussian,
    Factorised,
    GroupHorseshoe,
    GroupNormalJeffreys,
    IsotropicGaussian,
    Leaf,
    LogUniform,
    MatrixGaussian,
    ScaledGaussian,
    ScaleMixture,
    cfg,
    ghs,
    gnj,
    kl,
    mnf,
)

PAGE = Path(__file__).parents[2] / "docs/families.md"
pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="needs a checkout")


def shown(name: str) -> str:
    return PAGE.read_text().partition(f"<!-- {name} -->\n")[2].partition("\n<!-- end -->")[0]


def written(lines: list[list[str]]) -> str:
    head, *rest = ["| " + " | ".join(line) + " |" for line in lines]
    return "\n".join([head, "|---" * len(lines[0]) + "|", *rest])


def matrix(weight: torch.Tensor, bias: torch.Tensor, kind: type[Leaf]) -> Leaf:
    height, width = len(weight), weight[0].numel() + 1
    parts = torch.eye(height), 0.1 * torch.eye(width)
    if kind is EigenGaussian:
        return EigenGaussian((weight, bias), parts[0], torch.eye(width), torch.full((height, width), 0.1))
    return MatrixGaussian((weight, bias), *parts)


def layer(kind: str, weight: torch.Tensor, bias: torch.Tensor) -> Factorised:
    if kind in ("matrix", "eigenbasis"):
        leaf = matrix(weight, bias, MatrixGaussian if kind == "matrix" else EigenGaussian)
        return Factorised({("weight", "bias"): leaf})
    given = {"FFG": DiagonalGaussian, "CFG": cfg, "MNF": mnf, KERNEL: partial(mnf, conv="kernel")}
    family = (given | {"GNJ": gnj, "GHS": ghs})[kind]
    return Factorised({"weight": family(weight, 0.1), "bias": family(bias, 0.1)})


KERNEL = 'MNF, `conv="kernel"`'
QS = ["FFG", "CFG", "MNF", "GNJ", "GHS", "matrix", "eigenbasis"]


def how(q: Factorised, p: Factorised | Density) -> str:
    """What ``kl`` does with a pair."""
    try:
        values = {float(kl(q, p).detach()) for _ in range(5)}  # two draws may be rounded to one number
    except (TypeError, ValueError):
        return "–"
    if len(values) == 1:
        return "exact"
    return "bound" if isinstance(q.block(next(iter(q.blocks))), ScaledGaussian) else "drawn"


def test_the_table_of_pairs_is_what_kl_does() -> None:
    conv = nn.Conv2d(2, 3, 2)
    weight, bias = (p.detach() for p in conv.parameters())
    priors = {"isotropic": IsotropicGaussian(), "mixture": ScaleMixture()}
    priors |= {"log-uniform": LogUniform(), "ARD": ARD()}
    priors |= {"normal-Jeffreys": GroupNormalJeffreys(), "horseshoe": GroupHorseshoe()}
    priors |= {kind: layer(kind, weight + 0.1, bias) for kind in QS}
    lines = [["q \\ p", *priors]]
    for kind in QS:
        q = layer(kind, weight, bias)
        lines.append([kind, *(how(q, p) for p in priors.values())])
    assert shown("q in rows, p in columns") == written(lines)


def test_the_table_of_sizes_is_that_of_the_leaves() -> None:
    layers = {
        "convolution 3×3, 16 to 32 maps": (32, 16, 3, 3),
        "convolution 5×5, 16 to 32 maps": (32, 16, 5, 5),
        "linear, 400 to 100": (100, 400),
    }
    kinds = [*QS[:3], KERNEL, *QS[3:]]
    lines = [["layer", *kinds]]
    for name, shape in layers.items():
        weight, bias = torch.zeros(shape), torch.zeros(shape[0])
        cells = []
        for kind in kinds:
            found = next(iter(layer(kind, weight, bias).blocks.values()))
            fitted = found.joined
            size = sum(
                value.numel()
                for value in (found.state_dict().values() if fitted else found.trainable().parameters())
            )
            cells.append(f"{size / found.loc.numel():.3g}")
        lines.append([name, *cells])
    assert shown("numbers per weight") == written(lines)
