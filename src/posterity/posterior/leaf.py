"""The base of families: q over one block of weights, a map from standard normals."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from posterity import noise
from posterity.arguments import described, is_dense
from posterity.flat import Layout


class Leaf(nn.Module, ABC):
    """q over one block: a reparametrised map from standard normals to weights.

    A block is one tensor, or several that are treated as one. Then it is a matrix: each tensor is flattened
    to one row per entry of its first dimension, and takes some of the columns.

    A family implements ``_draw``, ``std``, ``pruned``, ``config`` and ``restore``; ``log_prob`` if it has a
    density; ``noise_shapes`` if it needs more than one normal per weight. A family trained by gradient holds
    parameters, including ``loc``. It lists its ``estimators``: ``"local"`` needs ``_independent``,
    ``"flipout"`` that or ``_deviation``; with a ``scaled_axis`` both need ``example_scales``.

    Args:
        shape: Shape of the block.
        keep: Boolean mask of the weights that are kept; the others are exactly zero.
        shapes: Shapes of the block's tensors, left to right; without them the block is one tensor.

    Example:
        >>> from posterity import DiagonalGaussian
        >>> leaf = DiagonalGaussian(torch.ones(2), 0.1, keep=torch.tensor([True, False]))
        >>> isinstance(leaf, Leaf), leaf.draw(torch.zeros(1, 2))
        (True, tensor([[1., 0.]]))
    """

    estimators: ClassVar[frozenset[str]] = frozenset({"weight"})
    loc: Tensor  # means, or the parameter behind them; of pruned weights too
    keep: Tensor | None
    held: Tensor | None  # mask of the weights that are certain, at their means

    def __init__(
        self,
        shape: torch.Size,
        keep: Tensor | None = None,
        shapes: Sequence[torch.Size] | None = None,
    ) -> None:
        super().__init__()
        self.shape = shape
        self.shapes = (shape,) if shapes is None else tuple(shapes)
        if keep is not None and not is_dense(keep):
            raise TypeError(f"a mask must be a dense tensor, not {described(keep)}")
        if keep is not None and keep.shape != shape:
            raise ValueError(
                f"a mask of shape {tuple(keep.shape)} does not fit a block of shape {tuple(shape)}"
            )
        self.register_buffer("keep", None if keep is None else keep.detach().bool().clone())
        self.register_buffer("held", None)

    def split(self, values: Tensor) -> tuple[Tensor, ...]:
        """One value per weight, ``[..., *shape]``, by tensor: ``[..., *shapes[i]]``."""
        lead = values.shape[: values.dim() - len(self.shape)]
        if len(self.shapes) == 1:
            return (values.reshape(lead + self.shapes[0]),)
        parts = torch.split(values, [shape[1:].numel() for shape in self.shapes], -1)
        return tuple(part.reshape(lead + shape) for part, shape in zip(parts, self.shapes, strict=True))

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        """The inverse of :meth:`split`."""
        lead = tensors[0].shape[: tensors[0].dim() - len(self.shapes[0])]
        if len(self.shapes) == 1:
            return tensors[0].reshape(lead + self.shape)
        columns = [
            each.reshape(*lead, self.shape[0], shape[1:].numel())
            for each, shape in zip(tensors, self.shapes, strict=True)
        ]
        return torch.cat(columns, -1)

    @property
    def joined(self) -> bool:
        """Whether the block's shape differs from its tensor's: it holds several tensors, or flattens one."""
        return self.shapes != (self.shape,)

    @property
    def group_shape(self) -> torch.Size:
        """A shape that broadcasts to the block's; weights that share an entry are removed together."""
        return self.shape

    @property
    def noise_shapes(self) -> dict[str, torch.Size]:
        """Shapes of the standard normals behind one draw, by name; one per weight is called ``""``."""
        return {"": self.shape}

    def noise(
        self,
        samples: range,
        *,
        block: str,
        seed: int,
        step: int,
        domain: noise.Domain = noise.Domain.SAMPLE,
        but: Collection[str] = (),
    ) -> dict[str, Tensor]:
        """Standard normals ``[n, ...]`` for the given sample numbers, by name, except those to leave out."""
        at: dict[str, Any] = {"domain": domain, "seed": seed, "step": step}
        at |= {"device": self.device, "dtype": self.dtype}
        return {
            name: noise.normal(samples, shape, block=f"{block}|{name}" if name else block, **at)
            for name, shape in self.noise_shapes.items()
            if name not in but
        }

    @property
    def scaled_axis(self) -> int | None:
        """The axis of the weights (0 outputs, 1 inputs) along which layers can multiply by scales instead.

        Each example then has its own scales, from the normals ``"z"``; ``independent`` and ``deviation`` do
        not get these normals, and leave the scales out.
        """
        return None

    def example_scales(self, noise: Tensor) -> Tensor:
        """Scales ``[n, size]`` of ``scaled_axis`` from normals ``[n, *noise_shapes["z"]]``."""
        raise NotImplementedError

    def prepared(self, noises: Sequence[Mapping[str, Tensor]]) -> list[Mapping[str, Tensor]]:
        """The normals of several draws, after computing their common parts for all draws at once."""
        return list(noises)

    def draw(self, noise: Tensor | Mapping[str, Tensor]) -> Tensor:
        """Weights ``[n, *shape]`` from the normals of :meth:`noise`; pruned ones are zero, held ones at their
        means.

        If a family needs only one normal per weight, a tensor ``[n, *shape]`` is enough.
        """
        return self._settled(self._draw({"": noise} if isinstance(noise, Tensor) else noise))

    def independent(self, noise: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Means and stds of the weights, given all normals of a draw except ``""``.

        Given the others, weights must be independent normals, as the estimator ``"local"`` needs. Each result
        is ``[n, *shape]``, or ``shape`` if all draws share it.

        Example:
            >>> from posterity import DiagonalGaussian
            >>> DiagonalGaussian(torch.ones(2), 0.1).independent({})
            (tensor([1., 1.]), tensor([0.1000, 0.1000]))
        """
        mean, std = self._independent(noise)
        return self._settled(mean), self.masked(std)

    def deviation(self, noise: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The two parts of ``draw(noise)``: a mean and a deviation, ``[n, *shape]``.

        The deviation's distribution must not change if the signs of whole kernels do (a kernel belongs to one
        output and one input channel), as the estimator ``"flipout"`` needs. Given the mean, kernels must be
        independent.

        Example:
            >>> from posterity import DiagonalGaussian
            >>> DiagonalGaussian(torch.ones(2), 0.1).deviation({"": torch.ones(1, 2)})
            (tensor([1., 1.]), tensor([[0.1000, 0.1000]]))
        """
        mean, deviation = self._deviation(noise)
        return self._settled(mean), self.masked(deviation)

    @property
    def kind(self) -> object:
        """Leaves of a family with equal values can be joined by :meth:`end_to_end`; None if this one
        cannot."""
        return None

    @classmethod
    def end_to_end(cls, leaves: Sequence[Self], layout: Layout, masks: Mapping[str, Tensor | None]) -> Self:
        """Leaves of one kind joined as one, over the flat weights ``[size]`` of a layout.

        Nothing is saved for a backward pass, so a loss and a KL may each make their own.

        Args:
            leaves: Each of a single tensor.
            layout: Of their weights, without padding.
            masks: ``keep`` and ``held`` of all weights.
        """
        raise NotImplementedError

    def copy(self) -> Self:
        """The same distribution in its own memory."""
        state = {key: value.detach().clone() for key, value in self.state_dict().items()}
        return type(self).restored(state, self.config())

    def trainable(self) -> Self:
        """This leaf if it is trainable, else a trainable copy; fitted families refuse."""
        if not any(True for _ in self.parameters()):
            raise TypeError(
                f"a {type(self).__name__} is not trained by gradient: pass a Factorised of "
                "DiagonalGaussian(mean, std, keep=kept), with .mean(), .std() and .kept() of the posterior"
            )
        return self if any(p.requires_grad for p in self.parameters()) else self.copy().requires_grad_()

    @torch.no_grad()
    def share_mean(self, *parameters: nn.Parameter) -> None:
        """Use a module's parameter as ``loc``, with its values.

        A family of several tensors overrides this; it gets their parameters in the order of ``shapes``.
        """
        (parameter,) = parameters
        if self.loc is not parameter:
            parameter.copy_(self.mean())
            self.loc = parameter
            self.to(self.device, self.dtype)  # the rest follows the module

    def hold(self, held: Tensor | None) -> Self:
        """Fix the weights of a mask (if not None) at their means, in place; returns this leaf.

        This is used for the padding row of an embedding, which no data moves. Held weights have a std of 0
        and no gradient, and densities and divergences leave them out, like pruned ones.

        Example:
            >>> from posterity import DiagonalGaussian
            >>> leaf = DiagonalGaussian(torch.ones(2), 0.1).hold(torch.tensor([True, False]))
            >>> leaf.mean(), leaf.std()
            (tensor([1., 1.]), tensor([0.0000, 0.1000]))
        """
        if held is not None:
            held = held.to(self.device) & self.kept
            held = held if self.held is None else held | self.held
            self.held = held if bool(held.any()) else None
        return self

    def masked(self, values: Tensor) -> Tensor:
        """The values with zero for weights that do not vary."""
        # where, not a product: the value of a pruned weight may be infinite.
        return values if self.whole else torch.where(self.varying, values, 0.0)

    def _settled(self, values: Tensor) -> Tensor:
        """The values with zero for pruned weights, and their means for those that are held."""
        values = self.masked(values)
        return values if self.held is None else torch.where(self.held, self.loc.detach(), values)

    def total(self, values: Tensor) -> Tensor:
        """Sum of one value per weight over the weights that vary; leading dimensions stay."""
        values = self.masked(values)
        return values.sum(tuple(range(-len(self.shape), 0))) if self.shape else values

    @property
    def kept(self) -> Tensor:
        """The mask of the weights that are kept; all of them if nothing is pruned."""
        return (
            torch.ones(self.shape, dtype=torch.bool, device=self.device) if self.keep is None else self.keep
        )

    @property
    def whole(self) -> bool:
        """Whether there is no mask: all weights vary."""
        return self.keep is None and self.held is None

    @property
    def varying(self) -> Tensor:
        """The mask of the weights that are neither pruned nor held."""
        return self.kept if self.held is None else self.kept & ~self.held

    @property
    def device(self) -> torch.device:
        """The block's device."""
        return self.loc.device

    @property
    def dtype(self) -> torch.dtype:
        """The block's floating-point type."""
        return self.loc.dtype

    def mean(self) -> Tensor:
        """Mean of the block."""
        return self._settled(self.loc)

    @abstractmethod
    def std(self) -> Tensor:
        """Standard deviation of each weight."""

    def log_prob(self, value: Tensor) -> Tensor:
        """Log-density summed over the weights that vary; leading dimensions stay."""
        raise TypeError(
            f"a {type(self).__name__} has no log-density: use a prior for which register_kl() has a formula"
        )

    @abstractmethod
    def pruned(self, keep: Tensor) -> Self:
        """The same distribution with the weights outside ``keep`` removed: mean and std zero.

        Held weights stay held: end with ``.hold(self.held)``.
        """

    @abstractmethod
    def config(self) -> dict[str, Any]:
        """The data (JSON) needed to rebuild this leaf, beside the tensors of ``state_dict``."""

    @classmethod
    @abstractmethod
    def restore(cls, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> Self:
        """Rebuild the leaf from ``state_dict`` tensors except ``held``, and ``config``."""

    @classmethod
    def restored(cls, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> Self:
        """Rebuild the leaf from all tensors of ``state_dict`` and ``config``."""
        own = {key: value for key, value in tensors.items() if key != "held"}
        return cls.restore(own, config).hold(tensors.get("held"))

    def _independent(self, noise: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Means and stds as if all weights varied; for families with the estimator ``"local"``."""
        raise NotImplementedError

    def _deviation(self, noise: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Mean and deviation as if all weights varied; for families with the estimator ``"flipout"``."""
        mean, std = self._independent(noise)
        return mean, std * noise[""]

    @abstractmethod
    def _draw(self, noise: Mapping[str, Tensor]) -> Tensor:
        """Reparametrised draw, as if all weights varied."""
