"""The private functions of torch that the library uses outside its kernels, each with its reason.

If torch drops one, importing the library fails here, by name; ``tests/test_torch_private.py`` checks that
nothing private is used elsewhere.
"""

from __future__ import annotations

import importlib
import math
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, fx, nn
from torch._functorch import pyfunctorch
from torch.nn.modules import batchnorm
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils import _pytree

# Which tensors vmap has stacked, on which axis, at which level.
functorch = torch._C._functorch
# Calls autograd functions of ours from inside vmap.
temporarily_pop_interpreter_stack = pyfunctorch.temporarily_pop_interpreter_stack
# The base class of all BatchNorm modules.
AnyBatchNorm = batchnorm._BatchNorm
# Tensors inside dicts, lists and tuples.
TreeSpec: TypeAlias = _pytree.TreeSpec
tree_leaves, tree_map = _pytree.tree_leaves, _pytree.tree_map
tree_flatten, tree_unflatten = _pytree.tree_flatten, _pytree.tree_unflatten
# Many tensors end to end.
flatten_dense_tensors = torch._utils._flatten_dense_tensors
# A context for operations that no mode needs to see.
DisableTorchFunction = torch._C.DisableTorchFunction
# A TorchScript module: a copy of one must have copies of its parts.
wrap_script: Callable[[Any], nn.Module] = torch.jit._recursive.wrap_cpp_module
# Attention from operations with forward derivatives and double backward passes, which fused ones lack.
attention_in_parts: Callable[..., tuple[Tensor, Tensor]] = (
    torch.ops.aten._scaled_dot_product_attention_math.default
)
# A context in which operations treat a tensor of our own class as a plain one.
DisableTorchFunctionSubclass = torch._C.DisableTorchFunctionSubclass
# The number of the backward pass that is running, -1 outside of one.
graph_task_id: Callable[[], int] = torch._C._current_graph_task_id
# Whether autocast is on for any device: one call where torch.is_autocast_enabled() needs one for each.
any_autocast_enabled: Callable[[], bool] = torch._C._is_any_autocast_enabled
# The active modes in this thread: a collector joins an active one.
function_modes = cast("Callable[[], list[TorchFunctionMode]]", _get_current_function_mode_stack)
# One launch for many tensors.
foreach_add = torch._foreach_add
foreach_add_ = torch._foreach_add_
foreach_addcmul_ = torch._foreach_addcmul_
foreach_copy_ = torch._foreach_copy_
foreach_mul = torch._foreach_mul
foreach_mul_ = torch._foreach_mul_
foreach_norm = torch._foreach_norm
foreach_sub = torch._foreach_sub
# A view with its own version counter, which autograd does not treat as a view.
unsafe_view = torch.ops.aten._unsafe_view.default
# A gradient where a tensor is above a threshold, and 0 elsewhere, even for NaN, in one launch.
threshold_backward = torch.ops.aten.threshold_backward.default
# Whether the current backward pass retains its graph, and the tensors saved in its nodes. Without this we
# keep what layers report as long as the graph lives.
keeps_graph: Callable[[], bool] = getattr(
    torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True
)


def transforms() -> list[int]:
    """The levels of the transforms of torch.func that are running."""
    return [each.level() for each in functorch.get_interpreter_stack() or ()]


@contextmanager
def outermost(count: int) -> Iterator[None]:
    """A context in which only the given number of outermost torch.func transforms run."""
    with ExitStack() as left:
        for _ in transforms()[count:]:
            left.enter_context(temporarily_pop_interpreter_stack())
        yield


@contextmanager
def lasting() -> Iterator[None]:
    """A context for making tensors that may be kept: they belong to no transform, and can be used in
    training."""
    with outermost(0), torch.inference_mode(False):
        yield


def lasts() -> bool:
    """Whether a tensor made here can be used by later calls: no transform and no inference mode is active."""
    return not (torch.is_inference_mode_enabled() or transforms())


_quiet = threading.Lock()
_stacking = [0]


@contextmanager
def no_fallback_warnings() -> Iterator[None]:
    """A context in which vmap does not warn about operations without a batching rule.

    torch's switch and Python's warning filters are global to the process: one thread must not restore them
    while another uses them. Here the last thread to leave restores them.
    """
    with _quiet:
        _stacking[0] += 1
        functorch._set_vmap_fallback_warning_enabled(False)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        with _quiet:
            _stacking[0] -= 1
            if not _stacking[0]:
                functorch._set_vmap_fallback_warning_enabled(True)  # type: ignore[attr-defined]


