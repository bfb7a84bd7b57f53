"""A drafter fed by the target, seen as a model: so that drafting, records and pre-verifiers work with it."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from pacer.models.cache import Cache
from pacer.models.copying import Copied
from pacer.models.feature import FeatureDraft
from pacer.models.stack import Stack


class FeatureStack(Stack):
    """The drafter's layer and readout over the target's embedding; what the layer reads are the drafter's entries.

    Args:
        draft: the drafter of a target's features.
    """

    def __init__(self, draft: FeatureDraft) -> None:
        self.__dict__.update(draft.target.__dict__)  # the same embedding and config; a stack is built once per model
        self.draft, self.decoder, self.family = draft, draft, replace(self.family, layers="layers")
        self.norm, self.head = draft.layers.norm, draft.head
        self.n_layers, self.head_ids, self.copying = draft.layers.n_layers, draft.head_ids, None

    def embed(self, ids: Tensor) -> Tensor:
        """The target's embedding ``(B, n)`` → ``(B, n, H)``."""
        return self.draft.target.embed(ids)

    def run(
        self,
        x: Tensor,
        a: int,
        b: int,
        positions: Tensor,
        mask: Tensor | BlockMask | None,
        cache: Cache | None = None,
    ) -> Tensor:
        """The layer on entries ``(B, n, H)``."""
        return self.draft.layers.run(x, a, b, positions, mask, cache)

    def text_entries(self, ids: Tensor, positions: Tensor, mask: Tensor | BlockMask | None) -> Tensor:
        """With the target's features, from one pass of it without memory."""
        features = self._heard(ids, positions, mask)
        return self.draft.entries(F.pad(features[:, :-1], (0, 0, 1, 0)), ids)

    def next_entries(self, ids: Tensor, states: Tensor) -> Tensor:
        """With own features."""
        return self.draft.entries(self.draft.features(states), ids)

    def read_packed(
        self, ids: Tensor, positions: Tensor, mask: Tensor | BlockMask, source: Tensor, index: Tensor
    ) -> Tensor:
        """With the target's features on the texts and own ones in the drafts, one pass for each of a draft's tokens."""
        at = source.clamp_min(0)[..., None].expand(-1, -1, self.width)
        heard = self._heard(ids, positions, mask).gather(1, at)
        produced = torch.where((source >= 0)[..., None], heard, 0.0)
        for place in range(1, int(index.max()) + 2):
            states = self.run(self.draft.entries(produced, ids), 0, self.n_layers, positions, mask)
            own = self.draft.features(states).gather(1, at)
            produced = torch.where((index == place)[..., None], own.to(produced.dtype), produced)
        return states

    def _heard(self, ids: Tensor, positions: Tensor, mask: Tensor | BlockMask | None) -> Tensor:
        target = self.draft.target
        return self.draft.heard(target.run(target.embed(ids), 0, target.n_layers, positions, mask))

    def new_cache(self, rows: int, capacity: int, a: int = 0, b: int | None = None, block: int | None = None) -> Cache:
        """A cache for the layer."""
        return self.draft.layers.new_cache(rows, capacity, a, b, block)

    def readout(self, states: Tensor, copied: Copied | None = None) -> Tensor:
        """What the drafter reads out: ``(…, H)`` → ``(…, V')``."""
        return self.draft.readout(states)
