"""Drafting from the target's own last states (EAGLE, arXiv 2401.15077).

The drafter hears all that the target reads and keeps, by place, the feature that produced each token: the target's
where it has spoken, else its own. In a round the verified tokens it has not read come first, with the target's features
alone; each drafted token follows with a feature of its own. What a draft wrote into memory is forgotten after the
round, accepted or not, since the target's features are known by then: so memory always holds what a fresh pass over the
verified text would.

Shapes: R rows, B rows of a call, n tokens, T places of a row, H width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pacer.decoding.drafters.model import ModelDrafter
from pacer.decoding.lane import Lane, Reader, last_of, places
from pacer.decoding.request import Row
from pacer.decoding.tree import Tree
from pacer.models.feature_stack import FeatureStack
from pacer.settings import SamplingSettings


class FeatureLane(Lane):
    """The drafter's memory, and ``features (R, T, H)``; the last place of a row takes padded writes."""

    reads_trees = False

    def __init__(self, stack: FeatureStack, block: int | None = None) -> None:
        super().__init__(stack, block=block)
        self.draft = stack.draft
        self.features = torch.empty(0)

    def reset(self, rows: int, capacity: int) -> None:
        """Empty; nothing has produced the first token of a text."""
        super().reset(rows, capacity)
        width, dtype = self.draft.target.width, self.draft.inputs.weight.dtype
        self.features = torch.zeros(rows, capacity + 2, width, dtype=dtype, device=self.stack.device)

    def hear(
        self, ids: Tensor, states: Tensor, starts: Sequence[int], counts: Sequence[int], rows: Sequence[int] | None
    ) -> None:
        """The target has read (as `pacer.decoding.lane.Heard`)."""
        self._keep(self.draft.heard(states), starts, counts, rows)

    def feed_ids(
        self, ids: Tensor, counts: Sequence[int], rows: Sequence[int] | None = None, tree: Tree | None = None
    ) -> Tensor:
        """Read ids ``(B, n)`` with the features of their places; what the last one produces is known from then on."""
        assert tree is None, "it drafts a chain"
        chosen = list(range(len(self.lengths)) if rows is None else rows)
        starts = [self.lengths[i] for i in chosen]
        at, _ = places(starts, ids.shape[1], counts, ids.device)
        produced = self.features[self._numbers(chosen), at.clamp_max(self.features.shape[1] - 1)]
        states = self.feed(self.draft.entries(produced, ids), counts, rows)
        last, ends = self.draft.features(last_of(states, counts)), [s + c for s, c in zip(starts, counts, strict=True)]
        self._keep(last, [end - 1 for end in ends], [min(count, 1) for count in counts], chosen)
        if self.heard is not None:
            self.heard(ids, states, starts, counts, rows)
        return states

    def _keep(self, features: Tensor, starts: Sequence[int], counts: Sequence[int], rows: Sequence[int] | None) -> None:
        """Note what tokens ``(B, n)`` produced one place on."""
        at, real = places(starts, features.shape[1], counts, features.device)
        slots = torch.where(real, at + 1, self.features.shape[1] - 1)
        chosen = range(len(self.features)) if rows is None else rows
        self.features[self._numbers(chosen), slots] = features.to(self.features.dtype)

    def _numbers(self, rows: Sequence[int]) -> Tensor:
        return torch.tensor(list(rows), device=self.features.device)[:, None]


class FeatureDrafter(ModelDrafter):
    """Drafts with a layer on the target's features.

    Args:
        target: reads tokens into the target; it is listened to, so prompts must not be shared behind it.
    """

    def __init__(
        self,
        stack: FeatureStack,
        vocab_size: int,
        sampling: SamplingSettings,
        target: Reader,
        *,
        record: bool = False,
        block: int | None = None,
    ) -> None:
        lane = FeatureLane(stack, block)
        super().__init__(stack, vocab_size, sampling, record=record, reader=lane)
        target.heard = lane.hear
        self._verified: list[int] = []  # of each row, the entries that are made of the target's features

    def reset(self, rows: Sequence[Row], capacity: int) -> None:
        super().reset(rows, capacity)
        self._verified = [0] * len(rows)

    def read(self, rows: Sequence[Row], wanted: Sequence[bool]) -> None:
        """Read the committed tokens it has not seen; after a prefill that is the prompt, too."""
        super().read(rows, wanted)
        self._verified = list(self.lane.lengths)

    def truncate(self, lengths: Sequence[int]) -> None:
        """Forget the whole draft: what was accepted is read again, with the target's features."""
        super().truncate([min(length, sure) for length, sure in zip(lengths, self._verified, strict=True)])
