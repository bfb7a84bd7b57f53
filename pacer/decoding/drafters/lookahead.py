"""Lookahead decoding (arXiv 2402.02057): a model drafts for itself, by Jacobi iteration in the pass that verifies.

A *window* of W columns holds guesses of the next tokens from N − 1 earlier iterations. Column 0 begins with the last
committed token, column i with a guess of the token i places on, and each column goes on with its own guesses: so the
window is a tree. Node (0, i) follows (0, i − 1), node (j, i) follows (j − 1, i). The choice that a pass makes at the
end of a column is the column's newest guess, and with it the column is an n-gram of N tokens, which goes to the pool;
its oldest token is dropped, since the text is one token longer by then. Up to G n-grams of the pool that begin with the
last committed token are *guesses*, further branches of the same tree.

Whatever the tree holds, verification keeps the output exact, and what is right in the window is accepted too. In
sampling all nodes are certain siblings (`pacer.decoding.verify_tree`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pacer.decoding.clock import Clock
from pacer.decoding.drafters.branching import Branching
from pacer.decoding.parts import SIZE, SWITCH, Range, allows
from pacer.decoding.pool import Pool
from pacer.decoding.request import Row
from pacer.decoding.tree import ROOT, Trie
from pacer.decoding.verdict import Verdict

STEP = 0x9E3779B97F4A7C15  # odd: columns begin at places of the prompt far from each other


@allows(
    level=Range(2, whole=True), window=SIZE, guesses=Range(0, whole=True), from_prompt=SWITCH, warm=SWITCH
)  # fmt: skip
class Lookahead(Branching):
    """Windows and pools, one of each for a row.

    Args:
        level: N, tokens to an n-gram. window: W, columns. guesses: G, n-grams kept per first token and verified.
        from_prompt: the pool begins with the prompt's own n-grams.
        warm: one pool for all rows, which stays for the texts to come. Greedy output does not change by it; sampled
            output is then another draw, which depends on the texts before.
    """

    sees = True

    def __init__(
        self,
        context: int,
        device: torch.device,
        clock: Clock,
        level: int = 5,
        window: int = 7,
        guesses: int = 7,
        from_prompt: bool = False,
        warm: bool = False,
    ) -> None:
        super().__init__(context, device, clock)
        given = {"level": level, "window": window, "guesses": guesses, "from_prompt": from_prompt, "warm": warm}
        self.check(given)
        self.level, self.window, self.guesses, self.from_prompt, self.warm = level, window, guesses, from_prompt, warm
        self.spare = window - 1 + (level - 2) * window + guesses * (level - 1)
        self.pools: list[Pool] = []
        self._all = self._fresh()
        self._columns: list[list[list[int]]] = []  # of each row; column 0 without its first token, which is committed
        self._ends: list[list[int | None]] = []  # the last node of each column in the present draft; None: cut
        self._roots: list[int] = []  # the committed token that the draft follows

    def _fresh(self) -> Pool:
        return Pool(self.guesses, self.level - 1)

    def reset(self, rows: Sequence[Row], capacity: int, stop_ids: Tensor) -> None:
        self.pools, self._columns = [self._all for _ in rows], [[] for _ in rows]
        self._ends, self._roots = [[] for _ in rows], [0] * len(rows)
        super().reset(rows, capacity, stop_ids)

    def admit(self, index: int, row: Row) -> None:
        """The window begins with pieces of the prompt, the same ones for a request wherever it is decoded."""
        text, n = row.committed, self.level - 1
        starts = [(row.key + column * STEP) % len(text) for column in range(self.window)]
        columns = [[text[(start + k) % len(text)] for k in range(n)] for start in starts]
        self._columns[index] = [columns[0][1:], *columns[1:]]
        self._ends[index] = []
        if not self.warm:
            self.pools[index] = self._fresh()
        if self.from_prompt:
            self.pools[index].learn(text)

    def grow(self, index: int, row: Row, limit: int) -> Trie:
        trie, root = Trie(limit), row.committed[-1]
        for phrase in self.pools[index].after(root):
            trie.branch(ROOT, phrase)
        first, *others = self._columns[index]
        ends = [self._end(trie, ROOT, first)]
        head: int | None = ROOT
        for column in others:
            head = trie.add(head, column[0])
            ends.append(self._end(trie, head, column[1:]))
        self._ends[index], self._roots[index] = ends, root
        return trie

    def _end(self, trie: Trie, head: int | None, column: Sequence[int]) -> int | None:
        nodes = trie.branch(head, column)
        return None if len(nodes) < len(column) else [head, *nodes][-1]

    def saw(self, rows: Sequence[Row], chosen: Sequence[int], verdict: Verdict) -> None:
        """Each column's n-gram goes to the pool, and the window moves on by a token."""
        assert verdict.choices is not None
        for i, choices in zip(chosen, verdict.choices, strict=True):
            for number, end in enumerate(self._ends[i]):
                if end is not None:
                    column = [*self._columns[i][number], choices[end + 1]]
                    key, *phrase = [self._roots[i], *column] if number == 0 else column
                    self.pools[i].add(key, phrase)
                    self._columns[i][number] = column[1:]
            self._ends[i] = []
