"""What SPRINTER's and SpecDec++'s rules share: an acceptance head, asked after every token.

The head reads the draft's state of each token by itself (a pre-verifier without attention), so nothing is remembered
between calls: the places of the current draft are looked at as they are.

Shapes: B rows, n drawn tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from pacer.decoding.controllers.base import Controller
from pacer.decoding.controllers.preverifier import Judge, shown
from pacer.decoding.parts import SHARE, SIZE, Allowed, Range, resolved
from pacer.decoding.record import Record
from pacer.decoding.request import Row
from pacer.errors import MismatchError
from pacer.models.preverifier import Preverifier


class HeadRule(Controller):
    """A rule over a head's estimates.

    Args:
        module: the head. t: the threshold. gamma_max: longest draft. gamma_min: shortest, which is drawn unasked.

    Attributes:
        head: the part that it needs. labels: what the head may have learnt.
    """

    head: ClassVar[str]
    labels: ClassVar[tuple[str, ...]]

    def __init__(self, module: Preverifier, t: float, gamma_max: int = 20, gamma_min: int = 1) -> None:
        self.check({"t": t, "gamma_max": gamma_max, "gamma_min": gamma_min})
        self.module, self.t, self.gamma_max, self.gamma_min = module, t, gamma_max, gamma_min

    @classmethod
    def allowed(cls, given: Mapping[str, Any]) -> Mapping[str, Allowed]:
        return {"t": SHARE, "gamma_min": SIZE, "gamma_max": Range(given.get("gamma_min") or 1, whole=True)}

    @classmethod
    def needs(cls, given: Mapping[str, Any]) -> tuple[str, ...]:
        return (cls.head,)

    @classmethod
    def build(cls, given: Mapping[str, Any], **parts: Judge) -> Self:
        """The rule over a trained head.

        Raises:
            MismatchError: a pre-verifier that attends to other tokens, or one that has learnt other labels.
        """
        module, _ = parts[cls.head]
        remedy = f"train one: python -m pacer.train trainer={cls.head} …"
        for what, value, allowed in (
            ("attention", module.settings.attention, ("none",)),
            ("label", module.settings.label, cls.labels),
        ):
            if value not in allowed:
                what = f"{cls.head} cannot read a head of this {what}"
                raise MismatchError(what, value=value, allowed=allowed, remedy=remedy)
        return cls(module, **resolved(given, None))

    def block(self, drawn: int) -> int:
        return min(self.gamma_min if drawn == 0 else 1, self.gamma_max - drawn)

    def fresh(self, drawn: int) -> int:
        """Tokens of the block just drawn."""
        return drawn if drawn <= self.gamma_min else 1

    def estimates(self, record: Record, rows: Sequence[Row], first: int, end: int) -> Tensor:
        """The head's estimates of tokens ``first … end − 1`` of each draft ``(B, end − first)``."""
        bases = torch.tensor([[len(row.committed)] for row in rows], device=record.ids.device)
        steps = torch.arange(first, end, device=bases.device)
        places = (bases + steps).clamp_max(record.ids.shape[1] - 1)  # of a row that has ended they may lie beyond
        entries, features = shown(self.module, record, places, bases)
        hidden = self.module.stack.run(entries, 0, self.module.stack.n_layers, places, None)
        return self.module.logits(hidden, features).float().sigmoid()
