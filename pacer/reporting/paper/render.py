"""A paper's table as Markdown, CSV, LaTeX (booktabs) and console text; what was not run says so, with the command."""

from __future__ import annotations

import csv
import io
import re
import textwrap
from collections.abc import Sequence
from itertools import groupby, zip_longest

from pacer.reporting.gather import MISSING
from pacer.reporting.paper.published import Published, sources
from pacer.reporting.paper.rows import NO_METHOD, Measured, Row, Table
from pacer.reporting.tables import markdown

NOT_RUN = "not run"
WIDTHS = (46, 22, 11, 52, 26)  # of a terminal's columns: the row, each figure, unit, setting, machine
TEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "×": r"$\times$", "≤": r"$\leq$", "≥": r"$\geq$",
    "τ": r"$\tau$", "γ": r"$\gamma$", "ρ": r"$\rho$", "²": r"$^2$", "→": r"$\rightarrow$", "–": "--", "…": r"\ldots{}",
    "<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}", '"': r"\char34{}",
}  # fmt: skip
CSV_TAIL = (
    "modelled", "modelled_run", "measured", "low", "high", "setting", "machine", "date", "commit", "run", "made_by",
    "command",
)  # fmt: skip


def cells(table: Table) -> tuple[list[str], list[list[str]]]:
    """Header and body as text; a column that no row fills is left out."""
    modelled = any(row.modelled for row in table.rows)
    head = [
        "",
        *_columns(table),
        *(["modelled"] if modelled else []),
        "measured [interval]",
        "unit",
        "setting",
        "machine",
    ]
    body = []
    for row in table.rows:
        figures = [MISSING if figure is None else _written(figure, table) for figure in row.published]
        said = [_number(row.modelled, row.unit)] if modelled else []
        shown = row.measured or row.modelled
        setting = shown.setting if shown else ""
        if row.measured is None and row.command:
            remedy = row.command if row.command.startswith(NO_METHOD) else f"run: {row.command}"
            setting = "; ".join(part for part in (setting, remedy) if part)
        machine = f"{shown.run.machine} [{_ids(table)[str(shown.run.folder)]}]" if shown else ""
        body.append([row.what, *figures, *said, _measured(row), row.unit, setting, machine])
    return head, body


def to_markdown(table: Table, command: str) -> str:
    """With notes, the runs that the rows are of, and the command that made it."""
    head, body = cells(table)
    lines = [head, ["---", *["---:"] * (len(head) - 4), "---", "---", "---"], *body]
    notes = "\n".join(f"- {note}" for note in notes_of(table, command, "`"))
    return f"**{table.title}**\n\n{markdown(lines)}\n\n{notes}\n"


def to_text(table: Table, command: str) -> str:
    """Aligned for a terminal."""
    head, body = cells(table)
    lines = [_lines(line) for line in (head, *body)]
    widths = [max(len(part) for line in lines for part in line[i]) for i in range(len(head))]
    numbers = range(1, len(head) - 3)
    text = []
    for line in lines:
        for parts in zip_longest(*line, fillvalue=""):
            placed = [part.rjust(widths[i]) if i in numbers else part.ljust(widths[i]) for i, part in enumerate(parts)]
            text.append("  ".join(placed).rstrip())
        if line is lines[0]:
            text.append("-" * (sum(widths) + 2 * len(widths) - 2))
    return "\n".join([table.title, "", *text, "", *notes_of(table, command)]) + "\n"


def _lines(line: Sequence[str]) -> list[list[str]]:
    """The lines of each cell: a terminal is not wide."""
    widths = [*[WIDTHS[0]], *[WIDTHS[1]] * (len(line) - 4), *WIDTHS[2:]]
    return [
        textwrap.wrap(cell, width, break_on_hyphens=False) or [""] for cell, width in zip(line, widths, strict=True)
    ]


def to_csv(table: Table) -> str:
    """Full precision; a figure that is missing is an empty cell."""
    names = [name.replace(" ", "_") for name in _columns(table)]
    heads = [part for name in names for part in (name, f"{name}_text", f"{name}_status")]
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(["table", "what", "unit", *heads, "published_source", *CSV_TAIL])
    for row in table.rows:
        figures = [part for figure in row.published for part in _published(figure)]
        source = next((figure.source for figure in row.published if figure), "")
        writer.writerow([table.name, row.what, row.unit, *figures, source, *_tail(row)])
    return buffer.getvalue()


def _published(figure: Published | None) -> tuple[object, str, str]:
    return (
        ("", "", "") if figure is None else ("" if figure.value is None else figure.value, str(figure), figure.status)
    )


