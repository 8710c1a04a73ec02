"""What the demo found: tables on the terminal, ``report.html``, and the picture ``demo.png``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator, PercentFormatter
from rich.console import Console

from posterity_lab import report
from posterity_lab.report import Picture, Section, Table

NAMES = {"bgd": "BGD", "sgd": "SGD", "adam": "Adam"}
# Colours: a method has the same one in all figures, strange inputs have others.
_SLOTS = {"bgd": 0, "sgd": 1, "adam": 2}
_STRANGE_SLOTS = (4, 3, 5)
_SCORES = {
    "bgd entropy": "BGD's entropy",
    "bgd mutual_information": "BGD's mutual information",
    "adam entropy": "Adam's entropy",
}
_PRUNED = {"bgd": "BGD, by SNR", "adam": "Adam, by magnitude"}


def show(results: Mapping[str, Any], console: Console) -> None:
    """Print the tables."""
    for table in (
        _grid_table(results),
        _stream_table(results),
        _pruning_table(results),
        _ood_table(results),
    ):
        console.print(report.terminal(table))


def write(results: Mapping[str, Any], out: Path) -> None:
    """Write ``report.html`` and ``demo.png`` into ``out``."""
    config = results["config"]
    lead = (
        f"What a posterior over the weights is good for: learning {config['tasks']} tasks in a row, pruning, "
        f"and knowing what is strange. Scikit-learn's digits, a fully connected net with hidden layers of "
        f"{' and '.join(map(str, config['hidden']))} units, {len(config['seeds'])} seeds; numbers are means "
        "± standard deviations over the seeds."
    )
    sections = [
        _stream_section(results),
        _pruning_section(results),
        _ood_section(results),
        _file_section(results),
    ]
    page = report.page("Posterity: the demo", lead, sections)
    (out / "report.html").write_text(page, encoding="utf-8")
    drawn, (forgetting, uncertainty, pruning) = report.figure(panels=3, height=3.6, width=4.4)
    _forgetting(forgetting, results)
    forgetting.set_title("Forgetting: average over tasks seen")
    _entropy(uncertainty, results, "bgd")
    uncertainty.set_title("Uncertainty: BGD's predictive entropy")
    _pruned(pruning, results)
    pruning.set_title("Pruning: accuracy on digits")
    report.save_png(drawn, out / "demo.png")


def _stream_section(results: Mapping[str, Any]) -> Section:
    config, stream = results["config"], results["stream"]
    best = max(("sgd", "adam"), key=lambda method: stream[method]["average"]["mean"])
    lead = 100 * (stream["bgd"]["average"]["mean"] - stream[best]["average"]["mean"])
    tasks = [f"task {number + 1}" for number in range(config["tasks"])]
    final, axes = report.figure()
    report.bars(axes[0], tasks, {NAMES[m]: _columns(stream[m]["final"]) for m in NAMES})
    axes[0].set_ylabel("test accuracy at the end")
    seen, axes = report.figure()
    _forgetting(axes[0], results)
    stopped = sum(stream[method]["diverged"] for method in NAMES)
    return Section(
        "Learning without forgetting",
        [
            f"{config['tasks']} tasks arrive one after another, each for {config['epochs']} epochs: the "
            "digits, then the digits with their pixels rearranged, another way for each task. No method is "
            "told of the switches, none sees old data again, and all share one output layer.",
            f"At the end, averaged over all tasks, BGD is right on {_percent(stream['bgd']['average'])} % of "
            f"the test images and {NAMES[best]}, the better of the other two, on "
            f"{_percent(stream[best]['average'])} %: BGD is "
            f"{abs(lead):.1f} points {'ahead' if lead >= 0 else 'behind'}.",
            _stream_table(results),
            report.picture(final, "Accuracy on every task after the last one; bars show ± one sd."),
            report.picture(seen, "Average accuracy over the tasks seen so far; bands show ± one sd."),
            "Each method has one number tuned, on a grid of the same size: average accuracy at the end on "
            f"{config['validation']} images held out of the training set, with other pixel arrangements than "
            f"the runs above. Fixed beforehand: BGD's lr {config['fixed']['bgd']['lr']:g} and "
            f"{config['samples']} weight samples per step, SGD without momentum, batches of "
            f"{config['batch_size']}, BGD evaluated at its mean weights. {stopped} of the final runs "
            "diverged.",
            _grid_table(results),
        ],
    )


def _pruning_section(results: Mapping[str, Any]) -> Section:
    drawn, axes = report.figure()
    _pruned(axes[0], results)
    spread, std_axes = report.figure(height=2.8)
    report.histogram(std_axes[0], results["std"]["edges"], {"weights": results["std"]["counts"]})
    std_axes[0].axvline(
        results["config"]["plain"]["bgd"]["std_init"], color="#555555", linestyle="--", linewidth=1
    )
    std_axes[0].set(xscale="log", xlabel="standard deviation σ of a weight", ylabel="share of weights")
    plain = results["config"]["plain"]
    return Section(
        "Pruning",
        [
            f"Both nets learned plain digits for {results['config']['plain_epochs']} epochs, without tuning "
            f"(BGD std_init {plain['bgd']['std_init']:g}, lr {plain['bgd']['lr']:g}; Adam lr "
            f"{plain['adam']['lr']:g}). Then weights are set to zero, without retraining: from BGD's "
            "posterior those with the lowest signal-to-noise ratio (SNR) |mean| / σ, from Adam's net the "
            "smallest.",
            _pruning_table(results),
            report.picture(drawn, "Test accuracy against the share of weights removed; bands show ± one sd."),
            report.picture(spread, "σ of BGD's weights after training; the dashed line is where all began."),
        ],
    )


def _ood_section(results: Mapping[str, Any]) -> Section:
    pictures: list[Picture] = []
    for method in ("bgd", "adam"):
        drawn, axes = report.figure(height=3.0)
        _entropy(axes[0], results, method)
        pictures.append(
            report.picture(drawn, f"Predictive entropy of {NAMES[method]}'s net, by kind of input.")
        )
    return Section(
        "Uncertainty",
        [
            "The same nets see test digits and inputs that are no digits: inverted digits, digits with "
            "shuffled pixels, and noise. AUROC is the chance that a strange input gets the higher score; "
            "FPR95 is the share of digits flagged when the threshold catches 95 % of the strange inputs. "
            f"BGD averages {results['config']['eval_samples']} sampled networks.",
            _verdict(results),
            _ood_table(results),
            *pictures,
        ],
    )


def _file_section(results: Mapping[str, Any]) -> Section:
    environment = results["environment"]
    same = "the same bits" if results["reloaded"] else "something else"
    return Section(
        "The posterior as a file",
        [
            f"posterior.safetensors, beside this report, holds BGD's posterior on plain digits (seed "
            f"{results['config']['seeds'][0]}). Loaded back, it predicted {same} on every test digit.",
            f"All numbers of this page are in results.json. They took {results['seconds']:.0f} seconds on "
            f"{environment['cores']} CPU cores with Python {environment['python']} and torch "
            f"{environment['torch']}. A training step took "
            + ", ".join(f"{results['stream'][m]['ms_per_step']:.1f} ms by {NAMES[m]}" for m in NAMES)
            + ".",
        ],
    )


def _verdict(results: Mapping[str, Any]) -> str:
    """On which kinds of strange input BGD's better score beats Adam's entropy: no more is claimed."""
    ood = results["ood"]
    kinds = list(ood["adam entropy"])
    won = [
        kind
        for kind in kinds
        if max(ood[score][kind]["auroc"]["mean"] for score in ood if score.startswith("bgd"))
        > ood["adam entropy"][kind]["auroc"]["mean"]
    ]
    return (
        f"By AUROC, the better of BGD's two scores beats Adam's entropy on {len(won)} of {len(kinds)} kinds"
        f"{': ' + ', '.join(won) if won else ''}."
    )


def _stream_table(results: Mapping[str, Any]) -> Table:
    stream = results["stream"]
    rows = [
        [f"task {task + 1}", *(_percent(stream[method]["final"][task]) for method in NAMES)]
        for task in range(results["config"]["tasks"])
    ]
    rows.append(["average", *(_percent(stream[method]["average"]) for method in NAMES)])
    rows.append(["ms per step", *(f"{stream[method]['ms_per_step']:.1f}" for method in NAMES)])
    seeds = len(results["config"]["seeds"])
    caption = f"Test accuracy at the end of the stream, %, mean ± sd of {seeds} seeds"
    return Table(caption, ["", *NAMES.values()], rows)


def _grid_table(results: Mapping[str, Any]) -> Table:
    columns, header = [], []
    for method, grid in results["grids"].items():
        header += [f"{NAMES[method]} {grid['parameter']}", "%"]
        columns.append([f"{value:g}{' *' if value == grid['chosen'] else ''}" for value in grid["values"]])
        columns.append(
            [
                "diverged" if diverged else f"{100 * accuracy:.1f}"
                for accuracy, diverged in zip(grid["accuracy"], grid["diverged"], strict=True)
            ]
        )
    rows = [list(row) for row in zip(*columns, strict=True)]
    return Table("Tuning: average accuracy on validation images (* chosen)", header, rows)


def _pruning_table(results: Mapping[str, Any]) -> Table:
    pruning = results["pruning"]
    rows = [
        [f"{fraction:.0%}", *(_percent(pruning[method][index]) for method in _PRUNED)]
        for index, fraction in enumerate(pruning["fractions"])
    ]
    return Table("Test accuracy on plain digits after pruning, %", ["removed", *_PRUNED.values()], rows)


def _ood_table(results: Mapping[str, Any]) -> Table:
    kinds = list(results["ood"]["adam entropy"])
    rows = [
        [f"{measure}, {name}", *(_percent(results["ood"][score][kind][key]) for kind in kinds)]
        for key, measure in (("auroc", "AUROC"), ("fpr95", "FPR95"))
        for score, name in _SCORES.items()
    ]
    return Table("Telling strange inputs from digits, %", ["", *kinds], rows)


def _forgetting(axes: Axes, results: Mapping[str, Any]) -> None:
    numbers = list(range(1, results["config"]["tasks"] + 1))
    report.lines(axes, numbers, {NAMES[m]: _columns(results["stream"][m]["seen"]) for m in NAMES})
    axes.set(xlabel="tasks learned so far", ylabel="test accuracy", xticks=numbers)


def _pruned(axes: Axes, results: Mapping[str, Any]) -> None:
    pruning = results["pruning"]
    shown = {name: _columns(pruning[method]) for method, name in _PRUNED.items()}
    report.lines(axes, pruning["fractions"], shown, [_SLOTS[method] for method in _PRUNED])
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set(xlabel="weights removed", ylabel="test accuracy")


def _entropy(axes: Axes, results: Mapping[str, Any], method: str) -> None:
    entropy = results["entropy"]
    report.histogram(axes, entropy["edges"], entropy[method], [_SLOTS[method], *_STRANGE_SLOTS])
    # Nearly all digits are in the first bin; on a linear scale the rest would be flat.
    axes.set(xlabel=f"entropy of {NAMES[method]}'s prediction, nats", ylabel="share of inputs", yscale="log")
    axes.set(ylim=(0.001, 8), yticks=[0.01, 0.1, 1])
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.yaxis.set_minor_locator(NullLocator())


def _columns(spreads: Sequence[Mapping[str, float]]) -> tuple[list[float], list[float]]:
    return [spread["mean"] for spread in spreads], [spread["sd"] for spread in spreads]


def _percent(spread: Mapping[str, float]) -> str:
    return f"{100 * spread['mean']:.1f} ± {100 * spread['sd']:.1f}"
