"""A pre-verifier on an exit's states decides when what that exit has accepted goes to the next verifier.

The same question as PACER's, one stage later: what the exit wrote is a draft to the target, and M_B was trained to say
which of it the target will keep. Each inner round is a block; the threshold grows by ρ with each.

Shapes: R rows, B rows that have just got tokens, n new tokens of a row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pacer.decoding.controllers.buffer import BufferRule, Stops
from pacer.decoding.controllers.preverifier import PreverifierRule, block_value
from pacer.decoding.distributions import signals
from pacer.decoding.lane import Reader
from pacer.decoding.record import Record
from pacer.decoding.request import Row
from pacer.models.copying import Copied, copied_last, supported
from pacer.models.stack import Stack


class Preverified(BufferRule):
    """Full when the mean (or minimum, or product) of an inner round's estimates falls below the threshold.

    Args:
        exit: whose states the rule's pre-verifier was trained on. reader: where they are read.
        rule: thresholds and pre-verifier; its ``gamma_max`` is the longest buffer.
        least: it is asked once so many tokens are new. whole: it is shown logits over the whole vocabulary.
    """

    reads_exit = True

    def __init__(self, exit: Stack, reader: Reader, rule: PreverifierRule, least: int = 1, whole: bool = False) -> None:
        self.exit, self.rule, self.longest, self.least = exit, rule, rule.gamma_max, least
        self._new: list[int] = []  # tokens of each row's buffer that were not judged yet
        self.record: Record | None = None
        self._asked: list[int] = []  # blocks of each row's buffer that were judged
        self._row_of_head: Tensor | None = None
        if exit.head_ids is not None and not whole:
            self._row_of_head = torch.zeros(exit.vocab_size, dtype=torch.long, device=exit.device)
            self._row_of_head[exit.head_ids] = torch.arange(len(exit.head_ids), device=exit.device)
        reader.heard = self._hear

    def reset(self, rows: Sequence[Row], capacity: int) -> None:
        ids = torch.zeros(len(rows), capacity + 2, dtype=torch.long, device=self.exit.device)
        self.record, self._asked, self._new = Record(ids, self.exit), [0] * len(rows), [0] * len(rows)
        self.rule.reset(rows, capacity)

    def admit(self, index: int) -> None:
        self.rule.admit(index)
        self._asked[index] = self._new[index] = 0

    def _hear(
        self, ids: Tensor, states: Tensor, starts: Sequence[int], counts: Sequence[int], rows: Sequence[int] | None
    ) -> None:
        assert self.record is not None
        self.record.hear(ids, states, starts, counts, rows)

    def saw(
        self, rows: Sequence[Row], numbers: Sequence[int], logits: Tensor, emitted: Sequence[Sequence[int]]
    ) -> None:
        """Note the new tokens, and what the exit says of them."""
        record = self.record
        assert record is not None
        for j, (row, i, new) in enumerate(zip(rows, numbers, emitted, strict=True)):
            ids = torch.tensor(list(new), device=logits.device)
            first = len(row.committed) - len(new)
            places = torch.arange(first, first + len(new), device=logits.device)
            record.ids[i, places] = ids
            said = signals(logits[j, : len(new)], ids if self._row_of_head is None else self._row_of_head[ids])
            copied = copied_last(record.ids[i : i + 1].expand(len(new), -1), places)
            record.match[i, places] = supported(ids, Copied(*copied))
            for own, value in zip((record.logprob, record.entropy, record.margin), said, strict=True):
                own[i, places] = value

    def judge(
        self, rows: Sequence[Row], numbers: Sequence[int], buffered: Sequence[int], fresh: Sequence[int]
    ) -> Stops:
        assert self.record is not None
        total = len(self._asked)
        ends, bases = [0] * total, [1] * total
        for row, i, have, new in zip(rows, numbers, buffered, fresh, strict=True):
            self._new[i] += new
            if self._new[i] >= self.least or have >= self.longest:
                ends[i], bases[i] = len(row.committed), len(row.committed) - have
        scores = self.rule.read(self.record, ends, bases).tolist() if any(ends) else []
        stops: list[str | None] = []
        found: list[list[float]] = []
        for i, have in zip(numbers, buffered, strict=True):
            own = scores[i][-self._new[i] :] if ends[i] else []
            found.append(own)
            if not own:
                stops.append(None)
                continue
            threshold = self.rule.t0 * self.rule.rho ** self._asked[i]
            self._asked[i], self._new[i] = self._asked[i] + 1, 0
            doubts = float(block_value(torch.tensor(own), self.rule.rule)) < threshold
            stops.append("controller" if doubts else "gamma_max" if have >= self.longest else None)
        return stops, found

    def end(self, before: Sequence[int], chosen: Sequence[int]) -> None:
        for i in chosen:
            self._asked[i] = self._new[i] = 0
        self.rule.end(before)
