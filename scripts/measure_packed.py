"""What packed weights save on this CPU: passes on plain and on packed weights, one after the other.

Each repeat times both kinds of every pass, so drift of the machine meets both alike. The last columns are a pass in
passes over one token on weights of the same kind: what speculation pays to verify that many.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from pacer.artifacts import write_atomic, write_json
from pacer.command.app import describe_run, load_settings, program, run_folder
from pacer.evaluation.profiler import Parts, draft_pass, target_pass, timed
from pacer.methods.arms import method_settings
from pacer.reporting.tables import markdown
from pacer.settings import Settings
from pacer.stages.build import build
from pacer.work.progress import progress
from pacer.work.stopping import check_stop

KINDS = ("plain", "packed")
WIDTHS = (1, 2, 3, 4, 5, 6, 8, 12, 17)  # tokens of a target pass
IN_A_ROW = 2


def passes(settings: Settings, context: int) -> dict[str, Parts]:
    """The passes of a pair by kind of weights."""
    found: dict[str, Parts] = {}
    for kind in KINDS:
        model = replace(settings.model, prepack=kind == "packed")
        models = build(replace(settings, model=model), [method_settings("sd")])
        assert models.draft is not None
        found[kind] = {("target", n): target_pass(models.target, n, 1, context) for n in WIDTHS}
        found[kind]["draft", 1] = draft_pass(models.draft, 1, 1, context)
    return found


@torch.inference_mode()
def measured(parts: dict[str, Parts], repeats: int) -> list[dict[str, Any]]:
    """Of each pass: median milliseconds of both kinds, and the median ratio with the quartiles of its repeats."""
    cpu, times = torch.device("cpu"), {(kind, key): [] for kind in KINDS for key in parts[kind]}
    for _ in progress(range(repeats), "passes", "repeat"):
        for key in parts["plain"]:
            for kind in KINDS:
                times[kind, key].append(timed(parts[kind][key], cpu, IN_A_ROW))
        check_stop()
    rows = []
    for part, n in parts["plain"]:
        plain, packed = (np.array(times[kind, (part, n)]) for kind in KINDS)
        low, ratio, high = np.percentile(plain / packed, [25, 50, 75]).tolist()
        row = {"part": part, "n": n, "plain_ms": float(np.median(plain)), "packed_ms": float(np.median(packed))}
        rows.append({**row, "ratio": ratio, "low": low, "high": high})
    one = {kind: rows[0][f"{kind}_ms"] for kind in KINDS}  # the target's pass over one token
    for row in rows:
        row |= {f"{kind}_passes": row[f"{kind}_ms"] / one[kind] for kind in KINDS}
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown."""
    head = ["pass", "tokens", "plain (ms)", "packed (ms)", "plain / packed (× [quartiles])", "plain (passes)",
            "packed (passes)"]  # fmt: skip
    body = [
        [r["part"], str(r["n"]), f"{r['plain_ms']:.1f}", f"{r['packed_ms']:.1f}",
         f"{r['ratio']:.2f} [{r['low']:.2f}, {r['high']:.2f}]", f"{r['plain_passes']:.2f}", f"{r['packed_passes']:.2f}"]
        for r in rows
    ]  # fmt: skip
    return markdown([head, ["---", *["---:"] * (len(head) - 1)], *body]) + "\n"


@program
def main(words: list[str]) -> int:
    settings = load_settings(words)
    folder = run_folder(settings, "measure_packed")
    describe_run(settings, folder)
    rows = measured(passes(settings, settings.profile.contexts[0]), settings.profile.repeats)
    write_atomic(folder / "packed.md", table(rows))
    path = write_json(folder / "packed.json", {"dtype": settings.model.dtype, "rows": rows})
    print(table(rows), end="")
    print(json.dumps({"rows": rows, "written": str(path), "ok": True}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(None))
