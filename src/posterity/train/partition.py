"""The blocks of a gradient training step: which leaves are joined in flat buffers, and which stay alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from posterity.optim.state import FlatGroup, zero
from posterity.posterior import Density, DiagonalGaussian
from posterity.posterior.divergence import elementwise
from posterity.posterior.end_to_end import EndToEnd, alike
from posterity.posterior.matching import Prior
from posterity.train.blocks import Diagonal, DrawnDiagonal
from posterity.train.estimated import EstimatedDiagonal, EstimatedOther
from posterity.train.families import DrawnOther, Other
from posterity.variational import Variational

# Leaves with more numbers than this stay alone on a CPU, where copying into a buffer costs more than calls.
_LARGE = 1 << 16


class Blocks(NamedTuple):
    """Everything that a step updates.

    Attributes:
        diagonal: Diagonal leaves in flat buffers.
        other: Leaves of other families, joined by kind; and those with priors of several weights.
        plain: Parameters that are not drawn, in flat buffers.
    """

    diagonal: list[Diagonal]
    other: list[Other]
    plain: list[FlatGroup]

    def drawn(self) -> list[Diagonal | Other]:
        """Blocks of the posterior."""
        return [*self.diagonal, *self.other]

    def flats(self) -> list[FlatGroup]:
        """All flat buffers."""
        return [*(each.flat for each in self.diagonal), *self.plain]


def blocks_of(model: Variational, priors: Mapping[str, Prior]) -> Blocks:
    """The blocks of a model, given the priors of its posterior's blocks."""
    q, estimators = model.posterior, model.estimators
    params: dict[str, Tensor] = dict(model.module.named_parameters())
    at_draw = model.one_draw  # where some layers have no draw of their weights, no KL is estimated at one
    flat = {
        name: leaf
        for name, leaf in q.blocks.items()
        if type(leaf) is DiagonalGaussian and leaf.stores_raw and elementwise(priors[name])
    }

    def alone(name: str) -> str | None:
        leaf = q.blocks[name]
        return name if leaf.device.type == "cpu" and leaf.loc.numel() > _LARGE else None

    def kind(name: str) -> object:
        leaf, prior = flat[name], priors[name]
        masks = leaf.keep is None, leaf.held is None
        family = DiagonalGaussian if isinstance(prior, DiagonalGaussian) else id(prior)
        return (*masks, family, estimators[name], alone(name))

    def other_kind(name: str) -> object:
        leaf, prior = left[name], priors[name]
        together = leaf.whole and estimators[name] == "weight" and isinstance(prior, Density)
        if leaf.kind is None or not (together and elementwise(prior)):
            return name
        return type(leaf), leaf.kind, id(prior), alone(name)

    diagonal: list[Diagonal] = []
    for number, group in enumerate(alike(flat, kind)):
        given = number, group, [params[name] for name in group], [priors[name] for name in group]
        estimator = estimators[next(iter(group))]
        one = estimator == "weight"  # one draw for all examples
        diagonal.append(DrawnDiagonal(*given, at_draw) if one else EstimatedDiagonal(*given, estimator))
    left = {name: leaf for name, leaf in q.blocks.items() if name not in flat}
    other: list[Other] = []
    for some in alike(left, other_kind):
        name = next(iter(some))
        block = EndToEnd(some), [[params[each] for each in q.tensors[own]] for own in some], priors[name]
        one = estimators[name] == "weight"
        other.append(DrawnOther(*block, at_draw) if one else EstimatedOther(*block, estimators[name]))
    drawn = q.shapes()
    return Blocks(diagonal, other, _plain({name: p for name, p in params.items() if name not in drawn}))


def _plain(params: Mapping[str, Tensor]) -> list[FlatGroup]:
    """Parameters in flat buffers, by device and dtype."""
    kinds: dict[object, dict[str, Tensor]] = {}
    for name, p in params.items():
        kinds.setdefault((p.device, p.dtype), {})[name] = p
    return [
        FlatGroup(number, list(some), list(some.values()), {p: {"step": zero()} for p in some.values()})
        for number, some in enumerate(kinds.values())
    ]
