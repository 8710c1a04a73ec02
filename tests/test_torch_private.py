"""Private functions of torch live in one module, and are still there."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest
import torch

from posterity.torch_private import read_forward_derivatives

SRC = Path(__file__).parents[1] / "src" / "posterity"
# What the module takes from torch, by its path there.
TAKEN = [
    "torch._C.DisableTorchFunction",
    "torch._C._current_graph_task_id",
    "torch._C._is_any_autocast_enabled",
    "torch._C._autograd._get_current_graph_task_keep_graph",
    *(
        f"torch._C._functorch.{name}"
        for name in (
            "CVmapInterpreterPtr",
            "TransformType",
            "_add_batch_dim",
            "_set_vmap_fallback_warning_enabled",
            "get_interpreter_stack",
            "get_unwrapped",
            "is_batchedtensor",
            "maybe_get_bdim",
            "maybe_get_level",
            "peek_interpreter_stack",
        )
    ),
    "torch._functorch.pyfunctorch.temporarily_pop_interpreter_stack",
    "torch._utils._flatten_dense_tensors",
    "torch.nn.modules.batchnorm._BatchNorm",
    "torch.jit._recursive.wrap_cpp_module",
    "torch.ops.aten._scaled_dot_product_attention_math.default",
    "torch.ops.aten._unsafe_view.default",
    "torch.overrides._get_current_function_mode_stack",
    "torch.utils._pytree.TreeSpec",
    "torch.utils._pytree.tree_flatten",
    "torch.utils._pytree.tree_leaves",
    "torch.utils._pytree.tree_unflatten",
    *(f"torch._foreach_{name}" for name in ("add_", "addcmul_", "copy_", "mul", "mul_", "norm", "sub")),
    "torch.Tensor._backward_hooks",
    "torch.Tensor._is_view",
    "torch.Tensor._post_accumulate_grad_hooks",
    "torch.Tensor._version",
]


@pytest.mark.parametrize("path", TAKEN)
def test_torch_still_has_what_is_taken_from_it(path: str) -> None:
    found: object = torch
    for name in path.split(".")[1:]:
        found = getattr(found, name, None)
        assert found is not None, f"torch {torch.__version__} has no {path}: see posterity/torch_private.py"


def test_forward_derivatives_can_be_read_before_they_are_needed() -> None:
    read_forward_derivatives()
    assert "torch._decomp.decompositions_for_jvp" in sys.modules


def test_nodes_take_hooks_and_keep_the_statistics_of_a_batch() -> None:
    out = torch.nn.BatchNorm1d(3)(torch.randn(4, 3))
    for name in ("_register_hook_dict", "_saved_result1", "_saved_result2", "next_functions"):
        assert hasattr(out.grad_fn, name), f"torch {torch.__version__}: autograd nodes have no {name}"
    assert hasattr(super(torch.autograd.Function, torch.autograd.Function), "apply")


def private(path: Path) -> set[str]:
    """What a file takes from torch under a name that begins with an underscore."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            names = [*(node.module or "").split("."), *(each.name for each in node.names)]
            found |= {f"{node.module}: {name}" for name in names if name.startswith("_")}
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            at: ast.expr = node
            while isinstance(at, ast.Attribute):
                at = at.value
            if isinstance(at, ast.Name) and at.id == "torch":
                found.add(ast.unparse(node))
    return found


FILES = [path for path in sorted(SRC.rglob("*.py")) if "kernels" not in path.parts]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SRC)))
def test_nothing_private_is_taken_elsewhere(path: Path) -> None:
    if path.name != "torch_private.py":
        assert not private(path)
