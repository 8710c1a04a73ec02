"""How does the time of one BGD step grow with the samples K and with the width of the net?

    posterity bench growth --device cuda
    posterity bench growth --plot-only benchmarks/results/growth-h200.json

An MLP 784-W-W-10, P parameters, batch B. Each point has two lower bounds, from rates measured in the same
run:

    bytes   4 P (3 K + 4) / copy bandwidth: theta written once, read forward and backward; mean and std read
            and written once. Data that stays in a cache may be faster.
    FLOPs   6 B P K / rate of a large square matmul: 2 forward, 4 backward (the first layer needs only 2).

The plot is saved next to the record.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from peers import OURS, Loss, arithmetic, batch, bgd_ours, count, for_device, fresh_row, maker, timing

from posterity_lab.bench import Column, Ratio, Record, measure, parser, positive

BYTES, FLOPS = "floor from bytes", "floor from FLOPs"
SAMPLES = [1, 2, 4, 8, 16, 32, 64]
WIDTHS = [100, 200, 400, 800, 1200, 2000, 3000, 4000]
# How large the copy and the matmul are that measure the machine: (MiB, rows).
SIZES = {"cuda": (1024, 8192), "cpu": (64, 1024)}


def machine(record: Record, given: argparse.Namespace, precision: str) -> tuple[float, float]:
    """Bytes per ms of a copy (read and written both count) and FLOPs per ms of a square matmul."""
    mib, rows = given.copy_mib, given.matmul
    a = torch.ones(mib * 2**18, device=given.device)
    b, m = torch.empty_like(a), torch.randn(rows, rows, device=given.device)
    out = torch.empty_like(m)
    columns = {
        f"copy of {mib} MiB": Column(lambda: b.copy_(a), "fp32"),
        f"matmul of {rows}": Column(lambda: torch.mm(m, m, out=out), precision),
    }
    times = measure(columns, **timing(given))
    copy, matmul = (cell["value"] for cell in times.values())
    bandwidth, rate = 2 * mib * 2**20 / copy, 2 * rows**3 / matmul
    rates = {"GB_per_s": bandwidth / 1e6, "TFLOP_per_s": rate / 1e9}
    record.add("the machine", precision, times, axis=None, rates=rates)
    return bandwidth, rate


def computed(milliseconds: float) -> dict[str, Any]:
    """A column that was not measured."""
    value = dict.fromkeys(("value", "lowest", "highest"), milliseconds)
    return {**value, "rounds": 0, "steps": 0, "setting": "computed"}


def plot(record: dict[str, Any], path: Path) -> None:
    """Time over K and over parameters, with both floors, one panel each."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    styles = {OURS: "o-", BYTES: ":", FLOPS: "--"}
    points = [row for row in record["rows"] if row["axis"] is not None]
    for panel, axis, label in zip(
        panels, ("samples", "parameters"), ("samples K", "parameters P"), strict=True
    ):
        for setting in dict.fromkeys(row["setting"] for row in points):
            rows = [row for row in points if row["axis"] == axis and row["setting"] == setting]
            for name, style in styles.items():
                times = [row["columns"][name]["value"] for row in rows]
                panel.plot([row[axis] for row in rows], times, style, label=f"{name}, {setting}")
        panel.set(xscale="log", yscale="log", xlabel=label)
    panels[0].set_ylabel(record["unit"])
    panels[0].set_title(f"MLP 2x{record['config']['width']}")
    panels[1].set_title(f"K = {record['config']['mc_samples']}")
    panels[1].legend(fontsize="small")
    place = record["environment"]["gpu"] if record["config"]["device"] == "cuda" else "CPU"
    figure.suptitle(f"One BGD step, batch {record['config']['batch']}, {place}")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def draw(path: Path) -> None:
    """The plot of a record, beside it."""
    try:
        plot(json.loads(path.read_text()), path.with_suffix(".png"))
    except ModuleNotFoundError:
        print(f"a plot needs matplotlib: posterity bench growth --plot-only {path} draws it where that is")
        return
    print(f"plot: {path.with_suffix('.png')}")


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--samples", type=positive, nargs="+", default=SAMPLES, help="for the growth with K")
    options.add_argument("--width", type=positive, default=1200, help="of the net, there")
    options.add_argument(
        "--widths", type=positive, nargs="+", default=WIDTHS, help="for the growth with the net"
    )
    options.add_argument("--mc-samples", type=positive, default=10, help="K, there")
    options.add_argument("--precision", nargs="+", choices=["fp32", "tf32"], help="tf32 on a GPU")
    options.add_argument("--batch", type=positive, default=128)
    options.add_argument("--copy-mib", type=positive, help="1024, on a CPU 64")
    options.add_argument("--matmul", type=positive, help="8192, on a CPU 1024")
    options.add_argument("--plot-only", type=Path, metavar="RECORD", help="draw this record; measure nothing")
    given = options.parse_args()
    if given.plot_only is not None:
        draw(given.plot_only)
        return
    given.precision = for_device(options, given.device, given.precision, ["tf32"])
    given.copy_mib = given.copy_mib or SIZES[given.device][0]
    given.matmul = given.matmul or SIZES[given.device][1]
    record = Record("growth", given, "ms per step", OURS)
    points = [("samples", k, given.width) for k in given.samples]
    points += [("parameters", given.mc_samples, width) for width in given.widths]
    data = batch([given.batch, 784], given.device)
    for precision in given.precision:
        with arithmetic(precision):
            bandwidth, rate = machine(record, given, precision)
            for axis, k, width in points:
                fresh_row(given.device)
                model = maker(f"mlp-{width}-{width}", [784], given.device)()
                weights = count(model)
                loss_fn = Loss(precision, given.device)
                columns = measure(
                    {OURS: Column(bgd_ours(model, loss_fn, *data, k), precision)}, **timing(given)
                )
                columns[BYTES] = computed(4 * weights * (3 * k + 4) / bandwidth)
                columns[FLOPS] = computed(6 * given.batch * weights * k / rate)
                ratios = [Ratio(OURS, BYTES), Ratio(OURS, FLOPS)]
                case = f"BGD K = {k}, MLP 2x{width}"
                record.add(
                    case, precision, columns, ratios, axis=axis, samples=k, width=width, parameters=weights
                )
    record.close()
    draw(record.path)


if __name__ == "__main__":
    main()
