"""Tables of a replay made by hand, and one with a rule planted in it."""

from __future__ import annotations

from typing import Any

import numpy as np

from pacer.evaluation.replay.table import Table

LN = np.log


def table(
    run: list[int], *, prompt: int = 3, ended: bool = False, budget: int | None = None, counts: list[int] | None = None,
    width: int = 4, probability: Any = None, score: Any = None, task: str = "t", name: str = "one",
) -> Table:  # fmt: skip
    """A text of ``len(run) + 1`` output tokens, whose draft at each start holds for ``run`` tokens."""
    starts = prompt + 1 + np.arange(len(run))
    budget = budget or len(run) + 1
    full = np.full((len(run), width), 0.5)
    signals = {"logprob": LN(full if probability is None else np.asarray(probability, float)).astype(np.float32)}
    signals |= {name: full.astype(np.float32) for name in ("entropy", "margin", "match")}
    if score is not None:
        signals["score"] = np.asarray(score, np.float32)
    whole = np.full(len(run), width)
    known = np.minimum(whole, prompt + len(run) + 1 - starts) if not ended else whole
    return Table(
        [name], [task], np.array([prompt]), np.array([len(run) + 1]), np.array([len(run)]), starts,
        prompt + budget - starts - 1, np.array(run, np.int64), np.array(counts or whole), known, whole, signals,
        width if score is not None else 0,
    )  # fmt: skip


def planted(seed: int = 0, starts: int = 400) -> Table:
    """A draft whose third token holds iff the second's probability is 0.9, and whose estimates know everything."""
    rng = np.random.default_rng(seed)
    good = rng.random(starts) < 0.5
    run = np.where(good, 4, 2)
    probability = np.where(good[:, None], 0.9, np.array([0.9, 0.35, 0.5, 0.5]))
    score = np.where(np.arange(4) < run[:, None] - 1, 0.9, 0.15)  # of the next token's fate
    return table(run.tolist(), budget=10_000, ended=True, probability=probability, score=score)
