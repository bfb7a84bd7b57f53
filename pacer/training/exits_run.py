"""The stage that turns a corpus into trained exit heads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from pacer.data.batching import Loader, token_batches
from pacer.data.corpus import Text
from pacer.models.exits import make_exits, reduced_ids, save_exits
from pacer.models.stack import Stack
from pacer.settings import ExitSettings, LoggerSettings, TrainerSettings
from pacer.training.draft_run import validation_texts
from pacer.training.exits import RUN, ExitModule, collate_ids
from pacer.training.fit import fit, steps_of
from pacer.training.losses import check_stored


def loaders(texts: Sequence[Text], held_out: Sequence[Text], trainer: TrainerSettings) -> tuple[Loader, Loader]:
    """Batches to learn from, and of some held-out texts of each task to be judged on."""

    def loader(of: Sequence[Text], epochs: int, seed: int, prompt_weight: float) -> Loader:
        lengths = [len(t.prompt_ids) + len(t.output_ids) for t in of]
        batches = token_batches(lengths, trainer.tokens_per_batch, seed=seed, epochs=epochs)
        return Loader(batches, lambda rows: collate_ids([of[i] for i in rows], prompt_weight))

    learned = loader(texts, trainer.epochs, trainer.seed, trainer.prompt_weight)
    return learned, loader(validation_texts(held_out), 1, 0, 0.0)  # prompts are not what is judged


def train_exits(
    target: Stack,
    texts: Sequence[Text],
    held_out: Sequence[Text],
    exits: ExitSettings,
    trainer: TrainerSettings,
    logger: LoggerSettings,
    folder: Path,
    *,
    always: Sequence[int],
    command: str,
) -> Path:
    """Train and save; returns the checkpoint folder ``folder/exits``. Exits of kind shared are only measured.

    Args:
        target: in the dtype that decodes: exits read its states.
        texts, held_out: the target's own texts to learn from and to be judged on; never the same.
        always: ids that reduced heads must cover (EOS, chat template).
    """
    ids = reduced_ids((t.prompt_ids + t.output_ids for t in texts), exits.head_size, always, target.vocab_size)
    size = target.vocab_size if ids is None else len(ids)
    check_stored(trainer, size, "heads'")
    torch.manual_seed(trainer.seed)
    heads = make_exits(
        target, exits.kind, exits.layers, ids, attention_only=exits.attention_only, dtype=torch.float32
    )  # fmt: skip
    learned, judged = loaders(texts, held_out, trainer)
    steps = steps_of(trainer, len(learned))
    module = ExitModule(target, heads, trainer, steps, exits.weights)
    if exits.kind == "shared":
        figures = {**module.measure(judged), "steps": 0.0}
    else:
        figures = fit(module, learned, judged, trainer, logger, folder, stored=torch.bfloat16)
    extra = {
        "head_size": size, "texts": len(texts), "tokens": sum(len(t.prompt_ids) + len(t.output_ids) for t in texts),
        "steps": int(figures.pop("steps")), "trainer": vars(trainer), "weights": list(exits.weights),
        "command": command, "validation": figures,
    }  # fmt: skip
    return save_exits(folder / "exits", heads, target, extra, card(exits, extra))


KINDS = {
    "shared": "the model's own norm and head rows; nothing was trained",
    "norm": "a norm of its own before the model's head rows",
    "linear": "a norm and a vocabulary head of its own",
    "adapter": "a decoder layer and a norm of its own before the model's head rows",
}


def card(exits: ExitSettings, extra: dict[str, Any]) -> str:
    """The model card: what it is, how it was made, what was measured."""
    lines = "\n".join(f"- {name}: {value:.4f}" for name, value in sorted(extra["validation"].items()))
    kind = KINDS[exits.kind]
    if exits.kind == "adapter" and exits.attention_only:
        kind = kind.replace("decoder layer", "decoder layer without MLP")
    trainer = extra["trainer"]
    how = f"Taught by {extra['texts']} of the model's greedy texts ({extra['tokens']} tokens)"
    if share := trainer["kl_weight"]:
        how += f" and its predictions for them (its top {trainer['teacher_top_k']} ids; {share:g} of the loss)"
    how += f", {extra['steps']} optimiser steps.\n\n"
    return (
        f"# Exits after {', '.join(map(str, exits.layers))} layers\n\n"
        f"Each exit: {kind}; {extra['head_size']} ids. The model stays as it is, and none of it is in the file.\n\n"
        f"{how if extra['steps'] else ''}"
        f"Made by:\n\n    {extra['command']}\n\n"
        "Validation on unseen texts. agree_E: greedy agreement of the exit after E layers with the model's final "
        f"choice on output tokens; length_E: mean run of agreements from each output token on, at most {RUN} and to "
        f"the text's end; agree: mean over the exits; text: the model's final choice against the text.\n\n{lines}\n"
    )
