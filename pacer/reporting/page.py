"""One HTML file of finished runs that needs nothing else: tables that sort, plots, and every text round by round."""

from __future__ import annotations

import base64
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from pacer.errors import ConfigError, PacerError
from pacer.evaluation.metrics import evaluate_trace, load_trace
from pacer.reporting.gather import MISSING, Run
from pacer.reporting.rounds import FATES, ORIGINS, page_data
from pacer.reporting.tables import Block, blocks_of, label, notes_of
from pacer.settings import SourceSettings

log = logging.getLogger(__name__)
ASSETS = Path(__file__).with_name("assets")
CAPTIONS = {
    "speed": "Speed of each method over plain decoding (AR), with intervals",
    "time": "Where the time of decoding goes",
    "acceptance": "How far drafts hold, by position",
}
NO_ROUNDS = '<p id="rounds">No trace lies beside these results: there are no rounds to show.</p>'
Draw = Callable[[dict[str, Any], Path, str], None]


def make_page(runs: Sequence[Run], folder: Path, cache: Path, command: str, draw: Draw) -> str:
    """The page.

    Args:
        runs: of `pacer.evaluate`; what has a trace is shown round by round too.
        folder: where plots are drawn first. cache: where models are, for old traces that do not hold their texts.
        command: what made the page. draw: the plots of results (the run's command beside them) into a folder.

    Raises:
        ConfigError: a run that decoded nothing.
    """
    traces = [_trace(run) for run in runs]
    results = [_results(run, lines) for run, lines in zip(runs, traces, strict=True)]
    found = [
        {"name": str(run.folder), **page_data(lines, _texts(run, cache))}
        for run, lines in zip(runs, traces, strict=True)
    ]
    viewed = [each for each in found if each["requests"]]
    sections = []
    for number, (run, result) in enumerate(zip(runs, results, strict=True)):
        place = folder / f"plots-{number}"
        place.mkdir(parents=True, exist_ok=True)
        draw(result, place, run.command)
        sections.append(_section(run, result, _pictures(run, place), f"run-{number}"))
    scripts = ["tables.js", *(["nodes.js", "rounds.js"] if viewed else [])]
    links = "".join(f'<a href="#run-{i}">{escape(run.folder.name)}</a>' for i, run in enumerate(runs))
    return _asset("page.html").substitute(
        title=_title(runs, results), headline="".join(map(_headline, runs, results)), links=links,
        viewer=_viewer(viewed) if viewed else NO_ROUNDS,
        sections="\n".join(sections), command=escape(command), style=_text("page.css"), data=_data(viewed),
        scripts="".join(f"<script>\n{_text(name)}</script>\n" for name in scripts),
    )  # fmt: skip


