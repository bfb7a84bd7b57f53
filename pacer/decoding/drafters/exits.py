"""Drafting with several exits: each token comes from the first exit that is sure of it (AdaDecode, arXiv 2506.03700).

A token that an exit has emitted waits below the layers it has not passed; whatever goes deeper takes all that waits
along, so each token passes each layer once. Where no exit is sure nothing is drawn: the token goes through all layers,
which verifies all that wait. Whether an exit is sure is said by its distribution, before anything is drawn from it.

Shapes: R rows, B rows still undecided, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pacer.decoding.distributions import draw, probabilities, spread
from pacer.decoding.drafters.model import ModelDrafter
from pacer.decoding.ladder import Ladder
from pacer.decoding.lane import last_of, padded
from pacer.decoding.request import Row
from pacer.decoding.uniforms import DRAFT, uniforms
from pacer.errors import ConfigError, UnsupportedError
from pacer.models.stack import Stack
from pacer.settings import SamplingSettings


class ConfidentExits(ModelDrafter):
    """Exits 0, 1, … of a ladder, in order of depth.

    Args:
        exits: seen as models, ascending; they stand on the first rungs of the ladder.
        t: an exit is sure when its likeliest token has at least this probability.
    """

    def __init__(
        self, exits: Sequence[Stack], ladder: Ladder, vocab_size: int, sampling: SamplingSettings, t: float
    ) -> None:
        if not 0 <= t <= 1:
            raise ConfigError("controller.t out of range", value=t, allowed="in [0, 1]")
        if sampling.repetition_penalty != 1.0:
            raise UnsupportedError("exits by confidence with a repetition penalty", value=sampling.repetition_penalty)
        super().__init__(exits[0], vocab_size, sampling, reader=ladder.rungs[0])
        self.exits, self.rungs, self.t = list(exits), ladder.rungs[: len(exits)], t
        self._text: list[list[int]] = []  # of each row: its committed tokens and its draft
        self._probs: Tensor | None = None

    def read(self, rows: Sequence[Row], wanted: Sequence[bool]) -> None:
        super().read(rows, wanted)
        self._text = [list(row.committed) for row in rows]

    def able(self, offset: int, open_rows: list[bool]) -> list[bool] | None:
        """The rows for which some exit is sure; their tokens are drawn here. One host read per exit that is asked."""
        if offset > 0:
            self._feed(self._token, [int(is_open) for is_open in open_rows])
        undecided = [i for i, is_open in enumerate(open_rows) if is_open]
        states = self._last if len(undecided) == len(open_rows) else self._last[undecided]
        able = [False] * len(open_rows)
        tokens = [0] * len(open_rows)
        kept: list[tuple[int, Tensor]] = []
        for k, own in enumerate(self.exits):
            if k > 0:
                states = self._deeper(k, undecided)
            sure, drawn, q = self._ask(own, states, undecided, offset)
            for j, i in enumerate(undecided):
                if sure[j]:
                    able[i], tokens[i] = True, drawn[j]
                    kept += [] if q is None else [(i, q[j])]
            undecided = [i for i, is_sure in zip(undecided, sure, strict=True) if not is_sure]
            if not undecided:
                break
        self._token = torch.tensor(tokens, device=self.stack.device)[:, None]
        self._probs = self._rows_of(kept, len(open_rows))
        for i in (i for i, is_able in enumerate(able) if is_able):
            self._text[i].append(tokens[i])
        return able

    def draw(self, offset: int, open_rows: Sequence[bool]) -> tuple[Tensor, Tensor | None]:
        """The token that :meth:`able` has drawn at place ``offset``."""
        return self._token, self._probs

    def _deeper(self, k: int, undecided: list[int]) -> Tensor:
        """Rung k reads all that waits below it for these rows: the last states ``(B, 1, H)``."""
        lengths = self.rungs[k].lengths
        ids, counts = padded([self._text[i][lengths[i] :] for i in undecided], self.stack.device)
        return last_of(self.rungs[k].feed_ids(ids, counts, undecided), counts)

    def _ask(
        self, own: Stack, states: Tensor, rows: list[int], offset: int
    ) -> tuple[list[bool], list[int], Tensor | None]:
        """Whether an exit is sure of the next token of each row, the token, and what it is drawn from ``(B, V)``."""
        logits = own.readout(states)[:, 0]
        head_ids = None if own.head_ids is None else own.head_ids.to(logits.device)
        sure = logits.float().softmax(-1).amax(-1) >= self.t
        q: Tensor | None = None
        if self.sampling.temperature == 0:
            row = logits.argmax(-1)
        else:
            q = probabilities(logits, self.sampling)
            at = torch.tensor(rows, device=logits.device)
            place = torch.tensor([offset], device=logits.device)
            row = draw(q, uniforms(self._keys[at], self._rounds[at], place, DRAFT).squeeze(1))
            q = spread(q, head_ids, self.vocab_size)
        token = row if head_ids is None else head_ids[row]
        both = torch.stack([sure.long(), token]).tolist()
        return [bool(value) for value in both[0]], both[1], q

    def _rows_of(self, kept: Sequence[tuple[int, Tensor]], rows: int) -> Tensor | None:
        """Distributions ``(R, 1, V)`` of the rows that were drawn for; zero elsewhere."""
        if self.sampling.temperature == 0:
            return None
        found = torch.zeros(rows, 1, self.vocab_size, device=self.stack.device)
        for i, q in kept:
            found[i, 0] = q
        return found
