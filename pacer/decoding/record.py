"""What a controller may look at: the text by place, the states that produced it, the draft's signals.

Shapes: R rows, B rows of a call, n tokens, T places of a row (its absolute positions), H width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pacer.decoding.distributions import Signals
from pacer.decoding.lane import places
from pacer.decoding.request import Row
from pacer.models.stack import Stack


class Record:
    """Ids, signals ``(R, T)`` each, and ``produced (R, T, H)``; the last place of a row takes padded writes."""

    def __init__(self, ids: Tensor, stack: Stack) -> None:
        self.ids = ids
        self.logprob, self.entropy, self.margin = (torch.zeros(ids.shape, device=ids.device) for _ in range(3))
        self.match = torch.zeros_like(ids)
        self.produced = torch.zeros(*ids.shape, stack.width, dtype=stack.dtype, device=ids.device)

    def hear(
        self, ids: Tensor, states: Tensor, starts: Sequence[int], counts: Sequence[int], rows: Sequence[int] | None
    ) -> None:
        """Note ids ``(B, n)`` that were read (as `pacer.decoding.lane.Heard`), and what they produced one place on."""
        at, real, numbers = note_ids(self.ids, ids, starts, counts, rows)
        self.produced[numbers, torch.where(real, at + 1, self.ids.shape[1] - 1)] = states

    def drew(self, at: Tensor, said: Signals, match: Tensor) -> None:
        """Note the signals of the tokens drawn at places ``at (R, 1)``."""
        for own, new in zip((self.logprob, self.entropy, self.margin, self.match), (*said, match), strict=True):
            own.scatter_(1, at, new)

    def drawn(self, name: str, rows: Sequence[Row], first: int, end: int) -> Tensor:
        """A signal by its name of tokens ``first … end − 1`` of each row's draft ``(R, end − first)``.

        Of a row that has ended these places may lie beyond the record: what it gets then has no meaning.
        """
        return self.after(name, [len(row.committed) for row in rows], first, end)

    def after(self, name: str, committed: Sequence[int], first: int, end: int) -> Tensor:
        """:meth:`drawn` by the tokens that were committed before the draft."""
        last = self.ids.shape[1] - 1
        at = [[min(start + k, last) for k in range(first, end)] for start in committed]
        table: Tensor = getattr(self, name)
        return table.gather(1, torch.tensor(at, device=table.device))


def note_ids(
    table: Tensor, ids: Tensor, starts: Sequence[int], counts: Sequence[int], rows: Sequence[int] | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Write ids ``(B, n)`` into a table ``(R, T)`` by place; returns places, which are real, and rows ``(B, 1)``."""
    at, real = places(starts, ids.shape[1], counts, ids.device)
    numbers = torch.arange(len(ids), device=ids.device) if rows is None else torch.tensor(list(rows), device=ids.device)
    table[numbers[:, None], torch.where(real, at, table.shape[1] - 1)] = ids
    return at, real, numbers[:, None]
