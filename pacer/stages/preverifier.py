"""The stage that makes a pre-verifier, or an acceptance head, of a draft."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from pacer.artifacts import Stage
from pacer.assemble import Models, checkpoint_folder
from pacer.choices import HEADS
from pacer.settings import Settings
from pacer.stages.texts import labels, stage_of
from pacer.stages.training import command_line, train_once, trainer_key, trainer_of

log = logging.getLogger(__name__)


def preverifier_checkpoint(settings: Settings, models: Models, draft_key: str, part: str = "preverifier") -> Path:
    """The pre-verifier's checkpoint folder: the one that is named, else one trained by these settings.

    Args:
        part: or the section of the settings with an acceptance head (`pacer.choices.HEADS`).
    """
    settings = replace(settings, preverifier=getattr(settings, part))
    if settings.preverifier.source is not None:
        return checkpoint_folder(settings.preverifier.source)
    from pacer.training.preverifier_run import train_preverifier  # Lightning takes seconds to import

    pairs, labels_key = labels(settings, models, "preverifier", draft_key)
    held_out, held_out_key = labels(settings, models, "tuning", draft_key)
    settings = replace(settings, trainer=trainer_of(settings, part))
    stage = preverifier_stage(settings, [labels_key, held_out_key], part)

    def train() -> None:
        what = f"the head {part}" if part in HEADS else "the pre-verifier"
        log.info("training %s on %d texts in %s", what, len(pairs), stage.folder)
        train_preverifier(models, pairs, held_out, settings, stage.folder, command=command_line())

    train_once(stage, train)
    return stage.folder / "preverifier"


def preverifier_stage(settings: Settings, labels_keys: Sequence[str], part: str) -> Stage:
    """Where a pre-verifier or an acceptance head goes; the settings' ``preverifier`` and ``trainer`` are its own.

    Args:
        labels_keys: of what it learns from, and of what it is judged on.
    """
    key = {
        "labels": list(labels_keys), "preverifier": asdict(settings.preverifier),
        "trainer": {**trainer_key(settings.trainer), "cache_states": None}, "costs": asdict(settings.costs),
        "tail": settings.labels.tail,
    }  # fmt: skip
    return stage_of(settings, part, key)
