"""A model reading the requests of a batch: its cache and how many tokens of each row are in it.

Shapes: R rows, B rows that read now (all by default), n new tokens, H width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from pacer.decoding.tree import Tree, placed
from pacer.errors import DecodingError
from pacer.models.cache import Cache
from pacer.models.preverifier_layer import Layers
from pacer.models.residual import Residual
from pacer.models.stack import Stack, causal_mask

PREFILL_CHUNK = 1024  # tokens of a prompt read at once: bounds the memory of the mask and the activations

# ids and states (B, n, H), each row's first place and number of tokens, and which rows they are (None: all)
Heard = Callable[[Tensor, Tensor, Sequence[int], Sequence[int], Sequence[int] | None], None]


class Reader(Protocol):
    """What reads token ids row by row: a whole model, or one up to an exit. ``lengths[i]``: tokens of row i it holds.

    ``layer_tokens[i]``: layers × tokens run for row i so far. ``heard`` is told of all that is read, whoever asked; of
    a tree, of the branch that was kept. ``reads_trees``: whether it can read one.
    """

    heard: Heard | None
    reads_trees: bool

    @property
    def lengths(self) -> list[int]: ...

    @property
    def layer_tokens(self) -> list[int]: ...

    def reset(self, rows: int, capacity: int) -> None: ...

    def feed_ids(
        self, ids: Tensor, counts: Sequence[int], rows: Sequence[int] | None = None, tree: Tree | None = None
    ) -> Tensor: ...

    def keep(self, starts: Sequence[int], branches: Sequence[Sequence[int]], rows: Sequence[int]) -> None: ...

    def truncate(self, lengths: Sequence[int]) -> None: ...

    def release(self, row: int) -> None: ...

    def adopt(self, row: int, other: int, length: int) -> None: ...


class Lane:
    """Layers ``a … b`` of a stack over R rows. ``lengths[i]`` tokens of row i are in the cache; rollback sets it."""

    reads_trees = True

    def __init__(
        self, stack: Stack | Layers | Residual, a: int = 0, b: int | None = None, block: int | None = None
    ) -> None:
        self.stack, self.a, self.b, self.block = stack, a, stack.n_layers if b is None else b, block
        self.lengths: list[int] = []
        self.layer_tokens: list[int] = []
        self.heard: Heard | None = None
        self._cache: Cache | None = None
        self._nodes: tuple[Tensor, Tensor, Sequence[int]] | None = None  # of a tree just read, for who listens

    def reset(self, rows: int, capacity: int) -> None:
        """Empty, with room for ``capacity`` tokens in each of ``rows`` rows; memory is kept where it is enough."""
        if self._cache is None or self._cache.rows < rows or self._cache.capacity < capacity:
            self._cache = self.stack.new_cache(rows, capacity, self.a, self.b, self.block)
        else:
            self._cache.clear(rows, capacity)  # a mask hides old entries, but not NaN
        self.lengths, self.layer_tokens = [0] * rows, [0] * rows

    @property
    def cache(self) -> Cache:
        assert self._cache is not None, "reset() comes first"
        return self._cache

    def feed(
        self, x: Tensor, counts: Sequence[int], rows: Sequence[int] | None = None, tree: Tree | None = None
    ) -> Tensor:
        """Read states ``(B, n, H)``; row j has ``counts[j]`` of them, left-aligned, the rest is padding.

        Args:
            rows: which rows these are; None: all, in order. tree: what the last of them are; None: a chain.

        Returns:
            ``(B, n, H)`` states after layer b − 1, before the final norm; padding positions hold no meaning.
        """
        n, outputs = x.shape[1], []
        chosen = range(len(self.lengths)) if rows is None else rows
        chunk = PREFILL_CHUNK if tree is None else n
        for start in range(0, n, chunk):
            part = x[:, start : start + chunk]
            inside = [min(max(c - start, 0), part.shape[1]) for c in counts]
            lengths = [self.lengths[i] for i in chosen]
            positions, real = places(lengths, part.shape[1], inside, self.stack.device)
            ends = list(self.lengths)
            for i, count in zip(chosen, inside, strict=True):
                ends[i] += count
                self.layer_tokens[i] += count * (self.b - self.a)
            extent = max(ends[i] for i in chosen)
            slots = positions if min(inside) == part.shape[1] else torch.where(real, positions, self.cache.capacity)
            self.cache.truncate(self.lengths)  # whoever set them
            self.cache.reserve(ends)
            cache, mask = self.cache.at(slots, extent, rows), causal_mask(positions, extent)
            if tree is not None:
                positions, mask = placed(tree, positions, mask)
            outputs.append(self.stack.run(part, self.a, self.b, positions, mask, cache))
            self.lengths = ends
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)

    def feed_ids(
        self, ids: Tensor, counts: Sequence[int], rows: Sequence[int] | None = None, tree: Tree | None = None
    ) -> Tensor:
        """:meth:`feed` for token ids ``(B, n)``."""
        assert isinstance(self.stack, Stack), "a pre-verifier's layers read entries, not ids"
        starts = [self.lengths[i] for i in (range(len(self.lengths)) if rows is None else rows)]
        states = self.feed(self.stack.embed(ids), counts, rows, tree)
        if self.heard is not None:
            self.heard(ids, states, starts, counts if tree is None else tree.sizes, rows)
            self._nodes = None if tree is None else (ids, states, tree.sizes)
        return states

    def keep(self, starts: Sequence[int], branches: Sequence[Sequence[int]], rows: Sequence[int]) -> None:
        """Of the tree just read, row by row, move what a branch of nodes left in memory to where it begins.

        Args:
            starts: tokens of each row before the tree. branches: nodes, from the first on.
            rows: which rows these are: those that were fed.
        """
        firsts = dict(zip(rows, starts, strict=True))
        moved = {row: [firsts[row] + node for node in nodes] for row, nodes in zip(rows, branches, strict=True)}
        self.cache.move(moved, firsts)
        if self._nodes is not None and self.heard is not None and (most := max(map(len, branches))) > 0:
            ids, states, sizes = self._nodes
            at = [[size + n for n in (*b, *[0] * (most - len(b)))] for size, b in zip(sizes, branches, strict=True)]
            places = torch.tensor(at, device=ids.device)
            branch = states.gather(1, places[..., None].expand(-1, -1, states.shape[2]))
            self.heard(ids.gather(1, places), branch, starts, [len(b) for b in branches], rows)

    def truncate(self, lengths: Sequence[int]) -> None:
        """Forget all beyond ``lengths``; a row that is shorter already keeps its length. Nothing is moved."""
        self.lengths = [min(have, keep) for have, keep in zip(self.lengths, lengths, strict=True)]
        self.cache.truncate(self.lengths)

    def release(self, row: int) -> None:
        """Empty a row for another text."""
        self.cache.release(row)
        self.lengths[row] = 0

    def adopt(self, row: int, other: int, length: int) -> None:
        """The empty ``row`` begins with the first ``length`` tokens of ``other``, without reading them again."""
        if self.lengths[row] or length > self.lengths[other]:
            raise DecodingError(
                f"row {row} cannot begin as row {other} does", value=f"{length} tokens",
                allowed=f"up to {self.lengths[other]}, in an empty row",
            )  # fmt: skip
        self.cache.share(row, other, length)
        self.lengths[row] = length


def places(starts: Sequence[int], n: int, counts: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Positions ``(B, n)`` from each row's start on, and which of them are real (row j has ``counts[j]``)."""
    packed = torch.tensor([list(starts), list(counts)], device=device)  # one copy to the device
    steps = torch.arange(n, device=device)
    return packed[0, :, None] + steps, steps < packed[1, :, None]


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
