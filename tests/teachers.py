"""What tests of a target's stored predictions share: settings, their stage, a trainer, how often a draft agrees."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from pacer.artifacts import Stage
from pacer.data.batching import token_batches
from pacer.data.corpus import Text
from pacer.data.teacher import Predictions, predict
from pacer.models.draft import TrainableDraft
from pacer.settings import DraftSettings, ModelSettings, PathSettings, Settings, TrainerSettings
from pacer.stages.teacher import teacher_stage
from pacer.training.distill import DistillModule, collate_texts
from pacer.training.losses import IGNORE
from tests.texts import path, target
from tests.tiny import VOCAB

K = 5
LAYERS = DraftSettings(layers=[0, 1], head_size=60, copying=False)


def settings(runs: Path, shard_size: int = 3, **trainer: Any) -> Settings:
    found = Settings(
        model=ModelSettings("tiny"), trainer=TrainerSettings(part="draft", **{"kl_weight": 0.5, **trainer}),
        paths=PathSettings(str(runs), str(runs)),
    )  # fmt: skip
    found.model.target.id, found.corpus.shard_size = "tiny", shard_size
    return found


def make_stage(runs: Path, corpus_key: str = "corpus", **changes: Any) -> Stage:
    chosen = settings(runs, teacher_top_k=K, **changes)
    found = teacher_stage(chosen, chosen.trainer, corpus_key)
    assert found is not None
    return found


def trainer(**changes: Any) -> TrainerSettings:
    values = {"precision": "fp32", "tokens_per_batch": 200, "epochs": 1, "patience": 0, "monitor": "val/agreement"}
    return TrainerSettings(**{"part": "draft", **values, **changes})


def remembered(texts: tuple[Text, ...], k: int = K) -> dict[str, Predictions]:
    return dict(zip([t.id for t in texts], predict(target(), [path(t) for t in texts], k), strict=True))


def agreement(draft: TrainableDraft, texts: tuple[Text, ...], head_ids: torch.Tensor) -> float:
    head_of = torch.full((VOCAB,), IGNORE)
    head_of[head_ids] = torch.arange(len(head_ids))
    step = DistillModule(draft, trainer(), 1)
    with torch.no_grad():
        for rows in token_batches([len(path(t)) for t in texts], 200, seed=0):
            step.validation_step(collate_texts([texts[i] for i in rows], head_of, 0.0), 0)
    hits, count = (sum(entry[i] for entry in step._agreed.values()) for i in (0, 1))
    return hits / count
