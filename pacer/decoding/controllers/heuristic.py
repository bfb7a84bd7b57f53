"""transformers' heuristic schedule: two tokens more after full acceptance, else one fewer, but at least one.

As `AssistedCandidateGenerator.update_candidate_strategy` of transformers 5.24 does it with ``heuristic_transient``;
with ``warm`` the number goes on from request to request, as with ``heuristic``. transformers has no longest draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pacer.decoding.controllers.online import Online
from pacer.decoding.parts import SIZE, SWITCH, allows
from pacer.decoding.request import Row

if TYPE_CHECKING:
    from pacer.decoding.record import Record


@allows(start=SIZE, gamma_max=SIZE, warm=SWITCH)
@dataclass
class Heuristic(Online[int]):
    """Draft as many tokens as the request's last round suggests.

    Args:
        start: tokens of a request's first draft. gamma_max: longest draft.
    """

    start: int = 5
    gamma_max: int = 64
    warm: bool = False

    reads_record = False

    def fresh(self) -> int:
        return self.start

    def limits(self, rows: Sequence[Row]) -> Sequence[int]:
        return [min(length, self.gamma_max) for length in self.states]

    def block(self, drawn: int) -> int:
        return self.gamma_max - drawn

    def learn(
        self, record: Record | None, committed: Sequence[int], drawn: Sequence[int], accepted: Sequence[int]
    ) -> None:
        for i, (n, m) in enumerate(zip(drawn, accepted, strict=True)):
            if n > 0:
                self.states[i] = self.states[i] + 2 if m == n else max(1, self.states[i] - 1)
