"""A measurement that several processes share: each leaves a trace of its own part, the last one puts them together.

The merged trace has the requests in the order in which one process would have measured them, so what is made of it does
not tell how many there were.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from pacer.assemble import Models
from pacer.evaluation.arms import Arm
from pacer.evaluation.runner import Benchmark, batches_of, measure
from pacer.evaluation.traces import Line, load_trace
from pacer.files import write_atomic
from pacer.settings import BenchmarkSettings
from pacer.work.records import REPORTING, hold
from pacer.work.shards import Shard

Key = tuple[str, str, str]  # arm, benchmark, request


def measure_part(
    folder: Path,
    shard: Shard,
    benchmarks: Sequence[Benchmark],
    arms: Sequence[Arm],
    models: Models,
    settings: BenchmarkSettings,
    begin: Callable[[], object],
) -> dict[str, int]:
    """Measure what no trace of the run has of a part; how many requests the part has, and how many are measured.

    Args:
        begin: called before something is measured.
    """
    own, trace = part_of(benchmarks, shard), trace_of(folder, shard)
    with hold(folder, REPORTING):  # whoever merges removes traces
        elsewhere = [line for path in traces(folder) if path != trace for line in load_trace(path)]
    lines = measure(own, arms, models, settings, trace, elsewhere, begin)
    wanted = {(arm.name, b.name, prompt.id) for arm in arms for b in own for prompt in b.prompts}
    return {"requests": len(wanted), "measured": len(wanted & requests_of([*elsewhere, *lines]).keys())}


def trace_of(folder: Path, shard: Shard) -> Path:
    """The trace of one part."""
    return folder / f"trace{shard.name}.jsonl"


def part_of(benchmarks: Sequence[Benchmark], shard: Shard) -> list[Benchmark]:
    """The prompts of one part."""
    return [replace(b, prompts=[p for p in b.prompts if shard.owns(p.id)]) for b in benchmarks]


def traces(folder: Path) -> list[Path]:
    """All traces of a run."""
    return sorted(folder.glob("trace*.jsonl"))


def requests_of(lines: Iterable[Line]) -> dict[Key, list[Line]]:
    """The lines of finished requests; of one that was repeated, the last attempt."""
    found: dict[Key, list[Line]] = {}
    open_requests: dict[Key, list[Line]] = {}
    for line in lines:
        key = (line["arm"], line["benchmark"], line["request"])
        if line["kind"] == "round" and line["round"] == 0:
            open_requests[key] = []
        open_requests.setdefault(key, []).append(line)
        if line["kind"] == "request":
            found[key] = open_requests.pop(key)
    return found


def merge(
    folder: Path, benchmarks: Sequence[Benchmark], arms: Sequence[str], settings: BenchmarkSettings
) -> tuple[list[Line], int]:
    """The lines of all traces of a run as those of one, and how many requests are still to be measured.

    When none is, one trace remains. To be called by one process at a time.
    """
    paths, whole = traces(folder), trace_of(folder, Shard())
    found = requests_of(line for path in paths for line in load_trace(path))
    order = [
        (arm, name, prompt.id)
        for name, prompts in batches_of(benchmarks, settings)
        for arm in arms
        for prompt in prompts
    ]
    missing = sum(key not in found for key in order)
    if paths == [whole]:
        return load_trace(whole), missing
    lines = [line for key in order for line in found.get(key, [])]
    if not missing:
        write_atomic(whole, "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines))
        for path in paths:
            if path != whole:
                path.unlink()
    return lines, missing
