"""What a verb works with: methods, and the parts that these and its training need."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pacer.assemble import checkpoint_folder
from pacer.choices import HEADS
from pacer.errors import ConfigError, SourceError
from pacer.evaluation.advice import advises_on_exits, rules_over_the_draft
from pacer.methods.arms import ASSISTED_ARMS, is_reference, method_settings
from pacer.methods.exits import wanted_exits
from pacer.methods.feature import FEATURE_DRAFTER
from pacer.methods.rules import needed_by
from pacer.settings import MethodSettings, Settings
from pacer.stages.build import drafts_with_a_model

VERBS = ("advise", "evaluate", "export", "fetch", "generate", "label", "profile", "replay", "train")


@dataclass(frozen=True)
class Wanted:
    """What a verb works with: methods, a part it trains (None: none), and whether the draft's whole head is needed."""

    methods: Sequence[MethodSettings]
    part: str | None = None
    full_head: bool = False

    @property
    def draft(self) -> bool:
        """Whether there is a draft model."""
        return self.part == "draft" or self.full_head or any(map(drafts_with_a_model, self.methods))

    @property
    def feature(self) -> bool:
        """Whether there is a drafter fed by the target."""
        return self.part == "feature_draft" or any(m.drafter == FEATURE_DRAFTER for m in self.methods)

    def needs(self, name: str) -> bool:
        """Whether a rule over the draft model's tokens needs this part."""
        return any(name in needed_by(m.controller) for m in self.methods if drafts_with_a_model(m))


def wanted(settings: Settings, verb: str) -> Wanted:
    """What a verb builds.

    Raises:
        ConfigError: a verb that has no plan.
    """
    part = settings.trainer.part
    if verb == "fetch":
        return Wanted([], full_head=settings.model.draft.kind == "model")
    if verb == "evaluate":
        arms = settings.benchmark.arms
        methods = [method_settings(arm) for arm in arms if not is_reference(arm)]
        return Wanted(methods, full_head=any(arm.startswith(ASSISTED_ARMS) for arm in arms))
    if verb in ("generate", "replay"):
        return Wanted([settings.method])
    if verb == "advise":
        exits = settings.model.exits
        trained = advises_on_exits(settings) and exits.source is None and exits.kind != "shared"
        return Wanted(rules_over_the_draft(settings), "exits" if trained else None)
    if verb == "export":
        return _exported(settings)
    if verb == "label":
        return Wanted([method_settings("sd")] if part == "preverifier" else [], "labels")
    if verb == "train" and part in HEADS:
        return Wanted([MethodSettings(part, controller={"kind": part})], part)
    if verb == "train" and part != "preverifier":
        return Wanted([], part)
    if verb in ("train", "profile"):
        return Wanted([method_settings("pacer")], part if verb == "train" else None)
    raise ConfigError("this verb has no plan", value=f"{verb} dry_run=true", allowed=VERBS)


def named(what: str, source: str) -> dict[str, Any]:
    """The config of a checkpoint that is named.

    Raises:
        SourceError: there is none, or it is damaged.
    """
    file = checkpoint_folder(source) / "config.json"
    try:
        found: dict[str, Any] = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        allowed = "a checkpoint folder, or packaged:NAME"
        raise SourceError(f"no {what} checkpoint", value=source, allowed=allowed) from error
    return found


def _exported(settings: Settings) -> Wanted:
    """What is trained for `pacer.export` where it is not there."""
    part, exits = settings.export.part, settings.model.exits
    if part == "preverifier":
        return Wanted([method_settings("pacer")], part)
    if part == "exits":
        return Wanted([], None if exits.source or exits.kind == "shared" else part)
    return Wanted([], "feature_draft" if part == "feature" else part)


def exit_layers(settings: Settings, found: Wanted) -> dict[str, list[int]]:
    """Layers below each exit that has heads of its own, by kind."""
    layers = wanted_exits(found.methods, settings.model.exits)
    if found.part == "exits":
        layers[settings.model.exits.kind] = list(settings.model.exits.layers)
    return {kind: chosen for kind, chosen in layers.items() if kind != "shared"}
