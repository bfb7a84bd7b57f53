"""SPRINTER's rule: draft while a linear probe on the draft's state thinks the target agrees (arXiv 2502.04557).

The method's other half, that the target then checks the last token alone, is the verifier's
(:mod:`pacer.decoding.last_only`). Under a verifier that checks every token the rule is lossless like any other.
"""

from __future__ import annotations

from collections.abc import Sequence

from pacer.decoding.controllers.base import Verdicts
from pacer.decoding.controllers.head import HeadRule
from pacer.decoding.record import Record
from pacer.decoding.request import Row


class Probe(HeadRule):
    """Go on while the estimate of the token just drawn is at least ``t``."""

    head, labels = "probe", ("certain", "conditional")

    def judge(self, record: Record | None, rows: Sequence[Row], drawn: int, open_rows: Sequence[bool]) -> Verdicts:
        assert record is not None
        scores = self.estimates(record, rows, drawn - self.fresh(drawn), drawn)
        return scores[:, -1] >= self.t, scores
