"""Measuring arms side by side: all arms of a prompt before the next prompt, resumable, time-boxed.

The trace is the only thing a run records; results are a function of it.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pacer.assemble import Models
from pacer.data.prompts import FILE_ENDINGS, Prompt, encode, is_tuning, load_prompts
from pacer.decoding.request import Request
from pacer.errors import ConfigError
from pacer.evaluation.arms import Arm, Line
from pacer.evaluation.metrics import group_requests, load_trace, measures, tally
from pacer.evaluation.tally import Tally
from pacer.files import write_atomic
from pacer.settings import BenchmarkSettings
from pacer.work.progress import progress
from pacer.work.stopping import check_stop

log = logging.getLogger(__name__)
WARMUP_TOKENS = 8
STREAM = 4  # prompts to a row


@dataclass(frozen=True)
class Benchmark:
    """A prompt set as it is measured. ``sample``: written for this project."""

    name: str
    prompts: list[Prompt]
    sample: bool


def load_benchmarks(settings: BenchmarkSettings, data_dir: str | None) -> list[Benchmark]:
    """The prompts of each set: the fixed tuning quarter, the rest (report), or all; then cut to the limit."""
    found = []
    for name in settings.sets:
        whole = load_prompts(name, split="test", data_dir=data_dir)
        wanted = {"all": (True, False), "tune": (True,), "report": (False,)}[settings.split]
        prompts = [prompt for prompt in whole.items if is_tuning(prompt.id) in wanted][: settings.limit]
        if not prompts:
            raise ConfigError(f"no prompts in {name}", value=settings.split, allowed="tune, report, all")
        label = name if name.endswith(FILE_ENDINGS) else whole.name  # another set may stand in for it
        found.append(Benchmark(label, prompts, whole.sample))
    return found


def batches_of(benchmarks: Sequence[Benchmark], settings: BenchmarkSettings) -> list[tuple[str, list[Prompt]]]:
    """Prompts that are measured together, of one benchmark each, in random order: a deadline cuts all alike.

    One by one, or, where several rows are decoded at once, a stream of several times as many.
    """
    size = settings.batch_size * (STREAM if settings.batch_size > 1 else 1)
    batches = [
        (benchmark.name, benchmark.prompts[i : i + size])
        for benchmark in benchmarks
        for i in range(0, len(benchmark.prompts), size)
    ]
    order = np.random.default_rng(settings.seed).permutation(len(batches))
    return [batches[i] for i in order]


def make_requests(prompts: Sequence[Prompt], models: Models, budget: int) -> list[Request]:
    stops = frozenset(models.stop_ids)
    return [Request(prompt.id, encode(prompt, models.tokenizer), budget, stops) for prompt in prompts]


def open_trace(path: Path) -> list[Line]:
    """What an earlier run of these settings recorded; half-written or unfinished requests at its end are cut off."""
    if not path.exists():
        return []
    lines = load_trace(path)
    while lines and lines[-1]["kind"] != "request":
        lines.pop()
    write_atomic(path, "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines))
    return lines


def measure(
    benchmarks: Sequence[Benchmark],
    arms: Sequence[Arm],
    models: Models,
    settings: BenchmarkSettings,
    trace: Path,
    elsewhere: Sequence[Line] = (),
    begin: Callable[[], object] = lambda: None,
) -> list[Line]:
    """Run what is missing and return all lines; stops at the deadline, or after the current prompt on a signal.

    Args:
        elsewhere: lines of other traces, whose requests are not measured again.
        begin: called before something is measured.
    """
    lines = open_trace(trace)
    ended = [line for line in [*lines, *elsewhere] if line["kind"] == "request"]
    done = {(line["arm"], line["benchmark"], line["request"]) for line in ended}
    batches = batches_of(benchmarks, settings)
    todo = [
        (name, prompts, [a for a in arms if any((a.name, name, p.id) not in done for p in prompts)])
        for name, prompts in batches
    ]
    todo = [entry for entry in todo if entry[2]]
    if not todo:
        return lines
    begin()
    deadline = None if settings.minutes is None else time.monotonic() + 60 * settings.minutes
    _warm_up(todo[0][1], arms, models, settings)
    rng = np.random.default_rng([settings.seed, len(done)])
    sums = {arm.name: Tally() for arm in arms}
    _count(sums, lines)
    what = "measuring" if settings.minutes is None else f"measuring, at most {settings.minutes:g} min"
    with progress(len(batches), what, "batch", initial=len(batches) - len(todo)) as bar, trace.open("a") as file:
        for name, prompts, missing in todo:
            if deadline is not None and time.monotonic() > deadline:
                log.info("the time box of %s minutes ends here; the same command goes on", settings.minutes)
                break
            for index in rng.permutation(len(missing)):
                arm = missing[index]
                new = _run(arm, name, make_requests(prompts, models, settings.max_new_tokens))
                file.writelines(json.dumps(line, allow_nan=False) + "\n" for line in new)
                lines += new
                _count(sums, new)
            file.flush()
            os.fsync(file.fileno())
            bar.set_postfix_str(so_far(sums), refresh=False)
            bar.update()
            check_stop()
    return lines


def _run(arm: Arm, benchmark: str, requests: Sequence[Request]) -> list[Line]:
    return [{"arm": arm.name, "benchmark": benchmark, **line} for line in arm.run(requests)]


def _warm_up(prompts: Sequence[Prompt], arms: Sequence[Arm], models: Models, settings: BenchmarkSettings) -> None:
    """First calls pay for compilation, memory and page faults; they are outside the measurement."""
    requests = make_requests(prompts, models, min(WARMUP_TOKENS, settings.max_new_tokens))
    for _ in range(settings.warmup):
        for arm in arms:
            arm.run(requests)


def _count(sums: Mapping[str, Tally], lines: Sequence[Line]) -> None:
    """Add finished requests to their arms."""
    for (arm, _), requests in group_requests(lines).items():
        if arm in sums:
            tally((request for request in requests.values() if request.finished), sums[arm])


def so_far(sums: Mapping[str, Tally]) -> str:
    """Speed, τ and acceptance of each arm, behind a progress bar; of the first four alone: a line is short."""
    said = []
    for arm, figures in [(arm, measures(own)) for arm, own in sums.items() if own.seconds][:4]:
        speed, tau, rate = (figures[key] for key in ("tokens_per_second", "tokens_per_verify", "acceptance_rate"))
        drafts = "" if rate is None else f", τ {tau:.2f}, {100 * rate:.0f} % accepted"
        said.append(f"{arm}: {speed:.1f} tok/s{drafts}")
    return "; ".join(said)


def score_all(
    lines: Sequence[Line], benchmarks: Sequence[Benchmark], sandbox: str
) -> tuple[dict[tuple[str, str], dict[str, Any]], list[str]]:
    """Task scores per (arm, benchmark). Equal texts are scored once: a lossless arm cannot change a score."""
    from pacer.evaluation.scoring import score  # pulls in the evaluate library

    texts: dict[tuple[str, str], dict[str, str]] = {}
    for line in lines:
        if line["kind"] == "request":
            texts.setdefault((str(line["arm"]), str(line["benchmark"])), {})[str(line["request"])] = str(line["text"])
    found: dict[tuple[str, str], dict[str, Any]] = {}
    known: dict[tuple[str, tuple[tuple[str, str], ...]], dict[str, Any]] = {}
    shared = 0
    for benchmark in benchmarks:
        items = {prompt.id: dict(prompt.item) for prompt in benchmark.prompts}
        for (arm, name), answers in texts.items():
            if name != benchmark.name:
                continue
            key = (name, tuple(sorted(answers.items())))
            shared += key in known
            if key not in known:
                ids = sorted(answers)
                known[key] = score(name, [answers[i] for i in ids], [items[i] for i in ids], sandbox)
            if known[key]:
                found[arm, name] = known[key]
    pairs = shared + len(known)
    return found, [f"{shared} of {pairs} (arm, benchmark) pairs wrote the same texts: scored once."] if shared else []
