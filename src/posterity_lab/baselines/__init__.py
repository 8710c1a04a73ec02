"""Baselines of continual learning: plain training, penalties, Bayes by Backprop, VOGN with boundaries; and
methods that leave most weights at zero.

All are `posterity_lab.methods.Method`s that also get the boundaries between tasks: at each boundary
:func:`posterity_lab.continual.run` calls ``boundary(data)`` with the training data of the finished task.
"""

from posterity_lab.baselines.backprop import bbb, vcl
from posterity_lab.baselines.gates import l0
from posterity_lab.baselines.handed import vogn_told
from posterity_lab.baselines.penalty import fisher
from posterity_lab.baselines.point import adam, ewc, l2, sgd, si
from posterity_lab.baselines.sparse import Sparsifying, magnitudes, variational_dropout

__all__ = [
    "Sparsifying",
    "adam",
    "bbb",
    "ewc",
    "fisher",
    "l0",
    "l2",
    "magnitudes",
    "sgd",
    "si",
    "variational_dropout",
    "vcl",
    "vogn_told",
]
