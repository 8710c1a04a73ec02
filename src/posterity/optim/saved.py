"""Loading state from a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from posterity.arguments import described, is_dense, is_whole
from posterity.optim.adam import adam_init
from posterity.optim.checks import unfit
from posterity.optim.groups import check_all, is_unnamed
from posterity.optim.state import COUNTS, Group, State, state_dtype
from posterity.sharding import as_in, local

if TYPE_CHECKING:
    from posterity.optim.optimizer import VariationalOptimizer

# Entries of a group that hold names.
_NAMES = {"param_names", "blocks"}


def resume(
    opt: VariationalOptimizer, state_dict: dict[str, Any], load: Callable[[dict[str, Any]], None]
) -> None:
    """Load a matching state through torch's ``load_state_dict``, and copy its tensors without casts."""
    _refuse_foreign(state_dict)
    opt.settle()
    used: list[dict[str, Any]] = []

    def fits(_: Optimizer, given: dict[str, Any]) -> dict[str, Any]:
        given = _with_names(opt.param_groups, given)
        _refuse_mismatch(opt.param_groups, given, opt.defaults, opt.matrices)
        check_all(opt, given["param_groups"])
        _refuse_unfit(opt, given)
        used.append(given)
        return given

    # After the hooks of others, so that what they made of the state is what counts.
    handle = opt.register_load_state_dict_pre_hook(fits)
    try:
        load(state_dict)
    finally:
        handle.remove()
    with torch.inference_mode(False):  # torch would cast state to the parameters' dtype
        for p, state in _saved_states(opt.param_groups, used[0]):
            for key, value in state.items():
                own = value.detach().to("cpu" if key in COUNTS else p.device, copy=True)
                own = own if key in COUNTS else as_in(own, p)
                opt.state[p][key] = own.contiguous().clone() if own.is_inference() else own.contiguous()


def _saved_states(groups: Sequence[Group], state_dict: dict[str, Any]) -> Iterator[tuple[Tensor, State]]:
    """Each parameter with its saved state, in the order of the groups."""
    indices = [index for group in state_dict["param_groups"] for index in group["params"]]
    params = [p for group in groups for p in group["params"]]
    for index, p in zip(indices, params, strict=True):
        yield p, state_dict["state"].get(index, {})


def _with_names(groups: Sequence[Group], state_dict: dict[str, Any]) -> dict[str, Any]:
    """The state with an optimiser's parameter names, if its own are only numbers.

    Args:
        groups: The optimiser's groups.
        state_dict: State of an optimiser built from the same tensors in the same order, without names.
    """
    saved = state_dict["param_groups"]
    names = [name for group in saved for name in group.get("param_names", [])]
    if not all(map(is_unnamed, names)):
        return state_dict
    own = dict(zip(names, (name for group in groups for name in group["param_names"]), strict=False))

    def renamed(value: Any) -> Any:
        if isinstance(value, tuple | list):
            return type(value)(map(renamed, value))
        return own.get(value, value) if isinstance(value, str) else value

    named = [{**group, **{key: renamed(group[key]) for key in _NAMES & group.keys()}} for group in saved]
    return {**state_dict, "param_groups": named}


def _refuse_mismatch(
    groups: Sequence[Group], state_dict: dict[str, Any], defaults: Collection[str], matrices: Collection[str]
) -> None:
    """Raise, naming the first thing that differs, unless the state was saved for these parameters.

    Args:
        groups: Of the optimiser.
        state_dict: The state.
        defaults: Names of hyper-parameters.
        matrices: Keys of tensors that have no value for each weight.
    """
    _refuse_foreign(state_dict)
    saved = state_dict["param_groups"]
    if len(saved) != len(groups):
        raise ValueError(
            f"the state has {len(saved)} parameter groups and this optimiser {len(groups)}: build it with "
            "the same groups"
        )
    for mine, theirs in zip(groups, saved, strict=True):
        for key in defaults:
            if key in mine and key not in theirs:
                raise ValueError(
                    f"the state has no {key!r}: it was saved by another kind of optimiser, or by an older "
                    "version, in which case add it to the state's param_groups"
                )
        if mine["deterministic"] is not theirs.get("deterministic"):
            raise ValueError(f"{mine['param_names'][0]!r} is deterministic on one side only")
        names = theirs.get("param_names", [])
        if not len(names) == len(theirs["params"]) == len(mine["param_names"]):
            raise ValueError(
                f"a group has {len(names)} parameters in the state, {len(mine['param_names'])} here"
            )
        for here, there in zip(mine["param_names"], names, strict=True):
            if not isinstance(there, str) or here != there:
                raise ValueError(f"the state has {described(there)} where this optimiser has {here!r}")
        _refuse_blocks(theirs, matrices, state_dict["state"])
    names = [name for group in groups for name in group["param_names"]]
    for name, (p, state) in zip(names, _saved_states(groups, state_dict), strict=True):
        for key, value in state.items():
            if not (isinstance(value, Tensor) and is_dense(value)):
                raise TypeError(f"{key!r} of {name!r} must be a tensor in the state, not {described(value)}")
            if not (
                key in COUNTS or (value.dtype == torch.bool if key == "keep" else value.is_floating_point())
            ):
                raise TypeError(f"{key!r} of {name!r} is {described(value)} in the state")
            if key not in (*COUNTS, *matrices) and value.shape != p.shape:
                raise ValueError(
                    f"{name!r} has shape {tuple(value.shape)} in the state, {tuple(p.shape)} here"
                )


