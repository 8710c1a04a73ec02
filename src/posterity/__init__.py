"""Posterity learns a posterior over a network's weights, and hands it on."""

from posterity import continual, curvature, diagnostics, laplace, metrics
from posterity.compress import magnitude, point_mass, prune, snr, sparsity
from posterity.dropout import MCDropout, dropout_kl
from posterity.mc import run
from posterity.names import names_of
from posterity.objective import blundell, elbo, warmup
from posterity.optim import (
    BGD,
    IVON,
    KFAC,
    OGN,
    VOGN,
    CountWarning,
    DivergenceWarning,
    NoisyKFAC,
    ScaleWarning,
    VariationalOptimizer,
)
from posterity.posterior import (
    ARD,
    ByName,
    Density,
    DiagonalGaussian,
    EigenGaussian,
    Factorised,
    GroupHorseshoe,
    GroupNormalJeffreys,
    IsotropicGaussian,
    KernelGaussian,
    Leaf,
    LogUniform,
    MatrixGaussian,
    Posterior,
    ScaledGaussian,
    ScaleMixture,
    around,
    cfg,
    ghs,
    gnj,
    kl,
    mnf,
    register_kl,
)
from posterity.predict import predict
from posterity.prediction import Prediction
from posterity.train import compile_step
from posterity.variational import Variational, variational

__version__ = "0.1.0"

__all__ = [
    "ARD",
    "BGD",
    "IVON",
    "KFAC",
    "OGN",
    "VOGN",
    "ByName",
    "CountWarning",
    "Density",
    "DiagonalGaussian",
    "DivergenceWarning",
    "EigenGaussian",
    "Factorised",
    "GroupHorseshoe",
    "GroupNormalJeffreys",
    "IsotropicGaussian",
    "KernelGaussian",
    "Leaf",
    "LogUniform",
    "MCDropout",
    "MatrixGaussian",
    "NoisyKFAC",
    "Posterior",
    "Prediction",
    "ScaleMixture",
    "ScaleWarning",
    "ScaledGaussian",
    "Variational",
    "VariationalOptimizer",
    "around",
    "blundell",
    "cfg",
    "compile_step",
    "continual",
    "curvature",
    "diagnostics",
    "dropout_kl",
    "elbo",
    "ghs",
    "gnj",
    "kl",
    "laplace",
    "magnitude",
    "metrics",
    "mnf",
    "names_of",
    "point_mass",
    "predict",
    "prune",
    "register_kl",
    "run",
    "snr",
    "sparsity",
    "variational",
    "warmup",
]
