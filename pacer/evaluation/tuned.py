"""A target that LayerSkip's recipe has tuned is another model than the original: what a table of it must say."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pacer.files import write_json
from pacer.models.exits import RECORD

SCORES = "scores.json"  # beside the record, and not of the stage that made the model


def write_original(model: Path, results: Mapping[str, Any]) -> Path:
    """Keep the original's task scores, of a run's results, beside the tuned model."""
    rows = [row for row in results["rows"] if row["arm"] == "ar" and row.get("score")]
    kept = {row["benchmark"]: {"prompts": row["prompts"], "score": row["score"]} for row in rows}
    return write_json(model / SCORES, kept)


def notes_on(target: str) -> list[str]:
    """What is to be said below a table, if the target is the folder of a tuned model."""
    model = Path(target)
    if not (model / RECORD).is_file():
        return []
    record = json.loads((model / RECORD).read_text())
    same = record["validation"]["val/agree_text"]
    said = (
        f"The target was tuned to exit early (LayerSkip's recipe, {record['steps']} steps). Exact means exact to it: "
        f"on unseen texts its choice is the original's at {same:.3f} of all places."
    )
    return [said, f"Task scores before the tuning: {_scores(model)}."]


def _scores(model: Path) -> str:
    if not (model / SCORES).is_file():
        return "not measured; scripts/bench_layerskip.sh measures both"
    parts = [
        f"{name} {', '.join(f'{key} {value:.3f}' for key, value in kept['score'].items())} ({kept['prompts']} prompts)"
        for name, kept in json.loads((model / SCORES).read_text()).items()
    ]
    return "; ".join(parts) or "no set of this run is scored"
