"""What q is: posteriors, priors, and the divergence between them."""

from posterity.posterior.base import Leaf, Posterior
from posterity.posterior.diagonal import DiagonalGaussian
from posterity.posterior.divergence import kl, register_kl
from posterity.posterior.eigen import EigenGaussian
from posterity.posterior.factorised import Factorised
from posterity.posterior.matrix import MatrixGaussian
from posterity.posterior.priors import ByName, Density, IsotropicGaussian, ScaleMixture

__all__ = [
    "ByName",
    "Density",
    "DiagonalGaussian",
    "EigenGaussian",
    "Factorised",
    "IsotropicGaussian",
    "Leaf",
    "MatrixGaussian",
    "Posterior",
    "ScaleMixture",
    "kl",
    "register_kl",
]
