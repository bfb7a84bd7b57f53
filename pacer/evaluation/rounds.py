"""What a round takes with a draft of so many tokens, measured by making such rounds, whatever drafts.

Windows take turns, so drift of the machine meets all alike; the time of a round does not depend on what is accepted.
What disturbs a turn only lengthens it, so of a window's turns the fastest counts: one slow turn would make all longer
drafts as dear, and them look free beside it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from pacer.decoding.loop import Decoder
from pacer.decoding.request import Request, Row
from pacer.work.progress import progress
from pacer.work.stopping import check_stop

WINDOWS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
ROUNDS = 3  # of a window before the next one's turn
SWEEPS = 5


class _Enough(Exception):
    """The rounds that were asked for have been made."""


def windows(gamma_max: int, block: int = 1) -> list[int]:
    """Draft lengths that are measured, whole blocks from 0 up; between them times are interpolated."""
    longest = gamma_max - gamma_max % block
    return sorted({gamma - gamma % block for gamma in WINDOWS if gamma < longest} | {longest})


def measure_rounds(decoders: Mapping[int, Decoder], vocab_size: int, batch: int, context: int) -> list[float]:
    """Seconds of a round with a draft of 0 … the longest window's tokens, for ``batch`` rows together.

    Args:
        decoders: by the window that they draft, 0 among them. context: tokens of the prompts, which are random.
    """
    ids = torch.randint(vocab_size, (batch, context), generator=torch.Generator().manual_seed(0)).tolist()
    times: dict[int, list[float]] = {gamma: [] for gamma in decoders}
    with progress(SWEEPS + 1, "measuring rounds", "sweep") as bar:
        for sweep in range(SWEEPS + 1):
            for gamma, decoder in decoders.items():
                found = _some_rounds(decoder, gamma, ids)
                if sweep and found:  # the first one warms up
                    times[gamma].append(float(np.median(found)))
            bar.update()
            check_stop()
    known = [gamma for gamma in sorted(times) if times[gamma]]  # a context may be too short for the longest
    fastest = np.maximum.accumulate([min(times[gamma]) for gamma in known])  # a longer one is not faster
    return np.interp(np.arange(max(times) + 1), known, fastest).tolist()


def _some_rounds(decoder: Decoder, gamma: int, ids: Sequence[Sequence[int]]) -> list[float]:
    """Seconds of some whole rounds; those that the budget shortens are left out."""
    requests = [Request(f"round-{i}", prompt, ROUNDS * (gamma + 1) + gamma + 2) for i, prompt in enumerate(ids)]
    rounds: dict[object, list[float]] = {}

    def note(row: Row, line: dict[str, Any]) -> None:
        if line["round"] == 0 or len(line["drafted"]) != gamma:
            return
        rounds.setdefault(line["round"], []).append(sum(line["time"].values()))
        if len(rounds) >= ROUNDS and len(rounds[line["round"]]) == len(ids):
            raise _Enough

    with contextlib.suppress(_Enough):
        decoder.generate(requests, on_commit=note)
    return [sum(lines) for lines in rounds.values() if len(lines) == len(ids)]
