"""The stage that turns a corpus into a drafter fed by the target."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from pacer.data.corpus import Text
from pacer.models.exits import reduced_ids
from pacer.models.feature import FeatureDraft, save_feature
from pacer.models.stack import Stack
from pacer.settings import FeatureDraftSettings, FeatureSettings, LoggerSettings, TrainerSettings
from pacer.training.exits_run import loaders
from pacer.training.feature import JUDGED, FeatureModule
from pacer.training.fit import fit, steps_of
from pacer.training.losses import check_stored


def train_feature(
    target: Stack,
    texts: Sequence[Text],
    held_out: Sequence[Text],
    feature: FeatureSettings,
    own: FeatureDraftSettings,
    trainer: TrainerSettings,
    logger: LoggerSettings,
    folder: Path,
    *,
    always: Sequence[int],
    command: str,
) -> Path:
    """Train and save; returns the checkpoint folder ``folder/feature``.

    Args:
        target: in the dtype that decodes: the drafter reads its states.
        texts, held_out: the target's own texts to learn from and to be judged on; never the same.
        always: ids that a reduced head must cover (EOS, chat template).
    """
    ids = reduced_ids((t.prompt_ids + t.output_ids for t in texts), feature.head_size, always, target.vocab_size)
    size = target.vocab_size if ids is None else len(ids)
    check_stored(trainer, size)
    torch.manual_seed(trainer.seed)
    draft = FeatureDraft(target, ids, head=feature.head, layer=feature.layer, dtype=torch.float32)
    learned, judged = loaders(texts, held_out, trainer)
    module = FeatureModule(draft, trainer, own, steps_of(trainer, len(learned)))
    figures = fit(module, learned, judged, trainer, logger, folder, stored=torch.bfloat16)
    extra = {
        "head_size": size, "layer": feature.layer, "texts": len(texts),
        "tokens": sum(len(t.prompt_ids) + len(t.output_ids) for t in texts), "steps": int(figures.pop("steps")),
        "trainer": vars(trainer), "feature_draft": vars(own), "command": command, "validation": figures,
    }  # fmt: skip
    return save_feature(folder / "feature", draft, extra, card(feature, extra))


def card(feature: FeatureSettings, extra: dict[str, Any]) -> str:
    """The model card: what it is, how it was made, what was measured."""
    lines = "\n".join(f"- {name}: {value:.4f}" for name, value in sorted(extra["validation"].items()))
    rows = "a trained copy of the target's head rows" if feature.head == "trained" else "the target's own head rows"
    began = "" if feature.layer is None else f", which began as the target's layer {feature.layer}"
    own, trainer = extra["feature_draft"], extra["trainer"]
    how = "the next token of those texts"
    if kl := trainer["kl_weight"]:
        k = trainer["teacher_top_k"]
        how = f"the target's predictions (its top {k} ids; divergence {kl:g}, its choice {1 - kl:g} of that loss)"
    return (
        "# Drafter fed by the target\n\n"
        f"One decoder layer{began} and its norm, on the target's last state and the embedding of the token it "
        f"produced; {rows} of {extra['head_size']} ids. The target stays as it is, and none of it is in the file.\n\n"
        f"Taught from {extra['texts']} of the target's greedy texts ({extra['tokens']} tokens) in {extra['steps']} "
        f"optimiser steps of up to {trainer['tokens_per_batch'] * trainer['accumulate']} tokens: {how}, and the "
        f"target's features with weight {own['regression']:g}; drafts of {own['steps']} tokens, noise "
        f"{own['noise']:g}.\n\n"
        f"Made by:\n\n    {extra['command']}\n\n"
        "Validation on unseen texts. agree_K: greedy agreement of a draft's K-th token with the text, given that all "
        f"before it agreed; length: mean accepted length of drafts of {JUDGED} tokens, from each output token on and "
        f"no further than the text:\n\n{lines}\n"
    )
