"""Reports: sections of prose, tables and figures in one HTML file that needs nothing else.

A report is a list of `Section`; each holds paragraphs (plain text), `Table` and `Picture` in any order.
Figures are drawn with `figure`, `bars`, `lines` and `histogram`, which give all reports one look.
"""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import matplotlib as mpl
import numpy as np
import rich.table
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

# Okabe and Ito's palette, in an order whose neighbours differ in lightness too.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#000000")
SLOTS = range(len(COLOURS))
_MARKERS = "osD^vPX"
# Any: matplotlib's own type spells out each of its three hundred keys.
_STYLE: dict[Any, Any] = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.edgecolor": "#555555",
    "axes.titlesize": 11,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.7,
    "lines.linewidth": 1.8,
    "lines.markersize": 5,
    "svg.hashsalt": "posterity",  # equal figures give equal files
}
_CSS = """
:root { color-scheme: light dark; }
body { font: 16px/1.55 system-ui, sans-serif; max-width: 70rem; margin: 0 auto; padding: 1rem; }
p, pre { max-width: 46rem; }
h1 { line-height: 1.2; margin-bottom: .3rem; }
h2 { margin-top: 2.4rem; }
.lead { font-size: 1.1rem; }
figure { margin: 1.2rem 0; }
figure img { display: block; width: 100%; max-width: 38rem; background: #fff; border-radius: 6px; }
figcaption { font-size: .88rem; opacity: .75; padding: .4rem 0; }
.scroll { overflow-x: auto; }
.wide img { width: 56rem; max-width: none; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .92rem; }
th, td { padding: .3rem .7rem; text-align: right; border-bottom: 1px solid #8884; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
thead th { border-bottom: 2px solid #8888; }
@media (max-width: 34rem) {
  table { font-size: .8rem; }
  th, td { padding: .3rem .35rem; }
  thead th, td:first-child { white-space: normal; }
}
"""


@dataclass(frozen=True)
class Table:
    """Rows of text under a header; the first column names the row, the others are numbers.

    Example:
        >>> Table("accuracy", ["method", "%"], [["BGD", "98"]]).rows
        [['BGD', '98']]
    """

    caption: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.header):
                raise ValueError(
                    f"a row of {len(row)} cells does not fit a header of {len(self.header)}: {row}"
                )


@dataclass(frozen=True)
class Picture:
    """A drawing as an SVG file, with the words for those who do not see it.

    A wide one keeps its size on a phone, and is scrolled like a table.
    """

    svg: bytes
    caption: str
    wide: bool = False


Part: TypeAlias = str | Table | Picture


@dataclass(frozen=True)
class Section:
    """A heading and what is under it, in reading order."""

    title: str
    parts: Sequence[Part]


def page(title: str, lead: str, sections: Sequence[Section]) -> str:
    """The report as HTML with everything inside: styles, figures, no script, no address.

    Example:
        >>> "<h2>Results</h2>" in page("Demo", "What came out.", [Section("Results", ["All of 3 < 4."])])
        True
    """
    body = "\n".join(
        f"<section>\n<h2>{html.escape(section.title)}</h2>\n{''.join(map(_part, section.parts))}</section>"
        for section in sections
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{_CSS}</style>\n</head>\n<body>\n"
        f'<h1>{html.escape(title)}</h1>\n<p class="lead">{html.escape(lead)}</p>\n{body}\n</body>\n</html>\n'
    )


def terminal(table: Table) -> rich.table.Table:
    """The same table for a terminal.

    Example:
        >>> terminal(Table("accuracy", ["method", "%"], [["BGD", "98"]])).row_count
        1
    """
    shown = rich.table.Table(title=table.caption, title_justify="left", title_style="bold")
    for index, name in enumerate(table.header):
        shown.add_column(name, justify="right" if index else "left")
    for row in table.rows:
        shown.add_row(*row)
    return shown


def figure(panels: int = 1, height: float = 3.3, width: float = 5.4) -> tuple[Figure, list[Axes]]:
    """An empty figure in the house style with panels side by side.

    Args:
        panels: Number of axes.
        height: In inches.
        width: Of one panel, in inches; at the default its text is still readable on a phone.

    Example:
        >>> drawn, axes = figure(panels=3)
        >>> len(axes)
        3
    """
    with mpl.rc_context(_STYLE):
        drawn = Figure(figsize=(width * panels, height), layout="constrained")
        axes = drawn.subplots(1, panels, squeeze=False)
    return drawn, list(axes[0])


def picture(drawn: Figure, caption: str) -> Picture:
    """A finished figure, ready for a section; one of several panels is wide.

    Example:
        >>> picture(figure()[0], "nothing").svg[:5]
        b'<?xml'
    """
    buffer = io.BytesIO()
    with mpl.rc_context(_STYLE):
        drawn.savefig(buffer, format="svg", metadata={"Date": None})
    return Picture(buffer.getvalue(), caption, wide=len(drawn.axes) > 1)


