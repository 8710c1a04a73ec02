"""Predictive statistics of each input, from the outputs of S sampled networks.

Each statistic is a mean over networks, a log-mean-exp or a variance. Statistics of n networks and of m others
combine to those of all, so the outputs themselves need not be kept. With means a and b, and squared
deviations A and B from them (Chan, Golub and LeVeque, 1979),

    mean = a + (b − a) m / (n + m)
    deviations = A + B + (b − a)² n m / (n + m)
    log-mean-exp = logaddexp(a + log n, b + log m) − log(n + m)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, TypeAlias, final, get_args

import torch
from torch import Tensor, nn

from posterity.arguments import described, is_dense

Mode: TypeAlias = Literal["average", "mean", "single", "vote"]
MODES: tuple[Mode, ...] = get_args(Mode)


@final
@dataclass(frozen=True)
class Classes:
    """Where outputs ``[B, ...]`` have their classes.

    Attributes:
        dim: Axis of the classes in outputs that are not ``[B, C]``.
        binary: Whether outputs are one logit, ``[B]`` or ``[B, 1]``: that of the second of two classes.
    """

    dim: int | None = None
    binary: bool = False

    def axis(self, shape: Iterable[int]) -> int:
        """That of the classes of outputs of a shape, from the end: whether S is in front or not."""
        outputs = list(shape)
        if self.binary and len(outputs) == 1:
            return -1
        if self.dim is None and len(outputs) != 2:
            raise ValueError(
                f"outputs {outputs} may have classes on several axes: give class_dim=, such as 1 for "
                "[B, C, H, W]; for regression see .mean and .variance"
            )
        axis = -1 if self.dim is None else self.dim
        axis -= len(outputs) if axis > 0 else 0
        if not -len(outputs) < axis < 0:
            raise ValueError(f"class_dim={self.dim} is not an axis of classes in outputs {outputs}")
        if (outputs[axis] == 1) != self.binary:
            raise ValueError(
                f"outputs {outputs} have {outputs[axis]} on the axis of classes: probabilities need "
                "two or more logits, or one with binary=True; for several labels of an example use "
                "predict(..., output=torch.sigmoid).mean; for regression see .mean and .variance"
            )
        return axis

    def logits(self, samples: Tensor) -> Tensor:
        """Logits of all classes of outputs ``[S, B, ...]``, in single precision at least."""
        logits = _wide(samples)
        if self.binary:  # softmax(0, logit) is (1 − sigmoid(logit), sigmoid(logit))
            axis = self.axis(samples.shape[1:])
            logits = logits[..., None] if logits.dim() == 2 else logits
            logits = torch.cat([torch.zeros_like(logits), logits], axis)
        return logits


@final
@dataclass(frozen=True)
class Prediction:
    """A prediction for B inputs, from the outputs of S sampled networks.

    Args:
        outputs: The networks' outputs ``[S, B, ...]``; for classification, logits ``[S, B, C]``. Results from
            half-precision outputs, as under autocast, are computed in single precision. Or statistics of the
            outputs.
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

    outputs: Tensor | Statistics
    mode: Mode = "average"
    class_dim: int | None = None
    binary: bool = False

    def __post_init__(self) -> None:
        if not (isinstance(self.outputs, Statistics) or is_dense(self.outputs)):
            raise TypeError(f"outputs must be a dense tensor, not {described(self.outputs)}")
        if not isinstance(self.mode, str) or self.mode not in MODES:
            raise ValueError(f"mode must be one of {', '.join(MODES)}, not {described(self.mode)}")

    def __repr__(self) -> str:
        shape = list(self.outputs.shape[1:] if isinstance(self.outputs, Tensor) else self.outputs.shape)
        more = "" if isinstance(self.outputs, Tensor) else ", keep_samples=False"
        more += "" if self.class_dim is None else f", class_dim={self.class_dim}"
        more += ", binary=True" if self.binary else ""
        return f"Prediction(networks={self.networks}, outputs={shape}, mode={self.mode!r}{more})"

    @property
    def samples(self) -> Tensor:
        """The outputs of every network ``[S, B, ...]``, if they were kept."""
        if isinstance(self.outputs, Tensor):
            return self.outputs
        size = self.networks * self.outputs.shape.numel() * self.outputs.dtype.itemsize / 2**30
        raise ValueError(
            f"the outputs of all {self.networks} networks, {size:.2g} GiB, were not kept: call "
            "predict(..., keep_samples=True)"
        )

    @property
    def networks(self) -> int:
        """The number of networks, S."""
        return len(self.outputs) if isinstance(self.outputs, Tensor) else self.outputs.networks

    @property
    def sample_probs(self) -> Tensor:
        """Class probabilities of every sampled network, ``[S, B, C]``."""
        return self._classes.logits(self.samples).softmax(self._axis)

    @property
    def probs(self) -> Tensor:
        """Class probabilities by the chosen mode.

        ``"average"`` and ``"mean"`` give ``[B, C]``; ``"vote"`` the share of votes ``[B, C]``;
        ``"single"`` every network's own ``[S, B, C]``.
        """
        if self.mode == "single":
            return self.sample_probs
        return self.vote if self.mode == "vote" else self._statistic("probs")

    @property
    def log_probs(self) -> Tensor:
        """Logarithms of ``probs``, from the logits: finite even where a probability underflows."""
        if self.mode == "vote":
            return self.vote.log()
        if self.mode == "single":
            return self._classes.logits(self.samples).log_softmax(self._axis)
        return self._statistic("log_probs")

    @property
    def label(self) -> Tensor:
        """The class with the highest probability."""
        return self.probs.argmax(self._axis)

    @property
    def vote(self) -> Tensor:
        """Share of the sampled networks that choose each class, ``[B, C]``."""
        return self._statistic("votes") / self.networks

    @property
    def entropy(self) -> Tensor:
        """Entropy of the averaged probabilities, in nats: all uncertainty about the label."""
        return _entropy(self._statistic("probs"), self._axis)

    @property
    def expected_entropy(self) -> Tensor:
        """Mean entropy of the single networks: the uncertainty that more data would not remove."""
        return self._statistic("expected_entropy")

    @property
    def mutual_information(self) -> Tensor:
        """Entropy minus expected entropy: disagreement between networks, which more data would reduce."""
        return (self.entropy - self.expected_entropy).clamp_min(0.0)

    @property
    def mean(self) -> Tensor:
        """Regression: the average output."""
        return self._statistic("mean")

    @property
    def variance(self) -> Tensor:
        """Regression: epistemic variance of the output over weight samples; 0 for a single one."""
        return self._statistic("deviations") / max(1, self.networks - 1)

    @property
    def _classes(self) -> Classes:
        return Classes(self.class_dim, self.binary)

    @property
    def _axis(self) -> int:
        outputs = self.outputs
        return self._classes.axis(outputs.shape[1:] if isinstance(outputs, Tensor) else outputs.shape)

    def _statistic(self, name: str) -> Tensor:
        if name not in _OF_OUTPUTS:
            _ = self._axis  # refused if there are no classes
        if isinstance(self.outputs, Statistics):
            return self.outputs.of(name, self._classes)
        return _statistic(name, self.outputs, self._classes)


