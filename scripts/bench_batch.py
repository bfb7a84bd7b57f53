"""Batches: tokens per second of AR, SD and HiSpec by rows decoded at once, and the memory of a stream of requests.

Speed: a fixed stream of prompts is decoded with 1, 2, 4, 8, 16 rows; each repeat measures all (arm, rows) cells in
random order, a cell's figure is the median of its repeats with their range. The crossover is the smallest number of
rows at which an arm is slower than AR. Memory: CNN/DM and GSM8K prompts in one stream through paged and contiguous
rows; at every step a row has less than one block that it does not use.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pacer.artifacts import write_json
from pacer.assemble import Models, make_decoder
from pacer.command.app import describe_run, load_settings, program, run_folder
from pacer.decoding.lane import Lane
from pacer.decoding.loop import Decoder
from pacer.decoding.request import Request
from pacer.evaluation.runner import load_benchmarks, make_requests
from pacer.methods.arms import method_settings
from pacer.settings import Settings
from pacer.stages.build import build
from pacer.work.progress import progress
from pacer.work.stopping import check_stop

ROWS = (1, 2, 4, 8, 16)
ARMS = ("ar", "sd gamma=2", "pacer", "layerskip gamma=2", "hispec", "hispec share=0.01")
TOKENS, BLOCK, MEMORY_ROWS = 32, 16, 8


def requests_of(settings: Settings, models: Models, sets: Sequence[str], count: int) -> list[Request]:
    """The first prompts of these sets, in turn."""
    settings.benchmark.sets = list(sets)
    benchmarks = load_benchmarks(settings.benchmark, settings.paths.data_dir)
    lists = [make_requests(benchmark.prompts, models, TOKENS) for benchmark in benchmarks]
    mixed = [request for group in zip(*lists, strict=False) for request in group]
    return mixed[:count]


def speed(decoder: Decoder, requests: Sequence[Request], rows: int) -> float:
    """Tokens per second of a stream, prefill inside."""
    start = time.perf_counter()
    results = decoder.generate(requests, slots=rows)
    return sum(len(result.ids) for result in results) / (time.perf_counter() - start)


def measure(models: Models, settings: Settings, path: Path) -> dict[str, list[float]]:
    """Speeds by cell ``arm / rows``; what an earlier call measured is kept, the time box ends after a whole repeat."""
    found: dict[str, list[float]] = json.loads(path.read_text()) if path.is_file() else {}
    requests = requests_of(settings, models, ["gsm8k"], max(ROWS))
    decoders = {arm: make_decoder(method_settings(arm), models, settings.sampling) for arm in ARMS}
    for decoder in decoders.values():
        decoder.generate(requests[:1])
    cells = [(arm, rows) for arm in ARMS for rows in ROWS]
    rng = np.random.default_rng([settings.benchmark.seed, *map(len, found.values())])
    deadline = time.monotonic() + 60 * (settings.benchmark.minutes or 0)
    while time.monotonic() < deadline:
        new = {}
        for index in progress(rng.permutation(len(cells)), "batches", "cell"):
            arm, rows = cells[index]
            new[f"{arm} / {rows}"] = speed(decoders[arm], requests, rows)
            check_stop()
        for cell, value in new.items():
            found.setdefault(cell, []).append(value)
        write_json(path, found)
    return found


def memory(models: Models, settings: Settings) -> dict[str, Any]:
    """Places set apart at every step of a stream of mixed prompts, in paged and in contiguous rows."""
    requests = requests_of(settings, models, ["cnn_dm", "gsm8k"], settings.benchmark.limit or 32)
    figures: dict[str, Any] = {"requests": len(requests), "rows": MEMORY_ROWS, "block": BLOCK}
    texts = {}
    for name, block in (("paged", BLOCK), ("contiguous", None)):
        lane = Lane(models.target, block=block)
        decoder = Decoder(models.target, reader=lane, shares_prefixes=False)
        steps: list[tuple[int, int]] = []

        def look(*_: Any, lane: Lane = lane, steps: list[tuple[int, int]] = steps) -> None:
            steps.append((lane.cache.allocated_tokens(), sum(lane.lengths)))

        results = decoder.generate(requests, on_commit=look, slots=MEMORY_ROWS)
        texts[name] = [result.ids for result in results]
        waste = max(allocated - held for allocated, held in steps)
        figures[name] = {
            "steps": len(steps), "most_allocated_tokens": max(allocated for allocated, _ in steps),
            "most_held_tokens": max(held for _, held in steps), "most_unused_tokens": waste,
            "within_a_block_per_row": all(a <= held + MEMORY_ROWS * BLOCK for a, held in steps),
            "pool_bytes": lane.cache.nbytes(), "workspace_bytes": lane.cache.workspace_bytes(),
        }  # fmt: skip
    figures["same_output"] = texts["paged"] == texts["contiguous"]
    return figures


def summary(found: dict[str, list[float]]) -> tuple[list[dict[str, Any]], dict[str, int | None]]:
    """A row per cell with its ratio to AR at the same rows (of the same repeat), and each arm's crossover."""
    table, crossover = [], {}
    for arm in ARMS:
        slower = None
        for rows in ROWS:
            own, ar = found[f"{arm} / {rows}"], found[f"ar / {rows}"]
            ratios = np.divide(own, ar)
            table.append(
                {
                    "arm": arm, "rows": rows, "tokens_per_second": float(np.median(own)), "repeats": len(own),
                    "over_ar": float(np.median(ratios)), "low": float(ratios.min()), "high": float(ratios.max()),
                }
            )  # fmt: skip
            slower = rows if slower is None and np.median(ratios) < 1 else slower
        crossover[arm] = slower
    return table, crossover


@program
def main(words: list[str]) -> int:
    settings = load_settings(words)
    models = build(settings, [method_settings(arm) for arm in ARMS])
    folder = run_folder(settings, "batch")
    describe_run(settings, folder)
    found = measure(models, settings, folder / "speeds.json")
    table, crossover = summary(found)
    for row in table:
        print(
            f"{row['arm']:20} {row['rows']:3} rows: {row['tokens_per_second']:7.1f} tok/s, {row['over_ar']:.3f} × AR "
            f"[{row['low']:.3f}, {row['high']:.3f}]"
        )
    for arm, rows in crossover.items():
        print(f"{arm}: {'at no size measured' if rows is None else f'from {rows} rows on'} slower than AR")
    room = memory(models, settings)
    ok = bool(room["paged"]["within_a_block_per_row"]) and (settings.model.dtype != "float32" or room["same_output"])
    figures = {"table": table, "crossover": crossover, "memory": room, "repeats": table[0]["repeats"], "ok": ok}
    path = write_json(folder / "bench_batch.json", figures)
    print(json.dumps({**figures, "written": str(path)}))
    return 0 if ok else 1


if __name__ == "__main__":
    raise SystemExit(main(None))
