"""Results (of `pacer.evaluation.metrics.evaluate_trace`) as Markdown, CSV and console text; a missing value is "–"."""

from __future__ import annotations

import csv
import io
import json
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from pacer.evaluation.beside import sentence

Row = Mapping[str, Any]
MISSING = "–"

CSV_COLUMNS = (
    "benchmark", "sample", "arm", "guarantee", "prompts", "failed", "unfinished", "tokens_per_second", "ratio_to_ar",
    "ratio_low", "ratio_high", "median_tokens_per_second", "decode_tokens_per_second", "prefill_seconds",
    "tokens_per_verify", "mean_drafted", "accepted_per_verify", "acceptance_rate", "share_draft", "share_preverify",
    "share_intermediate", "share_target", "share_rest", "exact", "exact_detail", "conditional_acceptance",
    "conditional_counts", "survival", "survival_counts", "stops", "finishes", "score",
    "same_requests", "same_tokens",
)  # fmt: skip


@dataclass(frozen=True)
class Column:
    """A column of the main table: its header in two parts and how a row's cell is written."""

    name: str
    unit: str
    cell: Callable[[Row], str]


@dataclass(frozen=True)
class Block:
    """One table: a title, header cells as (name, unit), and the body; the first column is text, the rest numbers."""

    title: str
    header: list[tuple[str, str]]
    body: list[list[str]]


def label(row: Row) -> str:
    """The method's name; a lossy method says so wherever it is named."""
    return str(row["arm"]) + (" (lossy)" if row.get("guarantee") == "lossy" else "")


def benchmark_label(row: Row) -> str:
    """The benchmark's name, marked where its items were written for this project."""
    return str(row["benchmark"]) + (" (samples)" if row.get("sample") else "")