def save_png(drawn: Figure, path: Path) -> None:
    """Write a figure as a PNG sharp enough for a README."""
    with mpl.rc_context(_STYLE):
        drawn.savefig(path, dpi=150, metadata={"Software": None})


def bars(
    axes: Axes,
    groups: Sequence[str],
    series: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    slots: Sequence[int] = SLOTS,
) -> None:
    """Grouped bars of shares in per cent, with error bars and a legend above.

    Args:
        axes: Where to draw.
        groups: Names along the axis.
        series: By name, one value and one standard deviation per group.
        slots: Number of each series' colour, where a thing should look the same in several figures.

    Example:
        >>> bars(figure()[1][0], ["task 1"], {"BGD": ([0.9], [0.02]), "SGD": ([0.5], [0.1])})
    """
    at, width = np.arange(len(groups)), 0.8 / len(series)
    for index, (name, (values, spread)) in enumerate(series.items()):
        axes.bar(
            at + (index - (len(series) - 1) / 2) * width,
            values,
            0.92 * width,
            yerr=spread,
            label=name,
            color=COLOURS[slots[index]],
            error_kw={"elinewidth": 1, "capsize": 2},
        )
    axes.set_xticks(at, groups)
    axes.grid(visible=False, axis="x")
    _per_cent(axes)
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(series), frameon=False)


def lines(
    axes: Axes,
    x: Sequence[float],
    series: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    slots: Sequence[int] = SLOTS,
) -> None:
    """Lines of shares in per cent with markers, a band of one standard deviation, and a legend.

    Args:
        axes: Where to draw.
        x: Shared by all lines.
        series: By name, one value and one standard deviation per x.
        slots: Number of each line's colour and marker.

    Example:
        >>> lines(figure()[1][0], [1, 2], {"BGD": ([0.9, 0.8], [0.02, 0.02])})
    """
    for slot, (name, (values, spread)) in zip(slots, series.items(), strict=False):
        middle, margin, colour = np.asarray(values), np.asarray(spread), COLOURS[slot]
        axes.plot(x, middle, marker=_MARKERS[slot], color=colour, label=name)
        axes.fill_between(x, middle - margin, middle + margin, color=colour, alpha=0.18, linewidth=0)
    _per_cent(axes)
    axes.legend(loc="lower left", frameon=False)


def close_up(axes: Axes, series: Mapping[str, tuple[Sequence[float], Sequence[float]]]) -> None:
    """Begin a little below the lowest line: what matters may be the last few per cent.

    Example:
        >>> axes, series = figure()[1][0], {"BGD": ([0.9, 0.8], [0.02, 0.02])}
        >>> lines(axes, [1, 2], series)
        >>> close_up(axes, series)
        >>> f"{axes.get_ylim()[0]:.2f}"
        '0.73'
    """
    lowest = min(value - sd for values, sds in series.values() for value, sd in zip(values, sds, strict=True))
    axes.set_ylim(bottom=max(0.0, lowest - 0.05))
    axes.legend(loc="best", frameon=False)


def histogram(
    axes: Axes,
    edges: Sequence[float],
    series: Mapping[str, Sequence[float]],
    slots: Sequence[int] = SLOTS,
) -> None:
    """Histograms over the same bins, each as the share of its own total; the first one is filled.

    Args:
        axes: Where to draw.
        edges: Borders of the bins.
        series: By name, the count in each bin.
        slots: Number of each series' colour.

    Example:
        >>> histogram(figure()[1][0], [0, 1, 2], {"in": [3, 1], "out": [0, 4]})
    """
    for index, (name, counts) in enumerate(series.items()):
        shares, colour = np.asarray(counts) / max(sum(counts), 1), COLOURS[slots[index]]
        if index == 0:
            axes.stairs(shares, edges, fill=True, color=colour, alpha=0.4, label=name)
        else:
            axes.stairs(shares, edges, color=colour, linewidth=1.6, label=name)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    if len(series) > 1:
        axes.legend(loc="upper right", ncols=2, frameon=False)


def _per_cent(axes: Axes) -> None:
    axes.set_ylim(0, 1.02)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))


def _part(part: Part) -> str:
    if isinstance(part, str):
        return f"<p>{html.escape(part)}</p>\n"
    if isinstance(part, Picture):
        source = "data:image/svg+xml;base64," + base64.b64encode(part.svg).decode()
        caption = html.escape(part.caption)
        image = f'<img src="{source}" alt="{caption}">'
        shown = f'<div class="scroll wide">{image}</div>' if part.wide else image
        return f"<figure>{shown}<figcaption>{caption}</figcaption></figure>\n"
    head = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in part.header)
    rows = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>\n" for row in part.rows
    )
    return (
        f'<figure><figcaption>{html.escape(part.caption)}</figcaption><div class="scroll"><table>\n'
        f"<thead><tr>{head}</tr></thead>\n<tbody>{rows}</tbody></table></div></figure>\n"
    )
