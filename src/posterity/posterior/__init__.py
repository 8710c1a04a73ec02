"""What q is: posteriors, priors, and the divergence between them."""

from posterity.posterior import formulas as formulas  # registers them
from posterity.posterior.base import Posterior
from posterity.posterior.diagonal import DiagonalGaussian
from posterity.posterior.divergence import kl, register_kl
from posterity.posterior.eigen import EigenGaussian
from posterity.posterior.factorised import Factorised
from posterity.posterior.flow import mnf
from posterity.posterior.groups import GroupHorseshoe, GroupNormalJeffreys, GroupPrior, ghs, gnj
from posterity.posterior.kernel import KernelGaussian, cfg
from posterity.posterior.leaf import Leaf
from posterity.posterior.matrix import MatrixGaussian
from posterity.posterior.priors import ByName, Density, IsotropicGaussian, ScaleMixture, around
from posterity.posterior.scaled import ScaledGaussian
from posterity.posterior.sparse import ARD, LogUniform, SparsityPrior

__all__ = [
    "ARD",
    "ByName",
    "Density",
    "DiagonalGaussian",
    "EigenGaussian",
    "Factorised",
    "GroupHorseshoe",
    "GroupNormalJeffreys",
    "GroupPrior",
    "IsotropicGaussian",
    "KernelGaussian",
    "Leaf",
    "LogUniform",
    "MatrixGaussian",
    "Posterior",
    "ScaleMixture",
    "ScaledGaussian",
    "SparsityPrior",
    "around",
    "cfg",
    "ghs",
    "gnj",
    "kl",
    "mnf",
    "register_kl",
]
