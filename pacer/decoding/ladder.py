"""One model's layers as consecutive rungs, each with its own cache and length: what early exits are read from.

Rung k holds layers ``depths[k-1] … depths[k] - 1``. A token passes a rung at most once (unless it was rejected and its
place is taken by another): states that a rung has made wait between the rungs until the next one reads them, so a
verifier starts where the drafter stopped. Rollback is a length on every rung; what waits beyond it is overwritten.

A rung whose exit has an adapter (a decoder layer of its own) feeds it all that it reads.

Shapes: R rows, B rows that read now, n tokens, H width, W places that wait.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from pacer.decoding.lane import Heard, Lane
from pacer.decoding.tree import Tree
from pacer.errors import ConfigError
from pacer.models.preverifier_layer import Layers
from pacer.models.stack import Stack


class Ladder:
    """A stack cut at ``depths`` (ascending; the last is all layers).

    Args:
        adapters: depth of an exit → its own layers. block: tokens to a block of paged memory; None: contiguous.

    Raises:
        ConfigError: depths that are none of this model's.
    """

    def __init__(
        self,
        stack: Stack,
        depths: Sequence[int],
        adapters: Mapping[int, Layers] | None = None,
        block: int | None = None,
    ) -> None:
        edges = [0, *depths]
        if any(a >= b for a, b in pairwise(edges)) or edges[-1] != stack.n_layers:
            allowed = f"ascending, from 1 to {stack.n_layers - 1}; the last verifier is the whole model"
            raise ConfigError("exits of the method", value=list(depths[:-1]), allowed=allowed)
        self.stack, self.lanes = stack, [Lane(stack, a, b, block) for a, b in pairwise(edges)]
        own = [(adapters or {}).get(depth) for depth in depths]
        self.adapters = [None if layers is None else Lane(layers, block=block) for layers in own]
        self.rungs = [Rung(self, k) for k in range(len(depths))]
        self._waiting: list[Tensor | None] = [None] * len(depths)  # (R, W + 1, H) on each rung for the one above

    def _memories(self, rungs: int) -> list[Lane]:
        """Everything with a memory on the first rungs."""
        return [lane for lane in (*self.lanes[:rungs], *self.adapters[:rungs]) if lane is not None]

    def reset(self, rows: int, capacity: int) -> None:
        """Empty, with room for ``capacity`` tokens in each row."""
        for lane in self._memories(len(self.lanes)):
            lane.reset(rows, capacity)
        self._waiting = [None] * len(self.rungs)

    def truncate(self, k: int, lengths: Sequence[int]) -> None:
        """Forget all beyond ``lengths`` on rung k and below."""
        for lane in self._memories(k + 1):
            lane.truncate(lengths)

    def read(self, k: int, ids: Tensor, counts: Sequence[int], rows: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Rung k reads ids ``(B, n)``, which follow the tokens it has; rungs below read what they have not.

        Returns:
            States after rung k ``(B, n, H)``, and what its exit reads out: the same, or its adapter's answer.
        """
        lane, adapter = self.lanes[k], self.adapters[k]
        starts = [lane.lengths[i] for i in rows]
        below = self.stack.embed(ids) if k == 0 else self._climb(k, ids, counts, rows)
        states = lane.feed(below, counts, rows)
        out = states if adapter is None else adapter.feed(states, counts, rows)
        if (heard := self.rungs[k].heard) is not None:
            heard(ids, out, starts, counts, rows)
        return states, out

    def _climb(self, k: int, ids: Tensor, counts: Sequence[int], rows: Sequence[int]) -> Tensor:
        """States at the foot of rung k for the tokens ``ids (B, n)``: those that wait there, then new ones."""
        waiting = self.waiting(k - 1, rows)
        new = [count - ready for count, ready in zip(counts, waiting, strict=True)]
        assert min(new) >= 0, "a rung reads all that waits below it"
        if max(new) > 0:
            fresh = ids
            if any(waiting):
                at = torch.tensor(waiting, device=ids.device)[:, None] + torch.arange(max(new), device=ids.device)
                fresh = ids.gather(1, at.clamp_max(ids.shape[1] - 1))
            states, _ = self.read(k - 1, fresh, new, rows)
            if not any(waiting):
                return states
            self.keep(k - 1, states, waiting, new, rows)
        kept = self._waiting[k - 1]
        assert kept is not None
        return _rows_of(kept, rows)[:, : ids.shape[1]]

    def waiting(self, k: int, rows: Sequence[int]) -> list[int]:
        """How many tokens of each row have passed rung k but not the one above."""
        low, high = self.lanes[k].lengths, self.lanes[k + 1].lengths
        return [low[i] - high[i] for i in rows]

    def keep(self, k: int, states: Tensor, at: Sequence[int], counts: Sequence[int], rows: Sequence[int]) -> None:
        """Let states ``(B, n, H)`` wait on rung k from place ``at`` of each row on."""
        n, width = states.shape[1], states.shape[2]
        most, kept = max(a + c for a, c in zip(at, counts, strict=True)), self._waiting[k]
        if kept is None or kept.shape[1] <= most:
            grown = states.new_zeros(len(self.lanes[k].lengths), 2 * most + 1, width)
            if kept is not None:
                grown[:, : kept.shape[1] - 1] = kept[:, :-1]
            self._waiting[k] = kept = grown
        if len(rows) == 1:
            kept[rows[0], at[0] : at[0] + counts[0]] = states[0, : counts[0]]
            return
        table = torch.tensor([list(rows), list(at), list(counts)], device=states.device)
        steps = torch.arange(n, device=states.device)
        slots = torch.where(steps < table[2, :, None], table[1, :, None] + steps, kept.shape[1] - 1)
        kept[table[0, :, None], slots] = states

    def release(self, row: int) -> None:
        """Empty a row for another text, on every rung."""
        for lane in self._memories(len(self.lanes)):
            lane.release(row)

    def adopt(self, row: int, other: int, length: int) -> None:
        """The empty ``row`` begins with the first ``length`` tokens of ``other`` on every rung."""
        for lane in self._memories(len(self.lanes)):
            lane.adopt(row, other, length)

    def state_bytes(self) -> int:
        """Memory of the states that wait between rungs."""
        return sum(kept.nbytes for kept in self._waiting if kept is not None)


