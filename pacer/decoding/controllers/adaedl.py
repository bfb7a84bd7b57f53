"""AdaEDL: stop where a lower bound of the acceptance falls below a threshold that follows it (arXiv 2410.18351).

The bound is ``1 − sqrt(scale·H)``, H the draft's entropy in nats. After a round that drafted n tokens of which m were
accepted, the request's acceptance and its threshold λ move as in Draft & Verify (arXiv 2309.08168 §3.3), with the
constants of its code (beta1 0.5, alpha 0.9, epsilon 0.01, beta2 0.9):

    acceptance ← beta1·acceptance + (1 − beta1)·m/n
    λ' = λ + epsilon where the acceptance is below alpha, else λ − epsilon; λ, where only gamma_max ended the draft
    λ ← beta2·λ + (1 − beta2)·λ'

A round moves λ by at most (1 − beta2)·epsilon, so it does not flap. Where λ starts and how long a draft may be is our
choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pacer.decoding.controllers.base import Verdicts
from pacer.decoding.controllers.online import Online
from pacer.decoding.parts import SHARE, SIZE, SWITCH, Range, allows
from pacer.decoding.request import Row

if TYPE_CHECKING:
    from pacer.decoding.record import Record


@dataclass
class Follows:
    """What a request has taught: its acceptance, and λ."""

    t: float
    acceptance: float = 0.0


@allows(
    t=SHARE, scale=Range(0, open_low=True), alpha=SHARE, beta1=SHARE, epsilon=SHARE, beta2=SHARE, gamma_max=SIZE,
    warm=SWITCH,
)  # fmt: skip
@dataclass
class AdaEdl(Online[Follows]):
    """Go on while ``1 − sqrt(scale·H)`` of the token just drawn is at least λ.

    Args:
        t: λ at the start of a request. alpha: the acceptance that is aimed at. beta1, epsilon, beta2: how fast the
            acceptance and λ move.
    """

    t: float = 0.6
    scale: float = 0.2
    alpha: float = 0.9
    beta1: float = 0.5
    epsilon: float = 0.01
    beta2: float = 0.9
    gamma_max: int = 20
    warm: bool = False

    def fresh(self) -> Follows:
        return Follows(self.t)

    def judge(self, record: Record | None, rows: Sequence[Row], drawn: int, open_rows: Sequence[bool]) -> Verdicts:
        assert record is not None
        bound = 1 - (self.scale * record.drawn("entropy", rows, drawn - 1, drawn)).sqrt()
        return (bound >= bound.new_tensor([[state.t] for state in self.states])).squeeze(1), bound

    def learn(
        self, record: Record | None, committed: Sequence[int], drawn: Sequence[int], accepted: Sequence[int]
    ) -> None:
        for state, n, m in zip(self.states, drawn, accepted, strict=True):
            if n < 1:
                continue
            state.acceptance = self.beta1 * state.acceptance + (1 - self.beta1) * m / n
            low, whole = state.acceptance < self.alpha, n == self.gamma_max
            wanted = state.t + (self.epsilon if low else 0.0 if whole else -self.epsilon)
            state.t = self.beta2 * state.t + (1 - self.beta2) * wanted
