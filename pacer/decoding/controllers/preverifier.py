"""PACER's rule: blocks of b tokens, each judged by the pre-verification layer (arXiv 2602.01274).

The mean estimate of the block below t ends the draft; otherwise t grows by ρ and the next block is written. t starts
again at t0 in each round. M_B runs once per block, on the entries it has not read: its key/value memory holds the
verified prefix (index 0) and the current draft, and is cut back to the prefix after each round.

*Lazy* pre-verification, our addition: M_B is called only where the draft's own probability leaves the question open. If
the product of the draft's probabilities over the block is below lo, the draft stops, above hi it goes on, both without
a call; what M_B was not shown is read with the next call.

Shapes: B rows, n entries, b block, T places.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from pacer.choices import BLOCK_RULES
from pacer.decoding.controllers.base import ASK, GO, STOP, Controller, Verdicts
from pacer.decoding.lane import Lane
from pacer.decoding.parts import SHARE, SIZE, Allowed, Range, resolved
from pacer.decoding.record import Record
from pacer.decoding.request import Row
from pacer.errors import MismatchError
from pacer.models.preverifier import Preverifier

RULES = ("mean", "min", "product")
Judge = tuple[Preverifier, Mapping[str, Any] | None]  # a pre-verifier, and the rule's values that come with it


def block_value(scores: Tensor, rule: str) -> Tensor:
    """One number of a block's estimates ``(…, b)`` → ``(…)``."""
    if rule == "mean":
        return scores.mean(-1)
    return scores.amin(-1) if rule == "min" else scores.prod(-1)


def rule_for(label: str, b: int, rule: str | None) -> str:
    """The rule (None: the label's own) for blocks of b estimates of a pre-verifier that has learnt this label.

    Raises:
        MismatchError: the rule does not read such estimates. For one token all rules are the same.
    """
    allowed = BLOCK_RULES[label]
    rule = rule or allowed[0]
    if b > 1 and rule not in allowed:
        raise MismatchError(
            f"controller.rule does not read a pre-verifier of {label} labels", value=rule, allowed=allowed,
            remedy="train one with another preverifier.label: product reads conditional, mean reads survival",
        )  # fmt: skip
    return rule


def shown(module: Preverifier, record: Record, places: Tensor, bases: Tensor) -> tuple[Tensor, Tensor]:
    """What a pre-verifier reads of the tokens at ``places (B, n)``: entries ``(B, n, W)`` and features ``(B, n, F)``.

    Args:
        bases: where each row's draft begins ``(B, 1)``.
    """
    index = (places - bases + 1).clamp_min(0)

    def signal(name: str) -> Tensor:
        if name != "cumulative":
            return getattr(record, name).gather(1, places)
        total = record.logprob.cumsum(1, dtype=torch.float64)
        before = (bases - 1).clamp_max(record.ids.shape[1] - 1)  # a row may be past the draft's context
        return total.gather(1, places) - total.gather(1, before)

    features = module.select(signal, index)
    states = record.produced.gather(1, places[..., None].expand(-1, -1, record.produced.shape[2]))
    return module.entries(states, record.ids.gather(1, places), index, features), features


