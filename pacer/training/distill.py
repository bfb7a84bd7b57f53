"""Distilling a draft model on the target's own text: next-token loss on hard labels (greedy drafts need no more), and
the divergence from the target's predictions where they were stored (`pacer.training.losses`).

Shapes: B rows, T tokens, V ids in the draft's head, k stored ids.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import lightning
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from pacer.data.corpus import Text
from pacer.data.teacher import Predictions, logit_rows
from pacer.errors import ConfigError, PacerError
from pacer.models.copying import Copied, copied_all
from pacer.models.draft import TrainableDraft
from pacer.models.stack import causal_mask
from pacer.settings import TrainerSettings
from pacer.training.losses import IGNORE, chunked, token_losses
from pacer.training.optim import adamw

COPIED = ("copied_ids", "copied_match")
TEACHER = ("teacher_rows", "teacher_logprobs", "teacher_rest")
log = logging.getLogger(__name__)


def collate_texts(
    texts: Sequence[Text],
    head_of: Tensor,
    prompt_weight: float,
    copying: bool = False,
    *,
    teacher: Callable[[str], Predictions] | None = None,
    prompt_labels: str = "text",
) -> dict[str, Any]:
    """Right-padded rows of ``prompt + output`` with next-token labels in the head's numbering.

    Args:
        head_of: token id → row of the reduced head, IGNORE where the head lacks it ``(vocabulary,)``.
        copying: with candidates for a draft that copies; one that the head lacks is row V.
        teacher: name of a text → the target's predictions. prompt_labels: inside the prompt, the next token of the
            ``text`` or the ``teacher``'s most probable one.

    Returns:
        ids, labels, weights ``(B, T)``, the task and the name of each row; with ``copying`` the candidates
        (`COPIED`, ``(B, T)``), with a teacher its ids as rows of the head, log-probabilities ``(B, T, k)`` and the log
        of the mass left out ``(B, T)`` (`TEACHER`).
    """
    head_size = int((head_of != IGNORE).sum())
    rows = []
    for text in texts:
        if not text.output_ids:
            raise PacerError("a text without supervised tokens", value=text.id, remedy="drop it from the corpus")
        ids = torch.tensor([*text.prompt_ids, *text.output_ids])
        first = len(text.prompt_ids) - 1  # where the first output token is predicted
        row = {"ids": ids}
        if copying:
            row |= zip(COPIED, copied_all(ids), strict=True)
        following, weights = ids.roll(-1), torch.ones(len(ids))
        weights[:first], weights[-1] = prompt_weight, 0.0
        if teacher is not None:
            predicted = teacher(text.id)
            if prompt_labels == "teacher":
                following = torch.cat([predicted.ids[:first, 0], following[first:]])
            in_head = _head_rows(predicted.ids, row, head_of, head_size)
            row |= zip(TEACHER, (in_head, predicted.logprobs, predicted.rest), strict=True)
        labels = _head_rows(following[:, None], row, head_of, head_size).squeeze(1)
        labels[-1] = IGNORE
        rows.append({**row, "labels": labels, "weights": weights})
    batch: dict[str, Any] = {
        name: pad_sequence([row[name] for row in rows], True, IGNORE if name in ("labels", "teacher_rows") else 0)
        for name in rows[0]
    }
    return {**batch, "tasks": [t.task for t in texts], "names": [t.id for t in texts]}


def _head_rows(ids: Tensor, row: dict[str, Tensor], head_of: Tensor, head_size: int) -> Tensor:
    """Ids after each place ``(T, n)`` as rows of the head, V for the place's candidate if the head lacks it."""
    found = head_of[ids]
    if "copied_ids" in row:
        candidate = (ids == row["copied_ids"][:, None]) & (row["copied_match"][:, None] > 0)
        found = torch.where(candidate & (found == IGNORE), head_size, found)
    return found


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

    def logits(self, states: Tensor, batch: dict[str, Any], at: Any) -> Tensor:
        """States ``(N, H)`` of the batch's places ``at`` → logits ``(N, V)``, of a draft that copies ``(N, V + 1)``."""
        copied = Copied(*(batch[name][at] for name in COPIED)) if COPIED[0] in batch else None
        return self.draft.logits(states, copied).float()

    def training_step(self, batch: dict[str, Any], index: int) -> Tensor:
        used = batch["weights"] > 0
        weight = self.settings.kl_weight
        if not weight:  # else predictions are learnt from where the head lacks the label, too
            used &= batch["labels"] != IGNORE
        if not used.any():
            remedy = "raise model.draft.head_size, or drop the text from the corpus"
            raise PacerError("a batch without supervised tokens", value=batch["names"][0], remedy=remedy)
        if index == 0:
            log.info("supervised share of the first batch: %.3f", float(used.float().mean()))

        def losses(states: Tensor, *at: Tensor) -> Tensor:
            teacher = [batch[name][at] for name in TEACHER] if weight else None
            return token_losses(self.logits(states, batch, at), batch["labels"][at], teacher, weight)

        at = used.nonzero(as_tuple=True)
        rows = logit_rows(self.draft.stack.head.out_features)
        weights = batch["weights"][at]
        loss = (chunked(losses, rows, self.states(batch["ids"])[at], *at) * weights).sum() / weights.sum()
        self.log("train/loss", loss, prog_bar=True)
        self.log("train/supervised_share", used.float().mean())
        return loss

    def on_validation_epoch_start(self) -> None:
        self._agreed = {}

    def validation_step(self, batch: dict[str, Any], _: int) -> None:
        states = self.states(batch["ids"])
        for row, task in enumerate(batch["tasks"]):
            output = batch["weights"][row] == 1.0  # an id outside the head is a miss, not left out
            hits = self.logits(states[row, output], batch, (row, output)).argmax(-1) == batch["labels"][row, output]
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
