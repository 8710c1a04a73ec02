"""What a backward pass gathers beyond the gradient: per-example squares, Kronecker factors."""

from posterity.curvature.collector import Collector, Squares
from posterity.curvature.factors import Factors
from posterity.curvature.fisher import fisher, vmap_squares
from posterity.curvature.results import Curvature, Kronecker, NothingCollected, Uncollected

__all__ = [
    "Collector",
    "Curvature",
    "Factors",
    "Kronecker",
    "NothingCollected",
    "Squares",
    "Uncollected",
    "fisher",
    "vmap_squares",
]
