"""The parts of a reproduction: studies of cells, each cell a method in a setting, run once per seed.

* `Cell`: a method in a setting, with all settings of its runs, and a grid of tuned values;
* `Unit`: a cell with a seed, or one trial of a cell's grid: the work behind one record;
* `Study`: the cells whose records are in one folder, and how to run their units;
* `Experiment`: a table or figure of a paper, drawn from the records of a study. Several may share one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, TypeAlias

Values: TypeAlias = Mapping[str, Any]
Show: TypeAlias = Callable[[int, int, str], None]
# Runs a unit on a device, with a folder for checkpoints, and calls ``show(done, total, what)``.
Run: TypeAlias = Callable[["Unit", str, Path, Show], "Outcome"]

# The seed of every trial, which differs from those of reported results.
TRIAL_SEED = 100


@dataclass(frozen=True)
class Cell:
    """A method in a setting.

    Attributes:
        setting: The net and the form of the data; part of a record's name.
        method: A name for `learners.learner`.
        config: All settings of a run except its seed, with defaults of the tuned ones.
        grid: The values of each trial in place of the defaults, one entry per trial.
        trial: Other differences of trials: held-out data in place of the test set, fewer epochs.
        score: The metric by which the best trial is chosen; higher is better.
        tuned_as: The setting whose trials decide; this one's own if not given.

    Example:
        >>> Cell("400", "sgd", {"lr": 0.1}, grid=({"lr": 0.1}, {"lr": 0.01})).tuned
        '400'
    """

    setting: str
    method: str
    config: Values
    grid: Sequence[Values] = ()
    trial: Values = field(default_factory=dict)
    score: str = "accuracy"
    tuned_as: str | None = None

    @property
    def tuned(self) -> str:
        """The setting whose trials decide."""
        return self.tuned_as or self.setting


@dataclass(frozen=True)
class Unit:
    """One piece of work.

    Attributes:
        study: Its study's name.
        setting: Its cell's.
        method: Its cell's.
        seed: Seed of initial weights, order of the data and noise.
        config: All other settings.
        chosen: How tuned values were chosen, in words.
        trial: The values of a trial; None for a result to report.

    Example:
        >>> Unit("mnist", "400", "bgd", 0, {}, "the default").name
        '400-bgd-seed0'
    """

    study: str
    setting: str
    method: str
    seed: int
    config: Values
    chosen: str
    trial: Values | None = None

    @property
    def name(self) -> str:
        """The name of its record."""
        start = f"{self.setting}-{self.method}".replace(" ", "-")
        if self.trial is None:
            return f"{start}-seed{self.seed}"
        return f"trial-{start}-" + "-".join(f"{key}{value:g}" for key, value in self.trial.items())

    @property
    def full_name(self) -> str:
        """The name with that of its study."""
        return f"{self.study}/{self.name}"

    def cache(self, out: Path) -> Path:
        """The folder of its checkpoints and posterior, which is different for every config."""
        key = json.dumps(dict(self.config), sort_keys=True).encode()
        return out / "cache" / self.study / f"{self.name}-{hashlib.blake2b(key, digest_size=4).hexdigest()}"


@dataclass(frozen=True)
class Outcome:
    """The result of a unit: metrics as JSON types, and n, the number of test examples (or steps)."""

    metrics: dict[str, Any]
    n: int


@dataclass(frozen=True)
class Study:
    """Cells that are run in the same way.

    Attributes:
        name: Name of the folder of its records.
        cells: The cells at full size, or the quick ones.
        run: Runs a unit.
        metrics: Every metric of its records; ``"errors.single"`` is one inside another.
        seeds: Seeds to run by default.
        tested: Whether its units are evaluated on test data, which is counted.
    """

    name: str
    cells: Callable[[bool], Sequence[Cell]]
    run: Run
    metrics: tuple[str, ...] = ()
    seeds: tuple[int, ...] = (0, 1, 2)
    tested: bool = True


@dataclass(frozen=True)
class Experiment:
    """A table or figure of a paper.

    Attributes:
        name: Name on the command line.
        title: Title.
        claim: The paper's claim, in a sentence.
        paper: The paper's numbers by setting and method, as printed.
        study: The study with its records.
        wanted: Which of the study's cells it needs.
    """

    name: str
    title: str
    claim: str
    paper: Mapping[tuple[str, str], str]
    study: Study
    wanted: Callable[[Cell], bool] = lambda cell: True

    def cells(self, quick: bool) -> list[Cell]:
        """The cells that it needs."""
        return [cell for cell in self.study.cells(quick) if self.wanted(cell)]


def grid(**values: Sequence[float]) -> list[dict[str, float]]:
    """Every combination of the values, one entry each.

    Example:
        >>> grid(lr=[0.1, 1.0], std_init=[0.05])
        [{'lr': 0.1, 'std_init': 0.05}, {'lr': 1.0, 'std_init': 0.05}]
    """
    return [dict(zip(values, each, strict=True)) for each in product(*values.values())]
