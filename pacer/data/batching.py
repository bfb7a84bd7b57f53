"""Batches by token budget, in an order that is a function of the seed alone, and a loader that can be resumed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np


def token_batches(lengths: Sequence[int], budget: int, *, seed: int, epochs: int = 1) -> list[list[int]]:
    """Indices grouped so that ``rows × longest row ≤ budget``: neighbours in length share a batch, batches shuffled.

    Args:
        lengths: tokens per item. budget: tokens per batch; a longer item gets a batch of its own.

    Returns:
        Batches of all epochs, one after the other; every index occurs once per epoch.
    """
    batches: list[list[int]] = []
    for epoch in range(epochs):
        rng = np.random.default_rng([seed, epoch])
        jitter = np.asarray(lengths) * rng.uniform(0.9, 1.1, len(lengths))  # new neighbours each epoch
        groups: list[list[int]] = []
        for index in np.argsort(jitter, kind="stable").tolist():
            group = groups[-1] if groups else None
            longest = max([lengths[index], *(lengths[i] for i in group or [])])
            if group is not None and longest * (len(group) + 1) <= budget:
                group.append(index)
            else:
                groups.append([index])
        batches += [groups[i] for i in rng.permutation(len(groups))]
    return batches


class Loader:
    """All training batches as one pass, collated on demand; its state is the number of batches handed out.

    Lightning saves and restores ``state_dict``, so a resumed run sees exactly the batches the other would have seen.
    """

    def __init__(self, batches: Sequence[Any], collate: Callable[[Any], Any]) -> None:
        self.batches, self.collate, self.position = batches, collate, 0

    def share(self, rank: int, world: int) -> Loader:
        """Every ``world``-th batch, for one of so many processes. Shares are equally long: what the last round lacks is
        filled up with the last batch."""
        batches = list(self.batches)
        batches += batches[-1:] * (-len(batches) % world)
        return Loader(batches[rank::world], self.collate)

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        start = self.position if self.position < len(self.batches) else 0  # the last pass may have ended early
        for index in range(start, len(self.batches)):
            self.position = index + 1
            yield self.collate(self.batches[index])
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]
