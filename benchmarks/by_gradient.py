"""Tables of gradient methods and of trials, in Markdown, made only from the records in ``results``."""

from __future__ import annotations

import json
from pathlib import Path

from reproduced import NAMES, RECORDS, WIDTHS, Record, calibration, error, lengths, load, metric
from tables import spread, table

from posterity_lab.reproduce.experiments import EXPERIMENTS

# Shares of the weights that are removed, and what columns of them are called.
REMOVED = (0.0, 0.5, 0.75, 0.95, 0.98)
SHARES = ("whole", "−50 %", "−75 %", "−95 %", "−98 %")


def trade_off(folder: Path = RECORDS) -> str:
    """Trials of nets with most weights removed: error on held-out images, and compression."""
    found: dict[tuple[str, str], dict[float, Record]] = {}
    for path in sorted((folder / "sparse-lenet").glob("trial-*.json")):
        record = json.loads(path.read_text())
        (value,) = record["trial"].values()
        found.setdefault((record["setting"].split()[0], record["method"]), {})[value] = record
    rows = []
    for setting, method in sorted(found, key=lambda row: (row[0], [*NAMES].index(row[1]))):
        tried = found[setting, method]
        (name,) = next(iter(tried.values()))["trial"]
        values = ", ".join(f"{value:.3g}" for value in sorted(tried))
        cells = (
            "diverged"
            if record["diverged"]
            else f"{100 * record['metrics']['error']:.2f} at {record['metrics']['compression']:.1f}×"
            for _, record in sorted(tried.items())
        )
        rows.append([setting, NAMES[method], f"{name.replace('_', ' ')} {values}", "; ".join(cells)])
    return table(["net", "method", "tried", "error on held-out images, %, and compression"], rows)


def blundell(folder: Path = RECORDS) -> str:
    """Bayes by Backprop's table: errors by averaged probabilities, those of single networks in brackets."""
    found, paper = load(folder, "bbb-mnist"), EXPERIMENTS["bbb-table1"].paper
    rows = []
    for method in NAMES:
        runs = [found.get((width, method), []) for width in WIDTHS]
        if any(runs):
            cells = [f"{error('average')(each)} ({error('single')(each)})" if each else "–" for each in runs]
            theirs = " / ".join(str(paper.get((width, method), "–")) for width in WIDTHS)
            rows.append([NAMES[method], *cells, theirs, lengths([run for each in runs for run in each])])
    head = ["test error, %: averaged (single)", *(f"2×{width}" for width in WIDTHS), "paper", "runs"]
    return table(head, rows)


def pruned_runs(folder: Path = RECORDS) -> str:
    """The nets of 2×1200 with ever more weights removed: errors by averaged probabilities."""
    theirs = EXPERIMENTS["bbb-pruning"].paper["1200", "bbb-mixture"].split(" / ")
    rows = [[f"paper's {NAMES['bbb-mixture']}", *theirs, ""]]
    for (setting, method), records in load(folder, "bbb-mnist").items():
        if setting.startswith("1200"):
            curves = [run["metrics"]["pruning"]["average"] for run in records]
            errors = [dict(zip(curve["fractions"], curve["errors"], strict=True)) for curve in curves]
            cells = [spread((each[share] for each in errors), 2, 100) for share in REMOVED]
            rows.append([NAMES[method] + setting.removeprefix("1200"), *cells, lengths(records)])
    return table(["test error, %", *SHARES, "runs"], rows)


def best_trials(folder: Path = RECORDS) -> str:
    """The least error on held-out images of each method's trials of Bayes by Backprop's tables."""
    found: dict[tuple[str, str], list[Record]] = {}
    for path in sorted((folder / "bbb-mnist").glob("trial-*.json")):
        record = json.loads(path.read_text())
        if record["diverged"] is None and record["setting"] in WIDTHS:
            found.setdefault((record["setting"], record["method"]), []).append(record)
    rows = []
    for method in NAMES:
        if all((width, method) in found for width in WIDTHS):
            best = [
                min(1.0 - record["metrics"]["averaged_accuracy"] for record in found[width, method])
                for width in WIDTHS
            ]
            rows.append([NAMES[method], *(f"{100 * each:.2f}" for each in best)])
    return table(["least error of four trials, %", *(f"2×{width}" for width in WIDTHS)], rows)


def pruning_trials(folder: Path = RECORDS) -> str:
    """Trials of nets that are to be pruned: errors on held-out images with ever more removed."""
    rows = []
    for path in sorted((folder / "bbb-mnist").glob("trial-*to-prune*.json")):
        record = json.loads(path.read_text())
        name = record["setting"].rpartition(" ")[2]
        tried = [f"{record['trial'][key]:g}" for key in ("std_init", "kl_factor")]
        if record["diverged"]:
            rows.append([name, *tried, "diverged", *["–"] * 4])
            continue
        curve = record["metrics"]["pruning"]["average"]
        errors = dict(zip(curve["fractions"], curve["errors"], strict=True))
        rows.append([name, *tried, *(f"{100 * errors[share]:.2f}" for share in REMOVED)])
    return table(["by", "stds begin at", "KL's factor", *SHARES], rows)


def incremental(folder: Path = RECORDS) -> str:
    """Parts of the data one by one: accuracy, NLL and ECE on all classes after the last."""
    rows = [
        [setting, NAMES[method], calibration(records), lengths(records)]
        for study in ("incremental-mnist", "incremental-cifar10", "incremental-pretrained")
        for (setting, method), records in load(folder, study).items()
    ]
    return table(["data", "method", "accuracy in %, NLL, ECE", "runs (epochs a part)"], rows)


def bandit(folder: Path = RECORDS) -> str:
    """Mushrooms: regret after the last, and the share of what an oracle gets."""
    rows = [
        [
            NAMES[method],
            metric("regret", 0)(records),
            metric("reward_share", 1, 100)(records),
            f"{records[0]['n']:,} mushrooms, {len(records)} seed{'s' if len(records) > 1 else ''}",
        ]
        for (_, method), records in load(folder, "bbb-bandit").items()
    ]
    return table(["agent", "regret", "reward, % of an oracle's", "runs"], rows)


def networks(folder: Path = RECORDS) -> str:
    """Accuracy and NLL by the number of networks."""
    counts = (1, 2, 5, 10, 100)
    rows = []
    for (_, method), records in load(folder, "uncertainty-samples").items():
        by_count = [{row["networks"]: row for row in run["metrics"]["by_networks"]} for run in records]
        cells = [
            ", ".join(
                spread((each[count][key] for each in by_count), digits, scale)
                for key, digits, scale in (("accuracy", 2, 100), ("nll", 4, 1.0))
            )
            if all(count in each for each in by_count)
            else "–"
            for count in counts
        ]
        rows.append([NAMES[method], *cells, lengths(records)])
    return table(["accuracy in %, NLL of networks:", *map(str, counts), "runs"], rows)
