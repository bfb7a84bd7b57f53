"""Rows of a paper's table: what is published, what was measured, and the command where nothing was.

A *pick* reads one number from a run, None where the run has none. Of several runs of one pair of models that have it,
real data goes before the project's samples, more prompts before fewer, later before earlier; the row says which it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pacer.reporting.gather import Run
from pacer.reporting.paper.published import Published
from pacer.resources import resource

NO_METHOD = "no method"  # how what stands in place of a command begins


@dataclass(frozen=True)
class Found:
    """A number in a run with its interval; ``what``: the arm or setting that it is of, ``texts``: on what."""

    value: float
    low: float | None = None
    high: float | None = None
    what: str = ""
    texts: str = ""


@dataclass(frozen=True)
class Measured:
    found: Found
    run: Run

    @property
    def setting(self) -> str:
        """Arm, models, number type, on what."""
        heat = self.run.settings.get("sampling", {}).get("temperature", 0)
        parts = [self.found.what, self.run.models, self.found.texts, f"temperature {heat:g}" if heat else ""]
        return ", ".join(part for part in parts if part)


@dataclass(frozen=True)
class Row:
    """``command`` makes what is missing in ``measured``; None: nothing would."""

    what: str
    unit: str
    published: tuple[Published | None, ...]
    measured: Measured | None
    modelled: Measured | None
    command: str | None


@dataclass(frozen=True)
class Table:
    """``columns``: names of the published columns, as many as each row has."""

    name: str
    title: str
    columns: tuple[str, ...]
    rows: Sequence[Row]
    notes: Sequence[str] = ()


Pick = Callable[[Run], Found | None]


def best(runs: Iterable[Run], pick: Pick | None) -> dict[str, Measured]:
    """By pair of models, the run to show."""
    chosen: dict[str, Measured] = {}
    found = [Measured(value, run) for run in runs if pick and (value := pick(run)) is not None]
    for one in sorted(found, key=lambda one: (not one.run.sample, one.run.prompts, one.run.date)):
        chosen[one.run.pair] = one
    return chosen


def side_by_side(
    runs: Sequence[Run],
    what: str,
    unit: str,
    published: Published | tuple[Published | None, ...] | None,
    measured: Pick | None,
    command: str | None,
    modelled: Pick | None = None,
) -> list[Row]:
    """A row per pair of models that has the figure; where none has it, one row with the command.

    ``measured`` None: the figure is modelled by its nature.
    """
    figures = published if isinstance(published, tuple) else (published,)
    decoded, said = best(runs, measured), best(runs, modelled)
    pairs = sorted({*decoded, *said})
    if not pairs:
        return [Row(what, unit, figures, None, None, command)]
    command = None if measured is None else command
    return [Row(what, unit, figures, decoded.get(pair), said.get(pair), command) for pair in pairs]


def of_arm(role: str, benchmark: str | None, key: str = "ratio_to_ar", scale: float = 1) -> Pick:
    """A figure of the arm that plays a role, on a benchmark; None: the geometric mean over all (of the ratio alone).

    Args:
        role: as in :meth:`Run.arm`. key: of the row, ``share.NAME`` for a part of the time.
    """

    def pick(run: Run) -> Found | None:
        arm = run.arm(role)
        if benchmark is None:
            return _overall(run, arm)
        rows = [row for row in run.rows if row["arm"] == arm and _is(row, benchmark)]
        return _cell(run, rows[0], key, scale) if rows else None

    return pick


def named(arm: str) -> Pick:
    """The geometric mean of the arm of exactly this name."""
    return lambda run: _overall(run, arm)


def highest(role: str) -> Pick:
    """Speed over AR on the benchmark where it is highest, which is what "up to" means."""

    def pick(run: Run) -> Found | None:
        arm = run.arm(role)
        found = [cell for row in run.rows if row["arm"] == arm and (cell := _cell(run, row, "ratio_to_ar"))]
        return max(found, key=lambda cell: cell.value, default=None)

    return pick


def averaged(role: str, key: str, scale: float = 1) -> Pick:
    """Mean over the benchmarks of a figure of the arm that plays a role."""

    def pick(run: Run) -> Found | None:
        arm = run.arm(role)
        found = [cell for row in run.rows if row["arm"] == arm and (cell := _cell(run, row, key, scale))]
        mean = float(np.mean([cell.value for cell in found])) if found else None
        return None if mean is None else Found(mean, what=str(arm), texts=f"mean of {_texts(run)}")

    return pick


def in_file(name: str, *path: str, what: str, scale: float = 1) -> Pick:
    """A number in a JSON file of the run, of the arm that plays a role: plain, or ``{value, low, high}``."""

    def pick(run: Run) -> Found | None:
        place = run.files.get(name)
        for key in path:
            place = place.get(key) if isinstance(place, Mapping) else None
        found: Mapping[str, Any] = place if isinstance(place, Mapping) else {"value": place}
        if found.get("value") is None:
            return None
        bounds = [found.get(key) for key in ("low", "high")]
        low, high = (None if bound is None else scale * bound for bound in bounds)
        return Found(scale * found["value"], low, high, run.arm(what) or what, _texts(run))

    return pick


def _cell(run: Run, row: Mapping[str, Any], key: str, scale: float = 1) -> Found | None:
    head, _, part = key.partition(".")
    value = (row.get(head) or {}).get(part) if part else row.get(head)
    if value is None:
        return None
    bounds = (row.get("ratio_low"), row.get("ratio_high")) if key == "ratio_to_ar" else (None, None)
    name = str(row["benchmark"]) + (" (samples)" if row.get("sample") else "")
    return Found(scale * value, *bounds, str(row["arm"]), f"{name}, {row['prompts']} prompts{_budget(run)}")


def _overall(run: Run, arm: str | None) -> Found | None:
    row = next((row for row in run.files.get("results", {}).get("overall", []) if row["arm"] == arm), None)
    if row is None or row["ratio_to_ar"] is None:
        return None
    return Found(row["ratio_to_ar"], row["ratio_low"], row["ratio_high"], str(arm), _texts(run))


def _texts(run: Run) -> str:
    """On what a run was measured."""
    if run.rows:
        count = len({row["benchmark"] for row in run.rows})
        name = f"{count} benchmark{'' if count == 1 else 's'}" + (" (samples)" if run.sample else "")
        return f"{name}, {run.prompts} prompts{_budget(run)}"
    texts = run.files.get("results", {}).get("texts")
    return "" if texts is None else f"{texts} texts"


def _budget(run: Run) -> str:
    budget = run.settings.get("benchmark", {}).get("max_new_tokens")
    return f" of ≤ {budget} tokens" if budget else ""


def _is(row: Mapping[str, Any], benchmark: str) -> bool:
    """Also where another set stands in, which its name says, and where it is a file of that name."""
    name = str(row["benchmark"])
    return benchmark in (name, Path(name).stem) or name.endswith(f" for {benchmark}")


def command_of(command: str, *methods: str) -> str:
    """The command that fills a row; in its place a word where this version lacks one of the methods it needs."""
    lacking = [name for name in methods if not (resource("conf") / "method" / f"{name}.yaml").is_file()]
    return f"{NO_METHOD} {', '.join(lacking)} in this version" if lacking else command
