"""The configuration of a training run: one flat record, from a TOML file, from flags, or from both."""

from __future__ import annotations

import dataclasses
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from posterity_lab.hints import hint

_DERIVED = ("std_init", "hess_init", "damping")  # by the library, where they are not given


def _rule(name: str, *keys: str) -> dict[str, float | None]:
    """Hyper-parameters of one of the library's rules, with the values that it takes by itself."""
    package = find_spec("posterity")  # which is not imported: help need not wait for torch
    assert package is not None
    assert package.origin is not None
    table = tomllib.loads((Path(package.origin).parent / "presets.toml").read_text(encoding="utf-8"))
    values = table[name]["default"]
    values |= {"samples": values.get("mc_samples", 1)}
    values |= dict(zip(("momentum", "beta2"), values.get("betas", ()), strict=False))
    return {key: values.get(key) if key in _DERIVED else values[key] for key in keys}


_COMMON = ("samples", "lr", "std_scale", "std_init", "max_step", "temperature")
_BACKPROP = {"lr": 1e-3, "prior_std": 1.0, "kl_factor": 0.01}
_NEWTON = (*_COMMON, "momentum", "beta2", "hess_init", "prior_precision")
# The hyper-parameters that each method has; None for what follows from others.
DEFAULTS: dict[str, dict[str, float | None]] = {
    "bgd": _rule("BGD", *_COMMON),
    "ivon": _rule("IVON", *_NEWTON),
    "vogn": _rule("VOGN", *_NEWTON, "damping"),
    "bbb": {**_rule("variational", "samples", "std_scale", "std_init"), **_BACKPROP},
    "sgd": {"lr": 0.1, "momentum": 0.9},
    "adam": {"lr": 1e-3},
}
METHODS = tuple(DEFAULTS)


@dataclass(frozen=True)
class _Range:
    """Which numbers a key takes, and how to say so."""

    kind: type[int] | type[float]
    lowest: float
    below: float = math.inf
    open: bool = False
    unbounded: bool = False

    def holds(self, value: float) -> bool:
        """Whether the value lies in the range; NaN never does, infinity where there is no bound at all."""
        high_enough = value > self.lowest if self.open else value >= self.lowest
        return high_enough and (value < self.below or self.unbounded)

    def __str__(self) -> str:
        if self.kind is int and self.below < math.inf:
            return f"a whole number from {self.lowest:g} to {int(self.below) - 1}"
        if self.below < math.inf:
            return f"a number in [{self.lowest:g}, {self.below:g})"
        what = "a whole number" if self.kind is int else "a number" if self.unbounded else "a finite number"
        return f"{what} {'greater than' if self.open else 'of at least'} {self.lowest:g}"


_RANGES = {
    "epochs": _Range(int, 1),
    "batch_size": _Range(int, 1),
    "seed": _Range(int, 0, below=2**63),  # what a generator and an int64 tensor both take
    "eval_samples": _Range(int, 1),
    "validation": _Range(int, 0),
    "samples": _Range(int, 1),
    "lr": _Range(float, 0, open=True),
    "momentum": _Range(float, 0, below=1),
    "beta2": _Range(float, 0, below=1),
    "std_scale": _Range(float, 0, open=True),
    "std_init": _Range(float, 0, open=True),
    "max_step": _Range(float, 0, open=True, unbounded=True),
    "hess_init": _Range(float, 0),
    "damping": _Range(float, 0),
    "prior_precision": _Range(float, 0, open=True),
    "prior_std": _Range(float, 0, open=True),
    "temperature": _Range(float, 0, open=True),
    "kl_factor": _Range(float, 0),
}


