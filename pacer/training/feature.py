"""A drafter fed by the target learns from the target's features, and from its own (arXiv 2401.15077, 2408.15766).

A draft's first token follows from the target's features, each further one from a feature that the drafter made.
Training drafts from everywhere in a text at once: the first pass over the text reads the target's features, each
further one those that the pass before it made; it sees the first pass's entries up to where its draft starts, then the
entries of its own draft, one of each pass. The tokens are the text's, which is what a draft's tokens are as long as
they are accepted. Validation makes the same passes, so what it counts are the tokens that decoding would accept.

Shapes: B rows, T tokens, N places that count, K tokens of a draft, H width, V' ids in the head, k ids of a prediction.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import lightning
import torch
import torch.nn.functional as F
from torch import Tensor

from pacer.data.teacher import logit_rows, read_out
from pacer.errors import ConfigError, PacerError
from pacer.models.copying import token_of
from pacer.models.feature import FeatureDraft
from pacer.settings import FeatureDraftSettings, TrainerSettings
from pacer.training.exits import choices, rung_states
from pacer.training.losses import IGNORE, chunked, rows_of, token_losses
from pacer.training.optim import adamw

JUDGED = 5  # tokens of the drafts that are judged
DECAY = 0.8  # weight of each further token of a draft in the loss (arXiv 2503.01840)
log = logging.getLogger(__name__)


class Growing:
    """Keys and values of one layer over several passes, in the graph: what a cache is in decoding."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def update(self, keys: Tensor, values: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Append ``(B, G, T, D)``; returns all."""
        self.keys.append(keys)
        self.values.append(values)
        return torch.cat(self.keys, 2), torch.cat(self.values, 2)


def unrolled(draft: FeatureDraft, features: Tensor, ids: Tensor, steps: int) -> Iterator[Tensor]:
    """Drafts from everywhere in these texts: pass k = 0, 1, … writes their token k.

    Args:
        features: the target's, of every token ``(B, T, H)``. ids: ``(B, T)``.

    Yields:
        Own states ``(B, T, H)``; at place t the one that follows the text up to t, of which the drafter has written the
        last k tokens. Of the first k places it has no meaning.
    """
    memory: Any = Growing()  # has what a layer asks of a cache
    places = torch.arange(ids.shape[1], device=ids.device)
    behind = places[:, None] - places
    for k in range(steps):
        # the text before the draft, in the first pass's entries; then of each later pass the entry of its own draft
        seen = [behind >= k, *(behind == k - made for made in range(1, k + 1))]
        entries = draft.entries(F.pad(features[:, :-1], (0, 0, 1, 0)), ids)
        states = draft.layers.run(entries, 0, 1, places[None], torch.cat(seen, 1)[None, None], memory)
        yield states
        features = draft.features(states)


class DraftScores:
    """Agreement of each token of a draft, given that all earlier ones agreed, and accepted length; sums and counts."""

    def __init__(self, steps: int = JUDGED) -> None:
        self.tried, self.hits, self.rounds = [0] * steps, [0] * steps, 0

    def add(self, agree: Tensor, places: Tensor) -> None:
        """Add texts.

        Args:
            agree: ``(K, B, T)`` whether token k of a draft, the one after place t, is the target's.
            places: ``(B, T)`` after which the target's next token is known: there drafts start, and they end there.
        """
        alive = places
        self.rounds += int(places.sum())
        for k, hits in enumerate(agree):
            tried = alive & F.pad(places[:, k:], (0, k))
            alive = tried & F.pad(hits[:, k:], (0, k))
            self.tried[k] += int(tried.sum())
            self.hits[k] += int(alive.sum())

    def figures(self) -> dict[str, float]:
        """``val/agree_K`` of a draft's K-th token and ``val/length``, the mean accepted length."""
        shares = {
            f"val/agree_{k + 1}": h / max(1, t) for k, (h, t) in enumerate(zip(self.hits, self.tried, strict=True))
        }
        return {**shares, "val/length": sum(self.hits) / max(1, self.rounds)}


