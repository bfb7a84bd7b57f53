"""Exits learn what the whole model says: one forward of the model per batch serves all of them.

The model is run rung by rung, from exit to exit. Exits learn the next token of its own greedy texts, which is its
choice; with ``trainer.kl_weight`` the pass goes on to the last layer, whose predictions (its top k ids, taken on the
fly) they learn too, with its own choice as the label at every place, inside prompts too.

An exit is judged by greedy agreement with the model's final choice on output tokens, and by how many tokens of a draft
would be accepted on average: the leading run of agreements from each place, summed over places and divided once.

Shapes: B rows, T tokens, N places that count, H width, V' ids in the heads, k ids of a prediction.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

import lightning
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from pacer.data.corpus import Text
from pacer.data.teacher import logit_rows, read_out
from pacer.errors import ConfigError, PacerError
from pacer.models.copying import token_of
from pacer.models.exits import ExitHead, as_module
from pacer.models.stack import Stack, causal_mask
from pacer.settings import TrainerSettings
from pacer.training.losses import IGNORE, chunked, rows_of, token_losses
from pacer.training.optim import adamw

RUN = 8  # longest run of agreements that counts: drafts are no longer than that
log = logging.getLogger(__name__)


def collate_ids(texts: Sequence[Text], prompt_weight: float) -> dict[str, Any]:
    """Right-padded rows of ``prompt + output``: ids and the weights of the predictions after each place ``(B, T)``.

    A weight is 1 where an output token is predicted, ``prompt_weight`` inside the prompt, 0 at the end.

    Raises:
        PacerError: a text without output.
    """
    rows, weights = [], []
    for text in texts:
        if not text.output_ids:
            raise PacerError("a text without supervised tokens", value=text.id, remedy="drop it from the corpus")
        rows.append(torch.tensor([*text.prompt_ids, *text.output_ids]))
        weight = torch.ones(len(rows[-1]))
        weight[: max(0, len(text.prompt_ids) - 1)], weight[-1] = prompt_weight, 0.0
        weights.append(weight)
    names = [text.id for text in texts]
    return {"ids": pad_sequence(rows, True), "weights": pad_sequence(weights, True), "names": names}


def places_of(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Positions ``(B, T)`` and the causal mask of whole texts."""
    positions = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape[0], -1)
    return positions, causal_mask(positions, ids.shape[1])


@torch.no_grad()
def rung_states(target: Stack, ids: Tensor, depths: Iterable[int]) -> dict[int, Tensor]:
    """States ``(B, T, H)`` after each of ``depths`` (ascending) layers, from one pass."""
    x, found = target.embed(ids), {}
    for a, b in pairwise([0, *depths]):
        x = found[b] = target.run(x, a, b, *places_of(ids))
    return found


def choices(readout: Callable[[Tensor], Tensor], states: Tensor, vocabulary: int) -> Tensor:
    """The greedy choice of rows ``(N, H)``, few rows of logits at a time: ``(N,)``."""
    return torch.cat([readout(rows).argmax(-1) for rows in states.split(logit_rows(vocabulary))])


def leading_runs(agree: Tensor, longest: int = RUN) -> Tensor:
    """From each place of ``(…, T)``: how many agreements follow without a gap, its own included, up to ``longest``."""
    run, found = agree, agree.long()
    for _ in range(longest - 1):
        run = agree & torch.nn.functional.pad(run[..., 1:], (0, 1))
        found = found + run
    return found


class ExitScores:
    """Agreement and accepted length, as sums and counts."""

    def __init__(self) -> None:
        self._sums: dict[str, list[float]] = {}

    def add(self, name: str, hits: Tensor, places: Tensor) -> None:
        """Add ``hits (N,)`` at the places ``(B, T)`` that count; a run ends with the last of a row's."""
        agree = torch.zeros_like(places)
        agree[places] = hits
        entry = self._sums.setdefault(name, [0.0, 0.0, 0.0])
        for index, found in enumerate((hits.sum(), leading_runs(agree).sum(), places.sum())):
            entry[index] += float(found)

    def figures(self, layers: Iterable[int]) -> dict[str, float]:
        """``val/agree_NAME``, ``val/length_NAME`` and the mean agreement of the exits ``layers``."""
        found: dict[str, float] = {}
        for name, (hits, runs, count) in self._sums.items():
            found |= {f"val/agree_{name}": hits / count, f"val/length_{name}": runs / count}
        agreements = [found[f"val/agree_{layer}"] for layer in layers]
        return {**found, "val/agree": sum(agreements) / len(agreements)}


