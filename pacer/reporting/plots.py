"""Pictures of results (`pacer.evaluation.metrics.evaluate_trace`) and latency profiles; look and layout: `style`.

Every function saves ``path`` with the suffixes .png and .svg, returns both, and raises ConfigError where there is
nothing to draw. Save results before plotting them.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from pacer.errors import ConfigError
from pacer.reporting import style
from pacer.reporting.tables import benchmark_label, label

Row = Mapping[str, Any]
MAX_ARMS = 4  # lines in one acceptance panel that can still be told apart


def speed_bars(
    rows: Sequence[Row],
    path: Path,
    *,
    command: str,
    overall: Sequence[Row] = (),
    level: float = 0.95,
    reference: str = "ar",
) -> list[Path]:
    """Speed relative to AR with its interval: one panel per benchmark, one bar per arm.

    Args:
        rows: of `evaluate_trace`.
        overall: ``results["overall"]``; adds a panel with the geometric mean where there is more than one benchmark.
    """
    groups = _by_benchmark(rows)
    names = {row["arm"]: label(row) for row in rows}
    lossy = {row["arm"] for row in rows if row.get("guarantee") == "lossy"}
    if overall and len(groups) > 1:
        groups["geometric mean"] = list(overall)
    arms = [arm for arm in names if arm != reference] or list(names)
    highs = [row["ratio_high"] or row["ratio_to_ar"] or 0 for group in groups.values() for row in group]
    limit = max(1.0, *highs) * 1.2
    title = "How much faster than plain decoding (AR)? Tokens per second, prefill included"
    with style.applied():
        height = _bar_height([names[arm] for arm in arms])
        page, axes = style.panels(list(groups), title=title, command=command, height=height)
        for axis, group in zip(axes, groups.values(), strict=True):
            found = {row["arm"]: row for row in group}
            axis.axvline(1, color=style.INK, linestyle="--", linewidth=1)
            for y, arm in enumerate(arms):
                _speed_bar(axis, y, found.get(arm), limit, arm in lossy)
            axis.set(xlim=(0, limit), xlabel="speed / speed of AR (×)")
            style.name_bars(axis, [names[arm] for arm in arms])
        handles: list[Any] = [
            Line2D([], [], color=style.INK, linestyle="--", linewidth=1, label="AR = 1"),
            Line2D([], [], color=style.INK, marker="|", label=f"{100 * level:g} % interval"),
        ]
        if lossy:
            handles.append(Patch(facecolor=style.EXACT, edgecolor=style.INK, linewidth=0.6, label="lossless"))
            handles.append(
                Patch(facecolor=style.LOSSY, hatch="///", edgecolor=style.INK, label="lossy: text may change")
            )
        style.legend_below(page, handles)
        return style.save(page, path)


def _speed_bar(axis: Axes, y: int, row: Row | None, limit: float, lossy: bool) -> None:
    value = row["ratio_to_ar"] if row else None
    if row is None or value is None:
        axis.text(0.02 * limit, y, "not measured", va="center", fontsize=9, style="italic")
        return
    color, hatch = (style.LOSSY, "///") if lossy else (style.EXACT, "")
    axis.barh(y, value, 0.68, color=color, edgecolor=style.INK, linewidth=0.6, hatch=hatch)
    low, high = (value if row[key] is None else row[key] for key in ("ratio_low", "ratio_high"))
    if row["ratio_low"] is not None:
        spans = [[max(0.0, value - low)], [max(0.0, high - value)]]
        axis.errorbar(value, y, xerr=spans, fmt="none", ecolor=style.INK, elinewidth=1.2, capsize=3)
    box = {"facecolor": "white", "edgecolor": "none", "pad": 1}
    axis.text(max(value, high) + 0.02 * limit, y, f"{value:.2f}", va="center", fontsize=9, bbox=box)


def time_breakdown(rows: Sequence[Row], path: Path, *, command: str) -> list[Path]:
    """Where decoding time goes: one panel per benchmark, one stacked bar per arm, prefill left out."""
    groups = _by_benchmark(rows)
    names = {row["arm"]: label(row) for row in rows}
    parts = [part for part in style.PARTS if any((row.get("share") or {}).get(part) for row in rows)]
    title = "Where does decoding time go? (without prefill)"
    with style.applied():
        page, axes = style.panels(list(groups), title=title, command=command, height=_bar_height(list(names.values())))
        for axis, group in zip(axes, groups.values(), strict=True):
            shares = {row["arm"]: row.get("share") or {} for row in group}
            for y, arm in enumerate(names):
                _stack(axis, y, shares.get(arm, {}), parts)
            axis.set(xlim=(0, 100), xlabel="share of decoding time (%)")
            style.name_bars(axis, list(names.values()))
        looks = [style.PARTS[part] for part in parts]
        handles = [Patch(facecolor=c, hatch=h, edgecolor=style.INK, linewidth=0.6, label=name) for name, c, h in looks]
        style.legend_below(page, handles)
        return style.save(page, path)


def _stack(axis: Axes, y: int, share: Mapping[str, float | None], parts: Sequence[str]) -> None:
    left = 0.0
    for part in parts:
        width = 100 * (share.get(part) or 0.0)
        if width == 0:
            continue
        _, color, hatch = style.PARTS[part]
        axis.barh(y, width, 0.68, left, color=color, hatch=hatch, edgecolor=style.INK, linewidth=0.6)
        if width >= 4:  # room for the number
            ink = "white" if part in ("target", "preverify") else style.INK
            box = {"facecolor": color, "edgecolor": "none", "pad": 1} if hatch else None
            axis.text(left + width / 2, y, f"{width:.0f}", ha="center", va="center", fontsize=9, color=ink, bbox=box)
        left += width
    if left == 0:
        axis.text(2, y, "not measured", va="center", fontsize=9, style="italic")


def profile_curves(profile: Mapping[str, Any], path: Path, *, command: str) -> list[Path]:
    """Time of one call over the tokens it reads: one panel per batch and context, one line per part.

    Args:
        profile: ``{"points": [{"part", "n", "batch", "context", "median_ms", "low_ms", "high_ms"}, …]}``; whiskers
            reach from low to high.
    """
    points = profile["points"]
    if not points:
        raise ConfigError("nothing to plot", value=str(path), remedy="give at least one measured point")
    keys = sorted({(p["context"], p["batch"]) for p in points})
    parts = list(dict.fromkeys(p["part"] for p in points))
    batches = {batch for _, batch in keys}
    columns = len(batches) if len(batches) <= 3 and len(keys) % len(batches) == 0 and len(batches) > 1 else None
    medians = [p["median_ms"] for p in points]
    logarithmic = min(medians) > 0 and max(medians) > 20 * min(medians)
    titles = [f"batch {batch}, context {context} tokens" for context, batch in keys]
    title = "What does one model call cost? Median; whiskers: spread of the repeats"
    with style.applied():
        page, axes = style.panels(titles, title=title, command=command, height=3.0, columns=columns)
        for axis, key in zip(axes, keys, strict=True):
            for part, look in zip(parts, style.line_styles(len(parts)), strict=True):
                mine = [p for p in points if (p["context"], p["batch"]) == key and p["part"] == part]
                _cost_curve(axis, sorted(mine, key=lambda p: p["n"]), look)
            axis.set(xlabel="tokens read by the call", xticks=style.ticks([p["n"] for p in points]))
            axis.grid(True)
            _milliseconds(axis, logarithmic)
        names = {"preverifier": "pre-verifier", "preverify": "pre-verifier"}
        style.legend_below(
            page, style.line_handles([names.get(part, part) for part in parts], style.line_styles(len(parts)))
        )
        return style.save(page, path)


def _cost_curve(axis: Axes, line: Sequence[Row], look: style.LineStyle) -> None:
    median = np.array([p["median_ms"] for p in line], dtype=float)
    low, high = (
        np.array([p["median_ms"] if p.get(key) is None else p[key] for p in line], dtype=float)
        for key in ("low_ms", "high_ms")
    )
    _whiskers(axis, [p["n"] for p in line], median, np.clip([median - low, high - median], 0, None), look)


def _milliseconds(axis: Axes, logarithmic: bool) -> None:
    scale = " (log scale)" if logarithmic else ""
    if axis.get_subplotspec().is_first_col():  # type: ignore[union-attr]  # axes made by subplots() have one
        axis.set_ylabel(f"time of one call (ms){scale}")
    if logarithmic:
        axis.set_yscale("log")
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.yaxis.set_minor_formatter(NullFormatter())
    else:
        axis.set_ylim(bottom=0)


def acceptance_by_index(
    rows: Sequence[Row], path: Path, *, command: str, arms: Sequence[str] | None = None
) -> list[Path]:
    """Conditional acceptance and survival by position in the draft, above the number of rounds behind each point.

    Whiskers are 95 % Wilson intervals over rounds. Mean draft length and tokens per target pass stand beside every
    arm: acceptance means nothing without them.

    Args:
        arms: which arms; default: the four with the longest drafts.
    """
    drafting = [row for row in rows if row.get("survival")]
    depths = {row["arm"]: 0 for row in drafting}
    for row in drafting:
        depths[row["arm"]] = max(depths[row["arm"]], len(row["survival"]))
    longest = sorted(depths, key=lambda arm: -depths[arm])[:MAX_ARMS]
    chosen = [arm for arm in depths if arm in (longest if arms is None else arms)]
    groups = _by_benchmark([row for row in drafting if row["arm"] in chosen])
    looks = dict(zip(chosen, style.line_styles(len(chosen)), strict=True))
    shift = {arm: 0.09 * (i - (len(chosen) - 1) / 2) for i, arm in enumerate(chosen)}
    title = "How far do drafts hold? Whiskers: 95 % intervals; τ: tokens emitted per target pass"
    with style.applied():
        names = {id(row): style.broken(_named(row), style.ENTRY_WIDTH) for group in groups.values() for row in group}
        lines = max(sum(1 + names[id(row)].count("\n") for row in group) for group in groups.values())
        width, height = max(5.2, 0.6 + 3.0 * len(groups)), 6.6 + 0.2 * lines
        page = style.canvas(width, height, title=title, command=command)
        grid = page.body.subplots(3, len(groups), sharex="col", sharey="row", squeeze=False, height_ratios=[3, 3, 2])
        for (top, middle, bottom), (name, group) in zip(grid.T, groups.items(), strict=True):
            for row in group:
                look, move = looks[row["arm"]], shift[row["arm"]]
                _rate_curve(top, row["conditional_acceptance"], row["conditional_counts"], look, move)
                _rate_curve(middle, row["survival"], row["survival_counts"], look, move)
                k = 1 + move + np.arange(len(row["survival_counts"]))
                bottom.plot(k, row["survival_counts"], color=look[0], linestyle=look[1], marker=look[2], markersize=4)
            top.set_title(name)
            bottom.set(xlabel="position in the draft", xticks=style.ticks(range(1, 1 + max(depths[a] for a in chosen))))
            handles = style.line_handles([names[id(row)] for row in group], [looks[row["arm"]] for row in group])
            bottom.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.34))
        for axis, text in zip(grid[:, 0], _ACCEPTANCE_LABELS, strict=True):
            axis.set_ylabel(text)
        for axis in grid.flat:
            axis.grid(True)
            axis.set_ylim(0, None if axis in grid[2] else 105)
        return style.save(page, path)


_ACCEPTANCE_LABELS = (
    "this token accepted,\ngiven all before it (%)",
    "all tokens up to\nthis one accepted (%)",
    "rounds that drafted\nthis far (count)",
)


def _named(row: Row) -> str:
    return f"{label(row)}: drafts {row['mean_drafted']:.1f}, τ {row['tokens_per_verify']:.2f}"


def _rate_curve(
    axis: Axes, rates: Sequence[float | None], counts: Sequence[int], look: style.LineStyle, move: float
) -> None:
    known = [(k, rate, n) for k, (rate, n) in enumerate(zip(rates, counts, strict=True), start=1) if rate is not None]
    k, rate, n = np.array(known, dtype=float).T
    z = 1.96  # Wilson, "Probable inference", JASA 22, 1927
    centre = (rate + z * z / (2 * n)) / (1 + z * z / n)
    half = z * np.sqrt(rate * (1 - rate) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    spans = 100 * np.clip([rate - (centre - half), centre + half - rate], 0, None)
    _whiskers(axis, k + move, 100 * rate, spans, look)


def _whiskers(axis: Axes, x: Any, y: Any, spans: Any, look: style.LineStyle) -> None:
    color, dash, marker = look
    axis.errorbar(
        x, y, yerr=spans, color=color, linestyle=dash, marker=marker, markersize=4.5, linewidth=1.4,
        elinewidth=0.9, capsize=2.5,
    )  # fmt: skip


def _bar_height(names: Sequence[str]) -> float:
    """Inches of a panel in which no name touches the next: bars are evenly spaced, names have lines of their own."""
    lines = [1 + style.broken(name).count("\n") for name in names]
    closest = max((sum(pair) / 2 for pair in itertools.pairwise(lines)), default=1.0)
    return 1.0 + (0.13 + 0.17 * closest) * max(2, len(names))


def _by_benchmark(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows by benchmark title, in order."""
    if not rows:
        raise ConfigError("nothing to plot", remedy="give rows of at least one arm that was measured")
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(benchmark_label(row), []).append(row)
    return groups
