"""The stage that stores the target's predictions for the texts a draft learns from (`pacer.data.teacher`)."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from pacer.artifacts import ArtifactError, Stage
from pacer.data.corpus import Text
from pacer.data.teacher import Teacher, predict, token_bytes, write_shard
from pacer.errors import ConfigError
from pacer.files import disk_errors
from pacer.models.stack import Stack
from pacer.settings import Settings, TrainerSettings
from pacer.stages.texts import stage_of
from pacer.work.progress import progress
from pacer.work.shards import WHOLE, Shard, pieces

SUFFIX = ".safetensors"
log = logging.getLogger(__name__)


def teacher_stage(settings: Settings, trainer: TrainerSettings, corpus_key: str) -> Stage | None:
    """Where the predictions for the draft's part of the corpus go; None where training asks for none."""
    if trainer.kl_weight == 0 and trainer.prompt_labels == "text":
        return None
    key = {
        "corpus": corpus_key, "parts": settings.corpus.parts, "part": "draft", "k": trainer.teacher_top_k,
        "target": asdict(settings.model.target), "dtype": settings.model.dtype,
        "shard_size": settings.corpus.shard_size,
    }  # fmt: skip
    return stage_of(settings, "teacher", key)


def teacher_labels(stage: Stage, target: Stack, texts: Sequence[Text], shard: Shard = WHOLE) -> Teacher:
    """The stage's predictions for these texts; the shards that are missing are made first.

    Raises:
        ConfigError: k is not below the size of the vocabulary.
        ArtifactError: the disk has not the room, or fills up on the way; finished shards are kept.
    """
    if not stage.complete:
        _label(stage, target, texts, shard)
    return Teacher(sorted(stage.folder.glob(f"shard-*{SUFFIX}")))


def _label(stage: Stage, target: Stack, texts: Sequence[Text], shard: Shard) -> None:
    k, size, vocabulary = stage.key["k"], stage.key["shard_size"], target.vocab_size
    if k >= vocabulary:
        raise ConfigError("trainer.teacher_top_k", value=k, allowed=f"2 … {vocabulary - 1} for this target")
    shards, own = pieces(texts, size, shard, lambda text: text.id)
    missing = stage.missing(len(shards), SUFFIX)
    tokens = [sum(len(t.prompt_ids) + len(t.output_ids) for t in shard) for shard in shards]
    _check_room(stage.folder, sum(map(len, shards)), sum(tokens), sum(tokens[i] for i in missing), k, vocabulary)
    about = {name: stage.key[name] for name in ("target", "dtype", "k")}
    with progress(sum(tokens), "teacher", "token", initial=sum(tokens) - sum(tokens[i] for i in missing)) as bar:

        def make(index: int) -> Callable[[Path], None]:
            found = predict(target, [[*t.prompt_ids, *t.output_ids] for t in shards[index]], k)
            bar.update(tokens[index])
            return partial(
                write_shard, names=[t.id for t in shards[index]], predictions=found, vocabulary=vocabulary, about=about
            )

        extra = {"texts": len(texts), "tokens": sum(tokens), "bytes_per_token": token_bytes(k, vocabulary)}
        stage.fill(len(shards), make, suffix=SUFFIX, first=own, extra=extra)


def _check_room(folder: Path, texts: int, tokens: int, missing: int, k: int, vocabulary: int) -> None:
    """Say how much will be written, and refuse where the disk has less than what is missing."""
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    each, free = token_bytes(k, vocabulary), shutil.disk_usage(folder).free
    log.info(
        "labelling %d texts × %.0f tokens × %d bytes (k = %d) = %.1f MB, %.1f MB of it missing, in %s",
        texts, tokens / max(1, texts), each, k, tokens * each / 1e6, missing * each / 1e6, folder,
    )  # fmt: skip
    if missing * each > free:
        raise ArtifactError(
            f"the target's predictions take {missing * each / 1e6:.1f} MB in {folder}, {free / 1e6:.1f} MB are free",
            remedy="free space, point paths.runs elsewhere, or lower trainer.teacher_top_k",
        )
