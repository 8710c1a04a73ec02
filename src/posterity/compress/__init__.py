"""What a posterior is sure of makes a model smaller: fewer units, fewer bits, a file to deploy."""

from posterity.compress.cost import Cost, measure
from posterity.compress.csr import SparseNet, sparse_layers
from posterity.compress.deploy import Format, export
from posterity.compress.pruning import Groups, Scope, Score, magnitude, point_mass, prune, snr, sparsity
from posterity.compress.removal import Shrunk, shrink
from posterity.compress.rounding import Quantised, quantise

__all__ = [
    "Cost",
    "Format",
    "Groups",
    "Quantised",
    "Scope",
    "Score",
    "Shrunk",
    "SparseNet",
    "export",
    "magnitude",
    "measure",
    "point_mass",
    "prune",
    "quantise",
    "shrink",
    "snr",
    "sparse_layers",
    "sparsity",
]
