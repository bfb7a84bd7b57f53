"""Pictures of a replay (`pacer.evaluation.replay.results`): what the draft's runs look like, what the signals know,
what each rule recovers, and predicted against measured speed. Look and layout: `style`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from pacer.errors import ConfigError
from pacer.evaluation.replay.evidence import PROBABILITIES
from pacer.evaluation.replay.results import LABELS
from pacer.reporting import style

Row = Mapping[str, Any]
SIGNALS = {
    "probability": "draft's probability", "product": "product of the draft's probabilities",
    "entropy": "draft's entropy (nats)", "margin": "margin over the runner-up (nats)", "index": "index in the draft",
    "match": "n-gram match (tokens)", "score": "pre-verifier's estimate",
}  # fmt: skip
CURVES = ("probability", "product", "pacer", "pacer_lazy", "oracle")  # lines of a gain plot that can be told apart


def accepted_lengths(runs: Row, path: Path, *, command: str) -> list[Path]:
    """Distribution of accepted lengths, and how much one tells of the next."""
    if not runs["rounds"]:
        raise ConfigError("nothing to plot", value=str(path), remedy="replay texts with at least one whole round")
    title = "How long are the draft's accepted runs, and does one foretell the next?"
    with style.applied():
        page = style.canvas(8.6, 3.2, title=title, command=command)
        left, right = page.body.subplots(1, 2)
        share = 100 * np.array(runs["counts"]) / runs["rounds"]
        left.bar(range(len(share)), share, 0.8, color=style.EXACT, edgecolor=style.INK, linewidth=0.6)
        left.axvline(runs["mean"], color=style.INK, linestyle="--", linewidth=1)
        left.text(runs["mean"] + 0.2, 0.95 * share.max(), f"mean {runs['mean']:.2f}", fontsize=9)
        left.set(xlabel="accepted tokens of a round", ylabel=f"share of {runs['rounds']} rounds (%)")
        left.set_xticks(style.ticks(range(len(share))))
        known = [c for c in runs["autocorrelation"] if c["value"] is not None]
        lags = [c["lag"] for c in known]
        spans = [1.96 / np.sqrt(c["pairs"]) for c in known]
        right.axhline(0, color=style.INK, linewidth=0.8)
        right.fill_between(lags, [-s for s in spans], spans, color="#d9d9d9", label="95 % of independent lengths")
        names = {"value": "around the mean of all texts", "within": "around each text's own mean"}
        for (key, name), (color, dash, marker) in zip(names.items(), style.line_styles(2), strict=True):
            values = [c[key] for c in known]
            right.plot(lags, values, color=color, linestyle=dash, marker=marker, markersize=4.5, label=name)
        right.set(xlabel="lag (rounds)", ylabel="autocorrelation of lengths")
        right.set_xticks(lags)
        right.margins(y=0.25)
        right.legend(loc="upper right")
        for axis in (left, right):
            axis.grid(True, axis="y")
        return style.save(page, path)


def calibration(signals: Sequence[Row], path: Path, *, command: str) -> list[Path]:
    """Acceptance over the value of each signal, in bins of equal count: of the token, of all to it, of the next too."""
    shown = [s for s in dict.fromkeys(q["signal"] for q in signals) if any(q["curve"] for q in signals
             if q["signal"] == s)]  # fmt: skip
    if not shown:
        raise ConfigError("nothing to plot", value=str(path), remedy="replay texts where some drafts are accepted")
    looks = dict(zip(("conditional", "survival", "next"), style.line_styles(3), strict=True))
    title = "What do the signals know? Acceptance by value (a probability on the diagonal is calibrated)"
    with style.applied():
        page, axes = style.panels([SIGNALS[s] for s in shown], title=title, command=command, height=3.3, columns=3)
        for axis, name in zip(axes, shown, strict=True):
            for quality in (q for q in signals if q["signal"] == name):
                _calibration_curve(axis, quality, looks[quality["label"]])
            if name in PROBABILITIES:
                axis.plot([0, 1], [0, 100], color="#8f8f8f", linewidth=1, zorder=1)
                axis.set_xlim(-0.02, 1.02)
            axis.set(
                ylim=(0, 105), xlabel="\n".join(["value", *(_judgement(q) for q in signals if q["signal"] == name)])
            )
            axis.grid(True)
            if axis.get_subplotspec().is_first_col():  # type: ignore[union-attr]  # axes made by subplots() have one
                axis.set_ylabel("accepted (%)")
        names = (
            "conditional: accepted, given all before it",
            "survival: with all before it",
            "next: and the one after",
        )
        diagonal = Line2D([], [], color="#8f8f8f", linewidth=1, label="calibrated")
        style.legend_below(page, [*style.line_handles(names, list(looks.values())), diagonal])
        return style.save(page, path)


def _calibration_curve(axis: Axes, quality: Row, look: style.LineStyle) -> None:
    color, dash, marker = look
    x, y = [p["value"] for p in quality["curve"]], [100 * p["accepted"] for p in quality["curve"]]
    axis.plot(x, y, color=color, linestyle=dash, marker=marker, markersize=4.5, linewidth=1.4)


def _judgement(quality: Row) -> str:
    auc = "no" if quality["auc"] is None else f"{quality['auc']:.3f}"
    ece = "" if quality["ece"] is None else f", ECE {quality['ece']:.3f}"
    return f"{quality['label']}: AUC {auc}{ece}"


def gap_recovered(rows: Sequence[Row], path: Path, *, command: str) -> list[Path]:
    """Share of the way from the best fixed window to the oracle: one panel per benchmark, one bar per rule."""
    families = [f for f in LABELS if f not in ("fixed", "oracle") and any(r["family"] == f for r in rows)]
    groups = list(dict.fromkeys(r["benchmark"] for r in rows))
    table = {(r["benchmark"], r["family"]): r for r in rows}
    if not any(r["gap_share"] is not None for r in rows):
        raise ConfigError("nothing to plot", value=str(path), remedy="the oracle gains nothing here: use other texts")
    shares = [100 * r["gap_share"] for r in rows if r["gap_share"] is not None and r["family"] in families]
    low, high = min(0.0, *shares) * 1.35 - 4, max(10.0, *shares) * 1.35
    best = {g: table[g, "oracle"]["ratio_to_ar"] / table[g, "fixed"]["ratio_to_ar"] for g in groups}
    titles = [f"{'all texts' if g == 'all' else g}: {best[g]:.2f}×" for g in groups]
    title = "How much of the oracle's gain over the best fixed γ does each rule recover? (above: that gain)"
    with style.applied():
        page, axes = style.panels(titles, title=title, command=command, height=1.0 + 0.3 * len(families))
        for axis, group in zip(axes, groups, strict=True):
            axis.axvline(0, color=style.INK, linewidth=1)
            for y, family in enumerate(families):
                share = table[group, family]["gap_share"]
                if share is None:
                    continue
                fill = style.LOSSY if family.startswith("pacer") else style.EXACT
                axis.barh(y, 100 * share, 0.68, color=fill, edgecolor=style.INK, linewidth=0.6)
                side = "left" if share >= 0 else "right"
                axis.annotate(f"{100 * share:.0f}", (100 * share, y), xytext=(3 if share >= 0 else -3, 0),
                              textcoords="offset points", va="center", ha=side, fontsize=9)  # fmt: skip
            axis.set(xlim=(low, high), xlabel="share of the gap recovered (%)")
            style.name_bars(axis, [LABELS[f] for f in families])
        return style.save(page, path)


def gain(curve: Sequence[Row], path: Path, *, command: str, axis: str) -> list[Path]:
    """Speed over plain decoding, and over the best fixed window, with every rule tuned anew at each price.

    Args:
        axis: c (cost of a draft pass) or v (cost of each further token that the target verifies).
    """
    shown = [f for f in CURVES if any(r["family"] == f for r in curve)]
    if not shown:
        raise ConfigError("nothing to plot", value=str(path), remedy="give at least one price")
    title, meaning = {
        "c": ("What is an adaptive length worth where the draft costs more?", "c: draft pass / target pass"),
        "v": ("What is an adaptive length worth where verifying more tokens costs more?",
              "cost of each further verified token / target pass"),
    }[axis]  # fmt: skip
    families = ["fixed", *shown]
    with style.applied():
        page = style.canvas(9.4, 3.8, title=title, command=command)
        left, right = page.body.subplots(1, 2)
        for family, look in zip(families, style.line_styles(len(families)), strict=True):
            mine = sorted((r for r in curve if r["family"] == family), key=lambda r: r["x"])
            for panel, key in ((left, "ratio_to_ar"), (right, "over_fixed")):
                color, dash, marker = look
                panel.plot([r["x"] for r in mine], [r[key] for r in mine], color=color, linestyle=dash, marker=marker,
                           markersize=4.5, linewidth=1.4)  # fmt: skip
        left.set_ylabel("speed / speed of AR (×)")
        right.set_ylabel("speed / speed of the best fixed γ (×)")
        for panel in (left, right):
            panel.set_xlabel(meaning)
            panel.grid(True)
        style.legend_below(page, style.line_handles([LABELS[f] for f in families], style.line_styles(len(families))))
        return style.save(page, path)


def predicted_and_measured(points: Sequence[Row], path: Path, *, command: str) -> list[Path]:
    """Predicted against measured tokens/s, one point per (arm, benchmark): ``arm, benchmark, predicted, measured``."""
    if not points:
        raise ConfigError("nothing to plot", value=str(path), remedy="measure at least one arm")
    benchmarks = list(dict.fromkeys(p["benchmark"] for p in points))
    looks = dict(zip(benchmarks, style.line_styles(len(benchmarks)), strict=True))
    values = [p[key] for p in points for key in ("predicted", "measured")]
    low, high = 0.95 * min(values), 1.05 * max(values)
    title = "Does replay foretell the measured speed? One point per arm and benchmark"
    with style.applied():
        page = style.canvas(6.8, 5.2, title=title, command=command)
        axis = page.body.subplots()
        ends = np.array([low, high])
        axis.fill_between(ends, 0.9 * ends, 1.1 * ends, color="#ececec")
        axis.plot(ends, ends, color="#8f8f8f", linewidth=1)
        for point in points:
            color, _, marker = looks[point["benchmark"]]
            hollow = "none" if point.get("by_construction") else color
            axis.plot(point["measured"], point["predicted"], color=color, marker=marker, linestyle="none",
                      markersize=5, markerfacecolor=hollow)  # fmt: skip
        axis.set(xlim=(low, high), ylim=(low, high), xlabel="measured (decoded tokens/s)",
                 ylabel="predicted by replay (decoded tokens/s)")  # fmt: skip
        axis.grid(True)
        handles = [Line2D([], [], color=looks[b][0], marker=looks[b][2], linestyle="none", label=b) for b in benchmarks]
        handles.append(Line2D([], [], color="#8f8f8f", linewidth=6, alpha=0.4, label="± 10 %"))
        if any(point.get("by_construction") for point in points):
            handles.append(Line2D([], [], color=style.INK, marker="o", markerfacecolor="none", linestyle="none",
                                  label="AR: the unit of time"))  # fmt: skip
        style.legend_below(page, handles)
        return style.save(page, path)
