"""Training q by a rule: the optimiser class, and one file per method."""

from posterity.optim.bgd import BGD
from posterity.optim.bong import BONG
from posterity.optim.counting import CountWarning
from posterity.optim.ivon import IVON
from posterity.optim.kfac import KFAC, NoisyKFAC
from posterity.optim.optimizer import VariationalOptimizer
from posterity.optim.scales import ScaleWarning
from posterity.optim.statistics import Statistics
from posterity.optim.vogn import OGN, VOGN
from posterity.optim.watch import DivergenceWarning

__all__ = [
    "BGD",
    "BONG",
    "IVON",
    "KFAC",
    "OGN",
    "VOGN",
    "CountWarning",
    "DivergenceWarning",
    "NoisyKFAC",
    "ScaleWarning",
    "Statistics",
    "VariationalOptimizer",
]
