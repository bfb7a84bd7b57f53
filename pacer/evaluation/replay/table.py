"""The dense table: for every place of greedy texts, the draft's continuation, how much of it holds, and each signal.

Greedy speculative decoding emits the target's own text whatever the controller does, so a round can only start at a
place of that text, and everything that can happen there is known beforehand.

Shapes: T texts, N starts of all texts, g places of a draft.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pacer.data.corpus import Text
from pacer.data.labels import Rounds
from pacer.errors import ConfigError

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]
Bools = NDArray[np.bool_]

SIGNALS = ("logprob", "entropy", "margin", "match")  # of `Rounds`; the pre-verifier's estimate is "score"
PER_TEXT, PER_START = ("prompt", "output", "rows"), ("start", "room", "run", "counts", "known", "reach")
JUDGE = ("score_width", "reads_prefix", "label")


@dataclass(frozen=True)
class Table:
    """Starts of all texts, one text after the other.

    Per text ``(T,)``: ``prompt``, ``output`` tokens (up to the budget), ``rows`` starts. Per start ``(N,)``: ``start``
    committed tokens, ``room`` tokens that budget and contexts let a draft have, ``run`` leading drafts the target
    accepts, ``counts`` drafts up to and with a stop id, ``known`` drafts whose fate the text tells (fewer where it was
    cut: censored), ``reach`` drafts whose signals are known. ``signals``: name → ``(N, g)``; ``score`` where there is a
    pre-verifier, which has learnt ``label`` on drafts of up to ``score_width`` tokens (maybe more than the table has)
    and reads the verified prefix or not.
    """

    ids: list[str]
    tasks: list[str]
    prompt: Ints
    output: Ints
    rows: Ints
    start: Ints
    room: Ints
    run: Ints
    counts: Ints
    known: Ints
    reach: Ints
    signals: dict[str, Floats]
    score_width: int = 0
    reads_prefix: bool = True
    label: str = "survival"

    @property
    def width(self) -> int:
        """g: the longest draft there is."""
        return int(self.signals["logprob"].shape[1])

    @property
    def first(self) -> Ints:
        """First row of each text, and the end ``(T + 1,)``."""
        return np.concatenate([[0], np.cumsum(self.rows)])

    @property
    def text(self) -> Ints:
        """The text of each row ``(N,)``."""
        return np.repeat(np.arange(len(self.ids)), self.rows)


def one_text(
    text: Text, rounds: Rounds | None, scores: Floats | None, *, budget: int, gamma: int, tail: int | None,
    contexts: tuple[int, int], **judge: Any,
) -> Table:  # fmt: skip
    """The table of one text.

    Args:
        rounds: of every start after the first output token and before the last; None: the output has one token.
        scores: the pre-verifier's estimates ``(S, g)``, NaN where there are none.
        budget: new tokens a request may have; a longer text is read up to there.
        tail: places past the first mismatch whose signals are kept; None: all.
        contexts: longest texts of target and draft. judge: of the pre-verifier, the fields of JUDGE.
    """
    prompt, output = len(text.prompt_ids), min(len(text.output_ids), budget)
    budget = output if text.cut else budget  # nothing is known of what a longer request would have written
    starts = np.arange(prompt + 1, prompt + output)
    if rounds is None:
        empty = {name: np.zeros((0, gamma), np.float32) for name in _signal_names(scores is not None)}
        nothing = np.zeros(0, np.int64)
        return _table(text, prompt, output, dict.fromkeys(PER_START, nothing), empty, judge)
    rows = slice(0, len(starts))
    run, counts, known = (getattr(rounds, name).numpy()[rows] for name in ("accepted", "counts", "known"))
    whole = np.full(len(starts), gamma)
    reach = whole if tail is None else np.minimum(run + 1 + tail, gamma)
    room = np.minimum(prompt + budget - starts - 1, np.minimum(contexts[0] - starts, contexts[1] - starts + 1))
    signals = {name: getattr(rounds, name).numpy()[rows].astype(np.float32) for name in _signal_names(False)}
    if scores is not None:
        signals["score"] = scores[rows].astype(np.float32)
    beyond = np.arange(gamma) >= reach[:, None]
    for values in signals.values():
        values[beyond] = np.nan
    per_start = {"start": starts, "room": room.clip(min=0), "run": run, "counts": counts, "known": known,
                 "reach": reach}  # fmt: skip
    return _table(text, prompt, output, per_start, signals, judge)


def _signal_names(scored: bool) -> list[str]:
    return [*SIGNALS, *(["score"] if scored else [])]


def _table(
    text: Text, prompt: int, output: int, per_start: Mapping[str, Any], signals: dict[str, Floats],
    judge: Mapping[str, Any],
) -> Table:  # fmt: skip
    per_text = {"prompt": prompt, "output": output, "rows": len(per_start["start"])}
    arrays: dict[str, Any] = {name: np.asarray([value], np.int64) for name, value in per_text.items()}
    arrays |= {name: np.asarray(value, np.int64) for name, value in per_start.items()}
    return Table([text.id], [text.task], signals=signals, **judge, **arrays)


def join(tables: Sequence[Table]) -> Table:
    """Several tables as one.

    Raises:
        ConfigError: none, or of different widths or signals.
    """
    if not tables or len({(t.width, tuple(t.signals), t.score_width) for t in tables}) != 1:
        raise ConfigError("tables that cannot be joined", value=len(tables), allowed="one width, the same signals")
    arrays: dict[str, Any] = {
        name: np.concatenate([getattr(t, name) for t in tables]) for name in (*PER_TEXT, *PER_START)
    }
    signals = {name: np.concatenate([t.signals[name] for t in tables]) for name in tables[0].signals}
    arrays |= {name: getattr(tables[0], name) for name in JUDGE}
    ids, tasks = [i for t in tables for i in t.ids], [i for t in tables for i in t.tasks]
    return Table(ids, tasks, signals=signals, **arrays)


def save(table: Table, path: Path) -> None:
    """As ``.npz``; the caller makes it atomic."""
    arrays: dict[str, Any] = {name: getattr(table, name) for name in (*PER_TEXT, *PER_START)}
    arrays |= {f"signal_{name}": values for name, values in table.signals.items()}
    arrays |= {name: getattr(table, name) for name in ("ids", "tasks", *JUDGE)}
    with path.open("wb") as file:
        np.savez(file, **arrays)


def load(path: Path) -> Table:
    """The reverse of :func:`save`."""
    with np.load(path, allow_pickle=False) as found:
        arrays: dict[str, Any] = {name: found[name] for name in (*PER_TEXT, *PER_START)}
        arrays |= {name: found[name].item() for name in JUDGE}
        signals = {name.removeprefix("signal_"): found[name] for name in found.files if name.startswith("signal_")}
        return Table(found["ids"].tolist(), found["tasks"].tolist(), signals=signals, **arrays)