def to_csv(results: Mapping[str, Any]) -> str:
    """All metrics, one line per row in full precision; columns and their order never change (`CSV_COLUMNS`)."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    for row in results["rows"]:
        flat = {**row, **{f"share_{part}": value for part, value in (row.get("share") or {}).items()}}
        flat |= row.get("agreement") or {}
        writer.writerow([_csv_cell(flat.get(column)) for column in CSV_COLUMNS])
    return buffer.getvalue()


def to_markdown(results: Mapping[str, Any], *, command: str, machine: str, notes: Sequence[str] = ()) -> str:
    """The main table, scores and notes for a README.

    Args:
        results: what `evaluate_trace` returns.
        command: the command that made the results.
        machine: processor, cores or GPU, memory, number type.
        notes: further sentences for below the table.
    """
    parts = []
    for block in blocks_of(results):
        header = [f"{name} ({unit})" if unit else name for name, unit in block.header]
        table = [header, ["---", *["---:"] * (len(header) - 1)], *block.body]
        parts.append(f"**{block.title}**\n\n{markdown(table)}")
    listed = [f"- {note}" for note in [*notes_of(results), *notes, f"Command: `{command}`", f"Machine: {machine}"]]
    return "\n\n".join([*parts, "\n".join(listed)]) + "\n"


def markdown(rows: Iterable[Sequence[str]]) -> str:
    """Lines of a Markdown table; the second row says how columns are aligned (``---``, ``---:``)."""
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)


def to_text(
    results: Mapping[str, Any], *, command: str, machine: str, notes: Sequence[str] = (), width: int = 120
) -> str:
    """As `to_markdown`, aligned for a terminal of ``width`` columns."""
    text = "\n\n".join(_text_block(block, width) for block in blocks_of(results))
    listed = [*notes_of(results), *notes, f"Command: {command}", f"Machine: {machine}"]
    wrapped = [
        textwrap.fill(note, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
        for note in listed
    ]
    return "\n\n".join(part for part in [text, "\n".join(wrapped)] if part) + "\n"


def blocks_of(results: Mapping[str, Any]) -> list[Block]:
    """One block per benchmark, then the geometric mean over them, the scores, and what lossy methods lose."""
    rows = results["rows"]
    columns = _columns(results)
    header = [("method", ""), *[(column.name, column.unit) for column in columns]]
    blocks = []
    for name in dict.fromkeys(row["benchmark"] for row in rows):
        group = [row for row in rows if row["benchmark"] == name]
        body = [[label(row), *[column.cell(row) for column in columns]] for row in group]
        n = max(row["prompts"] for row in group)
        blocks.append(Block(f"{benchmark_label(group[0])}: {n} prompt{'' if n == 1 else 's'}", header, body))
    if len(blocks) > 1:
        lossy = {row["arm"]: row["guarantee"] for row in rows}
        ratio = [("method", ""), ("ratio to AR", _interval_unit(results))]
        body = [[label({**o, "guarantee": lossy[o["arm"]]}), interval(o)] for o in results.get("overall", [])]
        blocks.append(Block(f"geometric mean over the {len(blocks)} benchmarks", ratio, body))
    return blocks + _score_blocks(rows) + _loss_blocks(rows, results.get("reference", "ar"))


def _columns(results: Mapping[str, Any]) -> list[Column]:
    reference = results.get("reference", "ar")

    def exact(row: Row) -> str:
        if row["arm"] == reference:
            return "ref."
        return MISSING if row["exact"] is None else "yes" if row["exact"] else "no"

    parts = [("draft", "draft"), ("pre-verify", "preverify"), ("target", "target"), ("rest", "rest")]
    if any((row.get("share") or {}).get("intermediate") for row in results["rows"]):
        parts.insert(2, ("interm.", "intermediate"))
    return [
        Column("speed", "tokens/s", lambda row: number(row["tokens_per_second"], 1)),
        Column("ratio to AR", _interval_unit(results), interval),
        Column("τ", "tok/pass", lambda row: number(row["tokens_per_verify"], 2)),
        Column("mean draft", "tokens", lambda row: number(row["mean_drafted"], 2)),
        Column("accepted", "%", lambda row: _percent(row["acceptance_rate"])),
        *[Column(name, "% time", partial(_share, key)) for name, key in parts],
        Column("exact", "", exact),
    ]


def _share(part: str, row: Row) -> str:
    return _percent((row.get("share") or {}).get(part))


def _score_blocks(rows: Sequence[Row]) -> list[Block]:
    blocks = []
    for name in dict.fromkeys(row["benchmark"] for row in rows):
        scored = [row for row in rows if row["benchmark"] == name and row.get("score")]
        keys = list(dict.fromkeys(key for row in scored for key in row["score"]))
        body = [[label(row), *[_score(row["score"].get(key)) for key in keys]] for row in scored]
        if scored:
            title = f"{benchmark_label(scored[0])}: scores"
            blocks.append(Block(title, [("method", ""), *[(key, "") for key in keys]], body))
    return blocks


def _loss_blocks(rows: Sequence[Row], reference: str) -> list[Block]:
    """Of lossy methods: how much of the text is still AR's, and their scores beside AR's."""
    blocks = []
    for name in dict.fromkeys(row["benchmark"] for row in rows if row.get("guarantee") == "lossy"):
        here = [row for row in rows if row["benchmark"] == name]
        lossy = [row for row in here if row.get("guarantee") == "lossy"]
        own = next((row.get("score") or {} for row in here if row["arm"] == reference), {})
        keys = list(dict.fromkeys(key for row in lossy for key in row.get("score") or {}))
        body = []
        for row in lossy:
            shares, score = row.get("agreement") or {}, row.get("score") or {}
            same = [_percent(shares.get(key)) for key in ("same_requests", "same_tokens")]
            body.append([label(row), *same, *[f"{_score(score.get(k))} ({_score(own.get(k))})" for k in keys]])
        header = [("method", ""), ("same texts", "%"), ("same tokens", "%"), *[(key, f"{reference}'s") for key in keys]]
        blocks.append(Block(f"{benchmark_label(here[0])}: loss", header, body))
    return blocks


def notes_of(results: Mapping[str, Any]) -> list[str]:
    definitions = results.get("definitions", {})
    notes = [f"Speed: {definitions['tokens_per_second']}"] if "tokens_per_second" in definitions else []
    notes.append(
        "τ: emitted tokens per target pass; mean draft: drafted tokens per target pass; accepted: of the drafted "
        "tokens; % time: share of the decoding time without prefill; exact: token ids equal to AR's on every prompt; "
        "–: not measured."
    )
    counts: dict[str, list[str]] = {"failed": [], "unfinished": []}
    for row in results["rows"]:
        for kind, found in counts.items():
            if row.get(kind):
                found.append(f"{label(row)} on {row['benchmark']}: {row[kind]}")
    for kind, found in counts.items():
        notes.append(f"{kind.capitalize()} requests, in no number above: {'; '.join(found) or 'none'}.")
    for row in results["rows"]:
        if row["exact"] is False:
            notes.append(f"Not exact, {label(row)} on {row['benchmark']}: {row['exact_detail']}.")
    notes += [sentence(arm, costs) for arm, costs in results.get("beside", {}).items()]
    if any(row.get("score") for row in results["rows"]):
        notes.append("Scores: where exact says yes, the text and so the score are AR's.")
        notes += _cut_short(results)
    if any(row.get("sample") for row in results["rows"]):
        notes.append("(samples): items written for this project in the benchmark's form, not the benchmark itself.")
    if any(row.get("guarantee") == "lossy" for row in results["rows"]):
        notes.append(
            "(lossy): the method may change the text; its speed is not comparable without its score. accepted: of the "
            "tokens that were checked; same texts: equal to AR's; same tokens: those before the first difference."
        )
    return notes


def _cut_short(results: Mapping[str, Any]) -> list[str]:
    """How many of the reference's texts ended by length: their scores say little of the model."""
    own = [row for row in results["rows"] if row["arm"] == results.get("reference", "ar") and row.get("score")]
    ends = [row.get("finishes") or {} for row in own]
    cut, texts = sum(found.get("length", 0) for found in ends), sum(sum(found.values()) for found in ends)
    if not cut:
        return []
    said = f"Scores: {cut} of {texts} texts of {own[0]['arm']} were cut by length (benchmark.max_new_tokens)"
    return [f"{said}: an answer that comes later is missed."]


