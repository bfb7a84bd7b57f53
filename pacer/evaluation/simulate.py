"""What a controller would gain on simulated rounds: a cost model over tables, no model in it.

Each round is judged on its own, so this is exact for the tokens of a round and approximate for which rounds occur
(the start policy stands for that). Costs are in units of one single-token target pass.

Shapes: S rounds, g drafted tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pacer.evaluation.replay import rules
from pacer.settings import CostSettings

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def round_cost(costs: CostSettings, drafted: Floats | Ints, calls: Floats | Ints) -> Floats:
    """Cost of rounds that drafted and verified ``drafted`` tokens and called the pre-verifier ``calls`` times."""
    return np.asarray(1.0 + (costs.token + costs.draft) * drafted + costs.preverify * calls + costs.rest)


@dataclass(frozen=True)
class Outcome:
    """Speed over plain decoding, tokens per target pass, drafted and accepted tokens per target pass."""

    speedup: float
    tokens_per_verify: float
    drafted: float
    accepted: float


def outcome(lengths: Ints, calls: Ints, accepted: Ints, costs: CostSettings) -> Outcome:
    """Outcome of drafting ``lengths (S,)`` tokens where up to ``accepted (S,)`` would be accepted."""
    kept = np.minimum(lengths, accepted)
    n = len(lengths)
    emitted = kept.sum() + n
    speedup = emitted / round_cost(costs, lengths, calls).sum()
    return Outcome(float(speedup), float(emitted / n), float(lengths.mean()), float(kept.mean()))


def fixed(accepted: Ints, counts: Ints, gamma: int, costs: CostSettings) -> Outcome:
    """The fixed window; ``counts (S,)``: tokens to a stop id, which ends a draft."""
    return outcome(np.minimum(gamma, counts), np.zeros(len(accepted), dtype=np.int64), accepted, costs)


def oracle(accepted: Ints, costs: CostSettings) -> Outcome:
    """Drafts exactly what will be accepted: no controller does better on these rounds."""
    return outcome(accepted, np.zeros(len(accepted), dtype=np.int64), accepted, costs)


def blockwise(
    scores: Floats, counts: Ints, b: int, t0: float, rho: float, gamma_max: int, rule: str = "mean"
) -> tuple[Ints, Ints]:
    """Draft lengths and pre-verifier calls of PACER's rule on ``scores (S, g)``, as replay has it."""
    limit = np.full(len(scores), min(gamma_max, scores.shape[1]))
    drawn, asked = rules.blockwise(scores, counts, b, t0, rho, limit, rule)
    return np.minimum(drawn, counts), asked.sum(1)


def tune(
    scores: Floats, counts: Ints, accepted: Ints, costs: CostSettings, gamma_max: int, rule: str = "mean",
    blocks: Iterable[int] = (1, 2, 3, 4, 5, 6),
    thresholds: Iterable[float] = tuple(np.round(np.arange(0.1, 0.96, 0.05), 2)),
    growths: Iterable[float] = (1.0, 1.05, 1.1, 1.2),
) -> tuple[dict[str, float | int], Outcome]:  # fmt: skip
    """The (b, t0, ρ) of the highest simulated speed."""
    best: tuple[dict[str, float | int], Outcome] | None = None
    for b, t0, rho in itertools.product(blocks, thresholds, growths):
        if b > gamma_max:
            continue
        lengths, calls = blockwise(scores, counts, b, t0, rho, gamma_max, rule)
        found = outcome(lengths, calls, accepted, costs)
        if best is None or found.speedup > best[1].speedup:
            best = ({"b": b, "t0": float(t0), "rho": float(rho)}, found)
    assert best is not None, "b = 1 always fits"
    return best


def tune_threshold(
    values: Floats, counts: Ints, accepted: Ints, costs: CostSettings, gamma_max: int
) -> tuple[float, Outcome]:
    """The threshold of the highest simulated speed for a rule that goes on while ``values (S, g)`` reach it, asked
    after every token."""
    found, speed = tune(values, counts, accepted, costs, gamma_max, blocks=(1,), growths=(1.0,))
    return float(found["t0"]), speed


def best_fixed(accepted: Ints, counts: Ints, costs: CostSettings, gamma_max: int) -> tuple[int, Outcome]:
    """The fixed window of the highest simulated speed, γ = 0 included."""
    found = {gamma: fixed(accepted, counts, gamma, costs) for gamma in range(gamma_max + 1)}
    gamma = max(found, key=lambda g: found[g].speedup)
    return gamma, found[gamma]
