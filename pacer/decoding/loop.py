"""The one loop: committed prefix → draft ⇄ controller → verification → committed prefix.

Shapes: R rows, g drafted tokens (of the longest row), V vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from pacer.decoding.clock import Clock
from pacer.decoding.distributions import check_sampling
from pacer.decoding.lane import Lane, Reader
from pacer.decoding.last_only import LastOnly, check_last_only
from pacer.decoding.propose import KEEP, Draft, Proposes, no_draft, take
from pacer.decoding.request import Request, Result, Row, common
from pacer.decoding.trace import round_line
from pacer.decoding.uniforms import request_key
from pacer.decoding.verdict import Verdict
from pacer.decoding.verifier import Verifier, check_trees
from pacer.errors import ConfigError, DecodingError
from pacer.models.stack import Stack
from pacer.settings import SamplingSettings

OnCommit = Callable[[Row, dict[str, object]], None]


class Decoder:
    """A method at work: a target and what drafts for it, on requests.

    Args:
        target: the model whose output this is.
        proposer: what drafts; None: plain decoding.
        decode: ids → text, needed for stop strings.
        reader: reads tokens into the target; None: a memory of its own. Exits share theirs.
        clock: shared with the proposer. shares_prefixes: rows whose prompts begin alike hold that part once.
        around: entered for each call of :meth:`generate`, such as for a worker that shares the cores meanwhile.
        last_only: of a draft the target checks the last token alone, which is lossy.

    Otherwise greedy output equals the target's own; sampled output has its distribution. Models are shared between
    decoders, caches never.
    """

    def __init__(
        self,
        target: Stack,
        proposer: Proposes | None = None,
        sampling: SamplingSettings | None = None,
        decode: Callable[[Sequence[int]], str] | None = None,
        reader: Reader | None = None,
        clock: Clock | None = None,
        shares_prefixes: bool = False,
        around: Callable[[], AbstractContextManager[object]] = nullcontext,
        last_only: bool = False,
    ) -> None:
        self.sampling = sampling or SamplingSettings()
        check_sampling(self.sampling)
        self.target, self.proposer, self.decode = target, proposer, decode
        self.reader: Reader = reader or Lane(target)
        self.clock, self.shares_prefixes, self.around = clock or Clock(target.device), shares_prefixes, around
        kind = LastOnly if last_only else Verifier
        self.verifier = kind(self.reader, target.readout, self.sampling, target.vocab_size, target.device)
        self._spare, self._sees = (0, False) if proposer is None else (proposer.spare, proposer.sees)
        if proposer is not None:
            check_trees(proposer, self.reader)
            if last_only:
                check_last_only(proposer)

    @torch.inference_mode()
    def generate(
        self, requests: Sequence[Request], on_commit: OnCommit | None = None, slots: int | None = None
    ) -> list[Result]:
        """Continue requests; each row accepts its own number of tokens and ends at its own time.

        Args:
            on_commit: called after each round with the row and its trace line, for streaming.
            slots: rows decoded at once; the other requests wait until one of them ends. None: all.

        Returns:
            Results in the order of the requests.
        """
        if not requests:
            return []
        with self.around():
            return self._generate(requests, on_commit, slots)

    def _generate(self, requests: Sequence[Request], on_commit: OnCommit | None, slots: int | None) -> list[Result]:
        queue = deque(self._row(request) for request in requests)
        everyone = list(queue)
        rows = [queue.popleft() for _ in range(min(slots or len(requests), len(requests)))]
        self._begin(rows, everyone)
        self._prefill(rows, range(len(rows)), on_commit)
        while queue or any(row.finish is None for row in rows):
            free = [i for i, row in enumerate(rows) if row.finish is not None] if queue else []
            joining = free[: len(queue)]
            for i in joining:
                rows[i] = queue.popleft()
                self._admit(i, rows[i])
            if joining:
                self._prefill(rows, joining, on_commit)
            else:
                self._round(rows, on_commit)
        return [
            Result(row.request, row.output, row.finish or "length", row.seconds, row.latency, row.trace)
            for row in everyone
        ]

    def _row(self, request: Request) -> Row:
        row = Row(request, list(request.prompt_ids), request_key(self.sampling.seed, request.id))
        if not row.committed or len(row.committed) >= self.target.context or row.left <= 0:
            raise ConfigError(
                f"request {row.request.id} does not fit",
                value=f"{len(row.committed)} prompt tokens, {row.request.max_new_tokens} new",
                allowed=f"1 … {self.target.context - 1} prompt tokens, at least 1 new",
            )
        return row

    def _begin(self, rows: list[Row], everyone: Sequence[Row]) -> None:
        capacity = max(min(len(row.committed) + row.left, self.target.context) for row in everyone)
        self.reader.reset(len(rows), capacity + self._spare)
        device = self.target.device
        most = max(len(row.request.stop_ids) for row in everyone)
        self._stop_ids = torch.full((len(rows), most), -1, device=device)  # each row its own
        self._work = [0] * len(rows)  # of each row, the layers × tokens that are in the trace
        self._seen: Tensor | None = None
        if self.sampling.repetition_penalty != 1.0:
            self._seen = torch.zeros(len(rows), self.target.vocab_size, dtype=torch.bool, device=device)
        for i, row in enumerate(rows):
            self._note(i, row)
        if self.proposer is not None:
            self.proposer.reset(rows, capacity, self._stop_ids)

    def _note(self, index: int, row: Row) -> None:
        """What is known of a row's request on the device."""
        stops = sorted(row.request.stop_ids)
        self._stop_ids[index] = -1
        self._stop_ids[index, : len(stops)] = torch.tensor(stops, dtype=torch.long)
        if self._seen is not None:
            self._seen[index] = False
            self._seen[index, torch.tensor(row.committed, device=self._seen.device)] = True

    def _admit(self, index: int, row: Row) -> None:
        """Another request takes the row of one that has ended."""
        self.reader.release(index)
        self._note(index, row)
        if self.proposer is not None:
            self.proposer.admit(index, row)

    def _prefill(self, rows: list[Row], chosen: Sequence[int], on_commit: OnCommit | None) -> None:
        """Read the prompts in every model; the target's pass emits the first token, by the same rule as any other.

        Rows whose prompt begins as that of another row do not read that part: those that can borrow from a row of
        this very call wait for it.
        """
        waiting = self._borrow(rows, chosen)
        first = [i for i in chosen if i not in waiting]
        self.clock.start()
        if self.proposer is not None:
            self.proposer.prefill(rows, first)
        draft = no_draft(len(rows), ["prefill"] * len(rows), self.target.device)
        self._finish(rows, draft, first, on_commit)
        if waiting:
            self._prefill(rows, waiting, on_commit)

    def _borrow(self, rows: Sequence[Row], chosen: Sequence[int]) -> list[int]:
        """Let the chosen rows share what others have read of the same prompt; returns those who can, but not yet.

        Only where memory is paged (sharing is free) and nobody has to hear of what is read.
        """
        if not self.shares_prefixes:
            return []
        lengths, waiting = self.reader.lengths, []
        for i in chosen:
            best, soon = (0, 0), 0
            for j, other in enumerate(rows):
                if j == i:
                    continue
                same = common(rows[i].request.prompt_ids[:-1], other.request.prompt_ids)
                best = max(best, (min(same, lengths[j]), j))
                if j < i and j in chosen and j not in waiting:
                    soon = max(soon, same)
            if soon > best[0]:
                waiting.append(i)
            elif best[0] > 0 and lengths[i] == 0:
                self.reader.adopt(i, best[1], best[0])
        return waiting

    def _round(self, rows: list[Row], on_commit: OnCommit | None) -> None:
        if self.proposer is None:
            draft = no_draft(len(rows), ["off"] * len(rows), self.target.device)
        else:
            draft = self.proposer.propose(rows)
        chosen = [i for i, row in enumerate(rows) if row.finish is None and (draft.ready is None or draft.ready[i])]
        self._finish(rows, draft, chosen, on_commit)

    def _finish(self, rows: list[Row], draft: Draft, chosen: list[int], on_commit: OnCommit | None) -> None:
        """Verify the drafts of the chosen rows, commit what survives, roll back the rest, write the trace."""
        part = take(draft, chosen, len(rows))
        logits = self.verifier.logits(rows, part, chosen)
        live = [rows[i] for i in chosen]
        everyone = len(chosen) == len(rows)
        stop_ids = self._stop_ids if everyone else self._stop_ids[chosen]
        seen = self._seen if everyone or self._seen is None else self._seen[chosen]
        verdict = self.verifier.judge(live, part, logits, stop_ids, seen, self._sees)
        self.clock.lap("target")
        before = [len(row.committed) for row in rows]
        verified = [KEEP] * len(rows)
        lines: list[tuple[Row, dict[str, object]]] = []
        for j, i in enumerate(chosen):
            accept, line = self._commit(rows[i], j, verdict, part, len(chosen))
            verified[i] = before[i] + accept
            lines.append((rows[i], line))
            if self._seen is not None:
                self._seen[i, torch.tensor(line["emitted"], device=logits.device)] = True
        self.verifier.settle(verdict, chosen, before, verified)
        if self.proposer is not None:
            if self._sees:
                self.proposer.saw(rows, chosen, verdict)
            self.proposer.end(before, verified, chosen)
        work = self.reader.layer_tokens
        for i, (_, line) in zip(chosen, lines, strict=True):
            line["layer_tokens"], self._work[i] = work[i] - self._work[i], work[i]
        self._book(rows, lines, on_commit)

    def _commit(self, row: Row, j: int, verdict: Verdict, draft: Draft, together: int) -> tuple[int, dict[str, object]]:
        """Commit what survived of a row, number j of the verdict; returns how many drafts that were and the trace."""
        before, drafted, accept = len(row.committed), verdict.drafted[j], verdict.accepted[j]
        if verdict.bad[j] >= 0:
            raise DecodingError(
                f"the target's logits are not finite for request {row.request.id}",
                value=f"position {before + verdict.distance(j)}",
                remedy="try model.dtype=float32, or check the weights",
            )
        emitted = row.commit([*verdict.survivors(j), verdict.following[j]], self.target.context, self.decode)
        stop = "eos" if len(drafted) < draft.counts[j] else draft.stops[j]
        inner = None if draft.inner is None else draft.inner[j]
        parents = None if verdict.parents is None else verdict.parents[j]
        line = round_line(row, before, drafted, verdict.scores[j], accept, emitted, stop, together, inner, parents)
        if verdict.unchecked is not None:
            line["unchecked"] = verdict.unchecked[j]
        row.trace.append(line)
        return accept, line

    def _book(
        self, rows: Sequence[Row], lines: Sequence[tuple[Row, dict[str, object]]], on_commit: OnCommit | None
    ) -> None:
        """Book the round's time on the rows it served; rows that wait for their turn wait in wall time."""
        self.clock.lap("rest")
        seconds = self.clock.read()
        wall = sum(seconds.values())
        served = {id(row) for row, _ in lines}
        for row in rows:
            if row.finish is None or id(row) in served:
                row.latency += wall
        for row, line in lines:
            line["time"] = {phase: value / len(lines) for phase, value in seconds.items()}
            row.seconds += wall / len(lines)
            row.rounds += 1
            if on_commit is not None:
                on_commit(row, line)
        self.clock.start()
