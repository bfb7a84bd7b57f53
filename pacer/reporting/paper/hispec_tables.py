"""HiSpec's tables (arXiv 2510.01336): main results, batches, exits and buffers, the wall that verification is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pacer.evaluation.cascade.search import N_D, N_I
from pacer.evaluation.cascade.walk import Cascade
from pacer.reporting.gather import Run
from pacer.reporting.paper.pacer_tables import BENCH, MODELLED
from pacer.reporting.paper.published import over_layerskip, published, sets, speedups, sweep, swept_depths
from pacer.reporting.paper.rows import Found, Pick, Row, Table, averaged, command_of, in_file, of_arm, side_by_side

HISPEC = "MINUTES=20 scripts/bench_hispec.sh"
SWEEP = "MINUTES=20 scripts/sweep_layers.sh"
SYSTEMS = {"hispec": "HiSpec", "layerskip": "LayerSkip", "lookahead": "Lookahead", "adadecode": "AdaDecode",
           "kangaroo": "Kangaroo", "hispec_pacer": "HiSpec with pre-verifiers"}  # fmt: skip
ONE_MODEL = [system for system in SYSTEMS if system != "lookahead"]  # those that draft with exits


def hispec_main(runs: Sequence[Run]) -> Table:
    """Speed over AR by system and data set, beside each of the paper's models."""
    models, cells = speedups()
    rows: list[Row] = []
    for name in sets():
        for system, title in SYSTEMS.items():
            figures = tuple(cells[model].get((system, name)) for model in models)
            command = _evaluate(ONE_MODEL) if name == "sharegpt" else HISPEC
            if system == "lookahead":
                command = command_of(_evaluate([system], "pacer", sets()), system)
            rows += side_by_side(runs, f"{title}, {name}", "×", figures, of_arm(system, name), command)
    alone = (None,) * (len(models) - 1)
    figure = (published("hispec", "sprinter/sharegpt"), *alone)
    rows += side_by_side(runs, "SPRINTER (lossy), sharegpt", "×", figure, of_arm("sprinter", "sharegpt"),
                         command_of(_evaluate(["sprinter"], "pacer"), "sprinter"))  # fmt: skip
    rows += side_by_side(runs, "HiSpec over LayerSkip", "×", (over_layerskip(), *alone),
                         in_file("bench_hispec", "over_layerskip", what="hispec"), HISPEC)  # fmt: skip
    notes = ["Ours: one small model with trained exits, both systems tuned on as many settings.",
             "What is not of one model (SPRINTER; means over all models) stands in the first column."]  # fmt: skip
    return Table("hispec_main", "HiSpec and its relatives over plain decoding", tuple(models), rows, notes)


def _evaluate(systems: Sequence[str], experiment: str = "hispec", names: Sequence[str] = ("sharegpt",)) -> str:
    return (
        f"python -m pacer.evaluate +experiment={experiment}/smollm2 'benchmark.sets=[{','.join(names)}]' "
        f"'benchmark.arms=[{','.join(['ar', *systems])}]'"
    )


def hispec_batch(runs: Sequence[Run]) -> Table:
    """Speed over AR by rows decoded at once, and the memory of intermediate verification."""
    command = "MINUTES=12 scripts/bench_batch.sh"
    kept = published("hispec", "batch")
    cells = [(row["arm"], row["rows"]) for run in runs for row in run.files.get("bench_batch", {}).get("table", ())]
    rows: list[Row] = []
    for arm, count in dict.fromkeys(cells):
        figure = kept if arm == "hispec" else None
        what = f"{arm}, {count} row{'' if count == 1 else 's'}"
        rows += side_by_side(runs, f"{what}, over AR", "×", figure, _batch(arm, count), command)
        rows += side_by_side(runs, what, "tokens/s", None, _batch(arm, count, "tokens_per_second"), command)
    if not rows:
        rows += side_by_side(runs, "HiSpec, 1 to 16 rows, over AR", "×", kept, None, command)
    share = in_file("bench_hispec", "extra_memory", "share", "states", what="hispec", scale=100)
    rows += side_by_side(runs, "Memory of intermediate verification (states), of model and cache", "%",
                         published("hispec", "memory"), share, HISPEC)  # fmt: skip
    notes = ["Intervals of batches: the lowest and highest of the repeats; AR has as many rows."]
    return Table("hispec_batch", "HiSpec in batches", ("published",), rows, notes)


def _batch(arm: str, count: int, key: str = "over_ar") -> Pick:
    def pick(run: Run) -> Found | None:
        table = run.files.get("bench_batch", {}).get("table", ())
        row = next((row for row in table if row["arm"] == arm and row["rows"] == count), None)
        if row is None:
            return None
        low, high = (row["low"], row["high"]) if key == "over_ar" else (None, None)
        return Found(row[key], low, high, arm, f"{row['repeats']} repeats")

    return pick