@final
class Statistics:
    """The statistics of a prediction, without its outputs ``[S, B, ...]``.

    Args:
        samples: Outputs of some networks.
        classes: The axis of their classes.

    Attributes:
        networks: Their number, S.
        shape: That of one network's outputs, ``[B, ...]``.
        dtype: That of results computed from the outputs.

    Example:
        >>> outputs = torch.tensor([[[1.0]], [[3.0]], [[5.0]]])
        >>> found = Statistics(outputs[:2], Classes())
        >>> found.add(Statistics(outputs[2:], Classes()))
        >>> p = Prediction(found)
        >>> p.networks, p.mean, p.variance
        (3, tensor([[3.]]), tensor([[4.]]))
    """

    def __init__(self, samples: Tensor, classes: Classes) -> None:
        self.networks, self.shape = len(samples), samples.shape[1:]
        self.dtype, self._classes = _wide(samples[:0]).dtype, classes
        names = list(_OF_OUTPUTS)
        with suppress(ValueError):  # outputs of regression have no classes; who asks for any is told so
            classes.axis(self.shape)
            names += _OF_LOGITS
        # In double precision where supported: a thousand networks may be added one by one.
        dtype = self.dtype if samples.device.type == "mps" else torch.float64
        self._values = {name: _statistic(name, samples, classes).to(dtype) for name in names}

    def settle(self, room: Callable[[Tensor], Tensor]) -> Statistics:
        """Move the values to other memory, such as a :class:`Room`; returns self."""
        self._values = {name: room(value) for name, value in self._values.items()}
        return self

    def of(self, name: str, classes: Classes) -> Tensor:
        """One of the statistics."""
        if classes != self._classes:
            raise ValueError(
                "the outputs were not kept, so the classes of predict() are fixed: give class_dim= "
                "and binary= to predict(), or keep_samples=True"
            )
        return self._values[name].to(self.dtype)

    def add(self, other: Statistics) -> None:
        """Add the statistics of other networks, for the same inputs."""
        n, m = self.networks, other.networks
        mine, theirs = self._values, other._values
        gaps = theirs["mean"] - mine["mean"]  # before the means move
        for name, (a, b) in {name: (mine[name], theirs[name]) for name in mine}.items():
            if name == "log_probs":
                found = torch.logaddexp(a + math.log(n), b + math.log(m)) - math.log(n + m)
            elif name == "votes":  # counted, so that ties stay ties
                found = a + b
            elif name == "deviations":
                found = a + b + gaps.square() * (n * m / (n + m))
            else:
                gap = b - a  # equal means stay exactly so; infinite ones have no gap
                found = torch.where(gap.isfinite(), a + gap * (m / (n + m)), a + b)
            self._values[name].copy_(found)
        self.networks = n + m
        self.dtype = torch.promote_types(self.dtype, other.dtype)

    @staticmethod
    def joined(parts: list[Statistics]) -> Statistics:
        """Join the statistics of several parts of the inputs; the parts are emptied."""
        whole = parts[0]
        for part in parts:
            part._values = {name: value.to(part.dtype) for name, value in part._values.items()}
        for name in list(whole._values):
            whole._values[name] = torch.cat([part._values.pop(name) for part in parts])
        whole.shape = torch.Size([sum(part.shape[0] for part in parts), *whole.shape[1:]])
        return whole


