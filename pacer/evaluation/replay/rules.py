"""Controllers as pure functions of the table: how many tokens each would draw at every start, and when it asks.

They are the rules of `pacer.decoding.controllers`, on all starts at once. A rule knows the draft up to the place where
the table's signals end; one that would go on there is ended there, and counted (`Plan.open`).

Shapes: N starts, g places.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pacer.decoding.controllers.base import Controller
from pacer.decoding.controllers.preverifier import rule_for
from pacer.decoding.parts import resolved
from pacer.errors import ConfigError, UnsupportedError
from pacer.evaluation.replay.table import Bools, Ints, Table
from pacer.methods.arms import is_reference, method_settings
from pacer.methods.rules import draft_rule, needed_by
from pacer.settings import MethodSettings

Values = NDArray[Any]
BLOCK_VALUES: dict[str, Callable[[Values], Values]] = {
    "mean": lambda block: np.asarray(block.mean(1)),
    "min": lambda block: np.asarray(block.min(1)),
    "product": lambda block: np.asarray(block.prod(1)),
}
ORACLE = "oracle"


@dataclass(frozen=True)
class Plan:
    """``drawn (N,)``: tokens drawn, those after a stop id in the last block included. ``asked (N, g)``: whether the
    pre-verifier was called after so many tokens (None: never). ``open (N,)``: the table ends before the rule does.
    ``looks``: the rule looks at the draft's signals, which are then made for every drawn token."""

    drawn: Ints
    asked: Bools | None
    open: Bools
    looks: bool = True


Rule = Callable[[Table], Plan]


def fixed(table: Table, gamma: int) -> Plan:
    """Always γ; a stop id inside is not looked at before the verifier does."""
    return Plan(np.minimum(gamma, table.room), None, np.zeros(len(table.room), bool), looks=False)


def oracle(table: Table, gamma: int | None = None) -> Plan:
    """Exactly what will be accepted, up to γ: over all γ the upper bound of every length rule over this draft."""
    limit = table.room if gamma is None else np.minimum(gamma, table.room)
    return Plan(np.minimum(table.run, limit), None, np.zeros(len(table.room), bool), looks=False)


def signal(table: Table, name: str) -> Values:
    """A signal by its name ``(N, g)``: probability | product | entropy | margin | index | match | score.

    Raises:
        UnsupportedError: the table lacks it.
    """
    if name == "probability":
        return np.exp(table.signals["logprob"])
    if name == "product":
        return np.exp(np.cumsum(table.signals["logprob"], 1))
    if name == "index":
        return np.broadcast_to(np.arange(1, table.width + 1, dtype=np.float32), table.signals["logprob"].shape)
    if name not in table.signals:
        raise UnsupportedError(
            f"the table has no signal {name}", allowed=("probability", "product", "index", *table.signals)
        )
    return table.signals[name]


def threshold(table: Table, name: str, t: float, rule: str = "last", gamma_max: int | None = None) -> Plan:
    """Go on while the signal of the last token (``last``) or the product of all probabilities (``product``) is ≥ t;
    entropy: while it is ≤ t. Asked after every token; a stop id ends the draft."""
    values = signal(table, "product" if rule == "product" else name)
    going = values <= t if name == "entropy" else values >= t
    place = np.arange(table.width)
    going = going & (place < table.counts[:, None] - 1)  # NaN is not ≥ t: the draft ends where the signals do
    leading = np.where(going.all(1), table.width, going.argmin(1))
    limit = np.minimum(table.room, table.width if gamma_max is None else gamma_max)
    reach = np.minimum(table.reach, table.counts)
    drawn = np.minimum(np.minimum(leading + 1, limit), table.reach)
    return Plan(drawn, None, (leading >= reach) & (reach < np.minimum(limit, table.counts)))


def blockwise(
    scores: Values, counts: Ints, b: int, t0: float, rho: float, limit: Ints, rule: str = "mean",
    logprob: Values | None = None, lo: float = 0.0, hi: float = 1.0,
) -> tuple[Ints, Bools]:  # fmt: skip
    """PACER's rule: drawn tokens ``(N,)`` and after which of them the pre-verifier is called ``(N, g)``.

    As in decoding: no call once the limit is reached; a block with a stop id ends the draft whatever the answer, which
    only the lazy rule knows before it asks.

    Args:
        scores: the pre-verifier's estimates ``(N, g)``. counts: tokens to a stop id.
        limit: the longest draft of each start.
        logprob: the draft's own ``(N, g)``; lazy pre-verification asks only where the product of the block's
            probabilities is in [lo, hi]: below, the draft ends; above, it goes on.
    """
    starts, width = scores.shape
    drawn = np.zeros(starts, dtype=np.int64)
    asked = np.zeros((starts, width), dtype=bool)
    going = limit > 0
    for k, start in enumerate(range(0, width, b)):
        drawn = np.where(going, np.minimum(start + b, limit), drawn)
        end = start + b
        going = going & (end < limit)
        if end > width or not going.any():
            break
        well = BLOCK_VALUES[rule](scores[:, start:end]) >= t0 * rho**k
        ask = going
        if logprob is not None and (lo > 0 or hi < 1):
            sure = np.exp(logprob[:, start:end].sum(1))
            ask = going & (sure >= lo) & (sure <= hi) & (end < counts)
            well = np.where(ask, well, sure > hi)
        asked[:, end - 1] = ask
        going = going & well & (end < counts)
    return drawn, asked


