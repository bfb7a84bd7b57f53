"""Training the pre-verification layer on packed simulated rounds; draft and target stay frozen.

Shapes: B rows, N places, H draft width.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any

import lightning
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torchmetrics.functional.classification import binary_auroc, binary_calibration_error

from pacer.choices import BLOCK_RULES, HEADS
from pacer.data.labels import Rounds
from pacer.data.packing import Packed, attention_mask, produced_states
from pacer.evaluation.simulate import Outcome, best_fixed, oracle, tune, tune_threshold
from pacer.models.preverifier import Preverifier
from pacer.settings import CostSettings, TrainerSettings
from pacer.training.optim import adamw

log = logging.getLogger(__name__)


def packed_logits(module: Preverifier, batch: Packed, dropout: float = 0.0) -> Tensor:
    """Logits of acceptance for every place of a packed batch ``(B, N)``; the draft runs without gradients.

    Args:
        dropout: share of the layers' inputs and outputs left out, in training.
    """
    produced = produced_states(module.draft, batch) if batch.produced is None else batch.produced
    features = module.select(functools.partial(getattr, batch), batch.index)
    x = F.dropout(module.entries(produced, batch.ids, batch.index, features), dropout)
    # the memory of a layer that sees no prefix begins with the draft
    positions = batch.positions if module.sees_prefix else (batch.index - 1).clamp_min(0)
    mask = attention_mask(batch, module.sees_prefix) if module.attends else None
    hidden = module.stack.run(x, 0, module.stack.n_layers, positions, mask)
    return module.logits(F.dropout(hidden, dropout), features)


def acceptance_loss(logits: Tensor, labels: Tensor, reject_weight: float = 1.0) -> Tensor:
    """Binary cross-entropy of soft labels ``(N,)`` whose rejected side weighs more: a weighted mean (SpecDec++)."""
    losses = F.binary_cross_entropy_with_logits(
        logits, labels, pos_weight=torch.full_like(logits, 1 / reject_weight), reduction="sum"
    )
    return losses / (labels / reject_weight + 1 - labels).sum()


def calibrate(module: Preverifier, rounds: Sequence[Rounds]) -> None:
    """Start the estimates as the logistic regression of the labels on the features alone (none: on a constant)."""
    parts: list[Tensor] = []
    labels: list[Tensor] = []
    for each in rounds:
        found, used = each.labels(module.settings.label)
        signals = {**vars(each), "cumulative": each.logprob.cumsum(1)}
        index = torch.arange(1, used.shape[1] + 1).expand(used.shape)
        parts.append(module.select(signals.__getitem__, index)[used])
        labels.append(found[used])
    x, y = torch.cat(parts).double(), torch.cat(labels).double()
    theta = torch.zeros(x.shape[1] + 1, dtype=torch.float64, requires_grad=True)
    solver = torch.optim.LBFGS([theta], max_iter=100, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        solver.zero_grad()
        fit = acceptance_loss(x @ theta[:-1] + theta[-1], y, module.settings.reject_weight)
        value = fit + 1e-4 * theta.square().sum()
        value.backward()
        return value

    solver.step(loss)
    with torch.no_grad():
        module.out.weight[0, module.width :] = theta[:-1]
        module.out.bias[0] = theta[-1]


class RoundScores:
    """Scores of held-out rounds gathered place by place, and what they are worth.

    Args:
        rule: how the rule that is tuned on them makes one number of a block.
        head: of an acceptance head, whose rule looks after every token: at the last, or at the product of all.
    """

    def __init__(self, gamma: int, rule: str = "mean", head: bool = False) -> None:
        self.gamma, self.rule, self.head = gamma, rule, head
        self.scores: list[np.ndarray[Any, Any]] = []
        self.labels: list[np.ndarray[Any, Any]] = []
        self.used: list[np.ndarray[Any, Any]] = []
        self.survived: list[np.ndarray[Any, Any]] = []
        self.known: list[np.ndarray[Any, Any]] = []

    def add(self, batch: Packed, scores: Tensor) -> None:
        """One packed batch: its segments become rows of tables ``(S, g)``."""
        for row in range(batch.ids.shape[0]):
            inside = batch.index[row] > 0
            number = batch.segment[row, inside]
            _, order = torch.unique(number, return_inverse=True)
            place = batch.index[row, inside] - 1
            columns = (scores, batch.labels, batch.used, batch.survived, batch.known)
            kept = (self.scores, self.labels, self.used, self.survived, self.known)
            for column, fill, tables in zip(columns, (np.nan, 0.0, 0.0, 0.0, 0.0), kept, strict=True):
                table = np.full((int(order.max()) + 1, self.gamma), fill)
                table[order.cpu(), place.cpu()] = column[row, inside].float().cpu().numpy()
                tables.append(table)

    def tables(self) -> tuple[np.ndarray[Any, Any], ...]:
        """scores, labels, used ``(S, g)``; scores past a stop id are 0."""
        scores, labels, used = (np.concatenate(part) for part in (self.scores, self.labels, self.used))
        return np.nan_to_num(scores), labels, used.astype(bool)

    def rounds(self, costs: CostSettings) -> tuple[dict[str, Any], Outcome, int, Outcome, Outcome]:
        """The tuned rule and its outcome, the best fixed window and its outcome, the oracle.

        Rounds whose text ended by length inside the draft are left out: their accepted length is not known.
        """
        scores = self.tables()[0]
        labels, used = np.concatenate(self.survived), np.concatenate(self.known).astype(bool)
        counts = np.concatenate([(~np.isnan(part)).sum(1) for part in self.scores])
        known = used.sum(1) == counts if used.any() else np.ones(len(counts), bool)
        first_rejection = np.where(labels.min(1) > 0, counts, labels.argmin(1))
        accepted = np.minimum(first_rejection, counts)
        known |= accepted < used.sum(1)  # a rejection that was seen settles the round
        scores, counts, accepted = scores[known], counts[known], accepted[known]
        gamma, window = best_fixed(accepted, counts, costs, self.gamma)
        if self.head:
            values = scores.cumprod(1) if self.rule == "product" else scores
            t, paced = tune_threshold(values, counts, accepted, costs, self.gamma)
            t = round(1 - t, 2) if self.rule == "product" else t  # SpecDec++ bounds the chance of a rejection
            return {"t": t}, paced, gamma, window, oracle(accepted, costs)
        values, paced = tune(scores, counts, accepted, costs, self.gamma, self.rule)
        return {**values, "rule": self.rule}, paced, gamma, window, oracle(accepted, costs)


def quality(score: Tensor, soft: Tensor) -> dict[str, Tensor]:
    """How well estimates ``(N,)`` tell labels apart, and how far they are from being chances."""
    label = (soft > 0.5).long()
    clipped = score.float().clamp(1e-6, 1 - 1e-6)
    return {"auc": binary_auroc(score, label), "ece": binary_calibration_error(clipped, label, n_bins=15)}


class PreverifierModule(lightning.LightningModule):
    """Binary cross-entropy on the rounds' labels. The checkpoint is chosen by what the rounds would gain."""

    def __init__(self, module: Preverifier, settings: TrainerSettings, total_steps: int, costs: CostSettings) -> None:
        super().__init__()
        self.module, self.settings, self.total_steps, self.costs = module, settings, total_steps, costs
        self.held_out = self._empty()
        self.tuned: dict[str, Any] = {}

    def _empty(self) -> RoundScores:
        own = self.module.settings
        return RoundScores(own.gamma_max, BLOCK_RULES[own.label][0], self.settings.part in HEADS)

    def training_step(self, batch: Packed, index: int) -> Tensor:
        if index == 0:
            log.info("supervised share of the first batch: %.3f", float(batch.used.float().mean()))
        logits = packed_logits(self.module, batch, self.settings.dropout)[batch.used]
        loss = acceptance_loss(logits.float(), batch.labels[batch.used], self.module.settings.reject_weight)
        self.log("train/loss", loss, prog_bar=True, batch_size=1)
        self.log("train/supervised_share", batch.used.float().mean(), batch_size=1)
        return loss

    def on_validation_epoch_start(self) -> None:
        self.held_out = self._empty()

    def validation_step(self, batch: Packed, _: int) -> None:
        self.held_out.add(batch, packed_logits(self.module, batch).float().sigmoid())

    def on_validation_epoch_end(self) -> None:
        scores, labels, used = self.held_out.tables()
        score, soft = torch.tensor(scores[used]), torch.tensor(labels[used])
        clipped = score.float().clamp(1e-6, 1 - 1e-6)
        self.log("val/loss", acceptance_loss(clipped.logit(), soft.float(), self.module.settings.reject_weight))
        for name, value in quality(score, soft).items():
            self.log(f"val/{name}", value)
        for place in range(scores.shape[1]):
            here = used[:, place]
            if here.any():
                right = (scores[here, place] >= 0.5) == (labels[here, place] > 0.5)
                self.log(f"val/accuracy_{place + 1:02}", float(right.mean()))
        tuned, paced, gamma, window, best = self.held_out.rounds(self.costs)
        if self.held_out.head:  # its rule keeps the paper's threshold; this one is for whoever wants it
            self.log("val/sim_t", tuned["t"])
        else:
            self.tuned = tuned
        self.log("val/sim_speedup", paced.speedup, prog_bar=True)
        self.log("val/sim_accepted_length", paced.accepted, prog_bar=True)
        self.log("val/sim_drafted", paced.drafted)
        self.log("val/sim_tokens_per_verify", paced.tokens_per_verify)
        self.log("val/sim_fixed_gamma", float(gamma))
        self.log("val/sim_fixed_speedup", window.speedup)
        self.log("val/sim_oracle_speedup", best.speedup)

    def configure_optimizers(self) -> Any:
        return adamw(self.module.named_parameters(), self.settings, self.total_steps)
