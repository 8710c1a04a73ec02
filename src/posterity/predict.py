"""Posterior or dropout → predictive samples → what a person wants to know of each input."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn

from posterity.dropout import MCDropout
from posterity.mc import How, chunks, one_pass, run
from posterity.posterior import Posterior
from posterity.progress import shown
from posterity.variational import Variational

Mode: TypeAlias = Literal["average", "mean", "single", "vote"]
MODES: tuple[Mode, ...] = ("average", "mean", "single", "vote")


@dataclass(frozen=True)
class Prediction:
    """Outputs of S sampled networks for B inputs, and what follows from them.

    Attributes:
        samples: The networks' outputs ``[S, B, ...]``; for classification, logits in the last dimension. What
            follows from those in half precision, as under autocast, is computed in single precision.
        mode: How ``probs`` combines them.

    Example:
        >>> two_networks = torch.tensor([[[9.0, 0.0]], [[0.0, 9.0]]])  # sure of opposite labels
        >>> p = Prediction(two_networks)
        >>> p.vote, p.mutual_information > p.expected_entropy
        (tensor([[0.5000, 0.5000]]), tensor([True]))
    """

    samples: Tensor
    mode: Mode = "average"

    @property
    def sample_probs(self) -> Tensor:
        """Class probabilities of every sampled network, ``[S, B, C]``."""
        return self._logits.softmax(-1)

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
    def label(self) -> Tensor:
        """The class with the highest probability."""
        return self.probs.argmax(-1)

    @property
    def vote(self) -> Tensor:
        """Share of the sampled networks that choose each class, ``[B, C]``; ``label`` is the majority's."""
        logits = self._logits
        votes = nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).to(logits.dtype)
        # A network whose logits are no numbers has none to give.
        return torch.where(logits.isnan().any(-1, keepdim=True), torch.nan, votes).mean(0)

    @property
    def entropy(self) -> Tensor:
        """Entropy of the averaged probabilities, in nats: all uncertainty about the label."""
        return _entropy(self.sample_probs.mean(0))

    @property
    def expected_entropy(self) -> Tensor:
        """Mean entropy of the single networks: what more data would not remove."""
        return _entropy(self.sample_probs).mean(0)

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
        """Regression: epistemic variance, that of the output over weight samples."""
        return self._wide.var(0, correction=0)

    @property
    def _logits(self) -> Tensor:
        if self.samples.dim() < 3 or self.samples.shape[-1] < 2:
            raise ValueError(
                f"class probabilities need logits [S, B, C] of two classes or more, not "
                f"{list(self.samples.shape)}; for regression see .mean and .variance"
            )
        return self._wide

    @property
    def _wide(self) -> Tensor:
        return self.samples.to(torch.promote_types(self.samples.dtype, torch.float32))


def predict(
    model: nn.Module,
    posterior: Posterior | MCDropout,
    x: Tensor,
    *,
    samples: int = 10,
    mode: Mode = "average",
    batch_size: int = 1024,
    seed: int = 0,
    how: How = "stack",
    chunk: int | None = None,
    progress: bool = False,
) -> Prediction:
    """Predict with weights drawn from the posterior, or masks of dropout; the model runs in evaluation mode.

    Args:
        model: The module, or the :class:`~posterity.Variational` around it; parameters that the posterior
            does not name keep their values.
        posterior: Where weights come from; or :class:`~posterity.MCDropout`, for the model's own weights and
            the masks of its dropout layers.
        x: Inputs, as many as you like: they are run in batches.
        samples: Sampled networks S; the same ones for every batch.
        mode: ``"average"`` of probabilities, ``"mean"`` weights (one network, nothing dropped), ``"single"``
            networks each for itself, or their ``"vote"``.
        batch_size: Inputs at once. With dropout every input has masks of its own, and another size gives
            others.
        seed: Chooses the networks; the same seed gives the same prediction.
        how: ``"stack"`` runs the networks in one vectorised pass, ``"loop"`` one after another. Dropout is
            always run one after another.
        chunk: At most this many networks drawn and run at once, to cap memory.
        progress: Show a progress bar (needs the extra ``lab``).

    Example:
        >>> from posterity import BGD
        >>> model = nn.Linear(3, 2)
        >>> p = predict(model, BGD(model).posterior(), torch.randn(5, 3))
        >>> p.probs.shape, p.mutual_information.shape
        (torch.Size([5, 2]), torch.Size([5]))
    """
    if mode not in MODES:
        raise ValueError(f"mode must be one of {', '.join(MODES)}, not {mode!r}")
    check_call(x, samples, batch_size)
    if isinstance(model, Variational):
        model = model.module
    posterior.check(model)
    network = _networks(model, posterior, mode=mode, seed=seed, how=how)
    batches = torch.split(x, batch_size)
    some = [range(1)] if mode == "mean" else list(chunks(samples, chunk))
    parts = [(rows, step) for rows in some for step in range(len(batches))]
    # No inference_mode(): what a model remembers of it could never be trained with.
    with torch.no_grad(), _evaluating(model):
        outputs = [network(rows, step, batches[step]) for rows, step in shown(parts, "predicting", progress)]
    each = len(batches)
    whole = [torch.cat(outputs[i : i + each], dim=1) for i in range(0, len(outputs), each)]
    return Prediction(torch.cat(whole), mode)


def check_call(x: Tensor, samples: int, batch_size: int) -> None:
    """Refuse what is no tensor of inputs, and numbers below 1."""
    if not isinstance(x, Tensor):
        raise TypeError(
            f"x must be one tensor of inputs, not a {type(x).__name__}: convert it, predict the batches of a "
            "loader one by one, and let a module of your own take inputs apart that have several tensors"
        )
    if samples < 1 or batch_size < 1:
        raise ValueError(f"samples and batch_size must be at least 1, not {samples} and {batch_size}")
    if len(x) == 0:
        raise ValueError("there is nothing to predict: x is empty")


def _networks(
    model: nn.Module,
    posterior: Posterior | MCDropout,
    *,
    mode: Mode,
    seed: int,
    how: How,
) -> Callable[[range, int, Tensor], Tensor]:
    """From numbers of networks, and a batch with its own, to their outputs ``[S, B, ...]``."""
    if isinstance(posterior, MCDropout):
        if mode == "mean":
            return lambda rows, step, x: one_pass(model, {}, {}, (x,), {})[None]
        return lambda rows, step, x: posterior.outputs(model, x, samples=rows, seed=seed, step=step)

    @lru_cache(maxsize=1)
    def weights(rows: range) -> dict[str, Tensor]:
        if mode == "mean":
            return {name: value[None] for name, value in posterior.mean().items()}
        return posterior._sample(rows, seed, 0)

    return lambda rows, step, x: run(model, weights(rows), x, how=how)


def _entropy(probs: Tensor) -> Tensor:
    return (-torch.xlogy(probs, probs)).sum(-1)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
