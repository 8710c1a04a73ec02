"""The estimator of each block of a posterior, and the values that parameters get in a forward pass.

:mod:`posterity.layers.estimators` applies the estimators in layers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from itertools import chain
from typing import Any, final, get_args

import torch
from torch import Tensor, nn
from torch.func import functional_call

from posterity import noise
from posterity.flat import of_names
from posterity.layers.stacks import inside, level_of, stack
from posterity.layers.stand_ins import Drawn, Estimator, StandIn
from posterity.names import first_match, refuse_unmatched
from posterity.noise import Domain
from posterity.posterior import DiagonalGaussian, Factorised, Leaf
from posterity.posterior.end_to_end import EndToEnd, alike
from posterity.torch_private import outermost, transforms

_ONE = torch.ones((), device="cpu")  # kernels on a GPU take it as a number


def by_block(posterior: Factorised, estimator: Estimator | Mapping[str, Estimator]) -> dict[str, Estimator]:
    """The estimator of every block; one that a block's family does not support is refused.

    Example:
        >>> import torch
        >>> from posterity import DiagonalGaussian
        >>> q = Factorised({name: DiagonalGaussian(torch.zeros(2), 0.1) for name in ("embed", "fc")})
        >>> by_block(q, {"embed": "weight", "*": "local"})
        {'embed': 'weight', 'fc': 'local'}
    """
    given = estimator if isinstance(estimator, Mapping) else {"*": estimator}
    known = get_args(Estimator)
    for each in given.values():
        if each not in known:
            raise ValueError(f"estimator must be 'weight', 'local' or 'flipout', not {each!r}")
    refuse_unmatched(given, posterior.blocks)
    found = {name: first_match(given, name) for name in posterior.blocks}
    for name, leaf in posterior.blocks.items():
        if found[name] not in leaf.estimators:
            own = " or ".join(repr(each) for each in known if each in leaf.estimators)
            raise ValueError(
                f"{name!r} cannot have estimator={found[name]!r}: a {type(leaf).__name__} has {own} (pass "
                "estimators by name patterns, in order: estimator={PATTERN: ESTIMATOR, '*': ESTIMATOR})"
            )
    return found


def together(
    posterior: Mapping[str, Leaf], estimators: Mapping[str, Estimator], kind: Callable[[str], object]
) -> list[EndToEnd]:
    """Blocks grouped by common draws: vectors, and diagonal leaves of more dimensions; others alone.

    Args:
        posterior: Leaves by block.
        estimators: Estimators by block.
        kind: The kind of a block: leaves of equal kind may be joined; None for one that stays alone.
    """

    def key(name: str) -> object:
        leaf, own = posterior[name], kind(name)
        vector = len(leaf.shape) < 2  # such as a norm's scale, which has no estimator and gets one draw
        alone = own is None or not (vector or isinstance(leaf, DiagonalGaussian))
        return name if alone else (estimators[name], own, vector)

    return list(map(EndToEnd, alike(posterior, key)))


def parameters_of(
    blocks: Sequence[EndToEnd],
    tensors: Mapping[str, Sequence[str]],
    estimators: Mapping[str, Estimator],
    samples: range,
    *,
    level: int | None = None,
    batch_dim: int,
    ahead: int = 0,
    **at: Any,
) -> dict[str, Tensor]:
    """The values that a model gets for its parameters: one draw, or a stand-in for other estimators.

    Args:
        blocks: Groups of blocks; those that are drawn together have the same estimator.
        tensors: The names of every block's tensors.
        estimators: Estimators by block.
        samples: Number of the sample, or of all samples that vmap stacks.
        level: Level of vmap, if it stacks them.
        batch_dim: The axis of the examples, for layers with several axes.
        ahead: Number of samples in other processes, which draw the same weights for other examples.
        at: Seed and step of the noise.
    """
    found: dict[str, Tensor] = {}
    served: list[tuple[Drawn, Leaf, torch.Size]] = []
    for group in blocks:
        estimator = estimators[next(iter(group.leaves))]
        draws = BlockDraws(group, estimator, samples, level, batch_dim, ahead, at)
        named = [(name, block) for block in group.leaves for name in tensors[block]]
        if estimator == "weight":
            found |= zip((name for name, _ in named), draws.values(), strict=True)
            continue
        shapes = [(leaf, shape) for leaf in group.leaves.values() for shape in leaf.shapes]
        drawn = (Drawn(*name, draws, index) for index, name in enumerate(named))
        served += [(each, *shape) for each, shape in zip(drawn, shapes, strict=True)]
    nothing: dict[tuple[torch.device, torch.dtype], Tensor] = {}
    with outermost(0):
        for each, leaf, shape in served:
            key = leaf.device, leaf.dtype
            if key not in nothing:
                nothing[key] = torch.full((), torch.nan, device=leaf.device, dtype=leaf.dtype)
            found[each.name] = StandIn.of(each, shape, nothing[key])
    return found


@final
class BlockDraws:
    """The draws of some blocks in one forward pass; see :class:`posterity.layers.stand_ins.Draws`."""

    def __init__(
        self,
        blocks: EndToEnd,
        estimator: Estimator,
        samples: range,
        level: int | None,
        batch_dim: int,
        ahead: int,
        at: Mapping[str, Any],
    ) -> None:
        self.blocks, self.estimator, self.batch_dim = blocks, estimator, batch_dim
        self._block, self._first = next(iter(blocks.leaves.items()))
        # Joined blocks have no scales.
        self.transforms, self.scaled_axis = transforms(), self._first.scaled_axis
        self._samples, self._level = samples, level
        self._by_example = range(samples.start + ahead, samples.stop + ahead)
        self._at: dict[str, Any] = {"domain": Domain.TRAIN, **at}

    def values(self) -> Sequence[Tensor]:
        """One draw of each of the blocks' tensors."""
        return self._values

    def parts(self) -> Sequence[tuple[Tensor, Tensor]]:
        """Mean and std of each tensor's weights with local, mean and deviation with flipout."""
        return self._parts

    def normal(self, name: str, shape: Sequence[int]) -> Tensor:
        """Standard normals of examples under a name; they differ between processes."""
        with self._outside():
            return self._placed(self._normal(name, shape))

    def signs(self, name: str, shape: Sequence[int]) -> Tensor:
        """The signs of such normals, 1 or -1; all signs that the last pass needed are drawn together."""
        known = self.blocks.signs
        with self._outside():
            if known.get(name) == shape:
                found = self._signs.get(name)
                if found is not None and found.shape[1:] == shape:  # otherwise drawn before the shape changed
                    return self._placed(found)
            known[name] = torch.Size(shape)
            return self._placed(_ONE.copysign(self._normal(name, shape)))

    def scales(self, examples: int) -> Tensor:
        """Scales of ``scaled_axis`` for each example, ``[examples, size]``."""
        with self._outside():
            drawn = self._normal(f"{self._block}|z", (examples, *self._first.noise_shapes["z"]))
            scales = self._first.example_scales(drawn.flatten(0, 1))
            return self._placed(scales.view(*drawn.shape[:2], scales.shape[1]))

    @cached_property
    def _signs(self) -> dict[str, Tensor]:
        known = dict(self.blocks.signs)
        layout = of_names(tuple(known), tuple(known.values()))
        like: dict[str, Any] = {"device": self._first.device, "dtype": self._first.dtype}
        values = noise.Noise(self._by_example, layout, **like, **self._at).values
        return dict(zip(known, layout.stacked(_ONE.copysign(values), len(self._by_example)), strict=True))

    def _normal(self, name: str, shape: Sequence[int]) -> Tensor:
        like: dict[str, Any] = {"device": self._first.device, "dtype": self._first.dtype}
        return noise.normal(self._by_example, shape, block=name, **like, **self._at)

    def _outside(self) -> AbstractContextManager[None]:
        """A context in which no samples are stacked, and none of the model's own transforms runs."""
        return outermost(len(self.transforms) - (self._level is not None))

    @cached_property
    def _leaf(self) -> Leaf:
        return self.blocks.leaf()

    @cached_property
    def _values(self) -> list[Tensor]:
        with self._outside():
            return self._tensors(self._leaf.draw(self._noise()))

    @cached_property
    def _parts(self) -> list[tuple[Tensor, Tensor]]:
        but = set() if self.scaled_axis is None else {"z"}
        with self._outside():
            if self.estimator == "local":
                parts = self._leaf.independent(self._noise(but={"", *but}))
            else:
                parts = self._leaf.deviation(self._noise(but))
            return list(zip(*map(self._tensors, parts), strict=True))

    def _noise(self, but: Collection[str] = ()) -> dict[str, Tensor]:
        return self.blocks.noise(self._leaf, self._samples, but=but, **self._at)

    def _tensors(self, values: Tensor) -> list[Tensor]:
        """The blocks' tensors, from values ``[n, *shape]``, or ``shape`` if all samples share them."""
        shared = values.dim() == len(self._leaf.shape)
        lead = () if shared else values.shape[:1]
        by_block = self.blocks.apart(values.reshape(*lead, self._leaf.shape.numel()))
        leaves = self.blocks.leaves
        tensors = chain.from_iterable(leaves[name].split(each) for name, each in by_block.items())
        return list(tensors if shared else map(self._placed, tensors))

    def _placed(self, drawn: Tensor) -> Tensor:
        """A tensor with all samples in front, in the form that the forward pass uses."""
        # Indexing would write its gradient into a tensor of zeros.
        return drawn.squeeze(0) if self._level is None else stack(drawn, self._level)


@final
class Sampled(nn.Module):
    """A module whose parameters are made in each call, as a model with one parameter: the noise address.

    So code that runs a model under many weights can run it under many samples. The parameter holds the number
    of the sample, the step, and the number of samples in other processes, so that threads may share this.

    Args:
        module: The user's own module.
        make: Makes the module's parameters from these three and the level of vmap.
    """

    def __init__(
        self, module: nn.Module, make: Callable[[range, int | None, int, int], dict[str, Tensor]]
    ) -> None:
        super().__init__()
        self.module, self.make = module, make
        self.title = type(module).__name__
        self.at = nn.Parameter(torch.zeros(3, dtype=torch.long), requires_grad=False)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's output under the sample, or under all samples that vmap stacks."""
        rows, level = inside(self.at).reshape(-1, 3).tolist(), level_of(self.at)
        (first, step, ahead), last = rows[0], rows[-1][0]
        made = self.make(range(first, last + 1), level, step, ahead)
        return functional_call(self.module, made, args, kwargs)
