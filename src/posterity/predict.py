"""Predictive samples, or their statistics, from a posterior, dropout or an ensemble."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial, reduce
from itertools import product
from typing import TYPE_CHECKING, Protocol, final, runtime_checkable

import torch
from torch import Tensor, nn

from posterity.arguments import FLAG, PICK, WHOLE, described, instance, takes
from posterity.distributed import World
from posterity.inputs import (
    Inputs,
    Pick,
    arguments,
    batches,
    called,
    is_loader,
    length,
    mapped,
    random_numbers_kept,
    rows_of,
    shown,
)
from posterity.mc import How, chunks, run_replica
from posterity.names import inner
from posterity.posterior.base import Networks, Posterior
from posterity.prediction import MODES as MODES
from posterity.prediction import Classes, Prediction, Room, Statistics
from posterity.prediction import Mode as Mode
from posterity.replica import evaluating
from posterity.variational import Variational

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# Outputs that take fewer bytes than this are kept unless the call says otherwise.
_SMALL = 1 << 26
# Numbers, of drawn weights and of a batch's inputs for each network, that are held at once.
_AT_ONCE = 1 << 28


@runtime_checkable
class Predictive(Protocol):
    """A source of predictive samples: a posterior, :class:`~posterity.MCDropout`, or your own class."""

    def check(self, model: nn.Module) -> object:
        """Raise unless it can be used with the model."""

    def networks(self, model: nn.Module, samples: range | None, seed: int) -> Networks:
        """The networks of the given numbers; without numbers, the one at the mean."""


@takes(
    model=instance("a module, or a list of them", nn.Module, Sequence),
    samples=WHOLE,
    batch_size=WHOLE,
    seed=WHOLE,
    chunk=WHOLE,
    keep_samples=FLAG,
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
    keep_samples: bool | None = None,
    progress: bool = False,
    mesh: DeviceMesh | None = None,
) -> Prediction:
    """Predict with sampled networks: weights of a posterior, masks of dropout, or models of an ensemble.

    Networks run in evaluation mode, in replicas of the model: the model itself is never changed, so many
    threads can predict with it at once.

    Args:
        model: The module, or the :class:`~posterity.Variational` around it; parameters that the posterior
            does not name keep their values. Without a posterior, a list of models, of any architectures, is
            a deep ensemble, ``predict([net1, net2], x=x)``, and one model predicts with its own weights.
        posterior: The source of weights, including the means: the model's own values of these weights are not
            used, so averaged weights (EMA) need their own posterior. Or :class:`~posterity.MCDropout`, for
            the model's own weights under masks of its dropout layers; or None.
        x: Inputs, as many as you like: a tensor or NumPy array; a tuple or dict of them, for models that
            take several, called as ``model(*x)`` or ``model(**x)``; or a DataLoader, whose predictions come
            in the order of its batches. They are moved to the model's device.
        samples: Sampled networks S; the same ones for every batch. An ensemble has one for each model.
        mode: ``"average"`` of probabilities, ``"mean"`` weights (one network, nothing dropped), ``"single"``
            for each network by itself, or ``"vote"``.
        batch_size: Inputs per batch, unless a loader decides. With dropout every input has its own masks,
            which depend on this size.
        seed: Chooses the networks; the same seed gives the same prediction.
        how: ``"stack"`` runs the networks in one vectorised pass, ``"loop"`` one after another. Dropout and
            ensembles are always run one after another.
        chunk: At most this many networks drawn and run at once, to cap memory. If not given, as many as have
            2²⁸ numbers together, weights and inputs.
        inputs: The part of a loader's batch that goes into the model: a key, an index or a function. By
            default all but the targets: the last element of a tuple or list of two or more, or a mapping's
            ``"labels"``.
        output: Which of the model's outputs: a key, an index or a function. Without it the model must return
            a tensor, or something with ``logits``.
        class_dim: Axis of the classes in outputs that are not ``[B, C]``: 1 for ``[B, C, H, W]``.
        binary: Whether the model gives one logit, ``[B]`` or ``[B, 1]``, that of the second of two classes.
        linearise: Whether to use the model that is linear in its weights around the posterior's means,
            f(x, μ) + J(x) (θ − μ). If not given, as ``posterior.linearised`` says: yes for those of
            :func:`laplace.fit() <posterity.laplace.fit>`, which are made for that model.
        keep_samples: Whether to keep the outputs of every network, ``[S, B, ...]``, for ``.samples`` and
            ``.sample_probs``. If not, statistics are taken batch by batch and all else is there. If not
            given, they are kept where all of them take at most 64 MiB, or with ``mode="single"``.
        progress: Show a progress bar (needs the extra ``lab``).
        mesh: Processes that share the batches, one each in turn; all of them make this call, with the same
            inputs, and all get the whole prediction.

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
    if mode == "single" and keep_samples is False:
        raise ValueError("mode='single' needs the outputs of every network: leave keep_samples=False out")
    models, source = _sources(model, posterior)
    replicas = set(map(id, models))
    if linearise and not isinstance(source, Posterior):
        kind = "an ensemble" if posterior is None else f"a {type(source).__name__}"
        raise TypeError(f"linearise=True needs a posterior over weights, which {kind} is not")
    world = None if mesh is None else World(mesh)
    if world is not None:
        world.refuse_others({"samples": samples, "seed": seed, "batch_size": batch_size}, "predict's")
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
        if id(model) not in replicas:  # one that the source of networks has
            model = evaluating(model)
        around = None if linearise is False else centre or around
        args, kwargs = arguments(batch)
        with _noted(model, batch):
            if not weights:
                return called(model, batch, output)[None]
            return run_replica(model, weights, *args, how=how, output=output, around=around, **kwargs)

    some: list[range | None] = [None]
    if mode != "mean":
        some = [*chunks(samples, _at_once(models[0], x, batch_size) if chunk is None else chunk)]
    outputs = _Outputs(Classes(class_dim, binary), True if mode == "single" else keep_samples)
    # No inference_mode(): tensors that a model stores in it could never be used in training.
    with torch.no_grad(), random_numbers_kept(*models):
        numbered = (
            (step, batch)
            for step, batch in enumerate(batches(x, batch_size, inputs))
            if world is None or step % world.size == world.rank
        )
        # A loader is read once, even if networks must be drawn again; other inputs are looped over per
        # network.
        read_once = ((rows, part) for part in numbered for rows in some)
        order = read_once if is_loader(x) else product(some, numbered)
        for rows, (step, batch) in shown(order, "predicting") if progress else order:
            found = networks(rows)(partial(run_batch, batch), step)
            outputs.add(step, rows_of(found, batch))
    if world is not None:
        outputs.share(world, next(models[0].parameters()).device)
    return Prediction(outputs.whole(), mode, class_dim, binary)


