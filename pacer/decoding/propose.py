"""A round's proposal: drafter ⇄ controller, until the controller, a stop id or the room ends every row's draft.

Shapes: B rows, g drafted tokens (of the longest row), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pacer.decoding.clock import Clock
from pacer.decoding.controllers.base import ASK, Controller
from pacer.decoding.drafters.base import Drafter
from pacer.decoding.request import Row

if TYPE_CHECKING:
    from pacer.decoding.verdict import Verdict

KEEP = 2**62  # no text is as long: what a row keeps that was not verified now


@dataclass
class Draft:
    """What goes to the verifier. ``counts``: tokens drawn per row, before anything after a stop id is cut."""

    tokens: Tensor  # (B, g)
    probs: Tensor | None  # (B, g, V) what they were drawn from; None: one-hot
    scores: Tensor | None  # (B, ≤ g) the controller's estimates of the blocks it judged
    counts: list[int]
    stops: list[str]  # why each row's draft ended
    inner: list[list[dict[str, Any]]] | None = None  # rounds of an exit that has verified it already, per row
    ready: list[bool] | None = None  # rows that are to be verified now; None: all
    # (B, g) index of each token's parent, an earlier one; −1: the committed prefix; None: a chain (`tree.py`)
    parents: Tensor | None = None


class Proposes:
    """What the loop asks of a proposal's maker, on a batch of rows.

    Attributes:
        spare: places in memory that its drafts take beyond their longest branch; 0: they are chains.
        sees: it wants to see verdicts, with the verifier's choice after every token (:meth:`saw`).
    """

    spare: int = 0
    sees: bool = False

    def reset(self, rows: Sequence[Row], capacity: int, stop_ids: Tensor) -> None:
        """A new batch; ``stop_ids (R, K)`` belongs to the caller, who may change rows of it."""

    def admit(self, index: int, row: Row) -> None:
        """Another request takes a row."""

    def prefill(self, rows: Sequence[Row], chosen: Sequence[int]) -> None:
        """Read the prompts of the chosen rows, where that is not the verifier's doing."""

    def propose(self, rows: Sequence[Row]) -> Draft:
        """The next proposal; rows that have finished get none."""
        raise NotImplementedError  # the one question that has no answer of its own

    def saw(self, rows: Sequence[Row], chosen: Sequence[int], verdict: Verdict) -> None:
        """What the verifier said of the chosen rows, which have got their new tokens; comes before :meth:`end`."""

    def end(self, before: Sequence[int], verified: Sequence[int], chosen: Sequence[int]) -> None:
        """The chosen rows were verified: ``before`` tokens of a row were committed, ``verified`` with its drafts.

        Of the other rows ``verified`` is KEEP.
        """


def no_draft(rows: int, stops: list[str], device: torch.device) -> Draft:
    """An empty proposal: the target emits its next token."""
    return Draft(torch.empty(rows, 0, dtype=torch.long, device=device), None, None, [0] * rows, stops)


def take(draft: Draft, chosen: Sequence[int], rows: int) -> Draft:
    """The chosen rows of a draft over ``rows`` rows, no wider than they need."""
    widest = max(draft.counts[i] for i in chosen)
    if len(chosen) == rows and widest == draft.tokens.shape[1]:
        return draft
    at = torch.tensor(list(chosen), device=draft.tokens.device)
    return replace(
        draft,
        tokens=draft.tokens[at, :widest],
        probs=None if draft.probs is None else draft.probs[at, :widest],
        scores=None if draft.scores is None else draft.scores[at],
        counts=[draft.counts[i] for i in chosen],
        stops=[draft.stops[i] for i in chosen],
        inner=None if draft.inner is None else [draft.inner[i] for i in chosen],
        ready=None,
        parents=None if draft.parents is None else draft.parents[at, :widest],
    )


def is_stop(tokens: Tensor, stop_ids: Tensor) -> Tensor:
    """Which tokens ``(B, g)`` are stop ids of their own row ``(B, K)`` (padded with −1)."""
    return (tokens[..., None] == stop_ids[:, None]).any(-1)


