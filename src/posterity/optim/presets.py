"""What a rule takes for settings that a user does not give: one table, ``presets.toml``, for all of them."""

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
    """A rule's settings: those that were given, else the preset's, else the default's, else None.

    Args:
        rule: A name in the table.
        preset: ``"default"``, or another of the rule's.
        given: What a user has given, None for what was left out.
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
        raise ValueError(f"{' and '.join(several)} say how wide the posterior is at the start: give one")
    return overridden(found, own, widths)


def overridden(settings: Group, given: Group, widths: Sequence[str]) -> Group:
    """Settings with some that a user gives in their place.

    Args:
        settings: As they are.
        given: The user's.
        widths: Those that say how wide a posterior is at the start; each decides over those before it, so a
            user's sets aside what comes after it.

    Example:
        >>> overridden({"std_scale": 0.1, "std_init": 0.2}, {"std_scale": 0.3}, ("std_scale", "std_init"))
        {'std_scale': 0.3, 'std_init': None}
    """
    own = [number for number, key in enumerate(widths) if given.get(key) is not None]
    set_aside = widths[own[-1] + 1 :] if own else ()
    return {**settings, **dict.fromkeys(set_aside), **given}


def far_below(rule: str, lr: float) -> str:
    """What to do about a learning rate that is far below those of all presets whose unit is the default's.

    Example:
        >>> far_below("IVON", 0.001)
        'raise lr: it is 0.001, and the default is 1'
        >>> far_below("IVON", 0.2)
        ''
    """
    presets = TABLE.get(rule, {}).values()
    rates = [each["lr"] for each in presets if "lr" in each and "lr_unit" not in each]
    if not rates or lr >= 0.03 * min(rates):
        return ""
    return f"raise lr: it is {lr:g}, and the default is {rates[0]:g}"


def too_narrow(rule: str, group: Group, params: Collection[Tensor]) -> str:
    """What to do about stds that begin far below those of all presets: steps are bounded by stds.

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
    """How many numbers a weight's products are summed over; of a bias or a norm's scale, its own length.

    What a bias adds to is as large as a sum of that many products in a net of even width.
    """
    return p.shape[1:].numel() if p.dim() > 1 else p.numel()


def start_std(group: Group, params: Collection[Tensor]) -> float:
    """One std for the weights of a group at the start: ``std_init``, or ``std_scale / sqrt(fan_in)``.

    The fan-in is the weights' own on average, so that narrow layers have less noise than they would alone.
    """
    if group["std_init"] is not None:
        return float(group["std_init"])
    matrices = [p for p in params if p.dim() > 1] or params  # others are few
    weights = sum(p.numel() for p in matrices)
    mean = sum(p.numel() * fan_in(p) for p in matrices) / max(weights, 1)
    return float(group["std_scale"] / max(mean, 1.0) ** 0.5)


def above_prior(std: float, ess: float, decay: float) -> float:
    """What to add to the prior's part of a curvature so that ``1 / sqrt(ess · (it + decay))`` is a std."""
    if not ess * std * std > 1e-30:
        raise ValueError(
            f"a std of {std:g} at the start is too small for a precision: raise std_init or std_scale"
        )
    found = 1.0 / (ess * std * std) - decay
    if not found > 0:
        raise ValueError(
            f"a std of {std:g} at the start is wider than the prior's, {(ess * decay) ** -0.5:g}: lower "
            "std_init, std_scale or prior_precision"
        )
    return found
