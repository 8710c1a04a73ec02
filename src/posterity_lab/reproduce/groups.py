"""Records of one method in one setting, and their numbers for tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from posterity_lab.reproduce.learners import NAMES
from posterity_lab.reproduce.records import Record
from posterity_lab.reproduce.study import Cell, Experiment


@dataclass(frozen=True)
class Group:
    """The runs of one method in one setting, in the order of their seeds.

    Attributes:
        setting: Setting of all runs.
        method: Method of all runs.
        whole: Records of runs that finished.
        diverged: Number of runs that diverged.
        paper: The paper's number, if it has one.
        tried: Records of the trials that finished.
    """

    setting: str
    method: str
    whole: Sequence[Record]
    diverged: int
    paper: str
    tried: Sequence[Record] = ()

    @property
    def name(self) -> str:
        """The method's display name."""
        return NAMES[self.method]

    @property
    def title(self) -> str:
        """Setting and method."""
        return f"{self.setting} {self.name}"

    @property
    def runs(self) -> str:
        """How many runs there are."""
        return f"{len(self.whole)}" + (f" and {self.diverged} diverged" if self.diverged else "")

    @property
    def time(self) -> str:
        """Mean time of a run; for a resumed run, only the time of its last part is known."""
        if not self.whole:
            return "–"
        least = "≥ " if any(record["resumed"] for record in self.whole) else ""
        seconds = fmean(record["seconds"] for record in self.whole)
        return f"{least}{seconds:.0f} s" if seconds < 600 else f"{least}{seconds / 60:.0f} min"

    @property
    def epochs(self) -> str:
        """Number of epochs of a run."""
        return str(self.whole[0]["config"]["epochs"]) if self.whole else "–"

    def values(self, of: Callable[[Record], float]) -> list[float]:
        """A metric of every run."""
        return [of(record) for record in self.whole]

    def spread(self, of: Callable[[Record], float], digits: int = 2, scale: float = 100.0) -> str:
        """Mean ± standard deviation over the runs, in per cent unless scaled otherwise."""
        values = [scale * value for value in self.values(of)]
        if not values:
            return "–"
        sd = f" ± {stdev(values):.{digits}f}" if len(values) > 1 else ""
        return f"{fmean(values):.{digits}f}{sd}"


def groups(experiment: Experiment, records: Sequence[Record]) -> list[Group]:
    """The runs of an experiment without trials, in the order of its cells.

    Raises:
        ValueError: Runs that should differ only in their seed have different settings.
    """
    found: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        if record["trial"] is None and experiment.wanted(Cell(record["setting"], record["method"], {})):
            found.setdefault((record["setting"], record["method"]), []).append(record)
    for (setting, method), own in found.items():
        for record in own:
            if record["config"] != own[0]["config"]:
                seeds = f"{own[0]['seed']} and {record['seed']}"
                raise ValueError(
                    f"{record['study']}: seeds {seeds} of {setting} {method} were run with different "
                    "settings: delete the records of one of them, and run it again"
                )
    order = [(cell.setting, cell.method) for quick in (False, True) for cell in experiment.cells(quick)]
    return [
        Group(
            *key,
            whole=sorted((each for each in own if each["diverged"] is None), key=lambda each: each["seed"]),
            diverged=sum(each["diverged"] is not None for each in own),
            paper=experiment.paper.get(key, "–"),
            tried=[
                each
                for each in records
                if each["trial"] is not None
                and each["diverged"] is None
                and (each["setting"], each["method"]) == key
            ],
        )
        for key, own in sorted(found.items(), key=lambda item: _place(item[0], order))
    ]


def settings(found: Sequence[Group]) -> list[str]:
    """The settings of some groups, each once, in order."""
    return list(dict.fromkeys(group.setting for group in found))


def within(found: Sequence[Group], setting: str) -> list[Group]:
    """The groups of a setting with at least one finished run."""
    return [group for group in found if group.setting == setting and group.whole]


def columns(runs: Sequence[Sequence[float]]) -> tuple[list[float], list[float]]:
    """Mean and standard deviation over the runs, at each index.

    Example:
        >>> columns([[1.0, 2.0], [3.0, 2.0]])
        ([2.0, 2.0], [1.4142135623730951, 0.0])
    """
    places = list(zip(*runs, strict=True))
    return [fmean(each) for each in places], [stdev(each) if len(each) > 1 else 0.0 for each in places]


def _place(key: tuple[str, str], order: list[tuple[str, str]]) -> int:
    return order.index(key) if key in order else len(order)
