"""Layers are known by torch's calls of them, whose arguments come by position as well as by name."""

import inspect
import re
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from posterity.layers.calls import Call
from posterity.layers.intercept import LAYERS, OPERATIONS

KNOWN = [*LAYERS.items(), *OPERATIONS.items()]


@pytest.mark.parametrize(("func", "kind"), KNOWN, ids=lambda each: getattr(each, "__name__", str(each)))
def test_layer_arguments_match_torchs_names_and_order(func: Any, kind: type[Call]) -> None:
    theirs = [*inspect.signature(torch.overrides.get_testing_overrides()[func]).parameters]
    if func is F.scaled_dot_product_attention:  # torch's table lacks what came later
        theirs = re.findall(r"(\w+)(?:=[\w.]+)?[,)]", func.__doc__.partition("->")[0])
    assert [*inspect.signature(kind).parameters] == theirs
