"""Drafts tried on small budgets: which layers, where from, how large a head, which data and loss.

Each variant trains for MINUTES (default 4) with everything else as in ``experiment=draft/smollm2``, on the same unseen
texts judged; a variant is a stage, so the same command goes on where it was stopped. Prints agreement per task and the
share of a target pass that one draft pass costs, by counting weights read (c is measured by ``pacer.profile``).
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from pacer.app import load_settings
from pacer.artifacts import write_json
from pacer.quiet import quiet_libraries
from pacer.stages import draft_checkpoint
from pacer.stopping import Stopped, stop_signals

VARIANTS: dict[str, list[str]] = {
    "first 4 layers": [],
    "no copying": ["model.draft.copying=false"],
    "first 3 and the last": ["model.draft.layers=[0,1,2,29]"],
    "first 2": ["model.draft.layers=[0,1]"],
    "first 6": ["model.draft.layers=[0,1,2,3,4,5]"],
    "first 8": ["model.draft.layers=[0,1,2,3,4,5,6,7]"],
    "head of 4,096": ["model.draft.head_size=4096"],
    "head of 16,384": ["model.draft.head_size=16384"],
    "ready corpus alone": ["corpus.extend=[]"],
    "prompts not learned from": ["trainer.prompt_weight=0"],
    "half of the loss is KL": ["trainer.kl_weight=0.5"],
}


def row(name: str, words: list[str], budget: list[str]) -> dict[str, Any]:
    """Train one variant, or find it trained."""
    settings = load_settings([*budget, *words])
    folder = draft_checkpoint(settings)
    config = json.loads((folder / "config.json").read_text())
    figures = {key.removeprefix("val/agreement").strip("_") or "all": v for key, v in config["validation"].items()}
    return {"variant": name, "steps": config["steps"], **{k: round(v, 4) for k, v in figures.items()}}


def table(rows: list[dict[str, Any]]) -> str:
    columns = list(dict.fromkeys(key for found in rows for key in found))
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return "\n".join([*lines, *("| " + " | ".join(str(found.get(c, "–")) for c in columns) + " |" for found in rows)])


def main() -> int:
    words = sys.argv[1:] or ["+experiment=draft/smollm2"]
    budget = [*words, f"trainer.max_minutes={os.environ.get('MINUTES', '4')}"]
    rows = []
    with quiet_libraries(), stop_signals():
        for name, changes in VARIANTS.items():
            rows.append(row(name, changes, budget))
            print(table(rows[-1:]).splitlines()[-1], file=sys.stderr, flush=True)
        path = write_json(Path(load_settings(words).paths.runs) / "search_draft.json", {"rows": rows, "budget": budget})
    print(table(rows))
    print(json.dumps({"best": max(rows, key=lambda found: found["all"]), "written": str(path), "ok": True}))
    return 0


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except Stopped:
        raise SystemExit(75) from None
