"""Prompt lookup: what followed the text's last tokens earlier, in the prompt or in the output, is the draft.

The rule of transformers' ``prompt_lookup_num_tokens``: the longest n-gram that ends the text and has been there before.
There the earliest match counts; here the latest does by default, and several matches make a draft that branches.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import islice

import torch
from torch import Tensor

from pacer.decoding.clock import Clock
from pacer.decoding.drafters.branching import Branching
from pacer.decoding.parts import SIZE, allows
from pacer.decoding.request import Row
from pacer.decoding.tree import ROOT, Trie

TRIED = 8  # matches looked at per wanted branch: most of those of a frequent n-gram go on alike


@allows(longest=SIZE, branches=SIZE, prefer=("latest", "earliest"))
class PromptLookup(Branching):
    """Drafts up to ``gamma`` tokens.

    Args:
        longest: tokens of the longest n-gram that is looked up; shorter ones follow.
        branches: different continuations; those of longer matches first. prefer: of equal length: latest | earliest.
    """

    rules = ("fixed",)

    def __init__(
        self,
        context: int,
        device: torch.device,
        clock: Clock,
        gamma: int = 10,
        longest: int = 3,
        branches: int = 1,
        prefer: str = "latest",
    ) -> None:
        super().__init__(context, device, clock)
        self.check({"longest": longest, "branches": branches, "prefer": prefer})
        self.gamma, self.longest, self.branches, self.prefer = gamma, longest, branches, prefer
        self.spare = gamma * (branches - 1)
        self._after: list[dict[tuple[int, ...], list[int]]] = []  # of each row: n-gram → the places after it
        self._read: list[int] = []  # tokens of each row that are in there

    def reset(self, rows: Sequence[Row], capacity: int, stop_ids: Tensor) -> None:
        self._after, self._read = [{} for _ in rows], [0] * len(rows)
        super().reset(rows, capacity, stop_ids)

    def admit(self, index: int, row: Row) -> None:
        self._after[index], self._read[index] = defaultdict(list), 0

    def grow(self, index: int, row: Row, limit: int) -> Trie:
        text, after, trie = row.committed, self._after[index], Trie(min(limit, self.gamma))
        for place in range(self._read[index], len(text)):
            for n in range(1, min(self.longest, place) + 1):
                after[tuple(text[place - n : place])].append(place)
        self._read[index] = len(text)
        found = 0
        for n in range(min(self.longest, len(text) - 1), 0, -1):
            places = after.get(tuple(text[-n:]), [])
            ordered = reversed(places) if self.prefer == "latest" else iter(places)
            for place in islice(ordered, TRIED * self.branches):
                size = len(trie.tokens)
                trie.branch(ROOT, text[place : place + trie.limit])
                found += len(trie.tokens) > size
                if found == self.branches:
                    return trie
        return trie
