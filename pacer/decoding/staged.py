"""A draft that an intermediate exit has verified already: HiSpec's inner loop (arXiv 2510.01336).

The inner proposer drafts from prefix and buffer, the exit keeps what it would have written and adds a token of its own,
until the buffer holds enough. To what verifies next, the buffer is a draft like any other: in greedy decoding one-hot,
in sampling drawn from the exit's own distributions (its rows are kept), since speculative sampling makes each of its
tokens distributed as the exit's. So stages nest: a proposal may be a buffer of buffers.

Rows go on at their own times: of the rows of a batch those with a full buffer may go to the next verifier while the
others go on drafting (``ready``); their buffers stay.

Shapes: R rows, B rows that draft now, m buffered tokens (of the longest row), V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from pacer.decoding.clock import Clock
from pacer.decoding.controllers.buffer import BufferRule
from pacer.decoding.propose import KEEP, Draft, Proposes, take
from pacer.decoding.request import Row
from pacer.decoding.uniforms import request_key
from pacer.decoding.verdict import Verdict
from pacer.decoding.verifier import Verifier, check_trees
from pacer.errors import DecodingError


@dataclass
class Buffer:
    """What an exit has accepted for a row, since the next verifier's last word."""

    tokens: list[int] = field(default_factory=list)
    probs: list[Tensor] = field(default_factory=list)  # (n, V) each
    scores: list[float] = field(default_factory=list)
    rounds: list[dict[str, Any]] = field(default_factory=list)  # the trace of the inner rounds
    stop: str | None = None  # why it is full; None: it is not


