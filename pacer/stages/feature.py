"""The stage that makes a drafter fed by the target, and what methods find of it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from pacer.artifacts import Stage
from pacer.assemble import Models, checkpoint_folder, load_target, needed_ids
from pacer.choices import HEADS
from pacer.data.corpus import Text
from pacer.files import sha256, stable_hash
from pacer.methods.feature import FEATURE_DRAFTER
from pacer.methods.rules import needed_by
from pacer.models.feature import load_feature
from pacer.models.feature_stack import FeatureStack
from pacer.settings import MethodSettings, Settings
from pacer.stages.exits import judge_on, trained_stage
from pacer.stages.training import command_line, trainer_key, trainer_of

log = logging.getLogger(__name__)


def attach_feature(settings: Settings, models: Models, methods: Sequence[MethodSettings]) -> None:
    """The drafter that these methods need, if any, and what their rules read its states with.

    The drafter is the one that is named, else one trained by these settings. To a pre-verifier it is a draft model.
    """
    drafting = [method for method in methods if method.drafter == FEATURE_DRAFTER]
    if not drafting:
        return
    folder = feature_checkpoint(settings, models)
    models.feature = FeatureStack(load_feature(folder, models.target))
    key = stable_hash([sha256(folder / "model.safetensors"), asdict(settings.model.target)])
    for part in ("preverifier", *HEADS):
        if any(part in needed_by(method.controller) for method in drafting):
            pair = replace(models, draft=models.feature)
            models.judges[part, FEATURE_DRAFTER] = judge_on(settings, pair, key, part)


def feature_checkpoint(settings: Settings, models: Models | None = None) -> Path:
    """The checkpoint folder of a drafter fed by the target: the one that is named, else one trained by these settings.

    Args:
        models: with the target, in the dtype that decodes; None: it is loaded.
    """
    if settings.model.feature.source is not None:
        return checkpoint_folder(settings.model.feature.source)
    from pacer.training.feature_run import train_feature  # Lightning takes seconds to import

    models = models or load_target(settings.model, settings.paths.cache_folder)
    feature, trainer = settings.model.feature, trainer_of(settings, "feature_draft")

    def train(stage: Stage, texts: Sequence[Text], held_out: Sequence[Text]) -> None:
        log.info("training a drafter fed by the target in %s", stage.folder)
        train_feature(
            models.target, texts, held_out, feature, settings.feature_draft, trainer, settings.logger, stage.folder,
            always=needed_ids(models), command=command_line(),
        )  # fmt: skip

    return trained_stage(settings, models, "feature", feature_key(settings), train) / "feature"


def feature_key(settings: Settings) -> dict[str, Any]:
    """What such a drafter is made of, beside the corpus."""

    trainer = trainer_of(settings, "feature_draft")
    return {
        "feature": asdict(settings.model.feature), "learns": asdict(settings.feature_draft),
        "dtype": settings.model.dtype, "trainer": trainer_key(trainer),
    }  # fmt: skip
