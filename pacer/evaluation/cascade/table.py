"""What every exit of a model would say along the target's own greedy texts: one teacher-forced forward per text.

An exit's choice at a place is taken after the text's true prefix up to there. In decoding an exit reads that prefix
and the draft so far, which is the same until a verifier disagrees, and what comes after that is lost (see the package
for what this assumes).

Shapes: E exits, T texts, N output places of all texts, n output places of one text, V ids of a head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pacer.data.corpus import Text
from pacer.errors import ConfigError
from pacer.models.exits import ExitHead
from pacer.models.stack import Stack, causal_mask
from pacer.work.progress import progress
from pacer.work.stopping import check_stop

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

WINDOW = 16  # places that a leading run is followed for
DEFINITIONS = {
    "agreement": "Places where the exit's most likely id is the target's / all places of the output.",
    "conditional_acceptance": "P(place k agrees | the k − 1 before it do), from every place with a whole window left.",
    "survival": "P(the first k places agree), from every place with a whole window left.",
    "expected_accepted": "Mean length of the leading run of agreement, at most the window: sum / count.",
    "mean_probability": "Mean probability of the exit's most likely id.",
}


@dataclass(frozen=True)
class ExitTable:
    """Exits ``layers (E,)``, ascending, of a model of ``n_layers``, along texts that lie one after the other.

    ``rows (T,)``: output places of each text; ``cut (T,)``: it ended by length, not by a stop id. ``truth (N,)``: the
    text's ids, which are the whole model's choice. ``choice``, ``probability (E, N)``: each exit's most likely id and
    what it gives it.
    """

    ids: list[str]
    tasks: list[str]
    layers: tuple[int, ...]
    n_layers: int
    rows: Ints
    cut: Bools
    truth: Ints
    choice: Ints
    probability: Floats

    @property
    def text(self) -> Ints:
        """The text of each place ``(N,)``."""
        return np.repeat(np.arange(len(self.rows)), self.rows)

    @property
    def first(self) -> Ints:
        """First place of each text, and the end ``(T + 1,)``."""
        return np.concatenate([[0], np.cumsum(self.rows)])

    @property
    def left(self) -> Ints:
        """Places to the text's end, each place included ``(N,)``."""
        return self.first[1:][self.text] - np.arange(len(self.truth))

    def agrees(self, below: int, above: int) -> Bools:
        """Places where the exit ``below`` says what the exit ``above`` (or the whole model) says ``(N,)``."""
        return np.asarray(self._said(below) == self._said(above))

    def _said(self, layer: int) -> Ints:
        if layer == self.n_layers:
            return self.truth
        if layer not in self.layers:
            raise ConfigError("no such exit in the table", value=layer, allowed=(*self.layers, self.n_layers))
        return np.asarray(self.choice[self.layers.index(layer)])

    def only(self, texts: Bools) -> ExitTable:
        """Some of the texts ``(T,)``."""
        kept = np.repeat(texts, self.rows)
        names = [[name for name, keep in zip(group, texts, strict=True) if keep] for group in (self.ids, self.tasks)]
        return replace(
            self, ids=names[0], tasks=names[1], rows=self.rows[texts], cut=self.cut[texts], truth=self.truth[kept],
            choice=self.choice[:, kept], probability=self.probability[:, kept],
        )  # fmt: skip

    def by_task(self) -> dict[str, ExitTable]:
        """One table per task, in order of appearance."""
        return {
            task: self.only(np.array([t == task for t in self.tasks], dtype=bool)) for task in dict.fromkeys(self.tasks)
        }


@torch.inference_mode()
def choices(stack: Stack, heads: Sequence[ExitHead], text: Text, vocab: int) -> tuple[Tensor, Tensor]:
    """The most likely id of each head at each output place and its probability, ``(heads, n)`` each, on the CPU.

    No layer above the deepest exit is run; a head with an adapter runs it over the whole text.

    Args:
        heads: of any exits; several may share one.
        vocab: ids there are; padded rows of a whole head beyond it are no tokens.
    """
    ids = torch.tensor([[*text.prompt_ids, *text.output_ids[:-1]]], device=stack.device)
    places = torch.arange(ids.shape[1], device=ids.device)[None]
    mask = causal_mask(places, ids.shape[1])
    x, at = stack.embed(ids), 0
    found: dict[int, tuple[Tensor, Tensor]] = {}
    for layer in sorted({head.layer for head in heads}):
        x, at = stack.run(x, at, layer, places, mask), layer
        for number in (i for i, head in enumerate(heads) if head.layer == layer):
            states = heads[number].adapted(x, places, mask)
            found[number] = _best(heads[number], states[0, len(text.prompt_ids) - 1 :], vocab)
    ordered = [found[number] for number in range(len(heads))]
    return torch.stack([one[0] for one in ordered]).cpu(), torch.stack([one[1] for one in ordered]).cpu()


