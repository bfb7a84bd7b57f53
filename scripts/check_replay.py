"""Does replay say what decoding does? Rounds exactly, and speed by the cost model, on all (arm, benchmark) points.

In float32: all arms are measured interleaved, between two profiles of the same run; the dense table of AR's own texts
is built, every arm replayed on it. A folder of `pacer.evaluate` in place of the settings compares that run instead: in
bfloat16 its rounds are compared and its speed errors reported, and nothing is gated.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf

from pacer.artifacts import write_json
from pacer.assemble import Models
from pacer.command.app import load_settings, program, run_folder
from pacer.errors import ConfigError
from pacer.evaluation.arms import make_arm
from pacer.evaluation.metrics import group_requests, load_trace
from pacer.evaluation.profiler import Point, profile
from pacer.evaluation.replay.compare import ar_texts, compare_rounds, compare_speeds, replayable
from pacer.evaluation.replay.stage import text_table
from pacer.evaluation.replay.table import join
from pacer.evaluation.runner import load_benchmarks, make_requests, measure
from pacer.methods.arms import is_reference, method_settings
from pacer.reporting.evidence_plots import predicted_and_measured
from pacer.settings import ProfileSettings, Settings
from pacer.stages.build import build
from pacer.stages.training import command_line
from pacer.work.progress import progress

ARMS = [
    "ar", "sd gamma=1", "sd gamma=2", "sd gamma=3", "sd gamma=4", "threshold t=0.5",
    "threshold rule=product t=0.3", "threshold signal=entropy t=1.5", "pacer",
]  # fmt: skip
GAMMA = 16
MEDIAN, SHARE, WITHIN = 0.05, 0.90, 0.10


def prepare(words: Sequence[str]) -> tuple[Settings, Models, Path, bool]:
    """Settings, models, the run's folder, and whether it is gated (float32, measured here)."""
    if words and Path(words[0]).is_dir():
        folder = Path(words[0])
        stored = OmegaConf.merge(OmegaConf.structured(Settings), OmegaConf.load(folder / "settings.yaml"))
        settings = OmegaConf.to_object(stored)
        assert isinstance(settings, Settings)
        methods = [method_settings(arm) for arm in settings.benchmark.arms if not is_reference(arm)]
        return settings, build(settings, methods), folder, False
    settings = load_settings(words)
    if not any(word.startswith("benchmark.arms=") for word in words):
        settings.benchmark.arms = list(ARMS)
    methods = [method_settings(arm) for arm in settings.benchmark.arms]
    trained = build(settings, methods).preverifier_folder  # in the experiment's own dtype
    if trained is not None:
        settings.preverifier.source = str(trained)
    settings.model.dtype, settings.benchmark.score = "float32", False
    return settings, build(settings, methods), run_folder(settings, "check_replay"), True


def profiled(models: Models, context: int, repeats: int) -> list[Point]:
    return profile(models, ProfileSettings(contexts=[context], batches=[1], gamma_max=GAMMA, repeats=repeats))


@torch.inference_mode()
def margin(models: Models, prefix: Sequence[int]) -> float:
    """Difference of the target's two highest logits after a prefix."""
    logits = models.target.model(torch.tensor([list(prefix)], device=models.target.device)).logits[0, -1].float()
    best = logits.topk(2).values
    return float(best[0] - best[1])


def measured(settings: Settings, models: Models, folder: Path, gated: bool) -> tuple[list[Any], list[Point], Any]:
    """Trace lines, profile points of before and after, requests by benchmark."""
    benchmarks = load_benchmarks(settings.benchmark, settings.paths.data_dir)
    budget = settings.benchmark.max_new_tokens
    requests = {b.name: {r.id: r for r in make_requests(b.prompts, models, budget)} for b in benchmarks}
    lengths = [len(r.prompt_ids) + budget // 2 for group in requests.values() for r in group.values()]
    context = int(np.mean(lengths))
    repeats = settings.profile.repeats
    points = profiled(models, context, repeats)
    if not gated:
        return load_trace(folder / "trace.jsonl"), points, requests
    folder.mkdir(parents=True, exist_ok=True)
    arms = [make_arm(arm, models, settings.sampling) for arm in settings.benchmark.arms]
    lines = measure(benchmarks, arms, models, settings.benchmark, folder / "trace.jsonl")
    return lines, points + profiled(models, context, repeats), requests


@program
def main(words: list[str]) -> int:
    settings, models, folder, gated = prepare(words)
    lines, points, requests = measured(settings, models, folder, gated)
    texts = ar_texts(lines, requests)
    if not texts:
        raise ConfigError("no prompt was finished by every arm", remedy="give it more MINUTES")
    budget = settings.benchmark.max_new_tokens
    table = join([text_table(models, t, budget, GAMMA, None) for t in progress(texts, "table", "text")])
    groups = group_requests(lines)
    found, refused = replayable(settings.benchmark.arms, models.tuned)
    rounds = [
        compare_rounds(table, texts, groups, arm, rule, models.tuned, lambda prefix: margin(models, prefix))
        for arm, rule in found.items()
    ]
    speeds = compare_speeds(table, texts, groups, found, points)
    return report(settings, folder, rounds, speeds, refused, points, gated, len(texts))


def report(
    settings: Settings, folder: Path, rounds: list[dict[str, Any]], speeds: list[dict[str, Any]],
    refused: dict[str, str], points: list[Point], gated: bool, prompts: int,
) -> int:  # fmt: skip
    """Print, store, plot; the exit code."""
    for row in rounds:
        events = f"{len(row['differences'])} differences, {len(row['near_ties'])} near-ties, {row['skipped']} skipped"
        print(f"{row['arm']:36} {row['rounds']:6} rounds {row['tokens']:6} tokens: {events}")
    for row in rounds:
        for event in [*row["differences"][:5], *row["near_ties"]]:
            print(json.dumps(event))
    for arm, reason in refused.items():
        print(f"{arm:36} left out: {reason}")
    print()
    for p in speeds:
        note = "  (the unit of time)" if p["by_construction"] else ""
        speed = f"predicted {p['predicted']:7.2f} measured {p['measured']:7.2f} tokens/s"
        print(f"{p['arm']:36} {p['benchmark']:10} {speed} {100 * p['error']:+6.1f} %{note}")
    errors = np.abs([p["error"] for p in speeds if not p["by_construction"]])
    figures = {
        "prompts": prompts, "rounds": sum(r["rounds"] for r in rounds), "tokens": sum(r["tokens"] for r in rounds),
        "differences": sum(len(r["differences"]) for r in rounds),
        "near_ties": sum(len(r["near_ties"]) for r in rounds), "skipped": sum(r["skipped"] for r in rounds),
        "points": len(errors), "median_error": float(np.median(errors)),
        "share_within_10_percent": float((errors <= WITHIN).mean()), "worst_error": float(errors.max()),
        "dtype": settings.model.dtype, "gated": gated,
    }  # fmt: skip
    exact = figures["differences"] == 0
    close = figures["median_error"] <= MEDIAN and figures["share_within_10_percent"] >= SHARE
    figures["ok"] = bool(exact and close)
    out = folder / "check_replay"
    stored = {"figures": figures, "rounds": rounds, "speeds": speeds, "refused": refused,
              "profile": [asdict(p) for p in points]}  # fmt: skip
    write_json(out / "check_replay.json", stored)
    predicted_and_measured(speeds, out / "predicted", command=command_line())
    print(f"\nwritten: {out}")
    print(json.dumps(figures))
    return 0 if figures["ok"] or not gated else 1


if __name__ == "__main__":
    raise SystemExit(main(None))
