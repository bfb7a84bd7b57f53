"""What a check found, and when a difference is more than chance."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import sqrt

from torch import Tensor

LEAST = 0.02  # differences in acceptance below this are not worth a finding
SURE = 3.0  # standard errors: many differences are looked at, few of them by chance
UNMEASURED = 0.1  # effect of what only another training could measure; it ranks, it does not predict
REFUSED = 1.0  # effect of parts that decoding refuses to put together


Evidence = dict[str, float | int | str | None]


@dataclass(frozen=True)
class Finding:
    """One likely reason.

    Args:
        check: name of the check. what: one line. evidence: the numbers it rests on. effect: acceptance lost, of all
            drafted tokens (0: none by itself). remedy: what to do, starting with a verb.
    """

    check: str
    what: str
    evidence: Evidence
    effect: float
    remedy: str


def ranked(findings: Iterable[Finding]) -> list[Finding]:
    """By effect, largest first; of equals, the check that ran first."""
    return sorted(findings, key=lambda finding: -finding.effect)


def gain(own: Tensor, other: Tensor) -> float:
    """How much more often ``other (N,)`` is right than ``own (N,)``, place by place; 0.0 where that may be chance."""
    difference = other.float() - own.float()
    mean = float(difference.mean())
    error = float(difference.std(unbiased=False)) / sqrt(len(difference))
    return mean if mean > max(LEAST, SURE * error) else 0.0


def drop(before: float, hits: Tensor) -> float:
    """How far the mean of ``hits (N,)`` lies below a share known before; 0.0 where that may be chance."""
    mean = float(hits.float().mean())
    error = sqrt(max(before * (1 - before), 1e-4) / len(hits))
    return before - mean if before - mean > max(LEAST, SURE * error) else 0.0


def excess(own: Tensor, other: Tensor) -> float:
    """As :func:`gain` for different places ``(N,)`` and ``(M,)``."""
    p, q = float(own.float().mean()), float(other.float().mean())
    error = sqrt(sum(_variance(hits) / len(hits) for hits in (own, other)))
    return q - p if q - p > max(LEAST, SURE * error) else 0.0


def _variance(hits: Tensor) -> float:
    """Of one draw, by the rule of succession: a few hits in a row are no certainty."""
    p = (float(hits.float().sum()) + 1) / (len(hits) + 2)
    return p * (1 - p)
