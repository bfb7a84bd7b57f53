"""A threshold on what the draft says of its own token: no second model, one number per drawn token.

The rule of many papers with their own signal: the token's probability (transformers stops below 0.4), the entropy of
its distribution (SVIP, arXiv 2411.18462: sqrt(0.15·H) > 0.3 is H > 0.6), the product of the probabilities so far.
In sampling too, signals are those of the draft's distribution at temperature 1, before top-k and top-p. That the
drawn token's own value decides is allowed: the decision is about the next draw, the token stays.

Shapes: B rows, n drawn tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pacer.decoding.controllers.base import Controller, Verdicts
from pacer.decoding.parts import SHARE, SIZE, Allowed, Range
from pacer.decoding.request import Row

if TYPE_CHECKING:
    from torch import Tensor

    from pacer.decoding.record import Record

SIGNALS, RULES = ("probability", "entropy", "margin", "match"), ("last", "product")


@dataclass
class Threshold(Controller):
    """Go on while the signal of the token just drawn is at least ``t``; for entropy, at most.

    Args:
        signal: probability; entropy in nats; margin: log-probability of the best id minus that of the second; match:
            length of the context's n-gram that the token continues, whether or not the draft copies.
        rule: last: of the token just drawn; product: of the draft's probabilities so far.
        t: the threshold. gamma_max: longest draft.
    """

    signal: str = "probability"
    rule: str = "last"
    t: float = 0.4
    gamma_max: int = 16

    @classmethod
    def allowed(cls, given: Mapping[str, Any]) -> Mapping[str, Allowed]:
        probable = given.get("signal", "probability") == "probability"  # only probabilities have a product
        rules, t = (RULES, SHARE) if probable else (RULES[:1], Range(0))
        return {"signal": SIGNALS, "rule": rules, "t": t, "gamma_max": SIZE}

    def judge(self, record: Record | None, rows: Sequence[Row], drawn: int, open_rows: Sequence[bool]) -> Verdicts:
        assert record is not None
        value = self._value(record, rows, drawn)
        return value <= self.t if self.signal == "entropy" else value >= self.t, value[:, None]

    def _value(self, record: Record, rows: Sequence[Row], drawn: int) -> Tensor:
        """The number that is compared with t ``(B,)``."""
        if self.signal == "probability":
            return record.drawn("logprob", rows, 0 if self.rule == "product" else drawn - 1, drawn).sum(1).exp()
        return record.drawn(self.signal, rows, drawn - 1, drawn).squeeze(1).float()
