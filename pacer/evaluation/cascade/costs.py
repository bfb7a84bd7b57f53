"""What the rounds of a walk take, in units of one single-token pass of the whole model with its head.

A pass over layers a … b − 1 with n tokens takes ``call[n] + (b − a) · layer[n]``; an exit's adapter and head have
prices of their own. Drafting steps come several in a row and find their weights warm: they are priced by themselves.

Shapes: W widths of a pass (tokens it reads), T texts, K stages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from pacer.errors import ConfigError
from pacer.evaluation.cascade.profile import RungPoint
from pacer.evaluation.cascade.table import Floats
from pacer.evaluation.cascade.walk import WIDTHS, Cascade, Usage


@dataclass(frozen=True)
class Prices:
    """``call``, ``layer (W,)``: of a pass, and of each layer in it. ``adapters``, ``heads``: exit → ``(W,)``.
    ``drafts``: exit → one drafting step: its layers, adapter and head over one token. ``rest``: what a verification
    takes beyond its passes. ``worst_fit``: largest relative error of ``call`` and ``layer`` on the measured groups."""

    n_layers: int
    call: Floats
    layer: Floats
    adapters: Mapping[int, Floats]
    heads: Mapping[int, Floats]
    drafts: Mapping[int, float]
    rest: float = 0.0
    worst_fit: float = 0.0

    @property
    def exits(self) -> tuple[int, ...]:
        """Exits that have a price."""
        return tuple(sorted(self.drafts))

    def group(self, a: int, b: int) -> Floats:
        """Layers a … b − 1, and the adapter of an exit that they end at ``(W,)``."""
        return np.asarray(self.call + (b - a) * self.layer + self.adapters.get(b, 0.0))

    def tables(self, cascade: Cascade) -> tuple[Floats, Floats]:
        """Prices of each stage's passes and of its head ``(K, W)``.

        Raises:
            ConfigError: an exit without a price.
        """
        if missing := [layer for layer in cascade.exits if layer not in self.drafts]:
            raise ConfigError("exits without a price", value=missing, allowed=self.exits)
        depths = (0, *cascade.exits, self.n_layers)
        return np.stack([self.group(a, b) for a, b in pairwise(depths)]), np.stack([self.heads[d] for d in depths[1:]])

    def cost(self, cascade: Cascade, used: Usage) -> Floats:
        """Units that each text takes ``(T,)``; plain decoding, N_1 = 0, takes one per token."""
        if cascade.buffers[0] == 0:
            return used.emitted.astype(np.float64)
        groups, heads = self.tables(cascade)
        drafted = used.reads[:, 0, 1]
        passes = used.passes.copy()
        passes[:, 0, 1] -= drafted
        units = np.einsum("tkw,kw->t", passes, groups) + np.einsum("tkw,kw->t", used.reads[:, 1:], heads[1:])
        return np.asarray(units + drafted * self.drafts[cascade.exits[0]] + self.rest * used.verified.sum(1))

    def ratio(self, cascade: Cascade, used: Usage) -> float:
        """Speed over plain decoding, total over total."""
        return float(used.emitted.sum() / max(float(self.cost(cascade, used).sum()), 1e-12))

    def as_json(self) -> dict[str, Any]:
        """Plain data, for the widths that are measured."""

        def short(values: Floats) -> list[float]:
            return [round(float(value), 6) for value in values[1:18]]

        return {
            "widths": "1 … 17 tokens", "call": short(self.call), "layer": short(self.layer),
            "adapters": {layer: short(values) for layer, values in self.adapters.items()},
            "heads": {layer: short(values) for layer, values in self.heads.items()},
            "drafts": {layer: round(value, 6) for layer, value in self.drafts.items()},
            "rest": self.rest, "worst_fit": round(self.worst_fit, 4),
        }  # fmt: skip


def synthetic(
    n_layers: int, exits: Sequence[int], *, head: float = 0.0, exit_head: float | None = None, token: float = 0.0,
    rest: float = 0.0,
) -> Prices:  # fmt: skip
    """Prices in proportion to layers.

    Args:
        head: the whole model's head, as a share of its single-token pass.
        exit_head: an exit's head in the same units (None: as the model's own; fewer ids cost less).
        token: what each further token adds to a pass, as a share of it.
    """
    widths = np.asarray(1 + token * (np.arange(WIDTHS) - 1.0), dtype=np.float64)
    widths[0] = 0
    own, layer = head if exit_head is None else exit_head, (1 - head) / n_layers
    heads = {**{exit: own * widths for exit in exits}, n_layers: head * widths}
    drafts = {exit: exit * layer + own for exit in exits}
    return Prices(n_layers, np.zeros(WIDTHS), layer * widths, {}, heads, drafts, rest)


def from_points(points: Sequence[RungPoint], rest: float = 0.0, overhead_ms: float = 0.0) -> Prices:
    """Prices from a profile (:func:`~pacer.evaluation.cascade.profile.profile_rungs`), several are averaged.

    ``call`` and ``layer`` are fitted per width to the groups that were measured, by least squares.

    Args:
        rest: of a verification, in units of plain decoding's pass.
        overhead_ms: what a round of plain decoding takes beyond its pass; every target pass has it.

    Raises:
        ConfigError: no pass of the whole model in the profile.
    """
    times: dict[tuple[str, int, int], dict[int, list[float]]] = {}
    for p in points:
        times.setdefault((p.part, p.a, p.b), {}).setdefault(p.n, []).append(p.median_ms)
    means = {key: {n: float(np.mean(values)) for n, values in found.items()} for key, found in times.items()}
    whole = [(b, found[1]) for (part, _, b), found in means.items() if part == "whole"]
    if not whole:
        raise ConfigError("the profile has no pass of the whole model", remedy="use profile_rungs")
    n_layers, unit = whole[0][0], whole[0][1] + overhead_ms

    def each(wanted: str) -> dict[tuple[int, int], dict[int, float]]:
        chosen = {(a, b): found for (part, a, b), found in means.items() if part == wanted}
        return {edge: {n: ms / unit for n, ms in found.items()} for edge, found in chosen.items()}

    call, layer, worst = _fitted(each("rung"))
    adapters = {b: curve(found) for (_, b), found in each("adapter").items()}
    heads = {b: curve(found) for (_, b), found in each("head").items()}
    heads[n_layers] = np.asarray(heads[n_layers] + overhead_ms / unit * (np.arange(WIDTHS) > 0))
    drafts = {b: found[1] for (_, b), found in each("draft").items()}
    return Prices(n_layers, call, layer, adapters, heads, drafts, rest, worst)


def _fitted(groups: Mapping[tuple[int, int], Mapping[int, float]]) -> tuple[Floats, Floats, float]:
    """``call``, ``layer (W,)`` and the largest relative error of the fit."""
    depth = np.array([b - a for a, b in groups], dtype=float)
    call, layer = {}, {}
    for n in sorted(set.intersection(*(set(found) for found in groups.values()))):
        y = np.array([found[n] for found in groups.values()])
        design = np.stack([np.ones_like(depth), depth], 1)
        constant, slope = np.linalg.lstsq(design, y, rcond=None)[0] if len(set(depth)) > 1 else (0.0, 0.0)
        if constant <= 0:  # through the origin: a pass takes no less than its layers
            constant, slope = 0.0, float(depth @ y / (depth @ depth))
        call[n], layer[n] = float(constant), float(slope)
    errors = [abs((call[n] + (b - a) * layer[n]) / found[n] - 1) for (a, b), found in groups.items() for n in call]
    return curve(call), curve(layer), float(max(errors))


def curve(known: Mapping[int, float]) -> Floats:
    """Measured values by width → all widths ``(W,)``: interpolated between, on the line through both ends beyond."""
    sizes = np.array(sorted(known), dtype=float)
    values = np.array([known[int(size)] for size in sizes])
    slope = (values[-1] - values[0]) / (sizes[-1] - sizes[0]) if len(sizes) > 1 else 0.0
    widths = np.arange(WIDTHS, dtype=float)
    beyond = np.maximum(widths - sizes[-1], 0) * max(slope, 0.0)
    return np.asarray(np.where(widths > 0, np.interp(widths, sizes, values) + beyond, 0.0), dtype=np.float64)