def hispec_sweep(runs: Sequence[Run]) -> Table:
    """Speed over L_i at a fixed draft exit, and over N_i."""
    rows: list[Row] = []
    draft, layers = swept_depths()
    for at, figure in sweep("verifier").items():
        rows.append(Row(f"L_i {at} of {layers} layers, L_d {draft}", "×", (figure,), None, None, None))
    pairs = {(low, high, depth): None for run in runs for low, high, depth in _swept(run)}
    for low, high, depth in pairs:
        what = f"L_i {high} of {depth} layers, L_d {low}, over AR"
        cascade = Cascade((low, high), (N_D, N_I))
        rows += side_by_side(runs, what, "×", None, _decoded(cascade), SWEEP, _grid(low, high))
    for at, figure in sweep("buffer").items():
        rows.append(Row(f"N_i {at}, N_d {N_D}", "tokens/s", (figure,), None, None, None))
    if not pairs:
        rows += side_by_side(runs, "L_i and N_i of our model, over AR", "×", None, None, SWEEP)
    exits = {tuple(run.files["sweep"]["buffers"][0]["exits"]) for run in runs if "sweep" in run.files}
    for low, high in sorted(exits):
        for at in sweep("buffer"):
            cascade = Cascade((low, high), (N_D, at))
            what = f"N_i {at}, N_d {N_D}, exits {low} and {high}, over AR"
            rows += side_by_side(runs, what, "×", None, _decoded(cascade), SWEEP, _curve(cascade))
    notes = [MODELLED, f"Published: Llama3-8B on ShareGPT. Exits of the modelled rows: N_d {N_D}, N_i {N_I} as there."]
    return Table("hispec_sweep", "Which exit verifies, and how many tokens it gathers", ("published",), rows, notes)


def _swept(run: Run) -> list[tuple[int, int, int]]:
    """(L_d, L_i, layers) of a sweep, at the draft exit that was chosen."""
    found = run.files.get("sweep")
    if not found:
        return []
    low = found["buffers"][0]["exits"][0]
    depth = found["pays"][0]["n_layers"]
    return [(low, row["verifier"], depth) for row in found["grid"] if row["verifier"] and row["draft"] == low]


def _grid(low: int, high: int) -> Pick:
    def pick(run: Run) -> Found | None:
        grid = run.files.get("sweep", {}).get("grid", ())
        row = next((row for row in grid if (row["draft"], row["verifier"]) == (low, high)), None)
        return None if row is None else _modelled(run, row["fixed"])

    return pick


def _curve(cascade: Cascade) -> Pick:
    def pick(run: Run) -> Found | None:
        rows = run.files.get("sweep", {}).get("buffers", ())
        row = next((row for row in rows if row["arm"] == cascade.arm), None)
        return None if row is None else _modelled(run, row)

    return pick


def _modelled(run: Run, row: Any) -> Found:
    return Found(row["ratio_to_ar"], what=row["arm"], texts=f"{run.files['sweep']['texts']} texts")


def _decoded(cascade: Cascade) -> Pick:
    """Geometric mean over the benchmarks of a setting that the sweep decoded."""

    def pick(run: Run) -> Found | None:
        rows = [row for row in run.files.get("checked", {}).get("compared", ()) if row["arm"] == cascade.arm]
        if not rows:
            return None
        mean = float(np.exp(np.mean(np.log([row["ratio_measured"] for row in rows]))))
        return Found(mean, what=cascade.arm, texts=f"{sum(row['prompts'] for row in rows)} prompts")

    return pick


def verification_wall(runs: Sequence[Run]) -> Table:
    """What verification costs beside drafting, and what an exit that verifies first changes."""
    wall = published("hispec", "verification_over_draft")
    rows = side_by_side(runs, "A target pass over a draft pass", "×", wall, _verifying(1), BENCH)
    for n in (2, 5, 9, 17):
        rows += side_by_side(runs, f"Verifying {n} tokens over a draft pass", "×", wall, _verifying(n), BENCH)
    for role, title in (("fixed", "fixed window"), ("pacer", "PACER")):
        for part in ("target", "draft"):
            share = averaged(role, f"share.{part}", 100)
            rows += side_by_side(runs, f"Time in the {part}, {title}", "%", None, share, BENCH)
    rows += side_by_side(runs, "Draft tokens accepted, one exit (LayerSkip)", "%", published("hispec",
                         "acceptance/draft"), averaged("layerskip", "acceptance_rate", 100), HISPEC)  # fmt: skip
    rows += side_by_side(runs, "Tokens accepted, after an intermediate verifier (HiSpec)", "%", published("hispec",
                         "acceptance/verified"), averaged("hispec", "acceptance_rate", 100), HISPEC)  # fmt: skip
    notes = ["A pass of the target and of the draft over one token at batch 1, from a latency profile of the same run."]
    return Table("verification_wall", "Verification against drafting", ("published",), rows, notes)


def _verifying(n: int) -> Pick:
    """A target pass over n tokens, in draft passes."""

    def pick(run: Run) -> Found | None:
        bench = run.files.get("bench_pacer") or run.files.get("bench_main") or {}
        one, many = bench.get("c"), {"1": 1.0, **bench.get("v", {})}.get(str(n))
        return Found(many / one, texts="latency profile") if one and many else None

    return pick
