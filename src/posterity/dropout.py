"""Dropout as inference: masks in prediction, and the prior's KL term in training.

Gal and Ghahramani: "Dropout as a Bayesian Approximation", ICML 2016. A layer that follows a dropout layer of
drop rate p sees inputs x · m / (1 − p), m ~ Bernoulli(1 − p), as torch scales them. This is the same layer
with random weights: for a weight w and the mask m of its input,

    q(w̃):  w̃ = w · m / (1 − p),  so  p δ(0) + (1 − p) δ(w / (1 − p)),  of mean w

Masks differ from example to example, so this family has no weight samples ``[S, *shape]``, only predictive
samples ``[S, B, ...]``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeGuard, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from posterity import noise
from posterity.arguments import NUMBER, described, is_number, takes
from posterity.posterior.base import Networks, Run

_SCALING = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
_LAYERS = (*_SCALING, nn.AlphaDropout, nn.FeatureAlphaDropout)
# What may stand between a dropout layer and the one that it scales: a factor of 0 or more passes through.
_TRANSPARENT = (nn.Flatten, nn.Unflatten, nn.Identity, nn.ReLU)
_WEIGHTED = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


@final
class MCDropout:
    """Replaces a posterior in :func:`~posterity.predict`: S passes, each with its own dropout masks.

    Only the dropout *modules* drop (``nn.Dropout``, ``Dropout1d`` to ``3d``, ``AlphaDropout``,
    ``FeatureAlphaDropout``); everything else, including BatchNorm, is in evaluation mode.
    ``F.dropout(x, p, self.training)`` in a module's own ``forward`` is off there, as is the ``dropout=`` of
    ``nn.LSTM`` and of attention weights: use modules instead.

    Example:
        >>> from posterity import predict
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))
        >>> p = predict(net, MCDropout(), torch.randn(5, 4), samples=20)
        >>> p.samples.shape, p.mutual_information.shape
        (torch.Size([20, 5, 3]), torch.Size([5]))
    """

    def check(self, model: nn.Module) -> None:
        """Raise unless the model has a layer that drops something."""
        if not _dropping(model):
            raise ValueError(
                f"{type(model).__name__} has no dropout layer with p above 0 to draw masks for: add "
                "nn.Dropout modules (F.dropout is not seen), or pass a posterior"
            )

    def networks(self, model: nn.Module, samples: range | None, seed: int) -> Networks:
        """A model in evaluation mode under masks of the given numbers; without numbers, nothing dropped.

        Masks are a pure function of (seed, batch, sample) and the batch's shape, on one device. They have
        their own generators, since torch's are shared with other threads. Dropout layers are in training mode
        while the model runs, so nothing else may use it, as with the replica that ``predict`` passes.
        """

        if samples is None:
            return lambda run, step: run(model, {})

        def masked(run: Run, step: int) -> Tensor:
            drawn: list[Tensor] = []
            with _dropping_layers(model) as ran:
                for sample in samples:
                    key = noise.address(seed, step, sample, "dropout", domain=noise.Domain.DROPOUT)
                    with _Seeded(key):
                        drawn.append(run(model, {}))
            if not ran:
                raise RuntimeError(
                    "no dropout layer of the model ran, so all passes are the same: let its forward() call "
                    "them"
                )
            return torch.cat(drawn)

        return masked


@takes(prior_precision=NUMBER)
def dropout_kl(layers: nn.Sequential | Mapping[nn.Module, float], *, prior_precision: float = 1.0) -> Tensor:
    """KL(q ‖ N(0, 1/prior_precision)) of weights under dropout, up to a constant: an L2 term.

    For one weight w behind a drop rate p, with λ the prior's precision,

        E[−log prior] = ½ λ E[w̃²] + const = ½ λ (1 − p) (w / (1 − p))² + const = λ w² / (2 (1 − p)) + const

    and the entropy of the mask, the rest of the KL, does not depend on w. Weights that no dropout layer
    scales (biases, which are added later, and layers without dropout before them) are point estimates: they
    are not counted, unless given a rate of 0. Before a convolution, elementwise masks give different weights
    at each position; the term is the same for each.

    Args:
        layers: Drop rate p by the module whose ``weight`` it scales, the one *after* the dropout layer. In an
            ``nn.Sequential``, nested or not, they are found automatically; ambiguous cases are refused.
        prior_precision: Precision of the prior of every weight.

    Example:
        >>> from posterity import elbo
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))
        >>> bool(dropout_kl(net) == dropout_kl({net[3]: 0.5}))
        True
        >>> loss = elbo(net(torch.randn(5, 4)).square().mean(), dropout_kl(net), num_data=5)
    """
    if not 0.0 < prior_precision < float("inf"):
        raise ValueError(f"prior_precision must be finite and greater than 0, not {prior_precision}")
    if not (isinstance(layers, Mapping) or _in_order(layers)):
        raise TypeError(
            f"cannot tell which weights dropout scales in a {type(layers).__name__}, which is not a plain "
            "nn.Sequential: pass {layer: drop rate}"
        )
    rates = dict(layers) if isinstance(layers, Mapping) else _found(layers)
    if not rates:
        raise ValueError("no layer follows a dropout layer: pass {layer: drop rate}")
    terms = []
    for layer, p in rates.items():
        weight = getattr(layer, "weight", None)
        if not isinstance(weight, Tensor):
            raise TypeError(
                f"a {type(layer).__name__} has no weight: pass the layer that follows the dropout"
            )
        if not (is_number(p) and 0.0 <= p < 1.0):
            raise ValueError(f"a drop rate must be at least 0 and less than 1, not {described(p)}")
        terms.append(weight.square().sum() * (0.5 * prior_precision / (1.0 - p)))
    return torch.stack([term.to(terms[0].device) for term in terms]).sum()


def _found(model: nn.Sequential) -> dict[nn.Module, float]:
    """Drop rate by the layer that follows it; ambiguous cases are refused."""
    rates: dict[nn.Module, float] = {}
    waiting: float | None = None
    for name, module in _flat(model):
        if waiting is None and isinstance(module, _SCALING):
            waiting = module.p
        elif waiting is not None and isinstance(module, _WEIGHTED) and module not in rates:
            rates[module], waiting = waiting, None
        elif _dropping(module) or (waiting is not None and not isinstance(module, _TRANSPARENT)):
            raise ValueError(
                f"cannot tell which weights are scaled by the dropout before or in {name!r}, a "
                f"{type(module).__name__}: pass {{layer: drop rate}}"
            )
    if waiting is not None:
        raise ValueError("no layer follows the last dropout layer: pass {layer: drop rate}")
    return rates


def _flat(model: nn.Sequential, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    # named_children() would give a module that is used twice only once.
    for name, module in model._modules.items():
        if _in_order(module):
            yield from _flat(module, f"{prefix}{name}.")
        elif module is not None:
            yield prefix + name, module


def _in_order(module: nn.Module | None) -> TypeGuard[nn.Sequential]:
    """Whether the module only runs its submodules one after another."""
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


def _dropping(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, _LAYERS) and module.p > 0]


@contextmanager
def _dropping_layers(model: nn.Module) -> Iterator[set[nn.Module]]:
    """Put dropout layers in training mode; yields the set to which each layer is added when it runs."""
    layers = _dropping(model)
    before = [layer.training for layer in layers]
    ran: set[nn.Module] = set()
    hooks = [layer.register_forward_hook(lambda layer, *_: ran.add(layer)) for layer in layers]
    try:
        for layer in layers:
            layer.training = True
        yield ran
    finally:
        for layer, hook, training in zip(layers, hooks, before, strict=True):
            layer.training = training
            hook.remove()


@final
class _Seeded(TorchFunctionMode):
    """A context in which dropout masks and other random numbers of this thread come from one seed.

    As a torch function mode it also disables the fused path of ``nn.TransformerEncoderLayer``, which would
    skip dropout.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _MASKED:
            return self._dropped(func, *args, **kwargs)
        if func in _FILLED:
            fresh = torch.empty_like(*args, **kwargs)
            return _FILLED[func](fresh, generator=self._generator(fresh.device))
        if func in _RANDOM and kwargs.get("generator") is None:
            given = next((each.device for each in args if isinstance(each, Tensor)), kwargs.get("device"))
            kwargs = {**kwargs, "generator": self._generator(given or torch.get_default_device())}
        return func(*args, **kwargs)

    def _generator(self, device: torch.device | str) -> torch.Generator:
        device = torch.device(device)
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self._seed)
        return self._generators[device]

    def _dropped(
        self,
        func: Callable[..., Tensor],
        input: Tensor,
        p: float = 0.5,
        training: bool | None = None,
        inplace: bool = False,
    ) -> Tensor:
        """The result of torch's dropout function, which has no generator argument."""
        feature_dims, alpha, default = _MASKED[func]
        func(input, p, False, inplace)  # its own checks
        if p == 0.0 or not (default if training is None else training):
            return input
        shape = input.shape
        if feature_dims is not None:  # a feature drops as a whole, of one example [C, …] or of several
            lead = 2 if feature_dims in (0, input.dim() - 2) else 1
            shape = shape[:lead] + (1,) * (input.dim() - lead)
        mask = torch.empty(shape, dtype=input.dtype, device=input.device)
        mask.bernoulli_(1.0 - p, generator=self._generator(input.device))
        if not alpha:
            mask = mask / (1.0 - p) if p < 1.0 else mask
            return input.mul_(mask) if inplace else input * mask
        low = 1.7580993408473766  # minus the limit of SELU; what stays has its mean and variance
        scale = 0.0 if p == 1.0 else ((low**2 * p + 1.0) * (1.0 - p)) ** -0.5
        shift = (mask - 1.0) * (low * scale) + low * scale * p
        return input.mul_(mask * scale).add_(shift) if inplace else input * (mask * scale) + shift


# By function of torch: dimensions of a feature that drops as a whole, whether mean and variance are kept, as
# self-normalising nets need, and whether it drops by default.
_MASKED: dict[Any, tuple[int | None, bool, bool]] = {
    F.dropout: (None, False, True),
    F.dropout1d: (1, False, True),
    F.dropout2d: (0, False, True),  # as in torch, [C, H, W] is N features of length W
    F.dropout3d: (3, False, True),
    F.alpha_dropout: (None, True, False),
    F.feature_alpha_dropout: (0, True, False),
}
_FILLED: dict[Any, Callable[..., Tensor]] = {
    torch.rand_like: Tensor.uniform_,
    torch.randn_like: Tensor.normal_,
}
# These take a generator.
_RANDOM = {torch.rand, torch.randn, torch.randint, torch.randperm, torch.normal}
_RANDOM |= {torch.bernoulli, Tensor.bernoulli, torch.multinomial, Tensor.multinomial, Tensor.random_}
_RANDOM |= {Tensor.bernoulli_, Tensor.uniform_, Tensor.normal_, Tensor.exponential_}
