"""What a posterior is sure of makes a model smaller: weights set to zero, then units removed for good."""

from posterity.compress.pruning import Scope, Score, magnitude, point_mass, prune, snr, sparsity
from posterity.compress.shrink import Shrunk, shrink

__all__ = ["Scope", "Score", "Shrunk", "magnitude", "point_mass", "prune", "shrink", "snr", "sparsity"]