class Proposer(Proposes):
    """A drafter and its controller on a batch.

    Args:
        context: the target's; a draft never reaches past it.
    """

    def __init__(self, drafter: Drafter, controller: Controller, context: int, clock: Clock) -> None:
        self.drafter, self.controller, self.context, self.clock = drafter, controller, context, clock
        self._stop_ids = torch.empty(0)
        self._drawn: list[int] = []  # of each row in the round that is not verified yet; −1: it has none

    def reset(self, rows: Sequence[Row], capacity: int, stop_ids: Tensor) -> None:
        """A new batch."""
        self._drawn = [-1] * len(rows)
        self.drafter.reset(rows, capacity)
        self.controller.reset(rows, capacity)
        self._stop_ids = stop_ids

    def admit(self, index: int, row: Row) -> None:
        """Another request takes a row."""
        self._drawn[index] = -1
        self.drafter.admit(index)
        self.controller.admit(index)

    def prefill(self, rows: Sequence[Row], chosen: Sequence[int]) -> None:
        """Read the prompts of the chosen rows, unless they have no room for a draft."""
        limits = self.controller.limits(rows)  # a row whose rule is off is not even read
        wanted = [i in chosen and limits[i] > 0 and self.drafter.room(row) > 0 for i, row in enumerate(rows)]
        if not self.drafter.reads_prompts or not any(wanted):
            return
        self.drafter.read(rows, wanted)
        self.clock.lap("draft")
        self.controller.prefill(self.drafter.record, rows, wanted)
        self.clock.lap("preverify")

    def propose(self, rows: Sequence[Row]) -> Draft:
        """Draw blocks; every drawn token is in the draft."""
        rooms, stops = self._rooms(rows)
        open_rows = [room > 0 for room in rooms]
        self._drawn = [0] * len(rows)
        if not any(open_rows):
            return no_draft(len(rows), stops, self.drafter.device)
        counts = [0] * len(rows)
        tokens: list[Tensor] = []
        probs: list[Tensor] = []
        scores: list[Tensor] = []
        self.drafter.read(rows, open_rows)
        while any(open_rows):
            block = min(self.controller.block(len(tokens)), max(rooms) - len(tokens))
            if block <= 0:
                stops = [self.controller.stop if is_open else s for s, is_open in zip(stops, open_rows, strict=True)]
                break
            for _ in range(block):
                open_rows, stops = self._able(len(tokens), open_rows, stops)
                if not any(open_rows):
                    break
                token, q = self.drafter.draw(len(tokens), open_rows)
                tokens.append(token)
                probs += [] if q is None else [q]
                counts = [count + int(is_open) for count, is_open in zip(counts, open_rows, strict=True)]
                open_rows = [o and count < room for o, count, room in zip(open_rows, counts, rooms, strict=True)]
                if not any(open_rows):
                    break
            self.clock.lap("draft")
            if any(open_rows):
                open_rows, stops = self._judge(rows, tokens, scores, open_rows, stops)
        if not tokens:
            return no_draft(len(rows), stops, self.drafter.device)
        self._drawn = counts
        q_all = torch.cat(probs, 1) if probs else None
        return Draft(torch.cat(tokens, 1), q_all, torch.cat(scores, 1) if scores else None, counts, stops)

    def end(self, before: Sequence[int], verified: Sequence[int], chosen: Sequence[int]) -> None:
        """The round is over; drafts that did not survive are forgotten."""
        drawn = [-1] * len(before)
        for i in chosen:
            drawn[i], self._drawn[i] = self._drawn[i], -1  # what verifies after an exit has no news of the round
        accepted = [max(0, end - start) if d >= 0 else 0 for end, start, d in zip(verified, before, drawn, strict=True)]
        self.controller.learn(self.drafter.record, before, drawn, accepted)
        self.drafter.truncate(verified)
        self.controller.end(before)

    def _able(self, drawn: int, open_rows: list[bool], stops: list[str]) -> tuple[list[bool], list[str]]:
        """Rows the drafter will draw for: one that chooses its exit by confidence may decline, before it draws."""
        able = self.drafter.able(drawn, open_rows)
        if able is None:
            return open_rows, stops
        declined = [o and not a for o, a in zip(open_rows, able, strict=True)]
        return able, [self.drafter.declines if d else stop for d, stop in zip(declined, stops, strict=True)]

    def _rooms(self, rows: Sequence[Row]) -> tuple[list[int], list[str]]:
        """Tokens each row may draft this round, and what would end the draft there."""
        rooms, reasons = [], []
        for row, longest in zip(rows, self.controller.limits(rows), strict=True):
            limits = {
                self.controller.full if longest else "off": longest,
                "budget": row.left - 1,  # the target adds one token of its own
                "context": min(self.context - len(row.committed), self.drafter.room(row)),
            }
            reason = min(limits, key=lambda name: limits[name])
            rooms.append(0 if row.finish is not None else max(0, limits[reason]))
            reasons.append(reason)
        return rooms, reasons

    def _judge(
        self, rows: Sequence[Row], tokens: list[Tensor], scores: list[Tensor], open_rows: list[bool], stops: list[str]
    ) -> tuple[list[bool], list[str]]:
        """Ask the controller about the block just drawn: one host read of its verdicts, one more where it asks."""
        record, drawn = self.drafter.record, len(tokens)
        verdicts, block_scores = self.controller.judge(record, rows, drawn, open_rows)
        judged, going, over = list(open_rows), list(open_rows), [False] * len(rows)
        if verdicts is not None:
            ended = is_stop(torch.cat(tokens, 1), self._stop_ids).any(1)
            going, over = torch.stack([verdicts, ended]).tolist()
            asked = [is_open and not o and v == ASK for is_open, v, o in zip(open_rows, going, over, strict=True)]
            if any(asked):
                answers, block_scores = self.controller.ask(record, rows, drawn, asked)
                assert answers is not None
                going = [a if q else v for a, q, v in zip(answers.tolist(), asked, going, strict=True)]
                judged = asked
            self.clock.lap("preverify")
        if block_scores is not None:  # a row that was not asked, or ended inside the block, has no estimate there
            mask = torch.tensor(judged, device=block_scores.device)[:, None]
            scores.append(block_scores.masked_fill(~mask, torch.nan))
        still, reasons = list(open_rows), list(stops)
        for i, is_open in enumerate(open_rows):
            if is_open and (over[i] or not going[i]):
                still[i], reasons[i] = False, "eos" if over[i] else self.controller.stop
        return still, reasons
