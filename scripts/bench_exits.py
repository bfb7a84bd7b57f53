"""How well each exit writes what the whole model writes, by kind of head, and what training the heads took.

All exits of a kind are trained at once, from one forward, for MINUTES; the texts they are judged on made none of them
and chose none of their states (where the corpus has no such part, they are those that validation reads). Beside
agreement and accepted length: the speed that the cost model promises LayerSkip and HiSpec from each kind's exits, at
prices measured here, both tuned on the same number of settings on one half of the texts and judged on the other.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from pacer.artifacts import stable_hash, write_json
from pacer.assemble import Models, load_target
from pacer.choices import CHOICES
from pacer.command.app import Stopped, describe_run, load_settings, program, run_folder
from pacer.data.corpus import Text, split_texts
from pacer.errors import ConfigError
from pacer.evaluation.cascade.costs import from_points
from pacer.evaluation.cascade.profile import profile_rungs
from pacer.evaluation.cascade.search import chosen
from pacer.evaluation.cascade.table import DEFINITIONS, WINDOW, ExitTable, exit_tables, figures
from pacer.models.exits import ExitHead
from pacer.reporting.cascade_plots import agreement_bars
from pacer.settings import Settings
from pacer.stages.exits import exit_heads, exits_checkpoint
from pacer.stages.texts import corpus
from pacer.stages.training import command_line

LAYERS, KINDS = (2, 4, 6, 8, 10, 15), CHOICES["model.exits.kind"]
TEXTS, PARTS = 96, ("preverifier", "tuning")  # the first of these parts of the corpus that has texts


def settings_of(kind: str, words: Sequence[str]) -> Settings:
    """Settings for one kind of head; exits that the words do not name are LAYERS."""
    named = any(word.startswith("model.exits.layers=") for word in words)
    layers = [] if named else [f"model.exits.layers=[{','.join(map(str, LAYERS))}]"]
    return load_settings([*words, *layers, f"model.exits.kind={kind}"])


def unseen(settings: Settings, models: Models) -> list[Text]:
    """Texts that no exit learnt from.

    Raises:
        ConfigError: the corpus has none.
    """
    parts = split_texts(corpus(settings, models)[0], settings.corpus.parts)
    found = next((texts for name in PARTS if (texts := parts.get(name))), [])
    if not found:
        raise ConfigError("no unseen texts in the corpus", value=settings.corpus.parts, remedy="use more prompts")
    return sorted(found, key=lambda text: stable_hash(text.id))[:TEXTS]


def timed(settings: Settings, models: Models, log: Path) -> tuple[Path, float | None]:
    """The checkpoint of a kind and the seconds that its training took here, kept over stops; None: elsewhere."""
    kind, start, began = settings.model.exits.kind, time.monotonic(), time.time()
    spent = json.loads(log.read_text()) if log.is_file() else {}

    def note() -> None:
        spent[kind] = spent.get(kind, 0.0) + time.monotonic() - start
        write_json(log, spent)

    try:
        checkpoint = exits_checkpoint(settings, models)
    except Stopped:
        note()
        raise
    if (checkpoint.parent / "manifest.json").stat().st_mtime >= began:  # else it was there
        note()
    return checkpoint, spent.get(kind)


def trained(settings: Settings, models: Models, folder: Path) -> tuple[dict[int, ExitHead], dict[str, Any]]:
    """The heads of a kind, and what their training took: minutes (None: unknown), tokens of its batches, steps."""
    exits = settings.model.exits
    took: dict[str, Any] = {"minutes": 0.0, "tokens": 0, "steps": 0}
    if exits.kind != "shared":
        checkpoint, seconds = timed(settings, models, folder / "seconds.json")
        config = json.loads((checkpoint / "config.json").read_text())
        batch = config["trainer"]["accumulate"] * config["trainer"]["tokens_per_batch"]
        took = {"minutes": None if seconds is None else seconds / 60, "tokens": config["steps"] * batch,
                "steps": config["steps"]}  # fmt: skip
    return exit_heads(settings, models, exits.layers), took


def promised(table: ExitTable, models: Models, heads: dict[int, ExitHead], rest: float) -> dict[str, Any]:
    """Modelled speed over AR of both families' best settings, chosen on one half of the texts, judged on the other."""
    prices = from_points(profile_rungs(models.target, table.layers, heads), rest)
    half = np.arange(len(table.ids)) % 2 == 0
    tuning, report = (table.only(half), table.only(~half)) if len(half) > 1 else (table, None)
    rows = [row for row in chosen(tuning, prices, report) if row["benchmark"] == "all"]
    keys = ("arm", "ratio_to_ar", "tokens_per_verify", "acceptance", "layer_tokens", "tried")
    return {**{row["family"]: {key: row[key] for key in keys} for row in rows}, "prices": prices.as_json()}


