"""Which exits, and how large a buffer? From the cost model, and how far decoding agrees with it.

One forward per text says what every exit would write; a short profile says what layers, heads and drafting steps take.
From these: LayerSkip's and HiSpec's best settings (as many tried of each), the speed of every pair of exits, the curve
over N_i, and the map of where HiSpec pays. Five settings are then decoded on other prompts beside plain decoding,
between two profiles, and compared with what the model says of plain decoding's own texts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from pacer.artifacts import write_json
from pacer.assemble import Models, load_target
from pacer.command.app import describe_run, load_settings, program, run_folder
from pacer.errors import ConfigError
from pacer.evaluation.arms import make_arm
from pacer.evaluation.cascade.costs import Prices, from_points, synthetic
from pacer.evaluation.cascade.profile import RungPoint, profile_rungs
from pacer.evaluation.cascade.search import DEFINITIONS, N_D, N_I, OVERALL, buffer_curves, chosen, layer_grid
from pacer.evaluation.cascade.table import ExitTable, exit_tables
from pacer.evaluation.cascade.theory import PUBLISHED, PUBLISHED_DEPTHS, Point, where_it_pays
from pacer.evaluation.cascade.walk import Cascade, usage
from pacer.evaluation.replay.compare import ar_texts, decoded
from pacer.evaluation.replay.stage import texts_of
from pacer.evaluation.runner import load_benchmarks, make_requests, measure
from pacer.evaluation.traces import Requests, group_requests
from pacer.methods.arms import method_settings
from pacer.models.exits import ExitHead
from pacer.reporting.cascade_plots import buffer_curve, checked, layer_map, pays_map
from pacer.settings import Settings
from pacer.stages.exits import attach_exits, exit_heads
from pacer.stages.training import command_line
from scripts.bench_exits import settings_of

CHECKED, WIDE = 5, 10  # points; the larger buffer among them
TAU_ERROR, SPEED_ERROR = 0.02, 0.10
NAMES = {"tau": "tokens per target pass", "ratio": "speed over AR"}
CONTEXT = 256  # tokens in the caches, where the sweep's prices are measured
Heads = Mapping[int, ExitHead]


def table_of(models: Models, heads: Heads, texts: Any) -> ExitTable:
    return exit_tables(models.target, {"": heads}, texts, models.target.vocab_size)[""]


def profiled(models: Models, heads: Heads, context: int) -> list[RungPoint]:
    return profile_rungs(models.target, sorted(heads), heads, context=context)


def best_of(rows: Sequence[Mapping[str, Any]], family: str) -> Cascade:
    """What was chosen on all tuning texts."""
    row = next(row for row in rows if row["benchmark"] == OVERALL and row["family"] == family)
    return Cascade(tuple(row["exits"]), tuple(row["buffers"]), row["bonus"])


def to_check(rows: Sequence[Mapping[str, Any]], grid: Sequence[Mapping[str, Any]]) -> list[Cascade]:
    """Five settings: both families' best, the paper's buffers at HiSpec's pair, a larger one, then other pairs."""
    pair = best_of(rows, "hispec").exits
    others = sorted((r["best"] for r in grid if r["verifier"]), key=lambda best: -best["ratio_to_ar"])
    wanted = [
        best_of(rows, "layerskip"), best_of(rows, "hispec"), Cascade(pair, (N_D, N_I)), Cascade(pair, (N_D, WIDE)),
        *(Cascade(tuple(o["exits"]), tuple(o["buffers"]), o["bonus"]) for o in others if tuple(o["exits"]) != pair),
        Cascade(pair, (N_D + 1, N_I)), Cascade(pair, (N_D, N_I), bonus=False), Cascade(pair, (N_D, N_I + 2)),
    ]  # fmt: skip
    drafting = [cascade for cascade in dict.fromkeys(wanted) if cascade.buffers[0] > 0]  # γ = 0 is plain decoding
    return drafting[:CHECKED]


