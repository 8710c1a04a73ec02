"""Any unmodified module with weights from a trainable posterior: Bayes by Backprop and related methods.

Blundell, Cornebise, Kavukcuoglu, Wierstra: "Weight Uncertainty in Neural Networks", ICML 2015. Weights are
``w = μ + softplus(ρ) · eps``; autograd through the draw gives the paper's gradients of μ and ρ for any loss,
so a method is this wrapper, a prior, :func:`~posterity.elbo` and any torch optimiser.

| paper | here |
|---|---|
| θ = (μ, ρ) | ``model.posterior``; μ are the wrapped module's own parameters |
| P(w) | ``prior=``: N(0, 1), or another that ``kl`` takes; the paper's is :class:`~posterity.ScaleMixture` |
| F(D, θ) | ``num_data · elbo(nll, kl, num_data=...)`` |
| π_i | ``factor=posterity.blundell(num_batches), step=...`` |

Deviation: initial stds are relative to ``1 / sqrt(fan_in)``, not one number for all nets.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any, NamedTuple, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel

from posterity.arguments import FILTER, MODULE, NUMBER, WHOLE, described, instance, takes
from posterity.distributed import World, several
from posterity.estimators import Sampled, by_block, parameters_of, together
from posterity.layers import Estimator, Intercept
from posterity.mc import How, run
from posterity.names import NameFilter, first_match, refuse_unmatched, select
from posterity.noise import Domain, new_seed
from posterity.objective import NllWatch, watched_by
from posterity.optim.presets import TABLE, settings, start_std
from posterity.posterior import (
    ByName,
    Density,
    DiagonalGaussian,
    Factorised,
    GroupPrior,
    IsotropicGaussian,
    Leaf,
    Posterior,
    SparsityPrior,
    kl,
)
from posterity.posterior.end_to_end import EndToEnd, Joined, end_to_end
from posterity.posterior.shared_means import share_means, share_means_again
from posterity.replica import replica
from posterity.sharding import is_sharded
from posterity.torch_private import graph_task_id, is_compiled

Family: TypeAlias = Callable[[nn.Parameter, float], Leaf]
_drawing = threading.Lock()
# First number of the draws that a process makes alone: far above the numbers of all steps.
_PEEKS = 1 << 30
_PRIOR = IsotropicGaussian(TABLE["variational"]["default"]["prior_precision"] ** -0.5)
Prior: TypeAlias = Posterior | Density | ByName
_A_PRIOR = instance("a prior", Posterior, Density, ByName)


class _Draw(NamedTuple):
    """Weights by name, joined leaves, and the versions of the posterior that the weights were drawn from."""

    weights: dict[str, Tensor]
    joined: list[Joined]
    versions: list[int]


@final
class Variational(nn.Module):
    """A module whose named weights are drawn anew from ``posterior`` at every call.

    The wrapped ``module`` is the user's own and holds the means: call it for predictions at the mean, and
    pass it to :func:`~posterity.predict` with ``posterior`` for all other predictions. A given posterior's
    means are copied to the module. A trainable posterior then shares them with the module; for others, such
    as those of rules and ``frozen()``, ``posterior`` is a trainable copy. Pruned weights stay zero, and
    padding rows of embeddings keep their values.

    Several processes train ``DistributedDataParallel(variational(net))``, and all of them draw the same
    weights; without a given seed they use that of the first process. Draws under ``torch.no_grad`` differ
    between processes, and so do the draws of ``"local"`` and ``"flipout"`` for each example.

    Args:
        module: The user's own module.
        posterior: The posterior of its weights; a block that gradients cannot train, such as K-FAC's, is
            refused.
        seed: Seed of the weight noise. By default one number from torch's generator is drawn here, as for
            the initial weights of a layer; training never draws from that generator.
        estimator: How a layer's outputs are drawn: with one draw of its weights for all examples
            (``"weight"``), or with one for each example (``"local"`` or ``"flipout"``); or estimators by name
            patterns of blocks. docs/estimators.md says what each one is good for.
        batch_dim: The axis of the examples in inputs of linear layers with several axes, for ``"flipout"``
            and for scales of groups.
        prior: The prior in the KL of :meth:`kl` and ``compile_step``: N(0, 1) if None. It is not a part of
            this module: ``to``, ``state_dict`` and ``parameters`` leave it out.

    Attributes:
        one_draw: Whether all blocks have the estimator ``"weight"``, so that one draw serves all examples.

    Example:
        >>> import torch
        >>> model = variational(nn.Linear(3, 2))
        >>> model(torch.ones(4, 3)).shape, model.outputs(torch.ones(4, 3), samples=5).shape
        (torch.Size([4, 2]), torch.Size([5, 4, 2]))
    """

    @takes(
        module=MODULE,
        posterior=instance("a Factorised posterior", Factorised),
        seed=WHOLE,
        batch_dim=WHOLE,
        prior=_A_PRIOR,
    )
    def __init__(
        self,
        module: nn.Module,
        posterior: Factorised,
        seed: int | None = None,
        *,
        estimator: Estimator | Mapping[str, Estimator] = "weight",
        batch_dim: int = 0,
        prior: Prior | None = None,
    ) -> None:
        super().__init__()
        if isinstance(module, DistributedDataParallel):
            raise TypeError(
                "the module is in DistributedDataParallel, which would not see its posterior: wrap what this "
                "returns, DistributedDataParallel(variational(net))"
            )
        if any(map(is_sharded, module.parameters())):
            raise TypeError(
                "the module has DTensors, which would be gathered without its posterior: shard what this "
                "returns, fully_shard(variational(net))"
            )
        if batch_dim < 0:
            raise ValueError(f"batch_dim must be at least 0, not {batch_dim}")
        _refuse_drawn(posterior, module)
        self.estimators, self.batch_dim = by_block(posterior, estimator), batch_dim
        self.one_draw = set(self.estimators.values()) == {"weight"}
        if not self.one_draw and is_compiled(module):
            raise ValueError(
                f"estimator={estimator!r} needs the layers of the module, which torch.compile hides: pass "
                "the uncompiled module, or estimator='weight'"
            )
        self._prior = (_PRIOR if prior is None else prior,)  # in a tuple: it is not a submodule
        self.module = module
        self.posterior = share_means(posterior.check(module), module, prior)
        self.seed = new_seed() if seed is None else seed
        self.draws = 0
        self._seeded, self._met, self._peeks = seed is not None, False, 0
        self._last: _Draw | None = None
        self._grouped: tuple[list[Any], list[EndToEnd], list[EndToEnd]] = [], [], []
        self._runner: tuple[Sampled] | None = None
        self.register_load_state_dict_post_hook(_share_again)  # type: ignore[no-untyped-call]
        for path in {name.rpartition(".")[0] for name in self.posterior.mean()}:
            owner = module.get_submodule(path)
            if _refuse_again not in owner._forward_pre_hooks.values():  # of another Variational around it
                owner.register_forward_pre_hook(_refuse_again)
        self._watch = NllWatch(self)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's output under one draw of the weights."""
        self._meet()
        # In training the module itself, whose forward() may store values in it, such as terms of the loss.
        module = self.module if self.training else replica(self.module)
        if self.one_draw:
            return functional_call(module, self._draw_one(), args, kwargs)
        given = self._given(range(1), None, self._count(), self._ahead(1))
        with Intercept():
            return functional_call(module, given, args, kwargs)

    @takes(samples=WHOLE, chunk=WHOLE)
    def outputs(
        self, *args: Any, samples: int, how: How = "stack", chunk: int | None = None, **kwargs: Any
    ) -> Tensor:
        """The module's outputs ``[samples, B, ...]`` under as many draws of the weights."""
        self._meet()
        if self.one_draw or samples < 1:  # run() refuses samples < 1
            return run(self.module, self._draw(samples), *args, how=how, chunk=chunk, **kwargs)
        step, ahead = self._count(), self._ahead(samples)
        at = torch.tensor([[number, step, ahead] for number in range(samples)])
        return run(self._sampled, {"at": at}, *args, how=how, chunk=chunk, **kwargs)

    @property
    def prior(self) -> Prior:
        """The default prior of :meth:`kl`."""
        return self._prior[0]

    def kl(self, prior: Prior | None = None) -> Tensor:
        """KL(posterior ‖ prior), the model's own if None; estimated where there is no closed form.

        An estimate uses the last drawn weights if the posterior has not changed since, otherwise new ones.
        With ``"local"`` or ``"flipout"`` it always uses other weights, the same ones for one forward pass.
        """
        return watched_by(self._divergence(self.prior if prior is None else prior), self._watch)

    def _divergence(self, prior: Prior) -> Tensor:
        leaf = next(iter(self.posterior.blocks.values()))
        if any(p is not None and is_sharded(p) for p in leaf._parameters.values()):
            raise RuntimeError(
                "the posterior is sharded: leave reshard_after_forward= out, so that kl() finds it unsharded "
                'after a forward pass, or call register_fsdp_forward_method(model, "kl") once'
            )
        if not self.one_draw:
            undrawn = [Joined(each, each.leaf()) for each in self._groups()[0]]
            return kl(self.posterior, prior, seed=self.seed, step=self.draws, joined=undrawn)
        # Weights drawn before the posterior changed would give a wrong KL.
        last = self._last
        if last is None or last.versions != self.versions():
            return kl(self.posterior, prior)
        at = {"seed": self.seed, "step": self.draws}
        return kl(self.posterior, prior, weights=last.weights, **at, joined=last.joined)

    def get_extra_state(self) -> dict[str, int]:
        """Seed and number of draws, so that a resumed run draws the same weights as an uninterrupted one."""
        return {"seed": self.seed, "draws": self.draws}

    def set_extra_state(self, state: dict[str, int]) -> None:
        """Continue from a saved number of draws."""
        self.seed, self.draws = state["seed"], state["draws"]
        self._met, self._watch = False, NllWatch(self)

    def __getstate__(self) -> dict[str, Any]:
        # Parts of an autograd graph cannot be copied, and the rest refers to these leaves.
        own: dict[str, Any] = {"_last": None, "_runner": None, "_watch": None}
        return {**self.__dict__, **own, "_grouped": ([], [], [])}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._watch = NllWatch(self)

    def _meet(self) -> None:
        """Before the first draw: give all processes one seed, and refuse them if draws would differ."""
        if self._met or not (torch.is_grad_enabled() and several()):
            return
        self._met, world = True, World(None)
        if not (self._seeded or self.draws):
            self.seed = world.gathered(self.seed)[0]
        world.refuse_others(self.get_extra_state(), "the Variational's")

    def _draw(self, samples: int) -> dict[str, Tensor]:
        """Weights ``[samples, ...]`` of every tensor, kept for the next KL."""
        if samples < 1:
            raise ValueError(f"a posterior draws at least one sample, not {samples}: pass samples >= 1")
        weights = self.posterior._sample(range(samples), self.seed, self._count(), Domain.TRAIN)
        self._drawn(weights, [])
        return weights

    def _draw_one(self) -> dict[str, Tensor]:
        """The same for one sample, without the leading dimension; leaves of one kind are drawn together."""
        at: dict[str, Any] = {"seed": self.seed, "step": self._count(), "domain": Domain.TRAIN}
        joined = [each.draw(**at) for each in self._groups()[0]]
        done = {name for each in joined for name in each.blocks.leaves}
        left = {name: leaf for name, leaf in self.posterior.blocks.items() if name not in done}
        draws = {name: leaf.draw(leaf.noise(range(1), block=name, **at)) for name, leaf in left.items()}
        weights = {
            name: part
            for block, draw in draws.items()
            for name, part in zip(self.posterior.tensors[block], left[block].split(draw), strict=True)
        }
        self._drawn(weights, joined)
        one = {name: each[0] for name, each in weights.items()}
        for each in joined:  # whose blocks are single tensors
            assert each.weights is not None
            one |= each.blocks.apart(each.weights.flatten())
        return one

    def _drawn(self, weights: dict[str, Tensor], joined: list[Joined]) -> None:
        # For kl(): weights drawn without a graph would not give it a gradient.
        self._last = _Draw(weights, joined, self.versions()) if torch.is_grad_enabled() else None

    def _groups(self) -> tuple[list[EndToEnd], list[EndToEnd]]:
        """Joined leaves of one kind, and the blocks that are drawn together for layers with estimators.

        They are rebuilt if leaves were replaced, moved or cast.
        """
        leaves = self.posterior.blocks
        kinds: list[Any] = [(leaf, leaf.device, leaf.dtype) for leaf in leaves.values()]
        if self._grouped[0] != kinds:
            drawn = [] if self.one_draw else together(leaves, self.estimators, lambda name: leaves[name].kind)
            self._grouped = kinds, end_to_end(leaves), drawn
        return self._grouped[1:]

    def _count(self) -> int:
        """The number of this draw."""
        with _drawing:  # two threads must not get the same number
            if several() and not torch.is_grad_enabled():  # a single process may draw
                number, self._peeks = _PEEKS + self._peeks, self._peeks + 1
            else:
                number, self.draws = self.draws, self.draws + 1
        return number

    def _ahead(self, samples: int) -> int:
        """Number of samples in the processes before this one, each of which has its own examples."""
        return World(None).rank * samples if torch.is_grad_enabled() and several() else 0

    def _given(self, samples: range, level: int | None, step: int, ahead: int) -> dict[str, Tensor]:
        """The values that the module gets for its parameters, by the blocks' estimators."""
        return parameters_of(
            self._groups()[1],
            self.posterior.tensors,
            self.estimators,
            samples,
            level=level,
            batch_dim=self.batch_dim,
            ahead=ahead,
            seed=self.seed,
            step=step,
        )

    @property
    def _sampled(self) -> Sampled:
        """The module as a function of sample numbers."""
        if self._runner is None:
            self._runner = (Sampled(self.module, self._given),)  # in a tuple: it is not a submodule
        return self._runner[0]

    def versions(self) -> list[int]:
        """Numbers that change whenever the posterior does."""
        # Most leaves have no submodules, so this is faster than parameters().
        leaves = self.posterior.blocks.values()
        own = (leaf.parameters() if leaf._modules else leaf._parameters.values() for leaf in leaves)
        return [now for p in chain.from_iterable(own) if p is not None for now in (id(p), p._version)]


