"""A threshold on what the draft says of its own token: no second model, one number per drawn token.

The rule of many papers with their own signal: the token's probability (transformers stops below 0.4), the entropy of
its distribution (SVIP, arXiv 2411.18462: sqrt(0.15·H) > 0.3 is H > 0.6), the product of the probabilities so far.
In sampling too, signals are those of the draft's distribution at temperature 1, before top-k and top-p. That the
drawn token's own value decides is allowed: the decision is about the next draw, the token stays.

Shapes: B rows, n drawn tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pacer.choices import CONTROLLER_CHOICES
from pacer.decoding.controllers.base import Controller, Verdicts
from pacer.decoding.record import Record
from pacer.decoding.request import Row
from pacer.errors import ConfigError

SIGNALS, RULES = (CONTROLLER_CHOICES["threshold", key] for key in ("signal", "rule"))


class Threshold(Controller):
    """Go on while the signal of the token just drawn is at least ``t``; for entropy, at most.

    Args:
        signal: probability; entropy in nats; margin: log-probability of the best id minus that of the second; match:
            length of the context's n-gram that the token continues, whether or not the draft copies.
        rule: last: of the token just drawn; product: of the draft's probabilities so far.
        t: the threshold. gamma_max: longest draft.
    """

    reads_record = True
    stop, full = "controller", "gamma_max"

    def __init__(self, signal: str = "probability", rule: str = "last", t: float = 0.4, gamma_max: int = 16) -> None:
        rules = RULES if signal == "probability" else RULES[:1]
        most = 1 if signal == "probability" else float("inf")
        for name, value, ok, allowed in (
            ("signal", signal, signal in SIGNALS, ", ".join(SIGNALS)),
            ("rule", rule, rule in rules, f"{', '.join(rules)} for signal {signal}"),
            ("t", t, 0 <= t <= most, "in [0, 1]" if most == 1 else f"≥ 0 for signal {signal}"),
            ("gamma_max", gamma_max, gamma_max >= 1, "≥ 1"),
        ):
            if not ok:
                raise ConfigError(f"controller.{name} out of range", value=value, allowed=allowed)
        self.signal, self.rule, self.t, self.gamma_max = signal, rule, t, gamma_max

    def block(self, drawn: int) -> int:
        return min(1, self.gamma_max - drawn)

    def judge(self, record: Record | None, rows: Sequence[Row], drawn: int, open_rows: Sequence[bool]) -> Verdicts:
        assert record is not None
        first, end = 0 if self.rule == "product" else drawn - 1, record.ids.shape[1]
        starts = [len(row.committed) for row in rows]
        places = torch.tensor(  # of a row that has ended they may lie beyond the record
            [[min(start + i, end - 1) for i in range(first, drawn)] for start in starts], device=record.ids.device
        )
        value = self._value(record, places)
        return value <= self.t if self.signal == "entropy" else value >= self.t, value[:, None]

    def _value(self, record: Record, places: Tensor) -> Tensor:
        """The number that is compared with t: signals at ``places (B, n)`` → ``(B,)``."""
        if self.signal == "probability":
            return record.logprob.gather(1, places).sum(1).exp()
        table: Tensor = getattr(record, self.signal)
        return table.gather(1, places).squeeze(1).float()
