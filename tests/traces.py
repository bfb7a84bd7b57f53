"""Traces as `pacer.evaluate` writes them, made up."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Line = dict[str, Any]
SECONDS = {"draft": 0.1, "preverify": 0.01, "intermediate": 0.0, "target": 0.2, "rest": 0.0}
MADE = {
    "date": "2026-01-02T00:00:00+00:00", "commit": "0123456789", "command": ["pacer/evaluate.py", "+experiment=x"],
    "machine": {"processor": "A & B", "cores": 2, "devices": []},
}  # fmt: skip


def line(
    drafted: list[int], accepted: int, emitted: list[int], stop: str = "fixed", number: int = 1, **more: Any
) -> Line:
    """A round of request p1."""
    return {
        "kind": "round", "arm": "pacer", "benchmark": "gsm8k", "request": "p1", "round": number, "committed": 9,
        "drafted": drafted, "scores": [], "accepted": [accepted], "emitted": emitted, "stop": stop, "time": SECONDS,
        "rows": 1, **more,
    }  # fmt: skip


def inner(drafted: list[int], accepted: int, emitted: list[int], **more: Any) -> Line:
    """A round of an exit."""
    return {"drafted": drafted, "accepted": accepted, "emitted": emitted, "stop": "fixed", **more}


def end(rounds: Sequence[Line], **more: Any) -> Line:
    """The closing line of a request."""
    ids = [token for each in rounds for token in each["emitted"]]
    return {
        "kind": "request", "arm": "pacer", "benchmark": "gsm8k", "request": "p1", "prompt_tokens": 9,
        "new_tokens": len(ids), "finish": "length", "seconds": 0.31 * len(rounds), "latency": 0.31 * len(rounds),
        "text": "its text", "ids": ids, **more,
    }  # fmt: skip


def trace(rounds: Sequence[Line], pieces: dict[str, str] | None = None, **names: str) -> list[Line]:
    """A request of the given arm, benchmark and name."""
    texts = {} if pieces is None else {"pieces": pieces}
    return [{**each, **names} for each in [*rounds, end(rounds, **texts)]]


def run_folder(folder: Path, lines: Sequence[Line]) -> Path:
    """A run as it is left behind, without results: these follow from the trace."""
    folder.mkdir(parents=True)
    (folder / "trace.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    (folder / "provenance.json").write_text(json.dumps(MADE))
    (folder / "settings.yaml").write_text("model: {name: tiny, dtype: float32, target: {id: /no/such/model}}\n")
    return folder