@takes(module=MODULE, std_scale=NUMBER, std_init=NUMBER, deterministic=FILTER, seed=WHOLE, prior=_A_PRIOR)
def variational(
    module: nn.Module,
    *,
    family: Family | Mapping[str, Family] = DiagonalGaussian,
    std_scale: float | None = None,
    std_init: float | None = None,
    deterministic: NameFilter = (),
    seed: int | None = None,
    estimator: Estimator | Mapping[str, Estimator] = "weight",
    batch_dim: int = 0,
    prior: Prior | None = None,
) -> Variational:
    """Give a module's weights a posterior that is trained by gradient.

    Args:
        module: Any module; it is not copied, and its parameters become the means. A hook on its layers
            refuses to run them inside a backward pass.
        family: A function from a parameter and its initial std to its leaf; or families by name patterns, of
            which the first match is used: ``{"conv*.weight": MyFamily, "*": DiagonalGaussian}``.
        std_scale: Std of the weights at the start, times the square root of their mean fan-in, as for rules.
            A whole batch shares each draw of the weights, so wider stds slow training down. With a sparsity
            prior the default is wider (``presets.toml``).
        std_init: Std of every weight at the start, in place of ``std_scale``.
        deterministic: Filter of names that stay plain parameters, without a prior.
        seed: Seed of the weight noise; see :class:`Variational` for the default.
        estimator: ``"weight"``, ``"local"`` or ``"flipout"``, or these by name patterns; see
            :class:`Variational`.
        batch_dim: The axis of the examples; see :class:`Variational`.
        prior: The prior of ``model.kl()``: N(0, 1), or any other that ``kl`` takes, such as
            :class:`~posterity.LogUniform` for weights that can be removed.

    Example:
        >>> net = nn.Linear(4, 2)
        >>> model = variational(net)
        >>> import torch
        >>> opt = torch.optim.Adam(model.parameters(), lr=1e-2)
        >>> x, y = torch.randn(8, 4), torch.randint(0, 2, (8,))
        >>> from posterity import elbo
        >>> loss = elbo(nn.functional.cross_entropy(model(x), y), model.kl(), num_data=8, factor=0.01)
        >>> loss.backward(); opt.step()
    """
    widths = {"std_scale": std_scale, "std_init": std_init}
    found = settings("variational", "sparse" if _sparse(prior) else "default", widths, tuple(widths))
    for key in ("std_scale", "std_init"):
        if found[key] is not None and not 0.0 < found[key] < math.inf:
            raise ValueError(f"{key} must be finite and greater than 0, not {found[key]}")
    params = {name: p for name, p in module.named_parameters() if p.requires_grad}
    fixed = select(params, deterministic)
    drawn = {name: p for name, p in params.items() if name not in fixed}
    if not drawn:
        raise ValueError(
            "there is no parameter to draw: none requires a gradient, or deterministic= names all of them"
        )
    for name, p in drawn.items():
        if not p.is_floating_point():
            raise TypeError(
                f"{name!r} is {p.dtype}, and only real floating-point weights have a posterior: name it in "
                "deterministic="
            )
    families = family if isinstance(family, Mapping) else {"*": family}
    refuse_unmatched(families, dict(module.named_parameters()))
    std = start_std(found, drawn.values())
    leaves = {}
    for name, p in drawn.items():
        leaves[name] = _leaf_by(first_match(families, name), p, std)
    return Variational(
        module, Factorised(leaves), seed, estimator=estimator, batch_dim=batch_dim, prior=prior
    )


