"""A draft model that writes one token after another.

Shapes: B rows, n tokens fed, V target vocabulary, H draft width, T places of a row (its absolute positions).
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from pacer.decoding.distributions import draw, penalised, probabilities, signals
from pacer.decoding.lane import Lane, last_of, padded
from pacer.decoding.request import Row
from pacer.decoding.uniforms import DRAFT, uniforms
from pacer.models.stack import Stack
from pacer.settings import SamplingSettings


class Record:
    """What a controller may look at, by absolute position: ids, the states that produced them, the draft's signals.

    ``(B, T)`` each, ``produced`` is ``(B, T, H)``; the last place of a row takes padded writes.
    """

    def __init__(self, rows: int, places: int, stack: Stack) -> None:
        shape, device = (rows, places + 1), stack.device
        self.ids = torch.zeros(shape, dtype=torch.long, device=device)
        self.logprob, self.entropy = torch.zeros(shape, device=device), torch.zeros(shape, device=device)
        self.produced = torch.zeros(*shape, stack.width, dtype=stack.dtype, device=device)

    def read(self, ids: Tensor, states: Tensor, places: Tensor, real: Tensor) -> None:
        """Note ids ``(B, n)`` fed at ``places`` and what they produced, the states ``(B, n, H)``, one place on."""
        scratch = self.ids.shape[1] - 1
        self.ids.scatter_(1, torch.where(real, places, scratch), ids)
        produced = torch.where(real, places + 1, scratch)
        self.produced.scatter_(1, produced[..., None].expand_as(states), states)

    def drew(self, places: Tensor, ids: Tensor, logprob: Tensor, entropy: Tensor) -> None:
        """Note drawn ids and their signals ``(B, 1)``."""
        places = places.clamp_max(self.ids.shape[1] - 1)
        self.ids.scatter_(1, places, ids)
        self.logprob.scatter_(1, places, logprob)
        self.entropy.scatter_(1, places, entropy)


class ModelDrafter:
    """Drafts with a second model.

    Args:
        vocab_size: the target's; ids the draft's head lacks have q = 0.
        record: keep a :class:`Record` for a controller that reads it.
    """

    def __init__(self, stack: Stack, vocab_size: int, sampling: SamplingSettings, *, record: bool = False) -> None:
        self.stack, self.vocab_size, self.sampling, self.keeps_record = stack, vocab_size, sampling, record
        self.lane = Lane(stack)
        self.record: Record | None = None
        self._last = self._token = self._bases = self._keys = self._rounds = torch.empty(0)
        self._seen: Tensor | None = None
        self._head_ids = None if stack.head_ids is None else stack.head_ids.to(stack.device)
        self._warned = False

    def reset(self, rows: Sequence[Row], capacity: int) -> None:
        """Room for a new batch."""
        capacity = min(capacity, self.stack.context)
        self.lane.reset(len(rows), capacity)
        if self.keeps_record:
            # one place past the context: the last drawn token is never fed
            self.record = Record(len(rows), capacity + 1, self.stack)

    def room(self, row: Row) -> int:
        """Tokens this model can still draft for a row: its own context ends there, with one warning."""
        room = self.stack.context - len(row.committed) + 1
        if room <= 0 and not self._warned:
            self._warned = True
            warnings.warn(
                f"the draft model's context of {self.stack.context} tokens is used up: going on without drafting",
                stacklevel=2,
            )
        return max(0, room)

    def read(self, rows: Sequence[Row], wanted: Sequence[bool]) -> None:
        """Read the committed tokens it has not seen (two after a full acceptance) of the rows that will draft."""
        fresh = [
            row.committed[have:] if want else []
            for row, have, want in zip(rows, self.lane.lengths, wanted, strict=True)
        ]
        ids, counts = padded(fresh, self.stack.device)
        ids = ids.clamp_max(self.stack.vocab_size - 1)  # a padded id of the target's may be none of the draft's
        self._last = last_of(self._feed(ids, counts), counts)
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
            self._last = self._feed(self._token, [int(is_open) for is_open in open_rows])
        logits = self.stack.readout(self._last)
        if self._head_ids is None:
            logits = logits[..., : self.vocab_size]  # padded rows of a larger draft vocabulary are no tokens
        row_of_head, q = self._choose(penalised(logits, self._seen, self.sampling.repetition_penalty), offset)
        self._token = row_of_head if self._head_ids is None else self._head_ids[row_of_head]
        if self.record is not None:
            self.record.drew((self._bases + offset)[:, None], self._token, *signals(logits, row_of_head))
        if self._seen is not None:
            self._seen.scatter_(2, row_of_head[..., None], True)
        return self._token, None if q is None else self._spread(q)

    def truncate(self, lengths: Sequence[int]) -> None:
        """Forget the drafts beyond ``lengths`` tokens of each row."""
        self.lane.truncate(lengths)

    def _choose(self, logits: Tensor, offset: int) -> tuple[Tensor, Tensor | None]:
        if self.sampling.temperature == 0:
            return logits.argmax(-1), None
        q = probabilities(logits, self.sampling)
        place = torch.tensor([offset], device=logits.device)
        return draw(q, uniforms(self._keys, self._rounds, place, DRAFT)), q

    def _spread(self, q: Tensor) -> Tensor:
        """Probabilities over the head's ids → over the target's vocabulary."""
        if self._head_ids is None:
            return torch.nn.functional.pad(q, (0, self.vocab_size - q.shape[-1]))
        whole = q.new_zeros(*q.shape[:-1], self.vocab_size)
        return whole.index_copy(-1, self._head_ids, q)

    def _feed(self, ids: Tensor, counts: Sequence[int]) -> Tensor:
        places, real = self.lane.places(ids.shape[1], counts) if self.record is not None else (ids, ids)
        states = self.lane.feed_ids(ids, counts)
        if self.record is not None:
            self.record.read(ids, states, places, real)
        return states

    def _seen_ids(self, rows: Sequence[Row]) -> Tensor:
        """Ids of each committed prefix, in the head's numbering ``(B, 1, V or head)``."""
        seen = torch.zeros(len(rows), self.vocab_size, dtype=torch.bool, device=self.stack.device)
        for i, row in enumerate(rows):
            seen[i, torch.tensor(row.committed, device=seen.device)] = True
        return seen[:, None, : self.stack.vocab_size] if self._head_ids is None else seen[:, None, self._head_ids]
