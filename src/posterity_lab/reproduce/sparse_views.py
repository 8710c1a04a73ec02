"""Views of the experiments on sparse nets: errors and compression, trade-offs, pictures of weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from posterity_lab import report
from posterity_lab.report import COLOURS, Part, Picture, Table
from posterity_lab.reproduce.groups import Group, columns, settings, within
from posterity_lab.reproduce.records import Record

_KERNELS = 20


def compressed(found: Sequence[Group]) -> list[Part]:
    """The table: error and compression, sparsity by layer; the trade-off of trials; progress in training."""
    rows = [
        [
            group.title,
            group.paper,
            group.spread(partial(_value, "error")),
            _times(group),
            _layers(group),
            group.spread(partial(_value, "whole_error")),
            group.spread(partial(_value, "nll"), 4, 1.0),
            group.spread(partial(_value, "ece"), 4, 1.0),
            group.epochs,
            group.runs,
            group.time,
        ]
        for group in found
    ]
    header = ["setting", "paper", "error, %", "compression", "removed by layer, %", "error of the whole, %"]
    caption = "Pruned nets at their means. Compression is all weights over those that stay, without biases"
    parts: list[Part] = [Table(caption, [*header, "NLL", "ECE", "epochs", "runs", "time"], rows)]
    tried = [group for group in found if group.tried]
    if tried:
        parts += [_frontier_table(tried), _frontier(tried)]
    return [*parts, *(_course(within(found, name), name) for name in settings(found) if within(found, name))]


def labels(found: Sequence[Group]) -> list[Part]:
    """Random labels: how well they are learned, and with how many weights."""
    rows = [
        [
            group.title,
            group.paper,
            group.spread(partial(_value, "train_accuracy")),
            group.spread(partial(_value, "accuracy")),
            group.spread(_removed),
            group.spread(partial(_value, "nll"), 3, 1.0),
            group.epochs,
            group.runs,
            group.time,
        ]
        for group in found
    ]
    header = ["setting", "paper", "train accuracy, %", "test accuracy, %", "removed, %", "NLL, test"]
    caption = "Training labels that say nothing of the images; the test has its own"
    return [Table(caption, [*header, "epochs", "runs", "time"], rows)]


def groups(found: Sequence[Group]) -> list[Part]:
    """Nets without their dead units: layers, compression by pruning and by bits, errors, and times."""
    rows = [
        [
            group.title,
            group.paper,
            _architecture(group),
            _ratio(group, "by_pruning"),
            _ratio(group, "by_bits"),
            group.spread(partial(_value, "whole_error")),
            _mean(group, "error_small"),
            _mean(group, "error_rounded"),
            group.epochs,
            group.runs,
            group.time,
        ]
        for group in found
    ]
    header = ["setting", "paper", "layers, seed 0", "by pruning", "by bits", "error whole, %", "pruned, %"]
    caption = "Weights of the whole net over those of the net without dead units, biases not counted"
    parts: list[Part] = [Table(caption, [*header, "rounded, %", "epochs", "runs", "time"], rows)]
    whole = [group for group in found if group.whole and group.whole[0]["metrics"]["architecture"]]
    if whole:
        parts.append(_costs(whole))
    return parts


def wide(found: Sequence[Group]) -> list[Part]:
    """The VGG-like net: dense and sparse errors by width, and rules pruned by weights and by outputs."""
    rows = [
        [
            group.title,
            group.paper,
            _known(group, "dense").spread(lambda record: float(record["metrics"]["dense"][0]["weights"])),
            group.spread(partial(_value, "error")),
            _times(group),
            _ratio(group, "by_pruning"),
            _ratio(group, "by_bits"),
            group.epochs,
            group.runs,
            group.time,
        ]
        for group in found
    ]
    header = [
        "setting",
        "paper",
        "dense error, %",
        "error, %",
        "compression",
        "without dead units",
        "by bits",
    ]
    caption = "Error of the pruned net at its means, and of the dense one that it began as"
    parts: list[Part] = [Table(caption, [*header, "epochs", "runs", "time"], rows)]
    tables = (_removed_table(group, key) for group in found for key in ("curves", "dense"))
    return [*parts, *filter(None, tables)]


def _removed_table(group: Group, key: str) -> Table | None:
    """Errors as more weights are removed by score, for a net that was not trained to be sparse."""
    curves = [curve for record in group.whole if (curve := record["metrics"][key]) is not None]
    rows = [
        [
            f"{100 * each['fraction']:.0f} % removed",
            *(f"{100 * columns([[c[at][how] for how in _HOW] for c in curves])[0][n]:.2f}" for n in range(2)),
        ]
        for at, each in enumerate(curves[0] if curves else ())
    ]
    name = f"{group.setting} dense net, by magnitude" if key == "dense" else f"{group.title}, by SNR"
    return Table(f"{name}: error, %", ["", "by weights", "by outputs"], rows) if rows else None


_HOW = ("weights", "outputs")


def _architecture(group: Group) -> str:
    if not group.whole:
        return "–"
    return "-".join(map(str, group.whole[0]["metrics"]["architecture"])) or "nothing stays"


def _known(group: Group, key: str) -> Group:
    """The runs that have a value: without stds there is no rounding, without weights no net."""
    return replace(group, whole=[each for each in group.whole if each["metrics"][key] is not None])


def _ratio(group: Group, key: str) -> str:
    spread = _known(group, key).spread(partial(_value, key), 1, 1.0)
    return "–" if spread == "–" else f"{spread}×"


def _mean(group: Group, key: str) -> str:
    return _known(group, key).spread(partial(_value, key))


def _costs(whole: Sequence[Group]) -> Table:
    """Bytes, multiply-adds and times of the whole and the smaller net."""
    rows = []
    for group in whole:
        record = group.whole[0]
        for name, key in (("whole", "before"), ("without dead units", "after")):
            cost = record["metrics"][key]
            times = (f"{cost['milliseconds'][size]:.3f}" for size in ("1", "128"))
            counts = (f"{cost[what]:,}" for what in ("bytes", "multiply_adds"))
            rows.append([f"{group.title}, {name}", *counts, *times])
    caption = "What a net costs, seed 0; times are worth something only of runs that had the machine alone"
    return Table(caption, ["net", "bytes", "multiply-adds", "batch 1, ms", "batch 128, ms"], rows)


def pictures(found: Sequence[Group]) -> list[Part]:
    """Weights during training: kernels or pixels of the first layer, and a patch of a matrix."""
    parts = list[Part]()
    for group in found:
        if not group.whole:
            continue
        record = group.whole[0]
        metrics = record["metrics"]
        start = {"epoch": 0, "compression": 1.0, "picture": metrics["begun"]}
        frames = [start, *(each for each in metrics["curve"] if "picture" in each)]
        where = f"{group.title}, seed {record['seed']}"
        if "kernels" in metrics["begun"]:
            words = f"kernels of the first convolution, {_KERNELS} of them; grey is 0"
            parts.append(_frames(frames, _kernels, f"{where}: {words}."))
        else:
            words = "how many weights of each pixel stay in the first layer; white is none"
            parts.append(_frames(frames, _pixels, f"{where}: {words}."))
        patch = (
            "the middle of the first matrix after it"
            if "kernels" in metrics["begun"]
            else "of a hidden layer"
        )
        parts.append(_frames(frames, _patch, f"{where}: weights that stay (black), {patch}."))
    return parts


def _value(key: str, record: Record) -> float:
    return float(record["metrics"][key])


def _removed(record: Record) -> float:
    metrics = record["metrics"]
    return 1.0 - float(sum(metrics["kept"].values()) / metrics["weights"])


def _times(group: Group) -> str:
    if any(_removed(record) == 1.0 for record in group.whole):
        return "nothing stays"
    spread = group.spread(partial(_value, "compression"), 1, 1.0)
    return "–" if spread == "–" else f"{spread}×"


def _layers(group: Group) -> str:
    """Shares removed of each layer, means over runs."""
    if not group.whole:
        return "–"
    shares = [
        [1.0 - kept / record["metrics"]["sizes"][name] for name, kept in record["metrics"]["kept"].items()]
        for record in group.whole
    ]
    return " – ".join(f"{100 * share:.1f}" for share in columns(shares)[0])


def _trade(record: Record) -> tuple[float, float]:
    return _value("compression", record), _value("error", record)


def _frontier_table(tried: Sequence[Group]) -> Table:
    rows = [
        [
            f"{group.title}: " + ", ".join(f"{key} {value:g}" for key, value in record["trial"].items()),
            f"{_trade(record)[0]:.1f}×",
            f"{100 * _trade(record)[1]:.2f}",
        ]
        for group in tried
        for record in group.tried
    ]
    return Table(
        "The trade-off: trials, tested on held-out images", ["trial", "compression", "error, %"], rows
    )


def _frontier(tried: Sequence[Group]) -> Picture:
    """Error against compression, a line through each method's trials."""
    drawn, (axes,) = report.figure()
    for slot, group in enumerate(tried):
        points = sorted(map(_trade, group.tried))
        colour = COLOURS[slot % len(COLOURS)]
        style = "o-" if slot < len(COLOURS) else "s:"
        axes.plot(*zip(*points, strict=True), style, color=colour, label=group.title)
    axes.set(xscale="log", xlabel="compression", ylabel="error on held-out images")
    axes.legend(loc="best", frameon=False)
    return report.picture(drawn, "Error against compression: trials with more and less weight on sparsity.")


