"""The page that shows what was reproduced, from the records alone: nothing is trained here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from posterity_lab import report
from posterity_lab.report import Part, Picture, Section, Table
from posterity_lab.reproduce.experiments import EXPERIMENTS
from posterity_lab.reproduce.groups import Group, groups
from posterity_lab.reproduce.learners import NAMES
from posterity_lab.reproduce.records import Record, choice, read_all, tried
from posterity_lab.reproduce.study import Experiment
from posterity_lab.reproduce.views import VIEWS
from posterity_lab.source import named

_LEAD = (
    "Bayesian Gradient Descent (Zeno, Golan, Hoffer, Soudry 2018), VOGN (Osawa et al. 2019), Bayes by "
    "Backprop (Blundell et al. 2015), Bayesian incremental learning (Kochurov et al. 2018), sparse "
    "variational dropout (Molchanov et al. 2017) and Bayesian compression (Louizos et al. 2017): what the "
    "papers report, and what these runs found. Numbers are means ± standard deviations over seeds, on test "
    "sets; how hyper-parameters were chosen is said with each."
)


def write(results: Path, out: Path, pictures: Path | None = None) -> int:
    """Write the page, and return the number of records in it.

    Args:
        results: Folder with records of ``reproduce``.
        out: The HTML file to write.
        pictures: Folder for the page's drawings as files of their own, ``NAME-NUMBER.svg``, too.

    Raises:
        ValueError: A record is damaged, there are none, or the page cannot be written there.

    Example:
        >>> write(Path("nowhere"), Path("report.html"))
        Traceback (most recent call last):
            ...
        ValueError: there are no records in nowhere: make some with posterity reproduce
    """
    if out.is_dir() or not out.parent.is_dir():
        wrong = f"{out} is a folder" if out.is_dir() else f"there is no folder {out.parent}"
        raise ValueError(f"{wrong}: choose another --out")
    studies = {experiment.study.name: experiment.study for experiment in EXPERIMENTS.values()}
    records = {name: read_all(study, results) for name, study in studies.items()}
    count = sum(map(len, records.values()))
    if not count:
        raise ValueError(f"there are no records in {results}: make some with posterity reproduce")
    found = {
        experiment.name: groups(experiment, records[experiment.study.name])
        for experiment in EXPERIMENTS.values()
    }
    shown = {name: _drawn(each, found[name], records[each.study.name]) for name, each in EXPERIMENTS.items()}
    sections = [Section("Overview", [_overview(found)]), *shown.values()]
    lead = _LEAD
    if any(_quick(record) for own in records.values() for record in own):
        lead += " There are quick runs on scikit-learn's digits here: their numbers mean nothing."
    out.write_text(report.page("Posterity: reproductions", lead, sections), encoding="utf-8")
    if pictures is not None:
        pictures.mkdir(parents=True, exist_ok=True)
        for name, section in shown.items():
            drawn = [part for part in section.parts if isinstance(part, Picture)]
            for number, part in enumerate(drawn, 1):
                (pictures / f"{name}-{number}.svg").write_bytes(part.svg)
    return count


def _overview(found: dict[str, list[Group]]) -> Table:
    rows = []
    for name, own in found.items():
        whole = [record for group in own for record in group.whole]
        minutes = sum(record["seconds"] for record in whole) / 60
        diverged = sum(group.diverged for group in own)
        rows.append([EXPERIMENTS[name].title, str(len(whole)), str(diverged), f"{minutes:.1f}", name])
    return Table(
        "What there is", ["experiment", "runs", "diverged", "minutes", "posterity reproduce …"], rows
    )


def _drawn(experiment: Experiment, found: Sequence[Group], records: Sequence[Record]) -> Section:
    try:
        return _section(experiment, found, records)
    except (TypeError, KeyError, IndexError, AttributeError, OverflowError) as error:
        # Digests say who wrote a record, not that its values have the kinds which are shown.
        raise ValueError(
            f"the records of {experiment.study.name} have values that no run writes ({error}): run its units "
            "again, or name another --results"
        ) from error


def _section(experiment: Experiment, found: Sequence[Group], records: Sequence[Record]) -> Section:
    claim = f"Paper: {experiment.claim}"
    rerun = (
        f"To run it anew: posterity reproduce {experiment.name} --out FOLDER, after the same with --tune "
        "where it is to be tuned; --epochs as in the table where it is less than the paper's."
    )
    if not any(group.whole for group in found):
        return Section(experiment.title, [claim, "It was not run yet.", rerun])
    parts: list[Part] = [claim, *VIEWS[experiment.name](found)]
    parts += _tuning(experiment, found, records)
    return Section(experiment.title, [*parts, _places(found), rerun])


def _tuning(experiment: Experiment, found: Sequence[Group], records: Sequence[Record]) -> list[Part]:
    """How hyper-parameters were chosen: a sentence for every group, then all trials."""
    chosen = [f"{group.title}: {group.whole[0]['chosen']}." for group in found if group.whole]
    parts: list[Part] = ["Hyper-parameters. " + " ".join(chosen)]
    wanted = {(group.setting, group.method) for group in found}
    rows = []
    cells = {(cell.setting, cell.method): cell for quick in (True, False) for cell in experiment.cells(quick)}
    for key, cell in cells.items():
        if key not in wanted or cell.tuned != cell.setting:
            continue
        best, _ = choice(cell, records)
        for record in tried(cell, records):
            values = ", ".join(f"{key} {value:g}" for key, value in record["trial"].items())
            score = "diverged" if record["diverged"] else f"{100 * record['metrics'][cell.score]:.2f}"
            mark = " *" if record["trial"] == best else ""
            rows.append([f"{cell.setting} {NAMES[cell.method]}: {values}{mark}", cell.score, score])
    if rows:
        parts.append(Table("Trials on held-out data (* the best), %", ["trial", "by", "found"], rows))
    return parts


def _places(found: Sequence[Group]) -> str:
    """The machines of the runs."""
    runs = [record for group in found for record in group.whole]
    places = {
        f"{place.get('gpu') if record['device'] == 'cuda' else place.get('processor')}, torch "
        f"{place.get('torch')}, {named(place)}"
        + (f", {place['jobs']} runs at a time" if place.get("jobs", 1) > 1 else "")
        + (", beside other runs" if place.get("shared") and place.get("jobs", 1) == 1 else "")
        for record in runs
        for place in [record["environment"]]
    }
    sizes = sorted({record["n"] for record in runs})
    return f"Run on: {'; '.join(sorted(places))}. n of a run: {', '.join(map(str, sizes))}."


def _quick(record: Record) -> bool:
    return bool(record["config"].get("data") == "digits")
