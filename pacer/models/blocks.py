"""Which blocks of a paged memory each row holds: tables, reference counts, free blocks. Numbers only, no tensor.

A row's tokens lie in its blocks in order, ``size`` to a block; only its last block may be partly filled. Rows with an
equal prefix may hold the same blocks. No row writes to a block that another one holds too: :meth:`Blocks.reserve`
replaces a shared, partly filled block by a copy before the row goes on in it (copy-on-write).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple


class Copy(NamedTuple):
    """The first ``tokens`` places of block ``source`` are to be copied to block ``target``."""

    source: int
    target: int
    tokens: int


class Blocks:
    """Block tables of ``rows`` rows over numbered blocks, of which there are none until :meth:`grow`.

    Args:
        size: tokens to a block.
        first: number of the first block; lower ones are the owner's.
    """

    def __init__(self, rows: int, size: int, first: int = 0) -> None:
        self.size, self.first, self.total = size, first, 0
        self.tables: list[list[int]] = [[] for _ in range(rows)]
        self.lengths = [0] * rows
        self.references: dict[int, int] = {}  # block → rows that hold it
        self.free: set[int] = set()

    def count(self, tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-tokens // self.size)

    def grow(self, blocks: int) -> None:
        """Add free blocks, numbered on from the last."""
        end = self.first + self.total
        self.free.update(range(end, end + blocks))
        self.total += blocks

    def missing(self, ends: Sequence[int]) -> int:
        """Free blocks that :meth:`reserve` would take."""
        more = sum(max(0, self.count(end) - len(table)) for end, table in zip(ends, self.tables, strict=False))
        entered = Counter(self._entered(row, end) for row, end in enumerate(ends))
        # when every holder of a block writes, the last of them has it for itself by then
        return more + sum(min(n, self.references[block] - 1) for block, n in entered.items() if block is not None)

    def reserve(self, ends: Sequence[int]) -> tuple[list[int], list[Copy]]:
        """Give row i what it needs to write from its length up to ``ends[i]``, which becomes its length.

        Returns:
            the blocks taken, and what to copy into some of them. Enough must be free (:meth:`missing`).
        """
        taken: list[int] = []
        copies: list[Copy] = []
        for row, end in enumerate(ends):
            table, shared = self.tables[row], self._entered(row, end)
            if shared is not None and self.references[shared] > 1:
                self._drop(table.pop())
                taken.append(self._take(table))
                copies.append(Copy(shared, taken[-1], self.lengths[row] % self.size))
            while len(table) < self.count(end):
                taken.append(self._take(table))
            self.lengths[row] = max(self.lengths[row], end)
        return taken, copies

    def truncate(self, lengths: Sequence[int]) -> None:
        """Row i keeps at most its first ``lengths[i]`` tokens; blocks that hold none of them go back."""
        for row, keep in enumerate(lengths):
            self.lengths[row] = min(self.lengths[row], keep)
            table = self.tables[row]
            while len(table) > self.count(self.lengths[row]):
                self._drop(table.pop())

    def release(self, row: int) -> None:
        """Empty a row."""
        self.truncate([0 if i == row else length for i, length in enumerate(self.lengths)])

    def share(self, row: int, other: int, length: int) -> None:
        """The empty ``row`` holds the first ``length`` tokens of ``other`` too."""
        assert not self.tables[row], "only an empty row takes another's tokens"
        assert length <= self.lengths[other], "no more than are there"
        self.tables[row] = self.tables[other][: self.count(length)]
        self.lengths[row] = length
        for block in self.tables[row]:
            self.references[block] += 1

    def _entered(self, row: int, end: int) -> int | None:
        """The partly filled block in which a row that grows to ``end`` goes on."""
        length = self.lengths[row]
        return self.tables[row][-1] if end > length and length % self.size else None

    def _take(self, table: list[int]) -> int:
        """Append a free block: the next in number where possible, since consecutive blocks are read without a copy."""
        following = table[-1] + 1 if table else self.first
        block = following if following in self.free else min(self.free)
        self.free.remove(block)
        self.references[block] = 1
        table.append(block)
        return block

    def _drop(self, block: int) -> None:
        self.references[block] -= 1
        if self.references[block] == 0:
            del self.references[block]
            self.free.add(block)
