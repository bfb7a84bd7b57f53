"""Drafting beside the target: while it verifies a chunk, the next one is being written (PEARL, arXiv 2408.11850).

The worker goes on from the text as if the chunk that is being verified were accepted in full. The first token it draws
stands where the target adds its own; the tokens after it are the next chunk. Once the target has spoken there are two
cases, told apart by the text alone. It goes on as the worker wrote it (full acceptance, and the target's own token is
the worker's first): the rest of what the worker drew is the next draft. Or it does not: what the worker drew is
dropped, and the next draft is empty.

PEARL's two modes are one here. With an empty draft the target's own token checks the first of the γ that are drawn
meanwhile: pre-verify. With a chunk the same happens one chunk further on: post-verify. A full round takes γ draft
passes beside one target pass over γ tokens, and emits γ tokens.

In the trace ``drafted`` is the chunk alone: the token that is checked against the target's own is emitted as the
target's. ``draft`` is the time that the loop waited for the worker, not the time it worked.

Greedy only: nothing but token ids comes from the worker, and sampling would need the distributions that they were
drawn from.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict

import torch
from torch import Tensor

from pacer.decoding.clock import Clock
from pacer.decoding.concurrent import Beside, CannotRun, InTurn, Worker
from pacer.decoding.contention import LEAST, Costs, measure, spare_threads
from pacer.decoding.drafters.base import DraftContext
from pacer.decoding.lane import padded
from pacer.decoding.propose import Draft, Proposes, no_draft
from pacer.decoding.request import Row, common
from pacer.decoding.writer import Draftsman, Job, Room
from pacer.errors import UnsupportedError
from pacer.models.stack import Stack


class Pearl(Proposes):
    """Proposes what a worker wrote while the target verified.

    Args:
        draftsman: what the worker drafts with. worker: where it runs.
        gamma: tokens drawn beside a target pass; None: as many as fit, measured when a batch has so many rows.
    """

    def __init__(
        self, target: Stack, draftsman: Draftsman, worker: Worker, clock: Clock, gamma: int | None = None
    ) -> None:
        if draftsman.sampling.temperature != 0:
            raise UnsupportedError(
                "drafting beside the target is greedy: only token ids come from there",
                value=f"temperature={draftsman.sampling.temperature}", allowed="sampling.temperature=0",
                remedy="sample with another method, such as sd",
            )  # fmt: skip
        self.target, self.draftsman, self.worker, self.clock = target, draftsman, worker, clock
        self.gamma, self.costs = gamma, dict[int, Costs]()  # by number of rows
        self._chunk = 0  # tokens drawn beside a pass of this batch
        self._scripts: list[list[int]] = []  # of each row: the text as the worker has it, and what it drew
        self._checked: list[int] = []  # how much of that was committed when its job began
        self._coming: list[int] = []  # draws of the present job still to be taken, per row
        self._context = DraftContext(draftsman.stack.context)

    @contextmanager
    def session(self) -> Iterator[None]:
        """Around a batch: threads are shared out, and given back when it has ended, however it does."""
        threads = torch.get_num_threads()
        try:
            yield
            self.worker.rest()
        except BaseException:
            self.worker.close()
            raise
        finally:
            torch.set_num_threads(threads)

    def close(self) -> None:
        """End the worker; another batch begins it anew."""
        self.worker.close()

    def reset(self, rows: Sequence[Row], capacity: int, stop_ids: Tensor) -> None:
        """A new batch; what both sides cost is measured for the first of so many rows."""
        room = Room(len(rows), capacity)
        self._open(room)
        if len(rows) not in self.costs:
            self.costs[len(rows)] = measure(self.target, self.draftsman, self.worker, len(rows), self.gamma)
            self._open(room)
        if isinstance(self.worker, Beside) and self.worker.own_process:
            torch.set_num_threads(spare_threads(torch.get_num_threads()))
        self._chunk = self.gamma or self.costs[len(rows)].gamma
        self._scripts, self._checked, self._coming = [[] for _ in rows], [0] * len(rows), [0] * len(rows)

    def _open(self, room: Room) -> None:
        """Make room where the worker runs, or here where it cannot."""
        try:
            self.worker.reset(room)
        except CannotRun as reason:
            warnings.warn(f"pearl drafts in turn, not beside the target: {reason}", stacklevel=2)
            self.worker = InTurn(self.draftsman)
            self.worker.reset(room)

    def report(self) -> dict[str, object]:
        """What both sides cost in the last batch, and how many tokens were drawn beside a target pass."""
        return {**asdict(self.costs[len(self._scripts)]), "gamma": self._chunk}

    def admit(self, index: int, row: Row) -> None:
        """Another request takes a row."""
        self._scripts[index], self._checked[index], self._coming[index] = [], 0, 0

    def prefill(self, rows: Sequence[Row], chosen: Sequence[int]) -> None:
        """The worker reads the prompts of the chosen rows beside the target, and goes on drawing."""
        self._collect(rows)
        self._start(rows, [[] for _ in rows], chosen)
        self.clock.lap("draft")

    def propose(self, rows: Sequence[Row]) -> Draft:
        """What the worker drew for the rows whose text goes on as it thought; it begins with what comes after."""
        self._collect(rows)
        chunks = [self._next(i, row) if row.finish is None else [] for i, row in enumerate(rows)]
        stops = self._start(rows, chunks, range(len(rows)))
        self.clock.lap("draft")
        if not any(chunks):
            return no_draft(len(rows), stops, self.target.device)
        tokens, counts = padded(chunks, self.target.device)
        return Draft(tokens, None, None, counts, stops)

    def end(self, before: Sequence[int], verified: Sequence[int], chosen: Sequence[int]) -> None:
        """What became of the round is read off the text when the next one begins."""

    def _agrees(self, index: int, row: Row) -> bool:
        """Whether the row's text is the worker's, as far as both go."""
        pairs = zip(row.committed[self._checked[index] :], self._scripts[index][self._checked[index] :], strict=False)
        return row.finish is None and all(a == b for a, b in pairs)

    def _collect(self, rows: Sequence[Row]) -> None:
        """Take what the worker draws, as long as it serves a row."""
        while any(left and self._agrees(i, rows[i]) for i, left in enumerate(self._coming)):
            for i, token in enumerate(self.worker.next()):
                if self._coming[i]:
                    self._scripts[i].append(token)
                    self._coming[i] -= 1

    def _next(self, index: int, row: Row) -> list[int]:
        """The row's next chunk."""
        return self._scripts[index][len(row.committed) :] if self._agrees(index, row) else []

    def _start(self, rows: Sequence[Row], chunks: Sequence[list[int]], chosen: Sequence[int]) -> list[str]:
        """Let the worker go on from the chosen rows' texts and chunks; returns why each chunk is as long as it is."""
        keep, fresh, draws = [], [], [0] * len(rows)
        stops = ["postverify" if chunk else "preverify" for chunk in chunks]
        for i, row in enumerate(rows):
            script = self._scripts[i]
            if row.finish is not None or i not in chosen:
                keep.append(len(script))
                fresh.append(list[int]())
                continue
            text = [*row.committed, *chunks[i]]
            same = common(script, text, self._checked[i])
            keep.append(same)
            fresh.append(text[same:])
            draws[i], limit = self._draws(row, len(chunks[i]))
            if not chunks[i] and not draws[i]:
                stops[i] = limit
            self._scripts[i], self._checked[i] = text, len(row.committed)
        self._coming = list(draws)
        self.worker.start(Job(keep, fresh, draws))
        return stops

    def _draws(self, row: Row, chunk: int) -> tuple[int, str]:
        """Tokens to draw for a row of which a chunk of so many is being verified, and what limits them."""
        end = len(row.committed) + chunk
        limits = {
            "fixed": self._chunk,
            "budget": row.left - chunk - 1,  # the last token is the target's own
            "context": min(self.target.context - end, self._context.room(end)),
        }
        limit = min(limits, key=lambda name: limits[name])
        return (limits[limit] if limits[limit] >= LEAST else 0), limit
