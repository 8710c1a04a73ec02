"""Fitting a Laplace approximation to a trained model and its data."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from posterity.arguments import FILTER, FLAG, MODULE, NUMBER, TEXT, WHOLE, described, takes
from posterity.curvature import Uncollected, fisher
from posterity.curvature.fisher import Kind, Likelihood, Structure, checked, chosen
from posterity.inputs import Inputs, Pick, called, moved, pairs, random_numbers_kept, shown, tensor_of
from posterity.laplace.choice import last_layer, picked
from posterity.laplace.evidence import Laplace, Prior, Sums, check_prior, log_probs, positive
from posterity.names import NameFilter, inner, padding_rows
from posterity.predict import predict
from posterity.prediction import Prediction
from posterity.replica import evaluating
from posterity.variational import Variational

# An exact Fisher matrix is one backward pass for each output: up to here it is the default.
_FEW_OUTPUTS = 32
# Half decades around what nets are usually trained with, up to where networks hardly differ.
_GRID = tuple(10.0 ** (0.5 * k) for k in range(-4, 13))
# Without validation data: what a prior may cost on training data, in nats per example (or a standard error of
# that, if it is more), and on how many examples it is measured. Where a net is as sure as it should be, test
# data cost about the same.
_COST, _MEASURED = 0.0005, 512


@takes(
    model=MODULE,
    likelihood=TEXT,
    structure=TEXT,
    kind=TEXT,
    fallback=TEXT,
    names=FILTER,
    noise_variance=NUMBER,
    temperature=NUMBER,
    num_data=WHOLE,
    samples=WHOLE,
    seed=WHOLE,
    batch_size=WHOLE,
    binary=FLAG,
)
def fit(
    model: nn.Module,
    loader: Any,
    *,
    likelihood: Likelihood = "classification",
    structure: Structure = "kronecker",
    kind: Kind | None = None,
    names: NameFilter | None = None,
    prior_precision: Prior | Literal["validation"] | None = None,
    noise_variance: float | None = None,
    temperature: float = 1.0,
    num_data: int | None = None,
    validation: Any = None,
    grid: Sequence[float] = _GRID,
    samples: int = 20,
    linearise: bool = True,
    seed: int = 0,
    fallback: Literal["vmap"] | None = None,
    batch_size: int = 256,
    output: Pick | None = None,
    binary: bool = False,
    progress: bool = False,
) -> Laplace:
    """Fit a Laplace approximation to a trained model.

    The model runs in evaluation mode, and is not changed: weights, gradients, mode, buffers; nor is torch's
    random state. Batches are moved to the device of its parameters.

    Args:
        model: Any module that gives logits or means ``[B, C]``, or one mean ``[B]``, trained in any way.
        loader: The training data: a DataLoader or other iterable of batches, read once, or a pair
            ``(inputs, targets)``. A batch is ``(x, y)``, ``(x1, x2, y)`` for a model of several inputs, or a
            dict with ``"labels"``; inputs are as for :func:`~posterity.predict`. Labels are ``[B]``, targets
            ``[B, C]``, or ``[B]`` if there is one output.
        likelihood: ``"classification"`` or ``"regression"``.
        structure: ``"kronecker"`` for linear layers and convolutions (others have a diagonal), or
            ``"diagonal"`` for all.
        kind: Of Fisher matrix: ``"exact"``, one backward pass per output; ``"mc"``, one pass with sampled
            labels; ``"empirical"``, one with the data's. If not given, exact up to 32 outputs, mc above.
        names: Filter of the weights to give a posterior, such as ``"head.*"``; others keep their values. If
            not given, those of the last layer that runs on the first batch. ``"*"`` is the whole net without
            its norm layers; another pattern picks those, too.
        prior_precision: A number; ``"marginal"``, the one with the largest evidence, or one for each block
            with ``"marginal-by-block"``; or ``"validation"``, the one on the grid that predicts best. If not
            given, the last if there is ``validation``; otherwise the marginal one, raised until training data
            cost at most 0.0005 nats per example more than with the plain net, or one standard error of that
            cost.
        noise_variance: For regression; by default the mean squared error on the training data.
        temperature: Divides the likelihood: below 1 the posterior is narrower.
        num_data: Number of training examples, if the loader has only part of them.
        validation: Held-out data, in the same forms, for choosing the prior precision.
        grid: The prior precisions to choose from with ``validation``.
        samples: Sampled networks in predictions that choose the prior precision.
        linearise: Whether the posterior is for the linearised model, which ``predict`` then uses; if not, for
            the model itself, which needs much narrower posteriors of the whole net.
        seed: Seed of sampled labels and networks.
        fallback: ``"vmap"`` for layers whose curvature cannot be collected: works for any layer, slowly, with
        a diagonal.
        batch_size: Examples per batch, unless a loader decides.
        output: Which of the model's outputs, as for :func:`~posterity.predict`.
        binary: Whether the model gives one logit, ``[B]`` or ``[B, 1]``, that of the second of two
            classes, as for :func:`~posterity.predict`; labels are 0 and 1, floats as well.
        progress: Show a progress bar (needs the extra ``lab``).

    Example:
        >>> x, y = torch.randn(40, 4), torch.randint(0, 3, (40,))
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
        >>> found = fit(model, (x, y), prior_precision=5.0)  # of the last layer
        >>> predict(model, found.posterior(), x).probs.shape
        torch.Size([40, 3])
    """
    _check(likelihood, noise_variance, temperature, num_data=num_data, batch_size=batch_size, samples=samples)
    temperature = float(temperature)  # a fraction does not multiply a tensor
    if validation is not None and prior_precision is None:
        prior_precision = "validation"
    priors = _priors(prior_precision, validation is not None, grid)
    model = evaluating(inner(model.module if isinstance(model, Variational) else model))
    params = chosen(model, "*") if names is None else picked(model, names)
    read: Callable[[tuple[Inputs, Any]], tuple[Inputs, Any]] = partial(moved, model=model)
    if binary:
        if likelihood != "classification":
            raise ValueError("binary=True is for likelihood='classification': leave one of them out")
        output, read = partial(_two_logits, output), partial(_of_two_classes, model)
    elif likelihood == "regression":
        output = partial(_one_column, output)
    options: dict[str, Any] = {"structure": structure, "likelihood": likelihood}
    options |= {"seed": seed, "fallback": fallback, "output": output}
    sums, seen = Sums(likelihood), _Sample()
    with torch.no_grad(), random_numbers_kept(model):
        held_out = [] if validation is None else [read(pair) for pair in pairs(validation, batch_size)]
        if validation is not None and not held_out:
            raise ValueError("the validation loader gave no batch: pass held-out data")
        data: Iterable[tuple[Inputs, Any]] = pairs(loader, batch_size)
        for step, pair in enumerate(shown(data, "collecting curvature") if progress else data):
            x, y = read(pair)
            out = called(model, x, output)
            y = _column(y, out)
            out = _checked(out, y, likelihood)
            if step == 0:
                params = last_layer(model, x, output) if names is None else params
                options["names"] = list(params)
            if prior_precision is None:
                seen.add(x, y)
            how: Kind = kind or ("exact" if out.shape[1] <= _FEW_OUTPUTS else "mc")
            try:
                labels = y if how == "empirical" else None
                sums.add(out, y, fisher(model, x, labels, kind=how, step=step, **options))
            except Uncollected as error:
                raise RuntimeError(
                    f"{error.reason}, from which no curvature can be collected: leave it out by names=, or "
                    "pass fallback='vmap'"
                ) from error
        if not sums.examples:
            raise ValueError("the loader gave no batch: pass the training data, not an iterator at its end")
        empirical, padding = kind == "empirical", padding_rows(model)
        result = sums.result(params, empirical, noise_variance, temperature, num_data, padding)
        result = replace(result, linearise=linearise)
        predicted = partial(predict, model, samples=samples, seed=seed, output=output, keep_samples=True)
        if prior_precision is None:
            return _harmless(result, seen.batches, predicted)
        if validation is None:
            return result.with_prior(priors[0])
        candidates = [result.with_prior(each) for each in priors]
        scores = [float(_log_probs(each, held_out, predicted).mean()) for each in candidates]
        return max(zip(scores, candidates, strict=True), key=lambda each: each[0])[1]


def _priors(
    given: Prior | Literal["validation"] | None, held_out: bool, grid: Sequence[float]
) -> Sequence[Prior]:
    """What to try for a prior precision, given whether there are data to choose by."""
    if (given == "validation") != held_out:
        raise ValueError("validation= is for prior_precision='validation', which needs it: give both")
    if given == "validation":
        priors: Sequence[Prior] = grid
    else:
        priors = ["marginal" if given is None else given]
    if not isinstance(priors, Iterable):
        raise TypeError(f"grid holds the prior precisions to choose from, not {described(grid)}: pass a list")
    if not priors:
        raise ValueError("grid is empty: give the prior precisions to choose from")
    for each in priors:
        check_prior(each)
    return priors


def _checked(out: Tensor, y: Any, likelihood: Likelihood) -> Tensor:
    """Outputs ``[B, C]`` that fit the targets."""
    if likelihood == "classification" and out.shape[1:] in ((), (1,)):
        raise ValueError(
            f"outputs {list(out.shape)} are one number each: pass binary=True if it is a logit, or "
            'likelihood="regression"'
        )
    return checked(out, y, likelihood)


def _two_logits(output: Pick | None, result: Any) -> Tensor:
    """Logits ``[B, 2]`` of a model with one logit, that of the second class: the first class has 0."""
    logit = tensor_of(result, output)
    if logit.shape[1:] not in ((), (1,)):
        raise ValueError(
            f"with binary=True the model must give one logit, [B] or [B, 1], not {list(logit.shape)}"
        )
    return F.pad(logit.reshape(-1, 1), (1, 0))


def _of_two_classes(model: nn.Module, pair: tuple[Inputs, Any]) -> tuple[Inputs, Any]:
    """A batch on the model's device, with the labels of a binary loss as whole numbers ``[B]``."""
    x, y = moved(pair, model)
    if isinstance(y, Tensor) and y.shape[1:] in ((), (1,)) and bool(((y == 0) | (y == 1)).all()):
        y = y.reshape(-1).long()
    return x, y


