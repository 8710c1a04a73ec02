"""Reproductions: the tables and figures of papers as commands, and a page of the results.

``posterity reproduce NAME`` runs the units that have no record yet; ``posterity report`` makes the page from
the records alone. See `study` for the terms.
"""

from posterity_lab.reproduce.driver import reproduce
from posterity_lab.reproduce.experiments import EXPERIMENTS, experiment
from posterity_lab.reproduce.study import Cell, Experiment, Outcome, Study, Unit

__all__ = ["EXPERIMENTS", "Cell", "Experiment", "Outcome", "Study", "Unit", "experiment", "reproduce"]
