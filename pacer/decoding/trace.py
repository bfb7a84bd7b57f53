"""The trace of a round. Every number of a measured run is a function of these lines."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pacer.decoding.request import Result, Row


def round_line(
    row: Row,
    committed: int,
    drafted: Sequence[int],
    scores: Sequence[float],
    accepted: int,
    emitted: Sequence[int],
    stop: str,
    rows: int,
    inner: Sequence[dict[str, object]] | None = None,
) -> dict[str, object]:
    """One round of one request as plain data; the times are added by the loop once they are known.

    Args:
        committed: tokens before the round, prompt included. drafted: up to and with a stop id.
        scores: the controller's estimates. accepted: drafts that survived. stop: why drafting ended.
        rows: how many were verified together.
        inner: rounds of the exits that verified before, in order, if any did: drafted, accepted, emitted, stop.
    """
    kept = [None if math.isnan(s) else round(s, 6) for s in scores[: len(drafted)]]
    line: dict[str, object] = {
        "kind": "round",
        "request": row.request.id,
        "round": row.rounds,
        "committed": committed,
        "drafted": list(drafted),
        "scores": kept,
        "accepted": [accepted],
        "emitted": list(emitted),
        "stop": stop,
        "time": {},
        "rows": rows,
    }
    if inner is not None:
        line["inner"] = list(inner)
    return line


def request_line(result: Result, text: str) -> dict[str, object]:
    """The summary of a finished request."""
    return {
        "kind": "request",
        "request": result.request.id,
        "prompt_tokens": len(result.request.prompt_ids),
        "new_tokens": len(result.ids),
        "finish": result.finish,
        "seconds": result.seconds,
        "latency": result.latency,
        "text": text,
        "ids": result.ids,
    }
