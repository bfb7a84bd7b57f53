"""The papers' tables by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pacer.reporting.gather import Run
from pacer.reporting.paper import hispec_tables, pacer_tables
from pacer.reporting.paper.rows import Table

TABLES: dict[str, Callable[[Sequence[Run]], Table]] = {
    make.__name__: make
    for make in (
        pacer_tables.pacer_main, pacer_tables.pacer_ablation, pacer_tables.pacer_ouroboros, pacer_tables.draft_lengths,
        hispec_tables.hispec_main, hispec_tables.hispec_batch, hispec_tables.hispec_sweep,
        hispec_tables.verification_wall,
    )
}  # fmt: skip
