"""What a round takes, from a latency profile. The unit is one round of plain decoding: a single-token target pass.

Shapes: W widths of a pass (tokens it reads).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from pacer.errors import ConfigError
from pacer.evaluation.profiler import Point
from pacer.evaluation.replay.walk import WIDTHS, Usage
from pacer.settings import CostSettings

Values = NDArray[np.float64]


@dataclass(frozen=True)
class Prices:
    """``target``, ``draft``, ``preverifier (W,)``: a pass by the tokens it reads; ``rest``: what else a round that
    drafts takes beyond a round of plain decoding; ``signals``: what a drawn token takes more where a rule looks at
    its signals."""

    target: Values
    draft: Values
    preverifier: Values
    rest: float
    signals: float = 0.0

    def cost(self, used: Usage) -> Values:
        """Units that each text takes ``(…, T)``; plain decoding takes one per token."""
        signals = np.zeros(WIDTHS)
        signals[1] = self.signals
        table = np.stack([self.target, self.draft, self.preverifier, signals])
        return np.asarray(np.einsum("...tpw,pw->...t", used.passes, table) + self.rest * used.drafting)

    def ratio(self, used: Usage) -> Values:
        """Speed over plain decoding, total over total of the texts ``(…)``."""
        return np.asarray(used.emitted.sum(-1) / np.maximum(self.cost(used).sum(-1), 1e-12))

    def with_draft(self, c: float) -> Prices:
        """The same machine with a draft pass of ``c``."""
        some = (np.arange(WIDTHS) > 0).astype(float)
        return replace(self, draft=np.asarray(self.draft * (c / self.draft[1]) if self.draft[1] else c * some))

    def with_verify(self, token: float) -> Prices:
        """The same with ``token`` for each further token that the target verifies."""
        return replace(self, target=np.asarray(1 + token * (np.arange(WIDTHS) - 1.0)))


def _line(known: Mapping[int, float]) -> Values:
    """Measured times by width → all widths: between by interpolation, beyond by the line through both ends."""
    sizes = np.array(sorted(known), dtype=float)
    if not len(sizes):
        return np.zeros(WIDTHS)
    times = np.array([known[int(size)] for size in sizes])
    slope = (times[-1] - times[0]) / (sizes[-1] - sizes[0]) if len(sizes) > 1 else 0.0
    widths = np.arange(WIDTHS, dtype=float)
    inside = np.interp(widths, sizes, times)
    beyond = np.maximum(widths - sizes[-1], 0) * max(slope, 0.0)
    return np.where(widths > 0, inside + beyond, 0.0)


def from_points(
    points: Sequence[Point], context: float, rest: float = CostSettings().rest, overhead_ms: float = 0.0
) -> Prices:
    """Prices of the smallest batch at the context nearest to ``context`` tokens; several profiles are averaged.

    Args:
        overhead_ms: what a round of plain decoding takes beyond its target pass; every round has it.

    Raises:
        ConfigError: no single-token target pass in the profile.
    """
    batch = min((p.batch for p in points), default=0)
    nearest = min((p.context for p in points), default=0, key=lambda c: abs(c - context))
    times: dict[str, dict[int, list[float]]] = {}
    for p in points:
        if (p.batch, p.context) == (batch, nearest):
            times.setdefault(p.part, {}).setdefault(p.n, []).append(p.median_ms)
    means = {part: {n: float(np.mean(values)) for n, values in found.items()} for part, found in times.items()}
    if 1 not in means.get("target", {}):
        raise ConfigError("the profile has no single-token target pass", remedy="run python -m pacer.profile")
    unit = means["target"][1] + overhead_ms
    target, draft, preverifier = (_line(means.get(part, {})) for part in ("target", "draft", "preverifier"))
    signals = means.get("signals", {}).get(1, 0.0) / unit
    return Prices((target + overhead_ms) / unit, draft / unit, preverifier / unit, rest, signals)


def from_settings(costs: CostSettings) -> Prices:
    """Prices that are linear in the tokens, as the `costs` block says."""
    widths = np.arange(WIDTHS, dtype=float)
    some = (widths > 0).astype(float)
    return Prices(1 + costs.token * (widths - 1), costs.draft * some, costs.preverify * some, costs.rest)
