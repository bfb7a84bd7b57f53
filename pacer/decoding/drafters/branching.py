"""What makes whole drafts at once, which may branch (`pacer.decoding.tree`): no token waits for the one before it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from pacer.decoding.clock import Clock
from pacer.decoding.parts import Part
from pacer.decoding.propose import Draft, Proposes
from pacer.decoding.request import Row
from pacer.decoding.tree import Trie, packed


class Branching(Part, Proposes):
    """Drafts from what it remembers, on the host.

    Args:
        context: of the verifier; a draft never reaches past it.

    Attributes:
        rules: kinds of length rules that it works with; "none": its drafts have a length of their own.
    """

    section: ClassVar[str] = "drafting"
    rules: ClassVar[tuple[str, ...]] = ("none",)

    def __init__(self, context: int, device: torch.device, clock: Clock) -> None:
        self.context, self.device, self.clock = context, device, clock

    def reset(self, rows: Sequence[Row], capacity: int, stop_ids: Tensor) -> None:
        for index, row in enumerate(rows):
            self.admit(index, row)

    def admit(self, index: int, row: Row) -> None:
        raise NotImplementedError  # what is remembered of a row begins here

    def grow(self, index: int, row: Row, limit: int) -> Trie:
        """The draft of a row, no branch longer than ``limit`` ≥ 1."""
        raise NotImplementedError  # the one question that has no answer of its own

    def propose(self, rows: Sequence[Row]) -> Draft:
        tries, stops = [], []
        for index, row in enumerate(rows):
            limits = {"budget": row.left - 1, "context": self.context - len(row.committed)}
            reason = min(limits, key=lambda name: limits[name])
            limit = 0 if row.finish is not None else max(0, limits[reason])
            tries.append(self.grow(index, row, limit) if limit else Trie(0))
            stops.append("ngrams" if limit else reason)
        tokens, parents, counts = packed(tries, self.device)
        self.clock.lap("draft")
        return Draft(tokens, None, None, counts, stops, parents=parents)

    def end(self, before: Sequence[int], verified: Sequence[int], chosen: Sequence[int]) -> None:
        """Nothing is undone: what it remembers is of texts and choices, not of drafts."""
