"""Toys for drafts that branch: trees by a script, of any shape and any kind of siblings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pacer.decoding.distributions import draw
from pacer.decoding.propose import Draft, Proposes
from pacer.decoding.request import Row
from pacer.decoding.tree import ROOT
from pacer.decoding.uniforms import DRAFT, uniforms
from pacer.decoding.verdict import Verdict

Nodes = tuple[list[int], list[int], "Tensor | None"]  # tokens, parents, what each was drawn from (g, V)
KINDS = ("certain", "independent", "without replacement")


@dataclass
class Scripted(Proposes):
    """Trees that ``grow(row)`` makes; nodes deeper than the room left are cut, with all behind them.

    ``said``: the verifier's choices, with the text and the tree that they follow, where they are asked for.
    """

    grow: Callable[[Row], Nodes]
    context: int
    vocab: int
    spare: int = 32
    sees: bool = False
    chains: bool = False  # without parents, where nothing branches
    said: list[tuple[list[int], list[int], list[int], list[int]]] = field(default_factory=list)

    def reset(self, rows: Sequence[Row], capacity: int, stop_ids: Tensor) -> None:
        self.sent: list[tuple[list[int], list[int], list[int]]] = [([], [], [])] * len(rows)

    def admit(self, index: int, row: Row) -> None:
        self.sent[index] = ([], [], [])

    def propose(self, rows: Sequence[Row]) -> Draft:
        grown = [self._cut(row) for row in rows]
        self.sent = [
            (list(row.committed), tokens, parents) for row, (tokens, parents, _) in zip(rows, grown, strict=True)
        ]
        counts = [len(tokens) for tokens, _, _ in grown]
        g = max(counts)
        tokens = torch.zeros(len(rows), g, dtype=torch.long)
        parents = torch.full((len(rows), g), ROOT)
        probs = torch.zeros(len(rows), g, self.vocab) if any(q is not None for _, _, q in grown) else None
        for i, (own, above, q) in enumerate(grown):
            tokens[i, : counts[i]], parents[i, : counts[i]] = torch.tensor(own), torch.tensor(above)
            if probs is not None and q is not None:
                probs[i, : counts[i]] = q
        is_chain = self.chains and all(above == list(range(-1, len(above) - 1)) for _, above, _ in grown)
        return Draft(tokens, probs, None, counts, ["script"] * len(rows), parents=None if is_chain else parents)

    def _cut(self, row: Row) -> Nodes:
        room = 0 if row.finish is not None else min(row.left - 1, self.context - len(row.committed))
        tokens, parents, q = self.grow(row) if room > 0 else ([], [], None)
        depths: list[int] = []
        for parent in parents:
            depths.append(1 if parent == ROOT else depths[parent] + 1)
        kept = [node for node, depth in enumerate(depths) if depth <= room]
        number = {ROOT: ROOT, **{node: k for k, node in enumerate(kept)}}
        return [tokens[n] for n in kept], [number[parents[n]] for n in kept], None if q is None else q[kept]

    def saw(self, rows: Sequence[Row], chosen: Sequence[int], verdict: Verdict) -> None:
        assert verdict.choices is not None
        for i, choices in zip(chosen, verdict.choices, strict=True):
            self.said.append((*self.sent[i], choices))


def drawn(parents: Sequence[int], table: Tensor, kind: str) -> Callable[[Row], Nodes]:
    """Trees of one shape whose siblings are drawn from ``table[parent token] (V, V)`` in the manner of their kind."""

    def grow(row: Row) -> Nodes:
        keys, rounds = torch.tensor([row.key]), torch.tensor([row.rounds])
        u = uniforms(keys, rounds, torch.arange(len(parents)), DRAFT)[0]
        tokens: list[int] = []
        q: list[Tensor] = []
        for node, parent in enumerate(parents):
            own = table[row.committed[-1] if parent == ROOT else tokens[parent]].clone()
            elder = [tokens[k] for k in range(node) if parents[k] == parent]
            if kind == "certain":
                tokens.append(int(own.argsort(descending=True)[len(elder)]))
                continue
            if kind == "without replacement":
                own[elder] = 0.0
                own /= own.sum()
            tokens.append(int(draw(own, u[node])))
            q.append(own)
        return tokens, list(parents), torch.stack(q) if q else None

    return grow


def guessed(
    text: Callable[[Row], Sequence[int]], parents: Sequence[int], wrong: Callable[[Row, int], int]
) -> Callable[[Row], Nodes]:
    """Trees of one shape whose last branch of full depth is what really follows; others are ``wrong(row, node)``."""
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent == ROOT else depths[parent] + 1)
    line = [len(parents) - 1 - depths[::-1].index(max(depths))]
    while parents[line[0]] != ROOT:
        line.insert(0, parents[line[0]])

    def grow(row: Row) -> Nodes:
        tokens, what_follows = [wrong(row, node) for node in range(len(parents))], text(row)
        for node, token in zip(line, what_follows, strict=False):
            tokens[node] = token
        return tokens, list(parents), None

    return grow
