"""Finished runs, as the papers' tables and the report read them: their files, what made them, on which machine."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from pacer.errors import ConfigError
from pacer.provenance import command_text

log = logging.getLogger(__name__)
MISSING = "–"
# What verbs and scripts leave of a finished run, by file name.
FILES = (
    "results", "bench_main", "bench_pacer", "bench_ablation", "bench_hispec", "bench_batch", "bench_exits", "sweep",
    "checked", "check_replay", "ablation", "profile", "tuned",
)  # fmt: skip


@dataclass(frozen=True)
class Run:
    """A run's folder and what lies in it: JSON files by name, ``made`` (provenance) and ``settings`` as plain data."""

    folder: Path
    files: Mapping[str, Any]
    made: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def rows(self) -> Sequence[Mapping[str, Any]]:
        """One row per arm and benchmark; empty where the run decoded nothing."""
        found = self.files.get("results", {}).get("rows", [])
        return [row for row in found if "tokens_per_second" in row]

    @property
    def sample(self) -> bool:
        """Measured on items written for this project."""
        return any(row.get("sample") for row in self.rows)

    @property
    def prompts(self) -> int:
        """Over all benchmarks."""
        return sum({row["benchmark"]: row["prompts"] for row in self.rows}.values())

    @property
    def date(self) -> str:
        return str(self.made.get("date", ""))[:10]

    @property
    def commit(self) -> str:
        return str(self.made.get("commit") or "")[:8]

    @property
    def command(self) -> str:
        return command_text(self.made["command"]) if self.made.get("command") else MISSING

    @property
    def machine(self) -> str:
        """Processor, or what accelerates it."""
        machine = self.made.get("machine")
        if not machine:
            return "not recorded"
        devices = sorted(set(machine.get("devices", [])))
        return ", ".join([*devices, str(machine["processor"]), f"{machine['cores']} cores"])

    @property
    def pair(self) -> str:
        """The models, by the name of their configuration or, for local ones, of the target's folder."""
        model = self.settings.get("model", {})
        name = str(model.get("name", MISSING))
        return Path(str(model["target"]["id"])).name if name == "local" else name

    @property
    def models(self) -> str:
        """The pair and its number type."""
        return f"{self.pair} {self.settings.get('model', {}).get('dtype', '')}".strip()

    def arm(self, role: str) -> str | None:
        """The arm that plays a role: the one a bench tuned for it, else the one of that name or of its first word.

        None: there is none, or there are several, of which only hindsight could choose one.
        """
        for bench in ("bench_pacer", "bench_hispec"):
            if found := self.files.get(bench, {}).get("arms", {}).get(role):
                return str(found)
        arms = list(dict.fromkeys(str(row["arm"]) for row in self.rows))
        alike = [arm for arm in arms if arm.split()[0] == role]
        return role if role in arms else alike[0] if len(alike) == 1 else None


def read_run(folder: Path) -> Run:
    """What lies in a run's folder.

    Raises:
        ConfigError: there is no such folder, or a file in it is not the JSON it should be.
    """
    if not folder.is_dir():
        raise ConfigError("no such run", value=str(folder), allowed="a folder of a finished run, as verbs print it")
    read = {path.stem: _json(path) for path in sorted(folder.glob("*.json"))}
    settings: Any = {}
    if (folder / "settings.yaml").is_file():
        settings = OmegaConf.to_container(OmegaConf.load(folder / "settings.yaml"))
    files = {name: value for name, value in read.items() if name in FILES and isinstance(value, dict)}
    return Run(folder, files, read.get("provenance", {}), settings)


def finished(runs: Path, kept: Iterable[Path]) -> list[Run]:
    """Every finished run: ``runs/<verb>/<name>/<hash>``, and the folders in ``kept``; one that is damaged is said and
    left out."""
    return [run for folder in _folders(runs, kept) if (run := _whole(folder)) is not None and run.files]


def _folders(runs: Path, kept: Iterable[Path]) -> Iterator[Path]:
    places = [(runs, "*/*/*"), *((root, "*") for root in kept)]
    for root, pattern in places:
        yield from sorted(
            path for path in root.glob(pattern) if any((path / f"{name}.json").is_file() for name in FILES)
        )


def _whole(folder: Path) -> Run | None:
    try:
        return read_run(folder)
    except ConfigError as error:
        log.warning("%s", error)
        return None


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"not a JSON file ({error})", value=str(path), remedy="delete it, or run again") from error