class Staged(Proposes):
    """Inner proposer → exit → buffer.

    Args:
        inner: what drafts. verifier: the exit. rule: when the buffer is full.
        bonus: the exit adds its own token after full acceptance too.
        context: the target's. share: of the rows still drafting, how many must be full before these go on, (0, 1].
    """

    def __init__(
        self,
        inner: Proposes,
        verifier: Verifier,
        rule: BufferRule,
        context: int,
        clock: Clock,
        bonus: bool = True,
        share: float = 1.0,
    ) -> None:
        self.inner, self.verifier, self.rule, self.bonus, self.share = inner, verifier, rule, bonus, share
        self.context, self.clock = context - 1, clock  # the next verifier adds a token of its own
        self.rows: list[Row] = []
        self.buffers: list[Buffer] = []
        self._stop_ids = torch.empty(0)
        check_trees(inner, verifier.reader)

    def reset(self, rows: Sequence[Row], capacity: int, stop_ids: Tensor) -> None:
        """A new batch."""
        self._stop_ids = stop_ids
        self.rows, self.buffers = [self._tentative(row) for row in rows], [Buffer() for _ in rows]
        self.verifier.reset(len(rows), capacity, self.inner.spare)
        self.inner.reset(self.rows, capacity, stop_ids)
        self.rule.reset(self.rows, capacity)

    def admit(self, index: int, row: Row) -> None:
        """Another request takes a row."""
        self.rows[index], self.buffers[index] = self._tentative(row), Buffer()
        self.verifier.admit(index)
        self.inner.admit(index, self.rows[index])
        self.rule.admit(index)

    def prefill(self, rows: Sequence[Row], chosen: Sequence[int]) -> None:
        """Read the prompts where the target's first pass does not, as it does on every rung."""
        self.verifier.prefill(rows, [i for i in chosen if len(rows[i].committed) < self.context])
        self.clock.lap(self.verifier.phase)

    def _tentative(self, row: Row) -> Row:
        """The row as the inner loop sees it: prefix and buffer; random numbers of its own."""
        budget = row.request.max_new_tokens - 1
        request = replace(row.request, max_new_tokens=budget, stop=())
        return Row(request, list(row.committed), request_key(row.key, "exit"))

    def propose(self, rows: Sequence[Row]) -> Draft:
        """Fill buffers until enough rows have a full one."""
        for i, row in enumerate(rows):
            self._begin(i, row)
        alive = [i for i, row in enumerate(rows) if row.finish is None]
        enough = math.ceil(len(alive) * self.share)
        while len(going := [i for i in alive if self.buffers[i].stop is None]) > len(alive) - enough:
            self._round(going)
        return self._draft(rows)

    def _begin(self, index: int, row: Row) -> None:
        inner, buffer = self.rows[index], self.buffers[index]
        if row.finish is None and not buffer.tokens:
            inner.committed[:] = row.committed
            room = inner.left > 0 and len(inner.committed) < self.context
            inner.finish = None if room else "closed"
            buffer.stop = None if room else ("budget" if inner.left <= 0 else "context")

    def _round(self, going: list[int]) -> None:
        """The inner loop's round: draft, verify at the exit, buffer what survives, roll back the rest."""
        for i, row in enumerate(self.rows):
            row.finish = None if i in going else "waits"
        draft = self.inner.propose(self.rows)
        chosen = [i for i in going if draft.ready is None or draft.ready[i]]
        part, rows = take(draft, chosen, len(self.rows)), [self.rows[i] for i in chosen]
        logits = self.verifier.logits(self.rows, part, chosen, last=self.bonus)
        verdict = self.verifier.judge(rows, part, logits, self._stop_ids[chosen], None, self.inner.sees)
        probs = None if verdict.probs is None else verdict.along(verdict.probs)
        before = [len(row.committed) for row in self.rows]
        verified = [KEEP] * len(before)
        for j, i in enumerate(chosen):
            verified[i] = before[i] + self._commit(i, j, verdict, part, probs)
            if verdict.branches is not None:  # a tree is read to its leaves; the text's last token comes again
                verified[i] = min(verified[i], len(self.rows[i].committed) - 1)
        self.verifier.settle(verdict, chosen, before, verified)
        if self.inner.sees:
            self.inner.saw(self.rows, chosen, verdict)
        self.inner.end(before, verified, chosen)
        if self.rule.reads_exit:
            emitted = [self.buffers[i].rounds[-1]["emitted"] for i in chosen]
            self.rule.saw(rows, chosen, self.verifier.shown(verdict, logits), emitted)
        self.clock.lap(self.verifier.phase)
        self._judge(chosen)
        if self.rule.reads_exit:
            self.clock.lap("preverify")

    def _commit(self, i: int, j: int, verdict: Verdict, part: Draft, probs: Tensor | None) -> int:
        """Buffer what survived of row i, number j of the verdict; returns how many drafts that were."""
        row, buffer, drafted, accept = self.rows[i], self.buffers[i], verdict.drafted[j], verdict.accepted[j]
        if verdict.bad[j] >= 0:
            place = f"position {len(row.committed) + verdict.distance(j)}"
            raise DecodingError(f"an exit's logits are not finite for request {row.request.id}", value=place)
        new = verdict.survivors(j)
        if self.bonus or not drafted or not verdict.exhausted(j):
            new = [*new, verdict.following[j]]
        emitted = row.commit(new, self.context, None)
        if probs is not None:
            buffer.probs.append(probs[j, : len(emitted)])
        buffer.tokens += emitted
        stop = "eos" if len(drafted) < part.counts[j] else part.stops[j]
        line = {"drafted": drafted, "accepted": accept, "emitted": emitted, "stop": stop}
        line |= {} if part.inner is None else {"inner": part.inner[j]}
        line |= {} if verdict.parents is None else {"parents": verdict.parents[j]}
        buffer.rounds.append(line)
        row.rounds += 1
        return accept

    def _judge(self, chosen: Sequence[int]) -> None:
        """Which of the rows that have just grown are full, and why."""
        ended = {"eos": "eos", "length": "budget", "context": "context"}
        for i in chosen:
            finish = self.rows[i].finish
            self.buffers[i].stop = None if finish is None else ended[finish]
        open_rows = [i for i in chosen if self.buffers[i].stop is None]
        if not open_rows:
            return
        fresh = [len(self.buffers[i].rounds[-1]["emitted"]) for i in open_rows]
        buffered = [len(self.buffers[i].tokens) for i in open_rows]
        stops, scores = self.rule.judge([self.rows[i] for i in open_rows], open_rows, buffered, fresh)
        for i, stop, score in zip(open_rows, stops, scores, strict=True):
            self.buffers[i].stop = stop
            self.buffers[i].scores += score

    def _draft(self, rows: Sequence[Row]) -> Draft:
        """Full buffers, as one draft of all rows; the others are not ready."""
        device = self.verifier.device
        ready = [row.finish is None and b.stop is not None for row, b in zip(rows, self.buffers, strict=True)]
        sent = [buffer if is_ready else Buffer() for buffer, is_ready in zip(self.buffers, ready, strict=True)]
        counts = [len(buffer.tokens) for buffer in sent]
        tokens = torch.zeros(len(rows), max(counts), dtype=torch.long)
        for i, buffer in enumerate(sent):
            tokens[i, : counts[i]] = torch.tensor(buffer.tokens, dtype=torch.long)
        probs = None
        if any(buffer.probs for buffer in sent):
            empty = next(b.probs[0] for b in sent if b.probs)[:0]
            probs = pad_sequence([torch.cat([empty, *buffer.probs]) for buffer in sent], batch_first=True)
        scores = None
        if any(buffer.scores for buffer in sent):
            scores = pad_sequence([torch.tensor(b.scores) for b in sent], True, torch.nan).to(device)
        return Draft(
            tokens.to(device), probs, scores, counts, [buffer.stop or "waiting" for buffer in sent],
            [buffer.rounds for buffer in sent], ready,
        )  # fmt: skip

    def end(self, before: Sequence[int], verified: Sequence[int], chosen: Sequence[int]) -> None:
        """The next verifier has spoken about the buffers of the chosen rows."""
        for i in chosen:
            self.buffers[i] = Buffer()
        self.verifier.reader.truncate(verified)  # of a rung the target has done so
        self.inner.end(before, verified, chosen)
        self.rule.end(before, chosen)
