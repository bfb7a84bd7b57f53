"""The trace of a round. Every number of a measured run is a function of these lines."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

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
    parents: Sequence[int] | None = None,
) -> dict[str, object]:
    """One round of one request as plain data; the times are added by the loop once they are known.

    Args:
        committed: tokens before the round, prompt included. drafted: up to and with a stop id; of a tree, all nodes.
        scores: the controller's estimates. accepted: drafts that survived. stop: why drafting ended.
        rows: how many were verified together.
        inner: rounds of the exits that verified before, in order, if any did: drafted, accepted, emitted, stop.
        parents: of a tree, the node that each node follows, −1: the text before the round.
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
    if parents is not None:
        line["parents"] = list(parents)
    return line


def ids_of(rounds: Iterable[Mapping[str, Any]]) -> set[int]:
    """All ids that rounds drafted or emitted, those of exits too."""
    found: set[int] = set()
    for line in rounds:
        found.update(line["drafted"], line["emitted"], ids_of(line.get("inner", ())))
    return found


def request_line(result: Result, text: str, pieces: Mapping[int, str] | None = None) -> dict[str, object]:
    """The summary of a finished request; ``pieces``: the text of each id of its rounds."""
    line: dict[str, object] = {
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
    if pieces is not None:
        line["pieces"] = {str(id): piece for id, piece in pieces.items()}
    return line
