"""The stage that turns a corpus into a draft model of chosen target layers."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pacer.assemble import checkpoint_folder, checkpoint_hash
from pacer.data.batching import Loader, token_batches
from pacer.data.corpus import Text
from pacer.data.teacher import Predictions
from pacer.errors import MismatchError
from pacer.files import stable_hash
from pacer.models.draft import TrainableDraft, frequent_ids, load_draft, save_draft
from pacer.models.stack import Stack
from pacer.settings import DraftSettings, LoggerSettings, TrainerSettings
from pacer.training.distill import DistillModule, collate_texts
from pacer.training.fit import fit, steps_of
from pacer.training.losses import check_stored, rows_of

VALIDATION_TEXTS = 24  # of each task


def validation_texts(held_out: Sequence[Text]) -> list[Text]:
    """The first texts of each task by a stable hash: every task counts, however rare its texts are."""
    chosen: dict[str, list[Text]] = {}
    for text in sorted(held_out, key=lambda t: stable_hash(t.id)):
        chosen.setdefault(text.task, []).append(text)
    return [text for task in sorted(chosen) for text in chosen[task][:VALIDATION_TEXTS]]


def starting_draft(
    target: Stack, head_ids: Tensor, draft: DraftSettings, start_from: str | None, always: Sequence[int]
) -> TrainableDraft:
    """What training starts from: layers of the target under ``head_ids``, or a trained draft with a head of its own.

    A checkpoint without gates for copying gets fresh ones if the settings ask for them.

    Raises:
        MismatchError: the checkpoint has other layers, a head of another size or without a needed id, or unused gates.
    """
    if start_from is None:
        return TrainableDraft(target, draft.layers, head_ids, draft.copying)
    folder = checkpoint_folder(start_from)
    found = load_draft(folder, target)
    own = found.stack.head_ids
    assert own is not None
    layers = json.loads((folder / "config.json").read_text())["layers"]
    checks: list[tuple[str, object, object]] = [
        ("layers", layers, list(draft.layers)),
        ("head size", len(own), len(head_ids)),
        ("needed ids that the head lacks", sorted(set(always) - set(own.tolist())), []),
        ("copying", found.copying is not None or draft.copying, draft.copying),
    ]
    for what, there, here in checks:
        if there != here:
            remedy = "set model.draft like the checkpoint, or start from another"
            raise MismatchError(
                f"trainer.start_from={start_from}: {what}", value=there, allowed=str(here), remedy=remedy
            )
    if draft.copying and found.copying is None:
        plain, found = found, TrainableDraft(target, draft.layers, own, copying=True)
        found.load_state_dict(plain.state_dict(), strict=False)  # all but the gates
    return found


def _loader(
    texts: Sequence[Text],
    batches: list[list[int]],
    head_ids: Tensor,
    vocab: int,
    weight: float,
    copying: bool,
    teacher: Callable[[str], Predictions] | None = None,
    prompt_labels: str = "text",
) -> Loader:
    head_of = rows_of(head_ids, vocab)
    return Loader(
        batches,
        lambda rows: collate_texts(
            [texts[i] for i in rows], head_of, weight, copying, teacher=teacher, prompt_labels=prompt_labels
        ),
    )


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
    teacher: Callable[[str], Predictions] | None = None,
) -> Path:
    """Distil and save; returns the checkpoint folder ``folder/draft``.

    Args:
        target: in float32 (its layers are copied as master weights).
        texts, held_out: the target's own texts to learn from and to validate on; never the same.
        always: ids that the reduced head must cover (EOS, chat template).
        teacher: name of a text to learn from → the target's predictions, where the trainer's settings ask for them.
    """
    head_ids = frequent_ids((t.prompt_ids + t.output_ids for t in texts), draft.head_size, always, target.vocab_size)
    module_draft = starting_draft(target, head_ids, draft, trainer.start_from, always)
    assert module_draft.stack.head_ids is not None
    head_ids = module_draft.stack.head_ids
    check_stored(trainer, len(head_ids))
    lengths = [len(t.prompt_ids) + len(t.output_ids) for t in texts]
    batches = token_batches(lengths, trainer.tokens_per_batch, seed=trainer.seed, epochs=trainer.epochs)
    held_out = validation_texts(held_out)
    checks = token_batches([len(t.prompt_ids) + len(t.output_ids) for t in held_out], trainer.tokens_per_batch, seed=0)
    steps = steps_of(trainer, len(batches))
    module = DistillModule(module_draft, trainer, steps)
    figures = fit(
        module,
        _loader(
            texts, batches, head_ids, target.vocab_size, trainer.prompt_weight, draft.copying, teacher,
            trainer.prompt_labels,
        ),
        _loader(held_out, checks, head_ids, target.vocab_size, 0.0, draft.copying),  # prompts are not what is judged
        trainer, logger, folder, stored=torch.bfloat16,
    )  # fmt: skip
    extra = {
        "layers": list(draft.layers), "texts": len(texts), "tokens": sum(lengths), "longest": max(lengths),
        "steps": int(figures.pop("steps")), "trainer": vars(trainer), "command": command, "validation": figures,
    }  # fmt: skip
    if trainer.start_from:
        extra["start_sha256"] = checkpoint_hash(trainer.start_from)
    return save_draft(folder / "draft", module_draft, target, extra, card(extra))


def card(extra: dict[str, Any]) -> str:
    """The model card: what it is, how it was made, what was measured."""
    lines = "\n".join(f"- {name}: {value:.4f}" for name, value in sorted(extra["validation"].items()))
    trainer, more = extra["trainer"], ""
    if trainer["start_from"]:
        more += f"Started from the draft {trainer['start_from']} (sha256 {extra['start_sha256']}).\n\n"
    if trainer["kl_weight"]:
        k, share = trainer["teacher_top_k"], trainer["kl_weight"]
        more += f"{share:g} of the loss is the divergence from the target's predictions (its top {k} ids).\n\n"
    if trainer["prompt_labels"] == "teacher":
        more += "Labels inside the prompts are the target's choices.\n\n"
    return (
        "# Draft model made of target layers\n\n"
        f"Layers {extra['layers']} of the target, distilled on {extra['texts']} of its own greedy texts "
        f"({extra['tokens']} tokens), {extra['steps']} optimiser steps. The embedding and the head's rows are the "
        f"target's own and are not in the file.\n\n{more}"
        f"Made by:\n\n    {extra['command']}\n\nValidation (greedy agreement with unseen target text):\n{lines}\n"
    )
