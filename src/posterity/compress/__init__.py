"""What a posterior is sure of makes a model smaller: fewer units, fewer bits, a file to deploy."""

from posterity.compress.export import Format, export
from posterity.compress.pruning import Groups, Scope, Score, magnitude, point_mass, prune, snr, sparsity
from posterity.compress.quantise import Quantised, quantise
from posterity.compress.shrink import Shrunk, shrink

__all__ = [
    "Format",
    "Groups",
    "Quantised",
    "Scope",
    "Score",
    "Shrunk",
    "export",
    "magnitude",
    "point_mass",
    "prune",
    "quantise",
    "shrink",
    "snr",
    "sparsity",
]
