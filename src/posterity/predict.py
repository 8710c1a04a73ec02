"""Posterior, dropout or ensemble → predictive samples → what a person wants to know of each input."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import product
from typing import Literal, Protocol, TypeAlias, final, get_args, runtime_checkable

import torch
from torch import Tensor, nn

from posterity.arguments import FLAG, PICK, WHOLE, described, instance, is_dense, takes
from posterity.inputs import Inputs, Pick, arguments, batches, called, is_loader, rows_of, shown, undisturbed
from posterity.mc import How, chunks, run
from posterity.names import inner
from posterity.posterior.base import Networks, Posterior
from posterity.variational import Variational

Mode: TypeAlias = Literal["average", "mean", "single", "vote"]
MODES: tuple[Mode, ...] = get_args(Mode)


@runtime_checkable
class Predictive(Protocol):
    """What gives predictive samples: a posterior, :class:`~posterity.MCDropout`, or a class of your own."""

    def check(self, model: nn.Module) -> object:
        """Raise unless it can be used with the model."""

    def networks(self, model: nn.Module, samples: range | None, seed: int) -> Networks:
        """The networks of the given numbers; without numbers, the one at the mean."""


@dataclass(frozen=True)
class Prediction:
    """Outputs of S sampled networks for B inputs, and what follows from them.

    Attributes:
        samples: The networks' outputs ``[S, B, ...]``; for classification, logits ``[S, B, C]``. What follows
            from those in half precision, as under autocast, is computed in single precision.
        mode: How ``probs`` combines them.
        class_dim: Axis of the classes, which probabilities keep, in outputs that are not ``[B, C]``: 1 for
            ``[B, C, H, W]``.
        binary: Whether outputs are one logit, ``[B]`` or ``[B, 1]``: that of the second of two classes.

    Example:
        >>> two_networks = torch.tensor([[[9.0, 0.0]], [[0.0, 9.0]]])  # sure of opposite labels
        >>> p = Prediction(two_networks)
        >>> p.vote, p.mutual_information > p.expected_entropy
        (tensor([[0.5000, 0.5000]]), tensor([True]))
    """

    samples: Tensor
    mode: Mode = "average"
    class_dim: int | None = None
    binary: bool = False

    def __post_init__(self) -> None:
        if not is_dense(self.samples):
            raise TypeError(f"samples must be a dense tensor of outputs, not {described(self.samples)}")
        if not isinstance(self.mode, str) or self.mode not in MODES:
            raise ValueError(f"mode must be one of {', '.join(MODES)}, not {described(self.mode)}")

    @property
    def sample_probs(self) -> Tensor:
        """Class probabilities of every sampled network, ``[S, B, C]``."""
        return self._logits.softmax(self._axis)

    @property
    def probs(self) -> Tensor:
        """Class probabilities by the chosen mode.

        ``"average"`` and ``"mean"`` give ``[B, C]``; ``"vote"`` the share of votes ``[B, C]``;
        ``"single"`` every network's own ``[S, B, C]``.
        """
        if self.mode == "single":
            return self.sample_probs
        return self.vote if self.mode == "vote" else self.sample_probs.mean(0)

    @property
    def log_probs(self) -> Tensor:
        """Logarithms of ``probs``, from the logits: where a probability would underflow these stay finite."""
        if self.mode == "vote":
            return self.vote.log()
        logs = self._logits.log_softmax(self._axis)
        return logs if self.mode == "single" else logs.logsumexp(0) - math.log(len(logs))

    @property
    def label(self) -> Tensor:
        """The class with the highest probability."""
        return self.probs.argmax(self._axis)

    @property
    def vote(self) -> Tensor:
        """Share of the sampled networks that choose each class, ``[B, C]``; ``label`` is the majority's."""
        logits, axis = self._logits, self._axis
        votes = nn.functional.one_hot(logits.argmax(axis), logits.shape[axis]).movedim(-1, axis)
        # A network with NaN among its logits has no vote to give.
        return torch.where(logits.isnan().any(axis, keepdim=True), torch.nan, votes.to(logits)).mean(0)

    @property
    def entropy(self) -> Tensor:
        """Entropy of the averaged probabilities, in nats: all uncertainty about the label."""
        return self._entropy(self.sample_probs.mean(0))

    @property
    def expected_entropy(self) -> Tensor:
        """Mean entropy of the single networks: what more data would not remove."""
        return self._entropy(self.sample_probs).mean(0)

    @property
    def mutual_information(self) -> Tensor:
        """Entropy less expected entropy: disagreement between networks, what more data would remove."""
        return (self.entropy - self.expected_entropy).clamp_min(0.0)

    @property
    def mean(self) -> Tensor:
        """Regression: the average output."""
        return self._wide.mean(0)

    @property
    def variance(self) -> Tensor:
        """Regression: epistemic variance, that of the output over weight samples; 0 of a single one."""
        return self._wide.var(0, correction=min(1, len(self.samples) - 1))

    @property
    def _axis(self) -> int:
        """That of the classes, counted from the end: whether S is in front or not."""
        outputs = list(self.samples.shape[1:])
        if self.binary and len(outputs) == 1:
            return -1
        if self.class_dim is None and len(outputs) != 2:
            raise ValueError(
                f"outputs {outputs} may have classes on several axes: give class_dim=, such as 1 for "
                "[B, C, H, W]; for regression see .mean and .variance"
            )
        axis = -1 if self.class_dim is None else self.class_dim
        axis -= len(outputs) if axis > 0 else 0
        if not -len(outputs) < axis < 0:
            raise ValueError(f"class_dim={self.class_dim} is no axis of classes in outputs {outputs}")
        if (outputs[axis] == 1) != self.binary:
            raise ValueError(
                f"outputs {outputs} have {outputs[axis]} on the axis of classes: probabilities need two or "
                "more logits, or one with binary=True; for regression see .mean and .variance"
            )
        return axis

    @property
    def _logits(self) -> Tensor:
        logits = self._wide
        if self.binary:  # softmax(0, logit) is (1 − sigmoid(logit), sigmoid(logit))
            axis = self._axis
            logits = logits[..., None] if logits.dim() == 2 else logits
            logits = torch.cat([torch.zeros_like(logits), logits], axis)
        return logits

    @property
    def _wide(self) -> Tensor:
        return self.samples.to(torch.promote_types(self.samples.dtype, torch.float32))

    def _entropy(self, probs: Tensor) -> Tensor:
        return (-torch.xlogy(probs, probs)).sum(self._axis)


