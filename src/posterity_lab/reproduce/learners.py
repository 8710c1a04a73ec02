"""Methods by name. On a GPU, none of their steps synchronises with the host."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from posterity import (
    ARD,
    BGD,
    BONG,
    IVON,
    KFAC,
    VOGN,
    ByName,
    Density,
    DiagonalGaussian,
    GroupHorseshoe,
    GroupNormalJeffreys,
    IsotropicGaussian,
    LogUniform,
    NoisyKFAC,
    ScaleMixture,
    VariationalOptimizer,
    cfg,
    ghs,
    gnj,
    mnf,
    names_of,
)
from posterity.variational import Family
from posterity_lab import baselines
from posterity_lab.baselines.point import Nll
from posterity_lab.baselines.sparse import kl_factor
from posterity_lab.continual import by_rule
from posterity_lab.methods import Method
from posterity_lab.reproduce.study import Values
from posterity_lab.streams import Mask

NAMES = {
    "bgd": "BGD",
    "bong": "BONG",
    "bbb": "BBB",
    "bbb-mixture": "BBB, mixture prior",
    "sgd": "SGD",
    "sgd-dropout": "SGD with dropout",
    "adam": "Adam",
    "si": "SI",
    "ewc": "EWC",
    "vcl": "VCL",
    "mc-dropout": "MC dropout",
    "ivon": "IVON",
    "vogn": "VOGN",
    "vogn-told": "VOGN, told of boundaries",
    "kfac": "K-FAC",
    "noisy-kfac": "Noisy K-FAC",
    "ffg": "FFG",
    "cfg": "CFG",
    "mnf": "MNF",
    "ffg-laplace": "FFG, Laplace prior",
    "fine-tuning": "fine-tuning",
    "joint": "joint training",
    "sparse-vd": "sparse VD",
    "sparse-ard": "ARD",
    "gnj": "GNJ",
    "ghs": "GHS",
    "magnitude": "pruning by magnitude",
    "l0": "L0 gates",
    "thompson": "BBB, Thompson sampling",
    "greedy": "greedy",
    "greedy-1": "greedy but for 1 %",
    "greedy-5": "greedy but for 5 %",
}
# Families of posteriors by the name of the method that learns them; MNF has a scale for each kernel, as in
# Bayesian incremental learning.
FAMILIES: Mapping[str, Family] = {"ffg": DiagonalGaussian, "cfg": cfg, "mnf": partial(mnf, conv="kernel")}
# Families and priors of methods that leave most weights, or most units, at zero.
SPARSE: Mapping[str, tuple[Family, Density]] = {
    "sparse-vd": (DiagonalGaussian, LogUniform()),
    "sparse-ard": (DiagonalGaussian, ARD()),
    "gnj": (gnj, GroupNormalJeffreys()),
    "ghs": (ghs, GroupHorseshoe()),
}
_OSAWA: dict[str, Any] = {"vogn": VOGN, "kfac": KFAC, "noisy-kfac": NoisyKFAC}
_RULES = ("bgd", "bong", "ivon", *_OSAWA)


def learner(
    method: str,
    config: Values,
    model: nn.Module,
    *,
    num_data: int,
    seed: int,
    mask: Mask | None = None,
    prior: ByName | None = None,
) -> Method:
    """The method of that name, about to train ``model``.

    Args:
        method: One of `NAMES`.
        config: Its hyper-parameters, among other settings.
        model: The model to train, on its device.
        num_data: Training examples (of one task).
        seed: Of the weight noise.
        mask: Which logits count in training.
        prior: Of a family's first task, in place of N(0, 1).

    Example:
        >>> method = learner("sgd", {"lr": 0.1, "momentum": 0.0}, nn.Linear(4, 2), num_data=8, seed=0)
        >>> method.posterior() is None
        True
    """

    given = partial(_given, config)
    if method in _RULES:
        parts = config.get("parts", 1) if method in _OSAWA else 1
        return by_rule(model, _rule(method, config, model, num_data, seed), mask, parts)
    if method == "vcl" or method.removesuffix("-laplace") in FAMILIES:
        return baselines.vcl(
            model,
            num_data=num_data,
            prior=prior,
            family=FAMILIES.get(method.removesuffix("-laplace"), DiagonalGaussian),
            mask=mask,
            seed=seed,
            **given("lr", "std_init", "kl_factor"),
        )
    match method:
        case "bbb" | "bbb-mixture":
            return backprop(method, config, model, num_data=num_data, seed=seed, mask=mask)
        case "sgd" | "sgd-dropout":
            return baselines.sgd(model, mask=mask, **given("lr", "momentum"))
        case "adam" | "mc-dropout" | "fine-tuning" | "joint":
            decay = config.get("weight_decay", 0.0)
            return baselines.adam(model, mask=mask, weight_decay=decay, **given("lr"))
        case "si":
            return baselines.si(model, mask=mask, **given("lr", "strength"))
        case "ewc":
            return baselines.ewc(model, mask=mask, **given("lr", "strength"))
        case "vogn-told":
            return baselines.vogn_told(
                model,
                num_data=num_data,
                betas=(config["momentum"], config["beta2"]),
                mask=mask,
                seed=seed,
                **given("lr", "prior_precision", "damping", "strength", "mc_samples"),
            )
        case "l0":
            assert isinstance(model, nn.Sequential)
            return baselines.l0(model, num_data=num_data, **given("lr", "strength"))
        case "magnitude":
            return baselines.magnitudes(model, steps=_steps(config, num_data), **given("lr", "keep"))
    if method not in SPARSE:
        raise ValueError(f"there is no method {method!r}")
    family, sparsity = SPARSE[method]
    schedule = _steps(config, num_data), config["kl_delay"], config["kl_rise"]
    return baselines.variational_dropout(
        model,
        family=family,
        prior=sparsity,
        num_data=num_data,
        factor=kl_factor(config["kl_factor"], *schedule),
        max_stds=config.get("max_stds"),
        seed=seed,
        **given("lr", "std_init"),
    )


def _given(config: Values, *keys: str) -> dict[str, Any]:
    return {key: config[key] for key in keys}


def _steps(config: Values, num_data: int) -> int:
    """Number of steps of a whole training."""
    steps: int = -(-num_data // config["batch_size"]) * config["epochs"]
    return steps


def _rule(method: str, config: Values, model: nn.Module, num_data: int, seed: int) -> VariationalOptimizer:
    """The optimiser of that name, with the paper's preset."""
    given = partial(_given, config)
    if method == "bgd":
        params = _output_apart(model, config["std_last"]) if "std_last" in config else model
        std = "std_init" if "std_init" in config else "std_scale"
        return BGD(params, preset="zeno2018", seed=seed, **given(std, "lr", "mc_samples"))
    if method == "bong":
        return BONG(model, seed=seed, **given("lr", "consolidate_after"))
    options: dict[str, Any] = {"num_data": num_data, "betas": (config["momentum"], config["beta2"])}
    if method == "ivon":
        options |= {"seed": seed, **given("lr", "prior_precision", "hess_init", "mc_samples")}
        return IVON(model, preset="shen2024", **options)
    options |= given("lr", "prior_precision", "damping")
    options |= {} if method == "kfac" else {"seed": seed, **given("augmentation", "mc_samples")}
    options |= {} if method == "vogn" else given("factors_every")
    fixed = names_of(model, nn.BatchNorm2d)
    made: VariationalOptimizer = _OSAWA[method](model, preset="osawa2019", deterministic=fixed, **options)
    return made


