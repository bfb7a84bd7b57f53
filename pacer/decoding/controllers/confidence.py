"""Drafts of several exits end where none is sure; how sure one must be is the drafter's affair."""

from __future__ import annotations

from dataclasses import dataclass

from pacer.decoding.controllers.base import Controller
from pacer.decoding.parts import SHARE, SIZE, allows


@allows(t=SHARE, gamma_max=SIZE)
@dataclass
class Confidence(Controller):
    """Draft up to ``gamma_max`` tokens; an exit is sure when its likeliest token has at least probability ``t``."""

    t: float = 0.8
    gamma_max: int = 8

    reads_record = False
    stop = full = "fixed"

    def block(self, drawn: int) -> int:
        return self.gamma_max - drawn