class Rung:
    """A ladder up to and with rung k, as a reader of tokens."""

    reads_trees = False  # states that wait between rungs wait in one line

    def __init__(self, ladder: Ladder, k: int) -> None:
        self.ladder, self.k, self.is_top = ladder, k, k == len(ladder.lanes) - 1
        self.heard: Heard | None = None

    @property
    def lengths(self) -> list[int]:
        return self.ladder.lanes[self.k].lengths

    @property
    def layer_tokens(self) -> list[int]:
        """Of all rungs up to here; adapters are not counted."""
        return [
            sum(parts) for parts in zip(*(lane.layer_tokens for lane in self.ladder.lanes[: self.k + 1]), strict=True)
        ]

    def reset(self, rows: int, capacity: int) -> None:
        """The whole ladder, by its top: rungs have one memory."""
        if self.is_top:
            self.ladder.reset(rows, capacity)

    def feed_ids(
        self, ids: Tensor, counts: Sequence[int], rows: Sequence[int] | None = None, tree: Tree | None = None
    ) -> Tensor:
        """Read ids ``(B, n)``; returns what this rung's exit reads out ``(B, n, H)``."""
        assert tree is None, "refused when the decoder was built"
        chosen = list(range(len(self.lengths))) if rows is None else list(rows)
        at = [] if self.is_top else self.ladder.waiting(self.k, chosen)
        states, out = self.ladder.read(self.k, ids, counts, chosen)
        if not self.is_top:
            self.ladder.keep(self.k, states, at, counts, chosen)
        return out

    def keep(self, starts: Sequence[int], branches: Sequence[Sequence[int]], rows: Sequence[int]) -> None:
        """Nothing: it reads no trees."""

    def truncate(self, lengths: Sequence[int]) -> None:
        """Forget all beyond ``lengths`` here and below."""
        self.ladder.truncate(self.k, lengths)

    def release(self, row: int) -> None:
        """The whole ladder, by its top, as :meth:`reset`."""
        if self.is_top:
            self.ladder.release(row)

    def adopt(self, row: int, other: int, length: int) -> None:
        """:meth:`Ladder.adopt`."""
        self.ladder.adopt(row, other, length)


def _rows_of(kept: Tensor, rows: Sequence[int]) -> Tensor:
    """Those rows of ``(R, …)``, as a view where all or one are wanted."""
    if len(rows) == 1:
        return kept[rows[0] : rows[0] + 1]
    return kept if len(rows) == len(kept) else kept[torch.tensor(list(rows), device=kept.device)]