@cache
def read_forward_derivatives() -> None:
    """Import torch's forward derivatives in advance, without the warning of their scripts.

    Done once, because warning filters are global to the process.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`torch.jit.script` is deprecated")
        importlib.import_module("torch._decomp.decompositions_for_jvp")


def is_compiled(module: nn.Module) -> bool:
    """Whether a module is compiled by torch.compile, which would compile it again inside another mode."""
    return any("_orig_mod" in each._modules or each._compiled_call_impl for each in module.modules())


def fast_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """What ``Function.apply`` calls where no transform of torch.func runs; the rest takes as long again."""
    return cast("Callable[..., Any]", super(torch.autograd.Function, function).apply)  # type: ignore[misc]


def apply_of(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """``Function.apply`` without its search for default arguments, which takes longer than a small call."""
    fast = fast_apply(function)
    stacked: Callable[..., Any] = function.apply
    transformed = torch._C._are_functorch_transforms_active
    return lambda *args: stacked(*args) if transformed() else fast(*args)


def add_hook(tensor: Tensor, hook: Callable[[Tensor], None]) -> None:
    """``tensor.register_hook(hook)`` for the result of an operation, without the handle that removes it."""
    hooks: Any = tensor._backward_hooks
    if hooks is None:
        hooks = tensor._backward_hooks = OrderedDict()
        node = tensor.grad_fn
        if node is not None:
            node._register_hook_dict(tensor)
    hooks[hook] = hook  # torch's own keys are whole numbers


def hooks_of(tensor: Tensor) -> dict[Any, Callable[[Tensor], None]]:
    """The hooks on a tensor's gradient, to be changed without handles, which cost more than hooks."""
    hooks: Any = tensor._backward_hooks
    if hooks is None:  # torch makes the place for them
        tensor.register_hook(lambda _: None).remove()  # type: ignore[no-untyped-call]
        hooks = tensor._backward_hooks
    return hooks  # type: ignore[no-any-return]


def has_hooks(tensor: Tensor, own: int) -> bool:
    """Whether a leaf has hooks that autograd calls, beyond the given number of ours."""
    return len(tensor._backward_hooks or ()) > own or bool(tensor._post_accumulate_grad_hooks)


def dynamo_config(**options: Any) -> AbstractContextManager[None]:
    """Temporary options of torch.compile; dynamo is imported only if something is compiled."""
    return cast("AbstractContextManager[None]", torch._dynamo.config.patch(**options))


# FSDP2 does not expose the number of processes over which it averages gradients, cannot cancel a pending
# gather, and before torch 2.13 does not recover from a pass that ended in an error.


def _gathered(module: Any) -> tuple[Any, list[Any]]:
    """The FSDP2 state of a module, and the parameter groups that it gathers."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    return state, [each for each in ([state._fsdp_param_group] if groups is None else groups) if each]


def fsdp_shares(module: nn.Module) -> int:
    """The number of processes over which a module's gradients are averaged; 1 if it has no own parameters."""
    infos = [group.mesh_info for group in _gathered(module)[1]]
    sizes = ("shard_mesh_size", "replicate_mesh_size")
    return max((math.prod(getattr(info, size, 1) for size in sizes) for info in infos), default=1)


def fsdp_holds_gradients(module: Any) -> bool:
    """Whether a module holds unreduced gradients of earlier passes."""
    params = [param for group in _gathered(module)[1] for param in group.fsdp_params]
    held = (getattr(param, "_unsharded_param", None) for param in params)
    return any(param.unsharded_accumulated_grad is not None for param in params) or any(
        p is not None and p.grad is not None for p in held
    )


def fsdp_drop_gathered(module: Any, failed: bool) -> None:
    """Drop a module's gathered parameters, also pending ones, and after an error in any state."""
    state, groups = _gathered(module)
    if failed and state._is_root and hasattr(module, "reset_iter_state"):
        module.reset_iter_state()  # and of all modules below
    elif failed and not hasattr(module, "reset_iter_state"):
        state._state_ctx.iter_forward_root = None
        state._state_ctx.post_backward_final_callback_queued = False
        state._modules_to_run_forward.clear()
        state._comm_ctx.post_forward_order.clear()
        for each in (state, *groups):
            each._training_state = type(each._training_state).IDLE
    for group in groups:
        if group._all_gather_result is not None:
            group.wait_for_unshard()
        group._to_sharded()


def shard_place(tensor: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shape of this process's part of a DTensor, and where in the whole it begins."""
    from torch.distributed.tensor import _utils

    return _utils.compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)


def forget_tracer(graph: fx.Graph) -> None:
    """Let modules of an exported graph be read from pickles, which its own tracer cannot do."""
    graph._tracer_cls = None
