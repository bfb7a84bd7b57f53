"""The one loop: committed prefix → draft ⇄ controller → verification → committed prefix.

Shapes: B rows, g drafted tokens (of the longest row), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pacer.decoding.clock import Clock
from pacer.decoding.controllers.base import Controller
from pacer.decoding.distributions import check_sampling, penalised, probabilities, seen_before
from pacer.decoding.drafters.model import ModelDrafter
from pacer.decoding.lane import Lane, padded
from pacer.decoding.propose import Draft, Proposer, is_stop, no_draft
from pacer.decoding.request import Request, Result, Row
from pacer.decoding.trace import round_line
from pacer.decoding.uniforms import ACCEPT, NEXT, request_key, uniforms
from pacer.decoding.verify import leading, verify, verify_greedy
from pacer.errors import ConfigError, DecodingError
from pacer.models.stack import Stack
from pacer.settings import SamplingSettings

OnCommit = Callable[[Row, dict[str, object]], None]


class Decoder:
    """A method at work: target, drafter and controller on batches of requests.

    Args:
        target: the model whose output this is.
        drafter, controller: both or neither (plain decoding).
        decode: ids → text, needed for stop strings.

    Greedy output equals the target's own; sampled output has its distribution. Models are shared between decoders,
    caches never.
    """

    def __init__(
        self,
        target: Stack,
        drafter: ModelDrafter | None = None,
        controller: Controller | None = None,
        sampling: SamplingSettings | None = None,
        decode: Callable[[Sequence[int]], str] | None = None,
    ) -> None:
        self.sampling = sampling or SamplingSettings()
        check_sampling(self.sampling)
        if (drafter is None) != (controller is None):
            raise ConfigError("a drafter and a controller come together", value=f"{drafter}, {controller}")
        if drafter is not None and drafter.sampling != self.sampling:
            raise ConfigError("the drafter samples otherwise than the decoder", value=drafter.sampling)
        if drafter is not None and controller is not None and controller.reads_record and not drafter.keeps_record:
            raise ConfigError("the controller reads the drafter's record", remedy="build the drafter with record=True")
        self.target, self.drafter, self.controller, self.decode = target, drafter, controller, decode
        self.lane, self.clock = Lane(target), Clock(target.device)
        self.proposer: Proposer | None = None
        if drafter is not None and controller is not None and controller.gamma_max > 0:  # else: plain decoding
            self.proposer = Proposer(drafter, controller, target.context, self.clock)
        self.greedy = self.sampling.temperature == 0

    @torch.inference_mode()
    def generate(self, requests: Sequence[Request], on_commit: OnCommit | None = None) -> list[Result]:
        """Continue a batch of requests; each row accepts its own number of tokens and ends at its own time.

        Args:
            on_commit: called after each round with the row and its trace line, for streaming.
        """
        if not requests:
            return []
        rows = [Row(r, list(r.prompt_ids), request_key(self.sampling.seed, r.id)) for r in requests]
        self._begin(rows)
        self._prefill(rows, on_commit)
        while any(row.finish is None for row in rows):
            self._round(rows, on_commit)
        return [
            Result(row.request, row.output, row.finish or "length", row.seconds, row.latency, row.trace) for row in rows
        ]

    def _begin(self, rows: list[Row]) -> None:
        for row in rows:
            if not row.committed or len(row.committed) >= self.target.context or row.left <= 0:
                raise ConfigError(
                    f"request {row.request.id} does not fit",
                    value=f"{len(row.committed)} prompt tokens, {row.request.max_new_tokens} new",
                    allowed=f"1 … {self.target.context - 1} prompt tokens, at least 1 new",
                )
        capacity = max(min(len(row.committed) + row.left, self.target.context) for row in rows)
        self.lane.reset(len(rows), capacity)
        most = max(len(row.request.stop_ids) for row in rows)
        stops = [[*sorted(row.request.stop_ids), *[-1] * (most - len(row.request.stop_ids))] for row in rows]
        self._stop_ids = torch.tensor(stops, dtype=torch.long, device=self.target.device)  # (B, K): each row its own
        if self.proposer is not None:
            self.proposer.reset(rows, capacity, self._stop_ids)
        self._seen: Tensor | None = None
        if self.sampling.repetition_penalty != 1.0:
            shape = (len(rows), self.target.vocab_size)
            self._seen = torch.zeros(shape, dtype=torch.bool, device=self.target.device)
            for i, row in enumerate(rows):
                self._seen[i, torch.tensor(row.committed, device=self.target.device)] = True

    def _prefill(self, rows: list[Row], on_commit: OnCommit | None) -> None:
        """Read the prompts in every model; the target's pass emits the first token, by the same rule as any other."""
        self.clock.start()
        if self.proposer is not None:
            self.proposer.prefill(rows)
        self._finish(rows, no_draft(len(rows), ["prefill"] * len(rows), self.target.device), on_commit)

    def _round(self, rows: list[Row], on_commit: OnCommit | None) -> None:
        if self.proposer is None:
            draft = no_draft(len(rows), ["off"] * len(rows), self.target.device)
        else:
            draft = self.proposer.propose(rows)
        self._finish(rows, draft, on_commit)

    def _finish(self, rows: list[Row], draft: Draft, on_commit: OnCommit | None) -> None:
        """Verify a draft, commit what survives, roll back the rest, write the trace."""
        live = [row.finish is None for row in rows]
        alive = sum(live)
        logits = self._read_target(rows, draft, live)
        accepted, following, counts, bad = self._verdict(rows, draft, logits)
        scores = draft.scores if draft.scores is not None else torch.empty(len(rows), 0, device=logits.device)
        table = torch.cat([accepted[:, None], following[:, None], counts[:, None], bad[:, None], draft.tokens], 1)
        values = torch.cat([table.double(), scores.double()], 1).tolist()  # the round's one read of the verdict
        self.clock.lap("target")
        before = [len(row.committed) for row in rows]
        verified = list(before)
        lines: list[tuple[Row, dict[str, object]]] = []
        for i, row in enumerate(rows):
            if not live[i]:
                continue
            accept, token, count = (int(v) for v in values[i][:3])
            self._check_finite(row, int(values[i][3]))
            g = draft.tokens.shape[1]
            drafted = [int(v) for v in values[i][4 : 4 + min(count, draft.counts[i])]]
            emitted = row.commit([*drafted[:accept], token], self.target.context, self.decode)
            stop = "eos" if count < draft.counts[i] else draft.stops[i]
            line = round_line(row, before[i], drafted, values[i][4 + g :], accept, emitted, stop, alive)
            row.trace.append(line)
            lines.append((row, line))
            verified[i] += accept
            if self._seen is not None:
                self._seen[i, torch.tensor(emitted, device=logits.device)] = True
        self.lane.truncate(verified)  # rollback is a length: nothing is moved
        if self.proposer is not None:
            self.proposer.end(before, verified)
        self.clock.lap("rest")
        seconds = self.clock.read()
        wall = sum(seconds.values())
        for row, line in lines:
            line["time"] = {phase: value / alive for phase, value in seconds.items()}
            row.seconds += wall / alive
            row.latency += wall
            row.rounds += 1
            if on_commit is not None:
                on_commit(row, line)
        self.clock.start()

    def _read_target(self, rows: list[Row], draft: Draft, live: list[bool]) -> Tensor:
        """Logits ``(B, g + 1, V)`` after each row's prefix and each of its drafts."""
        fresh = [
            row.committed[have:] if is_live else []
            for row, have, is_live in zip(rows, self.lane.lengths, live, strict=True)
        ]
        prefix, sizes = padded(fresh, self.target.device)
        g = draft.tokens.shape[1]
        if g == 0:
            ids = prefix
        elif max(sizes) == min(sizes):
            ids = torch.cat([prefix, draft.tokens], 1)
        else:  # ragged: drafts start where each row's prefix ends
            ids = torch.nn.functional.pad(prefix, (0, g))
            starts = torch.tensor(sizes, device=ids.device)[:, None]
            ids.scatter_(1, starts + torch.arange(g, device=ids.device), draft.tokens)
        counts = [
            size + (count if is_live else 0) for size, count, is_live in zip(sizes, draft.counts, live, strict=True)
        ]
        states = self.lane.feed_ids(ids, counts)
        at = torch.tensor([max(size - 1, 0) for size in sizes], device=states.device)[:, None]
        places = (at + torch.arange(g + 1, device=states.device)).clamp_max(states.shape[1] - 1)
        if states.shape[1] != g + 1:
            states = states.gather(1, places[..., None].expand(-1, -1, states.shape[2]))
        return self.target.readout(states)

    def _verdict(self, rows: list[Row], draft: Draft, logits: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """accepted, next token, drafted count up to a stop id, first place of bad logits (or −1): ``(B,)``."""
        device, g = logits.device, draft.tokens.shape[1]
        counts = torch.tensor(draft.counts, device=device)
        if g:  # nothing after a stop id can matter: accepted, it ends the output; rejected, the rest falls with it
            counts = torch.minimum(counts, leading(~is_stop(draft.tokens, self._stop_ids)) + 1)
        if self._seen is not None:
            logits = penalised(logits, seen_before(self._seen, draft.tokens), self.sampling.repetition_penalty)
        top, argmax = logits.max(-1)
        finite = torch.isfinite(top) | (
            torch.arange(g + 1, device=device) > counts[:, None]
        )  # padding may hold anything
        bad = torch.where(finite.all(1), -1, leading(finite))
        if self.greedy:
            return *verify_greedy(argmax, draft.tokens, counts), counts, bad
        keys = torch.tensor([[row.key, row.rounds] for row in rows], device=device)
        places = torch.arange(g + 1, device=device)
        accept = uniforms(keys[:, 0], keys[:, 1], places[:g], ACCEPT)
        following = uniforms(keys[:, 0], keys[:, 1], places[:1], NEXT).squeeze(1)
        p = probabilities(logits, self.sampling)
        return *verify(p, draft.probs, draft.tokens, counts, accept, following), counts, bad

    def _check_finite(self, row: Row, bad: int) -> None:
        if bad >= 0:
            raise DecodingError(
                f"the target's logits are not finite for request {row.request.id}",
                value=f"position {len(row.committed) + bad}",
                remedy="try model.dtype=float32, or check the weights",
            )
