"""Paged key/value memory: fixed blocks in one pool, a block table per row, shared prefixes copied on write.

Same interface as the contiguous cache, other memory: a row holds blocks for the tokens it has, so it wastes less than
one block, a rejected draft's blocks go back to the pool, and rows with an equal prefix hold it once. Which blocks
those are is host data (:mod:`pacer.models.blocks`); one table tensor is made per forward.

A single row in consecutive blocks, which is how they are handed out, is read where it lies. Otherwise each layer
gathers the rows' blocks before attention, on every device: no paged attention kernel is used, and
:meth:`PagedCache.workspace_bytes` says how much memory that took. What lies between a row's length and the extent is
finite: blocks are zeroed when handed out, and a short row's table is filled up with a block of zeros that is never
written to.

Shapes: R rows, T capacity of a row, N blocks, P places of a block, B rows of a call, n new tokens, S extent read,
W blocks that cover it, G key/value heads, D head, L layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pacer.errors import DecodingError
from pacer.models.blocks import Blocks
from pacer.models.cache import Cache, ContiguousCache, KeyValues, check_room

ZEROS, SCRATCH, FIRST = 0, 1, 2  # block 0 is read only, block 1 is written only (by padding), the rest are rows'


class PagedCache(KeyValues):
    """Keys and values of consecutive layers in a pool ``(L, N, P, G, D)`` each.

    Args:
        layers: absolute layer indices held, e.g. ``range(0, 4)``.
        rows: R. capacity: T, tokens a single row can hold.
        block: P, tokens to a block.
        capacity_tokens: size of the pool, which then never grows; None: it doubles when it is used up.
    """

    def __init__(
        self,
        layers: Sequence[int],
        rows: int,
        capacity: int,
        kv_heads: int,
        head_dim: int,
        *,
        block: int,
        dtype: torch.dtype,
        device: torch.device,
        capacity_tokens: int | None = None,
    ) -> None:
        self.first, self.rows, self.capacity, self.block = layers[0] if len(layers) else 0, rows, capacity, block
        self.fixed = capacity_tokens is not None
        self.blocks = Blocks(rows, block, FIRST)
        shape = (len(layers), FIRST, block, kv_heads, head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self._index: Tensor | None = None
        self._table = torch.empty(0)
        self._rows = self._extent = self._workspace = 0
        self._start: int | None = None
        if capacity_tokens:
            self._grow(self.blocks.count(capacity_tokens))

    def reserve(self, ends: Sequence[int]) -> None:
        """Give row i blocks for its first ``ends[i]`` tokens; a shared one that it would write to is copied here.

        Raises:
            DecodingError: a row or the pool of fixed size is full; nothing was changed.
        """
        check_room(max(ends), self.capacity)
        missing = self.blocks.missing(ends)
        short = missing - len(self.blocks.free)
        if short > 0 and self.fixed:
            raise DecodingError(
                "the pool of key/value blocks is used up",
                value=f"{(len(self.blocks.references) + missing) * self.block} tokens needed",
                allowed=f"{self.blocks.total * self.block} tokens in blocks of {self.block}",
                remedy="raise capacity_tokens or decode fewer rows at once",
            )
        if short > 0:
            self._grow(max(short, self.blocks.total))
        taken, copies = self.blocks.reserve(ends)
        if not taken:
            return
        fresh = torch.tensor(taken, device=self.keys.device)
        for store in (self.keys, self.values):
            store.index_fill_(1, fresh, 0)  # what an earlier row left there may be NaN, which a mask does not hide
            for source, target, tokens in copies:
                store[:, target, :tokens] = store[:, source, :tokens]

    def at(self, slots_Bn: Tensor, extent: int, rows: Sequence[int] | None = None) -> PagedCache:
        """Set where the next forward writes: slots ``(B, n)`` in [0, T] (T: scratch), how far it reads, which rows.

        Raises:
            DecodingError: no row has so much room; :meth:`reserve` comes first.
        """
        chosen, size = list(range(slots_Bn.shape[0]) if rows is None else rows), self.block
        check_room(extent, self.capacity)
        longest = max(self.blocks.lengths[row] for row in chosen)
        if extent > longest:
            raise DecodingError("no blocks were reserved", value=extent, allowed=f"up to {longest} tokens")
        width = max(1, self.blocks.count(extent))
        tables = [self.blocks.tables[row][:width] for row in chosen]
        tables = [table + [ZEROS] * (width - len(table)) for table in tables]
        table_BW = torch.tensor(tables, device=slots_Bn.device)
        blocks_Bn = table_BW.gather(1, (slots_Bn // size).clamp_max(width - 1))
        padding = (slots_Bn >= extent) | (blocks_Bn == ZEROS)
        self._index = torch.where(padding, SCRATCH * size, blocks_Bn * size + slots_Bn % size).flatten()
        self._table, self._rows, self._extent = table_BW.flatten(), len(chosen), extent
        in_order = len(chosen) == 1 and tables[0] == list(range(tables[0][0], tables[0][0] + width))
        self._start = tables[0][0] * size if in_order else None
        if not in_order:
            self._workspace = max(self._workspace, 2 * table_BW.numel() * self.keys[0, 0].nbytes)
        return self

    def _write(self, store: Tensor, new: Tensor) -> Tensor:
        assert self._index is not None, "at() comes before the forward"
        places = store.flatten(0, 1)  # (N · P, G, D)
        places.index_copy_(0, self._index, new.transpose(1, 2).flatten(0, 1).to(store.dtype))
        if self._start is not None:
            return places[None, self._start : self._start + self._extent].transpose(1, 2)
        rows = store.index_select(0, self._table).view(self._rows, -1, *store.shape[2:])  # (B, W · P, G, D)
        return rows[:, : self._extent].transpose(1, 2)

    def _place(self, row: int, slot: int) -> int:
        return self.blocks.tables[row][slot // self.block] * self.block + slot % self.block

    def truncate(self, lengths: Sequence[int]) -> None:
        """Row i keeps blocks for ``lengths[i]`` tokens, the others go back to the pool."""
        self.blocks.truncate(lengths)

    def release(self, row: int) -> None:
        """All blocks of a row go back to the pool."""
        self.blocks.release(row)

    def share(self, row: int, other: int, length: int) -> None:
        """The empty ``row`` holds the blocks of ``other``'s first ``length`` tokens too; nothing is copied yet."""
        self.blocks.share(row, other, length)

    def clear(self, rows: int, capacity: int) -> None:
        """All blocks go back to the pool."""
        self.blocks.truncate([0] * self.rows)

    def allocated_tokens(self) -> int:
        """Places of the blocks that rows hold."""
        return len(self.blocks.references) * self.block

    def workspace_bytes(self) -> int:
        """The largest gather so far: keys and values of one layer."""
        return self._workspace

    def _grow(self, blocks: int) -> None:
        """More free blocks; content is kept, and old and new pool stand side by side while it is copied."""
        self.blocks.grow(blocks)
        self.keys, self.values = (_longer(store, blocks) for store in (self.keys, self.values))


def _longer(pool: Tensor, blocks: int) -> Tensor:
    longer = pool.new_empty(pool.shape[0], pool.shape[1] + blocks, *pool.shape[2:])
    longer[:, : pool.shape[1]] = pool
    return longer


def make_cache(
    layers: Sequence[int], rows: int, capacity: int, kv_heads: int, head_dim: int, block: int | None, **where: Any
) -> Cache:
    """A cache in blocks of ``block`` tokens, or (None) a contiguous one; ``where``: dtype and device."""
    if block is None:
        return ContiguousCache(layers, rows, capacity, kv_heads, head_dim, **where)
    return PagedCache(layers, rows, capacity, kv_heads, head_dim, block=block, **where)
