"""Tables of reproduced results, in Markdown, made only from the records in ``results``.

A table has every method that was run in its setting, so a stronger competitor cannot be left out. A number is
the mean over seeds, with the standard deviation if there are several.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from tables import spread, table

from posterity_lab.bench import FOLDER
from posterity_lab.record import LOOKS
from posterity_lab.reproduce.experiments import EXPERIMENTS

RECORDS = FOLDER.parent / "results"
WIDTHS = ("400", "800", "1200")
NAMES = {
    "bgd": "BGD",
    "bong": "BONG",
    "vogn-told": "VOGN (told of switches)",
    "vogn": "VOGN",
    "ivon": "IVON",
    "bbb": "BBB",
    "bbb-mixture": "BBB (mixture prior)",
    "kfac": "K-FAC",
    "noisy-kfac": "Noisy K-FAC",
    "mc-dropout": "MC dropout",
    "si": "SI (told)",
    "ewc": "EWC (told)",
    "vcl": "VCL (told)",
    "sgd": "SGD",
    "sparse-vd": "sparse VD",
    "sparse-ard": "sparse VD, ARD",
    "gnj": "GNJ",
    "ghs": "GHS",
    "l0": "L0 gates",
    "magnitude": "magnitude",
    "ffg": "FFG",
    "ffg-laplace": "FFG, σ by Laplace",
    "cfg": "CFG",
    "mnf": "MNF",
    "fine-tuning": "fine-tuning",
    "joint": "joint training",
    "thompson": "Thompson sampling",
    "greedy": "greedy",
    "greedy-1": "greedy but for 1 %",
    "greedy-5": "greedy but for 5 %",
    "sgd-dropout": "SGD with dropout",
    "adam": "Adam",
}
MODES = {"single": "single networks", "average": "averaged probabilities", "mean": "mean weights"}
# The folders that hold BGD's runs for tables 1 and 2, and what differs between them.
EARLIER, SECOND, LATER = "earlier/bgd-mnist", "earlier/second-rule/bgd-mnist", "bgd-mnist"
RULES = {EARLIER: "paper's rule", LATER: "η 1.8 and a temperature"}
CRITERIA = {EARLIER: "first criterion", SECOND: "second criterion", LATER: "criterion fixed beforehand"}
# The folders of streams, and whether what chose their settings was fixed before any test result was known.
CHOICES = {"": "a rule fixed beforehand", "earlier/second-rule/": "an earlier rule"}

Record = dict[str, Any]
Runs = Mapping[tuple[str, str], list[Record]]
Cell = Callable[[list[Record]], str]


def load(folder: Path, study: str) -> Runs:
    """The finished runs of a study by setting and method, methods in the order of ``NAMES``; no trials."""
    found: dict[tuple[str, str], list[Record]] = {}
    for path in sorted((folder / study).glob("*.json")):
        record = json.loads(path.read_text())
        if record["trial"] is None:
            found.setdefault((record["setting"], record["method"]), []).append(record)
    order = list(NAMES)
    return dict(sorted(found.items(), key=lambda item: (order.index(item[0][1]), item[0][0])))


# Cells: text from the runs of one method in one setting.


def lengths(records: Iterable[Record]) -> str:
    """How long the runs of a method were, by setting where that differs: "600 / 300 epochs, 3 seeds"."""
    found = list(records)
    epochs = {record["setting"]: str(record["config"]["epochs"]) for record in found}
    text = " / ".join(epochs.values() if len(set(epochs.values())) > 1 else set(epochs.values()))
    seeds = len({record["seed"] for record in found})
    return f"{text} epochs, {seeds} seed{'s' if seeds > 1 else ''}"


def error(mode: str) -> Cell:
    """Test error in per cent by one way of inference."""
    return lambda records: spread((record["metrics"]["errors"][mode] for record in records), 2, 100)


def accuracy(records: list[Record]) -> str:
    """Accuracy in per cent; of a stream, the average over all tasks after the last."""
    ended = [record["metrics"]["accuracy"] for record in records if not record["diverged"]]
    lost = f" ({len(records) - len(ended)} of {len(records)} diverged)" if len(ended) < len(records) else ""
    return (spread(ended, 1, 100) if ended else "–") + lost


def calibration(records: list[Record]) -> str:
    """Accuracy in per cent, NLL and ECE: "85.8, 0.416, 0.012"."""
    nll, ece = (spread((record["metrics"][key] for record in records), 3) for key in ("nll", "ece"))
    return f"{accuracy(records)}, {nll}, {ece}"


def pruned(records: list[Record], fraction: float) -> tuple[str, str, str]:
    """Errors of single networks in per cent before and after pruning, and the ratio of the two."""
    curves = [record["metrics"]["pruning"]["single"] for record in records]
    before = [curve["unpruned"] for curve in curves]
    after = [curve["errors"][curve["fractions"].index(fraction)] for curve in curves]
    ratios = [large / small for large, small in zip(after, before, strict=True)]
    return spread(before, 2, 100), spread(after, 2, 100), spread(ratios, 2)


def by_setting(found: Runs, settings: Sequence[str], cell: Cell) -> dict[str, str]:
    """For every method with runs in one of the settings: its cells, joined by slashes."""
    return {
        method: " / ".join(
            cell(found[setting, method]) if (setting, method) in found else "–" for setting in settings
        )
        for method in NAMES
        if any((setting, method) in found for setting in settings)
    }


def beside(cells: Mapping[str, str], ours: str) -> str:
    """All methods but ours, with their cells."""
    return "; ".join(f"{NAMES[method]} {cell}" for method, cell in cells.items() if method != ours)


def together(by_name: Mapping[str, list[Record]]) -> str:
    """The lengths of several methods' runs, those of equal length together."""
    groups: dict[str, list[str]] = {}
    for name, records in by_name.items():
        groups.setdefault(lengths(records), []).append(name)
    if len(groups) == 1:
        return next(iter(groups))
    return "; ".join(f"{', '.join(names)}: {length}" for length, names in groups.items())


