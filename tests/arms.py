"""What tests of arms share: their names, models that all of them can use, two small benchmarks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from pacer.assemble import Models, load_target
from pacer.data.prompts import Prompt
from pacer.evaluation import runner
from pacer.evaluation.arms import Arm, make_arm
from pacer.evaluation.runner import Benchmark
from pacer.models.draft import TrainableDraft
from pacer.settings import BenchmarkSettings, ModelSettings, SamplingSettings, SourceSettings
from tests.tiny import make_preverifier

ARMS = (
    "ar", "sd gamma=1", "sd gamma=4", "sd_full gamma=3", "pacer", "pacer lo=0.05 hi=0.3", "threshold t=0.2",
    "hf_generate", "hf_assisted", "hf_assisted gamma=2", "hf_heuristic",
)  # fmt: skip
OURS = [arm for arm in ARMS if not arm.startswith("hf")]
SETTINGS = BenchmarkSettings(max_new_tokens=14, warmup=0, bootstrap=20)
Lines = list[dict[str, Any]]


def make_models(folder: Path) -> Models:
    """A tiny target, a draft of two of its layers with both heads, a random pre-verifier; one more id ends a text."""
    settings = ModelSettings("tiny", SourceSettings(str(folder)), dtype="float32", device="cpu")
    found = load_target(settings, folder)
    some = torch.arange(0, found.target.vocab_size, 2)
    found.draft = TrainableDraft(found.target, [0, 1], some).merged()
    found.draft_full = TrainableDraft(found.target, [0, 1], some).merged(full=True, target=found.target)
    found.preverifier = make_preverifier(found.draft, gamma_max=5)
    found.tuned = {"b": 2, "t0": 0.4, "rho": 1.0}
    arm = make_arm("ar", found, SamplingSettings())
    ids = [line["ids"] for line in run(arm, found) if line["kind"] == "request"]
    found.stop_ids = (2, ids[0][6])  # type: ignore[index]  # a list
    return found


def benchmarks() -> list[Benchmark]:
    rows = [[f"How many? {i} + {i * 3}" for i in range(3)], ["def add", "the lazy dog"]]
    return [
        Benchmark(name, [Prompt(f"{name}-{i}", name, text, {"answer": "#### 1"}) for i, text in enumerate(texts)], True)
        for name, texts in zip(("gsm8k", "other"), rows, strict=True)
    ]


def run(arm: Arm, models: Models) -> Sequence[dict[str, Any]]:
    return arm.run(runner.make_requests(benchmarks()[0].prompts, models, SETTINGS.max_new_tokens))


def arms(models: Models, names: Sequence[str] = ARMS) -> list[Arm]:
    return [make_arm(name, models, SamplingSettings()) for name in names]
