"""Fisher matrices of a model on a batch: empirical, by sampled labels, or exact.

All three are sums over backward passes of some *columns*, gradients c of a loss in the model's outputs f.
With p = softmax(f) for classes, or a Gaussian of variance 1 around f, the mean over examples of
Jᵀ (Σ_c c cᵀ) J is

    empirical   c = p − onehot(y), or f − y                        the data's labels
    mc          c = (p − onehot(y_m)) / √M, or eps_m / √M          M labels drawn from the model itself
    exact       c = √p_j (onehot(j) − p), or onehot(j), for all j  a root of the Hessian of the loss in f

The exact one is the generalised Gauss-Newton matrix, and the expectation of ``mc``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from posterity import noise
from posterity.curvature.collector import Squares
from posterity.curvature.factors import Factors
from posterity.curvature.results import Curvature
from posterity.inputs import Inputs, Pick, called, tensor_of
from posterity.layers import wide_dtype
from posterity.names import NameFilter, select
from posterity.torch_private import AnyBatchNorm

Kind: TypeAlias = Literal["empirical", "mc", "exact"]
Structure: TypeAlias = Literal["diagonal", "kronecker"]
Likelihood: TypeAlias = Literal["classification", "regression"]


def fisher(
    model: nn.Module,
    x: Inputs,
    y: Tensor | None = None,
    *,
    kind: Kind = "exact",
    structure: Structure = "diagonal",
    likelihood: Likelihood = "classification",
    names: NameFilter = "*",
    draws: int = 1,
    seed: int | None = None,
    step: int = 0,
    batch_dim: int = 0,
    fallback: Literal["vmap"] | None = None,
    chunk: int = 32,
    output: Pick | None = None,
) -> Curvature:
    """The per-example Fisher matrix, averaged over a batch, at the model's parameters and in its mode.

    ``p.grad`` is not changed. Call ``model.eval()`` first, unless you want BatchNorm's batch statistics and
    dropout.

    Args:
        model: A module that gives logits or means, ``[B, C]``.
        x: A batch of inputs, as for :func:`~posterity.predict`.
        y: Labels ``[B]``, or targets ``[B, C]``; for the empirical Fisher only.
        kind: ``"empirical"``, ``"mc"`` with sampled labels, or ``"exact"``, one backward pass per output.
        structure: ``"diagonal"`` or ``"kronecker"``, see :class:`~posterity.curvature.Factors`.
        likelihood: ``"classification"``, or ``"regression"`` with noise of variance 1.
        names: Filter of the parameters' names.
        draws: Number of labels sampled for each example.
        seed: Seed of sampled labels; without one they differ at each call.
        step: Chooses the labels together with the seed: pass different ones for different batches.
        batch_dim: As for :class:`~posterity.curvature.Squares`.
        fallback: ``"vmap"`` for the diagonal of parameters that collectors refuse, see :func:`vmap_squares`.
        chunk: Examples at once in that fallback.
        output: Which of the model's outputs, as for :func:`~posterity.predict`.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
        >>> sorted(fisher(model, torch.randn(8, 4)).diagonal)
        ['0.bias', '0.weight', '2.bias', '2.weight']
        >>> fisher(model, torch.randn(8, 4), structure="kronecker").kronecker["0.weight"].A.shape
        torch.Size([5, 5])
    """
    _check(kind, structure, likelihood, fallback, draws, chunk)
    if (kind == "empirical") != (y is not None):
        raise ValueError(
            "y is needed for kind='empirical' and unused by the other kinds: pass it for that kind only"
        )
    params = chosen(model, names)
    collector = (Squares if structure == "diagonal" else Factors)(
        params, batch_dim=batch_dim, strict=fallback is None
    )
    with torch.enable_grad(), collector:
        out = checked(called(model, x, output), y, likelihood)
        if seed is None:
            seed, step = noise.fresh()
        columns = list(_columns(out.detach(), y, kind, likelihood, draws, seed, step))
        wanted = list(params.values())
        for number, column in enumerate(columns, 1):
            keep = number < len(columns)
            torch.autograd.grad(out, wanted, column / len(out), retain_graph=keep, allow_unused=True)
    found = Curvature({}, {})
    if collector.examples:
        mean = collector.mean(len(out))
        found = mean if isinstance(mean, Curvature) else Curvature({}, mean)
    if collector.refused:
        if not isinstance(x, Tensor):
            raise TypeError(
                "fallback='vmap' supports a single input tensor only: use names= to leave out the "
                "refused parameters"
            )
        rest = {name: params[name] for name in collector.refused}
        examples = x.movedim(batch_dim, 0)

        def loss(call: Callable[[Tensor], Tensor], example: Tensor, column: Tensor) -> Tensor:
            return (tensor_of(call(example.movedim(0, batch_dim)), output) * column).sum()

        for column in columns:
            for name, terms in vmap_squares(model, loss, (examples, column), rest, chunk=chunk).items():
                found.diagonal[name] = found.diagonal.get(name, 0) + terms
    return found


def vmap_squares(
    model: nn.Module,
    loss_fn: Callable[..., Tensor],
    batch: tuple[Tensor, ...],
    params: Mapping[str, Tensor] | None = None,
    *,
    chunk: int = 32,
) -> dict[str, Tensor]:
    """(1/B) Σ_i g_i² of any model, by ``vmap`` over examples: slow, and holds all gradients of a chunk.

    Args:
        model: Any module in which examples do not interact.
        loss_fn: ``loss_fn(call, *batch)`` returns the mean loss, with ``call`` in place of the model.
        batch: Tensors with examples on the first axis.
        params: Weights by name; the model's own trainable ones if not given.
        chunk: Examples at once.

    Example:
        >>> model = nn.Linear(3, 3)
        >>> def loss_fn(call, x):  # uses its weight twice
        ...     return call(call(x).tanh()).square().mean()
        >>> vmap_squares(model, loss_fn, (torch.randn(4, 3),))["weight"].shape
        torch.Size([3, 3])
    """
    if any(
        isinstance(module, AnyBatchNorm) and (module.training or module.running_mean is None)
        for module in model.modules()
    ):
        raise ValueError(
            "single examples have no batch statistics: call model.eval(), with running statistics in every "
            "BatchNorm, or do without the fallback"
        )
    if params is None:
        params = {name: p for name, p in model.named_parameters() if p.requires_grad}

    def loss(weights: Mapping[str, Tensor], *example: Tensor) -> Tensor:
        def call(*args: Any, **kwargs: Any) -> Any:
            return functional_call(model, dict(weights), args, kwargs)

        return loss_fn(call, *(each[None] for each in example))

    if not len(batch[0]):
        raise ValueError("a batch has no examples: skip empty batches")
    each = vmap(grad(loss), in_dims=(None, *[0] * len(batch)), randomness="different")
    weights = {name: p.detach() for name, p in params.items()}
    sums = {name: torch.zeros_like(p, dtype=wide_dtype(p.dtype)) for name, p in weights.items()}
    # No graph of other parameters, which are not detached, is to be held.
    with torch.no_grad(), warnings.catch_warnings():
        # Operations without a batching rule still run, one example after another.
        warnings.filterwarnings("ignore", message="There is a performance drop")
        for part in zip(*(torch.split(tensor, chunk) for tensor in batch), strict=True):
            for name, terms in each(weights, *part).items():
                sums[name] += terms.to(sums[name].dtype).square().sum(0)
    return {name: total / len(batch[0]) for name, total in sums.items()}


def chosen(model: nn.Module, names: NameFilter) -> dict[str, Tensor]:
    """The parameters that a filter picks, among those that require a gradient."""
    params = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not params:
        raise ValueError("no parameter of the model requires a gradient: call model.requires_grad_() first")
    picked = select(params, names)
    if not picked:
        raise ValueError("names= matches no parameter that requires a gradient: choose another pattern")
    if torch.is_inference_mode_enabled() or any(p.is_inference() for p in model.parameters()):
        raise RuntimeError(
            "curvature needs gradients: compute it outside torch.inference_mode(), for a model that "
            "was built outside it"
        )
    return {name: p for name, p in params.items() if name in picked}


def checked(out: Tensor, y: Tensor | None, likelihood: Likelihood) -> Tensor:
    """The outputs, after checking them and the targets, if any, against the likelihood."""
    classes = likelihood == "classification"
    if out.dim() != 2 or not len(out) or out.shape[1] <= classes:
        wanted = "[B, C], for two classes or more" if classes else "[B, C]"
        raise ValueError(f"the model must give outputs {wanted}, not {list(out.shape)}")
    if y is None:
        return out
    if y.shape != (out.shape[:1] if classes else out.shape):
        raise ValueError(
            f"y has shape {list(y.shape)}, outputs {list(out.shape)}: give labels [B], one class for each "
            "example, for classification, or targets [B, C] for regression"
        )
    if classes and (y.is_floating_point() or not bool(((y >= 0) & (y < out.shape[1])).all())):
        raise ValueError(f"labels must be whole numbers from 0 to {out.shape[1] - 1}, one for each output")
    return out


@torch.no_grad()
def _columns(
    out: Tensor, y: Tensor | None, kind: Kind, likelihood: Likelihood, draws: int, seed: int, step: int
) -> Iterator[Tensor]:
    """Gradients ``[B, C]`` of losses in the outputs, in single precision at least."""
    out = out if out.dtype == torch.float64 else out.float()
    probs, classes, labels = out.softmax(-1), out.shape[-1], likelihood == "classification"
    like: dict[str, Any] = {"dtype": out.dtype, "device": out.device}
    if y is not None:
        yield probs - F.one_hot(y.long(), classes) if labels else out - y
    elif kind == "exact":
        for j, one in enumerate(torch.eye(classes, **like)):
            yield probs[:, j, None].sqrt() * (one - probs) if labels else one.expand_as(out)
    else:
        shape = out.shape[:1] if labels else out.shape
        at: dict[str, Any] = {"block": "labels", "domain": noise.Domain.LABELS, "seed": seed, "step": step}
        for eps in noise.normal(range(draws), shape, **at, **like):
            if labels:
                passed = probs.cumsum(-1) < torch.special.ndtr(eps)[:, None]
                label = passed.sum(-1).clamp_max(classes - 1)
                eps = probs - F.one_hot(label, classes)
            yield eps * draws**-0.5


def _check(kind: str, structure: str, likelihood: str, fallback: str | None, draws: int, chunk: int) -> None:
    for name, value, known in (
        ("kind", kind, get_args(Kind)),
        ("structure", structure, get_args(Structure)),
        ("likelihood", likelihood, get_args(Likelihood)),
        ("fallback", fallback, (None, "vmap")),
    ):
        if value not in known:
            raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}, not {value!r}")
    if draws < 1 or chunk < 1:
        raise ValueError(f"draws and chunk must be at least 1, not {draws} and {chunk}")
