"""Rules that learn from round to round, on a table: the rule itself, led through every text as the loop would.

What the table knows stands in for the models: a drafter whose tokens are the table's places, and a record of their
signals. The rounds are made by decoding's own proposer, so a rule is followed and not written twice.

Shapes: T texts side by side, n places.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import numpy as np
import torch
from torch import Tensor

from pacer.decoding.clock import Clock
from pacer.decoding.controllers.base import Controller
from pacer.decoding.drafters.base import Drafter
from pacer.decoding.propose import KEEP, Proposer
from pacer.decoding.record import Record
from pacer.decoding.request import Request, Row
from pacer.evaluation.replay.rules import Plan
from pacer.evaluation.replay.table import Ints, Table
from pacer.settings import SamplingSettings

TOKEN, STOP_ID = 0, 1  # the ids themselves are not in a table


class _Signals:
    """A record of the table's rows ``at (T,)``; NaN where the table's signals end."""

    def __init__(self, table: Table, at: Ints) -> None:
        self.table, self.at, self.ids = table, at, torch.zeros(len(at), 1, dtype=torch.long)

    def drawn(self, name: str, rows: Sequence[Row], first: int, end: int) -> Tensor:
        return torch.from_numpy(self.table.signals[name][self.at, first:end])

    def after(self, name: str, committed: Sequence[int], first: int, end: int) -> Tensor:
        return self.drawn(name, (), first, end)


class _Drafts(Drafter):
    """Draws the table's places: their signals are known, a stop id is where the table says."""

    def __init__(self, table: Table, at: Ints) -> None:
        self.table, self.at, self.sampling, self.device = table, at, SamplingSettings(), torch.device("cpu")
        self.record, self.keeps_record = cast(Record, _Signals(table, at)), True

    def room(self, row: Row) -> int:
        return int(min(self.table.room[self.at[int(row.request.id)]], self.table.width))

    def draw(self, offset: int, open_rows: Sequence[bool]) -> tuple[Tensor, Tensor | None]:
        stops = self.table.counts[self.at] == offset + 1
        return torch.where(torch.from_numpy(stops), STOP_ID, TOKEN)[:, None], None


@torch.inference_mode()
def follow(table: Table, make: Callable[[], Controller]) -> Plan:
    """What a fresh rule draws along each text; of starts that no round begins at the plan says nothing.

    Args:
        make: the rule. It may look at the draft's signals, but not at its states: the table has none.
    """
    rule, first = make(), table.first
    at = np.minimum(first[:-1], len(table.start) - 1)
    left = [int(i) for i in np.flatnonzero(table.rows)]
    drawn, open_ = np.zeros(len(table.start), np.int64), np.zeros(len(table.start), bool)
    known = np.minimum(table.reach, table.counts)
    budget = int(table.room.max(initial=0)) + table.width + 2
    everyone = [Row(Request(str(i), [], budget), [], i, rounds=1) for i in range(len(at))]
    proposer = Proposer(_Drafts(table, at), rule, 2**30, Clock(torch.device("cpu")))
    proposer.reset(everyone, table.width, torch.full((len(at), 1), STOP_ID))
    while left:
        for i, row in enumerate(everyone):
            row.finish = None if i in left else "length"
        counts = np.array(proposer.propose(everyone).counts)
        kept = np.minimum(np.minimum(counts, table.counts[at]), table.run[at])
        here = at[left]
        drawn[here] = counts[left]
        open_[here] = (counts > known[at])[left] & (counts < table.counts[at])[left]
        proposer.end([0] * len(at), [int(kept[i]) if i in left else KEEP for i in range(len(at))], left)
        at[left] += kept[left] + 1
        left = [i for i in left if at[i] < first[i + 1]]
        np.minimum(at, len(table.start) - 1, out=at)
    return Plan(drawn, None, open_, looks=rule.reads_record)