def _course(own: Sequence[Group], setting: str) -> Picture:
    """Error and compression during training."""
    drawn, (left, right) = report.figure(panels=2)
    for slot, group in enumerate(own):
        epochs = [each["epoch"] for each in group.whole[0]["metrics"]["curve"]]
        for axes, key in ((left, "error"), (right, "compression")):
            runs = [[each[key] for each in record["metrics"]["curve"]] for record in group.whole]
            middle, spread = map(np.asarray, columns(runs))
            axes.plot(epochs, middle, color=COLOURS[slot], label=group.name)
            axes.fill_between(
                epochs, middle - spread, middle + spread, color=COLOURS[slot], alpha=0.18, linewidth=0
            )
    left.set(xlabel="epoch", ylabel="test error, pruned", ylim=(0.0, 0.1))
    right.set(xlabel="epoch", ylabel="compression", yscale="log")
    left.legend(loc="best", frameon=False)
    return report.picture(drawn, f"{setting}: the pruned net as training goes on; bands show ± one sd.")


def _frames(frames: Sequence[dict[str, Any]], draw: Any, caption: str) -> Picture:
    drawn, panels = report.figure(panels=len(frames), height=2.4, width=1.9)
    for axes, frame in zip(panels, frames, strict=True):
        draw(axes, frame["picture"])
        axes.set(xticks=[], yticks=[], title=f"epoch {frame['epoch']}\n{frame['compression']:.0f}×")
        axes.grid(visible=False)
    return report.picture(drawn, caption)


def _kernels(axes: Axes, seen: dict[str, Any]) -> None:
    """Kernels side by side in four columns, each scaled to the largest weight of all."""
    kernels = np.asarray(seen["kernels"][:_KERNELS])
    size = round(kernels.shape[1] ** 0.5)
    padded = np.pad(kernels.reshape(-1, size, size), ((0, -len(kernels) % 4), (0, 1), (0, 1)))
    rows = [np.concatenate(list(padded[start : start + 4]), 1) for start in range(0, len(padded), 4)]
    most = max(float(np.abs(kernels).max()), 1e-9)
    axes.imshow(np.concatenate(rows), cmap="gray", vmin=-most, vmax=most)


def _pixels(axes: Axes, seen: dict[str, Any]) -> None:
    counts = np.asarray(seen["pixels"])
    size = round(len(counts) ** 0.5)
    axes.imshow(counts.reshape(size, size), cmap="gray_r", vmin=0, vmax=max(int(counts.max()), 1))


def _patch(axes: Axes, seen: dict[str, Any]) -> None:
    axes.imshow([[int(bit) for bit in row] for row in seen["patch"]], cmap="gray_r", vmin=0, vmax=1)
