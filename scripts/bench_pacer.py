"""PACER against the baselines that are tuned as it is: what is wanted, measured, with what falls short.

For each pair: the dense table of the tuning prompts, every rule's best values at prices profiled on this machine; then
all arms interleaved per prompt on the other prompts, in between two profiles; then the oracle, replayed on AR's own
texts of those prompts at the same prices.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pacer import replay
from pacer.artifacts import write_json
from pacer.assemble import Models
from pacer.command.app import load_settings, program, run_folder, with_settings
from pacer.evaluate import measured
from pacer.evaluation.metrics import group_requests, load_trace
from pacer.evaluation.profiler import Point, profile
from pacer.evaluation.replay.compare import ar_texts
from pacer.evaluation.replay.costs import from_points
from pacer.evaluation.replay.search import families
from pacer.evaluation.replay.stage import text_table
from pacer.evaluation.replay.table import join
from pacer.evaluation.runner import load_benchmarks, make_requests
from pacer.methods.arms import method_settings
from pacer.settings import ProfileSettings, Settings
from pacer.stages.build import build
from pacer.work.progress import progress
from pacer.work.stopping import check_stop
from scripts.bench_main import medians, ratio

PAIRS = ("smollm2", "skip")
THRESHOLDS, PACERS = ("probability", "product", "entropy", "margin", "match"), ("pacer", "pacer_lazy")
OVER_FIXED, OVER_THRESHOLD, CALL_IN_LAYERS, REST_SHARE = 1.08, 1.02, 1.3, 0.05


def tuned(pair: str, words: Sequence[str]) -> dict[str, Any]:
    """Each rule's best arm on the tuning prompts, by predicted speed; PACER's values go into its checkpoint too.

    All arms are measured by their values, so none depends on what the checkpoint holds later.
    """
    wanted = ["replay.profile=measure", "replay.write=true", *words]
    settings = load_settings([f"+experiment=replay/{pair}", *wanted])
    folder = run_folder(settings, "replay")
    if not (folder / "tuned.json").is_file():
        with_settings(replay.main)(settings)
    found: dict[str, Any] = json.loads((folder / "tuned.json").read_text())
    rows = json.loads((folder / "results.json").read_text())["rows"]
    predicted = {row["family"]: row["ratio_to_ar"] for row in rows if row["benchmark"] == "all"}
    threshold, paced = (max(group, key=lambda family: predicted[family]) for group in (THRESHOLDS, PACERS))
    return {"fixed": found["fixed"], "threshold": found[threshold], "pacer": found[paced], "predicted": predicted}


def profiled(models: Models, context: int) -> list[Point]:
    return profile(models, ProfileSettings(contexts=[context], batches=[1], gamma_max=16, repeats=6))


def kept(path: Path, when: str, models: Models) -> list[Point]:
    """The profile made ``when`` (before or after the measurement): what the oracle takes must not make it anew."""
    found = json.loads(path.read_text()) if path.is_file() else {}
    if when not in found:
        found[when] = [asdict(point) for point in profiled(models, 256)]
        write_json(path, found)
    return [Point(**point) for point in found[when]]


def oracle(models: Models, settings: Settings, lines: Any, points: Sequence[Point]) -> dict[str, float]:
    """Predicted speed over AR, on AR's texts of the measured prompts: the oracle and each rule's best in hindsight."""
    budget = settings.benchmark.max_new_tokens
    benchmarks = load_benchmarks(settings.benchmark, settings.paths.data_dir)
    requests = {b.name: {r.id: r for r in make_requests(b.prompts, models, budget)} for b in benchmarks}
    tables = []
    for text in progress(ar_texts(lines, requests), "oracle", "text"):
        tables.append(text_table(models, text, budget, 16, 8))
        check_stop()
    table = join(tables)
    prices = from_points(points, float(table.start.mean()), settings.costs.rest)
    return {family: float(prices.ratio(pool.usage).max()) for family, pool in families(table, prices).items()}


def measure_pair(pair: str, words: Sequence[str]) -> dict[str, Any]:
    """All of one pair, as plain data."""
    best = tuned(pair, [word for word in words if not word.startswith("benchmark.")])
    gamma = max(1, int(best["fixed"].removeprefix("sd gamma=")))  # transformers has no window of 0
    theirs = ["hf_generate", f"hf_assisted gamma={gamma}", "hf_dynamic"]
    arms = ["ar", best["fixed"], best["threshold"], best["pacer"], *theirs]
    listed = ",".join(f'"{arm}"' for arm in dict.fromkeys(arms))
    settings = load_settings([f"+experiment=pacer/{pair}", f"benchmark.arms=[{listed}]", *words])
    folder = run_folder(settings, "evaluate")
    models = build(settings, [method_settings("pacer")])
    points = kept(folder / "profiles.json", "before", models)
    results = measured(settings)[1]
    points += kept(folder / "profiles.json", "after", models)
    lines = load_trace(folder / "trace.jsonl")
    rows = {(row["arm"], row["benchmark"]): row for row in results["rows"]}
    groups, ms = group_requests(lines), medians(points)
    benchmarks = list(dict.fromkeys(b for _, b in rows))
    layer = (ms["target", 1] - ms["head", 1]) / models.target.n_layers
    figures = {
        "pair": pair, "arms": {name: best[name] for name in ("fixed", "threshold", "pacer")},
        "c": ms["draft", 1] / ms["target", 1], "v": {n: ms["target", n] / ms["target", 1] for n in (2, 3, 5, 9, 17)},
        "target_ms": ms["target", 1], "prompts": {b: rows["ar", b]["prompts"] for b in benchmarks},
        "call_in_layers": ms["preverifier", 2] / layer, "call_in_target_passes": ms["preverifier", 2] / ms["target", 1],
        "rest_share": {arm: max(rows[arm, b]["share"]["rest"] or 0.0 for b in benchmarks) for arm in arms[:4]},
        "over_ar": {r["arm"]: [r["ratio_to_ar"], r["ratio_low"], r["ratio_high"]] for r in results["overall"]},
        "acceptance": {b: rows[best["fixed"], b]["acceptance_rate"] for b in benchmarks},
        "tau": {f"{arm} / {b}": rows[arm, b]["tokens_per_verify"] for arm in arms[1:4] for b in benchmarks},
        "over_fixed": ratio(groups, best["pacer"], best["fixed"], benchmarks),
        "over_threshold": ratio(groups, best["pacer"], best["threshold"], benchmarks),
        "over_fixed_by_benchmark": {b: ratio(groups, best["pacer"], best["fixed"], [b]) for b in benchmarks},
        "over_threshold_by_benchmark": {b: ratio(groups, best["pacer"], best["threshold"], [b]) for b in benchmarks},
        "tuning_predicted": best["predicted"], "hindsight_predicted": oracle(models, settings, lines, points),
    }  # fmt: skip
    write_json(folder / "bench_pacer.json", figures)
    return figures


def wanted(figures: dict[str, Any]) -> list[tuple[str, float | None, str, float]]:
    """(what, measured, at least or at most, bound)."""
    pair, rest = figures["pair"], figures["rest_share"][figures["arms"]["pacer"]]
    highs = [figures[f"over_{kind}_by_benchmark"] for kind in ("fixed", "threshold")]
    uppers = [found["high"] for group in highs for found in group.values() if found["high"] is not None]
    least = min(uppers, default=None)
    return [
        (f"{pair}: PACER over the tuned fixed window", figures["over_fixed"]["value"], "≥", OVER_FIXED),
        (f"{pair}: PACER over the best tuned threshold", figures["over_threshold"]["value"], "≥", OVER_THRESHOLD),
        (f"{pair}: lowest upper end of an interval of a benchmark", least, "≥", 1.0),
        (f"{pair}: a pre-verifier call in layer passes", figures["call_in_layers"], "≤", CALL_IN_LAYERS),
        (f"{pair}: time outside draft, pre-verifier, target", rest, "≤", REST_SHARE),
    ]  # fmt: skip


@program
def main(arguments: list[str]) -> int:
    """Arguments: names of pairs (experiments pacer/NAME and replay/NAME) and settings."""
    words = [word for word in arguments if "=" in word]
    pairs = [name for name in arguments if "=" not in name] or PAIRS
    found = [measure_pair(pair, words) for pair in pairs]
    print()
    reached = []
    for what, value, sign, bound in [goal for figures in found for goal in wanted(figures)]:
        ok = value is not None and (value >= bound if sign == "≥" else value <= bound)
        reached.append(ok)
        said = "–" if value is None else f"{value:.3f}"
        print(f"{'reached' if ok else 'NOT reached':12} {what}: {said}, wanted {sign} {bound}")
    path = write_json(Path(load_settings(words).paths.runs) / "bench_pacer.json", found)
    print(json.dumps({"pairs": found, "written": str(path), "ok": all(reached)}))
    return 0 if all(reached) else 1


if __name__ == "__main__":
    raise SystemExit(main(None))
