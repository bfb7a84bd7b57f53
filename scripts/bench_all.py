"""Every method on the same models, prompts and machine: each family's setting chosen on the tuning quarter of the
prompts, by measuring a few; then all of them interleaved per prompt on the others, ranked.

Length rules whose values a search has put beside a checkpoint (PACER's) come with those. Lossy methods are ranked apart
from exact ones, with what they lose.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pacer.artifacts import write_atomic, write_json
from pacer.command.app import load_settings, program
from pacer.evaluate import measured
from pacer.reporting.tables import interval, markdown, number
from pacer.settings import Settings

# What is tried of each family; the first is its published or default setting.
FAMILIES: dict[str, tuple[str, ...]] = {
    "sd": ("sd gamma=4", "sd gamma=2", "sd gamma=1"),
    "pacer": ("pacer",),
    "threshold": ("threshold t=0.4", "threshold rule=product t=0.5", "threshold rule=product t=0.7"),
    "svip": ("svip h=0.3", "svip h=0.2", "svip h=0.4"),
    "adaedl": ("adaedl", "adaedl t=0.4"),
    "dynamic": ("dynamic", "dynamic gamma_max=4"),
    "heuristic": ("heuristic", "heuristic start=2 gamma_max=4"),
    "specdecpp": ("specdecpp", "specdecpp t=0.5 gamma_min=1"),
    "marginal": ("marginal",),
    "feature": ("feature gamma=3", "feature gamma=2", "feature gamma=1"),
    "prompt_lookup": ("prompt_lookup", "prompt_lookup gamma=3", "prompt_lookup gamma=5 longest=4"),
    "lookahead": ("lookahead", "lookahead level=3 window=3 guesses=3"),
    "ouroboros": ("ouroboros", "ouroboros gamma=3 level=3 window=3 guesses=3"),
    "ouroboros_pacer": ("ouroboros_pacer", "ouroboros_pacer level=3 window=3 guesses=3"),
    "pearl": ("pearl",),
    "layerskip": ("layerskip exits=[4] gamma=2", "layerskip exits=[4] gamma=1"),
    "hispec": ("hispec exits=[4,10]", "hispec exits=[4,10] gamma=1 n=2", "hispec exits=[4,10] gamma=1 n=1 bonus=false"),
    "kangaroo": ("kangaroo exits=[4]", "kangaroo exits=[4] gamma_max=2"),
    "adadecode": ("adadecode exits=[4,10]", "adadecode exits=[4,10] gamma_max=2"),
    "sprinter": ("sprinter", "sprinter t=0.8"),
    "hf_generate": ("hf_generate",),
    "hf_assisted": ("hf_assisted", "hf_assisted gamma=2"),
}
TUNING_SHARE, TUNING_TOKENS, TUNING_PROMPTS = 0.35, 32, 1  # of the time box; tokens and prompts per set
FIGURES = (
    "prompts", "failed", "tokens_per_second", "ratio_to_ar", "ratio_low", "ratio_high", "tokens_per_verify",
    "mean_drafted", "acceptance_rate", "acceptance_by_context", "share", "first_token_seconds_p50",
    "first_token_seconds_p95", "latency_seconds_p50", "latency_seconds_p95", "exact", "exact_detail", "agreement",
    "score",
)  # fmt: skip


def with_arms(settings: Settings, arms: Sequence[str], **benchmark: Any) -> Settings:
    return replace(settings, benchmark=replace(settings.benchmark, arms=list(dict.fromkeys(arms)), **benchmark))


def tuned(families: Mapping[str, Sequence[str]], overall: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Each family's fastest arm; the first where none of a family was measured to its end."""
    speed = {row["arm"]: row["ratio_to_ar"] for row in overall}
    return {name: max(arms, key=lambda arm: speed.get(arm) or 0.0) for name, arms in families.items()}