def _sources(
    model: nn.Module | Sequence[nn.Module], posterior: Predictive | None
) -> tuple[list[nn.Module], Predictive]:
    """Replicas of the models in evaluation mode, and what gives networks of them."""
    given = [model] if isinstance(model, nn.Module) else list(model)
    if not all(isinstance(each, nn.Module) for each in given):
        raise TypeError("an ensemble must be a list of modules only")
    models = [evaluating(inner(each.module if isinstance(each, Variational) else each)) for each in given]
    source = _Ensemble(models) if posterior is None else posterior
    if len(models) != 1 and (posterior is not None or not models):
        raise ValueError(f"pass one model and its posterior, or a list of models alone, not {len(models)}")
    if isinstance(source, type) or not isinstance(source, Predictive):  # a class has the methods, too
        raise TypeError(f"a {type(source).__name__} cannot give networks: pass a posterior or MCDropout()")
    source.check(models[0])
    return models, source


@contextmanager
def _noted(model: nn.Module, batch: Inputs) -> Iterator[None]:
    """Inside, an error of torch gets a note that says what the model was given."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        shapes: list[str] = []
        mapped(batch, lambda each: shapes.append(str(list(each.shape))))
        ran = f"{type(model).__name__} ran on inputs of shape {', '.join(shapes)}"
        error.add_note(f"{ran}: pass predict() what the model takes by itself, as model(x)")
        raise


def _at_once(model: nn.Module, x: Inputs, batch_size: int) -> int:
    """How many networks to draw and run at once."""
    size = sum(p.numel() for p in model.parameters())
    if not is_loader(x):
        sizes: list[int] = []
        mapped(x, lambda each: sizes.append(math.prod(each.shape)))
        size += min(batch_size, rows := length(x)) * sum(sizes) // rows
    return max(1, _AT_ONCE // max(1, size))


@final
class _Outputs:
    """Networks' outputs by batch, or statistics of them.

    Args:
        classes: Where outputs have their classes.
        keep: Whether the outputs are kept; None for as long as they are few.
    """

    def __init__(self, classes: Classes, keep: bool | None) -> None:
        self._classes, self._keep = classes, keep
        self._bytes = 0
        self._kept: dict[int, list[Tensor]] = {}
        self._statistics: dict[int, Statistics] = {}
        self._room = Room()

    def add(self, step: int, found: Tensor) -> None:
        """Outputs ``[s, B, ...]`` of some more networks for the batch of a number."""
        self._bytes += found.numel() * found.itemsize
        self._kept.setdefault(step, []).append(found)
        self._reduce()

    def share(self, world: World, device: torch.device) -> None:
        """Take in those that other processes have."""
        away, back = partial(Tensor.to, device="cpu", copy=True), partial(Tensor.to, device=device)
        kept = {step: [away(each) for each in parts] for step, parts in self._kept.items()}
        mine = kept, {step: each.settle(away) for step, each in self._statistics.items()}, self._bytes
        everything = world.gathered(mine)
        found = {step: part for kept, _, _ in everything for step, part in kept.items()}
        self._kept = {step: [back(each) for each in found[step]] for step in sorted(found)}
        several = {step: part for _, statistics, _ in everything for step, part in statistics.items()}
        self._statistics = {step: each.settle(back) for step, each in several.items()}
        self._bytes = sum(size for _, _, size in everything)
        self._reduce()

    def _reduce(self) -> None:
        """Leave statistics alone of what is not to be kept."""
        large = bool(self._statistics) or self._bytes > _SMALL
        if self._keep is False or (self._keep is None and large):
            self._keep = False
            while self._kept:
                number, parts = self._kept.popitem()
                for each in parts:
                    self._take(number, Statistics(each, self._classes))

    def _take(self, step: int, more: Statistics) -> None:
        if step in self._statistics:
            self._statistics[step].add(more)
        else:
            self._statistics[step] = more.settle(self._room)

    def whole(self) -> Tensor | Statistics:
        """Those of all networks for all inputs."""
        if self._statistics:
            return Statistics.joined([self._statistics[step] for step in sorted(self._statistics)])
        parts = [*self._kept.values()]
        if len(parts) == len(parts[0]) == 1:
            return parts[0][0]
        dtype = reduce(torch.promote_types, {each.dtype for part in parts for each in part})
        rows, networks = sum(part[0].shape[1] for part in parts), sum(map(len, parts[0]))
        whole = parts[0][0].new_empty((networks, rows, *parts[0][0].shape[2:]), dtype=dtype)
        self._kept.clear()
        at = 0
        while parts:  # memory is taken as it is written to, and what was copied goes
            part, first = parts.pop(0), 0
            size = part[0].shape[1]
            for each in part:
                whole[first : first + len(each), at : at + size] = each
                first += len(each)
            at += size
        return whole


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
