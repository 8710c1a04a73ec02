"""A Gaussian whose weights share random scales: ``w = z · mean + std · noise``.

Given z the weights are independent normals; z makes them dependent, skewed and multimodal. The distribution
of z is a separate class, :class:`Scales`. It also defines whether z multiplies means alone, as in a flow
(:mod:`posterity.posterior.flow`), or whole weights, ``w = z · (mean + std · noise)``, as the scales of groups
do (:mod:`posterity.posterior.groups`).

The marginal q(w) = ∫ q(w | z) q(z) dz has no closed form, so neither has its KL. There are two bounds on the
KL:

    to a density p(w):      E_z[KL(q(w | z) ‖ p) + log q(z) − log r(z | w)],  r any conditional density
    to another p(w, z):     E_z[KL(q(w | z) ‖ p(w | z)) + log q(z) − log p(z)],  the joint KL, without r

The second is used if a posterior becomes the next prior (Kochurov et al. 2018). Both draw z; the first also
draws w.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any, ClassVar, Literal, NamedTuple, Self, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from posterity import noise as noises
from posterity.flat import Layout, concatenate
from posterity.posterior.diagonal import inverse_softplus
from posterity.posterior.leaf import Leaf

Conv: TypeAlias = Literal["output", "input", "kernel"]
Dense: TypeAlias = Literal["input", "output"]

# Number of draws of z for means and stds: half of them, and their opposites.
MOMENT_DRAWS = 512


def scale_shape(mean: Tensor, conv: Conv, dense: Dense) -> torch.Size:
    """The shape of the scales of a weight of two or more dimensions, which broadcasts to it.

    Args:
        mean: Of the weight's shape.
        conv: What has its own scale if the weight has three or more dimensions.
        dense: What has its own scale in a matrix.

    Example:
        >>> scale_shape(torch.zeros(8, 3, 5, 5), conv="kernel", dense="input")
        torch.Size([8, 3, 1, 1])
    """
    if conv not in ("output", "input", "kernel"):
        raise ValueError(f"conv must be 'output', 'input' or 'kernel', not {conv!r}")
    if dense not in ("input", "output"):
        raise ValueError(f"dense must be 'input' or 'output', not {dense!r}")
    which = dense if mean.dim() == 2 else conv
    sizes = (mean.shape[0] if which != "input" else 1, mean.shape[1] if which != "output" else 1)
    return torch.Size([*sizes, *[1] * (mean.dim() - 2)])


class GivenScales(NamedTuple):
    """Scales, and the moments of the weights given them.

    Attributes:
        z: As :meth:`Scales.draw` gives them.
        log_q: log q(z), ``[n]``.
        mean: Means of the weights.
        std: Their stds.
    """

    z: Tensor
    log_q: Tensor
    mean: Tensor
    std: Tensor


@final
class _Prepared(dict[str, Tensor]):
    """The normals of a draw, with its scales already computed."""

    given: GivenScales


class Scales(nn.Module, ABC):
    """The distribution q(z) of the scales of a :class:`ScaledGaussian`.

    Subclasses are built from a shape, a tensor ``like`` of their dtype and device, and the entries of
    ``config``.

    Attributes:
        multiply_stds: Whether they also multiply stds, and so whole weights; otherwise means alone. Weights
            that share a scale of whole weights are removed together by ``prune``.

    Args:
        shape: Of z; it broadcasts to the weights' shape, ``[outputs, 1, 1, 1]`` for one scale per output.

    Example:
        >>> from posterity.posterior.flow import Flow
        >>> issubclass(Flow, Scales)
        True
    """

    multiply_stds: ClassVar[bool] = False

    def __init__(self, shape: torch.Size) -> None:
        super().__init__()
        self.shape = shape

    @property
    def noise_shape(self) -> torch.Size:
        """Shape of the standard normals behind one draw of z."""
        return self.shape

    @abstractmethod
    def draw(self, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Scales ``[n, *shape]`` from normals ``[n, *noise_shape]``, and log q(z) ``[n]`` of each."""

    @abstractmethod
    def log_prob(self, z: Tensor) -> Tensor:
        """log q(z), ``[n]``, of any scales ``[n, *shape]``."""

    @property
    def kind(self) -> object:
        """Scales with equal values can be joined by :meth:`end_to_end`; None if these cannot."""
        return None

    @classmethod
    def end_to_end(cls, scales: Sequence[Self], shapes: Sequence[torch.Size]) -> Scales:
        """Scales of one kind joined as one, for weights of these shapes in one flat buffer."""
        raise NotImplementedError

    def spread(self, z: Tensor) -> Tensor:
        """Scales from :meth:`draw`, in a shape that broadcasts to the weights."""
        return z

    def config(self) -> dict[str, Any]:
        """Constructor arguments beside a shape and a tensor ``like`` (JSON); most have none."""
        return {}

    def log_auxiliary(self, z: Tensor, weights: Tensor) -> Tensor:
        """log r(z | w), ``[n]``, of an auxiliary density: the nearer to q(z | w), the tighter the bound."""
        raise TypeError(
            f"{type(self).__name__} have no auxiliary density for a prior of single weights: pass the "
            "family's prior, prior=posterity.GroupNormalJeffreys() with family=gnj, "
            "prior=posterity.GroupHorseshoe() with ghs"
        )

    def moments(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of z, ``[*shape]``, over ``MOMENT_DRAWS`` fixed draws.

        Their normals come in pairs of opposite sign and have mean 0 and variance 1, so the moments of scales
        that are linear in their normals are exact. They are the same on every device and for every dtype.
        """
        at: dict[str, Any] = {"seed": 0, "step": 0, "block": "moments", "domain": noises.Domain.SAMPLE}
        half = noises.normal(range(1), (MOMENT_DRAWS // 2, *self.noise_shape), **at, dtype=torch.float64)[0]
        half = half / half.square().mean(0).sqrt()
        z, _ = self.draw(torch.cat([half, -half]).to(like))
        return z.mean(0), z.var(0, correction=0)


@final
class ScaledGaussian(Leaf):
    """Normals with shared random scales: ``w = z · loc + std · noise``, or z times that whole.

    Means, stds and the scales' own numbers are parameters; given an ``nn.Parameter`` as mean it uses that
    same object. A module that shares it holds ``loc``, which is the posterior's mean only if E[z] is 1:
    predict at the mean by ``mode="mean"``.

    There is no log-density. ``mean`` and ``std``, and therefore pruning, use moments over z: E[w] = loc ·
    E[z], Var w = std² + loc² · Var z, with std² · E[z²] in place of std² if scales multiply whole weights.
    The moments of z are exact, or over ``MOMENT_DRAWS`` fixed draws.

    Args:
        mean: The means that the scales multiply, in the shape of the weights.
        std: Standard deviation of the weights given z = 1: a number, or a tensor that broadcasts.
        scales: The distribution of z.
        keep: Mask of the weights that are not pruned.

    Example:
        >>> from posterity import mnf
        >>> q = mnf(torch.zeros(4, 3, 5, 5), 0.1)
        >>> q.scales.shape, q.std().shape
        (torch.Size([4, 1, 1, 1]), torch.Size([4, 3, 5, 5]))
    """

    estimators = frozenset({"weight", "local", "flipout"})
    raw: Tensor

    def __init__(
        self, mean: Tensor, std: Tensor | float, scales: Scales, *, keep: Tensor | None = None
    ) -> None:
        if not mean.is_floating_point():
            raise TypeError(f"means must be floating-point numbers, not {mean.dtype}: pass mean.float()")
        super().__init__(mean.shape, keep)
        spread = torch.as_tensor(std, dtype=mean.dtype, device=mean.device).detach()
        if not bool((torch.isfinite(spread) & (spread > 0)).all()):
            raise ValueError(f"std must be finite and greater than 0; the lowest is {float(spread.min()):g}")
        for given, name in ((spread, "std"), (spread.new_empty(scales.shape), "scales")):
            try:
                given.expand(mean.shape)
            except RuntimeError:
                raise ValueError(
                    f"{name} of shape {tuple(given.shape)} do not broadcast to means of shape "
                    f"{tuple(mean.shape)}"
                ) from None
        self.loc = mean if isinstance(mean, nn.Parameter) else nn.Parameter(mean.detach().clone())
        self.raw = nn.Parameter(inverse_softplus(spread.expand(mean.shape)).clone())
        self.scales = scales

    @classmethod
    def end_to_end(cls, leaves: Sequence[Self], layout: Layout, masks: Mapping[str, Tensor | None]) -> Self:
        """All weights of some leaves in a row."""
        parts = zip(*((leaf.loc, leaf.raw) for leaf in leaves), strict=True)
        loc, raw = (concatenate(layout, own) for own in parts)
        joined = cls.__new__(cls)
        Leaf.__init__(joined, loc.shape)
        joined.loc, joined.raw = loc, raw
        joined._buffers.update(masks)
        first = leaves[0].scales
        joined.scales = first.end_to_end([leaf.scales for leaf in leaves], [leaf.shape for leaf in leaves])
        return joined

    @property
    def kind(self) -> object:
        """That of the scales."""
        own = self.scales.kind
        return None if own is None else (type(self.scales), own)

    @property
    def noise_shapes(self) -> dict[str, torch.Size]:
        """One normal per weight, and those of the scales, ``"z"``."""
        return {"": self.shape, "z": self.scales.noise_shape}

    @property
    def group_shape(self) -> torch.Size:
        """Weights that share a scale are one group, if the scale multiplies whole weights."""
        return self.scales.shape if self.scales.multiply_stds else self.shape

    @property
    def scaled_axis(self) -> int | None:
        """The axis along which scales differ, if layers can multiply by them; else None."""
        shape, axes = self.scales.shape, [i for i, size in enumerate(self.scales.shape) if size > 1]
        movable = self.scales.multiply_stds and self.held is None and len(shape) == len(self.shape) > 1
        return max(axes, default=0) if movable and axes in ([], [0], [1]) else None

    def example_scales(self, noise: Tensor) -> Tensor:
        """Scales ``[n, size]`` of that axis."""
        z, _ = self.scales.draw(noise)
        return z.flatten(1)

    def used_scales(self) -> Tensor:
        """Mask of the scales that multiply a weight that varies, ``[*scales.shape]``."""
        shared = [i for i, size in enumerate(self.scales.shape) if size == 1]
        return self.varying.sum(shared, keepdim=True).bool() if shared else self.varying

    def filled_std(self) -> Tensor:
        """Standard deviation of each weight given z = 1, also of those that do not vary."""
        return softplus(self.raw)

    def prepared(self, noises: Sequence[Mapping[str, Tensor]]) -> list[Mapping[str, Tensor]]:
        """The normals with the scales of all draws, computed in as many operations as for one."""
        sizes = [len(noise["z"]) for noise in noises]
        given = self.scales_from({"z": torch.cat([noise["z"] for noise in noises])})
        shared = given.std.dim() == len(self.shape)  # scales of means alone leave stds as they are
        parts = [torch.split(each, sizes) for each in (given.z, given.log_q, given.mean)]
        parts.append((given.std,) * len(sizes) if shared else torch.split(given.std, sizes))
        found = [_Prepared(noise) for noise in noises]
        for each, *part in zip(found, *parts, strict=True):
            each.given = GivenScales(*part)
        return list(found)

    def scales_from(self, noise: Mapping[str, Tensor]) -> GivenScales:
        """Scales from the normals of :meth:`noise`, and the moments that they give."""
        if isinstance(noise, _Prepared):
            return noise.given
        z, log_q = self.scales.draw(noise["z"])
        return GivenScales(z, log_q, *self.moments_given(z))

    def moments_given(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Means and stds of the weights for scales, as if all varied."""
        std, z = self.filled_std(), self.scales.spread(z)
        return z * self.loc, z.abs() * std if self.scales.multiply_stds else std

    def given(self, z: Tensor, noise: Mapping[str, Tensor]) -> Tensor:
        """Weights ``[n, *shape]`` for scales and the normals of :meth:`noise`."""
        return self.around(*self.moments_given(z), noise)

    def around(self, mean: Tensor, std: Tensor, noise: Mapping[str, Tensor]) -> Tensor:
        """The same for the moments that scales give."""
        return self._settled(torch.addcmul(mean, std, noise[""]))

    def mean(self) -> Tensor:
        """Mean of the block, averaged over z."""
        mean, _ = self.scales.moments(self.loc)
        return self._settled(self.loc * mean)

    def std(self) -> Tensor:
        """Standard deviation of each weight, over z too."""
        mean, variance = self.scales.moments(self.loc)
        given = self.filled_std().square()
        if self.scales.multiply_stds:
            given = given * (mean.square() + variance)
        return self.masked((given + self.loc.square() * variance).sqrt())

    def log_prob(self, value: Tensor) -> Tensor:
        """There is none: raises."""
        raise TypeError(
            "a ScaledGaussian has no log-density, because its scales are integrated out: as a prior it "
            "serves only posteriors of its own kind, by their joint density of weights and scales"
        )

    @torch.no_grad()
    def share_mean(self, *parameters: nn.Parameter) -> None:
        """Let a module's parameter be ``loc``, and take on its values."""
        (parameter,) = parameters
        if self.loc is not parameter:
            parameter.copy_(self._settled(self.loc))
            self.loc = parameter
            self.to(self.device, self.dtype)

    def pruned(self, keep: Tensor) -> Self:
        """The same distribution with the weights outside ``keep`` removed; the scales do not change."""
        keep = keep & self.kept
        leaf = type(self)(self.loc.detach() * keep, 1.0, deepcopy(self.scales), keep=keep)
        with torch.no_grad():
            leaf.raw.copy_(self.raw)
        return leaf.hold(self.held).requires_grad_(self.loc.requires_grad)

    def config(self) -> dict[str, Any]:
        """The scales' family and arguments."""
        scales = {"family": type(self.scales).__name__, "shape": list(self.scales.shape)}
        return {"scales": scales | self.scales.config()}

    @classmethod
    def restore(cls, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> Self:
        """Rebuild the leaf, bit for bit."""
        loc, own = tensors["loc"], config["scales"]
        families: dict[str, Any] = {each.__name__: each for each in Scales.__subclasses__()}
        if own["family"] not in families:
            raise ValueError(f"its scales have the family {own['family']}, which is unknown here")
        more = {key: value for key, value in own.items() if key not in ("family", "shape")}
        scales = families[own["family"]](torch.Size(own["shape"]), like=loc, **more)
        leaf = cls(loc, 1.0, scales, keep=tensors.get("keep"))
        leaf.load_state_dict(dict(tensors))
        for name, value in leaf.named_parameters():
            if not bool(torch.isfinite(value).all()):
                raise ValueError(f"{name} is not finite in the file: it is damaged")
        return leaf

    def _independent(self, noise: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        if "z" not in noise:  # layers multiply by them
            return self.loc, self.filled_std()
        given = self.scales_from(noise)
        return given.mean, given.std

    def _draw(self, noise: Mapping[str, Tensor]) -> Tensor:
        given = self.scales_from(noise)
        return self.around(given.mean, given.std, noise)
