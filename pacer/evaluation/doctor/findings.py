"""What a check found, and when a difference is more than chance."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import sqrt
from typing import Any

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


def as_text(report: Mapping[str, Any]) -> str:
    """The report for a terminal: what was measured, then a line of numbers and a line of remedy per finding."""
    lines = [f"draft: {report['draft']}"]
    if report["acceptance"] is not None:
        tasks = ", ".join(f"{task} {value:.2f}" for task, value in report["acceptance_by_task"].items())
        lines.append(
            f"acceptance of a drafted token (greedy, all before accepted): {report['acceptance']:.3f} on "
            f"{report['tokens']} tokens of {report['prompts']} prompts ({tasks})"
        )
    for number, finding in enumerate(report["findings"], 1):
        numbers = ", ".join(f"{name} {value}" for name, value in finding["evidence"].items())
        lines.append(f"{number}. {finding['what']} [effect {finding['effect']:.2f}{'; ' if numbers else ''}{numbers}]")
        lines.append(f"   → {finding['remedy']}")
    if not report["findings"]:
        lines.append("nothing found")
    lines.append(f"checked: {', '.join(report['checked']) or 'nothing'}")
    lines += [f"not checked: {name} ({reason})" for name, reason in report["not_checked"].items()]
    return "\n".join(lines)
