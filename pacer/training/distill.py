"""Distilling a draft model: next-token loss on the target's own text (hard labels: greedy drafts need no more).

Shapes: B rows, T tokens, V ids in the draft's head.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import lightning
import torch
import torch.nn.functional as F
from torch import Tensor

from pacer.data.corpus import Text
from pacer.errors import ConfigError, PacerError
from pacer.models.draft import TrainableDraft
from pacer.models.stack import causal_mask
from pacer.settings import TrainerSettings
from pacer.training.optim import adamw

IGNORE = -100
log = logging.getLogger(__name__)


def collate_texts(texts: Sequence[Text], head_of: Tensor, prompt_weight: float) -> dict[str, Any]:
    """Right-padded rows of ``prompt + output`` with next-token labels in the head's numbering.

    Args:
        head_of: token id → row of the reduced head, IGNORE where the head lacks it ``(vocabulary,)``.

    Returns:
        ids, labels, weights ``(B, T)``, and the task and the name of each row.
    """
    longest = max(len(t.prompt_ids) + len(t.output_ids) for t in texts)
    ids = torch.zeros(len(texts), longest, dtype=torch.long)
    labels, weights = torch.full_like(ids, IGNORE), torch.zeros(len(texts), longest)
    for row, text in enumerate(texts):
        whole = torch.tensor([*text.prompt_ids, *text.output_ids])
        if not text.output_ids:
            raise PacerError("a text without supervised tokens", value=text.id, remedy="drop it from the corpus")
        n, p = len(whole), len(text.prompt_ids)
        ids[row, :n] = whole
        labels[row, : n - 1] = head_of[whole[1:]]
        weights[row, : n - 1] = prompt_weight
        weights[row, p - 1 : n - 1] = 1.0
    rows = {"tasks": [t.task for t in texts], "names": [t.id for t in texts]}
    return {"ids": ids, "labels": labels, "weights": weights, **rows}


class DistillModule(lightning.LightningModule):
    """Trains a :class:`TrainableDraft`; validation is greedy agreement with the target's text, per task."""

    def __init__(self, draft: TrainableDraft, settings: TrainerSettings, total_steps: int) -> None:
        super().__init__()
        if settings.dropout:
            raise ConfigError("trainer.dropout is for the pre-verifier", value=settings.dropout, allowed="0")
        self.draft, self.settings, self.total_steps = draft, settings, total_steps
        self._agreed: dict[str, list[float]] = {}

    def states(self, ids: Tensor) -> Tensor:
        """Token ids ``(B, T)`` → last states before the norm ``(B, T, H)``."""
        stack = self.draft.stack
        positions = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape[0], -1)
        return stack.run(stack.embed(ids), 0, stack.n_layers, positions, causal_mask(positions, ids.shape[1]))

    def training_step(self, batch: dict[str, Any], index: int) -> Tensor:
        used = (batch["labels"] != IGNORE) & (batch["weights"] > 0)
        if not used.any():
            remedy = "raise model.draft.head_size, or drop the text from the corpus"
            raise PacerError("a batch without supervised tokens", value=batch["names"][0], remedy=remedy)
        if index == 0:
            log.info("supervised share of the first batch: %.3f", float(used.float().mean()))
        logits = self.draft.logits(self.states(batch["ids"])[used])
        losses = F.cross_entropy(logits.float(), batch["labels"][used], reduction="none")
        weights = batch["weights"][used]
        loss = (losses * weights).sum() / weights.sum()
        self.log("train/loss", loss, prog_bar=True)
        self.log("train/supervised_share", used.float().mean())
        return loss

    def on_validation_epoch_start(self) -> None:
        self._agreed = {}

    def validation_step(self, batch: dict[str, Any], _: int) -> None:
        states = self.states(batch["ids"])
        for row, task in enumerate(batch["tasks"]):
            output = batch["weights"][row] == 1.0  # an id outside the head is a miss, not left out
            hits = self.draft.logits(states[row, output]).argmax(-1) == batch["labels"][row, output]
            entry = self._agreed.setdefault(task, [0.0, 0.0])
            entry[0] += float(hits.sum())
            entry[1] += float(output.sum())

    def on_validation_epoch_end(self) -> None:
        for task, (hits, count) in sorted(self._agreed.items()):
            self.log(f"val/agreement_{task}", hits / count)
        hits, count = (sum(entry[i] for entry in self._agreed.values()) for i in (0, 1))
        self.log("val/agreement", hits / count, prog_bar=True)

    def configure_optimizers(self) -> Any:
        return adamw(self.draft.named_parameters(), self.settings, self.total_steps, slow=("projection",))
