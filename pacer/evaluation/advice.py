"""Which method, with which settings? Predicted from a short profile and short tables; measuring has the last word.

A prediction replays the target's own texts: every length rule over the draft model (`pacer.evaluation.replay`), every
window of the exits that are there (`pacer.evaluation.cascade`). In a batch it prices each row's own rounds at the cost
of a pass over all rows; that rows wait for the longest draft is not in it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pacer.evaluation.cascade import costs as cascade_costs
from pacer.evaluation.cascade import search as cascade_search
from pacer.evaluation.cascade.profile import profile_rungs
from pacer.evaluation.cascade.table import exit_tables
from pacer.evaluation.profiler import profile
from pacer.evaluation.replay.choice import halved
from pacer.evaluation.replay.costs import from_points
from pacer.evaluation.replay.results import OVERALL, rows
from pacer.evaluation.replay.search import families
from pacer.evaluation.replay.stage import dense_table, texts_of
from pacer.methods.arms import method_settings
from pacer.settings import MethodSettings, Settings
from pacer.stages.build import build
from pacer.stages.exits import exit_heads

log = logging.getLogger(__name__)
NO_RULES = ("oracle", "fixed_here")


@dataclass(frozen=True)
class Candidate:
    """A family's best setting as an arm, and its predicted speed over plain decoding."""

    family: str
    arm: str
    predicted: float


def candidates(settings: Settings) -> list[Candidate]:
    """The best setting of each family, the fastest first; plain decoding is among them.

    Values are chosen on one half of ``advise.texts`` tuning prompts per set and judged on the other.
    """
    chosen = replace(settings.replay, texts="benchmark", split="tune", limit=settings.advise.texts)
    short = replace(settings, replay=chosen)
    found = [Candidate("plain", "ar", 1.0)]
    if rules_over_the_draft(settings):
        found += _of_draft(short)
    if advises_on_exits(settings):
        found += _of_exits(short)
    elif settings.model.exits.layers:
        log.info("exits are left out: what they cost is profiled for one row only")
    return sorted(found, key=lambda candidate: -candidate.predicted)


def rules_over_the_draft(settings: Settings) -> list[MethodSettings]:
    """The method whose parts are built for rules over the draft model: PACER unless the settings' method does without;
    none without a draft model."""
    if settings.method.drafter == "model":
        return [settings.method]
    return [] if settings.model.draft.source is None else [method_settings("threshold")]


def advises_on_exits(settings: Settings) -> bool:
    """Whether exits take part: those that are named, for one row."""
    exits = settings.model.exits
    return (exits.source is not None or bool(exits.layers)) and settings.benchmark.batch_size == 1


def _of_draft(settings: Settings) -> list[Candidate]:
    """Length rules over the draft model, at the run's batch size."""
    models = build(settings, rules_over_the_draft(settings))
    table, _ = dense_table(settings, models, *texts_of(settings, models))
    groups = halved(table)
    context = max(1, round(float(table.start.mean())))
    wanted = replace(
        settings.profile, batches=[settings.benchmark.batch_size], contexts=[context], repeats=settings.advise.repeats
    )
    prices = from_points(profile(models, wanted), context, settings.costs.rest)
    judged = rows(families(table, prices, groups), prices, list(dict.fromkeys(groups)))
    return [
        Candidate(row["family"], row["arm"], row["ratio_to_ar"])
        for row in judged
        if row["benchmark"] == OVERALL and row["family"] not in NO_RULES
    ]


def _of_exits(settings: Settings) -> list[Candidate]:
    """LayerSkip and HiSpec over the exits that the settings name."""
    models = build(settings, [])
    heads = exit_heads(settings, models, settings.model.exits.layers)
    texts = texts_of(settings, models)[0]
    size = models.target.vocab_size
    one, other = (exit_tables(models.target, {"": heads}, texts[k::2] or texts, size)[""] for k in (0, 1))
    points = profile_rungs(models.target, sorted(heads), heads)
    prices = cascade_costs.from_points(points, settings.costs.rest)
    return [
        Candidate(row["family"], row["arm"], row["ratio_to_ar"])
        for row in cascade_search.chosen(one, prices, report=other)
        if row["benchmark"] == cascade_search.OVERALL
    ]


def confirmed(found: Sequence[Candidate], count: int) -> list[str]:
    """Arms to measure: plain decoding, and the ``count`` best of those that decode otherwise, slower ones too."""
    others = [candidate.arm for candidate in found if candidate.arm not in ("ar", "sd gamma=0")]
    return ["ar", *list(dict.fromkeys(others))[:count]]


def best(overall: Sequence[Mapping[str, Any]]) -> tuple[str, bool]:
    """The arm of the highest measured speed over AR, and whether its interval lies above 1.

    Args:
        overall: rows with arm, ratio_to_ar, ratio_low. An arm without a ratio was not measured to its end.
    """
    known = [row for row in overall if row["ratio_to_ar"] is not None]
    top = max(known, key=lambda row: float(row["ratio_to_ar"]), default=None)
    if top is None or top["arm"] == "ar" or float(top["ratio_to_ar"]) <= 1:
        return "ar", True
    return str(top["arm"]), top["ratio_low"] is not None and float(top["ratio_low"]) > 1


def report(found: Sequence[Candidate], overall: Sequence[Mapping[str, Any]]) -> str:
    """The table that the verb prints: predicted beside measured, the fastest prediction first."""
    measured = {row["arm"]: row for row in overall}
    lines = [f"{'method':58} {'predicted':>10}  measured (× AR)"]
    for candidate in found:
        row = measured.get(candidate.arm)
        said = "" if row is None or row["ratio_to_ar"] is None else f"{row['ratio_to_ar']:.2f}"
        if row is not None and row["ratio_low"] is not None:
            said += f" [{row['ratio_low']:.2f}, {row['ratio_high']:.2f}]"
        lines.append(f"{candidate.arm:58} {candidate.predicted:10.2f}  {said}")
    return "\n".join(lines)
