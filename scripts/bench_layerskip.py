"""LayerSkip's recipe: what tuning the model itself does to its early exits, to its task scores, and to its speed.

The original's texts are scored first; then the tuned model decodes the same prompts, plainly and with its own exits.
What is exact there is exact to the tuned model, so its scores stand beside the original's.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pacer.artifacts import write_atomic, write_json
from pacer.command.app import load_settings, program
from pacer.evaluate import measured
from pacer.evaluation.traces import load_trace
from pacer.evaluation.tuned import write_original
from pacer.models.exits import RECORD
from pacer.reporting.tables import interval, markdown
from pacer.stages.exits import layerskip_checkpoint

WINDOWS = (1, 2, 4)


def arms_of(exits: Sequence[int]) -> list[str]:
    return ["ar", *(f"layerskip exits=[{layer}] gamma={gamma}" for layer in exits for gamma in WINDOWS)]


def texts_of(folder: Path) -> dict[tuple[str, str], list[int]]:
    """Plain decoding's ids by benchmark and prompt."""
    lines = load_trace(folder / "trace.jsonl")
    return {(o["benchmark"], o["request"]): o["ids"] for o in lines if o["kind"] == "request" and o["arm"] == "ar"}


def score_rows(before: dict[str, Any], after: dict[str, Any], same: dict[str, str]) -> list[list[str]]:
    """Benchmark, metric, score of the original and of the tuned model, texts that are the same."""
    own = {row["benchmark"]: row.get("score") or {} for row in after["rows"] if row["arm"] == "ar"}
    return [
        [row["benchmark"], key, f"{value:.3f}", f"{own[row['benchmark']][key]:.3f}", same[row["benchmark"]]]
        for row in before["rows"]
        for key, value in (row.get("score") or {}).items()
    ]


def exit_rows(record: dict[str, Any]) -> list[list[str]]:
    """Layers, agreement with the model's own choice before and after, mean accepted run before and after."""
    old, new = record["validation_before"], record["validation"]
    keys = ("agree", "length")
    return [[str(e), *(f"{of[f'val/{key}_{e}']:.3f}" for key in keys for of in (old, new))] for e in record["exits"]]


@program
def main(words: list[str]) -> int:
    settings = load_settings(words)
    model = layerskip_checkpoint(settings)
    record = json.loads((model / RECORD).read_text())
    first, before = measured(load_settings([*words, "benchmark.arms=[ar]", f"name={settings.name}-before"]))
    write_original(model, before)
    listed = ",".join(f'"{arm}"' for arm in arms_of(record["exits"]))
    target = [f"model.target.id={model.resolve()}", "model.target.file=null", "model.target.sha256=null"]
    folder, after = measured(load_settings([*words, *target, f"benchmark.arms=[{listed}]"]))
    texts, own = texts_of(first), texts_of(folder)
    names = list(dict.fromkeys(name for name, _ in own))
    same = {n: f"{sum(texts.get(k) == v for k, v in own.items() if k[0] == n)}/{sum(k[0] == n for k in own)}"
            for n in names}  # fmt: skip
    tables = {
        "scores": [["benchmark", "score", "original", "tuned", "same texts"], ["---", "---", "---:", "---:", "---:"],
                   *score_rows(before, after, same)],
        "exits": [["layers", "agreement before", "after", "accepted run before", "after"], ["---:"] * 5,
                  *exit_rows(record)],
        "speed": [["tuned model", "× its own AR"], ["---", "---:"],
                  *([row["arm"], interval(row)] for row in after["overall"])],
    }  # fmt: skip
    text = "\n\n".join(markdown(rows) for rows in tables.values()) + "\n"
    write_atomic(folder / "layerskip.md", text)
    print(f"\n{text}")
    agreement = {e: [record[when][f"val/agree_{e}"] for when in ("validation_before", "validation")]
                 for e in record["exits"]}  # fmt: skip
    gained = all(new > old for old, new in agreement.values())
    print(f"{'reached' if gained else 'NOT reached':12} every exit agrees with its model more often than before")
    found = {"steps": record["steps"], "agreement": agreement, "same_texts": same,
             "over_own_ar": {row["arm"]: row["ratio_to_ar"] for row in after["overall"]},
             "original_chosen": record["validation"]["val/agree_text"], "ok": gained}  # fmt: skip
    path = write_json(folder / "bench_layerskip.json", {**found, "tables": tables})
    print(json.dumps({**found, "written": str(path)}))
    return 0 if gained else 1


if __name__ == "__main__":
    raise SystemExit(main(None))