@dataclass(frozen=True)
class Config:
    """Everything that decides a run's result; checked when built.

    A hyper-parameter that is not given takes its method's value from `DEFAULTS`, so a finished record says
    what was run. One that the method does not have is refused, and is None in the record.

    Attributes:
        method: How the posterior is learned: bgd, ivon, vogn, bbb; sgd and adam learn weights alone.
        net: A name that `posterity_lab.nets.build` takes.
        data: A name that `posterity_lab.data.load` takes.
        epochs: Passes over the training images.
        batch_size: Images per step.
        seed: Of initial weights, order of the data and weight noise.
        device: Where to train, as torch names it.
        eval_samples: Sampled networks whose probabilities are averaged in evaluation.
        validation: Training images held out; the metrics of each epoch are then taken on them.
        samples: Weight samples per training step.
        lr: Learning rate.
        momentum: Of SGD, or of IVON's and VOGN's gradient (their β1).
        beta2: Averaging of IVON's Hessian and VOGN's curvature.
        std_scale: Std of a weight at the start, times the root of its fan-in.
        std_init: Std of every weight at the start, instead.
        max_step: The furthest that a weight may move in a step, in its stds.
        hess_init: IVON's Hessian, or VOGN's curvature, at the start.
        damping: Added to VOGN's curvature, in steps and in the posterior.
        prior_precision: Precision of IVON's and VOGN's prior.
        prior_std: Std of the Gaussian prior of Bayes by Backprop.
        temperature: Divides the loss in BGD, IVON and VOGN, so that data counts 1/temperature times; 1 is
            Bayes.
        kl_factor: Scale of the KL of Bayes by Backprop; 1 is Bayes.

    Example:
        >>> Config(method="bbb").std_scale, Config(method="bbb").temperature
        (0.02, None)
    """

    method: str = "bgd"
    net: str = "mlp-400-400"
    data: str = "mnist"
    epochs: int = 5
    batch_size: int = 128
    seed: int = 0
    device: str = "cpu"
    eval_samples: int = 10
    validation: int = 0
    samples: int | None = None
    lr: float | None = None
    momentum: float | None = None
    beta2: float | None = None
    std_scale: float | None = None
    std_init: float | None = None
    max_step: float | None = None
    hess_init: float | None = None
    damping: float | None = None
    prior_precision: float | None = None
    prior_std: float | None = None
    temperature: float | None = None
    kl_factor: float | None = None

    def __post_init__(self) -> None:
        for key in ("method", "net", "data", "device"):
            if not isinstance(value := getattr(self, key), str):
                raise ValueError(f"{key} must be a text, not {value!r}")
        if self.method not in DEFAULTS:
            raise ValueError(f"there is no method {self.method!r}{hint(self.method, METHODS)}")
        for key in _HYPER:
            if key not in DEFAULTS[self.method]:
                if getattr(self, key) is not None:
                    raise ValueError(f"{key} has no meaning for {self.method}: leave it out")
            elif getattr(self, key) is None:
                object.__setattr__(self, key, DEFAULTS[self.method][key])
        for key, allowed in _RANGES.items():
            value = getattr(self, key)
            if value is None:
                continue
            # A bool is an int to Python, and a TOML author writes 1 for 1.0.
            kinds = (int,) if allowed.kind is int else (int, float)
            if isinstance(value, bool) or not isinstance(value, kinds) or not allowed.holds(value):
                raise ValueError(f"{key} must be {allowed}, not {value!r}")
            object.__setattr__(self, key, allowed.kind(value))

    @property
    def settings(self) -> dict[str, Any]:
        """The hyper-parameters that the method has; None for what the library derives from others.

        Example:
            >>> Config(method="sgd", lr=0.5).settings
            {'lr': 0.5, 'momentum': 0.9}
        """
        return {key: getattr(self, key) for key in DEFAULTS[self.method]}

    @classmethod
    def from_sources(cls, file: Path | None, flags: Mapping[str, Any], base: Config | None = None) -> Config:
        """Build a record from a TOML file and flags; flags win.

        Args:
            file: TOML with keys of this record at its top level.
            flags: Keys of this record; None means that the flag was not given.
            base: Values of the keys that neither gives, such as those of a run to resume.

        Example:
            >>> Config.from_sources(None, {"lr": 0.5, "seed": None}).lr
            0.5
            >>> Config.from_sources(None, {"epoch": 3})
            Traceback (most recent call last):
                ...
            ValueError: there is no key 'epoch', did you mean 'epochs'?
        """
        given = {} if file is None else _read(file)
        given |= {key: value for key, value in flags.items() if value is not None}
        for key in given:
            if key not in _KEYS:
                where = "" if file is None or key in flags else f" ({file})"
                raise ValueError(f"there is no key {key!r}{hint(key, _KEYS)}{where}")
        kept = {} if base is None else dataclasses.asdict(base)
        if base is not None and given.get("method", base.method) != base.method:
            kept = {key: value for key, value in kept.items() if key not in _HYPER}
        return cls(**{**kept, **given})


_KEYS = tuple(field.name for field in dataclasses.fields(Config))
_HYPER = _KEYS[_KEYS.index("samples") :]


def _read(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no config file {file}: choose another --config") from None
    except RecursionError:
        raise ValueError(f"{file} is nested too deeply: write keys at its top level") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is not valid TOML: {error}") from error
    except OSError as error:
        raise OSError(f"{file} cannot be read ({error.strerror}): choose another --config") from error