def by_method(found: Runs, settings: Sequence[str]) -> dict[str, list[Record]]:
    """All runs in these settings, by the method's name."""
    return {
        NAMES[method]: [run for setting in settings for run in found.get((setting, method), [])]
        for method in by_setting(found, settings, lengths)
    }


# The tables of docs/results.md.


def table1(folder: Path = RECORDS) -> str:
    """Table 1 of the BGD paper: test errors of MLPs on MNIST."""
    paper = EXPERIMENTS["bgd-table1"].paper
    rows = [
        [f"paper's {NAMES[method]}", *(paper[width, method] for width in WIDTHS), ""]
        for method in ("bgd", "bbb", "sgd")
    ]
    for study, rule in RULES.items():
        found = load(folder, study)
        for mode, how in MODES.items():
            for method in by_setting(found, WIDTHS, error(mode)):
                if method == "sgd" and mode != "mean":
                    continue  # without a posterior all ways of inference are one
                name = f"BGD, {rule}" if method == "bgd" else NAMES[method]
                cells = [error(mode)(found[width, method]) for width in WIDTHS]
                length = lengths(record for width in WIDTHS for record in found[width, method])
                rows.append([name if method == "sgd" else f"{name}: {how}", *cells, length])
    return table(["test error, %", *(f"2×{width}" for width in WIDTHS), "runs"], rows)


def pruning(folder: Path = RECORDS) -> str:
    """Tables 2 and 3 of the BGD paper: errors of single networks after pruning."""
    rows = []
    for study, name, fraction in (
        *((study, "bgd-table2", 0.95) for study in CRITERIA),
        ("bgd-cifar10", "bgd-table3", 0.9),
        ("earlier/second-rule/bgd-cifar10", "bgd-table3", 0.9),
    ):
        paper = EXPERIMENTS[name].paper
        for (setting, method), records in load(folder, study).items():
            if not setting.startswith(("1200", "vgg11")):
                continue
            how = ""
            if method == "bgd" and study in CRITERIA:
                how = f", {(CRITERIA if setting.endswith('to prune') else RULES)[study]}"
            rows.append(
                [
                    f"{NAMES[method]}, {setting}{how}",
                    f"{100 * fraction:.0f} %",
                    *pruned(records, fraction),
                    paper.get((setting, method), "–"),
                    lengths(records),
                ]
            )
    return table(["net", "removed", "error before, %", "after, %", "ratio", "paper's ratio", "runs"], rows)


