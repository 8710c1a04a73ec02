"""Parameter groups in torch.optim's form, with parameter names and checked entries."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import count
from numbers import Real
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn

from posterity.arguments import described, is_dense, is_number, is_whole
from posterity.optim.adam import ADAM
from posterity.optim.entries import refuse_unknown
from posterity.optim.presets import overridden
from posterity.optim.state import Group
from posterity.posterior import Posterior
from posterity.sharding import is_sharded, local, refuse_shards

if TYPE_CHECKING:
    from posterity.optim.optimizer import VariationalOptimizer

Params: TypeAlias = nn.Module | Iterable[Tensor] | Iterable[tuple[str, Tensor]] | Iterable[Group]

# One number for the whole optimiser: a step has all groups at once.
_SHARED = ("mc_samples", "factors_every", "second_every", "batch_size")
# What comes before the number of a tensor without a name.
_UNNAMED = "param."
# What DistributedDataParallel and torch.compile put before the names of the module that they wrap.
_WRAPPERS = ("module.", "_orig_mod.")
# A bound on steps, in stds, that is as good as none, and with which single precision still reckons.
_FAR = 1e12
_SINGLE = torch.finfo(torch.float32).max


def named_groups(params: Params, numbered: int = 0) -> list[Group]:
    """A user's parameters as groups whose ``params`` are (name, tensor) pairs.

    Names come from the module or the named parameters, without prefixes of wrappers; tensors without a name
    are numbered, starting at ``numbered``.
    """
    if isinstance(params, nn.Module):
        if any(isinstance(each, Posterior) for each in params.modules()):
            raise TypeError(
                f"{type(params).__name__} has a posterior of its own, trained by any torch optimiser: "
                "use torch.optim.Adam, or pass the plain model that variational() was given"
            )
        owned = [(name, p) for name, p in params.named_parameters() if p.requires_grad]
        if not owned:
            raise ValueError(f"{type(params).__name__} has no parameter that requires a gradient")
        return [{"params": unwrapped(owned)}]
    if isinstance(params, Tensor):
        raise TypeError("pass a module, model.named_parameters() or groups, not a single tensor")
    if isinstance(params, str | bytes | dict) or not isinstance(params, Iterable):
        raise TypeError(f"pass a module, model.named_parameters() or groups, not {described(params)}")
    entries: list[Any] = list(params)
    if not entries:
        raise ValueError("the optimiser got an empty list of parameters")
    several = isinstance(entries[0], dict)
    if several and not all(isinstance(entry, dict) for entry in entries):
        raise TypeError(
            "groups and parameters were mixed: pass only groups, each a dict with 'params', or only "
            "parameters"
        )
    groups = [dict(entry) for entry in entries] if several else [{"params": entries}]
    unnamed = count(numbered)
    for group in groups:
        given = group.get("params")
        alone = isinstance(given, Tensor) or not isinstance(given, Iterable)
        members: list[Any] = [given] if alone else list(given or ())
        for member in members:
            _refuse_member(member)
        group["params"] = unwrapped(
            (f"{_UNNAMED}{next(unnamed)}", member) if isinstance(member, Tensor) else member
            for member in members
        )
    return groups


def is_unnamed(name: object) -> bool:
    """Whether a name is only the number of an unnamed tensor.

    Example:
        >>> is_unnamed("param.0"), is_unnamed("param.weight")
        (True, False)
    """
    return isinstance(name, str) and name.startswith(_UNNAMED) and name.removeprefix(_UNNAMED).isdecimal()


def _refuse_member(member: object) -> None:
    """Raise for a value that is neither a tensor nor a pair of a name and a tensor."""
    pair = isinstance(member, tuple | list) and len(member) == 2 and isinstance(member[0], str)
    tensor = member[1] if pair and isinstance(member, tuple | list) else member
    if not isinstance(tensor, Tensor):
        raise TypeError(
            f"a group's 'params' are tensors, or pairs of a name and a tensor, not {described(tensor)}"
        )
    if not is_dense(tensor) and not tensor.is_complex():
        raise TypeError(f"a parameter must be a dense tensor, not {described(tensor)}")


def unwrapped(named: Iterable[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """The same names without the prefix of a wrapper.

    Example:
        >>> import torch
        >>> unwrapped([("module._orig_mod.bias", torch.zeros(1))])[0][0]
        'bias'
    """
    pairs = list(named)
    for prefix in _WRAPPERS * 2:
        if pairs and all(name.startswith(prefix) for name, _ in pairs):
            pairs = [(name.removeprefix(prefix), p) for name, p in pairs]
    return pairs


def names_in(model: nn.Module | None, named: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """Each parameter's name, with its name in a model."""
    if model is None:
        return {name: name for name, _ in named}
    known, found = {p: name for name, p in unwrapped(model.named_parameters())}, {}
    for name, p in named:
        if p not in known:
            raise ValueError(f"{name!r} is not a parameter of the model: pass the model that was trained")
        found[name] = known[p]
    return found


