"""The stage that turns a corpus into a draft model of chosen target layers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from pacer.data.batching import Loader, token_batches
from pacer.data.corpus import Text
from pacer.files import stable_hash
from pacer.models.draft import TrainableDraft, frequent_ids, save_draft
from pacer.models.stack import Stack
from pacer.settings import DraftSettings, LoggerSettings, TrainerSettings
from pacer.training.distill import IGNORE, DistillModule, collate_texts
from pacer.training.fit import fit, optimiser_steps

VALIDATION_TEXTS = 96


def _loader(
    texts: Sequence[Text], batches: list[list[int]], head_ids: torch.Tensor, vocab: int, weight: float
) -> Loader:
    head_of = torch.full((vocab,), IGNORE)
    head_of[head_ids] = torch.arange(len(head_ids))
    return Loader(batches, lambda rows: collate_texts([texts[i] for i in rows], head_of, weight))


def train_draft(
    target: Stack,
    texts: Sequence[Text],
    held_out: Sequence[Text],
    draft: DraftSettings,
    trainer: TrainerSettings,
    logger: LoggerSettings,
    folder: Path,
    *,
    always: Sequence[int],
    command: str,
) -> Path:
    """Distil and save; returns the checkpoint folder ``folder/draft``.

    Args:
        target: in float32 (its layers are copied as master weights).
        texts, held_out: the target's own texts to learn from and to validate on; never the same.
        always: ids that the reduced head must cover (EOS, chat template).
    """
    head_ids = frequent_ids((t.prompt_ids + t.output_ids for t in texts), draft.head_size, always, target.vocab_size)
    module_draft = TrainableDraft(target, draft.layers, head_ids)
    lengths = [len(t.prompt_ids) + len(t.output_ids) for t in texts]
    batches = token_batches(lengths, trainer.tokens_per_batch, seed=trainer.seed, epochs=trainer.epochs)
    held_out = sorted(held_out, key=lambda t: stable_hash(t.id))[:VALIDATION_TEXTS]  # a mix of all tasks
    checks = token_batches([len(t.prompt_ids) + len(t.output_ids) for t in held_out], trainer.tokens_per_batch, seed=0)
    steps = optimiser_steps(len(batches), trainer.accumulate, trainer.max_steps)
    module = DistillModule(module_draft, trainer, steps)
    figures = fit(
        module,
        _loader(texts, batches, head_ids, target.vocab_size, trainer.prompt_weight),
        _loader(held_out, checks, head_ids, target.vocab_size, 0.0),  # prompts are not what is judged
        trainer, logger, folder, stored=torch.bfloat16,
    )  # fmt: skip
    extra = {
        "layers": list(draft.layers), "texts": len(texts), "tokens": sum(lengths), "steps": int(figures.pop("steps")),
        "trainer": vars(trainer), "command": command, "validation": figures,
    }  # fmt: skip
    return save_draft(folder / "draft", module_draft, target, extra, card(extra))


def card(extra: dict[str, Any]) -> str:
    """The model card: what it is, how it was made, what was measured."""
    lines = "\n".join(f"- {name}: {value:.4f}" for name, value in sorted(extra["validation"].items()))
    return (
        "# Draft model made of target layers\n\n"
        f"Layers {extra['layers']} of the target, distilled on {extra['texts']} of its own greedy texts "
        f"({extra['tokens']} tokens), {extra['steps']} optimiser steps. The embedding and the head's rows are the "
        "target's own and are not in the file.\n\n"
        f"Made by:\n\n    {extra['command']}\n\nValidation (greedy agreement with unseen target text):\n{lines}\n"
    )