class FeatureModule(lightning.LightningModule):
    """Trains a :class:`FeatureDraft`; the target stays as it is and is run once per batch.

    The loss of a place: the next token's (`pacer.training.losses.token_losses`), and the distance of the feature from
    the target's. Checkpoints are chosen by the length of drafts that would be accepted on held-out texts (T83).

    Args:
        draft: in float32.
    """

    def __init__(
        self, draft: FeatureDraft, settings: TrainerSettings, own: FeatureDraftSettings, total_steps: int
    ) -> None:
        super().__init__()
        if settings.dropout:
            raise ConfigError("trainer.dropout is for the pre-verifier", value=settings.dropout, allowed="0")
        self.draft, self.settings, self.own, self.total_steps = draft, settings, own, total_steps
        self.register_buffer("head_of", rows_of(draft.head_ids, draft.target.vocab_size), persistent=False)
        self.head_of: Tensor
        self.scores = DraftScores()

    def training_step(self, batch: dict[str, Any], index: int) -> Tensor:
        ids, used = batch["ids"], batch["weights"] > 0
        at = used.nonzero(as_tuple=True)
        states = self._target_states(ids)
        features = self.draft.heard(states)
        rows, teacher = self._labels(ids, states, at)
        weights = batch["weights"][at]
        hard = weights if self.settings.kl_weight else weights * (rows[:, 0] != IGNORE)
        if not float(hard.sum()):
            remedy = "raise model.feature.head_size, or drop the text from the corpus"
            raise PacerError("a batch without supervised tokens", value=batch["names"][0], remedy=remedy)
        if index == 0:
            log.info("supervised share of the first batch: %.3f", float((hard > 0).sum()) / used.numel())
        noisy = features + self.own.noise * (2 * torch.rand_like(features) - 1) if self.own.noise else features
        total = torch.zeros((), device=ids.device)
        for k, own in enumerate(unrolled(self.draft, noisy, ids, self.own.steps)):
            made = (at[1] >= k).float()  # a draft's first token comes after a first place
            tokens = chunked(self._losses, logit_rows(self.draft.head.out_features), own[at], rows, *teacher)
            distances = F.smooth_l1_loss(
                self.draft.features(own[at]).float(), features[at].float(), reduction="none"
            ).mean(-1)
            loss = _mean(tokens, hard * made) + self.own.regression * _mean(distances, weights * made)
            self.log(f"train/loss_{k + 1}", loss)
            total = total + DECAY**k * loss
        total = total / sum(DECAY**k for k in range(self.own.steps))
        self.log("train/loss", total, prog_bar=True)
        return total

    def _target_states(self, ids: Tensor) -> Tensor:
        target = self.draft.target
        return rung_states(target, ids, [target.n_layers])[target.n_layers]

    def _labels(self, ids: Tensor, states: Tensor, at: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Labels of the places ``at`` as rows of the head ``(N, k)``, and the masses of the target's predictions.

        Without divergence from those the label is the text's next token, which is the target's choice.
        """
        if not self.settings.kl_weight:
            return self.head_of[ids.roll(-1, 1)[at]][:, None], ()
        said = read_out(self.draft.target, states[at], self.settings.teacher_top_k)
        return self.head_of[said.ids], (said.logprobs, said.rest)

    def _losses(self, states: Tensor, rows: Tensor, *teacher: Tensor) -> Tensor:
        """What own states ``(N, H)`` lose against predictions ``(N, k)``: ``(N,)``."""
        logits = self.draft.readout(states).float()
        return token_losses(logits, rows[:, 0], (rows, *teacher) if teacher else None, self.settings.kl_weight)

    def on_validation_epoch_start(self) -> None:
        self.scores = DraftScores()

    def validation_step(self, batch: dict[str, Any], _: int) -> None:
        ids, places = batch["ids"], batch["weights"] == 1.0
        self.scores.add(agreements(self.draft, self._target_states(ids), ids, places), places)

    def on_validation_epoch_end(self) -> None:
        for name, value in self.scores.figures().items():
            self.log(name, value, prog_bar=name == "val/length")

    def configure_optimizers(self) -> Any:
        return adamw(self.draft.named_parameters(), self.settings, self.total_steps, slow=("own_head",))


@torch.no_grad()
def agreements(draft: FeatureDraft, states: Tensor, ids: Tensor, places: Tensor, steps: int = JUDGED) -> Tensor:
    """Whether token k of a draft, the one after place t, is the text's own: ``(K, B, T)``, False outside ``places``.

    Args:
        states: the target's last ones before its norm ``(B, T, H)``. places: ``(B, T)``.
    """
    following, found = ids.roll(-1, 1)[places], []
    for own in unrolled(draft, draft.heard(states), ids, steps):
        row = choices(draft.readout, own[places], draft.head.out_features)
        agree = torch.zeros_like(places)
        agree[places] = token_of(row, draft.head_ids, None) == following  # an id outside the head is a miss
        found.append(agree)
    return torch.stack(found)


def _mean(values: Tensor, weights: Tensor) -> Tensor:
    return (values * weights).sum() / weights.sum().clamp_min(1e-9)
