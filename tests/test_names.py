"""Choosing parameters by name."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

import posterity
from posterity.names import select


def test_patterns_names_and_functions() -> None:
    names = ["a.weight", "a.bias", "list[0].weight"]
    assert select(names, "*.weight") == {"a.weight", "list[0].weight"}
    assert select(names, ["a.bias", "list[0].weight"]) == {"a.bias", "list[0].weight"}
    assert select(names, lambda name: name.startswith("a")) == {"a.weight", "a.bias"}
    assert select(names, ()) == set()
    with pytest.raises(ValueError, match=r"no parameter is named like 'b\*'; the names are 'a.weight'"):
        select(names, "b*")


def test_names_of_kinds_are_those_an_optimiser_knows() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3), nn.BatchNorm1d(3))
    model[2].weight = model[0].weight
    model[3].requires_grad_(False)
    assert posterity.names_of(model, nn.BatchNorm1d) == ["1.weight", "1.bias"]
    assert posterity.names_of(model, nn.Linear) == ["0.weight", "0.bias", "2.bias"]
    opt = posterity.BGD(model, deterministic=posterity.names_of(model, nn.BatchNorm1d))
    assert list(opt.posterior().blocks) == ["0.weight", "0.bias", "2.bias"]
    assert torch.equal(opt.param_groups[1]["params"][0], model[1].weight)


@pytest.mark.parametrize(
    "make",
    [
        lambda net: posterity.variational(
            net, family={"o.*": posterity.cfg, "*": posterity.DiagonalGaussian}
        ),
        lambda net: posterity.variational(net, estimator={"o.*": "local", "*": "weight"}),
        lambda net: posterity.variational(
            net,
            prior=posterity.ByName({"o.*": posterity.IsotropicGaussian(0.1), "*": posterity.around(net, 1)}),
        ),
    ],
    ids=["family", "estimator", "prior"],
)
def test_patterns_that_match_no_parameter_are_refused(make: Callable[[nn.Module], object]) -> None:
    with pytest.raises(
        ValueError, match=r"no parameter is named like 'o\.\*'; the names are 'weight', 'bias'"
    ):
        make(nn.Linear(3, 2))