def _best(head: ExitHead, states: Tensor, vocab: int) -> tuple[Tensor, Tensor]:
    logits = head.readout(states)
    if head.head_ids is None:
        logits = logits[..., :vocab]
    row = logits.argmax(-1)
    probability = logits.float().log_softmax(-1).gather(-1, row[..., None])[..., 0].exp()
    return (row if head.head_ids is None else head.head_ids.to(row.device)[row]), probability


def exit_tables(
    stack: Stack, families: Mapping[str, Mapping[int, ExitHead]], texts: Sequence[Text], vocab: int
) -> dict[str, ExitTable]:
    """The tables of several families of heads (exit → head each): one forward per text for all of them.

    Raises:
        ConfigError: no texts with an output, or no heads.
    """
    texts = [text for text in texts if text.output_ids]
    heads = [(name, layer, heads[layer]) for name, heads in families.items() for layer in sorted(heads)]
    if not texts or not heads:
        raise ConfigError("no exit table", value=f"{len(texts)} texts, {len(heads)} heads", remedy="use more prompts")
    said, probability = [], []
    for text in progress(texts, "exits", "text"):
        one, sure = choices(stack, [head for _, _, head in heads], text, vocab)
        said.append(one.numpy())
        probability.append(sure.numpy())
        check_stop()
    all_said, all_sure = np.concatenate(said, 1), np.concatenate(probability, 1).astype(np.float64)
    out = {}
    for name in families:
        mine = [number for number, (family, _, _) in enumerate(heads) if family == name]
        out[name] = ExitTable(
            [text.id for text in texts], [text.task for text in texts], tuple(heads[i][1] for i in mine),
            stack.n_layers, np.array([len(text.output_ids) for text in texts]),
            np.array([text.cut for text in texts]), np.concatenate([np.array(text.output_ids) for text in texts]),
            all_said[mine], all_sure[mine],
        )  # fmt: skip
    return out


def leading_runs(hits: Bools, left: Ints) -> Ints:
    """Hits in a row from each place on, within its text ``(N,)``; ``left``: places to the text's end."""
    place = np.arange(len(hits))
    stops = np.where(hits, place + left, place)  # a text's own end comes before any stop of a later one
    return np.asarray(np.minimum.accumulate(stops[::-1])[::-1] - place)


def figures(table: ExitTable, layer: int, window: int = WINDOW) -> dict[str, Any]:
    """How good an exit is as a draft, greedily; definitions beside it in ``DEFINITIONS``.

    Args:
        window: longest run that is followed; where no text is that long, the longest text.

    Returns:
        Agreement (all and per task), curves over k = 1 … window with their counts, expected accepted length as sum and
        count, mean probability.
    """
    hits, left = table.agrees(layer, table.n_layers), table.left
    window = min(window, int(table.rows.max()))
    whole = left >= window
    run = np.minimum(leading_runs(hits, left)[whole], window)
    kept = np.array([int((run >= k).sum()) for k in range(window + 1)])
    at = table.layers.index(layer)
    return {
        "layer": layer, "agreement": float(hits.mean()), "places": len(hits),
        "by_task": {task: float(own.agrees(layer, own.n_layers).mean()) for task, own in table.by_task().items()},
        "survival": (kept[1:] / kept[0]).tolist(),
        "conditional_acceptance": [float(b / a) if a else None for a, b in pairwise(kept)],
        "counts": kept.tolist(), "accepted_sum": int(run.sum()), "accepted_count": int(kept[0]),
        "expected_accepted": float(run.sum() / kept[0]), "mean_probability": float(table.probability[at].mean()),
    }  # fmt: skip
