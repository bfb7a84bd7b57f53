"""Ablations of PACER's rule: growth ρ, how a block's estimates become one number, block size, longest draft.

Each is replayed on the tuning prompts (predicted) and decoded on the others, all arms interleaved per prompt
(measured). What needs a training of its own (index embedding, features, labels, width …) is `ablate_preverifier.sh`.
Of the rules for a block those are compared that read what the pre-verifier has learnt: mean and minimum of survival,
product and minimum with ``preverifier.label=conditional``.
At a temperature above 0 nothing is replayed: acceptance, τ and speed are measured.
"""

from __future__ import annotations

import json
from typing import Any

from pacer.artifacts import write_json
from pacer.choices import BLOCK_RULES
from pacer.command.app import load_settings, program
from pacer.evaluate import measured
from pacer.evaluation.profiler import profile
from pacer.evaluation.replay import rules
from pacer.evaluation.replay.costs import Prices, from_points
from pacer.evaluation.replay.search import Setting, pool
from pacer.evaluation.replay.stage import dense_table, texts_of
from pacer.evaluation.replay.table import Table
from pacer.methods.arms import method_settings
from pacer.settings import ProfileSettings
from pacer.stages.build import build

SPEED = ("ratio_to_ar", "ratio_low", "ratio_high")
LENGTHS = (8, 16, 32)


def changes(label: str, longest: int) -> list[dict[str, Any]]:
    """One value at a time; of the rules those that read the label. No draft is longer than the pre-verifier learnt on.

    Blocks and rules are compared without the tuned cap, which may be shorter than a block.
    """
    long = {"gamma_max": longest}
    return [
        {}, {"lo": 0.0, "hi": 1.0}, {"rho": 1.0}, {"rho": 1.1},
        *({"b": 2, "rule": rule, **long} for rule in BLOCK_RULES[label]),
        *({"b": b, **long} for b in (1, 3, 4, 5, 6)), *({"gamma_max": n} for n in LENGTHS if n < longest), long,
    ]  # fmt: skip


def arm(change: dict[str, Any]) -> str:
    return " ".join(["pacer", *(f"{name}={value}" for name, value in change.items())])


def predictions(table: Table, prices: Prices, tuned: dict[str, Any], arms: list[str]) -> dict[str, float]:
    """Arm → predicted speed over AR on the tuning prompts."""
    found = pool(table, [Setting(name, {}, rules.rule_of(name, tuned)) for name in arms])
    return {name: float(value) for name, value in zip(arms, prices.ratio(found.usage), strict=True)}


@program
def main(arguments: list[str]) -> int:
    """Arguments: the pair (experiments pacer/NAME and replay/NAME) and settings."""
    pair, *words = arguments
    judge = load_settings([f"+experiment=pacer/{pair}", *words]).preverifier
    arms = [arm(change) for change in changes(judge.label, judge.gamma_max)]
    listed = ",".join(f'"{name}"' for name in ["ar", *arms])
    settings = load_settings([f"+experiment=pacer/{pair}", f"benchmark.arms=[{listed}]", *words])
    temperature = settings.sampling.temperature
    predicted: dict[str, float] = {}
    if temperature == 0:
        apart = [word for word in words if not word.startswith("benchmark.")]
        tuning = load_settings([f"+experiment=replay/{pair}", *apart])
        models = build(tuning, [method_settings("pacer")])
        table, _ = dense_table(tuning, models, *texts_of(tuning, models))
        context = max(1, round(float(table.start.mean())))
        points = profile(models, ProfileSettings(contexts=[context], batches=[1], gamma_max=judge.gamma_max, repeats=5))
        predicted = predictions(table, from_points(points, context, tuning.costs.rest), models.tuned or {}, arms)
    folder, results = measured(settings)
    overall = {row["arm"]: row for row in results["overall"]}
    rows = [
        {"arm": name, "predicted": predicted.get(name), **{k: overall[name][k] for k in SPEED}}
        for name in arms
        if name in overall
    ]
    print(f"\n{'arm':24} {'predicted':>10} {'measured':>9}  95 % interval   (× AR)")
    for row in rows:
        said, value, low, high = ("–" if row[k] is None else f"{row[k]:.3f}" for k in ("predicted", *SPEED))
        print(f"{row['arm']:24} {said:>10} {value:>9}  [{low}, {high}]")
    path = write_json(folder / "bench_ablation.json", {"temperature": temperature, "rows": rows})
    print(json.dumps({"rows": rows, "written": str(path), "ok": True}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(None))