def named_by(module: nn.Module, group: Group) -> Group:
    """A group whose tensors have the names of a module's parameters, if they are these."""
    given = group.get("params")
    members = [given] if isinstance(given, Tensor) else given
    if not isinstance(members, Iterable):
        return group
    known = {p: name for name, p in unwrapped(module.named_parameters())}
    members = list(members)
    return {
        **group,
        "params": [(known[p], p) if isinstance(p, Tensor) and p in known else p for p in members],
    }


def split_groups(groups: list[Group], deterministic: set[str], without_noise: Group | None) -> list[Group]:
    """Each group without its deterministic members, which get a separate group.

    Args:
        groups: With named members.
        deterministic: Names.
        without_noise: Entries of their group that differ from the group they come from; None if none of its
            entries apply.
    """
    split: list[Group] = []
    for group in groups:
        drawn = [(name, p) for name, p in group["params"] if name not in deterministic]
        fixed = [(name, p) for name, p in group["params"] if name in deterministic]
        split += [{**group, "params": drawn}] if drawn else []
        entries = {} if without_noise is None else {**group, **without_noise}
        split += [{**entries, "params": fixed, "deterministic": True}] if fixed else []
    return split


def completed(opt: VariationalOptimizer, given: Group) -> Group:
    """A user's group with all missing entries filled in; raises if the optimiser cannot use it."""
    if not isinstance(given, dict):
        raise TypeError(f"a group is a dict with its parameters under 'params', not {described(given)}")
    if not isinstance(given.get("deterministic", False), bool):
        raise TypeError(f"deterministic is True or False, not {described(given['deterministic'])}")
    defaults = opt.defaults
    if given.get("deterministic") and opt.deterministic_lr is not None:
        defaults = {**defaults, **ADAM, "lr": opt.deterministic_lr}
    elif given.get("deterministic"):
        defaults = {**defaults, **(opt.without_noise or {})}
    refuse_unknown(given, defaults.keys() | {"params", "param_names"}, type(opt).__name__)
    own = {key: value if key == "params" else plain(value) for key, value in given.items()}
    if opt.module is not None:
        own = named_by(opt.module, own)
    group = checked_group(overridden(defaults, own, opt.widths), opt.param_groups)
    for name, p in group["params"]:
        if is_sharded(p):
            refuse_shards(name, p, type(opt).__name__, opt.collects is not None, opt.mesh, opt.module)
    by_rule = not opt.by_adam(group)
    left_open = {key: 1.0 for key in opt.derived if by_rule and group[key] is None}
    check_all(opt, [*opt.param_groups, {**group, **left_open}])
    for key in left_open:  # one may follow from another
        group[key] = opt.derive(key, group, [p for _, p in group["params"]])
    return group


def check_all(opt: VariationalOptimizer, groups: Sequence[Group]) -> None:
    """Refuse values for which a rule, or all rules, are undefined."""
    for group in groups:
        check_common(group, groups[0])
        if not opt.by_adam(group):
            opt.check(group)


def checked_group(group: Group, held: list[Group]) -> Group:
    """A checked group with named members, which can be added to an optimiser; raises if it cannot."""
    names = {name for other in held for name in other["param_names"]}
    owned = {id(p) for other in held for p in other["params"]}
    group = named_groups([group], numbered=len(names))[0]
    for name, p in group["params"]:
        if name in names:
            raise ValueError(f"two parameters are named {name!r}: give each its own, as the model does")
        names.add(name)
        if not p.is_floating_point():
            raise TypeError(f"{name!r} is {p.dtype}: only real floating-point weights have a posterior")
        if id(p) in owned:
            raise ValueError(f"{name!r} is in the optimiser twice: give each parameter once")
        owned.add(id(p))
        if not bool(torch.isfinite(local(p)).all()):
            raise ValueError(f"{name!r} has values that are not finite: build or load the model again")
        if not p.is_leaf:
            raise ValueError(f"{name!r} is the result of an operation: pass the parameter itself")
    if not group["params"]:
        raise ValueError("a group has no parameters: leave it out")
    if held:
        group["steps"] = held[0]["steps"]
    return group


