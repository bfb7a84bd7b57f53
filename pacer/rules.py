"""From a method's settings to the rules that end drafts and buffers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pacer.arms import controllers, resolved
from pacer.decoding.controllers.base import Controller
from pacer.decoding.controllers.fixed import Fixed
from pacer.decoding.controllers.preverifier import PreverifierRule
from pacer.decoding.controllers.threshold import Threshold
from pacer.errors import ConfigError, UnsupportedError
from pacer.models.preverifier import Preverifier

Judge = tuple[Preverifier, Mapping[str, Any] | None]  # a pre-verifier, and the rule's values that come with it


def draft_rule(name: str, controller: Mapping[str, Any] | None, judge: Judge | None) -> Controller | None:
    """The controller a method names, None for none; null values of a pre-verifier's rule are those that come with it.

    Args:
        name: the method's, for errors.

    Raises:
        ConfigError: an unknown kind. UnsupportedError: a pre-verifier is wanted and there is none.
    """
    values = dict(controller or {})
    kind = values.pop("kind", "none")
    if kind == "none":
        return None
    if kind == "fixed":
        return Fixed(**values)
    if kind == "threshold":
        return Threshold(**values)
    if kind == "confidence":  # how sure an exit must be is the drafter's affair
        return Fixed(values["gamma_max"])
    if kind != "preverifier":
        raise ConfigError("unknown controller.kind", value=kind, allowed=sorted(controllers()))
    return preverifier_rule(name, values, judge)


def preverifier_rule(name: str, values: Mapping[str, Any], judge: Judge | None) -> PreverifierRule:
    """PACER's rule with these values; arguments and errors as :func:`draft_rule`."""
    if judge is None:
        raise UnsupportedError(f"method {name} needs a pre-verifier", remedy="train one: python -m pacer.train …")
    module, tuned = judge
    chosen = resolved(values, tuned)
    limit = module.settings.gamma_max  # longer drafts were never trained on
    chosen["gamma_max"] = min(chosen.get("gamma_max", limit), limit)
    return PreverifierRule(module, **chosen)
