"""Default settings and presets of all rules, from one table, ``presets.toml``."""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from torch import Tensor

from posterity.arguments import described
from posterity.optim.state import Group

TABLE: Mapping[str, Mapping[str, Group]] = tomllib.loads(
    (Path(__file__).parents[1] / "presets.toml").read_text(encoding="utf-8")
)


def settings(rule: str, preset: str, given: Group, widths: Sequence[str]) -> Group:
    """A rule's settings: the user's, else the preset's, else the default's, else None.

    Args:
        rule: A name in the table.
        preset: ``"default"``, or another preset of the rule.
        given: The user's settings, None where left out.
        widths: As for :func:`overridden`.

    Example:
        >>> found = settings("VOGN", "osawa2019", {"lr": 0.1, "std_init": None}, ("std_init", "damping"))
        >>> found["lr"], found["damping"], found["std_init"]
        (0.1, 0.001, None)
    """
    presets = TABLE[rule]
    if not isinstance(preset, str) or preset not in presets:
        raise ValueError(
            f"there is no preset {described(preset)}: choose one of {', '.join(map(repr, presets))}"
        )
    found = {**dict.fromkeys(given), **presets["default"], **presets[preset]}
    if "betas" in found:
        found["betas"] = tuple(found["betas"])
    own = {key: value for key, value in given.items() if value is not None}
    if len(several := [key for key in widths if key in own]) > 1:
        raise ValueError(f"{' and '.join(several)} set the std at the start: give only one of them")
    return overridden(found, own, widths)


def overridden(settings: Group, given: Group, widths: Sequence[str]) -> Group:
    """Settings, overridden by some of the user's.

    Args:
        settings: The settings.
        given: The user's.
        widths: Names of those that set the std at the start; each overrides those before it, so one from the
            user removes those after it.

    Example:
        >>> overridden({"std_scale": 0.1, "std_init": 0.2}, {"std_scale": 0.3}, ("std_scale", "std_init"))
        {'std_scale': 0.3, 'std_init': None}
    """
    own = [number for number, key in enumerate(widths) if given.get(key) is not None]
    set_aside = widths[own[-1] + 1 :] if own else ()
    return {**settings, **dict.fromkeys(set_aside), **given}


def far_below(rule: str, lr: float) -> str:
    """Advice for a learning rate far below those of all presets with the default's unit.

    Example:
        >>> far_below("IVON", 0.001)
        'raise lr: it is 0.001, and the default is 3'
        >>> far_below("IVON", 0.2)
        ''
    """
    presets = TABLE.get(rule, {}).values()
    rates = [each["lr"] for each in presets if "lr" in each and "lr_unit" not in each]
    if not rates or lr >= 0.03 * min(rates):
        return ""
    return f"raise lr: it is {lr:g}, and the default is {rates[0]:g}"


def too_narrow(rule: str, group: Group, params: Collection[Tensor]) -> str:
    """Advice on stds that start far below those of all presets, which keep steps short; else empty.

    Example:
        >>> import torch
        >>> weight = torch.zeros(3, 100)
        >>> too_narrow("IVON", {"std_scale": 0.001, "std_init": None}, [weight])
        'raise std_scale: stds begin at 0.0001, and by default at 0.005'
        >>> too_narrow("IVON", {"std_scale": 0.01, "std_init": None}, [weight])
        ''
    """
    scales = [each["std_scale"] for each in TABLE.get(rule, {}).values() if "std_scale" in each]
    given = next((key for key in ("std_init", "std_scale") if group.get(key) is not None), None)
    if not scales or given is None:
        return ""
    own, usual = start_std(group, params), start_std({"std_scale": min(scales), "std_init": None}, params)
    if own >= 0.1 * usual:
        return ""
    return f"raise {given}: stds begin at {own:.2g}, and by default at {usual:.2g}"


def fan_in(p: Tensor) -> int:
    """The number of products summed with a weight's; for a bias or a norm's scale, its own length.

    In a net of even width, a bias is added to a sum of that many products.
    """
    return p.shape[1:].numel() if p.dim() > 1 else p.numel()


def start_std(group: Group, params: Collection[Tensor]) -> float:
    """One initial std for the weights of a group: ``std_init``, or ``std_scale / sqrt(fan_in)``.

    The fan-in is the average over weights, so narrow layers have less noise than by their own fan-in.
    """
    if group["std_init"] is not None:
        return float(group["std_init"])
    matrices = [p for p in params if p.dim() > 1] or params  # others are few
    weights = sum(p.numel() for p in matrices)
    mean = sum(p.numel() * fan_in(p) for p in matrices) / max(weights, 1)
    return float(group["std_scale"] / max(mean, 1.0) ** 0.5)


def above_prior(std: float, ess: float, decay: float) -> float:
    """The curvature to add to the prior's so that ``1 / sqrt(ess · (it + decay))`` is a std."""
    if not ess * std * std > 1e-30:
        raise ValueError(f"a std of {std:g} at the start is too small to invert: raise std_init or std_scale")
    found = 1.0 / (ess * std * std) - decay
    if not found > 0:
        raise ValueError(
            f"a std of {std:g} at the start is wider than the prior's, {(ess * decay) ** -0.5:g}: lower "
            "std_init, std_scale or prior_precision"
        )
    return found
