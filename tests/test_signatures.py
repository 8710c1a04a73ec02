"""Layers are known by torch's calls of them, whose arguments come by position as well as by name."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

from posterity import routes
from posterity.curvature import calls

READERS = [
    *((func, route, 1) for func, route in routes._ROUTES.items()),  # which get the sinks first
    *((func, read, 0) for func, read in calls.CALLS.items()),
]


@pytest.mark.parametrize(
    ("func", "reader", "own"), READERS, ids=lambda each: getattr(each, "__name__", str(each))
)
def test_arguments_have_the_names_and_the_order_that_torch_gives_them(
    func: Any, reader: Callable[..., Any], own: int
) -> None:
    theirs = inspect.signature(torch.overrides.get_testing_overrides()[func])
    assert [*inspect.signature(reader).parameters][own:] == [*theirs.parameters]