def _text(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")


def _asset(name: str) -> Template:
    return Template(_text(name))


def _trace(run: Run) -> list[dict[str, Any]]:
    path = run.folder / "trace.jsonl"
    return load_trace(path) if path.is_file() else []


def _results(run: Run, lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The run's results, or, of an interrupted one, what follows from its trace."""
    if run.rows:
        return dict(run.files["results"])
    if not lines:
        raise ConfigError("nothing was decoded in this run", value=str(run.folder),
                          allowed="a folder of python -m pacer.evaluate or of a script that measures")  # fmt: skip
    return evaluate_trace(lines, greedy=run.settings.get("sampling", {}).get("temperature", 0) == 0)


def _texts(run: Run, cache: Path) -> Callable[[set[int]], Mapping[int, str]]:
    """Texts of ids by the run's tokenizer, for a trace that holds none; without a tokenizer ids stay numbers."""

    def texts(ids: set[int]) -> Mapping[int, str]:
        from pacer.models.sources import fetch, load_tokenizer  # torch and transformers, which other traces do without
        from pacer.models.tokenizers import pieces

        target = run.settings.get("model", {}).get("target", {})
        named = {key: target[key] for key in ("id", "revision", "file", "sha256") if key in target}
        try:
            return pieces(load_tokenizer(fetch(SourceSettings(**named), cache)), ids)
        except PacerError as error:
            log.warning("no tokenizer for %s (%s): its tokens are shown as numbers", run.folder, error)
            return {}

    return texts


def _pictures(run: Run, drawn: Path) -> list[tuple[str, str]]:
    """Caption and data of each picture: those drawn of the results, and others that lie in the run's folder."""
    others = {path.stem: path for place in (run.folder, run.folder / "plots") for kind in ("png", "svg")
              for path in sorted(place.glob(f"*.{kind}")) if path.stem not in CAPTIONS}  # fmt: skip
    own = [drawn / f"{name}.svg" for name in CAPTIONS if (drawn / f"{name}.svg").is_file()]
    paths = [*own, *others.values()]
    return [(CAPTIONS.get(path.stem, path.stem.replace("_", " ")), _inlined(path)) for path in paths]


def _inlined(path: Path) -> str:
    kind = {"svg": "svg+xml", "png": "png"}[path.suffix[1:]]
    return f"data:image/{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"


def _title(runs: Sequence[Run], results: Sequence[Mapping[str, Any]]) -> str:
    pairs = ", ".join(dict.fromkeys(run.models for run in runs))
    sets = dict.fromkeys(row["benchmark"] for result in results for row in result["rows"])
    return escape(f"{pairs}: speculative decoding on {', '.join(sets)}")


def _headline(run: Run, results: Mapping[str, Any]) -> str:
    """The speeds over plain decoding in one line, the fastest first."""
    guarantee = {row["arm"]: row.get("guarantee") for row in results["rows"]}
    known = [row for row in results["overall"] if row["ratio_to_ar"] is not None]
    known = [row for row in known if row["arm"] != results.get("reference", "ar")]
    said = "; ".join(
        f"<b>{escape(label({**row, 'guarantee': guarantee[row['arm']]}))}</b> {row['ratio_to_ar']:.2f}×{_interval(row)}"
        for row in sorted(known, key=lambda row: -row["ratio_to_ar"])
    )
    count = len({row["benchmark"] for row in results["rows"]})
    over = "over plain decoding" + (f", geometric mean of {count} benchmarks" if count > 1 else "")
    return f"<p>{escape(run.folder.name)}: speed {over}: {said}.</p>" if said else ""


def _interval(row: Mapping[str, Any]) -> str:
    return "" if row["ratio_low"] is None else f" [{row['ratio_low']:.2f}, {row['ratio_high']:.2f}]"


def _section(run: Run, results: Mapping[str, Any], pictures: Sequence[tuple[str, str]], mark: str) -> str:
    """A run's tables and plots: the mean over its benchmarks first."""
    blocks = sorted(blocks_of(results), key=lambda block: not block.title.startswith("geometric mean"))
    plots = "".join(
        f'<figure class="plot"><figcaption class="soft">{escape(caption)}</figcaption><img loading="lazy" '
        f'src="{source}" alt="{escape(caption)}; its numbers are in the tables"></figure>'
        for caption, source in pictures
    )
    notes = "".join(f"<li>{escape(note)}</li>" for note in notes_of(results))
    terms = "".join(f"<dt>{escape(name)}</dt><dd>{escape(said)}</dd>" for name, said in results["definitions"].items())
    made = f"{run.models}; {run.date or MISSING}, commit {run.commit or MISSING}, {run.machine}"
    return (
        f'<section aria-labelledby="{mark}"><h2 id="{mark}">{escape(str(run.folder))}</h2>'
        f'<p class="soft">{escape(made)}<br><code>{escape(run.command)}</code></p>'
        f'<p class="soft">Press the name of a column to sort by it.</p>{"".join(map(_table, blocks))}'
        f"<details><summary>Notes</summary><ul>{notes}</ul></details>"
        f"<details><summary>What the figures mean</summary><dl>{terms}</dl></details>{plots}</section>"
    )


def _table(block: Block) -> str:
    heads = "".join(
        f'<th scope="col"><button type="button">{escape(name)}</button><small>{escape(unit)}</small></th>'
        for name, unit in block.header
    )
    rows = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in block.body)
    title = escape(block.title)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{title}"><table><caption>{title}</caption>'
        f"<thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _viewer(viewed: Sequence[Mapping[str, Any]]) -> str:
    """The round viewer's places, which rounds.js fills; the legend names the origins that occur."""
    occurring = {letter for run in viewed for r in run["requests"] for line in r["rounds"] for letter in line["o"]}
    legend = "".join(
        f'<li><span class="t {letter}">&nbsp;token&nbsp;</span>{escape(name)}</li>'
        for letter, (name, _) in ORIGINS.items()
        if letter in occurring
    )
    return _asset("viewer.html").substitute(legend=legend)


def _data(viewed: Sequence[Mapping[str, Any]]) -> str:
    data = {"runs": list(viewed), "origins": ORIGINS, "fates": FATES}
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c")  # no token ends the script element
