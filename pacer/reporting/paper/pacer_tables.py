"""PACER's tables (arXiv 2602.01274): main results, ablations, with Ouroboros, and why lengths should adapt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pacer.evaluation.replay.results import LABELS
from pacer.reporting.gather import Run
from pacer.reporting.paper.published import published
from pacer.reporting.paper.rows import (
    Found,
    Pick,
    Row,
    Table,
    averaged,
    command_of,
    highest,
    in_file,
    named,
    of_arm,
    side_by_side,
)

BENCH = "MINUTES=40 scripts/bench_pacer.sh"
MODELLED = "Modelled: replay or the cost model on the target's own texts, without decoding; measured: decoded."
BEST_OF = "The paper's figures are its best, of other models on other machines: compare ratios, not tokens/s."
SPEC_BENCH = 'Spec-Bench\'s translation prompts are read from JSON lines, a field "prompt" each.'


def _evaluate(sets: str, arms: str = "ar,pacer") -> str:
    return f"python -m pacer.evaluate +experiment=pacer/smollm2 'benchmark.sets=[{sets}]' 'benchmark.arms=[{arms}]'"


def pacer_main(runs: Sequence[Run]) -> Table:
    """Speed, tokens per target pass, what pre-verification costs and saves."""
    rows: list[Row] = []

    def add(what: str, unit: str, name: str | None, pick: Pick | None, command: str = BENCH) -> None:
        figure = published("pacer", name) if name else None
        rows.extend(side_by_side(runs, what, unit, figure, pick, command))

    add("PACER over AR, on the set where it gains most", "×", "over_ar", highest("pacer"))
    add("PACER over AR, geometric mean", "×", None, of_arm("pacer", None))
    for name in ("humaneval", "mbpp", "gsm8k", "cnn_dm", "xsum"):
        figure = "over_ar/cnn_dm" if name == "cnn_dm" else None
        add(f"PACER over AR, {name}", "×", figure, of_arm("pacer", name), _evaluate(name) if name == "mbpp" else BENCH)
    for name in ("gsm8k", "mbpp"):
        command = _evaluate(name) if name == "mbpp" else BENCH
        add(f"PACER, {name}", "tokens/s", f"speed/{name}", of_arm("pacer", name, "tokens_per_second"), command)
    add("PACER, translation", "tokens/s", "speed/translation", of_arm("pacer", "translation", "tokens_per_second"),
        _evaluate("/data/translation.jsonl"))  # fmt: skip
    add("PACER's τ, humaneval", "tokens/pass", "tau/humaneval", of_arm("pacer", "humaneval", "tokens_per_verify"))
    add("PACER over the tuned fixed window", "×", None, in_file("bench_pacer", "over_fixed", what="pacer"))
    add("PACER over the best tuned threshold", "×", None, in_file("bench_pacer", "over_threshold", what="pacer"))
    add("Pre-verification, share of the decoding time", "%", "preverify_share",
        averaged("pacer", "share.preverify", 100))  # fmt: skip
    add("Target passes, fixed window", "passes", "target_passes/fixed", passes("fixed"))
    add("Target passes, PACER", "passes", "target_passes/pacer", passes("pacer"))
    return Table(
        "pacer_main", "PACER against plain decoding and tuned baselines", ("published",), rows, [BEST_OF, SPEC_BENCH]
    )


def passes(role: str) -> Pick:
    """Target passes over all prompts of a run that also has the other arm of the comparison."""

    def pick(run: Run) -> Found | None:
        arms = [run.arm(name) for name in ("fixed", "pacer")]
        mine = [row for row in run.rows if row["arm"] == run.arm(role)]
        if None in arms or not mine:
            return None
        total = sum(row["totals"]["target_passes"] for row in mine)
        return Found(float(total), what=str(run.arm(role)), texts=f"{run.prompts} prompts")

    return pick


def pacer_ablation(runs: Sequence[Run]) -> Table:
    """What PACER's parts are worth: by replay and decoding, and by small trainings."""
    rules, trainings = "MINUTES=25 scripts/bench_ablation.sh", "MINUTES=3 scripts/ablate_preverifier.sh"
    rows: list[Row] = []
    arms = list(
        dict.fromkeys(row["arm"] for run in runs for row in run.files.get("bench_ablation", {}).get("rows", ()))
    )
    for arm in arms or ["pacer", "pacer rho=1.0"]:
        figure = published("pacer", "ablation/rho") if arm == "pacer rho=1.0" else None
        rows += side_by_side(runs, f"{arm}, over AR", "×", figure, _ablated(arm), rules, _ablated(arm, "predicted"))
    variants = [row["variant"] for run in runs for row in run.files.get("ablation", {}).get("rows", ())]
    for variant in dict.fromkeys(variants or ["as set", "no index embedding"]):
        figure = published("pacer", "ablation/index") if variant == "no index embedding" else None
        what = f"pre-verifier: {variant}, over AR"
        rows += side_by_side(runs, what, "×", figure, None, trainings, _variant(variant))
    notes = [MODELLED, "Pre-verifiers are compared by simulated speed on held-out rounds: small trainings of each."]
    return Table("pacer_ablation", "What PACER's parts are worth", ("published",), rows, notes)


