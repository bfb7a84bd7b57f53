"""The fixed window: always γ tokens. γ = 0 never drafts and costs what plain decoding costs."""

from __future__ import annotations

from pacer.decoding.controllers.base import Controller
from pacer.decoding.parts import Range, allows


@allows(gamma=Range(0, whole=True))
class Fixed(Controller):
    """Draft ``gamma`` tokens each round."""

    reads_record = False
    stop = full = "fixed"

    def __init__(self, gamma: int = 4) -> None:
        self.check({"gamma": gamma})
        self.gamma_max = gamma

    def block(self, drawn: int) -> int:
        return self.gamma_max - drawn
