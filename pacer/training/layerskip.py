"""LayerSkip's recipe (arXiv 2404.16710): the model itself is tuned so that its early layers can speak.

In training each row of a batch leaves layers out, the later the more often, and exits by the shared final norm and head
have a cross-entropy beside the last layer's; which exits, rotates from step to step. The result is an ordinary model
folder. It is another model: decoding with it is exact with regard to *its* output, not to the original's.

Shapes: B rows, T tokens, N places that count, H width, V vocabulary, L layers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Container, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pacer.assemble import Models
from pacer.data.corpus import Text
from pacer.data.teacher import logit_rows
from pacer.errors import PacerError, UnsupportedError
from pacer.files import remove, write_atomic
from pacer.models.exits import RECORD, shared_exits
from pacer.models.stack import Stack
from pacer.settings import LayerSkipSettings, LoggerSettings, TrainerSettings
from pacer.training.exits import RUN, JudgedExits, places_of
from pacer.training.exits_run import loaders
from pacer.training.fit import fit, steps_of
from pacer.training.losses import chunked
from pacer.training.optim import adamw
from pacer.training.split import split, whole_model


def dropout_rates(layers: int, p_max: float) -> list[float]:
    """Chance of leaving out each of the layers: p_l = p_max · (exp(l · ln 2 / (L − 1)) − 1)."""
    return [p_max * math.expm1(index * math.log(2) / max(1, layers - 1)) for index in range(layers)]


def active_layers(step: int, layers: int, rotation: int) -> list[int]:
    """Layers (from 0) that have a loss in this step: every ``rotation``-th, one further each step, and the last."""
    return [index for index in range(layers) if (index - step) % rotation == 0 or index == layers - 1]


def loss_shares(active: Sequence[int], layers: int, exit_scale: float) -> dict[int, float]:
    """Shares of the losses after layers ``active``, by the number of layers below (index + 1); they add up to 1.

    A layer weighs ``exit_scale`` times the sum of the indices up to its own, the last one L − 1 more than those before.
    """
    weights = {index: exit_scale * index * (index + 1) / 2 for index in active}
    if layers - 1 in weights:
        weights[layers - 1] = layers - 1 + exit_scale * (layers - 2) * (layers - 1) / 2
    total = sum(weights.values())
    return {index + 1: weight / total for index, weight in weights.items() if weight > 0}


def thinned_states(stack: Stack, ids: Tensor, rates: Sequence[float], depths: Container[int]) -> dict[int, Tensor]:
    """States ``(B, T, H)`` after ``depths`` layers, where each row leaves layer l out with probability ``rates[l]``."""
    positions, mask = places_of(ids)
    x, found = stack.embed(ids), {}
    for index, rate in enumerate(rates):
        kept = (torch.rand(len(ids)) >= rate).nonzero().flatten().to(ids.device)  # drawn alike on every device
        if len(kept) == len(ids):
            x = stack.run(x, index, index + 1, positions, mask)
        elif len(kept):
            passed = stack.run(x[kept], index, index + 1, positions[kept], mask[kept])
            x = x.index_copy(0, kept, passed.to(x.dtype))
        else:  # it is run all the same: where processes tune together, each must meet every layer
            x = x + 0.0 * stack.run(x[:1], index, index + 1, positions[:1], mask[:1])
        if index + 1 in depths:
            found[index + 1] = x
    return found


class LayerSkipModule(JudgedExits):
    """Tunes a whole model; validation as for trained heads, and against the original's text (``text``).

    Args:
        target: in float32; all its weights are trained. exits: layers below the exits that are judged.
    """

    def __init__(
        self, target: Stack, exits: Sequence[int], recipe: LayerSkipSettings, settings: TrainerSettings, steps: int
    ) -> None:
        if target.folded:
            raise UnsupportedError(
                "a model whose head has a projection before it cannot be saved once it is tuned",
                value=target.config.model_type, remedy="train exits on it instead: trainer=exits",
            )  # fmt: skip
        super().__init__(target, shared_exits(target, exits), settings, steps)
        self.model = target.model.requires_grad_(True)
        self.recipe, self.rates = recipe, dropout_rates(target.n_layers, recipe.p_max)

    def configure_model(self) -> None:
        if self.settings.strategy == "fsdp":
            split(self, getattr(self.target.decoder, self.target.family.layers))

    def forward(self, step: Callable[..., Any], *arguments: Any) -> Any:
        """A step; of a model that is split, what is in no layer is gathered around it."""
        return step(*arguments)

    def training_step(self, batch: dict[str, Any], index: int) -> Tensor:
        loss: Tensor = self(self._loss, batch)
        return loss

    def validation_step(self, batch: dict[str, Any], index: int) -> None:
        self(super().validation_step, batch, index)

    def _loss(self, batch: dict[str, Any]) -> Tensor:
        at = (batch["weights"] > 0).nonzero(as_tuple=True)
        weights, labels = batch["weights"][at], batch["ids"].roll(-1, 1)[at]
        if not len(labels):
            raise PacerError("a batch without supervised tokens", value=batch["names"][0])
        layers = self.target.n_layers
        active = active_layers(self.global_step, layers, self.recipe.rotation)
        shares = loss_shares(active, layers, self.recipe.exit_scale)
        states = thinned_states(self.target, batch["ids"], self.rates, shares)
        total = torch.zeros((), device=labels.device)
        for depth, share in shares.items():
            losses = chunked(self._losses, logit_rows(self.target.vocab_size), states[depth][at], labels)
            loss = (losses * weights).sum() / weights.sum()
            total = total + share * loss
            if depth == layers:
                self.log("train/loss_last", loss)
        self.log("train/loss", total, prog_bar=True)
        return total

    def _losses(self, states: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.target.readout(states).float(), labels, reduction="none")

    def configure_optimizers(self) -> Any:
        return adamw(self.model.named_parameters(), self.settings, self.total_steps)


def train_layerskip(
    models: Models,
    texts: Sequence[Text],
    held_out: Sequence[Text],
    exits: Sequence[int],
    recipe: LayerSkipSettings,
    trainer: TrainerSettings,
    logger: LoggerSettings,
    folder: Path,
    *,
    command: str,
) -> Path:
    """Tune and save; returns the model folder ``folder/model`` (bfloat16, with the tokenizer).

    Args:
        models: with the target in float32; it is changed.
        texts, held_out: the original's greedy texts to learn from and to be judged on; never the same.
    """
    learned, judged = loaders(texts, held_out, trainer)
    steps = steps_of(trainer, len(learned))
    module = LayerSkipModule(models.target, exits, recipe, trainer, steps)
    before = module.measure(judged)
    figures = fit(module, learned, judged, trainer, logger, folder, stored=torch.bfloat16)
    if trainer.strategy == "fsdp":  # this process has a share alone
        state = torch.load(folder / "best.ckpt", map_location="cpu", weights_only=True, mmap=True)
        models = replace(models, target=Stack(whole_model(models.target.model, state["state_dict"], "model.")))
    record = {
        "exits": list(exits), "recipe": asdict(recipe), "texts": len(texts),
        "tokens": sum(len(t.prompt_ids) + len(t.output_ids) for t in texts), "steps": int(figures.pop("steps")),
        "trainer": vars(trainer), "command": command, "validation_before": before, "validation": figures,
    }  # fmt: skip
    return save_model(folder / "model", models, record)


def save_model(folder: Path, models: Models, record: dict[str, Any]) -> Path:
    """A model folder with its record and card, there completely or not at all; one of that name is replaced."""

    def fill(part: Path) -> None:
        models.target.model.to(torch.bfloat16).save_pretrained(part)
        models.tokenizer.save_pretrained(part)
        (part / RECORD).write_text(json.dumps(record, indent=1, allow_nan=False) + "\n")
        (part / "README.md").write_text(card(record))
        remove(folder)  # a rename replaces no folder

    return write_atomic(folder, fill)


def card(record: dict[str, Any]) -> str:
    """The model card: what it is, what exactness means with it, what was measured."""
    before, after, recipe = record["validation_before"], record["validation"], record["recipe"]
    lines = [
        f"| {e} | {before[f'val/agree_{e}']:.4f} | {after[f'val/agree_{e}']:.4f} | {before[f'val/length_{e}']:.3f} "
        f"| {after[f'val/length_{e}']:.3f} |"
        for e in record["exits"]
    ]
    return (
        "# A model tuned to exit early (LayerSkip's recipe)\n\n"
        f"All weights were tuned on {record['texts']} greedy texts of the original ({record['tokens']} tokens), "
        f"{record['steps']} optimiser steps: layers left out with a chance of up to {recipe['p_max']:g}, exits at "
        f"{recipe['exit_scale']:g} of the loss's scale, one in {recipe['rotation']} layers a step. Exits read by the "
        "model's own final norm and head: use it as a target with model.exits.kind=shared.\n\n"
        "**This is another model than the original.** Speculative decoding with it gives exactly *its* output. On "
        f"unseen texts its greedy choice is the original's token at {after['val/agree_text']:.4f} of all places (the "
        "original's text before them given); task scores of both: pacer.evaluate.\n\n"
        f"Made by:\n\n    {record['command']}\n\n"
        "Agreement of exits with the final choice of their own model on output tokens, and mean run of agreements from "
        f"each output token on (at most {RUN} and to the text's end):\n\n"
        "| layers | agreement before | after | run before | after |\n|---|---|---|---|---|\n" + "\n".join(lines) + "\n"
    )
