"""The main comparison: what is wanted of it, measured, with what falls short and by how much.

Profile, then all arms interleaved per prompt (time-boxed, resumable), then the profile again, so that costs and speeds
come from the same quarter of an hour of the machine.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from pacer import evaluate
from pacer.artifacts import write_json
from pacer.command.app import load_settings, program, run_folder, with_settings
from pacer.evaluation.metrics import cost_model, group_requests, load_trace
from pacer.evaluation.profiler import Point, profile
from pacer.evaluation.stats import geometric_mean_ratio
from pacer.evaluation.traces import paired_prompts, request_values
from pacer.methods.arms import method_settings
from pacer.settings import ProfileSettings, Settings
from pacer.stages.build import build

PROFILE = ProfileSettings(contexts=[256], batches=[1], gamma_max=16, repeats=8)
LEAST_MODEL_SHARE = 0.92  # of the cost model's speed
LEAST_GSM8K = 1.3


def profiled(settings: Settings) -> list[Point]:
    """Costs of the parts; the models are loaded for it and dropped."""
    return profile(build(settings, [method_settings("pacer")]), PROFILE)


def medians(points: list[Point]) -> dict[tuple[str, int], float]:
    """Milliseconds per (part, n), over all profiles."""
    table: dict[tuple[str, int], list[float]] = {}
    for point in points:
        table.setdefault((point.part, point.n), []).append(point.median_ms)
    return {key: float(np.mean(values)) for key, values in table.items()}


def model_share(row: dict[str, Any], ar: dict[str, Any], table: dict[tuple[str, int], float]) -> float | None:
    """Measured decoding speed over AR / the cost model's value at the measured tau, lengths, c and v."""
    if row["mean_drafted"] is None or not row["mean_drafted"] or not row["decode_tokens_per_second"]:
        return None
    one = table["target", 1]
    v = {n: ms / one for (part, n), ms in table.items() if part == "target"}
    calls = [ms for (part, _), ms in table.items() if part == "preverifier"]
    # a round asks the pre-verifier about once per block; its share of the round's time is what the trace says
    share = row["share"]["preverify"] or 0.0
    p = float(np.median(calls)) / one if share and calls else 0.0
    blocks = row["mean_drafted"] / row["block"] if row.get("block") else 0.0
    predicted = cost_model(row["tokens_per_verify"], row["mean_drafted"], v, table["draft", 1] / one, p=p * blocks)
    return float(row["decode_tokens_per_second"] / ar["decode_tokens_per_second"] / predicted)


def ratio(groups: Any, arm: str, reference: str, benchmarks: list[str]) -> dict[str, float | None]:
    """Speed of one arm over another: geometric mean over benchmarks with its interval."""
    pairs = []
    for benchmark in benchmarks:
        names = paired_prompts(groups, benchmark)
        pairs.append(
            (*request_values(groups[arm, benchmark], names), *request_values(groups[reference, benchmark], names))
        )
    found = geometric_mean_ratio(pairs, resamples=2000, seed=0)
    return {"value": found.value, "low": found.low, "high": found.high}


def summary(settings: Settings, folder: Path, points: list[Point], block: int) -> dict[str, Any]:
    """The figures that the comparison is for."""
    results = json.loads((folder / "results.json").read_text())
    groups = group_requests(load_trace(folder / "trace.jsonl"))
    rows = {(row["arm"], row["benchmark"]): row for row in results["rows"]}
    benchmarks = list(dict.fromkeys(b for _, b in rows))
    overall = {row["arm"]: row["ratio_to_ar"] or 0.0 for row in results["overall"]}
    fixed = max((arm for arm in overall if arm.startswith("sd ")), key=lambda arm: overall[arm])
    fixed_full = max((arm for arm in overall if arm.startswith("sd_full ")), key=lambda arm: overall[arm])
    assisted = max((arm for arm in overall if arm.startswith("hf_assisted")), key=lambda arm: overall[arm])
    table = medians(points)
    shares = {}
    for (arm, benchmark), row in rows.items():
        if arm.startswith("sd_full"):
            continue  # the profile is of the draft with its reduced head
        share = model_share({**row, "block": block if arm == "pacer" else None}, rows["ar", benchmark], table)
        if share is not None:
            shares[f"{arm} / {benchmark}"] = share
    one = table["target", 1]
    return {
        "ar_over_hf_generate": ratio(groups, "ar", "hf_generate", benchmarks),
        "best_fixed": fixed, "best_fixed_full_head": fixed_full, "best_hf_assisted": assisted,
        "sd_over_hf_assisted": ratio(groups, fixed, assisted, benchmarks),
        "sd_full_head_over_hf_assisted": ratio(groups, fixed_full, assisted, benchmarks),
        "pacer_over_best_fixed": ratio(groups, "pacer", fixed, benchmarks),
        "pacer_over_ar": {
            b: [rows["pacer", b][k] for k in ("ratio_to_ar", "ratio_low", "ratio_high")] for b in benchmarks
        },
        "cost_model_share_worst": min(shares.items(), key=lambda item: item[1]), "cost_model_share": shares,
        "c": table["draft", 1] / one, "preverifier": table["preverifier", min(8, block + 1)] / one,
        "v": {n: table["target", n] / one for n in (1, 2, 3, 5, 9, 17)}, "target_ms": one,
        "acceptance": {b: rows[fixed, b]["acceptance_rate"] for b in benchmarks},
        "tau": {f"{arm} / {b}": rows[arm, b]["tokens_per_verify"] for arm in (fixed, "pacer") for b in benchmarks},
        "prompts": {b: rows["ar", b]["prompts"] for b in benchmarks},
    }  # fmt: skip


def wanted(figures: dict[str, Any]) -> list[tuple[str, float, float]]:
    """(what, measured, wanted at least)."""
    goals = [
        ("our AR over HF generate", figures["ar_over_hf_generate"]["value"], 1.0),
        ("our best fixed SD over the best HF assisted (same pair)", figures["sd_over_hf_assisted"]["value"], 1.0),
        ("… with the whole vocabulary's head", figures["sd_full_head_over_hf_assisted"]["value"], 1.0),
        ("slowest arm's share of the cost model's speed", figures["cost_model_share_worst"][1], LEAST_MODEL_SHARE),
        ("PACER over the best fixed window", figures["pacer_over_best_fixed"]["value"], 1.0),
    ]
    if "gsm8k" in figures["pacer_over_ar"]:
        goals.append(("PACER over AR on GSM8K", figures["pacer_over_ar"]["gsm8k"][0], LEAST_GSM8K))
    return goals


@program
def main(words: list[str]) -> int:
    settings = load_settings(words)
    folder = run_folder(settings, "evaluate")
    points = profiled(settings)
    with_settings(evaluate.main)(settings)
    points += profiled(settings)
    tuned = build(settings, [method_settings("pacer")]).tuned or {}
    figures = summary(settings, folder, points, int(tuned.get("b", 1)))
    figures["tuned"] = tuned
    write_json(folder / "bench_main.json", figures)
    print()
    reached = []
    for what, value, least in wanted(figures):
        reached.append(value is not None and value >= least)
        print(f"{'reached' if reached[-1] else 'NOT reached':12} {what}: {value:.3f}, wanted ≥ {least}")
    print(f"c {figures['c']:.3f}, pre-verifier call {figures['preverifier']:.3f}, v {figures['v']}")
    print(json.dumps({**{k: v for k, v in figures.items() if k != "cost_model_share"}, "ok": all(reached)}))
    return 0 if all(reached) else 1


if __name__ == "__main__":
    raise SystemExit(main(None))