def _leaf_by(family: Any, p: Tensor, std: float) -> Leaf:
    """The leaf that a family makes for a parameter."""
    called = getattr(family, "__name__", None) or described(family)
    refusal = (
        f"family= must make a leaf from a parameter and its std, which {called} does not: use "
        "DiagonalGaussian, cfg or mnf"
    )
    kind = isinstance(family, type)
    if not callable(family) or isinstance(family, nn.Module) or (kind and not issubclass(family, Leaf)):
        raise TypeError(refusal)
    try:
        leaf = family(p, std)
    except TypeError as error:
        if kind:  # a leaf built from other arguments, such as those of K-FAC and Laplace
            raise TypeError(refusal) from error
        raise
    if not isinstance(leaf, Leaf):
        raise TypeError(refusal)
    return leaf


def _sparse(prior: Prior | None) -> bool:
    """Whether a prior, or one of a ByName, turns unneeded weights into noise."""
    if isinstance(prior, ByName):
        return any(map(_sparse, prior.priors.values()))
    return isinstance(prior, SparsityPrior | GroupPrior)


def _refuse_again(module: nn.Module, args: object) -> None:
    """Raise if a layer runs again in a backward pass, where it would use its means."""
    if graph_task_id() != -1:
        raise RuntimeError(
            f"activation checkpointing would run a {type(module).__name__} again at its means, not at the "
            "drawn weights: turn it off, or train by an optimizer's step(closure)"
        )


def _refuse_drawn(posterior: Factorised, module: nn.Module) -> None:
    """Raise for parameters that a submodule already draws."""
    drawing = [
        f"{path}." if path else "" for path, part in module.named_modules() if isinstance(part, Variational)
    ]
    for name in posterior.shapes():
        if drawing and name.startswith(tuple(drawing)):
            raise ValueError(
                f"{name!r} belongs to a Variational, which draws its weights already: pass the module that "
                "inside it, or name its parameters in deterministic="
            )


def _share_again(model: Variational, _: object) -> None:
    """Share means again after a load with ``assign=True``, which gives module and posterior separate ones."""
    share_means_again(model.posterior, model.module)