def _ablated(arm: str, key: str = "ratio_to_ar") -> Pick:
    def pick(run: Run) -> Found | None:
        row = _row(run, "bench_ablation", arm=arm)
        if row is None or row[key] is None:
            return None
        low, high = (row["ratio_low"], row["ratio_high"]) if key == "ratio_to_ar" else (None, None)
        return Found(row[key], low, high, arm, f"{run.prompts} prompts")

    return pick


def _variant(name: str) -> Pick:
    def pick(run: Run) -> Found | None:
        row = _row(run, "ablation", variant=name)
        return None if row is None else Found(row["speed"], what=name, texts=f"{row['texts']} texts")

    return pick


def _row(run: Run, file: str, **wanted: str) -> Mapping[str, Any] | None:
    rows = run.files.get(file, {}).get("rows", ())
    return next((row for row in rows if all(row.get(key) == value for key, value in wanted.items())), None)


def pacer_ouroboros(runs: Sequence[Run]) -> Table:
    """Ouroboros alone and with PACER's pre-verification."""
    rows: list[Row] = []
    for name in ("humaneval", "mbpp", "gsm8k", "cnn_dm"):
        command = command_of(_evaluate(name, "ar,pacer,ouroboros,ouroboros_pacer"), "ouroboros", "ouroboros_pacer")
        for role, title in (
            ("pacer", "PACER"),
            ("ouroboros", "Ouroboros"),
            ("ouroboros_pacer", "PACER with Ouroboros"),
        ):
            here = name == "gsm8k" and role == "ouroboros_pacer"
            figure = published("pacer", "ouroboros_pacer/gsm8k") if here else None
            rows += side_by_side(runs, f"{title} over AR, {name}", "×", figure, of_arm(role, name), command)
            rows += side_by_side(
                runs, f"{title}'s τ, {name}", "tokens/pass", None, of_arm(role, name, "tokens_per_verify"), command
            )
    return Table("pacer_ouroboros", "PACER with Ouroboros", ("published",), rows, [BEST_OF])


def draft_lengths(runs: Sequence[Run]) -> Table:
    """How much lengths vary, what perfect ones would gain, and how much of it each rule recovers."""
    replay = "python -m pacer.replay +experiment=replay/smollm2 replay.profile=measure"
    oracle = published("pacer", "oracle_over_fixed")
    rows = side_by_side(runs, "Oracle over the best fixed window", "×", oracle, None, replay, _oracle)
    rows += side_by_side(runs, "Accepted tokens of a round, mean", "tokens", None, None, replay, _lengths("mean"))
    rows += side_by_side(
        runs, "Accepted tokens of a round, variance", "tokens²", None, None, replay, _lengths("variance")
    )
    for family in ("fixed", "probability", "product", "entropy", "margin", "match", "pacer", "pacer_lazy", "oracle"):
        command = replay if family == "oracle" else BENCH
        decoded = None if family == "oracle" else _tuned(family, runs)
        label = LABELS[family]
        found = side_by_side(runs, f"{label}, over AR", "×", None, decoded, command, _replayed(family, "ratio_to_ar"))
        rows += [row if row.measured or not row.command else replace(row, command=_decoding(row)) for row in found]
        if family not in ("fixed", "oracle"):
            share = _replayed(family, "gap_share", 100)
            rows += side_by_side(runs, f"{label}, share of the oracle's gap", "%", None, None, None, share)
    rows += side_by_side(runs, "PACER over the tuned fixed window", "×", None, in_file("bench_pacer", "over_fixed",
                         what="pacer"), BENCH)  # fmt: skip
    notes = [MODELLED, "The oracle drafts exactly up to the first rejection: no rule can do better with this draft."]
    return Table("draft_lengths", "Why draft lengths should adapt", ("published",), rows, notes)


def _replayed(family: str, key: str, scale: float = 1) -> Pick:
    def pick(run: Run) -> Found | None:
        row = _row(run, "results", benchmark="all", family=family)
        if row is None or row[key] is None:
            return None
        return Found(scale * row[key], what=row["arm"], texts=f"{run.files['results']['texts']} texts")

    return pick


def _decoding(row: Row) -> str:
    """The command that decodes with what a replay chose."""
    if row.modelled is None:
        return BENCH
    name, arm = row.modelled.run.settings.get("name", "smollm2"), row.modelled.found.what
    return f"python -m pacer.evaluate +experiment=pacer/{name} 'benchmark.arms=[ar,\"{arm}\"]'"


def _oracle(run: Run) -> Found | None:
    oracle, fixed = (_replayed(family, "ratio_to_ar")(run) for family in ("oracle", "fixed"))
    if oracle is None or fixed is None:
        return None
    return Found(oracle.value / fixed.value, what=f"over {fixed.what}", texts=oracle.texts)


def _lengths(key: str) -> Pick:
    def pick(run: Run) -> Found | None:
        found = run.files.get("results", {}).get("runs")
        return None if found is None else Found(found[key], texts=f"{found['rounds']} rounds")

    return pick


def _tuned(family: str, runs: Sequence[Run]) -> Pick:
    """The arm that a replay of the same pair chose for a family, where it was decoded."""
    arms = {(run.pair, run.files["tuned"].get(family)) for run in runs if "tuned" in run.files}

    def pick(run: Run) -> Found | None:
        found = [named(arm)(run) for pair, arm in arms if pair == run.pair and arm]
        return next((one for one in found if one is not None), None)

    return pick