def preverified(
    table: Table, b: int, t0: float, rho: float = 1.0, gamma_max: int | None = None, rule: str | None = None,
    lo: float = 0.0, hi: float = 1.0,
) -> Plan:  # fmt: skip
    """PACER's rule on a table with the pre-verifier's estimates; no draft is longer than it was trained on."""
    if not table.score_width:
        raise UnsupportedError("the table has no pre-verifier's estimates", remedy="replay with a pre-verifier")
    rule = rule_for(table.label, b, rule)
    limit = np.minimum(table.room, min(table.width, _longest(table, gamma_max)))
    known = np.isfinite(table.signals["score"])
    scores = np.where(known, table.signals["score"], 0.0)
    drawn, asked = blockwise(scores, table.counts, b, t0, rho, limit, rule, table.signals["logprob"], lo, hi)
    # a block that reaches past the known signals was judged on too little
    last = np.minimum(drawn, table.counts) - 1
    judged = (last >= 0) & (drawn < limit)
    beyond = judged & ~np.take_along_axis(known, last.clip(min=0)[:, None], 1)[:, 0]
    return Plan(drawn, asked, beyond)


def _longest(table: Table, gamma_max: int | None) -> int:
    """As in decoding: the longest draft that is asked for, and that the pre-verifier was trained on."""
    return table.score_width if gamma_max is None else min(table.score_width, gamma_max)


def rule_of(arm: str, tuned: Mapping[str, Any] | None = None, rounds: Sequence[float] | None = None) -> Rule:
    """The rule of an arm as `pacer.evaluate` names it (``sd gamma=4``), or ``oracle [gamma=N]``.

    Args:
        rounds: what rounds with a draft of 0, 1, … tokens take, for a rule that decides by it.

    Raises:
        UnsupportedError: an arm that is not a length rule over this draft; with the reason.
    """
    if arm.split()[:1] == [ORACLE]:
        key, _, gamma = arm.removeprefix(ORACLE).strip().partition("=")
        if key not in ("", "gamma") or (key and not gamma.isdigit()):
            raise ConfigError(f"cannot read arm {arm!r}", allowed="oracle, or oracle gamma=N")
        return functools.partial(oracle, gamma=int(gamma) if key else None)
    if is_reference(arm):
        raise UnsupportedError(f"arm {arm!r} cannot be replayed: transformers decodes it, not this loop")
    method = method_settings(arm)
    if method.drafter not in (None, "model"):
        raise UnsupportedError(f"arm {arm!r} cannot be replayed: it drafts with {method.drafter}, the table with model")
    controller = method.controller or {"kind": "fixed", "gamma": 0}
    values = resolved(controller, tuned)
    kind = controller["kind"]
    if kind == "fixed":
        return lambda table: fixed(table, _within(table, values["gamma"], arm))
    if kind == "threshold":
        name, t, how, top = (values[key] for key in ("signal", "t", "rule", "gamma_max"))
        return lambda table: threshold(table, name, t, how, _within(table, top, arm))
    if kind == "svip":
        entropy, top = values["h"] ** 2 / values["scale"], values["gamma_max"]
        return lambda table: threshold(table, "entropy", entropy, gamma_max=_within(table, top, arm))
    if kind == "preverifier":
        if "b" not in values or "t0" not in values:
            raise ConfigError(f"arm {arm!r} leaves b or t0 to the checkpoint, which has none", remedy="name them")
        top = values.pop("gamma_max", None)
        return lambda table: preverified(table, gamma_max=_within(table, _longest(table, top), arm), **values)
    return _followed(method, rounds)


def _followed(method: MethodSettings, rounds: Sequence[float] | None) -> Rule:
    """Any other rule, led through the texts; it may need nothing that a table has not."""
    from pacer.evaluation.replay.follow import follow

    arm, controller = method.name, method.controller or {}
    needs = needed_by(controller)
    if set(needs) - {"prices"}:
        what = f"controller {controller['kind']} reads the draft's states, which the table has not"
        raise UnsupportedError(f"arm {arm!r} cannot be replayed: {what}")
    make = functools.partial(draft_rule, arm, controller, {"prices": rounds})

    def made() -> Controller:
        rule = make()
        assert rule is not None
        return rule

    longest = made().gamma_max  # what it lacks is said before any table is made
    return lambda table: follow(table, made) if _within(table, longest, arm) else fixed(table, 0)


def _within(table: Table, gamma: int, arm: str) -> int:
    if gamma > table.width:
        raise ConfigError(
            f"arm {arm!r} drafts past the table", value=gamma, allowed=f"≤ {table.width}",
            remedy=f"replay.gamma_max={gamma}",
        )  # fmt: skip
    return gamma
