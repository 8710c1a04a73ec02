"""A posterior that shares its means with a module, so that training it trains the module's parameters.

Padding rows of the module's embeddings keep their values.
"""

from __future__ import annotations

from copy import deepcopy

import torch
from torch import nn

from posterity.names import padding_rows
from posterity.posterior.base import Posterior
from posterity.posterior.divergence import kl
from posterity.posterior.factorised import Factorised
from posterity.posterior.leaf import Leaf
from posterity.posterior.priors import ByName, Density


def share_means(
    posterior: Factorised, module: nn.Module, prior: Posterior | Density | ByName | None
) -> Factorised:
    """The posterior with trainable leaves, whose means are the module's parameters.

    Errors, such as a prior that does not fit, are raised before the module or the posterior changes.
    """
    params = dict(module.named_parameters())
    own = {name: [params[each] for each in names] for name, names in posterior.tensors.items()}
    leaves: dict[str, Leaf] = {}
    for name, leaf in posterior.blocks.items():
        try:
            leaves[name] = leaf.trainable()
        except (TypeError, ValueError) as error:
            raise type(error)(f"{name!r} cannot be trained: {error}") from None
    if prior is not None:
        there = {
            name: leaf
            if leaf.loc is own[name][0]
            else deepcopy(leaf).to(own[name][0].device, own[name][0].dtype)
            for name, leaf in leaves.items()
        }
        with torch.no_grad():
            kl(_hold_padding(posterior.rebuilt(there), module), prior, seed=0)
    for name, leaf in leaves.items():
        leaf.share_mean(*own[name])
    # It is trained at drawn weights of the module itself, so it is not a linearisation.
    return _hold_padding(Factorised({posterior.tensors[name]: leaf for name, leaf in leaves.items()}), module)


def share_means_again(posterior: Factorised, module: nn.Module) -> None:
    """Let a posterior and a module whose means have become separate share the module's again."""
    params = dict(module.named_parameters())
    for name, leaf in posterior.blocks.items():
        leaf.share_mean(*(params[each] for each in posterior.tensors[name]))


def _hold_padding(posterior: Factorised, module: nn.Module) -> Factorised:
    """The posterior, with padding rows of embeddings held at their values."""
    params, rows = dict(module.named_parameters()), padding_rows(module)
    for block, names in posterior.tensors.items():
        if any(params[name] in rows for name in names):
            masks = [torch.zeros(params[name].shape, dtype=torch.bool) for name in names]
            for name, mask in zip(names, masks, strict=True):
                if params[name] in rows:
                    mask[rows[params[name]]] = True
            leaf = posterior.block(block)
            leaf.hold(leaf.join(masks))
    return posterior
