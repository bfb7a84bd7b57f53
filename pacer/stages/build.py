"""Models for methods; what they lack is built first."""

from __future__ import annotations

from collections.abc import Sequence

from pacer.assemble import Models, attach_head, attach_preverifier, load_draft_model, load_target
from pacer.choices import DRAFTERS, HEADS
from pacer.decoding.drafters.base import drafter_class
from pacer.methods.exits import EXIT_DRAFTERS
from pacer.methods.feature import FEATURE_DRAFTER
from pacer.methods.rules import needed_by
from pacer.settings import MethodSettings, Settings
from pacer.stages.draft import draft_checkpoint, draft_key
from pacer.stages.exits import attach_exits
from pacer.stages.feature import attach_feature
from pacer.stages.preverifier import preverifier_checkpoint


def build(settings: Settings, methods: Sequence[MethodSettings], *, full_head: bool = False) -> Models:
    """Models for these methods; what is missing is built first, and said.

    Args:
        full_head: also load the draft with the whole vocabulary's head.
    """
    models = _built(settings, methods, full_head).pack()
    if any("prices" in needed_by(method.controller) for method in methods):
        from pacer.stages.prices import attach_prices

        attach_prices(settings, models, methods)
    return models


def _built(settings: Settings, methods: Sequence[MethodSettings], full_head: bool) -> Models:
    models = load_target(settings.model, settings.paths.cache_folder)
    attach_exits(settings, models, methods)
    attach_feature(settings, models, methods)
    drafters = {method.drafter for method in methods if drafts_with_a_model(method)}
    if not drafters and not full_head:
        return models
    folder = draft_checkpoint(settings) if settings.model.draft.kind == "layers" else None
    models.draft = load_draft_model(settings.model, models, settings.paths.cache_folder, folder)
    if full_head or "model_full" in drafters:
        models.draft_full = models.draft
        if models.draft.head_ids is not None:
            cache = settings.paths.cache_folder
            models.draft_full = load_draft_model(settings.model, models, cache, folder, full_head=True)
    if any("preverifier" in needed_by(method.controller) for method in methods if drafts_with_a_model(method)):
        attach_preverifier(models, preverifier_checkpoint(settings, models, draft_key(settings, folder)))
    for name in HEADS:
        if any(name in needed_by(method.controller) for method in methods if drafts_with_a_model(method)):
            key = draft_key(settings, folder)
            attach_head(models, name, preverifier_checkpoint(settings, models, key, name))
    return models


def drafts_with_a_model(method: MethodSettings) -> bool:
    """Whether a method needs the draft model."""
    if method.drafter in (None, FEATURE_DRAFTER, *EXIT_DRAFTERS):
        return False
    return method.drafter in DRAFTERS or "draft" in drafter_class(method.drafter).needs(method.drafting or {})
