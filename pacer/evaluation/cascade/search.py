"""The best exits and buffers under given prices: LayerSkip and HiSpec with the same number of settings tried.

Values are chosen on tuning texts, over all of them and on each task alone; what is chosen may be judged on others.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pacer.evaluation.cascade.costs import Prices
from pacer.evaluation.cascade.table import ExitTable
from pacer.evaluation.cascade.walk import Cascade, usage

WINDOWS = tuple(range(17))
DRAFTS, BUFFERS = (1, 2, 3, 4, 5, 6, 8), (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)
N_D, N_I = 2, 4  # the paper's
OVERALL = "all"
DEFINITIONS = {
    "ratio_to_ar": "Modelled speed over plain decoding of the same texts, total over total, prefill left out.",
    "tokens_per_verify": "Emitted tokens / target passes, prefill left out: exact up to near-ties.",
    "acceptance": "Accepted / shown tokens of each stage above the first.",
    "layer_tokens": "Layers x tokens run per emitted token; plain decoding runs every layer once.",
    "tried": "Settings that the choice was made among.",
}


def judged(table: ExitTable, prices: Prices, cascade: Cascade) -> dict[str, Any]:
    """What a setting does on these texts, as plain data."""
    used = usage(table, cascade)
    return {
        "arm": cascade.arm, "exits": list(cascade.exits), "buffers": list(cascade.buffers), "bonus": cascade.bonus,
        "ratio_to_ar": prices.ratio(cascade, used), "tokens_per_verify": used.tokens_per_verify,
        "acceptance": used.acceptance, "layer_tokens": used.layer_tokens(cascade, table.n_layers),
    }  # fmt: skip


class Tried:
    """Speeds of the settings tried on some texts, at most ``budget`` of them."""

    def __init__(self, table: ExitTable, prices: Prices, budget: int | None = None) -> None:
        self.table, self.prices, self.budget = table, prices, budget
        self.speeds: dict[Cascade, float] = {}

    @property
    def spent(self) -> bool:
        return self.budget is not None and len(self.speeds) >= self.budget

    def best(self, settings: Sequence[Cascade]) -> Cascade | None:
        """The fastest of these; one that the budget does not allow is left out. None: all were."""
        for cascade in settings:
            if cascade not in self.speeds and not self.spent:
                self.speeds[cascade] = self.prices.ratio(cascade, usage(self.table, cascade))
        known = [cascade for cascade in settings if cascade in self.speeds]
        return max(known, key=lambda cascade: self.speeds[cascade], default=None)

    def fastest(self) -> Cascade:
        return max(self.speeds, key=lambda cascade: self.speeds[cascade])


def best_layerskip(table: ExitTable, prices: Prices, exits: Sequence[int] | None = None) -> Tried:
    """Every exit with every window; γ = 0, plain decoding, is among them."""
    tried = Tried(table, prices)
    tried.best([Cascade((exit,), (n,)) for exit, n in itertools.product(exits or shared(table, prices), WINDOWS)])
    return tried


def best_hispec(table: ExitTable, prices: Prices, budget: int, exits: Sequence[int] | None = None) -> Tried:
    """Descent along one value at a time, from the paper's buffers and pair of exits, then from other pairs.

    Args:
        budget: settings that may be tried, as many as LayerSkip had.
    """
    tried = Tried(table, prices, budget)
    for pair in pairs(exits or shared(table, prices), table.n_layers):
        here: Cascade | None = Cascade(pair, (N_D, N_I))
        before = None
        while here is not None and here != before and not tried.spent:
            before = here
            for axis in range(4):
                here = tried.best(list(_along(here, axis, exits or shared(table, prices)))) or here
        if tried.spent:
            break
    return tried


def _along(here: Cascade, axis: int, exits: Sequence[int]) -> Iterator[Cascade]:
    """The setting, and those that differ from it in one value: buffer, draft, an exit, bonus."""
    (low, high), (drafts, size) = here.exits, here.buffers
    yield here
    if axis == 0:
        yield from (Cascade(here.exits, (drafts, n), here.bonus) for n in BUFFERS)
    elif axis == 1:
        yield from (Cascade(here.exits, (n, size), here.bonus) for n in DRAFTS)
    elif axis == 2:
        others = [(a, b) for a, b in itertools.combinations(sorted(exits), 2) if (a == low) != (b == high)]
        yield from (Cascade(pair, here.buffers, here.bonus) for pair in others)
    else:
        yield Cascade(here.exits, here.buffers, not here.bonus)


def shared(table: ExitTable, prices: Prices) -> list[int]:
    """Exits that have both choices and prices."""
    return sorted(set(table.layers) & set(prices.exits))


def pairs(exits: Sequence[int], n_layers: int) -> list[tuple[int, int]]:
    """Pairs of exits, those nearest to the paper's depths (an eighth, a quarter) first."""
    found = itertools.combinations(sorted(exits), 2)
    return sorted(found, key=lambda p: (abs(8 * p[0] - n_layers) + abs(4 * p[1] - n_layers), p))


def chosen(
    tuning: ExitTable, prices: Prices, report: ExitTable | None = None, exits: Sequence[int] | None = None
) -> list[dict[str, Any]]:
    """Both families' best settings: on all tuning texts, and on each task's alone.

    Args:
        report: texts to judge the choice on; None: the tuning texts, which flatters it.

    Returns:
        A row per benchmark (and ``all``) and family: the setting chosen there, and what it does.
    """
    groups: Mapping[str, ExitTable] = {**tuning.by_task(), OVERALL: tuning}
    judges = groups if report is None else {**report.by_task(), OVERALL: report}
    rows = []
    for task, table in groups.items():
        skip = best_layerskip(table, prices, exits)
        families = {"layerskip": skip, "hispec": best_hispec(table, prices, len(skip.speeds), exits)}
        for family, tried in families.items():
            if task not in judges or not tried.speeds:
                continue
            best = tried.fastest()
            figures = judged(judges[task], prices, best)
            row = {"benchmark": task, "family": family, "tried": len(tried.speeds)}
            rows.append({**row, **figures, "ratio_in_sample": tried.speeds[best]})
    return rows


def layer_grid(table: ExitTable, prices: Prices, exits: Sequence[int] | None = None) -> list[dict[str, Any]]:
    """Every pair (L_d, L_i): with the paper's buffers, and with the best ones; the diagonal is LayerSkip's best."""
    layers = exits or shared(table, prices)
    rows = []
    for exit in layers:
        best = best_layerskip(table, prices, [exit]).fastest()
        rows.append({"draft": exit, "verifier": None, "fixed": None, "best": judged(table, prices, best)})
    for low, high in itertools.combinations(sorted(layers), 2):
        tried = Tried(table, prices)
        settings = itertools.product(DRAFTS, BUFFERS, (True, False))
        best_pair = tried.best([Cascade((low, high), (n, size), bonus) for n, size, bonus in settings])
        assert best_pair is not None
        fixed = judged(table, prices, Cascade((low, high), (N_D, N_I)))
        rows.append({"draft": low, "verifier": high, "fixed": fixed, "best": judged(table, prices, best_pair)})
    return rows


def buffer_curves(
    table: ExitTable, prices: Prices, exits: tuple[int, int], drafts: Sequence[int] = (1, 2, 3, 4)
) -> list[dict[str, Any]]:
    """Speed over the buffer N_i at fixed exits, for several N_d."""
    points = itertools.product(drafts, range(1, max(BUFFERS) + 1))
    return [{"n_d": n, "n_i": size, **judged(table, prices, Cascade(exits, (n, size)))} for n, size in points]
