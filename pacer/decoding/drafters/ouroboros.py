"""Ouroboros (arXiv 2402.13720): phrases draft for the draft model, and lengthen its drafts. Greedy only.

The draft model decodes by lookahead, so that its draft of γ tokens takes fewer passes; what its passes find goes to a
pool of phrases. Up to K phrases that begin with the draft's last token are appended as branches, which the target
verifies in the same pass: after full acceptance of the draft the longest that is right lengthens the output. The pass
says more than what to accept: where the target agrees with the draft again behind a rejection, that piece is a phrase,
and the phrases that were appended are replaced by what the target would have written in their place.

The pool is that of the draft's lookahead; warm, it stays for later texts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from pacer.decoding.drafters.base import DraftContext
from pacer.decoding.drafters.branching import Branching
from pacer.decoding.drafters.lookahead import Lookahead
from pacer.decoding.parts import Range, allows
from pacer.decoding.pool import Phrase
from pacer.decoding.propose import Draft
from pacer.decoding.request import Row
from pacer.decoding.staged import Staged
from pacer.decoding.tree import ROOT, Trie, packed
from pacer.decoding.verdict import Verdict


@allows(**Lookahead.values, phrases=Range(0, whole=True))
class Ouroboros(Branching):
    """Drafts of a staged draft model, with phrases behind them.

    Args:
        staged: the draft model, which verifies what ``lookahead`` drafts. phrases: K.
        context: the target's. longest: the draft's own context.
    """

    sees = True
    rules = ("fixed", "preverifier")

    def __init__(self, staged: Staged, lookahead: Lookahead, context: int, longest: int, phrases: int = 3) -> None:
        super().__init__(context, lookahead.device, lookahead.clock)
        self.check({"phrases": phrases})
        self.staged, self.lookahead, self.phrases, self.own = staged, lookahead, phrases, DraftContext(longest)
        self.spare = phrases * (lookahead.level - 1)
        self._sent: list[list[int]] = []  # the draft's tokens in the present draft of each row
        self._appended: list[list[tuple[Phrase, list[int]]]] = []  # phrases behind it, and their nodes

    @classmethod
    def needs(cls, given: Mapping[str, Any]) -> tuple[str, ...]:
        return ("draft",)

    def reset(self, rows: Sequence[Row], capacity: int, stop_ids: Tensor) -> None:
        self._sent, self._appended = [[] for _ in rows], [[] for _ in rows]
        self.staged.reset(rows, capacity, stop_ids)

    def admit(self, index: int, row: Row) -> None:
        self._sent[index], self._appended[index] = [], []
        self.staged.admit(index, row)

    def prefill(self, rows: Sequence[Row], chosen: Sequence[int]) -> None:
        self.staged.prefill(rows, chosen)

    def propose(self, rows: Sequence[Row]) -> Draft:
        self._warn(rows)
        draft = self.staged.propose(rows)
        tries = []
        for i, row in enumerate(rows):
            is_ready = draft.ready is None or draft.ready[i]
            self._sent[i], self._appended[i] = list(self.staged.buffers[i].tokens) if is_ready else [], []
            tries.append(self.grow(i, row, min(row.left - 1, self.context - len(row.committed))))
        tokens, parents, counts = packed(tries, self.device)
        self.clock.lap("draft")
        return replace(draft, tokens=tokens, parents=parents, counts=counts)

    def grow(self, index: int, row: Row, limit: int) -> Trie:
        """The draft's tokens, and phrases that begin with the last of them."""
        trie, sent = Trie(max(0, limit)), self._sent[index]
        nodes = trie.branch(ROOT, sent)
        if nodes and sent[-1] not in row.request.stop_ids:
            for phrase in self.lookahead.pools[index].after(sent[-1])[: self.phrases]:
                self._appended[index].append((phrase, trie.branch(nodes[-1], phrase)))
        return trie

    def saw(self, rows: Sequence[Row], chosen: Sequence[int], verdict: Verdict) -> None:
        """What the target's choices say of the draft's rejected tail, and of the phrases."""
        assert verdict.choices is not None
        for j, i in enumerate(chosen):
            sent, choices, pool = self._sent[i], verdict.choices[j], self.lookahead.pools[i]
            for key, run in agreements(sent, choices, min(verdict.accepted[j], len(sent)) + 1):
                pool.add(key, run)
            for phrase, nodes in self._appended[i]:
                said = [choices[node + 1] for node in [len(sent) - 1, *nodes][: len(nodes)]]
                pool.replace(sent[-1], phrase, [*said, *phrase[len(nodes) :]])
            self._sent[i], self._appended[i] = [], []

    def end(self, before: Sequence[int], verified: Sequence[int], chosen: Sequence[int]) -> None:
        self.staged.end(before, verified, chosen)

    def _warn(self, rows: Sequence[Row]) -> None:
        own = self.own.size
        if own < self.context and any(r.finish is None and len(r.committed) >= own - 1 for r in rows):
            self.own.ended()


def agreements(draft: Sequence[int], choices: Sequence[int], first: int) -> list[tuple[int, list[int]]]:
    """Runs of drafted tokens from place ``first`` on that the target would have chosen there, too.

    Args:
        choices: the target's, before each drafted token and after the last.

    Returns:
        Of each run the token before it, and the run with the target's choice after it.
    """
    found: list[tuple[int, list[int]]] = []
    run: list[int] = []
    for place in range(first, len(draft) + 1):
        if place < len(draft) and draft[place] == choices[place]:
            run.append(draft[place])
        elif run:
            found.append((draft[place - len(run) - 1], [*run, choices[place]]))
            run = []
    return found
