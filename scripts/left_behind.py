"""What runs leave on disk, for `kill_campaign`: is all of it whole, is nothing there twice, and what must be equal?"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file

from pacer.evaluation.merging import requests_of
from pacer.evaluation.traces import load_trace
from pacer.files import PART, is_part, sha256
from pacer.work.records import is_own

TIMES = ("second", "latency", "ratio", "share", "time")  # parts of names of figures that a clock decides
State = dict[Path, tuple[int, int]]  # of files: time of change, size


def state(root: Path) -> State:
    """All files; one that goes while we look is left out."""
    found: State = {}
    for folder, _, names in os.walk(root):
        for name in names:
            path = Path(folder, name)
            try:
                status = path.stat()
            except FileNotFoundError:
                continue
            found[path] = (status.st_mtime_ns, status.st_size)
    return found


def finished(runs: Path) -> State:
    """Files that nobody may write again: pieces, and outputs of stages that have their manifest."""
    stages = [folder for folder in runs.glob("stages/*/*") if folder.is_dir()]
    done = {path for folder in stages if (folder / "manifest.json").exists() for path in folder.rglob("*")}
    done |= {path for folder in stages for path in folder.glob("shard-*")}
    return {path: was for path, was in state(runs).items() if path in done and not is_own(path)}


def requests(runs: Path) -> dict[Any, Any]:
    """The measured requests with all their figures."""
    return requests_of(line for path in runs.glob("evaluate/*/*/trace.jsonl") for line in load_trace(path))


def unreadable(root: Path) -> list[str]:
    """Files that are not whole, by their own format and by the manifests; those not yet renamed do not count."""
    found = []
    for path in sorted(path for path in root.rglob("*") if path.is_file()):
        if is_part(path.relative_to(root)):
            continue
        try:
            _read(path)
        except Exception as error:  # each format has errors of its own
            found.append(f"{path}: {type(error).__name__}: {error}")
    return found


def _read(path: Path) -> None:
    if path.name == "manifest.json":
        for name, entry in json.loads(path.read_text())["files"].items():
            if PART in name or sha256(path.parent / name) != entry["sha256"]:
                raise ValueError(f"{name} is not what it was")
    elif path.name.startswith("trace"):
        load_trace(path)  # a line that was cut is what it is made for
    elif path.suffix == ".jsonl":
        for line in path.read_text().splitlines():
            json.loads(line)
    elif path.suffix == ".json":
        json.loads(path.read_text())
    elif path.suffix == ".yaml":
        OmegaConf.load(path)
    elif path.suffix == ".safetensors":
        load_file(path)
    elif path.suffix == ".ckpt":
        torch.load(path, map_location="cpu", weights_only=True)


def doubled(runs: Path) -> list[str]:
    """Texts that are in a stage twice; requests and rounds that are in a trace twice."""
    found = []
    for stage in runs.glob("stages/*/*"):
        texts = [json.loads(x) for path in stage.glob("shard-*.jsonl") for x in path.read_text().splitlines()]
        found += _twice(stage, Counter(text["id"] for text in texts).items())
    for trace in runs.glob("evaluate/*/*/trace.jsonl"):
        names = ("kind", "arm", "benchmark", "request", "round")
        found += _twice(trace, Counter(tuple(line.get(n) for n in names) for line in load_trace(trace)).items())
    return found


def _twice(where: Path, counts: Iterable[tuple[object, int]]) -> list[str]:
    return [f"{where}: {what} is there {count} times" for what, count in counts if count > 1]


def outputs(runs: Path) -> dict[str, Any]:
    """What must not depend on kills, by name: pieces, parameters and their records, tokens of the trace, the table."""
    found: dict[str, Any] = {}
    for path in [*runs.glob("stages/*/*/shard-*"), *runs.glob("stages/*/*/*/model.safetensors")]:
        found[str(path.relative_to(runs))] = sha256(path)
    for path in runs.glob("stages/*/*/*/config.json"):
        found[str(path.relative_to(runs))] = {**json.loads(path.read_text()), "command": None}
    for key, lines in requests(runs).items():
        tokens = ("ids", "finish", "drafted", "accepted", "emitted")
        found[" ".join(("trace", *key))] = [[line.get(name) for name in tokens] for line in lines]
    for path in runs.glob("evaluate/*/*/results.json"):
        for row in json.loads(path.read_text())["rows"]:
            found[f"table {row['arm']} {row['benchmark']}"] = _without_times(row)
    return found


def _without_times(figures: dict[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in figures.items() if not any(part in name for part in TIMES)}
    return {name: _without_times(value) if isinstance(value, dict) else value for name, value in kept.items()}
