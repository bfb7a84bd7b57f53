"""What drafting beside the target costs each side, from the trace: request lines of such arms carry it (``beside``)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any

from pacer.evaluation.traces import Line

TIMES = ("target_alone", "target_beside", "draft_alone", "draft_beside")


def beside(lines: Iterable[Mapping[str, Any]]) -> dict[str, Line]:
    """By arm: medians over its requests of the seconds of a pass, and the workers, rows, widths and γ that occurred.

    A run that went on after a stop has measured anew, and a batch of other size has its own costs.
    """
    found: dict[str, list[Line]] = {}
    for line in lines:
        if line["kind"] == "request" and "beside" in line:
            found.setdefault(str(line["arm"]), []).append(line["beside"])
    return {
        arm: {
            **{key: sorted({each[key] for each in costs}) for key in ("worker", "rows", "width", "gamma")},
            **{key: median(each[key] for each in costs) for key in TIMES},
        }
        for arm, costs in found.items()
    }


def sentence(arm: str, costs: Mapping[str, Any]) -> str:
    """An arm's costs in words, for below a table."""
    target, draft = (_slower(costs[f"{side}_alone"], costs[f"{side}_beside"]) for side in ("target", "draft"))
    rows, width, gamma = (_numbers(costs[key]) for key in ("rows", "width", "gamma"))
    where = " or ".join(costs["worker"])
    if where == "in turn":
        return f"{arm}: γ = {gamma}; drafted in turn, since nothing could run beside the target here."
    return (
        f"{arm}: γ = {gamma}; while draft ({where}) and target both run, a target pass over {width} tokens "
        f"(rows: {rows}) takes {target}, a draft pass {draft}."
    )


def _slower(alone: float, beside: float) -> str:
    return f"{1e3 * beside:.1f} ms instead of {1e3 * alone:.1f} (× {beside / alone:.2f})"


def _numbers(values: Iterable[int]) -> str:
    return ", ".join(map(str, values))
