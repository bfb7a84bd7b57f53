"""A model reading the requests of a batch: its cache and how many tokens of each row are in it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pacer.models.cache import ContiguousCache
from pacer.models.preverifier_layer import Layers
from pacer.models.stack import Stack, causal_mask

PREFILL_CHUNK = 1024  # tokens of a prompt read at once: bounds the memory of the mask and the activations


class Lane:
    """Layers ``a … b`` of a stack over B rows. ``lengths[i]`` tokens of row i are in the cache; rollback sets it."""

    def __init__(self, stack: Stack | Layers, a: int = 0, b: int | None = None) -> None:
        self.stack, self.a, self.b = stack, a, stack.n_layers if b is None else b
        self.lengths: list[int] = []
        self._cache: ContiguousCache | None = None

    def reset(self, rows: int, capacity: int) -> None:
        """Empty, with room for ``capacity`` tokens in each of ``rows`` rows; memory is kept where it is enough."""
        if self._cache is None or self._cache.rows < rows or self._cache.capacity < capacity:
            self._cache = self.stack.new_cache(rows, capacity, self.a, self.b)
        else:
            self._cache.clear(rows, capacity)  # a mask hides old entries, but not NaN
        self.lengths = [0] * rows

    @property
    def cache(self) -> ContiguousCache:
        assert self._cache is not None, "reset() comes first"
        return self._cache

    def places(self, n: int, counts: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Positions ``(B, n)`` of the next n tokens, and which of them are real (row i has ``counts[i]``)."""
        packed = torch.tensor([self.lengths, list(counts)], device=self.stack.device)  # one copy to the device
        steps = torch.arange(n, device=packed.device)
        return packed[0, :, None] + steps, steps < packed[1, :, None]

    def feed(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """Read states ``(B, n, H)``; row i has ``counts[i]`` of them, left-aligned, the rest is padding.

        Returns:
            ``(B, n, H)`` states after layer b − 1, before the final norm; padding positions hold no meaning.
        """
        n, outputs = x.shape[1], []
        for start in range(0, n, PREFILL_CHUNK):
            part = x[:, start : start + PREFILL_CHUNK]
            inside = [min(max(c - start, 0), part.shape[1]) for c in counts]
            positions, real = self.places(part.shape[1], inside)
            extent = max(length + count for length, count in zip(self.lengths, inside, strict=True))
            slots = positions if min(inside) == part.shape[1] else torch.where(real, positions, self.cache.capacity)
            cache = self.cache.at(slots, extent)
            mask = causal_mask(positions, extent)
            outputs.append(self.stack.run(part, self.a, self.b, positions, mask, cache))
            self.lengths = [length + count for length, count in zip(self.lengths, inside, strict=True)]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)

    def feed_ids(self, ids: Tensor, counts: Sequence[int]) -> Tensor:
        """:meth:`feed` for token ids ``(B, n)``."""
        assert isinstance(self.stack, Stack), "a pre-verifier's layers read entries, not ids"
        return self.feed(self.stack.embed(ids), counts)

    def truncate(self, lengths: Sequence[int]) -> None:
        """Forget all beyond ``lengths``; a row that is shorter already keeps its length. Nothing is moved."""
        self.lengths = [min(have, keep) for have, keep in zip(self.lengths, lengths, strict=True)]


def padded(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, list[int]]:
    """Ragged host ids as ``(B, n)`` on the device, left-aligned, and the counts."""
    counts = [len(row) for row in rows]
    width = max(counts)
    return torch.tensor([[*row, *([0] * (width - len(row)))] for row in rows], device=device), counts


def last_of(states: Tensor, counts: Sequence[int]) -> Tensor:
    """The state of each row's last real token: ``(B, n, H)`` → ``(B, 1, H)``."""
    if min(counts) == states.shape[1]:
        return states[:, -1:]
    index = torch.tensor([max(c - 1, 0) for c in counts], device=states.device)
    return states.gather(1, index[:, None, None].expand(-1, 1, states.shape[2]))