@final
class Room:
    """Large pieces of memory for the results of many batches.

    A CPU's allocator would put each result behind the batch's temporary tensors, whose memory it then cannot
    give back or use for the next batch.

    Example:
        >>> room = Room()
        >>> room(torch.ones(2)), room(torch.zeros(1))
        (tensor([1., 1.]), tensor([0.]))
    """

    def __init__(self) -> None:
        self._left: dict[torch.dtype, Tensor] = {}

    def __call__(self, value: Tensor) -> Tensor:
        """A copy of a tensor."""
        if value.device.type != "cpu":
            return value
        left = self._left.get(value.dtype)
        if left is None or len(left) < value.numel():  # what is not written to takes no memory
            left = torch.empty(max(value.numel(), 1 << 23), dtype=value.dtype)
        self._left[value.dtype] = left[value.numel() :]
        return left[: value.numel()].view(value.shape).copy_(value)


# Numbers of networks' outputs for which a statistic is computed at once.
_AT_ONCE = 1 << 24


def _statistic(name: str, samples: Tensor, classes: Classes) -> Tensor:
    """One statistic of outputs ``[S, B, ...]``, computed for some inputs at a time to save memory."""
    size = max(1, _AT_ONCE // max(1, samples[:, :1].numel()))
    if size < samples.shape[1]:
        return torch.cat([_statistic(name, each, classes) for each in torch.split(samples, size, 1)])
    if name in _OF_OUTPUTS:
        return _OF_OUTPUTS[name](_wide(samples))
    return _OF_LOGITS[name](classes.logits(samples), classes.axis(samples.shape[1:]))


def _log_mean_probs(logits: Tensor, axis: int) -> Tensor:
    return logits.log_softmax(axis).logsumexp(0) - math.log(len(logits))


def _votes(logits: Tensor, axis: int) -> Tensor:
    votes = nn.functional.one_hot(logits.argmax(axis), logits.shape[axis]).movedim(-1, axis)
    # A network with NaN among its logits has no vote.
    return torch.where(logits.isnan().any(axis, keepdim=True), torch.nan, votes.to(logits)).sum(0)


def _entropy(probs: Tensor, axis: int) -> Tensor:
    return (-torch.xlogy(probs, probs)).sum(axis)


def _wide(samples: Tensor) -> Tensor:
    return samples.to(torch.promote_types(samples.dtype, torch.float32))


_OF_OUTPUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda outputs: outputs.mean(0),
    "deviations": lambda outputs: outputs.var(0, correction=0) * len(outputs),
}
# Of logits [S, B, C], with the axis of the classes.
_OF_LOGITS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "probs": lambda logits, axis: logits.softmax(axis).mean(0),
    "log_probs": _log_mean_probs,
    "votes": _votes,
    "expected_entropy": lambda logits, axis: _entropy(logits.softmax(axis), axis).mean(0),
}
