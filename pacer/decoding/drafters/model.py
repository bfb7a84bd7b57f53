"""A draft model that writes one token after another.

Shapes: B rows, n tokens fed, V target vocabulary, H draft width, T places of a row (its absolute positions).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pacer.decoding.distributions import draw, penalised, probabilities, signals, spread
from pacer.decoding.drafters.base import DraftContext, Drafter
from pacer.decoding.lane import Lane, Reader, last_of, padded
from pacer.decoding.record import Record, note_ids
from pacer.decoding.request import Row
from pacer.decoding.uniforms import DRAFT, uniforms
from pacer.models.copying import Copied, copied_last, supported, token_of
from pacer.models.stack import Stack
from pacer.settings import SamplingSettings


class ModelDrafter(Drafter):
    """Drafts with a second model, or with an exit of the target.

    Args:
        stack: the model, or the exit seen as one. vocab_size: the target's; ids the draft's head lacks have q = 0.
        record: keep a :class:`Record` for a controller that reads it.
        reader: of an exit: its rung of the target's ladder, which the target's own first pass fills with the prompt.
        block: tokens to a block of its paged memory; None: contiguous.
    """

    def __init__(
        self,
        stack: Stack,
        vocab_size: int,
        sampling: SamplingSettings,
        *,
        record: bool = False,
        reader: Reader | None = None,
        block: int | None = None,
    ) -> None:
        self.stack, self.vocab_size, self.sampling, self.keeps_record = stack, vocab_size, sampling, record
        self.device = stack.device
        self.lane: Reader = Lane(stack, block=block) if reader is None else reader
        self.reads_prompts = reader is None
        self._looks_back = record or stack.copying is not None  # at the text: for candidates, and for the record
        if self._looks_back:
            self.lane.heard = self._note
        self._ids = torch.empty(0, dtype=torch.long)  # (B, T): what each row holds, its draft included
        self._last = self._token = self._bases = self._keys = self._rounds = torch.empty(0)
        self._seen: Tensor | None = None
        self._head_ids = None if stack.head_ids is None else stack.head_ids.to(stack.device)
        self._context = DraftContext(stack.context)

    def reset(self, rows: Sequence[Row], capacity: int) -> None:
        """Room for a new batch."""
        capacity = min(capacity, self.stack.context)
        self.lane.reset(len(rows), capacity)
        self._last = torch.empty(0)
        if self._looks_back:
            # one place past the context, since the last drawn token is never fed; one more takes padded writes
            self._ids = torch.zeros(len(rows), capacity + 2, dtype=torch.long, device=self.stack.device)
        if self.keeps_record:
            self.record = Record(self._ids, self.stack)

    def admit(self, index: int) -> None:
        """Another request takes a row."""
        self.lane.release(index)

    def room(self, row: Row) -> int:
        """Tokens this model can still draft for a row: its own context ends there, with one warning."""
        return self._context.room(len(row.committed))

    def read(self, rows: Sequence[Row], wanted: Sequence[bool]) -> None:
        """Read the committed tokens it has not seen (two after a full acceptance) of the rows that will draft."""
        fresh = [
            row.committed[have:] if want else []
            for row, have, want in zip(rows, self.lane.lengths, wanted, strict=True)
        ]
        ids, counts = padded(fresh, self.stack.device)
        self._feed(ids, counts)
        self._seen = self._seen_ids(rows) if self.sampling.repetition_penalty != 1.0 else None
        self._bases = torch.tensor([len(row.committed) for row in rows], device=self.stack.device)
        self._keys = torch.tensor([row.key for row in rows], device=self.stack.device)
        self._rounds = torch.tensor([row.rounds for row in rows], device=self.stack.device)

    def draw(self, offset: int, open_rows: Sequence[bool]) -> tuple[Tensor, Tensor | None]:
        """Draw the token at place ``offset`` (from 0) of the draft.

        Args:
            open_rows: rows still drafting; what the others get is padding.

        Returns:
            ids ``(B, 1)`` and, when sampling, the distribution they were drawn from ``(B, 1, V)`` (None: one-hot).
        """
        if offset > 0:
            self._feed(self._token, [int(is_open) for is_open in open_rows])
        copied: Copied | None = None
        if self._looks_back:
            place = (self._bases + offset)[:, None].clamp_max(self._ids.shape[1] - 1)
            copied = Copied(*(part[:, None] for part in copied_last(self._ids, place[:, 0])))
        logits = self.stack.readout(self._last, copied)
        if self._head_ids is None:
            logits = logits[..., : self.vocab_size]  # padded rows of a larger draft vocabulary are no tokens
        row_of_head, q = self._choose(penalised(logits, self._seen, self.sampling.repetition_penalty), offset)
        self._token = token_of(row_of_head, self._head_ids, copied)
        if copied is not None:
            self._ids.scatter_(1, place, self._token)
            if self.record is not None:
                self.record.drew(place, signals(logits, row_of_head), supported(self._token, copied))
        if self._seen is not None:
            self._seen.scatter_(2, row_of_head[..., None], True)
        return self._token, None if q is None else self._spread(q, copied)

    def truncate(self, lengths: Sequence[int]) -> None:
        """Forget the drafts beyond ``lengths`` tokens of each row."""
        self.lane.truncate(lengths)

    def _choose(self, logits: Tensor, offset: int) -> tuple[Tensor, Tensor | None]:
        if self.sampling.temperature == 0:
            return logits.argmax(-1), None
        q = probabilities(logits, self.sampling)
        place = torch.tensor([offset], device=logits.device)
        return draw(q, uniforms(self._keys, self._rounds, place, DRAFT)), q

    def _spread(self, q: Tensor, copied: Copied | None) -> Tensor:
        """Probabilities over the head's ids (and the candidate, if it lacks it) → over the target's vocabulary."""
        whole = spread(q, self._head_ids, self.vocab_size)
        if self._head_ids is not None and q.shape[-1] > len(self._head_ids):
            assert copied is not None
            whole.scatter_add_(-1, copied.ids[..., None], q[..., len(self._head_ids) :])
        return whole

    def _feed(self, ids: Tensor, counts: Sequence[int]) -> None:
        """Read ids ``(B, n)``; the state after a row's last one is what its next token is drawn from."""
        chosen = [i for i, count in enumerate(counts) if count > 0]
        if len(chosen) == len(counts):
            self._last = last_of(self.lane.feed_ids(ids, counts), counts)
            return
        fed = [counts[i] for i in chosen]  # rows that do not draft cost nothing
        at = torch.tensor(chosen, device=ids.device)
        last = last_of(self.lane.feed_ids(ids[at, : max(fed)], fed, chosen), fed)
        if len(self._last) != len(counts):
            self._last = last.new_zeros(len(counts), 1, last.shape[2])
        self._last = self._last.index_copy(0, at, last)

    def _note(
        self, ids: Tensor, states: Tensor, starts: Sequence[int], counts: Sequence[int], rows: Sequence[int] | None
    ) -> None:
        """What was read, by whomever."""
        if self.record is None:
            note_ids(self._ids, ids, starts, counts, rows)
        else:
            self.record.hear(ids, states, starts, counts, rows)

    def _seen_ids(self, rows: Sequence[Row]) -> Tensor:
        """Ids of each committed prefix, in the head's numbering ``(B, 1, V or head)``."""
        seen = torch.zeros(len(rows), self.vocab_size, dtype=torch.bool, device=self.stack.device)
        for i, row in enumerate(rows):
            seen[i, torch.tensor(row.committed, device=seen.device)] = True
        if self._head_ids is None:
            return seen[:, None, : self.stack.vocab_size]
        rows_seen = seen[:, None, self._head_ids]
        # a candidate for copying has been seen by its nature
        return rows_seen if self.stack.copying is None else torch.nn.functional.pad(rows_seen, (0, 1), value=True)
