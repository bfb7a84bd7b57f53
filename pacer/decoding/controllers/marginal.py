"""Marginal value: go on while the tokens that the next block is expected to bring are worth its measured time.

A request's speed is tokens over time, so the best length of each draft is that of a fractional program: another block
pays as long as ``expected tokens / extra time`` is above the speed that the request has anyway (Dinkelbach 1967). Times
come in as plain numbers (what a round with a draft of n tokens takes, in rounds of plain decoding); expectations from
the draft's own probability, corrected by what became of this request's tokens, or from a pre-verifier's estimate of
survival. The unit of time makes plain decoding's speed 1, so a request is never satisfied with less.

*Off*: where drafting turns out slower than plain decoding, the request goes on without a draft, whose model is then not
even read: a round costs what plain decoding costs. After ``wait`` tokens some rounds try again; each failure doubles
the wait. Coming back takes a speed of 1 + margin, leaving one below 1 − margin. Where the times say that not even full
acceptance pays, ``gamma_max`` is 0 and nothing is ever drafted.

Shapes: B rows, n drawn tokens, m further tokens, K + 1 knots of the acceptance by probability.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from pacer.decoding.controllers.base import Verdicts
from pacer.decoding.controllers.online import Online
from pacer.decoding.controllers.preverifier import Judge, PreverifierRule
from pacer.decoding.parts import SHARE, SIZE, SWITCH, Allowed, Range, resolved
from pacer.decoding.record import Record
from pacer.decoding.request import Row
from pacer.errors import ConfigError, MismatchError

TENTHS = 10  # K: acceptance is learnt by tenths of the draft's probability
LONGEST_WAIT = 16  # times the first wait
SIGNALS = ("probability", "preverifier")


@dataclass
class Account:
    """What a request's rounds have taught.

    ``kept``, ``seen``: judged tokens by tenth of the draft's probability. ``emitted``, ``spent``: tokens and time of
    the rounds that drafted, older ones weighing less. ``rounds`` of the present try; ``proven``: it was passed.
    ``idle``: tokens since drafting was given up (None: it was not); ``wait``: tokens before the next try.
    """

    wait: float
    kept: list[float] = field(default_factory=lambda: [0.0] * TENTHS)
    seen: list[float] = field(default_factory=lambda: [0.0] * TENTHS)
    emitted: float = 1.0  # as if one round of plain decoding had been made
    spent: float = 1.0
    rounds: int = 0
    proven: bool = True  # a request begins with a try that may be as fast as plain decoding
    idle: int | None = None

    @property
    def speed(self) -> float:
        return self.emitted / self.spent


@dataclass
class Marginal(Online[Account]):
    """Go on while the expected gain of the next block exceeds its time at the request's present speed.

    Args:
        rounds: time of a round with a draft of 0, 1, … tokens (calls of the pre-verifier included), at this batch size.
        preverifier: for the signal of that name; it must estimate survival.
        signal: what the expectations come from. b: tokens to a block. gamma_max: longest draft.
        table: acceptance at draft probabilities 0, 0.1, … 1, to begin with; None: the probability itself.
        acceptance: of a token that is not drawn yet, to begin with. weight: judged tokens that the beginning counts as.
        decay: weight of a round beside the one after it, in the request's speed.
        margin, trial, wait: hysteresis, rounds of a try, tokens before the first one after giving up.
    """

    rounds: Sequence[float]
    preverifier: Judge | None = None
    signal: str = "probability"
    b: int = 1
    gamma_max: int = 16
    table: Sequence[float] | None = None
    acceptance: float = 0.5
    weight: float = 8.0
    decay: float = 0.97
    margin: float = 0.05
    trial: int = 6
    wait: int = 24
    warm: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.times = [time / self.rounds[0] for time in self.rounds]
        self.knots = [k / TENTHS for k in range(TENTHS + 1)] if self.table is None else list(self.table)
        self.reader = _reader(self.preverifier, self.b) if self.signal == "preverifier" else None
        longest = min(self.gamma_max, len(self.times) - 1, self.reader.gamma_max if self.reader else self.gamma_max)
        pays = any((n + 1) / self.times[n] > 1 + self.margin for n in range(1, longest + 1))
        self.gamma_max = longest if pays else 0
        self._now: Now | None = None

    @classmethod
    def allowed(cls, given: Mapping[str, Any]) -> Mapping[str, Allowed]:
        return {
            "signal": SIGNALS, "b": SIZE, "gamma_max": Range(given.get("b") or 1, whole=True), "acceptance": SHARE,
            "weight": Range(0, open_low=True), "decay": SHARE, "margin": Range(0, 1, open_high=True), "trial": SIZE,
            "wait": SIZE, "warm": SWITCH,
        }  # fmt: skip

    @classmethod
    def check(cls, given: Mapping[str, Any], where: str = "") -> None:
        super().check(given, where)
        table = given.get("table")
        if table is not None and (len(table) != TENTHS + 1 or not all(SHARE.holds(share) for share in table)):
            what = f"table in {where}" if where else "controller.table out of range"
            raise ConfigError(what, value=table, allowed=f"{TENTHS + 1} numbers in [0, 1], or null")

    @classmethod
    def needs(cls, given: Mapping[str, Any]) -> tuple[str, ...]:
        return ("prices", "preverifier") if given.get("signal") == "preverifier" else ("prices",)

    @classmethod
    def build(cls, given: Mapping[str, Any], **parts: Any) -> Self:
        return cls(parts["prices"], parts.get("preverifier"), **resolved(given, None, without=("kind", "prices")))

    # the request's side: plain numbers

    def fresh(self) -> Account:
        return Account(float(self.wait))

    def reset(self, rows: Sequence[Row], capacity: int) -> None:
        super().reset(rows, capacity)
        self._now = None
        if self.reader is not None:
            self.reader.reset(rows, capacity)

    def admit(self, index: int) -> None:
        super().admit(index)
        self._now = None
        if self.reader is not None:
            self.reader.admit(index)

    def prefill(self, record: Record | None, rows: Sequence[Row], read: Sequence[bool]) -> None:
        if self.reader is not None:
            self.reader.prefill(record, rows, read)

    def limits(self, rows: Sequence[Row]) -> Sequence[int]:
        return [self.gamma_max if state.idle is None else 0 for state in self.states]

    def block(self, drawn: int) -> int:
        return min(self.b, self.gamma_max - drawn)

    def learn(
        self, record: Record | None, committed: Sequence[int], drawn: Sequence[int], accepted: Sequence[int]
    ) -> None:
        self._now = None
        probs: list[list[float]] = [[]] * len(drawn)
        if max(drawn) > 0:
            assert record is not None
            probs = record.after("logprob", committed, 0, max(drawn)).exp().tolist()
        for state, own, n, m in zip(self.states, probs, drawn, accepted, strict=True):
            if n > 0:
                for k, p in enumerate(own[: min(m + 1, n)]):
                    tenth = min(int(p * TENTHS), TENTHS - 1) if p == p else 0
                    state.seen[tenth] += 1
                    state.kept[tenth] += k < m
                self._settle(state, m + 1, self.times[n])
            elif n == 0 and state.idle is not None:
                state.idle += 1
                if state.idle >= state.wait:
                    state.idle, state.rounds, state.proven, state.emitted, state.spent = None, 0, False, 1.0, 1.0

    def _settle(self, state: Account, emitted: int, spent: float) -> None:
        """Book a round that drafted; give up where it does not pay."""
        state.emitted, state.spent = self.decay * state.emitted + emitted, self.decay * state.spent + spent
        state.rounds += 1
        if state.rounds < self.trial:
            return
        if state.speed < (1 - self.margin if state.proven else 1 + self.margin):
            state.idle = 0
            state.wait = self.wait if state.proven else min(2 * state.wait, LONGEST_WAIT * self.wait)
        state.proven = True

    def end(self, committed: Sequence[int]) -> None:
        if self.reader is not None:
            self.reader.end(committed)

    # the draft's side: on the device, one verdict per block

    def judge(self, record: Record | None, rows: Sequence[Row], drawn: int, open_rows: Sequence[bool]) -> Verdicts:
        assert record is not None
        now = self._now = self._now or Now(self, record.ids.device)
        if self.reader is not None:
            _, scores = self.reader.ask(record, rows, drawn, open_rows)
            assert scores is not None
            return now.pays(scores[:, -1], drawn), scores
        each = now.accepted(record.drawn("logprob", rows, 0, drawn).exp())
        return now.pays(each.prod(1), drawn), each[:, -((drawn - 1) % self.b + 1) :]


def _reader(judge: Judge | None, b: int) -> PreverifierRule:
    """What calls the pre-verifier; only its estimates are used.

    Raises:
        MismatchError: it estimates something else than survival.
    """
    assert judge is not None
    settings = judge[0].settings
    if settings.label != "survival":
        raise MismatchError(
            "marginal value needs a pre-verifier of survival", value=settings.label,
            remedy="train one with preverifier.label=survival, or use signal=probability",
        )  # fmt: skip
    return PreverifierRule(judge[0], b=b, gamma_max=max(b, settings.gamma_max))


class Now:
    """The rows' accounts as the device needs them in one round.

    ``knots, kept, seen (B, K …)``: of the acceptance by probability. ``further (B, m)``: tokens expected of m further
    draws, given that all before them survive. ``speed (B, 1)``.
    """

    def __init__(self, rule: Marginal, device: torch.device) -> None:
        states, top = rule.states, rule.gamma_max
        self.rule, self.weight = rule, rule.weight
        table = torch.tensor([[*s.kept, *s.seen, max(1.0, s.speed)] for s in states], device=device)
        self.kept, self.seen, self.speed = table[:, :TENTHS], table[:, TENTHS:-1], table[:, -1:]
        self.knots = torch.tensor(rule.knots, device=device)
        counts = self.seen.sum(1, keepdim=True)
        mean = (self.kept.sum(1, keepdim=True) + rule.weight * rule.acceptance) / (counts + rule.weight)
        self.further = (mean ** torch.arange(1, top + 1, device=device)).cumsum(1)
        self.times = torch.tensor(rule.times[: top + 1], device=device)

    def accepted(self, probs: Tensor) -> Tensor:
        """Expected acceptance of tokens that the draft gave these probabilities ``(B, n)``; NaN is 0."""
        probs = probs.nan_to_num(0.0).clamp(0, 1)
        tenth = (probs * TENTHS).long().clamp_max(TENTHS - 1)
        low, high = self.knots[tenth], self.knots[tenth + 1]
        begin = low + (probs * TENTHS - tenth) * (high - low)
        return (self.kept.gather(1, tenth) + self.weight * begin) / (self.seen.gather(1, tenth) + self.weight)

    def pays(self, survival: Tensor, drawn: int) -> Tensor:
        """Whether some number of further blocks brings more than its time is worth ``(B,)``."""
        b, top = self.rule.b, self.rule.gamma_max
        more = torch.tensor(sorted({min(m, top - drawn) for m in range(b, top - drawn + b, b)}), device=survival.device)
        gain = survival[:, None] * self.further[:, more - 1]
        return (gain > self.speed * (self.times[drawn + more] - self.times[drawn])).any(1)
