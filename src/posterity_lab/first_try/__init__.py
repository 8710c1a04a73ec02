"""What every method gives a newcomer: required arguments only, on the tasks that people try first.

``tasks`` has the data, nets and lengths of training, ``methods`` the calls as a first user writes them, and
``trials`` runs one of each. The benchmark ``first_try`` runs all of them.
"""

from posterity_lab.first_try.methods import METHODS
from posterity_lab.first_try.tasks import TASKS
from posterity_lab.first_try.trials import trial

__all__ = ["METHODS", "TASKS", "trial"]
