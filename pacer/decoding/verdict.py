"""What became of drafts: plain numbers per row, read from the device at once.

Shapes: B rows that are verified, g drafted tokens (of the longest row), V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from pacer.decoding.propose import Draft


@dataclass
class Verdict:
    """What became of a draft, as one read from the device: plain numbers per row."""

    drafted: list[list[int]]  # the drafted ids, up to and with a stop id; of a tree, all
    accepted: list[int]
    following: list[int]  # the verifier's own next token: correction or bonus
    scores: list[list[float]]  # the controller's estimates
    bad: list[int]  # first place whose logits are not finite (0: after the prefix, k: after token k), or −1
    probs: Tensor | None  # (B, g + 1, V) what the emitted tokens are distributed as; None: greedy
    parents: list[list[int]] | None = None  # of a tree's tokens
    branches: list[list[int]] | None = None  # the accepted nodes of a tree, in their order
    choices: list[list[int]] | None = None  # the verifier's likeliest id after the prefix and each draft, where asked
    unchecked: list[int] | None = None  # leading drafts that were kept without being asked about (`last_only.py`)

    def survivors(self, j: int) -> list[int]:
        """The accepted ids of row j."""
        drafted = self.drafted[j]
        return drafted[: self.accepted[j]] if self.branches is None else [drafted[node] for node in self.branches[j]]

    def exhausted(self, j: int) -> bool:
        """Whether nothing was drafted that would follow what was accepted of row j."""
        if self.parents is None or self.branches is None:
            return self.accepted[j] == len(self.drafted[j])
        return [-1, *self.branches[j]][-1] not in self.parents[j]

    def distance(self, j: int) -> int:
        """How many tokens behind the prefix row j's first logits are that are not finite."""
        if self.parents is None:
            return self.bad[j]
        depth, node = 0, self.bad[j] - 1
        while node >= 0:
            depth, node = depth + 1, self.parents[j][node]
        return depth

    def along(self, values: Tensor) -> Tensor:
        """Of ``(B, g + 1, …)`` after the prefix and each draft, what lies along accepted branches; of a chain, all."""
        if self.branches is None:
            return values
        longest = max(len(branch) for branch in self.branches)
        places = [[0, *(node + 1 for node in b), *[0] * (longest - len(b))] for b in self.branches]
        return values.gather(1, torch.tensor(places, device=values.device)[..., None].expand(-1, -1, values.shape[2]))


def read_verdict(
    draft: Draft, numbers: Tensor, probs: Tensor | None, branch: Tensor | None, choice: Tensor | None
) -> Verdict:
    """One host read of all that is known of a round. ``numbers (B, 4)``: accepted, following, counts, bad."""
    none = torch.empty(len(numbers), 0, device=numbers.device)
    parts = [numbers, draft.tokens, none if draft.scores is None else draft.scores]
    if branch is not None:
        assert draft.parents is not None
        parts += [draft.parents, branch]
    parts += [] if choice is None else [choice]
    ends = list(accumulate(part.shape[1] for part in parts))
    values = torch.cat([part.double() for part in parts], 1).tolist()
    told = [[row[a:b] for row in values] for a, b in pairwise([0, *ends])]
    heads = [[int(v) for v in row] for row in told[0]]
    counts = [head[2] for head in heads]

    def whole(part: list[list[float]]) -> list[list[int]]:
        return [[int(v) for v in row[:count]] for row, count in zip(part, counts, strict=True)]

    return Verdict(
        drafted=whole(told[1]),
        accepted=[head[0] for head in heads],
        following=[head[1] for head in heads],
        scores=told[2],
        bad=[head[3] for head in heads],
        probs=probs,
        parents=None if branch is None else whole(told[3]),
        branches=None if branch is None else [[n for n, kept in enumerate(row) if kept] for row in told[4]],
        choices=None if choice is None else [[int(v) for v in row] for row in told[-1]],
    )  # fmt: skip
