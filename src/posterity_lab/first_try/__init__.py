"""Results of every method for a newcomer: only required arguments, on tasks that people try first.

``tasks`` has the data, nets and lengths of training, ``methods`` the calls as a new user writes them, and
``trials`` runs a method on a task. The benchmark ``first_try`` runs all of them.
"""

from posterity_lab.first_try.methods import METHODS
from posterity_lab.first_try.tasks import TASKS
from posterity_lab.first_try.trials import trial

__all__ = ["METHODS", "TASKS", "trial"]
