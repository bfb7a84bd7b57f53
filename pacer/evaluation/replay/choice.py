"""Choosing values on some texts and judging them on others.

Hundreds of settings are tried, of some rules more than of others: the best of many is flattered by the texts it was
chosen on. So texts fall into two halves by a stable hash of the id, and each half is judged with what was best on the
other.

Shapes: G groups of texts (a task's half each), T any.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pacer.artifacts import stable_hash
from pacer.evaluation.replay.costs import Prices
from pacer.evaluation.replay.search import Pool
from pacer.evaluation.replay.table import Bools, Table
from pacer.evaluation.replay.walk import Usage

MARK = " / half "


def halved(table: Table) -> list[str]:
    """The group of each text: its task and its half."""
    return [f"{task}{MARK}{int(stable_hash(name), 16) % 2}" for task, name in zip(table.tasks, table.ids, strict=True)]


def task_of(group: str) -> str:
    return group.partition(MARK)[0]


def judged(pool: Pool, prices: Prices, groups: Sequence[str], asked: Bools, chosen_on: Bools | None = None) -> Usage:
    """What a family uses on the groups ``asked (G,)``, each half with the setting that was best on the other.

    Args:
        chosen_on: groups among which the choice is made ``(G,)``; None: all. Where one half is empty, the choice is
            made on what there is, and flatters.
    """
    among = np.ones(len(groups), bool) if chosen_on is None else chosen_on
    half = np.array([group.partition(MARK)[2] for group in groups])
    parts = []
    for side in dict.fromkeys(half[asked].tolist()):
        others = among & (half != side)
        on = others if others.any() and pool.usage.emitted[:, others].any() else among
        best = int(prices.ratio(pool.usage.of(on)).argmax())
        here = pool.usage.of(asked & (half == side))
        parts.append(Usage(*(getattr(here, name)[best] for name in Usage.__dataclass_fields__)))
    return Usage(*(np.concatenate([getattr(p, name) for p in parts]) for name in Usage.__dataclass_fields__))
