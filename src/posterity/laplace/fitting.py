"""From a trained model and its data to a Laplace approximation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from posterity.curvature import Uncollected, fisher
from posterity.curvature.fisher import Kind, Likelihood, Structure, checked, chosen
from posterity.inputs import Inputs, Pick, called, moved, pairs, shown, undisturbed
from posterity.laplace.evidence import Laplace, Prior, Sums, check_prior, log_probs, positive
from posterity.names import NameFilter, inner, padding_rows
from posterity.predict import Prediction, predict
from posterity.variational import Variational

# An exact Fisher matrix is one backward pass for each output: up to here it is the default.
_FEW_OUTPUTS = 32
# Half decades around what nets are usually trained with.
_GRID = tuple(10.0 ** (0.5 * k) for k in range(-4, 9))


def fit(
    model: nn.Module,
    loader: Any,
    *,
    likelihood: Likelihood = "classification",
    structure: Structure = "kronecker",
    kind: Kind | None = None,
    names: NameFilter = "*",
    prior_precision: Prior | Literal["validation"] = "marginal",
    noise_variance: float | None = None,
    temperature: float = 1.0,
    num_data: int | None = None,
    validation: Any = None,
    grid: Sequence[float] = _GRID,
    samples: int = 20,
    predictive: Callable[..., Prediction] = predict,
    seed: int = 0,
    fallback: Literal["vmap"] | None = None,
    batch_size: int = 256,
    output: Pick | None = None,
    progress: bool = False,
) -> Laplace:
    """Fit a Laplace approximation to a trained model.

    The model runs in evaluation mode, and is left as it was: weights, gradients, mode, buffers, and torch's
    random numbers. Batches go to the device of its parameters.

    Args:
        model: Any module that gives logits or means ``[B, C]``, trained in any way.
        loader: The training data: a DataLoader or other iterable of batches, read once, or a pair
            ``(inputs, targets)``. A batch is ``(x, y)``, ``(x1, x2, y)`` for a model of several inputs, or a
            dict with ``"labels"``; inputs are as for :func:`~posterity.predict`. Labels are ``[B]``, targets
            ``[B, C]``.
        likelihood: ``"classification"`` or ``"regression"``.
        structure: ``"kronecker"`` for linear layers and convolutions (others have a diagonal), or
            ``"diagonal"`` for all.
        kind: Of Fisher matrix: ``"exact"``, one backward pass per output; ``"mc"``, one pass with sampled
            labels; ``"empirical"``, one with the data's. If not given, exact up to 32 outputs, mc above.
        names: Filter of the weights to give a posterior, such as ``"head.*"``; others keep their values.
        prior_precision: A number; ``"marginal"``, the one of the largest evidence, or one for each block with
            ``"marginal-by-block"``; or ``"validation"``, the one of the grid that predicts best.
        noise_variance: Of regression; the mean squared error on the training data if not given.
        temperature: Divides the likelihood: below 1 the posterior is narrower.
        num_data: Number of training examples, if the loader has only some of them.
        validation: Data for ``prior_precision="validation"``, likewise.
        grid: What to choose from.
        samples: Sampled networks in that prediction.
        predictive: How to predict there: ``posterity.predict``, or :func:`~posterity.laplace.linearised`.
        seed: Of sampled labels and networks.
        fallback: ``"vmap"`` for layers whose curvature cannot be collected: any, slowly, with a diagonal.
        batch_size: Examples at once, unless a loader decides.
        output: Which of the model's outputs, as for :func:`~posterity.predict`.
        progress: Show a progress bar (needs the extra ``lab``).

    Example:
        >>> x, y = torch.randn(40, 4), torch.randint(0, 3, (40,))
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
        >>> found = fit(model, (x, y), names="2.*", prior_precision=5.0)  # the last layer only
        >>> predict(model, found.posterior(), x).probs.shape
        torch.Size([40, 3])
    """
    _check(likelihood, noise_variance, temperature, num_data=num_data, batch_size=batch_size, samples=samples)
    if (prior_precision == "validation") != (validation is not None):
        raise ValueError("validation= and prior_precision='validation' go together: give both, or neither")
    priors: Sequence[Prior] = grid if prior_precision == "validation" else [prior_precision]
    if not priors:
        raise ValueError("grid is empty: give the prior precisions to choose from")
    for each in priors:
        check_prior(each)
    model = inner(model.module if isinstance(model, Variational) else model)
    params = chosen(model, names)
    options: dict[str, Any] = {"structure": structure, "likelihood": likelihood, "names": list(params)}
    options |= {"seed": seed, "fallback": fallback, "output": output}
    sums = Sums(likelihood)
    with torch.no_grad(), undisturbed(model):
        held_out = (
            [] if validation is None else [moved(pair, model) for pair in pairs(validation, batch_size)]
        )
        if validation is not None and not held_out:
            raise ValueError("the validation loader gave no batch: pass held-out data")
        data: Iterable[tuple[Inputs, Any]] = pairs(loader, batch_size)
        for step, pair in enumerate(shown(data, "collecting curvature") if progress else data):
            x, y = moved(pair, model)
            out = checked(called(model, x, output), y, likelihood)
            how: Kind = kind or ("exact" if out.shape[1] <= _FEW_OUTPUTS else "mc")
            try:
                seen = y if how == "empirical" else None
                sums.add(out, y, fisher(model, x, seen, kind=how, step=step, **options))
            except Uncollected as error:
                raise RuntimeError(
                    f"{error.reason}, from which no curvature can be collected: leave it out by names=, or "
                    "pass fallback='vmap'"
                ) from error
        if not sums.examples:
            raise ValueError("the loader gave no batch: pass the training data, not an iterator at its end")
        empirical, padding = kind == "empirical", padding_rows(model)
        result = sums.result(params, empirical, noise_variance, temperature, num_data, padding)
        if validation is None:
            return result.with_prior(priors[0])
        more = {} if output is None else {"output": output}
        predicted = partial(predictive, model, samples=samples, seed=seed, **more)
        candidates = [result.with_prior(each) for each in priors]
        return max(candidates, key=lambda each: _score(each, held_out, predicted))


def _score(
    found: Laplace, held_out: list[tuple[Inputs, Tensor]], predicted: Callable[..., Prediction]
) -> float:
    """Mean log-probability of held-out targets under the average of sampled networks."""
    likelihood: Likelihood = "classification" if found.noise_variance is None else "regression"
    posterior, total, count = found.posterior(), 0.0, 0
    for x, y in held_out:
        out = predicted(posterior, x).samples
        checked(out[0], y, likelihood)
        logs = log_probs(out, y, found.noise_variance).logsumexp(0) - math.log(len(out))
        total, count = total + float(logs.sum()), count + len(y)
    return total / count if math.isfinite(total) else -math.inf


def _check(likelihood: str, noise_variance: float | None, temperature: float, **counts: int | None) -> None:
    if likelihood not in ("classification", "regression"):
        raise ValueError(f"likelihood must be 'classification' or 'regression', not {likelihood!r}")
    positive("temperature", temperature)
    if noise_variance is not None:
        if likelihood == "classification":
            raise ValueError("noise_variance is for likelihood='regression': classes have no such noise")
        positive("noise_variance", noise_variance)
    for name, value in counts.items():
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, not {value}")
