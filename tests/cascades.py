"""What tests of the cost model of exits share: tables made by hand and of coins, points of a profile."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pacer.evaluation.cascade.profile import RungPoint
from pacer.evaluation.cascade.table import ExitTable

L = 12


def table(agree: Sequence[Sequence[Sequence[bool]]], cut: Sequence[bool], exits: Sequence[int] = ()) -> ExitTable:
    """A table of texts; ``agree[k][i]``: where exit k says what exit k + 1 (at the end: the model) says on text i."""
    layers = tuple(exits) or tuple(range(1, len(agree) + 1))
    rows = np.array([len(text) for text in agree[0]])
    truth = np.zeros(int(rows.sum()), dtype=np.int64)
    said = [truth]
    for pair in reversed(agree):
        differs = ~np.concatenate([np.array(text, dtype=bool) for text in pair])
        said.insert(0, said[0] + differs)
    names = [f"text-{i}" for i in range(len(rows))]
    tasks = ["even" if i % 2 == 0 else "odd" for i in range(len(rows))]
    choice = np.stack(said[:-1])
    return ExitTable(names, tasks, layers, L, rows, np.array(cut), truth, choice, np.full(choice.shape, 0.5))


def points(scale: float = 1.0) -> list[RungPoint]:
    """A machine with 1 ms a call and 2 ms a layer, half as much more for each further token."""
    found = []
    for n in (1, 2, 4):
        size = scale * (1 + 0.5 * (n - 1))
        found += [RungPoint("rung", a, b, n, size * (1 + 2 * (b - a)), 0, 0) for a, b in ((0, 2), (2, 6), (6, L))]
        found += [RungPoint("head", 0, 2, n, size * 3, 0, 0), RungPoint("head", 6, L, n, size * 6, 0, 0)]
        found.append(RungPoint("adapter", 0, 2, n, size * 0.5, 0, 0))
    return [*found, RungPoint("draft", 0, 2, 1, scale * 7, 0, 0), RungPoint("whole", 0, L, 1, scale * 20, 0, 0)]


def coins(chances: Sequence[float], texts: int = 20, places: int = 3000, seed: int = 0) -> ExitTable:
    rng = np.random.default_rng(seed)
    return table([[(rng.random(places) < chance).tolist() for _ in range(texts)] for chance in chances], [True] * texts)
