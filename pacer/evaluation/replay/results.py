"""The results of a replay as plain data: the best of every family, what is gained over c and v, the evidence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from pacer.evaluation.replay import evidence
from pacer.evaluation.replay.choice import halved, judged, task_of
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
    "prefill left out; total over total. The rule's values were chosen on the other half of the texts.",
    "ratio_in_sample": "The same with the values in `arm`, chosen on all of these texts: flattered.",
    "tokens_per_verify": "Emitted tokens / target passes, prefill left out.",
    "mean_drafted": "Drafted tokens (up to a stop id) / target passes.",
    "accepted_per_verify": "Accepted draft tokens / target passes.",
    "gap_share": "(speed - best fixed) / (oracle - best fixed); the fixed window is that chosen on all texts.",
    "open": "Share of the rounds where the rule's answer lay beyond the table's signals; its draft ends there.",
    "fixed_here": "The best fixed window chosen on that benchmark alone (its other half).",
}


def rows(found: Mapping[str, Pool], prices: Prices, groups: Sequence[str]) -> list[dict[str, Any]]:
    """Each family on each task and on all; its values are chosen over all tasks, on the other half of the texts.

    Args:
        groups: of the pools, in their order (:func:`pacer.evaluation.replay.choice.halved`).
    """
    out = []
    for task, mask in _masks(groups):
        used = {family: judged(pool, prices, groups, mask) for family, pool in found.items()}
        used["fixed_here"] = judged(found["fixed"], prices, groups, mask, mask)
        speed = {family: float(prices.ratio(part)) for family, part in used.items()}
        for family in (name for name in LABELS if name in used):
            pool = found["fixed" if family == "fixed_here" else family]
            at = int(prices.ratio(pool.usage.of(mask)).argmax()) if family == "fixed_here" else pool.best(prices)
            share = evidence.gap_share(speed[family], speed["fixed"], speed["oracle"])
            row = {"benchmark": task, "family": family, "arm": pool.settings[at].arm, "ratio_to_ar": speed[family]}
            in_sample = float(prices.ratio(pool.usage.of(mask))[at])
            out.append({**row, "ratio_in_sample": in_sample, **_figures(used[family]), "gap_share": share})
    return out


def _masks(groups: Sequence[str]) -> list[tuple[str, Any]]:
    names = [task_of(group) for group in groups]
    tasks = list(dict.fromkeys(names))
    each = [(task, np.array([name == task for name in names])) for task in tasks]
    return [*(each if len(tasks) > 1 else []), (OVERALL, np.ones(len(groups), bool))]


def _figures(used: Usage) -> dict[str, float]:
    rounds = max(1, int(used.rounds.sum()))
    names = {"tokens_per_verify": "emitted", "mean_drafted": "drafted", "accepted_per_verify": "accepted",
             "open": "open"}  # fmt: skip
    return {name: float(getattr(used, field).sum()) / rounds for name, field in names.items()}


def over(found: Mapping[str, Pool], several: Mapping[float, Prices], groups: Sequence[str]) -> list[dict[str, Any]]:
    """Each family at other prices, its values chosen anew for each: its speed and gain over the best fixed window.

    What would be slower than plain decoding is not used: γ = 0 is a choice of every family.
    """
    out = []
    for x, prices in several.items():
        everywhere = np.ones(len(groups), bool)
        speeds = {f: max(1.0, float(prices.ratio(judged(p, prices, groups, everywhere)))) for f, p in found.items()}
        for family, speed in speeds.items():
            arm = found[family].settings[found[family].best(prices)].arm if speed > 1 else "sd gamma=0"
            over_fixed = speed / speeds["fixed"]
            out.append({"x": x, "family": family, "arm": arm, "ratio_to_ar": speed, "over_fixed": over_fixed})
    return out


def results(
    table: Table, found: Mapping[str, Pool], prices: Prices, draft_costs: Sequence[float], token_costs: Sequence[float]
) -> dict[str, Any]:
    """Everything a replay says, valid JSON; ``found`` is grouped by :func:`~pacer.evaluation.replay.choice.halved`."""
    groups = list(dict.fromkeys(halved(table)))
    qualities = [evidence.quality(table, name, kind) for kind in evidence.LABELS for name in evidence.names(table)]
    return {
        "rows": rows(found, prices, groups),
        "over_c": over(found, {c: prices.with_draft(c) for c in draft_costs}, groups),
        "over_v": over(found, {v: prices.with_verify(v) for v in token_costs}, groups),
        "runs": evidence.runs(table), "signals": qualities, "censored": evidence.censored(table),
        "prices": priced(prices), "texts": len(table.ids), "definitions": DEFINITIONS,
        "settings_tried": {family: len(pool.settings) for family, pool in found.items()},
    }  # fmt: skip


def priced(prices: Prices) -> dict[str, Any]:
    """Prices of the widths that occur, in rounds of plain decoding."""
    found = asdict(prices)
    single = {name: found.pop(name) for name in ("rest", "signals")}
    by_width = {name: value[1:18].round(6).tolist() for name, value in found.items()}
    return {**by_width, **single, "widths": "1 … 17 tokens"}


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
    heads = "".join(f"{f'AUC {kind}':>17} {'ECE':>6}" for kind in evidence.LABELS)
    lines += ["", f"{'signal':12}{heads}  mean / accepted (conditional)"]
    signals = {(q["signal"], q["label"]): q for q in result["signals"]}
    for name in dict.fromkeys(q["signal"] for q in result["signals"]):
        each = [signals[name, kind] for kind in evidence.LABELS]
        two = signals[name, "conditional"]
        mean = f"{two['mean']:.3f} / {two['accepted']:.3f}" if name in evidence.PROBABILITIES and two["mean"] else ""
        judged_as = "".join(f"{_number(q['auc']):>17} {_number(q['ece']):>6}" for q in each)
        lines.append(f"{name:12}{judged_as}  {mean}")
    return "\n".join(lines)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"