def check_common(group: Group, first: Group) -> None:
    """Refuse invalid values of entries that all rules share.

    Args:
        group: The group.
        first: The optimiser's first group.
    """
    at_least_zero(group, "lr")
    if "betas" in group:
        _check_betas(group["betas"])
    if not is_whole(group["seed"]):
        raise ValueError(f"seed must be a whole number, not {described(group['seed'])}")
    whole(group, "mc_samples")
    for key in ("max_step", "settle_after"):
        if key in group and not (0 < number(group, key) <= _FAR or group[key] == math.inf):
            raise ValueError(f"{key} must be greater than 0, not {described(group[key])}")
    above_zero(group, *(key for key in ("std_scale", "std_init") if group.get(key) is not None))
    for key in _SHARED:
        if group.get(key) is not None:
            whole(group, key)
        if group.get(key) != first.get(key):
            raise ValueError(f"{key} must be one number for the whole optimiser: set it outside the groups")


def plain(value: Any) -> Any:
    """Convert NumPy numbers to Python's, also in a tuple or list, so that a saved state can be loaded safely.

    The same for fractions, and integers that torch does not accept.

    Example:
        >>> import numpy as np
        >>> plain((np.float64(0.5), 2))
        (0.5, 2)
    """
    if type(value) in (tuple, list):
        return type(value)(map(plain, value))
    foreign = not isinstance(value, Tensor) and getattr(value, "shape", None) == () and hasattr(value, "item")
    found = value.item() if foreign else value
    huge = isinstance(found, int) and not is_whole(found) and not isinstance(found, bool)
    odd = isinstance(found, Real) and not isinstance(found, int | float)
    return float(found) if (huge or odd) and is_number(found) else found


def above_zero(group: Group, *keys: str) -> None:
    """Refuse a value that is not a finite number above 0."""
    for key in keys:
        if not 0 < number(group, key) < math.inf:
            raise ValueError(f"{key} must be finite and greater than 0, not {described(group[key])}")


def moderate(what: str, value: Any) -> None:
    """Refuse a factor too large or too small for single precision."""
    if not 1e-30 < float(value) < 1e30:
        raise ValueError(f"{what} must lie between 1e-30 and 1e30, not {float(value):g}")


def at_least_zero(group: Group, *keys: str) -> None:
    """Refuse a value that is not a finite number of at least 0."""
    for key in keys:
        if not 0 <= number(group, key) < math.inf:
            raise ValueError(f"{key} must be 0 or more, and finite, not {described(group[key])}")


def whole(group: Group, *keys: str) -> None:
    """Refuse a value that is not a whole number of at least 1."""
    for key in keys:
        value = group[key]
        if not is_whole(value) or value < 1:
            raise ValueError(f"{key} must be a whole number of at least 1, not {described(value)}")


def representable(precision: Tensor, rule: str) -> None:
    """Refuse stds for which a rule's state would not be positive and finite."""
    if not bool(((precision > 0) & torch.isfinite(precision)).all()):
        raise ValueError(
            f"{rule} needs a positive std for every weight, neither tiny nor huge: change std_init or "
            "std_scale"
        )


def number(group: Group, key: str) -> Any:
    """A value that is a number or a one-element tensor; raises otherwise."""
    value = group[key]
    if is_number(value) and _SINGLE < abs(value) < math.inf:
        raise ValueError(f"{key} must fit in single precision, not {value:g}")
    if is_number(value) or (is_dense(value) and value.numel() == 1):
        return value
    raise ValueError(f"{key} must be a number, not {described(value)}")


def _check_betas(betas: Any) -> None:
    if not isinstance(betas, tuple | list) or len(betas) != 2 or not all(map(is_number, betas)):
        raise ValueError(f"betas must be two numbers, such as (0.9, 0.999), not {described(betas)}")
    if not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas must lie in [0, 1), not {betas}")