def text_table(rows: Sequence[dict[str, Any]]) -> str:
    """Agreement (and expected accepted tokens) by kind and exit."""
    layers = sorted({row["layer"] for row in rows})
    lines = [f"{'head':10} {'minutes':>8} {'M tokens':>9} " + "".join(f"{f'exit {layer}':>15}" for layer in layers)]
    for kind in dict.fromkeys(row["kind"] for row in rows):
        mine = {row["layer"]: row for row in rows if row["kind"] == kind}
        one = next(iter(mine.values()))
        took = "–" if one["minutes"] is None else f"{one['minutes']:.1f}"
        cells = "".join(f"{mine[e]['agreement']:9.3f} ({mine[e]['expected_accepted']:.2f})" for e in layers)
        lines.append(f"{kind:10} {took:>8} {one['tokens'] / 1e6:9.2f} {cells}")
    return "\n".join(lines)


@program
def main(words: list[str]) -> int:
    several = {kind: settings_of(kind, words) for kind in KINDS}
    settings = several["shared"]
    folder = run_folder(settings, "bench_exits")
    describe_run(settings, folder)
    models = load_target(settings.model, settings.paths.cache_folder)
    texts = unseen(settings, models)  # the corpus is there before a clock runs
    found = {kind: trained(own, models, folder) for kind, own in several.items()}
    tables = exit_tables(models.target, {k: heads for k, (heads, _) in found.items()}, texts, models.target.vocab_size)
    window = min(WINDOW, int(tables["shared"].rows.max()))
    rows = [
        {"kind": kind, "window": window, **found[kind][1], **figures(table, layer, window)}
        for kind, table in tables.items()
        for layer in table.layers
    ]
    speeds = {kind: promised(tables[kind], models, heads, settings.costs.rest) for kind, (heads, _) in found.items()}
    stored = {"rows": rows, "modelled": speeds, "texts": len(texts), "definitions": DEFINITIONS,
              "settings": {kind: asdict(own.model.exits) for kind, own in several.items()}}  # fmt: skip
    path = write_json(folder / "bench_exits.json", stored)
    agreement_bars(rows, folder / "agreement", command=command_line())
    return report(rows, speeds, path)


def report(rows: Sequence[dict[str, Any]], speeds: dict[str, Any], path: Path) -> int:
    """Print; the exit code. Training is to help on the mean over the exits."""
    print(text_table(rows))
    for kind, both in speeds.items():
        for family in ("layerskip", "hispec"):
            if family in both:
                one = both[family]
                print(f"{kind:10} {one['arm']:48} modelled {one['ratio_to_ar']:.3f} × AR")
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    mean = {kind: float(np.mean([row["agreement"] for row in rows if row["kind"] == kind])) for kind in kinds}
    reached = {kind: mean[kind] > mean["shared"] for kind in kinds if kind != "shared"}
    for kind, is_reached in reached.items():
        said = f"{mean[kind]:.3f}, untrained {mean['shared']:.3f}"
        print(f"{'reached' if is_reached else 'NOT reached':12} mean agreement with {kind} heads: {said}")
    by_kind = {kind: [row for row in rows if row["kind"] == kind] for kind in kinds}
    line = {
        **{what: {kind: {row["layer"]: round(row[what], 4) for row in own} for kind, own in by_kind.items()}
           for what in ("agreement", "expected_accepted")},
        "training": {kind: {key: own[0][key] for key in ("minutes", "tokens")} for kind, own in by_kind.items()},
        "modelled": {kind: {f: both[f] for f in ("layerskip", "hispec") if f in both} for kind, both in speeds.items()},
        "written": str(path), "ok": all(reached.values()),
    }  # fmt: skip
    print(json.dumps(line))
    return 0 if all(reached.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main(None))
