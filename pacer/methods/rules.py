"""From a method's settings to the rules that end drafts and buffers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pacer.choices import HEADS
from pacer.decoding.controllers.base import Controller, controller_class
from pacer.decoding.controllers.preverifier import Judge, PreverifierRule
from pacer.decoding.parts import Part
from pacer.errors import UnsupportedError
from pacer.settings import MethodSettings

__all__ = ["PARTS", "Judge", "draft_rule", "needed", "needed_by", "preverifier_rule", "price_key"]

PARTS = {  # what a rule or a drafter may need beside its values: what it is, and what to do where there is none
    "preverifier": ("a pre-verifier", "train one: python -m pacer.train …"),
    **{name: ("an acceptance head", f"train one: python -m pacer.train trainer={name} …") for name in HEADS},
    "worker": ("a draft beside the target", "use method=pearl"),
    "draft": ("a draft model", "set model.draft"),
    "prices": ("times of its rounds", "use a method whose drafts the target alone verifies"),
}


def draft_rule(name: str, controller: Mapping[str, Any] | None, parts: Mapping[str, Any]) -> Controller | None:
    """The controller a method names, None for none.

    Args:
        name: the method's, for errors. parts: what there is of PARTS, by name; None: it is not there.

    Raises:
        ConfigError: an unknown kind. UnsupportedError: a part is needed and there is none.
    """
    values = dict(controller or {})
    kind = values.pop("kind", "none")
    if kind == "none":
        return None
    rule = controller_class(kind)
    return rule.build(values, **needed(name, rule, values, parts))


def needed(name: str, part: type[Part], values: Mapping[str, Any], parts: Mapping[str, Any]) -> dict[str, Any]:
    """Of ``parts`` those that a rule or a drafter needs; arguments and errors as :func:`draft_rule`."""
    found = {key: parts.get(key) for key in part.needs(values)}
    for key in (key for key, value in found.items() if value is None):
        what, remedy = PARTS[key]
        raise UnsupportedError(f"method {name} needs {what}", remedy=remedy)
    return found


def needed_by(rule: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Names of the parts that a rule for drafts or buffers needs."""
    kind = (rule or {}).get("kind", "none")
    return () if kind in ("none", "enough") else controller_class(kind).needs(rule or {})


def price_key(method: MethodSettings) -> str:
    """Of two methods with one key rounds take the same time."""
    rule = method.controller or {}
    asks = [rule.get(name) for name in ("prices", "signal", "b", "gamma_max")]
    return json.dumps([method.drafter, method.exits, method.head, method.drafting, asks])


def preverifier_rule(name: str, values: Mapping[str, Any], judge: Judge | None) -> PreverifierRule:
    """PACER's rule with these values, for a buffer; arguments and errors as :func:`draft_rule`."""
    return PreverifierRule.build(values, **needed(name, PreverifierRule, values, {"preverifier": judge}))
