"""SVIP: stop where the draft's entropy says that the target may not accept (arXiv 2411.18462).

The acceptance of a token is at least 1 − sqrt(KL/2), and the draft's entropy H stands in for what is not known of KL:
the draft ends where sqrt(scale·H) exceeds h. It is a threshold on the entropy (H > h²/scale), in the paper's terms.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pacer.decoding.controllers.base import Controller, Verdicts
from pacer.decoding.parts import SIZE, Range, allows
from pacer.decoding.request import Row

if TYPE_CHECKING:
    from pacer.decoding.record import Record


@allows(h=Range(0), scale=Range(0, open_low=True), gamma_max=SIZE)
@dataclass
class Svip(Controller):
    """Go on while ``sqrt(scale·H)`` of the token just drawn is at most ``h``; H at temperature 1, in nats."""

    h: float = 0.3
    scale: float = 0.15
    gamma_max: int = 40

    def judge(self, record: Record | None, rows: Sequence[Row], drawn: int, open_rows: Sequence[bool]) -> Verdicts:
        assert record is not None
        bound = (self.scale * record.drawn("entropy", rows, drawn - 1, drawn)).sqrt()
        return bound.squeeze(1) <= self.h, bound