class JudgedExits(lightning.LightningModule):
    """What is common to all ways to train exits: validation.

    Beside the exits, the name ``text`` stands for the model's final choice against the text's own next token: 1 but for
    rounding on its own greedy texts, less for a model that has been changed since.
    """

    def __init__(self, target: Stack, heads: dict[int, ExitHead], settings: TrainerSettings, total_steps: int) -> None:
        super().__init__()
        if settings.dropout:
            raise ConfigError("trainer.dropout is for the pre-verifier", value=settings.dropout, allowed="0")
        self._target = [target]  # in a list: not a child
        self.exits, self.settings, self.total_steps = heads, settings, total_steps
        self.scores = ExitScores()

    @property
    def target(self) -> Stack:
        return self._target[0]

    def on_validation_epoch_start(self) -> None:
        self.scores = ExitScores()

    def validation_step(self, batch: dict[str, Any], _: int) -> None:
        ids, places = batch["ids"], batch["weights"] == 1.0
        states = rung_states(self.target, ids, [*self.exits, self.target.n_layers])
        final = choices(self.target.readout, states[self.target.n_layers][places], self.target.vocab_size)
        for layer, head in self.exits.items():
            own = head.adapted(states[layer], *places_of(ids))[places]
            chosen = token_of(choices(head.readout, own, len(head.head.weight)), head.head_ids, None)
            self.scores.add(str(layer), chosen == final, places)  # an id outside the head is a miss, not left out
        self.scores.add("text", final == ids.roll(-1, 1)[places], places)

    def on_validation_epoch_end(self) -> None:
        for name, value in self.scores.figures(self.exits).items():
            self.log(name, value, prog_bar=name == "val/agree")

    @torch.no_grad()
    def measure(self, batches: Iterable[dict[str, Any]]) -> dict[str, float]:
        """The figures of a validation, without a trainer."""
        self.on_validation_epoch_start()
        for batch in batches:
            self.validation_step({k: v.to(self.target.device) for k, v in batch.items() if k != "names"}, 0)
        return self.scores.figures(self.exits)


class ExitModule(JudgedExits):
    """Trains the heads of a frozen target.

    Args:
        heads: of one kind, over the same ids, in float32. weights: of their losses, in order; none: 1 each.
    """

    def __init__(
        self,
        target: Stack,
        heads: dict[int, ExitHead],
        settings: TrainerSettings,
        total_steps: int,
        weights: Sequence[float] = (),
    ) -> None:
        super().__init__(target, heads, settings, total_steps)
        self.heads = as_module(heads)
        self.shares = [w / sum(weights) for w in weights] or [1 / len(heads)] * len(heads)
        one = next(iter(heads.values()))
        self.register_buffer("head_of", rows_of(one.head_ids, target.vocab_size), persistent=False)
        self.head_of: Tensor

    def training_step(self, batch: dict[str, Any], index: int) -> Tensor:
        ids, used = batch["ids"], batch["weights"] > 0
        at = used.nonzero(as_tuple=True)
        rows, states, teacher = self._labels(ids, at)
        weights = batch["weights"][at]
        if not self.settings.kl_weight:  # else predictions are learnt from where the heads lack the label, too
            weights = weights * (rows[:, 0] != IGNORE)
        if not float(weights.sum()):
            remedy = "raise model.exits.head_size, or drop the text from the corpus"
            raise PacerError("a batch without supervised tokens", value=batch["names"][0], remedy=remedy)
        if index == 0:
            log.info("supervised share of the first batch: %.3f", float((weights > 0).sum()) / used.numel())
        total = torch.zeros((), device=ids.device)
        for share, (layer, head) in zip(self.shares, self.exits.items(), strict=True):
            own = head.adapted(states[layer], *places_of(ids))[at]
            losses = chunked(self._losses(head), logit_rows(len(head.head.weight)), own, rows, *teacher)
            loss = (losses * weights).sum() / weights.sum()
            self.log(f"train/loss_{layer}", loss)
            total = total + share * loss
        self.log("train/loss", total, prog_bar=True)
        return total

    def _labels(self, ids: Tensor, at: tuple[Tensor, ...]) -> tuple[Tensor, dict[int, Tensor], tuple[Tensor, ...]]:
        """Labels of the places ``at`` as rows of the heads ``(N, k)``, the exits' states, the predictions' masses.

        Without divergence from the model's predictions its upper layers are not run: the next token of its own greedy
        text is its choice.
        """
        if not self.settings.kl_weight:
            return self.head_of[ids.roll(-1, 1)[at]][:, None], rung_states(self.target, ids, self.exits), ()
        depths = [*self.exits, self.target.n_layers]
        states = rung_states(self.target, ids, depths)
        said = read_out(self.target, states[self.target.n_layers][at], self.settings.teacher_top_k)
        return self.head_of[said.ids], states, (said.logprobs, said.rest)

    def _losses(self, head: ExitHead) -> Callable[..., Tensor]:
        """What an exit's states ``(N, H)`` lose against predictions ``(N, k)``: ``(N,)``."""
        weight = self.settings.kl_weight

        def losses(states: Tensor, rows: Tensor, *teacher: Tensor) -> Tensor:
            return token_losses(head.readout(states).float(), rows[:, 0], (rows, *teacher) if teacher else None, weight)

        return losses

    def configure_optimizers(self) -> Any:
        slow = tuple(f"{layer}.own_head" for layer in self.exits)
        return adamw(self.heads.named_parameters(), self.settings, self.total_steps, slow)
