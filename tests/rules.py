"""Every length rule there is, on toy models: what each is given beside its values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pacer.choices import HEADS
from pacer.decoding.controllers.base import Controller, controller_class
from pacer.methods.arms import defaults
from pacer.methods.rules import draft_rule, needed_by
from pacer.models.stack import Stack
from tests.tiny import make_preverifier

BESIDE = ("worker",)  # a rule that needs it is none of the loop's: it paces a draft that is written beside the target
KINDS = sorted(k for k in defaults() if k != "none" and not set(needed_by({"kind": k})) & set(BESIDE))
CHEAP = [1 + 0.12 * n for n in range(65)]  # rounds of a draft that is nearly free


def parts(draft: Stack, rounds: Sequence[float] = CHEAP) -> dict[str, Any]:
    """What rules may need (`pacer.methods.rules.PARTS`), untrained; a table model's norm knows no state of zeros."""
    made: dict[str, Any] = {"gamma_max": 12, "state": "before_norm"}
    found: dict[str, Any] = {"draft": draft, "prices": rounds, "preverifier": (make_preverifier(draft, **made), None)}
    for name in HEADS:
        learnt = controller_class(name).labels[0]  # type: ignore[attr-defined]  # rules of acceptance heads say it
        found[name] = (make_preverifier(draft, attention="none", label=learnt, **made), None)
    return found


def rule(kind: str, draft: Stack, rounds: Sequence[float] = CHEAP, **values: Any) -> Controller:
    """A rule of a kind as a method would get it: the file's values, some of them replaced."""
    file = defaults()[kind]
    assert set(values) <= set(file), f"{kind} has no {set(values) - set(file)}"
    made = draft_rule(kind, {"kind": kind, **file, **values}, parts(draft, rounds))
    assert made is not None
    return made
