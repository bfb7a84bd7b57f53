"""How far work is: stages, runs and sweeps in a folder, from manifests, records and locks (`records.py`)."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from pacer.artifacts import MANIFEST
from pacer.errors import PacerError
from pacer.files import ArtifactError
from pacer.work.records import LOCK, is_held, records

STATES = ("failed", "missing", "stopped", "running", "done")
GOES_ON = ("failed", "missing", "stopped")  # what a command finishes
_SWEEP = "multirun.yaml"
_PART = re.compile(r"-(\d+)-of-(\d+)")


class Standing(NamedTuple):
    """Of one piece of work: a stage, a run or one of its parts, a job of a sweep."""

    state: str
    where: str
    detail: str = ""
    command: str | None = None  # that finishes it


def survey(root: Path) -> list[Standing]:
    """All work in a folder, unfinished work first.

    Raises:
        PacerError: there is no such folder.
    """
    if not root.is_dir():
        raise PacerError("no such folder", value=str(root), remedy="name a folder of runs, such as runs")
    found = [standing for folder, files in _folders(root) for standing in _of(folder, files)]
    return sorted(found, key=lambda standing: (STATES.index(standing.state), standing.where))


def _folders(root: Path) -> Iterator[tuple[Path, set[str]]]:
    """Folders that may hold work, with the names of their files; what a stage or a sweep has inside is its own."""
    for name, folders, files in os.walk(root):
        folders.sort()
        if MANIFEST in files or _SWEEP in files:
            folders.clear()
        yield Path(name), set(files)


def _of(folder: Path, files: set[str]) -> list[Standing]:
    if _SWEEP in files:
        return _sweep(folder)
    if MANIFEST in files:
        return [_finished(folder)]
    found = records(folder)
    held = {name.removeprefix(LOCK) for name in files if name.startswith(LOCK) and is_held(folder / name)}
    if "pieces" in next(iter(found.values()), {}):
        return [_pieces(folder, found, files, held)]
    if not found:
        return [Standing("done", str(folder))] if "results.json" in files else []
    return _parts(folder, found, files, held)


def _finished(folder: Path) -> Standing:
    try:
        manifest = json.loads((folder / MANIFEST).read_text("utf-8"))
        figures = {name: value for name, value in manifest["extra"].items() if isinstance(value, int | float)}
    except (ValueError, KeyError, AttributeError) as error:
        remedy = f"{MANIFEST} cannot be read ({type(error).__name__}): delete the folder and run again"
        return Standing("failed", str(folder), remedy)
    return Standing("done", str(folder), ", ".join(f"{value:,} {name}" for name, value in figures.items()))


def _pieces(folder: Path, found: dict[str, dict[str, Any]], files: set[str], held: set[str]) -> Standing:
    """A stage that falls into pieces, whose makers each hold one."""
    record = found[""]
    state, detail = _state(record, bool(held))
    there = sum(name.startswith("shard-") for name in files)
    detail = f"{there} of {record['pieces']} pieces; {detail}"
    return Standing(state, str(folder), detail, _goes_on(state, record))


def _parts(folder: Path, found: dict[str, dict[str, Any]], files: set[str], held: set[str]) -> list[Standing]:
    """A training, or a run and its parts: a part that nobody began is missing, unless the traces are merged."""
    merged = "results.json" in files and not any(name.startswith("trace-") for name in files)
    standings = []
    for part, record in found.items():
        state, detail = _state(record, part in held)
        if state == "done" and record.get("measured", 0) < record.get("requests", 0):
            state, detail = "stopped", f"{record['measured']} of {record['requests']} requests"
        if not (merged and _PART.fullmatch(part) and state != "running"):
            standings.append(Standing(state, str(folder) + part, detail, _goes_on(state, record)))
    if merged:
        return standings or [Standing("done", str(folder), "merged of all parts")]
    counts = {int(match[2]) for part in found if (match := _PART.fullmatch(part))}
    for count in counts:
        begun = {int(match[1]) for part in found if (match := _PART.fullmatch(part)) and int(match[2]) == count}
        words = next(iter(found.values()))["command"].split(" ")
        command = " ".join(word for word in words if not word.startswith("shard."))
        standings += [
            Standing("missing", f"{folder}-{i}-of-{count}", "", f"{command} shard.index={i} shard.count={count}")
            for i in sorted(set(range(count)) - begun)
        ]
    return standings


def _sweep(folder: Path) -> list[Standing]:
    """Jobs of a sweep, by their numbers and words."""
    verb, jobs = _jobs(folder)
    queued = (folder / ".submitit").is_dir()
    standings = []
    for number, words in enumerate(jobs):
        where = f"{folder} #{number}: {' '.join(words)}"
        record = records(folder / str(number)).get("")
        if record is None:
            command = shlex.join(["python", "-m", f"pacer.{verb}", *words])
            detail = "not begun" + (", perhaps still in Slurm's queue (squeue --me)" if queued else "")
            standings.append(Standing("missing", where, detail, command))
        else:
            state, detail = _state(record, is_held(folder / str(number) / LOCK))
            standings.append(Standing(state, where, detail, _goes_on(state, record)))
    return standings


def _jobs(folder: Path) -> tuple[str, list[list[str]]]:
    """The verb of a sweep and the words of its jobs, as Hydra's sweeper makes them."""
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    try:
        config = OmegaConf.load(folder / _SWEEP)
        verb, words = str(config.hydra.job.name), list(config.hydra.overrides.task)
        jobs = BasicSweeper.split_arguments(OverridesParser.create().parse_overrides(words), None)[0]
    except (OSError, ValueError, AttributeError, YAMLError, HydraException, OmegaConfBaseException) as error:
        raise ArtifactError(f"{folder / _SWEEP} cannot be read ({type(error).__name__})") from error
    return verb, [list(job) for job in jobs]


def _state(record: dict[str, Any], held: bool) -> tuple[str, str]:
    """A record's state and what there is to say; a worker that left it running and let go of its lock was killed."""
    job = f"Slurm job {record['job']}" if record["job"] else f"process {record['pid']}"
    job = f"{job} on {record['host']}"
    if held:
        return "running", f"{job}, since {record['since']}"
    if record["state"] == "running":
        return "stopped", f"killed ({job})"
    return record["state"], record.get("error", f"at {record['until']}")


def _goes_on(state: str, record: dict[str, Any]) -> str | None:
    return record["command"] if state in GOES_ON else None