def maps(table: ExitTable, prices: Prices, exits: tuple[int, int], name: str) -> list[dict[str, Any]]:
    """Where HiSpec pays at our prices and at the paper's depths, with both points."""
    low, high = exits
    edges = ((low, high), (high, table.n_layers), (low, table.n_layers))
    by_i, by_f, direct = (float(table.agrees(a, b).mean()) for a, b in edges)
    mine = where_it_pays(exits, prices, f"{name}, measured prices", [Point(f"{name} (measured)", by_i, by_f, direct)])
    deep = PUBLISHED_DEPTHS[-1]
    theirs = synthetic(deep, PUBLISHED_DEPTHS[:-1])
    title = "prices in proportion to layers, verifying several tokens as cheap as one"
    return [mine, where_it_pays((PUBLISHED_DEPTHS[0], PUBLISHED_DEPTHS[1]), theirs, title, [PUBLISHED])]


def decode(
    settings: Settings, models: Models, heads: Heads, arms: Sequence[str], folder: Path
) -> tuple[dict[tuple[str, str], Requests], ExitTable, list[RungPoint]]:
    """What was measured, the exit table of plain decoding's texts, and profiles from before and after.

    Raises:
        ConfigError: no prompt was finished by every arm.
    """
    attach_exits(settings, models, [method_settings(arm) for arm in arms])
    benchmarks = load_benchmarks(settings.benchmark, settings.paths.data_dir)
    budget = settings.benchmark.max_new_tokens
    requests = {b.name: {r.id: r for r in make_requests(b.prompts, models, budget)} for b in benchmarks}
    context = int(np.mean([len(r.prompt_ids) + budget // 2 for group in requests.values() for r in group.values()]))
    points = profiled(models, heads, context)
    runs = [make_arm(arm, models, settings.sampling) for arm in arms]
    lines = measure(benchmarks, runs, models, settings.benchmark, folder / "trace.jsonl")
    points += profiled(models, heads, context)
    texts = ar_texts(lines, requests)
    if not texts:
        raise ConfigError("no prompt was finished by every arm", remedy="give it more MINUTES")
    return group_requests(lines), table_of(models, heads, texts), points


def compared(
    groups: Mapping[tuple[str, str], Requests], table: ExitTable, points: Sequence[RungPoint],
    cascades: Sequence[Cascade], rest: float,
) -> list[dict[str, Any]]:  # fmt: skip
    """Modelled and measured tokens per target pass and speed over plain decoding, by arm and benchmark."""
    out = []
    for benchmark, part in table.by_task().items():
        tokens, seconds = decoded(groups["ar", benchmark], part.ids)
        overhead = decoded(groups["ar", benchmark], part.ids, "rest")[1] / tokens  # plain decoding: a token is a round
        prices = from_points(points, rest, 1e3 * overhead)
        for cascade in cascades:
            mine, used = groups[cascade.arm, benchmark], usage(part, cascade)
            own, spent = decoded(mine, part.ids)
            rounds = sum(len(mine[name].rounds[1:]) for name in part.ids)
            run = sum(line["layer_tokens"] for name in part.ids for line in mine[name].rounds[1:])
            out.append({
                "arm": cascade.arm, "benchmark": benchmark, "prompts": len(part.ids),
                "tau_predicted": used.tokens_per_verify, "tau_measured": own / rounds,
                "ratio_predicted": prices.ratio(cascade, used), "ratio_measured": own / spent / (tokens / seconds),
                "layer_tokens_predicted": used.layer_tokens(cascade, table.n_layers),
                "layer_tokens_measured": run / own,
            })  # fmt: skip
    return out


def errors(rows: Sequence[Mapping[str, Any]], what: str) -> list[float]:
    return [abs(row[f"{what}_predicted"] / row[f"{what}_measured"] - 1) for row in rows]


def sweep(settings: Settings, models: Models, heads: Heads) -> dict[str, Any]:
    """Everything that the model says of the tuning texts, as plain data."""
    table = table_of(models, heads, texts_of(settings, models)[0])
    prices = from_points(profiled(models, heads, CONTEXT), settings.costs.rest)
    rows = chosen(table, prices)
    low, high = best_of(rows, "hispec").exits
    return {
        "chosen": rows, "grid": layer_grid(table, prices), "buffers": buffer_curves(table, prices, (low, high)),
        "pays": maps(table, prices, (low, high), settings.model.name), "prices": prices.as_json(),
        "texts": len(table.ids), "kind": settings.model.exits.kind, "definitions": DEFINITIONS,
    }  # fmt: skip


def decoded_buffers(
    found: Sequence[Mapping[str, Any]], cascades: Sequence[Cascade], exits: Any
) -> list[dict[str, Any]]:
    """Measured points of the curve over N_i: the geometric mean over the benchmarks."""
    out = []
    for cascade in (c for c in cascades if list(c.exits) == list(exits) and c.bonus):
        speeds = [row["ratio_measured"] for row in found if row["arm"] == cascade.arm]
        n_d, n_i = cascade.buffers
        out.append({"n_d": n_d, "n_i": n_i, "ratio_to_ar": float(np.exp(np.mean(np.log(speeds))))})
    return out


@program
def main(words: list[str]) -> int:
    kind = load_settings(words).model.exits.kind
    settings = settings_of(kind, words)
    if len(settings.model.exits.layers) < 2:
        raise ConfigError("model.exits.layers", value=settings.model.exits.layers, allowed="two exits or more")
    folder = run_folder(settings, "sweep_layers")
    describe_run(settings, folder)
    models = load_target(settings.model, settings.paths.cache_folder)
    heads = exit_heads(settings, models, settings.model.exits.layers)
    stored = folder / "sweep.json"  # what is decoded must not change when the command goes on
    if not stored.is_file():
        write_json(stored, sweep(settings, models, heads))
    swept = json.loads(stored.read_text())
    rows, grid, command = swept["chosen"], swept["grid"], command_line()
    layer_map(grid, folder / "layers", command=command)
    pays_map(swept["pays"], folder / "where_it_pays", command=command)
    cascades = to_check(rows, grid)
    groups, table, points = decode(settings, models, heads, ["ar", *(c.arm for c in cascades)], folder)
    found = compared(groups, table, points, cascades, settings.costs.rest)
    path = write_json(folder / "checked.json", {"compared": found, "profile": [asdict(p) for p in points]})
    measured = decoded_buffers(found, cascades, swept["buffers"][0]["exits"])
    buffer_curve(swept["buffers"], folder / "buffers", command=command, measured=measured)
    checked(found, folder / "checked", command=command)
    return report(rows, found, swept["pays"], path)


def report(
    rows: Sequence[Mapping[str, Any]], found: Sequence[Mapping[str, Any]], pays: Sequence[Mapping[str, Any]], path: Path
) -> int:
    """Print; the exit code."""
    print(f"{'chosen on':12} {'best setting':48} {'× AR':>6} {'τ':>5} {'layer-tokens':>13}  (modelled, tuning texts)")
    for row in rows:
        figures = f"{row['ratio_to_ar']:6.3f} {row['tokens_per_verify']:5.2f} {row['layer_tokens']:13.1f}"
        print(f"{row['benchmark']:12} {row['arm']:48} {figures}")
    print(f"\n{'decoded':48} {'benchmark':10} {'τ modelled, measured':>22} {'× AR modelled, measured':>25}")
    for row in found:
        said = "".join(
            f"{row[f'{what}_{how}']:11.3f}" for what in ("tau", "ratio") for how in ("predicted", "measured")
        )
        print(f"{row['arm']:48} {row['benchmark']:10} {said}")
    middle = {what: float(np.median(errors(found, what))) for what in ("tau", "ratio", "layer_tokens")}
    bounds = {"tau": TAU_ERROR, "ratio": SPEED_ERROR}
    reached = {what: middle[what] <= bound for what, bound in bounds.items()}
    for what, bound in bounds.items():
        said = f"{100 * middle[what]:.1f} %, wanted ≤ {100 * bound:.0f} %"
        print(f"{'reached' if reached[what] else 'NOT reached':12} median error of {NAMES[what]}: {said}")
    keys = ("arm", "ratio_to_ar", "tokens_per_verify", "tried")
    best = {row["family"]: {key: row[key] for key in keys} for row in rows if row["benchmark"] == OVERALL}
    shown = ("name", "accept_i", "accept_f", "direct", "over_same", "over_best")
    placed = [{key: point[key] for key in shown} for each in pays for point in each["points"]]
    line = {"best": best, "median_errors": middle, "points": len(found), "where_it_pays": placed,
            "written": str(path.parent), "ok": all(reached.values())}  # fmt: skip
    print(json.dumps(line))
    return 0 if all(reached.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main(None))