def _refuse_blocks(group: Group, matrices: Collection[str], states: Mapping[Any, State]) -> None:
    """Raise for blocks that are not a group's, or whose matrices are missing."""
    blocks, index = group.get("blocks", ()), dict(zip(group["param_names"], group["params"], strict=True))
    if not isinstance(blocks, tuple | list):
        raise ValueError(f"the state has a group whose 'blocks' are {described(blocks)}")
    for names in blocks:
        if not (
            isinstance(names, tuple | list)
            and names
            and all(isinstance(name, str) and name in index for name in names)
        ):
            raise ValueError(
                f"the state has a block {described(names)}, which does not name parameters of its group"
            )
        if missing := {*matrices} - states.get(index[names[0]], {}).keys():
            raise ValueError(
                f"the state of {names[0]!r} has no {min(missing)!r}: it is from another rule, or "
                "incomplete, as with torch.distributed.checkpoint, which only reads what a fresh "
                "optimiser has: use torch.save"
            )


def _refuse_foreign(state_dict: object) -> None:
    """Raise for a state that is not from a ``state_dict()``."""
    if not isinstance(state_dict, dict):
        raise TypeError(f"a state is what state_dict() returns, a dict, not a {type(state_dict).__name__}")
    for key, kind in (("param_groups", list), ("state", dict)):
        if not isinstance(state_dict.get(key), kind):
            raise ValueError(f"the state has no {key!r}: pass what state_dict() has returned")
    for group in state_dict["param_groups"]:
        if not (isinstance(group, dict) and isinstance(group.get("params"), list)):
            raise ValueError("the state has a group without 'params': pass what state_dict() has returned")
        if not isinstance(group.get("param_names", []), list):
            raise ValueError("the state has a group whose 'param_names' is not a list")
        steps = group.get("steps", 0)
        if not isinstance(steps, int) or steps < 0:
            raise ValueError(f"the state has a group whose 'steps' is {described(steps)}, not a count")
    # torch.distributed.checkpoint has names in the place of numbers.
    indices = (index for group in state_dict["param_groups"] for index in group["params"])
    known = {index for index in indices if is_whole(index) or isinstance(index, str)}
    for index, each in state_dict["state"].items():
        if not isinstance(each, dict) or index not in known:
            raise ValueError(
                f"the state has {described(each)} for {described(index)}, not the state of a parameter"
            )
    taken = max((group.get("steps", 0) for group in state_dict["param_groups"]), default=0)
    if taken and not any(state_dict["state"].values()):
        raise ValueError(
            f"the state is empty after {taken} steps: save the whole result of state_dict(), with torch.save"
        )


def _refuse_unfit(rule: VariationalOptimizer, state_dict: dict[str, Any]) -> None:
    """Raise, naming the parameter, for a state with which no step is possible.

    Args:
        rule: The optimiser, which defines its state.
        state_dict: State of its parameters and settings.
    """
    saved, groups = state_dict["param_groups"], rule.param_groups
    given = iter(list(_saved_states(groups, state_dict)))
    for group, theirs in zip(groups, saved, strict=True):
        wanted = (
            adam_init(torch.zeros(1)) if rule.by_adam(theirs) else rule.init(torch.zeros(1), None, theirs)
        )
        for name, (p, state) in zip(group["param_names"], given, strict=False):
            if not state:  # one that was added since the last step
                continue
            if missing := {"step", *wanted} - state.keys():
                raise ValueError(
                    f"the state of {name!r} has no {min(missing)!r}: it is from another rule, or incomplete"
                )
            for key in state.keys() & {*COUNTS}:
                if state[key].numel() != 1 or not 0 <= float(state[key]) < math.inf:
                    raise ValueError(f"{key!r} of {name!r} is not a count of updates in the state")
            parts = {key: local(value) for key, value in state.items()}
            values = {key: value for key, value in parts.items() if key not in (*COUNTS, "keep")}
            if bad := _unfit(rule, values, theirs, parts.get("keep"), state_dtype(p)):
                raise ValueError(f"the state of {name!r} has {bad}: load one from before it went wrong")
        for names in theirs.get("blocks", ()):
            _refuse_block(
                rule, names, dict(zip(group["param_names"], group["params"], strict=True)), state_dict
            )


def _refuse_block(
    rule: VariationalOptimizer, names: Sequence[str], params: Mapping[str, Tensor], state_dict: dict[str, Any]
) -> None:
    """Raise, naming the block, unless its matrices define a posterior."""
    states = {id(p): state for p, state in _saved_states(rule.param_groups, state_dict)}
    state = states[id(params[names[0]])]
    means = [torch.zeros_like(params[name], device="cpu") for name in names]
    values = {key: value.detach().cpu() for key, value in state.items()}
    try:
        rule.leaf([mean.to(values["rows"].dtype) for mean in means], values, None, rule.param_groups[0])
        if len({values[key].shape for key in rule.matrices}) > 2:
            raise ValueError("its matrices are not those of rows and of columns")
    except ValueError as error:
        raise ValueError(f"the state of the block {'+'.join(names)!r}: {error}") from error


def _unfit(
    rule: VariationalOptimizer, values: State, group: Group, keep: Tensor | None, dtype: torch.dtype
) -> str | None:
    """What is wrong with a parameter's state, if anything; pruned weights do not count."""
    single = {key: value for key, value in values.items() if key not in rule.matrices}
    if keep is not None:
        single = {key: value[keep.bool()] for key, value in single.items()}
    for key in values.keys() & {*rule.matrices}:
        if values[key].dim() != 2 or not bool(torch.isfinite(values[key]).all()):
            return f"{key!r} that is no matrix of finite numbers"
    return unfit(rule, single, group, dtype)
