"""Mean and variance of every output of a linearised model, without sampling."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast, final

import torch
from torch import Tensor, nn
from torch.func import jacrev, vjp, vmap
from torch.nn import functional as F

from posterity import buffers
from posterity.inputs import Inputs, Pick, arguments, batches, mapped, moved, random_numbers_kept
from posterity.layers import Intercept
from posterity.mc import one_pass
from posterity.names import inner
from posterity.posterior import Factorised, Leaf
from posterity.predict import check_call
from posterity.replica import evaluating
from posterity.torch_private import no_fallback_warnings
from posterity.variational import Variational


@final
@dataclass(frozen=True)
class Moments:
    """Moments of the outputs of the linearised model under a Gaussian posterior N(μ, Σ).

    Attributes:
        mean: f(x, μ), ``[B, C]``; ``[B]`` for a model with one number for each input.
        variance: Variance of each output, the diagonal of J(x) Σ J(x)ᵀ, in the shape of the mean; for
            regression add the noise's.

    Example:
        >>> Moments(torch.tensor([[2.0, 0.0]]), torch.tensor([[0.0, 0.0]])).probs
        tensor([[0.8808, 0.1192]])
        >>> Moments(torch.tensor([[2.0, 0.0]]), torch.tensor([[9.0, 9.0]])).probs
        tensor([[0.7189, 0.2811]])
    """

    mean: Tensor
    variance: Tensor

    @property
    def logits(self) -> Tensor:
        """Logits that account for the variance: mean / √(1 + π/8 · variance).

        MacKay's probit approximation (1992) of E[sigmoid(logit)], applied to each class separately.
        """
        return self.mean / (1.0 + math.pi / 8.0 * self.variance).sqrt()

    @property
    def probs(self) -> Tensor:
        """Class probabilities ``[B, C]``, the softmax of ``logits``; ``[B, 2]`` for a model with one logit.

        Example:
            >>> Moments(torch.tensor([[2.0]]), torch.tensor([[0.0]])).probs
            tensor([[0.1192, 0.8808]])
        """
        one = self.mean.shape[1:] in ((), (1,))  # that of the second of two classes
        logits = F.pad(self.logits.reshape(-1, 1), (1, 0)) if one else self.logits
        return logits.softmax(-1)


def moments(
    model: nn.Module,
    posterior: Factorised,
    x: Inputs,
    *,
    batch_size: int = 64,
    inputs: Pick | None = None,
    output: Pick | None = None,
) -> Moments:
    """Mean and variance of the outputs of the linearised model, in closed form.

    Holds the Jacobian of a batch, ``batch_size`` times outputs times the posterior's weights, so it is meant
    for a last layer or small nets. ``predict`` samples the same outputs, for any model.

    Args:
        model: The module, or the :class:`~posterity.Variational` around it, which is not changed.
        posterior: A Gaussian over its weights.
        x: Inputs, of any kind that ``predict`` takes.
        batch_size: Inputs per batch, unless a loader decides.
        inputs: The part of a loader's batch that goes into the model, as for ``predict``.
        output: Which of the model's outputs, as for ``predict``.

    Example:
        >>> from posterity.laplace import fit
        >>> x, y = torch.randn(40, 4), torch.randint(0, 3, (40,))
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
        >>> m = moments(model, fit(model, (x, y)).posterior(), x)
        >>> m.probs.shape, m.variance.shape
        (torch.Size([40, 3]), torch.Size([40, 3]))
    """
    check_call(x, 1, batch_size)
    if not isinstance(posterior, Factorised):
        raise TypeError(f"moments() needs a posterior of blocks, not a {type(posterior).__name__}")
    model = evaluating(inner(model.module if isinstance(model, Variational) else model))
    posterior.check(model)
    dtypes = {name: p.dtype for name, p in model.named_parameters()}
    mean = {name: each.detach().to(dtypes[name]) for name, each in posterior.mean().items()}

    def batch_moments(batch: Inputs) -> tuple[Tensor, Tensor]:
        batch, state = moved(batch, model), buffers.snapshot(model)
        tensors: list[Tensor] = []
        mapped(batch, tensors.append)

        def outputs(weights: dict[str, Tensor], *example: Tensor) -> tuple[Tensor, Tensor]:
            rows: Iterator[Tensor] = iter(example)
            args, kwargs = arguments(mapped(batch, lambda _: next(rows)[None]))
            found = one_pass(model, weights, buffers.copied(state), args, kwargs, output)
            if len(found) != 1:
                raise ValueError(
                    f"the model gave outputs {list(found.shape)} for one input: moments() needs one row for "
                    "each input on axis 0"
                )
            return found[0], found[0]

        each = vmap(
            jacrev(outputs, has_aux=True), in_dims=(None, *[0] * len(tensors)), randomness="different"
        )
        jacobian, out = cast("tuple[dict[str, Tensor], Tensor]", each(mean, *tensors))
        parts = posterior.join(jacobian)
        shares = [_variance(leaf, parts[name], out.shape) for name, leaf in posterior.blocks.items()]
        return out, torch.stack([share.to(shares[0].device) for share in shares]).sum(0)

    quiet = no_fallback_warnings()
    with torch.no_grad(), random_numbers_kept(model), quiet, Intercept(fused=False):
        found = [batch_moments(each) for each in batches(x, batch_size, inputs)]
    means, variances = zip(*found, strict=True)
    return Moments(torch.cat(means), torch.cat(variances))


def _variance(leaf: Leaf, jacobian: Tensor, shape: torch.Size) -> Tensor:
    """The diagonal of J Σ Jᵀ for one block, ``[B, ...]``, from its Jacobian ``[B, ..., *block]``.

    A draw is μ + L · noise with Σ = L Lᵀ, so that the variance is ‖Lᵀ J‖²: the gradient of J · draw in noise.
    """
    rows = jacobian.to(leaf.dtype).reshape(-1, *leaf.shape)
    normals = {
        name: torch.zeros(len(rows), *size, device=leaf.device, dtype=leaf.dtype)
        for name, size in leaf.noise_shapes.items()
    }
    (pulled,) = vjp(leaf.draw, normals)[1](rows)
    return torch.stack([each.square().flatten(1).sum(1) for each in pulled.values()]).sum(0).reshape(shape)
