"""Is the output the target's own? Greedy methods against ``ar`` and transformers' ``generate``, in float32.

A difference fails unless the reference's top-2 margin there is below 1e-4: such near-ties are printed and counted, and
the comparison goes on from the reference's prefix. Sampled output is checked by the chi-square tests of the test suite.
The same command goes on where it was stopped, as long as the code is the commit's.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from pacer.artifacts import provenance, write_json
from pacer.assemble import Models, make_decoder
from pacer.command.app import load_settings, program, run_folder
from pacer.decoding.loop import Decoder
from pacer.decoding.request import Request
from pacer.evaluation.arms import make_arm
from pacer.evaluation.runner import load_benchmarks, make_requests
from pacer.methods.arms import method_settings
from pacer.settings import SamplingSettings
from pacer.stages.build import build
from pacer.stages.feature import feature_checkpoint
from pacer.work.progress import progress
from pacer.work.stopping import check_stop

TOKENS = 48
MARGIN = 1e-4
MOST_NEAR_TIES = 1 / 20_000  # of the compared tokens; at least one is always allowed
METHODS = (
    "ar", "sd gamma=4", "threshold", "threshold rule=product t=0.2", "threshold signal=entropy t=1.0",
    "pacer", "pacer b=3 t0=0.0 gamma_max=8", "pacer b=2 lo=0.1 hi=0.6", "specdecpp", "specdecpp t=0.9 gamma_min=1",
    "svip", "adaedl", "dynamic", "heuristic", "marginal prices=settings",
    "marginal prices=settings signal=preverifier b=2 gamma_max=8",
    "layerskip", "hispec", "hispec n=6 bonus=false", "hispec share=0.01", "kangaroo",
    "hispec head=shared exits=[2,8,15] n=[3,6]",
    "adadecode t=0.4", "hispec_pacer", "pearl", "pearl gamma=3",
    "feature gamma=3", "threshold drafter=feature t=0.3",
    "lookahead", "lookahead from_prompt=true warm=true window=4 level=4",
    "prompt_lookup", "prompt_lookup branches=3 gamma=6",
    "ouroboros", "ouroboros gamma=8 warm=true phrases=5", "ouroboros_pacer", "ouroboros_pacer b=3 t0=0.0 gamma_max=8",
)  # fmt: skip
BATCHES = (1, 4, 16)
WHOLE_LOOP = (
    "loop_sampling", "every_rule", "self_speculation", "specdecpp", "feature_drafting", "tree_decoding",
    "ngram_methods",
)  # fmt: skip
CHI_SQUARE = ("tests/unit/test_verify_tree.py", *(f"tests/integration/test_{name}.py" for name in WHOLE_LOOP))

Run = Callable[[Sequence[Request]], list[list[int]]]


@torch.inference_mode()
def margin(models: Models, prefix: Sequence[int]) -> float:
    """Difference of the two highest logits after a prefix."""
    logits = models.target.model(torch.tensor([list(prefix)])).logits[0, -1].float()
    best = logits.topk(2).values
    return float(best[0] - best[1])


def compare(
    name: str, run: Run, requests: Sequence[Request], reference: dict[str, list[int]], models: Models
) -> dict[str, Any]:
    """Near-ties and differences of a method on these requests."""
    found: dict[str, Any] = {"tokens": 0, "near_ties": [], "differences": []}
    todo = [(request, reference[request.id]) for request in requests]
    while todo:
        outputs = run([request for request, _ in todo])
        again = []
        for (request, wanted), got in zip(todo, outputs, strict=True):
            found["tokens"] += len(wanted)
            if got == wanted:
                continue
            place = next(
                (i for i, (a, b) in enumerate(zip(got, wanted, strict=False)) if a != b), min(len(got), len(wanted))
            )
            prefix = [*request.prompt_ids, *wanted[:place]]
            gap = margin(models, prefix) if place < len(wanted) else float("inf")
            event = {
                "method": name, "prompt": request.id, "position": len(prefix), "margin": gap,
                "reference": wanted[place] if place < len(wanted) else None,
                "got": got[place] if place < len(got) else None,
            }  # fmt: skip
            found["near_ties" if gap < MARGIN else "differences"].append(event)
            rest = wanted[place + 1 :]
            if gap < MARGIN and rest:
                again.append((Request(request.id, [*prefix, wanted[place]], len(rest), request.stop_ids), rest))
        todo = again
    return found


def in_batches(decoder: Decoder, size: int) -> Run:
    """Rows of ``size``; a request takes the row of one that has ended."""
    return lambda requests: [r.ids for r in decoder.generate(requests, slots=size)]


def prepare(words: Sequence[str]) -> tuple[Models, list[Request]]:
    """Models in float32, with the pre-verifier that the experiment trains in its own dtype."""
    settings = load_settings([*words, "benchmark.split=all"])
    methods = [method_settings(name) for name in METHODS]
    trained = build(settings, methods)
    settings.model.feature.source = str(feature_checkpoint(settings, trained))
    settings.model.dtype, settings.preverifier.source = "float32", str(trained.preverifier_folder)
    settings.specdecpp.source = str(trained.head_folders["specdecpp"])
    models = build(settings, methods)
    requests = [
        request
        for benchmark in load_benchmarks(settings.benchmark, settings.paths.data_dir)
        for request in make_requests(benchmark.prompts, models, TOKENS)
    ]
    return models, requests


def begun(path: Path, commit: str | None) -> dict[str, Any]:
    """What an earlier call at this commit has checked; nothing where the code differs from it."""
    found = json.loads(path.read_text()) if path.is_file() else {}
    clean = commit is not None and "+" not in commit
    return found if clean and found.get("commit") == commit else {"commit": commit, "reference": {}, "rows": []}


def check(models: Models, requests: Sequence[Request], sampling: SamplingSettings, path: Path) -> list[dict[str, Any]]:
    """Every method in every batch size; what is done is in the file, and is not done again."""
    found = begun(path, provenance()["commit"])
    generate = make_arm("hf_generate", models, sampling)
    for request in progress([r for r in requests if r.id not in found["reference"]], "generate", "prompt"):
        found["reference"][request.id] = generate.run([request])[0]["ids"]
        check_stop()
    done = {(row["method"], row["batch"]) for row in found["rows"]}
    for name in METHODS:
        decoder = make_decoder(method_settings(name), models, sampling)
        for size in BATCHES:
            if (name, size) in done:
                continue
            run = in_batches(decoder, size)
            row = compare(f"{name}, batch {size}", run, requests, found["reference"], models)
            found["rows"].append({"method": name, "batch": size, **row})
            write_json(path, found)
            print(
                f"{name:32} batch {size}: {row['tokens']:6} tokens, {len(row['differences'])} differences, "
                f"{len(row['near_ties'])} near-ties",
                flush=True,
            )
            check_stop()
    rows: list[dict[str, Any]] = found["rows"]
    return rows


@program
def main(words: list[str]) -> int:
    models, requests = prepare(words)
    settings = load_settings(words)
    path = run_folder(settings, "check_exact") / "checked.json"
    table = check(models, requests, settings.sampling, path)
    for row in table:
        for event in [*row["differences"], *row["near_ties"]]:
            print(json.dumps(event))
    print(f"\nchi-square through the whole loop: {' '.join(CHI_SQUARE)}", flush=True)
    chi = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *CHI_SQUARE], cwd=Path(__file__).parent.parent
    )
    tokens = sum(row["tokens"] for row in table)
    differences = sum(len(row["differences"]) for row in table)
    ties = sum(len(row["near_ties"]) for row in table)
    ok = differences == 0 and chi.returncode == 0 and ties <= max(1, tokens * MOST_NEAR_TIES)
    figures = {"prompts": len(requests), "tokens": tokens, "differences": differences, "near_ties": ties}
    print(json.dumps({**figures, "chi_square_passed": chi.returncode == 0, "written": str(path), "ok": ok}))
    return 0 if ok else 1


if __name__ == "__main__":
    raise SystemExit(main(None))
