"""Key/value memory: one interface, one length per row, rollback is a length. Here: preallocated rows.

A cache is handed to a transformers decoder as its ``cache`` argument. Before each forward the caller makes room
(:meth:`Cache.reserve`) and says where the new entries go (:meth:`Cache.at`); ``update`` writes them and returns the
keys and values to attend to. Which of those a query may see is the mask's business alone, so entries beyond a row's
length need no cleaning, as long as they are finite: 0 · NaN = NaN.

Shapes: R rows, T capacity, B rows of a call, n new tokens, S extent read, G key/value heads, D head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from pacer.errors import DecodingError


class Cache(Protocol):
    """Keys and values of R rows. A slot is a place in a row, 0 … T − 1; slot T takes padded writes, is never read."""

    keys: Tensor
    values: Tensor
    rows: int
    capacity: int

    def reserve(self, ends: Sequence[int]) -> None:
        """Make room for the first ``ends[i]`` tokens of row i, its own from its present length on.

        Whoever writes over earlier entries truncates first.
        """

    def at(self, slots_Bn: Tensor, extent: int, rows: Sequence[int] | None = None) -> Cache:
        """Set where the next forward writes, ``(B, n)`` slots in [0, T], how far it reads, and in which rows.

        ``rows``: None: the first B.
        """

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Write ``(B, G, n, D)`` entries at the set places; return all up to the extent, ``(B, G, S, D)``."""

    def move(self, slots: Mapping[int, Sequence[int]], firsts: Mapping[int, int]) -> None:
        """Entries at ``slots[row]`` of a row go to consecutive places from ``firsts[row]`` on, none of them later."""

    def truncate(self, lengths: Sequence[int]) -> None:
        """Entries of row i beyond ``lengths[i]`` tokens are not needed any more."""

    def release(self, row: int) -> None:
        """A row is finished: the next text there starts from nothing."""

    def share(self, row: int, other: int, length: int) -> None:
        """The empty ``row`` begins with the first ``length`` tokens of ``other``."""

    def clear(self, rows: int, capacity: int) -> None:
        """Empty, for so many rows and tokens of what there is."""

    def allocated_tokens(self) -> int:
        """Places set apart for tokens, used or not; padding's excluded."""

    def nbytes(self) -> int:
        """Memory of all keys and values."""

    def workspace_bytes(self) -> int:
        """Memory that reading took beside it, at most."""


def check_room(tokens: int, capacity: int) -> None:
    """Raises:
    DecodingError: a row is to hold more than it can.
    """
    if tokens > capacity:
        raise DecodingError(
            "cache is full", value=tokens, allowed=f"up to {capacity} tokens", remedy="reset with more room"
        )


class KeyValues:
    """What is alike in every cache: a layer's entries are written at the places set, and returned with all others."""

    is_compileable = False  # transformers asks before it builds masks
    keys: Tensor
    values: Tensor
    first: int
    _extent: int

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Write ``(B, G, n, D)`` entries at the set places; return all up to the extent, ``(B, G, S, D)``."""
        return (
            self._write(self.keys[layer_idx - self.first], keys),
            self._write(self.values[layer_idx - self.first], values),
        )

    def move(self, slots: Mapping[int, Sequence[int]], firsts: Mapping[int, int]) -> None:
        """Entries at ``slots[row]`` of a row go to consecutive places from ``firsts[row]`` on; what is there stays."""
        moves = [
            (self._place(row, slot), self._place(row, firsts[row] + k))
            for row, chosen in slots.items()
            for k, slot in enumerate(chosen)
            if slot != firsts[row] + k
        ]
        if not moves:
            return
        source, target = torch.tensor(moves, device=self.keys.device).unbind(1)
        for store in (self.keys, self.values):
            places = store.flatten(1, 2)  # (L, all places, G, D)
            places.index_copy_(1, target, places.index_select(1, source))

    def _write(self, store: Tensor, new: Tensor) -> Tensor:
        raise NotImplementedError  # where entries lie is what caches differ in

    def _place(self, row: int, slot: int) -> int:
        raise NotImplementedError  # likewise

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """What transformers sees as the past length; only asked where no explicit mask was given."""
        return self._extent

    def nbytes(self) -> int:
        """All keys and values, used or not."""
        return self.keys.nbytes + self.values.nbytes


class ContiguousCache(KeyValues):
    """Keys and values of consecutive layers, ``(R, T + 1, G, D)`` each; slot T of a row takes padded writes.

    Args:
        layers: absolute layer indices held, e.g. ``range(0, 4)``.
        rows: R. capacity: T, tokens a row can hold.
    """

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
        self._rows: slice | Tensor = slice(0)
        self._extent = self._workspace = 0

    def reserve(self, ends: Sequence[int]) -> None:
        """All room is there from the start."""
        check_room(max(ends), self.capacity)

    def at(self, slots_Bn: Tensor, extent: int, rows: Sequence[int] | None = None) -> ContiguousCache:
        """Set where the next forward writes: slots ``(B, n)`` in [0, T] (T: scratch), how far it reads, which rows."""
        check_room(extent, self.capacity)
        chosen = list(range(slots_Bn.shape[0]) if rows is None else rows)
        numbers = torch.tensor(chosen, device=slots_Bn.device)
        self._index = (numbers[:, None] * (self.capacity + 1) + slots_Bn).flatten()
        self._extent, self._rows = extent, numbers
        if chosen == list(range(chosen[0], chosen[0] + len(chosen))):  # lie side by side: read without a copy
            self._rows = slice(chosen[0], chosen[0] + len(chosen))
        else:
            self._workspace = max(self._workspace, 2 * len(chosen) * extent * self.keys[0, 0, 0].nbytes)
        return self

    def _write(self, store: Tensor, new: Tensor) -> Tensor:
        assert self._index is not None, "at() comes before the forward"
        store.flatten(0, 1).index_copy_(0, self._index, new.transpose(1, 2).flatten(0, 1).to(store.dtype))
        return store[:, : self._extent][self._rows].transpose(1, 2)

    def _place(self, row: int, slot: int) -> int:
        return row * (self.capacity + 1) + slot

    def truncate(self, lengths: Sequence[int]) -> None:
        """Nothing: the mask hides what is beyond."""

    def release(self, row: int) -> None:
        """Zero the row, since a masked NaN would still reach the next text there."""
        for store in (self.keys, self.values):
            store[:, row].zero_()

    def share(self, row: int, other: int, length: int) -> None:
        """Copy the first ``length`` tokens of ``other``."""
        for store in (self.keys, self.values):
            store[:, row, :length] = store[:, other, :length]

    def clear(self, rows: int, capacity: int) -> None:
        """Zero what will be used. A masked NaN would still reach every query: 0 · NaN = NaN."""
        for store in (self.keys, self.values):
            store[:, :rows, :capacity].zero_()
            store[:, :rows, self.capacity].zero_()

    def allocated_tokens(self) -> int:
        return self.rows * self.capacity

    def workspace_bytes(self) -> int:
        """The largest copy so far of rows that do not lie side by side: keys and values of one layer."""
        return self._workspace
