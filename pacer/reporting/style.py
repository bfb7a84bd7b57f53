"""The look of all pictures, and how they are laid out and saved: works in grey, PNG (150 dpi) and SVG, stable bytes.

Figures are made without pyplot: no display, no backend switch, nothing left behind in matplotlib's state.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure, SubFigure
from matplotlib.lines import Line2D

NAME_WIDTH, ENTRY_WIDTH = 24, 38  # letters in one line of a bar's name, of an entry below a panel
INK = "#222222"
EXACT, LOSSY = "#3b6fb6", "#f0b45a"
# Parts of a round: name in the picture, fill, hatch. Lightness alternates, so neighbours differ in grey too.
PARTS = {
    "draft": ("draft", "#f0b45a", ""),
    "preverify": ("pre-verify", "#3f007d", ""),
    "intermediate": ("intermediate", "#c6dbef", "///"),
    "target": ("target", "#3b6fb6", ""),
    "rest": ("rest", "#e6e6e6", "..."),
}
LineStyle = tuple[str, Any, str]  # colour, dash, marker: any one of them tells two lines apart
LINES: tuple[LineStyle, ...] = (
    ("#222222", "-", "o"),
    ("#e08214", "--", "s"),
    ("#2c5fa8", "-.", "^"),
    ("#8f8f8f", ":", "D"),
    ("#1b7837", (0, (5, 1)), "v"),
    ("#984ea3", (0, (1, 1)), "P"),
)
_STYLE: dict[Any, Any] = {
    "font.family": ["DejaVu Sans"],  # ships with matplotlib
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.labelsize": 10,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "legend.fontsize": 9,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": "#d9d9d9",
    "grid.linewidth": 0.6,
    "hatch.linewidth": 0.6,
    "svg.hashsalt": "pacer",  # ids in the SVG do not depend on the process
}
_ENVIRONMENT = ("backend", "interactive", "toolbar", "webagg", "docstring", "date.epoch")


@contextmanager
def applied() -> Iterator[None]:
    """The style for the time of a ``with`` block, on matplotlib's defaults whatever the user's matplotlibrc says."""
    defaults: dict[Any, Any] = {
        key: mpl.rcParamsDefault[key] for key in mpl.rcParamsDefault if not key.startswith(_ENVIRONMENT)
    }
    with mpl.rc_context({**defaults, **_STYLE}):
        yield


@dataclass(frozen=True)
class Canvas:
    """A figure of three bands: title, body (where plots and legend go), footer."""

    figure: Figure
    body: SubFigure


def canvas(width: float, height: float, *, title: str, command: str) -> Canvas:
    """An empty figure ``width`` x (``height`` + title + footer) inches; the title is the question it answers."""
    head = textwrap.wrap(title, int(width * 9.5)) or [""]
    foot = textwrap.wrap(f"made by: {command}", int(width * 12.5), break_on_hyphens=False)
    bands = [0.12 + 0.22 * len(head), height, 0.1 + 0.17 * len(foot)]
    figure = Figure(figsize=(width, sum(bands)), layout="constrained")
    FigureCanvasAgg(figure)
    top, body, bottom = figure.subfigures(3, 1, squeeze=False, height_ratios=bands)[:, 0]
    top.text(0.5, 0.45, "\n".join(head), ha="center", va="center", fontsize=12, fontweight="bold")
    bottom.text(0.01, 0.5, "\n".join(foot), ha="left", va="center", fontsize=9, color="#555555")
    return Canvas(figure, body)


def panels(
    titles: Sequence[str], *, title: str, command: str, height: float, columns: int | None = None
) -> tuple[Canvas, list[Axes]]:
    """A canvas with one titled axis per name, ``height`` inches each, sharing the y axis."""
    columns = columns or (len(titles) if len(titles) < 4 else 2 if len(titles) == 4 else 3)
    lines = -(-len(titles) // columns)
    page = canvas(max(6.8, 1.6 + 3.1 * columns), 0.4 + height * lines, title=title, command=command)
    axes = page.body.subplots(lines, columns, sharey=True, squeeze=False).flatten()
    for axis in axes[len(titles) :]:
        axis.remove()
    for axis, name in zip(axes, titles, strict=False):
        axis.set_title(name)
    return page, list(axes[: len(titles)])


def broken(name: str, width: int = NAME_WIDTH) -> str:
    """A name in lines of a length that leaves the axes their room."""
    return textwrap.fill(name, width)


def name_bars(axis: Axes, names: Sequence[str]) -> None:
    """Names of horizontal bars at y = 0, 1, …, the first on top; long ones are broken into lines."""
    axis.set_yticks(range(len(names)), [broken(name) for name in names])
    axis.set_ylim(len(names) - 0.4, -0.6)
    axis.tick_params(axis="y", length=0)
    axis.grid(True, axis="x")


def line_styles(count: int) -> list[LineStyle]:
    return [LINES[i % len(LINES)] for i in range(count)]


def line_handles(names: Sequence[str], styles: Sequence[LineStyle]) -> list[Line2D]:
    return [
        Line2D([], [], color=color, linestyle=dash, marker=marker, markersize=4.5, linewidth=1.4, label=name)
        for name, (color, dash, marker) in zip(names, styles, strict=True)
    ]


def legend_below(page: Canvas, handles: Sequence[Any]) -> None:
    columns = max(1, min(len(handles), int(page.figure.get_figwidth() / 1.6)))
    page.body.legend(handles=list(handles), loc="outside lower center", ncols=columns)


def ticks(values: Sequence[int]) -> list[int]:
    """At most nine of the values."""
    whole = sorted(set(values))
    return whole[:: -(-len(whole) // 9)]


def save(page: Canvas, path: Path) -> list[Path]:
    """Writes PNG and SVG beside each other. No dates or versions inside: the same figure gives the same bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    png, svg = path.with_name(path.stem + ".png"), path.with_name(path.stem + ".svg")
    page.figure.savefig(png, dpi=150, metadata={"Software": None})
    page.figure.savefig(svg, metadata={"Date": None, "Creator": None})
    return [png, svg]