def _text_block(block: Block, width: int) -> str:
    names, units = [list(part) for part in zip(*block.header, strict=True)]
    head = [names, units] if any(units) else [names]
    lines = [*head, *block.body]
    widths = [max(len(line[i]) for line in lines) for i in range(len(names))]
    gap = 2 if sum(widths) + 2 * (len(widths) - 1) <= width else 1
    texts = [
        (" " * gap).join([line[0].ljust(widths[0]), *[c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True)]])
        for line in lines
    ]
    rule = "-" * len(texts[0])
    texts = [text.rstrip() for text in texts]
    return "\n".join([block.title, rule, *texts[: len(head)], rule, *texts[len(head) :]])


def _interval_unit(results: Mapping[str, Any]) -> str:
    return f"× [{100 * results.get('level', 0.95):g} % interval]"


def interval(row: Row) -> str:
    """Speed over AR with its interval."""
    if row["ratio_to_ar"] is None:
        return MISSING
    text = f"{row['ratio_to_ar']:.2f}"
    return text if row["ratio_low"] is None else f"{text} [{row['ratio_low']:.2f}, {row['ratio_high']:.2f}]"


def number(value: float | None, digits: int) -> str:
    """A figure, or what stands for one that was not measured."""
    return MISSING if value is None else f"{value:.{digits}f}"


def _percent(value: float | None) -> str:
    return MISSING if value is None else f"{100 * value:.0f}"


def _score(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return MISSING if value is None else str(value)
    return str(value) if isinstance(value, int) else f"{value:.3f}"


def _csv_cell(value: object) -> object:
    if value is None or value == "" or value == [] or value == {}:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    return json.dumps(value) if isinstance(value, list | dict) else value
