"""Which estimator each block of a posterior has, and what a model gets for its parameters in a forward pass.

What estimators do in a layer is in :mod:`posterity.layers.estimators`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any, final, get_args

import torch
from torch import Tensor, nn
from torch.func import functional_call

from posterity import noise
from posterity.layers.estimators import Drawn, Estimator, StandIn, outermost, transforms
from posterity.layers.stacks import inside, level_of, stack
from posterity.names import first_match
from posterity.noise import Domain
from posterity.posterior import Factorised, Leaf


def by_block(posterior: Factorised, estimator: Estimator | Mapping[str, Estimator]) -> dict[str, Estimator]:
    """The estimator of every block; one that a block's family does not have is refused.

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
    found = {name: first_match(given, name) for name in posterior.blocks}
    for name, leaf in posterior.blocks.items():
        if found[name] not in leaf.estimators:
            own = " or ".join(repr(each) for each in known if each in leaf.estimators)
            raise ValueError(
                f"{name!r} cannot have estimator={found[name]!r}: a {type(leaf).__name__} has {own} (give "
                "estimators by name patterns, in order: estimator={PATTERN: ESTIMATOR, '*': ESTIMATOR})"
            )
    return found


def parameters_of(
    leaves: Mapping[str, Leaf],
    tensors: Mapping[str, Sequence[str]],
    estimators: Mapping[str, Estimator],
    samples: range,
    *,
    level: int | None = None,
    batch_dim: int,
    ahead: int = 0,
    **at: Any,
) -> dict[str, Tensor]:
    """What a model gets for its parameters: one draw, or a stand-in where a block has another estimator.

    Args:
        leaves: By block.
        tensors: The names of every block's tensors.
        estimators: By block.
        samples: Number of the sample, or of all those that vmap stacks.
        level: Of vmap, if it stacks them.
        batch_dim: The axis that counts examples, where a layer leaves a choice.
        ahead: Samples of other processes, which draw the same weights for other examples.
        at: Seed and step of the noise.
    """
    found: dict[str, Tensor] = {}
    for name, leaf in leaves.items():
        draws = BlockDraws(leaf, name, estimators[name], samples, level, batch_dim, ahead, at)
        names = tensors[name]
        if estimators[name] == "weight":
            found |= zip(names, draws.values(), strict=True)
            continue
        for index, (tensor, shape) in enumerate(zip(names, leaf.shapes, strict=True)):
            found[tensor] = StandIn.of(Drawn(tensor, draws, index), shape, leaf.loc)
    return found


@final
class BlockDraws:
    """The draws of one block in one forward pass; see :class:`posterity.layers.estimators.Draws`."""

    def __init__(
        self,
        leaf: Leaf,
        block: str,
        estimator: Estimator,
        samples: range,
        level: int | None,
        batch_dim: int,
        ahead: int,
        at: Mapping[str, Any],
    ) -> None:
        self.leaf, self.block, self.estimator, self.batch_dim = leaf, block, estimator, batch_dim
        self.transforms, self.scaled_axis = transforms(), leaf.scaled_axis
        self._samples, self._level = samples, level
        self._by_example = range(samples.start + ahead, samples.stop + ahead)
        self._at: dict[str, Any] = {"domain": Domain.TRAIN, **at}

    def values(self) -> Sequence[Tensor]:
        """One draw of each of the block's tensors."""
        return self._values

    def parts(self) -> Sequence[tuple[Tensor, Tensor]]:
        """Mean and std of each tensor's weights with local, mean and deviation with flipout."""
        return self._parts

    def normal(self, name: str, shape: Sequence[int]) -> Tensor:
        """Standard normals of examples that belong to a name: no other process has the same."""
        with self._outside():
            return self._placed(self._normal(name, shape))

    def scales(self, examples: int) -> Tensor:
        """Scales of ``scaled_axis`` for each example, ``[examples, size]``."""
        with self._outside():
            drawn = self._normal(f"{self.block}|z", (examples, *self.leaf.noise_shapes["z"]))
            scales = self.leaf.example_scales(drawn.flatten(0, 1))
            return self._placed(scales.view(*drawn.shape[:2], scales.shape[1]))

    def _normal(self, name: str, shape: Sequence[int]) -> Tensor:
        like: dict[str, Any] = {"device": self.leaf.device, "dtype": self.leaf.dtype}
        return noise.normal(self._by_example, shape, block=name, **like, **self._at)

    def _outside(self) -> AbstractContextManager[None]:
        """Inside, no samples are stacked, and no transform of the model's own runs."""
        return outermost(len(self.transforms) - (self._level is not None))

    @cached_property
    def _values(self) -> list[Tensor]:
        with self._outside():
            return self._tensors(self.leaf.draw(self._noise()))

    @cached_property
    def _parts(self) -> list[tuple[Tensor, Tensor]]:
        but = set() if self.scaled_axis is None else {"z"}
        with self._outside():
            if self.estimator == "local":
                parts = self.leaf.independent(self._noise(but={"", *but}))
            else:
                parts = self.leaf.deviation(self._noise(but))
            return list(zip(*map(self._tensors, parts), strict=True))

    def _noise(self, but: Collection[str] = ()) -> dict[str, Tensor]:
        return self.leaf.noise(self._samples, block=self.block, but=but, **self._at)

    def _tensors(self, values: Tensor) -> list[Tensor]:
        """The block's tensors of values ``[n, *shape]``, or ``shape`` if all samples share them."""
        tensors = self.leaf.split(values)
        return list(tensors if values.dim() == len(self.leaf.shape) else map(self._placed, tensors))

    def _placed(self, drawn: Tensor) -> Tensor:
        """What has all samples in front as the forward pass has it."""
        return drawn[0] if self._level is None else stack(drawn, self._level)


@final
class Sampled(nn.Module):
    """A module with what it gets for its parameters, as a model of one parameter: where the noise is.

    So whatever runs a model under many weights runs it under many samples. The parameter has the number of
    the sample, the step, and the samples of other processes, so that threads may share this.

    Args:
        module: The user's own module.
        make: From these three, and the level of vmap, to the module's parameters.
    """

    def __init__(
        self, module: nn.Module, make: Callable[[range, int | None, int, int], dict[str, Tensor]]
    ) -> None:
        super().__init__()
        self.module, self.make = module, make
        self.title = type(module).__name__
        self.at = nn.Parameter(torch.zeros(3, dtype=torch.long), requires_grad=False)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's output under the sample, or under all that vmap stacks."""
        rows, level = inside(self.at).reshape(-1, 3).tolist(), level_of(self.at)
        (first, step, ahead), last = rows[0], rows[-1][0]
        made = self.make(range(first, last + 1), level, step, ahead)
        return functional_call(self.module, made, args, kwargs)
