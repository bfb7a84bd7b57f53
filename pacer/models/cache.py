"""Key/value memory: preallocated, one length per row, rollback is a length.

A cache is handed to a transformers decoder as its ``cache`` argument. Before each forward the caller says where the
new entries go (:meth:`ContiguousCache.at`); ``update`` writes them and returns the keys and values to attend to.
Which of those a query may see is the mask's business alone, so entries beyond a row's length need no cleaning.

Shapes: R rows, T capacity, B rows of a call (the first B of R), n new tokens, S extent read, G key/value heads, D head.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pacer.errors import DecodingError


class ContiguousCache:
    """Keys and values of consecutive layers, ``(R, T + 1, G, D)`` each; slot T of a row takes padded writes.

    Args:
        layers: absolute layer indices held, e.g. ``range(0, 4)``.
        rows: R. capacity: T, tokens a row can hold.
    """

    is_compileable = False  # transformers asks before it builds masks

    def __init__(
        self,
        layers: Sequence[int],
        rows: int,
        capacity: int,
        kv_heads: int,
        head_dim: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (len(layers), rows, capacity + 1, kv_heads, head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.first, self.rows, self.capacity = layers[0] if len(layers) else 0, rows, capacity
        self._index: Tensor | None = None
        self._rows = self._extent = 0

    def at(self, slots_Bn: Tensor, extent: int) -> ContiguousCache:
        """Set where the next forward writes: slots ``(B, n)`` in [0, T] (T is scratch) and how far it reads."""
        if extent > self.capacity:
            raise DecodingError(
                "cache is full", value=extent, allowed=f"up to {self.capacity} tokens", remedy="reset with more room"
            )
        rows = torch.arange(slots_Bn.shape[0], device=slots_Bn.device)
        self._index = (rows[:, None] * (self.capacity + 1) + slots_Bn).flatten()
        self._rows, self._extent = slots_Bn.shape[0], extent
        return self

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Write ``(B, G, n, D)`` entries at the set places; return views ``(B, G, S, D)`` of all up to the extent."""
        return (
            self._write(self.keys[layer_idx - self.first], keys),
            self._write(self.values[layer_idx - self.first], values),
        )

    def _write(self, store: Tensor, new: Tensor) -> Tensor:
        assert self._index is not None, "at() comes before the forward"
        store.flatten(0, 1).index_copy_(0, self._index, new.transpose(1, 2).flatten(0, 1).to(store.dtype))
        return store[: self._rows, : self._extent].transpose(1, 2)

    def clear(self, rows: int, capacity: int) -> None:
        """Zero what will be used. A masked NaN would still reach every query: 0 · NaN = NaN."""
        for store in (self.keys, self.values):
            store[:, :rows, :capacity].zero_()
            store[:, :rows, self.capacity].zero_()

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """What transformers sees as the past length; only asked where no explicit mask was given."""
        return self._extent

    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes
