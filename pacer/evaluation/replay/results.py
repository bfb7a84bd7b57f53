"""The results of a replay as plain data: the best of every family, what is gained over c and v, the evidence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from pacer.evaluation.replay import evidence
from pacer.evaluation.replay.costs import Prices
from pacer.evaluation.replay.search import Pool
from pacer.evaluation.replay.table import Table
from pacer.evaluation.replay.walk import Usage

OVERALL = "all"
# name of a family in tables and plots
LABELS = {
    "fixed": "best fixed γ", "fixed_here": "best fixed γ of the benchmark", "probability": "probability",
    "product": "product of probabilities", "entropy": "entropy", "margin": "margin", "match": "n-gram match",
    "pacer": "PACER", "pacer_lazy": "PACER, lazy", "oracle": "oracle",
}  # fmt: skip
DEFINITIONS = {
    "ratio_to_ar": "Predicted speed over plain decoding: emitted tokens / summed cost in rounds of plain decoding, "
    "prefill left out; total over total.",
    "tokens_per_verify": "Emitted tokens / target passes, prefill left out.",
    "mean_drafted": "Drafted tokens (up to a stop id) / target passes.",
    "accepted_per_verify": "Accepted draft tokens / target passes.",
    "gap_share": "(speed - best fixed) / (oracle - best fixed); the fixed window is that chosen on all texts.",
    "open": "Share of the rounds where the rule's answer lay beyond the table's signals; its draft ends there.",
    "fixed_here": "The best fixed window chosen on that benchmark alone.",
}


def rows(found: Mapping[str, Pool], prices: Prices, groups: Sequence[str]) -> list[dict[str, Any]]:
    """The best setting of each family, chosen over all texts, on each group of texts and on all."""
    best = {family: pool.best(prices) for family, pool in found.items()}
    out = []
    for group, mask in _masks(groups):
        picked = {family: (found[family], at) for family, at in best.items()}
        here = _part(found["fixed"].usage, mask)
        picked["fixed_here"] = (found["fixed"], int(prices.ratio(here).argmax()))
        speed = {f: float(prices.ratio(_part(pool.usage, mask))[at]) for f, (pool, at) in picked.items()}
        for family in LABELS:
            if family in picked:
                pool, at = picked[family]
                used = _one(_part(pool.usage, mask), at)
                share = evidence.gap_share(speed[family], speed["fixed"], speed["oracle"])
                row = {"benchmark": group, "family": family, "arm": pool.settings[at].arm, "ratio_to_ar": speed[family]}
                out.append({**row, **_figures(used), "gap_share": share})
    return out


def _masks(groups: Sequence[str]) -> list[tuple[str, Any]]:
    each = [(name, np.arange(len(groups)) == i) for i, name in enumerate(groups)]
    return [*(each if len(groups) > 1 else []), (OVERALL, np.ones(len(groups), bool))]


def _part(used: Usage, mask: Any) -> Usage:
    return used.of(mask)


def _one(used: Usage, at: int) -> Usage:
    return Usage(*(getattr(used, name)[at] for name in Usage.__dataclass_fields__))


def _figures(used: Usage) -> dict[str, float]:
    rounds = max(1, int(used.rounds.sum()))
    names = {"tokens_per_verify": "emitted", "mean_drafted": "drafted", "accepted_per_verify": "accepted",
             "open": "open"}  # fmt: skip
    return {name: float(getattr(used, field).sum()) / rounds for name, field in names.items()}


def over(found: Mapping[str, Pool], several: Mapping[float, Prices]) -> list[dict[str, Any]]:
    """Each family's best at other prices, chosen anew for each: its speed and gain over the best fixed window.

    What would be slower than plain decoding is not used: γ = 0 is a choice of every family.
    """
    out = []
    for x, prices in several.items():
        ratios = {family: prices.ratio(pool.usage) for family, pool in found.items()}
        fixed = float(ratios["fixed"].max())
        for family, values in ratios.items():
            at = int(values.argmax())
            speed, arm = float(values[at]), found[family].settings[at].arm
            speed, arm = (speed, arm) if speed >= 1 else (1.0, "sd gamma=0")
            out.append({"x": x, "family": family, "arm": arm, "ratio_to_ar": speed, "over_fixed": speed / fixed})
    return out


def results(
    table: Table, found: Mapping[str, Pool], prices: Prices, draft_costs: Sequence[float], token_costs: Sequence[float]
) -> dict[str, Any]:
    """Everything a replay says, valid JSON."""
    groups = list(dict.fromkeys(table.tasks))
    qualities = [evidence.quality(table, name, kind) for kind in evidence.LABELS for name in evidence.names(table)]
    return {
        "rows": rows(found, prices, groups),
        "over_c": over(found, {c: prices.with_draft(c) for c in draft_costs}),
        "over_v": over(found, {v: prices.with_verify(v) for v in token_costs}),
        "runs": evidence.runs(table), "signals": qualities, "censored": evidence.censored(table),
        "prices": priced(prices), "texts": len(table.ids), "definitions": DEFINITIONS,
        "settings_tried": {family: len(pool.settings) for family, pool in found.items()},
    }  # fmt: skip


def priced(prices: Prices) -> dict[str, Any]:
    """Prices of the widths that occur, in rounds of plain decoding."""
    arrays = {name: value[1:18].round(6).tolist() for name, value in asdict(prices).items() if name != "rest"}
    return {**arrays, "rest": prices.rest, "widths": "1 … 17 tokens"}


def to_text(result: Mapping[str, Any]) -> str:
    """The table that the verb prints."""
    head = f"{'benchmark':12} {'rule':30} {'× AR':>6} {'τ':>5} {'drafted':>8} {'of gap':>7}  arm"
    lines = [head, "-" * len(head)]
    for row in result["rows"]:
        share = "" if row["gap_share"] is None or row["family"] in ("fixed", "oracle") else f"{row['gap_share']:.0%}"
        lines.append(
            f"{row['benchmark']:12} {LABELS[row['family']]:30} {row['ratio_to_ar']:6.3f} "
            f"{row['tokens_per_verify']:5.2f} {row['mean_drafted']:8.2f} {share:>7}  {row['arm']}"
        )
    lines += ["", f"{'signal':12} {'AUC survival':>13} {'ECE':>6} {'AUC conditional':>16} {'ECE':>6}  mean / accepted"]
    signals = {(q["signal"], q["label"]): q for q in result["signals"]}
    for name in dict.fromkeys(q["signal"] for q in result["signals"]):
        one, two = signals[name, "survival"], signals[name, "conditional"]
        mean = f"{two['mean']:.3f} / {two['accepted']:.3f}" if name in evidence.PROBABILITIES and two["mean"] else ""
        lines.append(
            f"{name:12} {_number(one['auc']):>13} {_number(one['ece']):>6} {_number(two['auc']):>16} "
            f"{_number(two['ece']):>6}  {mean}"
        )
    return "\n".join(lines)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"
