"""SpecDec++'s rule: stop when a rejection somewhere in the draft has become likely enough (arXiv 2405.19715).

The head estimates the chance of each token to be accepted, given that all before it were; so the chance that one is
rejected is 1 − Π of the estimates, and a head that has learnt anything else is refused.
"""

from __future__ import annotations

from collections.abc import Sequence

from pacer.decoding.controllers.base import Verdicts
from pacer.decoding.controllers.head import HeadRule
from pacer.decoding.record import Record
from pacer.decoding.request import Row


class SpecDecPP(HeadRule):
    """Go on while 1 − Π of the estimates of all drawn tokens is at most ``t``; at least ``gamma_min`` tokens."""

    head, labels = "specdecpp", ("conditional",)

    def judge(self, record: Record | None, rows: Sequence[Row], drawn: int, open_rows: Sequence[bool]) -> Verdicts:
        assert record is not None
        scores = self.estimates(record, rows, 0, drawn)
        return 1 - scores.prod(1) <= self.t, scores[:, -self.fresh(drawn) :]