def permuted(folder: Path = RECORDS) -> str:
    """Ten permuted tasks in a row: average accuracy after the last, by net and method.

    Runs whose settings an earlier rule chose are here only where there are none by the fixed rule.
    """
    found = {
        (study, *key): (records, choice)
        for place, choice in reversed(CHOICES.items())
        for study in ("bgd-permuted", "vogn-permuted")
        for key, records in load(folder, f"{place}{study}").items()
    }
    order = list(NAMES)
    rows = [
        [f"2×{setting}", NAMES[method], accuracy(records), lengths(records), choice]
        for (_, setting, method), (records, choice) in sorted(
            found.items(), key=lambda item: (int(item[0][1].split()[0]), item[0][1], order.index(item[0][2]))
        )
    ]
    head = ["net", "method", "average accuracy, %", "runs (epochs a task)", "settings by"]
    return table(head, rows)


def permuted_trials(folder: Path = RECORDS) -> str:
    """The best of the trials that choose settings for permuted tasks: other permutations, held-out images."""
    best: dict[tuple[str, str], list[float]] = {}
    for study in ("bgd-permuted", "vogn-permuted"):
        for path in sorted((folder / study).glob("trial-*.json")):
            record = json.loads(path.read_text())
            scores = best.setdefault((record["setting"], record["method"]), [])
            scores += [] if record["diverged"] else [record["metrics"]["accuracy"]]
    order = list(NAMES)
    rows = [
        [f"2×{setting}", NAMES[method], f"{100 * max(scores):.1f}", str(len(scores))]
        for (setting, method), scores in sorted(
            best.items(), key=lambda item: (int(item[0][0]), order.index(item[0][1]))
        )
        if scores
    ]
    return table(["net", "method", "best trial, %", "trials that ended"], rows)


def vogn(folder: Path = RECORDS) -> str:
    """The VOGN paper's table on CIFAR-10, with every method that was run."""
    found = load(folder, "vogn-cifar10")
    rows = [
        [
            setting,
            NAMES[method],
            calibration(found[setting, method]),
            printed(setting, method),
            lengths(found[setting, method]),
        ]
        for setting in ("lenet5", "alexnet", "alexnet unaugmented", "resnet18")
        for method in NAMES
        if (setting, method) in found
    ]
    return table(["net", "method", "accuracy in %, NLL, ECE", "paper", "runs"], rows)


def eight_parts(folder: Path = RECORDS) -> str:
    """ResNet-18 of the VOGN paper's table: VOGN in parts of a batch, beside what else was run."""
    found, setting = load(folder, "vogn-cifar10"), "resnet18"
    rows = []
    for method in NAMES:
        if runs := found.get((setting, method)):
            parts = {str(run["config"].get("parts", 1)) for run in runs}
            samples = {str(run["config"].get("mc_samples", 1)) for run in runs}
            cells = [NAMES[method], " / ".join(sorted(parts)), " / ".join(sorted(samples))]
            rows.append([*cells, calibration(runs), printed(setting, method), lengths(runs)])
    head = ["method", "parts of a batch", "samples of each", "accuracy in %, NLL, ECE", "paper", "runs"]
    return table(head, rows)


def printed(setting: str, method: str) -> str:
    """The VOGN paper's accuracy, NLL and ECE; its table has other columns too."""
    cell = EXPERIMENTS["vogn-table"].paper.get((setting, method))
    return "–" if cell is None else ", ".join(cell.split(" / ")[1:4])


def sparse(folder: Path = RECORDS) -> str:
    """LeNets with most weights removed: errors, compression, and what goes of every layer."""
    paper = EXPERIMENTS["sparse-lenet"].paper
    rows = [
        [
            setting,
            NAMES[method],
            metric("error", 2, 100)(records),
            f"{metric('compression', 1)(records)}×",
            by_layer(records),
            paper.get((setting, method), "–"),
            lengths(records),
        ]
        for (setting, method), records in load(folder, "sparse-lenet").items()
    ]
    head = ["net", "method", "error, %", "compression", "removed by layer, %", "paper", "runs"]
    return table(head, rows)


