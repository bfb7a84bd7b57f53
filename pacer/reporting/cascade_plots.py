"""Pictures of the cost model of exits (`pacer.evaluation.cascade`): agreement per exit, speed over exits and buffers,
where HiSpec pays, and how well the model foretold what was measured. Look and layout: `style`.

Every function saves ``path`` with the suffixes .png and .svg, returns both, and raises ConfigError where there is
nothing to draw.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import BoundaryNorm, Normalize
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from pacer.errors import ConfigError
from pacer.reporting import style

Row = Mapping[str, Any]
SHADES = "cividis"  # its lightness rises with the value, in grey too
GAINS = [0.7, 0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.2, 1.5, 2.0]  # borders of the shades of a map
# Llama3-8B on ShareGPT, L_d 3, N_d 2 (arXiv 2510.01336): tokens/s over N_i
PUBLISHED_BUFFERS = {3: 65.5, 4: 66.5, 6: 60.0, 8: 57.5, 10: 53.0, 16: 45.0}
KINDS = {
    "shared": ("#e6e6e6", "..."), "norm": ("#9ecae1", "///"), "linear": ("#08306b", ""), "adapter": ("#f0b45a", "\\\\"),
}  # fmt: skip


def agreement_bars(rows: Sequence[Row], path: Path, *, command: str) -> list[Path]:
    """Each exit's agreement with the model and its expected accepted length, by kind of head, with what training took.

    Args:
        rows: ``layer, kind, agreement, expected_accepted, window, minutes, tokens`` (None: nothing was trained).
    """
    _some(rows, path, "train at least one kind of head")
    kinds, layers = list(dict.fromkeys(r["kind"] for r in rows)), sorted({r["layer"] for r in rows})
    title = "How well does each exit write what the whole model writes? By kind of head, on unseen texts"
    with style.applied():
        page = style.canvas(10.2, 3.9, title=title, command=command)
        width = 0.82 / len(kinds)
        panels = page.body.subplots(1, 2)
        for number, kind in enumerate(kinds):
            mine = {r["layer"]: r for r in rows if r["kind"] == kind}
            at = np.array([i for i, layer in enumerate(layers) if layer in mine])
            fill, hatch = KINDS.get(kind, ("#bdbdbd", "xx"))
            for axis, key, scale in zip(panels, ("agreement", "expected_accepted"), (100, 1), strict=True):
                heights = [scale * mine[layers[i]][key] for i in at]
                axis.bar(at + (number - (len(kinds) - 1) / 2) * width, heights, width, color=fill, hatch=hatch,
                         edgecolor=style.INK, linewidth=0.6)  # fmt: skip
        window = max(r["window"] for r in rows)
        panels[0].set_ylabel("agrees with the model's next token (%)")
        panels[1].set_ylabel(f"expected accepted tokens\n(run of agreement, at most {window})")
        for axis in panels:
            axis.set_xticks(range(len(layers)), [str(layer) for layer in layers])
            axis.set_xlabel("exit after so many layers")
            axis.grid(True, axis="y")
        handles = [
            Patch(facecolor=KINDS.get(kind, ("#bdbdbd", "xx"))[0], hatch=KINDS.get(kind, ("#bdbdbd", "xx"))[1],
                  edgecolor=style.INK, linewidth=0.6, label=_cost(next(r for r in rows if r["kind"] == kind)))
            for kind in kinds
        ]  # fmt: skip
        style.legend_below(page, handles)
        return style.save(page, path)


def _cost(row: Row) -> str:
    if not row["tokens"]:
        return f"{row['kind']}: untrained"
    minutes = "" if row["minutes"] is None else f"{row['minutes']:.0f} min, "
    return f"{row['kind']}: {minutes}{row['tokens'] / 1e6:.2g} M tokens"


def layer_map(grid: Sequence[Row], path: Path, *, command: str) -> list[Path]:
    """Modelled speed over (L_d, L_i): with the paper's buffers, and with the best; on the diagonal LayerSkip's best.

    Args:
        grid: of `pacer.evaluation.cascade.search.layer_grid`.
    """
    _some(grid, path, "give at least one exit")
    layers = sorted({r["draft"] for r in grid})
    panels = {"fixed": "N_d = 2, N_i = 4 (the paper's)", "best": "best buffers of each pair (N_d, N_i; -: no bonus)"}
    speeds = [r[key]["ratio_to_ar"] for r in grid for key in panels if r[key]]
    norm = Normalize(min(speeds), max(speeds) if max(speeds) > min(speeds) else min(speeds) + 1e-6)
    title = "Which exits? Modelled speed of HiSpec by pair of exits (diagonal: LayerSkip)"
    with style.applied():
        size = max(3.6, 0.62 * len(layers))
        page = style.canvas(2 * size + 2.6, size + 0.6, title=title, command=command)
        axes = page.body.subplots(1, 2, sharey=True)
        for axis, (key, name) in zip(axes, panels.items(), strict=True):
            found = [r for r in grid if (r["best"] if r["verifier"] is None else r[key])]
            top = max(found, key=lambda r: (r["best"] if r["verifier"] is None else r[key])["ratio_to_ar"])
            for row in found:
                _cell(axis, layers, row, row["best"] if row["verifier"] is None else row[key], norm, row is top)
            axis.set(xlim=(-0.5, len(layers) - 0.5), ylim=(-0.5, len(layers) - 0.5), title=name,
                     xlabel="draft exit L_d (layers)", aspect="equal")  # fmt: skip
            axis.set_xticks(range(len(layers)), [str(layer) for layer in layers])
            axis.set_yticks(range(len(layers)), [str(layer) for layer in layers])
        axes[0].set_ylabel("intermediate verifier L_i (layers)")
        shades = ScalarMappable(norm, SHADES)
        page.body.colorbar(shades, ax=list(axes), label="modelled speed / speed of AR (×)", shrink=0.85)
        style.legend_below(page, [Patch(facecolor="none", edgecolor="#d62728", linewidth=2, label="fastest")])
        return style.save(page, path)


def _cell(axis: Axes, layers: Sequence[int], row: Row, said: Row, norm: Normalize, fastest: bool) -> None:
    x, y = layers.index(row["draft"]), layers.index(row["verifier"] or row["draft"])
    value = said["ratio_to_ar"]
    axis.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor=colormaps[SHADES](norm(value)), edgecolor="white"))
    ink = "white" if norm(value) < 0.55 else "black"
    buffers = ", ".join(map(str, said["buffers"])) + ("" if said["bonus"] else " -")
    note = f"γ = {buffers}" if row["verifier"] is None else buffers
    axis.text(x, y, f"{value:.2f}\n{note}", ha="center", va="center", fontsize=8, color=ink, linespacing=1.3)
    if fastest:
        axis.add_patch(Rectangle((x - 0.47, y - 0.47), 0.94, 0.94, facecolor="none", edgecolor="#d62728", linewidth=2))


def buffer_curve(rows: Sequence[Row], path: Path, *, command: str, measured: Sequence[Row] = ()) -> list[Path]:
    """Speed over N_i, one line per N_d; beside it each line as a share of its best, with the published curve.

    Args:
        rows: of `pacer.evaluation.cascade.search.buffer_curves`. measured: ``n_d, n_i, ratio_to_ar`` points.
    """
    _some(rows, path, "give at least one buffer")
    drafts = sorted({r["n_d"] for r in rows})
    exits = rows[0]["exits"]
    title = f"How many tokens should L_i gather? Modelled, exits {exits[0]} and {exits[1]}"
    looks = style.line_styles(len(drafts) + 1)
    with style.applied():
        page = style.canvas(9.6, 3.8, title=title, command=command)
        left, right = page.body.subplots(1, 2)
        for n, (color, dash, marker) in zip(drafts, looks, strict=False):
            mine = sorted((r["n_i"], r["ratio_to_ar"]) for r in rows if r["n_d"] == n)
            sizes, speeds = [size for size, _ in mine], np.array([value for _, value in mine])
            for axis, values in ((left, speeds), (right, 100 * speeds / speeds.max())):
                axis.plot(sizes, values, color=color, linestyle=dash, marker=marker, markersize=4, linewidth=1.4)
        for row in measured:
            color = dict(zip(drafts, looks, strict=False)).get(row["n_d"], looks[0])[0]
            left.plot(row["n_i"], row["ratio_to_ar"], color=color, markeredgecolor=style.INK, marker="*", markersize=12)
        color, dash, marker = looks[-1]
        best = max(PUBLISHED_BUFFERS.values())
        right.plot(list(PUBLISHED_BUFFERS), [100 * v / best for v in PUBLISHED_BUFFERS.values()], color=color,
                   linestyle=dash, marker=marker, markersize=4, linewidth=1.4)  # fmt: skip
        left.axhline(1, color=style.INK, linestyle=":", linewidth=1)
        left.set_ylabel("speed / speed of AR (×)")
        right.set_ylabel("speed, share of the line's best (%)")
        for axis in (left, right):
            axis.set_xlabel("N_i: tokens L_i gathers before the whole model verifies")
            axis.set_xticks(style.ticks([r["n_i"] for r in rows]))
            axis.grid(True)
        names = [*(f"N_d = {n}" for n in drafts), "published: Llama3-8B, N_d = 2"]
        handles = style.line_handles(names, looks)
        if measured:
            star = Line2D([], [], color="white", markeredgecolor=style.INK, marker="*", markersize=11, label="measured")
            handles.append(star)
        style.legend_below(page, handles)
        return style.save(page, path)


def pays_map(maps: Sequence[Row], path: Path, *, command: str) -> list[Path]:
    """HiSpec over the best LayerSkip by both acceptances: a panel per set of prices, with its points.

    Args:
        maps: of `pacer.evaluation.cascade.theory.where_it_pays`.
    """
    _some(maps, path, "give at least one set of prices")
    shades = colormaps[SHADES]
    norm = BoundaryNorm(GAINS, shades.N, extend="both")
    title = "Where does HiSpec pay? Modelled, acceptance by independent coins"
    with style.applied():
        page = style.canvas(max(6.8, 1.4 + 4.3 * len(maps)), 4.8, title=title, command=command)
        axes = page.body.subplots(1, len(maps), sharey=True, squeeze=False)[0]
        for axis, found in zip(axes, maps, strict=True):
            x, y = 100 * np.array(found["accept_i"]), 100 * np.array(found["accept_f"])
            z = np.array(found["over_same"]).T  # rows of a picture are its y
            axis.contourf(x, y, z, levels=GAINS, cmap=shades, norm=norm, extend="both")
            _line(axis, x, y, z, "-")
            _line(axis, x, y, np.array(found["over_best"]).T, "--")
            for point in found["points"]:
                _point(axis, point)
            exits = f"L_d {found['exits'][0]}, L_i {found['exits'][1]} of {found['n_layers']}"
            axis.set(title=f"{style.broken(found['name'], 44)}\n{exits}", xlim=(0, 100), ylim=(0, 100),
                     xlabel="draft token accepted by L_i (%)")  # fmt: skip
        axes[0].set_ylabel("buffered token accepted by the model (%)")
        bar = ScalarMappable(norm, shades)
        page.body.colorbar(bar, ax=list(axes), label="HiSpec / best LayerSkip from the same draft exit (×)")
        dots = [
            Line2D([], [], color="white", markeredgecolor=style.INK, marker=marker, linestyle="none", label=name)
            for marker, name in (("o", "measured here"), ("D", "published"))
        ]
        borders: dict[str, Any] = {"as fast as LayerSkip from L_d": "-", "as the better of L_d and L_i": "--"}
        edges = [Line2D([], [], color=style.INK, linewidth=1.8, linestyle=d, label=name) for name, d in borders.items()]
        handles = [*dots, *edges]
        style.legend_below(page, handles)
        return style.save(page, path)


def _line(axis: Axes, x: Any, y: Any, z: Any, dash: str) -> None:
    """Where the value is 1: black on white, to be seen on every shade."""
    if z.min() < 1 < z.max():
        axis.contour(x, y, z, levels=[1.0], colors="white", linewidths=3.4)
        axis.contour(x, y, z, levels=[1.0], colors=style.INK, linewidths=1.8, linestyles=dash)


def _point(axis: Axes, point: Row) -> None:
    x, y = 100 * point["accept_i"], 100 * point["accept_f"]
    axis.plot(x, y, marker="D" if point["published"] else "o", markersize=8, color="white", markeredgecolor=style.INK)
    box = {"facecolor": "white", "edgecolor": "none", "pad": 1.5, "alpha": 0.9}
    below = y > 60
    side = "right" if x > 66 else "left" if x < 33 else "center"
    text = f"{style.broken(point['name'])}\n{point['over_same']:.2f}×"
    axis.annotate(text, (x, y), fontsize=8, bbox=box, xytext=(0, -12 if below else 12), textcoords="offset points",
                  ha=side, va="top" if below else "bottom")  # fmt: skip


def checked(points: Sequence[Row], path: Path, *, command: str) -> list[Path]:
    """Modelled against measured: tokens per target pass, and speed over AR; one point per arm and benchmark.

    Args:
        points: ``arm, benchmark, tau_predicted, tau_measured, ratio_predicted, ratio_measured``.
    """
    _some(points, path, "decode at least one arm")
    arms = list(dict.fromkeys(p["arm"] for p in points))
    looks = dict(zip(arms, style.line_styles(len(arms)), strict=True))
    title = "Does the model foretell what decoding does? One point per arm and benchmark"
    with style.applied():
        page = style.canvas(9.4, 4.2, title=title, command=command)
        names = {"tau": "emitted tokens per target pass", "ratio": "speed / speed of AR (×)"}
        for axis, (key, name) in zip(page.body.subplots(1, 2), names.items(), strict=True):
            both = [p[f"{key}_{how}"] for p in points for how in ("predicted", "measured")]
            ends = np.array([0.95 * min(both), 1.05 * max(both)])
            axis.fill_between(ends, 0.9 * ends, 1.1 * ends, color="#ececec")
            axis.plot(ends, ends, color="#8f8f8f", linewidth=1)
            for p in points:
                color, _, marker = looks[p["arm"]]
                axis.plot(p[f"{key}_measured"], p[f"{key}_predicted"], color=color, marker=marker, markersize=5.5,
                          linestyle="none")  # fmt: skip
            axis.set(xlim=ends, ylim=ends, xlabel=f"measured: {name}", ylabel=f"modelled: {name}")
            axis.grid(True)
        handles = [Line2D([], [], color=looks[a][0], marker=looks[a][2], linestyle="none", label=a) for a in arms]
        handles.append(Line2D([], [], color="#8f8f8f", linewidth=6, alpha=0.4, label="± 10 %"))
        page.body.legend(handles=handles, loc="outside lower center", ncols=2)
        return style.save(page, path)


def _some(rows: Sequence[Row], path: Path, remedy: str) -> None:
    if not rows:
        raise ConfigError("nothing to plot", value=str(path), remedy=remedy)
