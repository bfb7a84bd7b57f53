"""What tests of stages share: a tiny target with prompts, settings of one training step, a kill, what was written."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from pacer.methods.arms import method_settings
from pacer.settings import (
    CorpusSettings,
    DraftSettings,
    LabelSettings,
    LoggerSettings,
    ModelSettings,
    PathSettings,
    PreverifierSettings,
    Settings,
    SourceSettings,
    TrainerSettings,
)
from tests.folders import tiny_folder

PROMPTS = 18
ARMS = ("ar", "sd gamma=3", "sd_full gamma=2", "pacer", "pacer b=1 t0=0.3")
METHODS = [method_settings(arm) for arm in ARMS]
GAMMA = 4


def make_home(home: Path) -> Path:
    """A folder with a tiny target and prompts."""
    tiny_folder(home / "target")
    (home / "data" / "gsm8k").mkdir(parents=True)
    rows = [{"question": f"How many? {i} + {3 * i}", "answer": f"#### {4 * i}"} for i in range(PROMPTS)]
    (home / "data" / "gsm8k" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return home


def make(home: Path, runs: Path | None = None, **changes: Any) -> Settings:
    """Settings for one training step of each part; ``changes`` replace whole sections."""
    draft = DraftSettings(kind="layers", source=None, layers=[0, 1], head_size=150)
    parts = {"draft": 0.4, "preverifier": 0.4, "tuning": 0.2}
    found = Settings(
        model=ModelSettings("tiny", SourceSettings(str(home / "target")), draft, dtype="float32", device="cpu"),
        preverifier=PreverifierSettings(gamma_max=GAMMA, width=16),
        corpus=CorpusSettings(["gsm8k/train"], max_new_tokens=9, batch_size=4, shard_size=5, parts=parts),
        labels=LabelSettings(gamma=GAMMA, starts_per_text=3),
        trainer=TrainerSettings(max_steps=1, precision="fp32", patience=0),
        logger=LoggerSettings(csv=False),
        paths=PathSettings(str(runs or home / "runs"), str(home / "cache"), str(home / "data")),
        name="test",
    )
    return replace(found, **changes)


def files(folder: Path) -> dict[Path, tuple[int, int]]:
    """All files with their times of change and sizes."""
    return {p: (p.stat().st_mtime_ns, p.stat().st_size) for p in folder.rglob("*") if p.is_file()}


def killed_after(calls: int, function: Callable[..., Any], seen: list[Any], end: BaseException) -> Callable[..., Any]:
    """The function, ending everything at a later call; notes the last argument of each."""

    def wrapped(*arguments: Any) -> Any:
        if len(seen) == calls:
            raise end
        seen.append(arguments[-1])
        return function(*arguments)

    return wrapped