def _one_column(output: Pick | None, result: Any) -> Tensor:
    """Outputs ``[B, 1]`` of a model that gives ``[B]``; others as they are."""
    found = tensor_of(result, output)
    return found[:, None] if found.dim() == 1 else found


def _column(y: Any, out: Tensor) -> Any:
    """Targets ``[B]`` as ``[B, 1]`` if outputs are; others as they are."""
    return y[:, None] if isinstance(y, Tensor) and y.dim() == 1 and out.shape[1:] == (1,) else y


@final
class _Sample:
    """A sample of the batches, spread evenly over all of them, with about ``_MEASURED`` examples."""

    def __init__(self) -> None:
        self.batches: list[tuple[Inputs, Tensor]] = []
        self._passed, self._stride = 0, 1

    def add(self, x: Inputs, y: Tensor) -> None:
        if self._passed % self._stride == 0:
            self.batches.append((x, y))
            while len(self.batches) > 1 and sum(len(y) for _, y in self.batches) > 2 * _MEASURED:
                self.batches, self._stride = self.batches[::2], 2 * self._stride
        self._passed += 1


def _harmless(
    found: Laplace, data: list[tuple[Inputs, Tensor]], predicted: Callable[..., Prediction]
) -> Laplace:
    """The marginal prior precision, raised until it does no harm on training data."""
    found = found.with_prior("marginal")
    plain = _log_probs(found, data, partial(predicted, mode="mean"))

    def costly(each: Laplace) -> bool:
        costs = plain - _log_probs(each, data, predicted)
        error = float(costs.std(correction=0)) / math.sqrt(len(costs))
        return not float(costs.mean()) <= max(_COST, error)

    if not costly(found):
        return found
    low = math.log(next(iter(found.prior_precision.values())))
    high = low + math.log(1e12)  # stds a million times smaller
    while high - low > 0.2:
        middle = 0.5 * (low + high)
        low, high = (middle, high) if costly(found.with_prior(math.exp(middle))) else (low, middle)
    return found.with_prior(math.exp(high))


def _log_probs(
    found: Laplace, data: list[tuple[Inputs, Tensor]], predicted: Callable[..., Prediction]
) -> Tensor:
    """Log-probability of every target under the average of sampled networks; −inf where it is not finite."""
    likelihood: Likelihood = "classification" if found.noise_variance is None else "regression"
    posterior, logs = found.posterior(), []
    for x, y in data:
        out = predicted(posterior, x).samples
        y = _column(y, out[0])
        checked(out[0], y, likelihood)
        logs.append(log_probs(out, y, found.noise_variance).logsumexp(0) - math.log(len(out)))
    return torch.cat(logs).nan_to_num(-math.inf, -math.inf, -math.inf)


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
