"""Prediction with a model that is linear in its weights, for which a Laplace approximation is made."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor, nn
from torch.func import jvp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from posterity import buffers
from posterity.inputs import Inputs, Pick, arguments, batches, moved, rows_of, undisturbed
from posterity.mc import one_pass
from posterity.names import inner
from posterity.posterior import Posterior
from posterity.predict import Prediction, check_call
from posterity.variational import Variational


def linearised(
    model: nn.Module,
    posterior: Posterior,
    x: Inputs,
    *,
    samples: int = 10,
    batch_size: int = 256,
    seed: int = 0,
    chunk: int | None = None,
    inputs: Pick | None = None,
    output: Pick | None = None,
    class_dim: int | None = None,
    binary: bool = False,
) -> Prediction:
    """Predict with the model linear in its weights around the means: f(x, μ) + J(x) (θ − μ), θ drawn from q.

    The Fisher matrix is the Hessian of this model, so it suits posteriors that are wide; with the net itself
    (:func:`~posterity.predict`) their networks underfit (Immer et al. 2021).

    Args:
        model: The module, or the :class:`~posterity.Variational` around it; parameters that the posterior
            does not name keep their values.
        posterior: Where weights come from.
        x: Inputs, as many as you like, of any kind that ``predict`` takes.
        samples: Sampled networks S; the same ones for every batch.
        batch_size: Inputs at once, unless a loader decides.
        seed: Chooses the networks, the same as in ``predict``.
        chunk: At most this many networks at once, to cap memory.
        inputs: What of a loader's batch goes into the model, as for ``predict``.
        output: Which of the model's outputs, as for ``predict``.
        class_dim: Axis of the classes, as for ``predict``.
        binary: Whether the model gives one logit, as for ``predict``.

    Example:
        >>> from posterity.laplace import fit
        >>> x, y = torch.randn(40, 4), torch.randint(0, 3, (40,))
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
        >>> linearised(model, fit(model, (x, y)).posterior(), x).probs.shape
        torch.Size([40, 3])
    """
    check_call(x, samples, batch_size)
    if not isinstance(posterior, Posterior):
        raise TypeError(f"linearised() needs a posterior over weights, not a {type(posterior).__name__}")
    model = inner(model.module if isinstance(model, Variational) else model)
    posterior.check(model)
    dtypes = {name: p.dtype for name, p in model.named_parameters()}
    centre, drawn = posterior.mean(), posterior.sample(samples, seed=seed)
    mean = {name: each.to(dtypes[name]) for name, each in centre.items()}
    shifts = {name: (each - centre[name]).to(dtypes[name]) for name, each in drawn.items()}

    def outputs(batch: Inputs) -> Tensor:
        args, kwargs = arguments(moved(batch, model))

        def network(weights: dict[str, Tensor]) -> Tensor:
            # Copies: a transformed function may not change what it was not given.
            return one_pass(model, weights, buffers.snapshot(model), args, kwargs, output)

        def network_along(shift: dict[str, Tensor]) -> Tensor:
            at_mean, moved = cast("tuple[Tensor, Tensor]", jvp(network, (mean,), (shift,)))
            return at_mean + moved

        found = vmap(network_along, chunk_size=chunk, randomness="different")(shifts)
        return rows_of(found, batch)

    with torch.no_grad(), undisturbed(model), _differentiable(), warnings.catch_warnings():
        # torch's own, when it first reads its forward derivatives.
        warnings.filterwarnings("ignore", message="`torch.jit.script` is deprecated")
        found = torch.cat([outputs(each) for each in batches(x, batch_size, inputs)], dim=1)
    return Prediction(found, class_dim=class_dim, binary=binary)


@contextmanager
def _differentiable() -> Iterator[None]:
    """Attention by operations that have forward derivatives, which the fused ones have not."""
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