def _tail(row: Row) -> list[object]:
    modelled, measured = row.modelled, row.measured
    said: list[object] = [modelled.found.value, modelled.run.folder] if modelled else ["", ""]
    if measured is None:
        return [*said, *[""] * 3, modelled.setting if modelled else "", *[""] * 5, row.command or ""]
    found, run = measured.found, measured.run
    bounds = ["" if bound is None else bound for bound in (found.low, found.high)]
    return [
        *said,
        found.value,
        *bounds,
        measured.setting,
        run.machine,
        run.date,
        run.commit,
        run.folder,
        run.command,
        "",
    ]


def to_latex(table: Table, command: str) -> str:
    """A ``table`` with booktabs rules (``\\usepackage{booktabs}``); it is wide, for a landscape page."""
    head, body = cells(table)
    spec = "l" + "r" * (len(head) - 4) + "lll"
    lines = [" & ".join(escaped(cell) for cell in line) + r" \\" for line in (head, *body)]
    notes = [f"% {note}" for note in notes_of(table, command)]
    return "\n".join([
        *notes, r"\begin{table}", r"\centering", rf"\caption{{{escaped(table.title)}}}", rf"\label{{tab:{table.name}}}",
        rf"\begin{{tabular}}{{{spec}}}", r"\toprule", lines[0], r"\midrule", *lines[1:], r"\bottomrule",
        r"\end{tabular}", r"\end{table}", "",
    ])  # fmt: skip


def escaped(text: str) -> str:
    """Plain text for LaTeX."""
    return re.sub("|".join(map(re.escape, TEX)), lambda match: TEX[match[0]], text)


def missing(table: Table) -> list[tuple[str, list[str]]]:
    """Commands that would fill the table, each with the rows it is for."""
    wanted = [(row.command, row.what) for row in table.rows if row.measured is None and row.command]
    wanted.sort(key=lambda pair: pair[0])
    return [(command, [what for _, what in group]) for command, group in groupby(wanted, lambda pair: pair[0])]


def notes_of(table: Table, command: str, tick: str = "") -> list[str]:
    """What a reader must know: sources, runs by their number, what was not run, and the command of the table."""
    figures = [figure for row in table.rows for figure in row.published if figure]
    notes = [*sources(figures), *table.notes]
    notes.append(
        "Measured: value [interval]; speeds over AR: 95 %, paired bootstrap over prompts. Of several runs: real data "
        "before samples, more prompts before fewer, the later before the earlier."
    )
    for folder, number in _ids(table).items():
        run = next(one.run for row in table.rows for one in (row.measured, row.modelled)
                   if one and str(one.run.folder) == folder)  # fmt: skip
        made = f"{run.date}, commit {run.commit}, {tick}{run.command}{tick}" if run.date else "provenance not recorded"
        notes.append(f"[{number}] {folder}: {made}")
    for wanted, rows in missing(table):
        rest = f" and {len(rows) - 2} more" if len(rows) > 2 else ""
        notes.append(f"Not run: {'; '.join(rows[:2])}{rest}: {tick}{wanted}{tick}")
    return [*notes, f"Made by: {tick}{command}{tick}"]


def _columns(table: Table) -> list[str]:
    return [name if name == "published" else f"published [paper] {name}" for name in table.columns]


def _written(figure: Published, table: Table) -> str:
    """Of several models: the figure alone, for their columns say what it is of and how it was read."""
    return str(figure) if len(table.columns) == 1 else figure.text


def _measured(row: Row) -> str:
    if row.measured is not None:
        return _number(row.measured, row.unit)
    return NOT_RUN if row.command else MISSING


def _number(one: Measured | None, unit: str) -> str:
    if one is None:
        return MISSING
    found = one.found
    text = _digits(found.value, unit)
    if found.low is None or found.high is None:
        return text
    return f"{text} [{_digits(found.low, unit)}, {_digits(found.high, unit)}]"


def _digits(value: float, unit: str) -> str:
    """Two decimals, more where they would all be 0, none for counts."""
    if unit == "passes":
        return f"{value:,.0f}"
    return f"{value:.2f}" if abs(value) >= 0.01 or value == 0 else f"{value:.2g}"


def _ids(table: Table) -> dict[str, int]:
    """Numbers of the runs that the table shows, by folder, in order of appearance."""
    shown = [one.run for row in table.rows for one in (row.measured, row.modelled) if one]
    return {folder: number for number, folder in enumerate(dict.fromkeys(str(run.folder) for run in shown), start=1)}
