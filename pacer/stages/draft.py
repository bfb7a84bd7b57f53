"""The stage that makes a draft of the target's layers."""

from __future__ import annotations

import logging
from dataclasses import asdict
from pathlib import Path

from pacer.artifacts import Stage, stable_hash
from pacer.assemble import checkpoint_folder, checkpoint_hash, load_target, needed_ids
from pacer.data.corpus import split_texts
from pacer.files import sha256
from pacer.settings import Settings
from pacer.stages.teacher import teacher_labels, teacher_stage
from pacer.stages.texts import corpus, stage_of
from pacer.stages.training import command_line, train_once, trainer_key, trainer_of
from pacer.work.shards import shard_of

log = logging.getLogger(__name__)


def draft_checkpoint(settings: Settings) -> Path:
    """The draft's checkpoint folder: the one that is named, else one trained by these settings."""
    if settings.model.draft.source is not None:
        return checkpoint_folder(settings.model.draft.source)
    from pacer.training.draft_run import train_draft  # Lightning takes seconds to import

    models = load_target(settings.model, settings.paths.cache_folder)  # in the dtype that decodes: it writes the corpus
    texts, corpus_key = corpus(settings, models)
    stage, labelled = draft_stage(settings, corpus_key)
    trainer = trainer_of(settings, "draft")

    def train() -> None:
        parts = split_texts(texts, settings.corpus.parts)
        own, shard = parts.get("draft", []), shard_of(settings.shard)
        teacher = teacher_labels(labelled, models.target, own, shard) if labelled else None
        log.info("training a draft of layers %s in %s", settings.model.draft.layers, stage.folder)
        masters = load_target(settings.model, settings.paths.cache_folder, dtype="float32")
        train_draft(
            masters.target, own, parts.get("tuning", []), settings.model.draft, trainer, settings.logger, stage.folder,
            always=needed_ids(models), command=command_line(), teacher=teacher,
        )  # fmt: skip

    train_once(stage, train)
    return stage.folder / "draft"


def draft_stage(settings: Settings, corpus_key: str) -> tuple[Stage, Stage | None]:
    """Where a draft of the target's layers goes, and the target's predictions that it learns from, if any."""
    trainer = trainer_of(settings, "draft")
    made_of = {name: getattr(settings.model.draft, name) for name in ("layers", "head_size", "copying")}
    labelled = teacher_stage(settings, trainer, corpus_key)
    start = {"start_from": checkpoint_hash(trainer.start_from) if trainer.start_from else None, "teacher_top_k": None}
    key = {
        "corpus": corpus_key, "parts": settings.corpus.parts, "draft": made_of,
        "target": asdict(settings.model.target), "trainer": {**trainer_key(trainer), **start},
        "teacher": labelled.hash if labelled else None,
    }  # fmt: skip
    return stage_of(settings, "draft", key), labelled


def draft_key(settings: Settings, folder: Path | None) -> str:
    """A hash of all that decides what the draft says, and of the target that it is made of or checked against.

    Args:
        folder: the draft's checkpoint, whose weights then stand for ``model.draft.source``.
    """
    draft = asdict(settings.model.draft)
    weights = sha256(folder / "model.safetensors") if folder else None
    return stable_hash({
        "weights": weights, "draft": {**draft, "source": None} if folder else draft,
        "target": asdict(settings.model.target), "dtype": settings.model.dtype,
    })  # fmt: skip
