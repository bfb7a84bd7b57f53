"""The best values of each rule on a table, under given prices: hundreds of settings in seconds, on tuning texts.

Shapes: C settings, T texts (or groups of texts).
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pacer.artifacts import write_json
from pacer.choices import BLOCK_RULES
from pacer.errors import SourceError
from pacer.evaluation.replay import rules
from pacer.evaluation.replay.costs import Prices
from pacer.evaluation.replay.rules import Rule
from pacer.evaluation.replay.table import Table
from pacer.evaluation.replay.walk import Usage, stack, usage
from pacer.models.preverifier import TUNED

BLOCKS = (1, 2, 3, 4, 5, 6)
THRESHOLDS = tuple(np.round(np.arange(0.05, 0.96, 0.05), 2).tolist())
GROWTHS = (1.0, 1.05, 1.1, 1.2)
CAPS = (1, 2, 3, 4, 6, 8)  # longest drafts tried beside the table's
LOWS, HIGHS = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5), (1.0, 0.95, 0.9, 0.8, 0.7, 0.6)
REFINED = 8  # of the best settings of the coarse grid


@dataclass(frozen=True)
class Setting:
    """An arm's name as `pacer.evaluate` reads it, the values in it, and its rule."""

    arm: str
    values: dict[str, Any]
    rule: Rule


@dataclass(frozen=True)
class Pool:
    """Settings of one family and what they use ``(C, T)``; prices only come in when the best is chosen."""

    settings: list[Setting]
    usage: Usage

    def best(self, prices: Prices) -> int:
        """Place of the highest speed."""
        return int(prices.ratio(self.usage).argmax())


def _arm(method: str, **values: Any) -> Setting:
    """A setting whose name and values are equal to the last digit."""
    kept: dict[str, Any] = {name: float(f"{v:.4g}") if isinstance(v, float) else v for name, v in values.items()}
    arm = " ".join([method, *(f"{name}={value}" for name, value in kept.items())])
    if method in ("sd", rules.ORACLE):
        rule = rules.fixed if method == "sd" else rules.oracle
        return Setting(arm, kept, functools.partial(rule, gamma=kept["gamma"]))
    if method == "threshold":
        named: dict[str, Any] = {("name" if name == "signal" else name): value for name, value in kept.items()}
        return Setting(arm, kept, functools.partial(rules.threshold, **named))
    return Setting(arm, kept, functools.partial(rules.preverified, **kept))


def pool(table: Table, settings: Sequence[Setting], groups: Sequence[str] | None = None) -> Pool:
    """What each setting uses, by group of texts (default: task), groups in order of appearance."""
    names = list(dict.fromkeys(groups or table.tasks))
    member = np.array([names.index(name) for name in (groups or table.tasks)])
    return Pool(list(settings), stack([_grouped(usage(table, s.rule(table)), member, len(names)) for s in settings]))


def _grouped(used: Usage, member: Any, count: int) -> Usage:
    def total(values: Any) -> Any:
        out = np.zeros((count, *values.shape[1:]), dtype=np.int64)
        np.add.at(out, member, values)
        return out

    return Usage(*(total(getattr(used, name)) for name in Usage.__dataclass_fields__))


def _top(found: Pool, prices: Prices, count: int = REFINED) -> list[Setting]:
    order = np.argsort(-prices.ratio(found.usage), kind="stable")
    return [found.settings[i] for i in order[:count]]


def fixed_windows(table: Table) -> list[Setting]:
    """γ = 0 … the table's width."""
    return [_arm("sd", gamma=gamma) for gamma in range(table.width + 1)]


def thresholds(table: Table, name: str, rule: str = "last") -> list[Setting]:
    """Thresholds on one signal, for several longest drafts."""
    if rule == "product" or name == "probability":
        grid = [0.01, 0.02, *THRESHOLDS]
    else:
        values = rules.signal(table, name)
        seen = values[(np.arange(table.width) <= table.run[:, None]) & np.isfinite(values)]
        grid = np.unique(np.quantile(seen, np.arange(0.02, 0.99, 0.04))).tolist() if len(seen) else [0.0]
    caps = sorted({cap for cap in CAPS if cap < table.width} | {table.width})
    return [_arm("threshold", signal=name, rule=rule, t=float(t), gamma_max=cap)
            for t, cap in itertools.product(grid, caps)]  # fmt: skip


def blockwise_grid(table: Table) -> Iterator[Setting]:
    """(b, t0, ρ, rule) of PACER's rule, without bounds."""
    top, allowed = min(table.score_width, table.width), BLOCK_RULES[table.label]
    for b, t0, rho, rule in itertools.product(BLOCKS, THRESHOLDS, GROWTHS, allowed):
        if b <= top and not (b == 1 and rule != allowed[0]):  # of one token all rules are the same
            yield _arm("pacer", b=b, t0=t0, rho=rho, rule=rule, gamma_max=top)


def _again(settings: Sequence[Setting], **choices: Sequence[Any]) -> list[Setting]:
    """Each setting with every combination of other values."""
    out = []
    for setting, chosen in itertools.product(settings, itertools.product(*choices.values())):
        values = {**setting.values, **dict(zip(choices, chosen, strict=True))}
        if values["gamma_max"] >= values["b"]:
            out.append(_arm("pacer", **values))
    return out


def families(table: Table, prices: Prices, groups: Sequence[str] | None = None) -> dict[str, Pool]:
    """Every family's settings: fixed, one per signal and rule, pacer, lazy pacer, the oracle."""
    found = {"fixed": pool(table, fixed_windows(table), groups)}
    signals = [("probability", "last"), ("probability", "product"), *((n, "last") for n in ("entropy", "margin"))]
    for name, rule in [*signals, ("match", "last")]:
        if name == "probability" or name in table.signals:
            found["product" if rule == "product" else name] = pool(table, thresholds(table, name, rule), groups)
    if table.score_width:
        coarse = pool(table, list(blockwise_grid(table)), groups)
        caps = sorted({cap for cap in CAPS if cap < min(table.score_width, table.width)})
        capped = _again(_top(coarse, prices), gamma_max=caps)
        found["pacer"] = joined(coarse, pool(table, capped, groups)) if capped else coarse
        found["pacer_lazy"] = pool(table, _again(_top(found["pacer"], prices), lo=LOWS, hi=HIGHS), groups)
    bounds = [_arm(rules.ORACLE, gamma=gamma) for gamma in range(table.width, -1, -1)]
    found["oracle"] = pool(table, bounds, groups)
    return found


def joined(one: Pool, other: Pool) -> Pool:
    """Both pools' settings."""
    arrays = (np.concatenate([getattr(one.usage, n), getattr(other.usage, n)]) for n in Usage.__dataclass_fields__)
    return Pool([*one.settings, *other.settings], Usage(*arrays))


def write_tuned(folder: Path, values: Mapping[str, Any], evidence: Mapping[str, Any]) -> Path:
    """Put tuned values and what they rest on beside a pre-verifier's ``config.json``, atomically.

    The file is none of those that a finished stage's manifest lists: the stage stays whole.

    Raises:
        SourceError: no checkpoint there, or one that may not be written.
    """
    if not (folder / "config.json").is_file():
        raise SourceError("no pre-verifier checkpoint to write to", value=str(folder))
    if not os.access(folder, os.W_OK):
        raise SourceError("the pre-verifier's folder cannot be written", value=str(folder), remedy="copy it elsewhere")
    path = folder / TUNED
    write_json(path, {"tuned": dict(values), "evidence": dict(evidence)})
    return path
