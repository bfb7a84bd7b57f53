"""The fixed window: always γ tokens. γ = 0 never drafts and costs what plain decoding costs."""

from __future__ import annotations

from pacer.decoding.controllers.base import Controller
from pacer.errors import ConfigError


class Fixed(Controller):
    """Draft ``gamma`` tokens each round."""

    reads_record = False
    stop = full = "fixed"

    def __init__(self, gamma: int = 4) -> None:
        if gamma < 0:
            raise ConfigError("gamma out of range", value=gamma, allowed="≥ 0")
        self.gamma_max = gamma

    def block(self, drawn: int) -> int:
        return self.gamma_max - drawn