def units(folder: Path = RECORDS) -> str:
    """LeNets without whole units: what is left of every layer, and compression by pruning and by bits."""
    paper = EXPERIMENTS["sparse-groups"].paper
    rows = [
        [
            setting,
            NAMES[method],
            ", ".join("-".join(map(str, record["metrics"]["architecture"])) for record in records),
            f"{metric('by_pruning', 1)(records)}×",
            f"{metric('by_bits', 1)(records)}×" if records[0]["metrics"]["by_bits"] else "–",
            metric("error_small", 2, 100)(records),
            metric("error_rounded", 2, 100)(records) if records[0]["metrics"]["by_bits"] else "–",
            paper.get((setting, method), "–"),
            lengths(records),
        ]
        for (setting, method), records in load(folder, "sparse-groups").items()
        if all(record["metrics"]["architecture"] for record in records)
    ]
    head = [
        "net",
        "method",
        "what is left",
        "by pruning",
        "by bits",
        "error, %",
        "rounded, %",
        "paper",
        "runs",
    ]
    return table(head, rows)


def random_labels(folder: Path = RECORDS) -> str:
    """MNIST with random labels: what is learned of them, and how many weights that takes."""
    paper = EXPERIMENTS["sparse-random-labels"].paper
    rows = [
        [
            setting,
            NAMES[method],
            metric("train_accuracy", 1, 100)(records),
            metric("accuracy", 1, 100)(records),
            spread((100 * removed(record["metrics"]) for record in records), 2),
            paper.get((setting, method), "–"),
            lengths(records),
        ]
        for (setting, method), records in load(folder, "sparse-random-labels").items()
    ]
    head = ["net", "method", "train accuracy, %", "test accuracy, %", "removed, %", "paper", "runs"]
    return table(head, rows)


def metric(key: str, digits: int, scale: float = 1.0) -> Cell:
    """One number of every run."""
    return lambda records: spread((record["metrics"][key] for record in records), digits, scale)


def removed(metrics: Mapping[str, Any]) -> float:
    """The share of the weights that goes, biases not counted."""
    return 1.0 - sum(metrics["kept"].values()) / float(metrics["weights"])


def by_layer(records: list[Record]) -> str:
    """Shares removed of every layer, means over runs: "98.9 – 97.2 – 62.0"."""
    shares = [
        [1.0 - kept / record["metrics"]["sizes"][name] for name, kept in record["metrics"]["kept"].items()]
        for record in records
    ]
    return " – ".join(f"{100 * mean(each):.1f}" for each in zip(*shares, strict=True))


def five_epochs(folder: Path = RECORDS) -> str:
    """Five epochs of MNIST by ``posterity train`` and ``posterity evaluate`` with their defaults."""
    rows = []
    for method in ("bgd", "ivon", "vogn", "bbb"):
        place = folder / "mnist-5-epochs" / method
        config = json.loads((place / "config.json").read_text())
        found = json.loads((place / "evaluation.json").read_text())
        epochs = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
        average = found["modes"]["average"]
        rows.append(
            [
                f"`{method}` (K = {config['samples']})",
                f"{100 * (1 - average['accuracy']):.2f} %",
                f"{average['nll']:.4f}",
                f"{average['ece']:.4f}",
                f"{found['ood']['mutual_information']['auroc']:.3f}",
                f"{mean(epoch['seconds'] for epoch in epochs):.0f}",
            ]
        )
    return table(["`posterity train --method …`", "error", "NLL", "ECE", "AUROC", "s / epoch"], rows)


def looked_at(*folders: Path) -> str:
    """How often test data was looked at, by study, from the files that count it."""
    found: dict[str, dict[str, list[Record]]] = {}
    for folder in folders or (RECORDS, FOLDER / "results"):
        for text in (folder / LOOKS).read_text().splitlines():
            line = json.loads(text)
            found.setdefault(line["row"].partition("/")[0], {}).setdefault(line["row"], []).append(line)
    rows = []
    for study, by_row in sorted(found.items()):
        lines = [line for each in by_row.values() for line in each]
        configs = {row: len({line["config"] for line in each}) for row, each in by_row.items()}
        known = all(line["config"] != "unknown" for line in lines)
        most = max(configs.values())
        names = [row.partition("/")[2] for row, count in configs.items() if count == most > 1]
        several = f"{sum(count > 1 for count in configs.values())}"
        rows.append(
            [
                study,
                str(len(by_row)),
                str(len(lines)),
                several if known else "not known",
                f"{most}: {', '.join(names)}" if known and names else "–",
                str(sum(line.get("reconstructed", False) for line in lines)),
            ]
        )
    head = ["study", "rows", "evaluations", "rows seen with several configs", "most configs", "reconstructed"]
    return table(head, rows)
