"""A round's proposal: drafter ⇄ controller, until the controller, a stop id or the room ends every row's draft.

Shapes: B rows, g drafted tokens (of the longest row), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pacer.decoding.clock import Clock
from pacer.decoding.controllers.base import ASK, Controller
from pacer.decoding.drafters.model import ModelDrafter
from pacer.decoding.request import Row


@dataclass
class Draft:
    """What goes to the verifier. ``counts``: tokens drawn per row, before anything after a stop id is cut."""

    tokens: Tensor  # (B, g)
    probs: Tensor | None  # (B, g, V) what they were drawn from; None: one-hot
    scores: Tensor | None  # (B, ≤ g) the controller's estimates of the blocks it judged
    counts: list[int]
    stops: list[str]  # why each row's draft ended


def no_draft(rows: int, stops: list[str], device: torch.device) -> Draft:
    """An empty proposal: the target emits its next token."""
    return Draft(torch.empty(rows, 0, dtype=torch.long, device=device), None, None, [0] * rows, stops)


def is_stop(tokens: Tensor, stop_ids: Tensor) -> Tensor:
    """Which tokens ``(B, g)`` are stop ids of their own row ``(B, K)`` (padded with −1)."""
    return (tokens[..., None] == stop_ids[:, None]).any(-1)


class Proposer:
    """A drafter and its controller on a batch.

    Args:
        context: the target's; a draft never reaches past it.
    """

    def __init__(self, drafter: ModelDrafter, controller: Controller, context: int, clock: Clock) -> None:
        self.drafter, self.controller, self.context, self.clock = drafter, controller, context, clock
        self._stop_ids = torch.empty(0)

    def reset(self, rows: Sequence[Row], capacity: int, stop_ids: Tensor) -> None:
        """A new batch."""
        self.drafter.reset(rows, capacity)
        self.controller.reset(rows, capacity)
        self._stop_ids = stop_ids

    def prefill(self, rows: Sequence[Row]) -> None:
        """Read the prompts, unless no row has room for a draft."""
        wanted = [self.drafter.room(row) > 0 for row in rows]
        if not any(wanted):
            return
        self.drafter.read(rows, wanted)
        self.clock.lap("draft")
        self.controller.prefill(self.drafter.record, rows)
        self.clock.lap("preverify")

    def propose(self, rows: Sequence[Row]) -> Draft:
        """Draw blocks; every drawn token is in the draft."""
        rooms, stops = self._rooms(rows)
        open_rows = [room > 0 for room in rooms]
        if not any(open_rows):
            return no_draft(len(rows), stops, self.drafter.stack.device)
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
        q_all = torch.cat(probs, 1) if probs else None
        return Draft(torch.cat(tokens, 1), q_all, torch.cat(scores, 1) if scores else None, counts, stops)

    def end(self, before: Sequence[int], verified: Sequence[int]) -> None:
        """The round is over: ``before`` tokens of a row were committed at its start, ``verified`` with drafts."""
        self.drafter.truncate(verified)
        self.controller.end(before)

    def _rooms(self, rows: Sequence[Row]) -> tuple[list[int], list[str]]:
        """Tokens each row may draft this round, and what would end the draft there."""
        rooms, reasons = [], []
        for row in rows:
            limits = {
                self.controller.full: self.controller.gamma_max,
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