def ranked(chosen: Mapping[str, str], results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row per family, the fastest first, exact ones before lossy ones; ranks count within each."""
    guarantee = {row["arm"]: row["guarantee"] for row in results["rows"]}
    over = {row["arm"]: row for row in results["overall"]}
    rows = [
        {"family": family, **over[arm], "guarantee": guarantee[arm]} for family, arm in chosen.items() if arm in over
    ]
    rows.sort(key=lambda row: (row["guarantee"] != "exact", -(row["ratio_to_ar"] or 0.0)))
    seen = {"exact": 0, "lossy": 0}
    for row in rows:
        seen[row["guarantee"]] += 1
        row["rank"] = seen[row["guarantee"]]
    return rows


@program
def main(words: list[str]) -> int:
    settings = load_settings(words)
    minutes = settings.benchmark.minutes or 60.0
    candidates = ["ar", *(arm for arms in FAMILIES.values() for arm in arms)]
    _, tuning = measured(with_arms(
        settings, candidates, split="tune", limit=TUNING_PROMPTS, score=False, minutes=TUNING_SHARE * minutes,
        max_new_tokens=min(TUNING_TOKENS, settings.benchmark.max_new_tokens),
    ))  # fmt: skip
    chosen = {"ar": "ar", **tuned(FAMILIES, tuning["overall"])}
    last = with_arms(settings, list(chosen.values()), split="report", minutes=(1 - TUNING_SHARE) * minutes)
    folder, results = measured(last)
    rows = ranked(chosen, results)
    figures = [
        {"arm": r["arm"], "benchmark": r["benchmark"], **{key: r[key] for key in FIGURES}} for r in results["rows"]
    ]
    found = {"ranks": rows, "chosen": chosen, "tuning": tuning["overall"], "rows": figures}
    path = write_json(folder / "bench_all.json", {**found, "definitions": results["definitions"]})
    write_atomic(folder / "ranks.md", ranks_table(found) + "\n")
    return report(found, str(path))


def ranks_table(found: Mapping[str, Any]) -> str:
    """The ranks for people: over all benchmarks with the interval, and on each. Markdown."""
    speed = {(row["arm"], row["benchmark"]): row["ratio_to_ar"] for row in found["rows"]}
    benchmarks = list(dict.fromkeys(benchmark for _, benchmark in speed))
    rows = [
        ["rank", "method", "× AR [95 % interval]", *benchmarks],
        ["---:", "---", "---:", *("---:" for _ in benchmarks)],
    ]
    for row in found["ranks"]:
        rank, name = str(row["rank"]), row["arm"]
        if row["guarantee"] != "exact":
            rank, name = f"{row['guarantee']} {rank}", f"{name} ({row['guarantee']}: {left(found, name)})"
        each = (number(speed.get((row["arm"], benchmark)), 2) for benchmark in benchmarks)
        rows.append([rank, name, interval(row), *each])
    return markdown(rows)


def left(found: Mapping[str, Any], arm: str) -> str:
    """How much of AR's text a lossy method leaves, on the benchmark where it leaves most and where least."""
    shares = [row["agreement"]["same_tokens"] for row in found["rows"] if row["arm"] == arm and row["agreement"]]
    return f"{100 * min(shares):.0f} to {100 * max(shares):.0f} % of AR's tokens" if shares else "not compared with AR"


def report(found: Mapping[str, Any], path: str) -> int:
    """Print; the exit code says whether every family was measured, and no request failed."""
    print()
    for row in found["ranks"]:
        said = "–" if row["ratio_to_ar"] is None else f"{row['ratio_to_ar']:.3f} × AR"
        said += "" if row["ratio_low"] is None else f" [{row['ratio_low']:.3f}, {row['ratio_high']:.3f}]"
        print(f"{row['rank']:3} {row['guarantee'] if row['guarantee'] != 'exact' else '':6} {row['arm']:52} {said}")
    missing = [row["arm"] for row in found["ranks"] if row["ratio_to_ar"] is None]
    failed = sum(row["failed"] for row in found["rows"])
    for arm in missing:
        print(f"not measured to its end: {arm}; the same command goes on")
    ok = not missing and not failed
    print(json.dumps({"ranks": found["ranks"], "failed": failed, "written": path, "ok": ok}))
    return 0 if ok else 1


if __name__ == "__main__":
    raise SystemExit(main(None))