@takes(
    model=instance("a module, or a list of them", nn.Module, Sequence),
    samples=WHOLE,
    batch_size=WHOLE,
    seed=WHOLE,
    chunk=WHOLE,
    output=PICK,
    inputs=PICK,
    class_dim=WHOLE,
    binary=FLAG,
    linearise=FLAG,
)
def predict(
    model: nn.Module | Sequence[nn.Module],
    posterior: Predictive | None = None,
    x: Inputs = None,
    *,
    samples: int = 10,
    mode: Mode = "average",
    batch_size: int = 1024,
    seed: int = 0,
    how: How = "stack",
    chunk: int | None = None,
    inputs: Pick | None = None,
    output: Pick | None = None,
    class_dim: int | None = None,
    binary: bool = False,
    linearise: bool | None = None,
    progress: bool = False,
) -> Prediction:
    """Predict with sampled networks: weights of a posterior, masks of dropout, or models of an ensemble.

    All run in evaluation mode; afterwards the model is as it was.

    Args:
        model: The module, or the :class:`~posterity.Variational` around it; parameters that the posterior
            does not name keep their values. Without a posterior, a list of models, of any architectures, is
            a deep ensemble, ``predict([net1, net2], x=x)``, and one model predicts with its own weights.
        posterior: Where weights come from, means included: the model's own values of these weights do not
            matter, so that averaged ones (EMA) need a posterior of their own. Or
            :class:`~posterity.MCDropout`, for the model's own weights and the masks of its dropout layers; or
            none.
        x: Inputs, as many as you like: a tensor or NumPy array; a tuple or dict of them, for models that
            take several, called as ``model(*x)`` or ``model(**x)``; or a DataLoader, whose predictions come
            in the order of its batches. They are moved to the model's device.
        samples: Sampled networks S; the same ones for every batch. An ensemble has one for each model.
        mode: ``"average"`` of probabilities, ``"mean"`` weights (one network, nothing dropped), ``"single"``
            networks each for itself, or their ``"vote"``.
        batch_size: Inputs at once, unless a loader decides. With dropout every input has masks of its own,
            and another size gives others.
        seed: Chooses the networks; the same seed gives the same prediction.
        how: ``"stack"`` runs the networks in one vectorised pass, ``"loop"`` one after another. Dropout and
            ensembles are always run one after another.
        chunk: At most this many networks drawn and run at once, to cap memory.
        inputs: What of a loader's batch goes into the model: a key, an index or a function. Without it, all
            but the targets: the last element of a tuple or list of two or more, or a mapping's ``"labels"``.
        output: Which of the model's outputs: a key, an index or a function. Without it the model must return
            a tensor, or something with ``logits``.
        class_dim: Axis of the classes in outputs that are not ``[B, C]``: 1 for ``[B, C, H, W]``.
        binary: Whether the model gives one logit, ``[B]`` or ``[B, 1]``, that of the second of two classes.
        linearise: Whether to use the model that is linear in its weights around the posterior's means,
            f(x, μ) + J(x) (θ − μ). If not given, as ``posterior.linearised`` says: yes for those of
            :func:`laplace.fit() <posterity.laplace.fit>`, which are made for that model.
        progress: Show a progress bar (needs the extra ``lab``).

    Example:
        >>> from posterity import BGD
        >>> model = nn.Linear(3, 2)
        >>> p = predict(model, BGD(model).posterior(), torch.randn(5, 3))
        >>> p.probs.shape, p.mutual_information.shape
        (torch.Size([5, 2]), torch.Size([5]))
    """
    if not isinstance(mode, str) or mode not in MODES:
        raise ValueError(f"mode must be one of {', '.join(MODES)}, not {described(mode)}")
    check_call(x, samples, batch_size)
    given = [model] if isinstance(model, nn.Module) else list(model)
    if not all(isinstance(each, nn.Module) for each in given):
        raise TypeError("an ensemble is a list of modules alone")
    models = [inner(each.module if isinstance(each, Variational) else each) for each in given]
    source = _Ensemble(models) if posterior is None else posterior
    if len(models) != 1 and (posterior is not None or not models):
        raise ValueError(f"pass one model and its posterior, or a list of models alone, not {len(models)}")
    if isinstance(source, type) or not isinstance(source, Predictive):  # a class has the methods, too
        raise TypeError(f"a {type(source).__name__} gives no networks: pass a posterior or MCDropout()")
    source.check(models[0])
    if linearise and not isinstance(source, Posterior):
        kind = "an ensemble" if posterior is None else f"a {type(source).__name__}"
        raise TypeError(f"linearise=True needs a posterior over weights, which {kind} is not")
    centre = source.mean() if linearise and isinstance(source, Posterior) and mode != "mean" else None
    samples = len(models) if posterior is None else samples

    # The same networks for one batch after another.
    networks = lru_cache(maxsize=1)(partial(source.networks, models[0], seed=seed))

    def run_batch(
        batch: Inputs,
        model: nn.Module,
        weights: Mapping[str, Tensor],
        around: Mapping[str, Tensor] | None = None,
        /,
    ) -> Tensor:
        if not weights:
            return called(model, batch, output)[None]
        around = None if linearise is False else centre or around
        args, kwargs = arguments(batch)
        return run(model, weights, *args, how=how, output=output, around=around, **kwargs)

    some: list[range | None] = [None] if mode == "mean" else [*chunks(samples, chunk)]
    outputs: dict[range | None, list[Tensor]] = {rows: [] for rows in some}
    # No inference_mode(): what a model remembers of it could never be trained with.
    with torch.no_grad(), undisturbed(*models):
        numbered = enumerate(batches(x, batch_size, inputs))
        # A loader is read once, even if networks must be drawn again; all else goes by networks.
        read_once = ((rows, part) for part in numbered for rows in some)
        order = read_once if is_loader(x) else list(product(some, numbered))
        for rows, (step, batch) in shown(order, "predicting") if progress else order:
            found = networks(rows)(partial(run_batch, batch), step)
            outputs[rows].append(rows_of(found, batch))
    whole = torch.cat([torch.cat(each, dim=1) for each in outputs.values()])
    return Prediction(whole, mode, class_dim, binary)


def check_call(x: Inputs, samples: int, batch_size: int) -> None:
    """Refuse a call without inputs, and numbers below 1."""
    if x is None:
        raise TypeError("there are no inputs: call predict(model, posterior, x), or predict(models, x=x)")
    if samples < 1 or batch_size < 1:
        raise ValueError(f"samples and batch_size must be at least 1, not {samples} and {batch_size}")


@final
class _Ensemble:
    """Models as they are."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self.models = models

    def check(self, model: nn.Module) -> None:
        """Nothing has to fit."""

    def networks(self, model: nn.Module, samples: range | None, seed: int) -> Networks:
        """The models of the given numbers."""
        if samples is None and len(self.models) > 1:
            raise ValueError("an ensemble has no mean weights: choose another mode, or pass one model")
        chosen = [self.models[k] for k in samples or range(1)]  # one model is its own mean
        return lambda run, step: torch.cat([run(each, {}) for each in chosen])
