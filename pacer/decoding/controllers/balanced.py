"""The window of a draft that is written beside the target: as many tokens as it draws during one target pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pacer.decoding.controllers.base import Controller
from pacer.decoding.parts import Range, allows


@allows(gamma=Range(2, whole=True))  # of a chunk of one token nothing is ever gained
@dataclass
class Balanced(Controller):
    """``gamma`` tokens; None: round(1/c), c measured while both run (arXiv 2408.11850)."""

    gamma: int | None = None

    reads_record = False
    stop = full = "balanced"

    def __post_init__(self) -> None:
        if self.gamma is not None:
            self.check({"gamma": self.gamma})

    @classmethod
    def needs(cls, given: Mapping[str, Any]) -> tuple[str, ...]:
        return ("worker",)