def backprop(
    method: str,
    config: Values,
    model: nn.Module,
    *,
    num_data: int,
    seed: int,
    mask: Mask | None = None,
    nll: Nll = nn.functional.cross_entropy,
) -> Method:
    """Bayes by Backprop with a Gaussian prior or, by the name ``bbb-mixture``, a mixture.

    Stds start at ``std_init`` or, if the config has an interval ``rho``, uniformly in it before the softplus.

    Example:
        >>> config = {"prior_std": 1.0, "lr": 0.1, "rho": [-3.5, -3.0], "optimizer": "sgd"}
        >>> method = backprop("bbb", config, nn.Linear(4, 2), num_data=8, seed=0)
        >>> std = method.posterior().std()["weight"]
        >>> bool((std > 0.029).all() and (std < 0.049).all())
        True
    """
    prior = (
        ScaleMixture(config["weight"], config["std_wide"], config["std_narrow"])
        if method == "bbb-mixture"
        else IsotropicGaussian(config["prior_std"])
    )
    family: Family = DiagonalGaussian if "rho" not in config else _spread(config["rho"], seed)
    known = {key: config[key] for key in ("std_init", "kl_factor", "optimizer") if key in config}
    return baselines.bbb(
        model,
        prior=prior,
        num_data=num_data,
        lr=config["lr"],
        family=family,
        nll=nll,
        mask=mask,
        seed=seed,
        **known,
    )


def _spread(ends: Sequence[float], seed: int) -> Family:
    """Diagonal Gaussians whose stds, before the softplus, are uniform in an interval."""
    low, high = ends
    generator = torch.Generator().manual_seed(seed)

    def family(p: nn.Parameter, std: float) -> DiagonalGaussian:
        rho = low + (high - low) * torch.rand(p.shape, generator=generator, dtype=p.dtype)
        return DiagonalGaussian(p, softplus(rho))

    return family


def _output_apart(model: nn.Module, std: float) -> list[dict[str, Any]]:
    """All parameters, with the output layer in a group with its own std.

    If BGD's initial stds are too large, divergence starts in the output layer.
    """
    layers: dict[str, list[tuple[str, nn.Parameter]]] = {}
    for name, p in model.named_parameters():
        layers.setdefault(name.rpartition(".")[0], []).append((name, p))
    *others, last = layers.values()
    return [{"params": [pair for each in others for pair in each]}, {"params": last, "std_init": std}]


def scale_lr(method: Method, factor: float) -> None:
    """Set the learning rate to ``factor`` times the initial one; captured steps read the new value.

    Example:
        >>> method = baselines.sgd(nn.Linear(4, 2), lr=0.5)
        >>> scale_lr(method, 0.1)
        >>> method.optimizer.param_groups[0]["lr"]
        0.05
    """
    for group in method.optimizer.param_groups:
        lr = factor * group.setdefault("initial_lr", float(group["lr"]))
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


@contextmanager
def arithmetic(device: str) -> Iterator[None]:
    """Use tf32 for matrix products if the device has it, and restore torch's generators."""
    before = torch.get_float32_matmul_precision()
    gpus = [torch.cuda.current_device()] if device == "cuda" else []
    with torch.random.fork_rng(devices=gpus):
        torch.set_float32_matmul_precision("high" if device == "cuda" else before)
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(before)


@final
class Autocast(nn.Module):
    """A net that trains in bfloat16 on a GPU; tests use full precision.

    Example:
        >>> Autocast(nn.Linear(4, 2))(torch.zeros(3, 4)).dtype
        torch.float32
    """

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        """The net's logits, in float32."""
        with torch.autocast("cuda", torch.bfloat16, enabled=x.is_cuda and self.training):
            out: Tensor = self.net(x)
        return out.float()
