"""A draft model that continues texts it is told of: what to draft, and what drafts it.

It keeps the texts and its own draws, in its own memory; who asks for drafts says only how much of a text stays and what
comes after that. Shapes: whole numbers, one per row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pacer.decoding.drafters.model import ModelDrafter
from pacer.decoding.request import Request, Row
from pacer.models.stack import Stack
from pacer.settings import SamplingSettings


@dataclass(frozen=True)
class Job:
    """What to draft. Of each row: how many of its tokens stay, what follows them, and how many to draw after that."""

    keep: Sequence[int]
    fresh: Sequence[Sequence[int]]
    draws: Sequence[int]


@dataclass(frozen=True)
class Room:
    """A new batch: rows, and tokens that a row may hold."""

    rows: int
    capacity: int


@dataclass(frozen=True)
class Draftsman:
    """What makes a :class:`Writer`, wherever it is to run."""

    stack: Stack
    vocab_size: int
    sampling: SamplingSettings
    block: int | None = None

    def writer(self) -> Writer:
        return Writer(ModelDrafter(self.stack, self.vocab_size, self.sampling, block=self.block))


class Writer:
    """Continues the texts it is told of, greedily; it keeps them and what it has drawn."""

    def __init__(self, drafter: ModelDrafter) -> None:
        self.drafter = drafter
        self._rows: list[Row] = []
        self._draws: Sequence[int] = ()
        self._drawn = 0

    def reset(self, room: Room) -> None:
        self._rows = [Row(Request(str(i), (), 0), [], 0) for i in range(room.rows)]
        self._draws = ()
        self.drafter.reset(self._rows, room.capacity)

    def begin(self, job: Job) -> None:
        """Take note of a job; nothing is read before the first draw."""
        lengths = []
        for i, (row, keep, fresh) in enumerate(zip(self._rows, job.keep, job.fresh, strict=True)):
            if keep == 0 and row.committed:  # another text: what the last one left behind must not reach it
                self.drafter.admit(i)
            row.committed[keep:] = fresh
            lengths.append(max(0, min(keep, len(row.committed) - 1)))  # what is drawn from is read anew
        self.drafter.truncate(lengths)
        self._draws, self._drawn = job.draws, 0

    def draw(self) -> list[int]:
        """The next token of each row; 0 where the job asks for no more."""
        open_rows = [draws > self._drawn for draws in self._draws]
        if self._drawn == 0:
            self.drafter.read(self._rows, open_rows)
        ids = self.drafter.draw(self._drawn, open_rows)[0][:, 0].tolist()
        self._drawn += 1
        for row, is_open, token in zip(self._rows, open_rows, ids, strict=True):
            if is_open:
                row.committed.append(token)
        return [token if is_open else 0 for is_open, token in zip(open_rows, ids, strict=True)]