class PreverifierRule(Controller):
    """Stop when the pre-verifier doubts the block just drawn.

    Args:
        b: block size. t0: first threshold. rho: its growth per block. gamma_max: longest draft.
        rule: how a block's estimates become one number.
        lo, hi: M_B is called for products of the block's draft probabilities in [lo, hi]; 0 and 1: for every block.
    """

    def __init__(
        self,
        module: Preverifier,
        b: int = 2,
        t0: float = 0.5,
        rho: float = 1.0,
        gamma_max: int = 16,
        rule: str = "mean",
        lo: float = 0.0,
        hi: float = 1.0,
    ) -> None:
        self.check({"b": b, "t0": t0, "rho": rho, "gamma_max": gamma_max, "rule": rule, "lo": lo, "hi": hi})
        self.module, self.lane = module, Lane(module.stack)
        self.b, self.t0, self.rho, self.gamma_max, self.rule = b, t0, rho, gamma_max, rule
        self.lo, self.hi, self.lazy = lo, hi, lo > 0 or hi < 1

    @classmethod
    def allowed(cls, given: Mapping[str, Any]) -> Mapping[str, Allowed]:
        return {
            "b": SIZE, "t0": SHARE, "rho": Range(0, open_low=True), "rule": RULES, "lo": SHARE,
            "hi": Range(given.get("lo") or 0, 1), "gamma_max": Range(given.get("b") or 1, whole=True),
        }  # fmt: skip

    @classmethod
    def needs(cls, given: Mapping[str, Any]) -> tuple[str, ...]:
        return ("preverifier",)

    @classmethod
    def build(cls, given: Mapping[str, Any], **parts: Judge) -> Self:
        """Null values are those that come with the pre-verifier; no draft is longer than it was trained on.

        Raises:
            MismatchError: as :func:`rule_for`.
        """
        module, tuned = parts["preverifier"]
        values, limit = resolved(given, tuned), module.settings.gamma_max
        values["gamma_max"] = min(values.get("gamma_max", limit), limit)
        made = cls(module, **values)
        made.rule = rule_for(module.settings.label, made.b, values.get("rule"))
        return made

    def reset(self, rows: Sequence[Row], capacity: int) -> None:
        self.lane.reset(len(rows), capacity + 1)

    def admit(self, index: int) -> None:
        self.lane.release(index)

    def prefill(self, record: Record | None, rows: Sequence[Row], read: Sequence[bool]) -> None:
        if self.module.sees_prefix:
            assert record is not None
            ends = [len(row.committed) if was_read else 0 for row, was_read in zip(rows, read, strict=True)]
            self.read(record, ends, [len(row.committed) for row in rows])

    def block(self, drawn: int) -> int:
        return min(self.b, self.gamma_max - drawn)

    def judge(self, record: Record | None, rows: Sequence[Row], drawn: int, open_rows: Sequence[bool]) -> Verdicts:
        if not self.lazy:
            return self.ask(record, rows, drawn, open_rows)
        assert record is not None
        logprob = record.drawn("logprob", rows, drawn - self._fresh(drawn), drawn)
        product = logprob.sum(1).exp()
        verdicts = torch.where(product < self.lo, STOP, torch.where(product > self.hi, GO, ASK))
        return verdicts, torch.full_like(logprob, torch.nan)

    def ask(self, record: Record | None, rows: Sequence[Row], drawn: int, asked: Sequence[bool]) -> Verdicts:
        assert record is not None
        bases, fresh = [len(row.committed) for row in rows], self._fresh(drawn)
        ends = [base + drawn if is_asked else 0 for base, is_asked in zip(bases, asked, strict=True)]
        scores = self.read(record, ends, bases)[:, -fresh:]
        return block_value(scores, self.rule) >= self.t0 * self.rho ** ((drawn - fresh) // self.b), scores

    def end(self, committed: Sequence[int]) -> None:
        # what was drafted carries draft indices; accepted tokens come again with index 0
        self.lane.truncate(committed if self.module.sees_prefix else [0] * len(committed))

    def _fresh(self, drawn: int) -> int:
        """Tokens of the block just drawn; the last of a draft may be short."""
        return (drawn - 1) % self.b + 1

    def read(self, record: Record, ends: Sequence[int], bases: Sequence[int]) -> Tensor:
        """Feed each row's entries up to place ``ends`` (exclusive); returns estimates, right-aligned ``(B, n)``."""
        module = self.module
        origin = [0] * len(bases) if module.sees_prefix else bases  # the place of the memory's first entry
        have = [first + length for first, length in zip(origin, self.lane.lengths, strict=True)]
        counts = [max(0, end - start) for end, start in zip(ends, have, strict=True)]
        n = max(counts)
        device = record.ids.device
        table = torch.tensor([have, list(bases), counts], device=device)
        places = (table[0, :, None] + torch.arange(n, device=device)).clamp_max(record.ids.shape[1] - 1)
        entries, features = shown(module, record, places, table[1, :, None])
        hidden = self.lane.feed(entries, counts)
        scores = module.logits(hidden, features).float().sigmoid()
        if min(counts) == n:
            return scores
        shift = (torch.arange(n, device=device)[None] - (n - table[2, :, None])) % n  # right-align ragged rows
        return scores.gather(1, shift)
