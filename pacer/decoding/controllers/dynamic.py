"""transformers' dynamic drafts: a threshold on the draft's probability that is refitted after every round.

The threshold that is best so far, by the least FPR + 3·FNR over the request's tokens that the target has judged: going
on after a token that it rejects costs a quarter of stopping after one that it accepts. As transformers 5.24 does it
(`AssistedCandidateGenerator`, with scikit-learn's ``roc_curve``): same thresholds from the same rounds. A new token
weighs less the more there are, so the threshold comes to rest.

Shapes: n judged tokens, k candidate thresholds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from pacer.decoding.controllers.base import Verdicts
from pacer.decoding.controllers.online import Online
from pacer.decoding.parts import SHARE, SIZE, SWITCH, allows
from pacer.decoding.request import Row

if TYPE_CHECKING:
    from pacer.decoding.record import Record

ENOUGH = 5  # judged tokens; a fit needs more


@dataclass
class Judged:
    """A request's threshold, and its judged tokens: the draft's probability of each, and whether it was accepted."""

    t: float
    probs: list[float] = field(default_factory=list)
    kept: list[bool] = field(default_factory=list)


@allows(t=SHARE, gamma_max=SIZE, warm=SWITCH)
@dataclass
class Dynamic(Online[Judged]):
    """Go on while the probability of the token just drawn is at least the request's threshold, ``t`` at its start."""

    t: float = 0.4
    gamma_max: int = 20
    warm: bool = False

    def fresh(self) -> Judged:
        return Judged(self.t)

    def judge(self, record: Record | None, rows: Sequence[Row], drawn: int, open_rows: Sequence[bool]) -> Verdicts:
        assert record is not None
        value = record.drawn("logprob", rows, drawn - 1, drawn).exp()
        return (value >= value.new_tensor([[state.t] for state in self.states])).squeeze(1), value

    def learn(
        self, record: Record | None, committed: Sequence[int], drawn: Sequence[int], accepted: Sequence[int]
    ) -> None:
        assert record is not None
        if max(drawn) < 1:
            return
        probs = record.after("logprob", committed, 0, max(drawn)).exp().tolist()  # the round's verdict was read before
        for state, own, n, m in zip(self.states, probs, drawn, accepted, strict=True):
            if n < 1:
                continue
            judged = min(m + 1, n)
            state.probs += own[:judged]
            state.kept += [True] * m + [False] * (judged - m)
            if len(state.probs) > ENOUGH and len(set(state.kept)) > 1:
                state.t = refit(state.probs, state.kept)


def refit(probs: Sequence[float], kept: Sequence[bool]) -> float:
    """The threshold of the least FPR + 3·FNR, a token being taken where its probability is at least the threshold.

    Equal, to the last digit, to the minimum over scikit-learn's ``roc_curve(kept, probs)``: of equal costs the highest
    threshold, and only the corners of the curve are asked.

    Args:
        probs, kept: ``(n,)``, with both kinds of outcome.
    """
    order = np.argsort(np.asarray(probs), kind="stable")[::-1]
    values, taken = np.asarray(probs)[order], np.asarray(kept, dtype=np.float64)[order]
    last = np.r_[np.nonzero(np.diff(values))[0], len(values) - 1]  # of the tokens with one value
    values, true = values[last], np.cumsum(taken)[last]
    false = 1 + last - true
    if len(true) > 2:
        corner = np.r_[True, np.logical_or(np.diff(false, 2), np.diff(true, 2)), True]
        values, true, false = values[corner], true[corner], false[corner]
    costs = false / false[-1] + 3 * (1 - true / true[-1])
    return float(values[np.argmin(costs)])
