"""Rows of results as a measured run has them, small and made up: what tests of tables and of plots share."""

from __future__ import annotations

from typing import Any

COMMAND = "python -m pacer.evaluate +experiment=pacer/smollm2"
MACHINE = "2 CPU cores, bf16"
Row = dict[str, Any]


def make_row(arm: str, benchmark: str = "gsm8k", **values: Any) -> Row:
    row: Row = {
        "arm": arm, "benchmark": benchmark, "sample": False, "guarantee": "exact", "prompts": 8, "failed": 0,
        "unfinished": 0, "tokens_per_second": 40.04, "decode_tokens_per_second": 44.0, "prefill_seconds": 0.1,
        "median_tokens_per_second": 39.0, "ratio_to_ar": 1.317, "ratio_low": 1.201, "ratio_high": 1.449,
        "tokens_per_verify": 2.054, "mean_drafted": 3.25, "accepted_per_verify": 1.05, "acceptance_rate": 0.324,
        "conditional_acceptance": [0.7, 0.6], "conditional_counts": [100, 70], "survival": [0.7, 0.42],
        "survival_counts": [100, 100], "stops": {"fixed": 100}, "finishes": {"length": 8}, "exact": True,
        "exact_detail": "8/8 identical", "score": None,
        "share": {"draft": 0.25, "preverify": 0.05, "intermediate": 0.0, "target": 0.66, "rest": 0.04},
    }  # fmt: skip
    return row | values


def no_rounds(arm: str, benchmark: str = "gsm8k") -> Row:
    share = dict.fromkeys(["draft", "preverify", "intermediate", "target", "rest"])
    missing: Row = dict.fromkeys(["tokens_per_verify", "mean_drafted", "accepted_per_verify", "acceptance_rate"])
    lists: Row = {name: [] for name in ("conditional_acceptance", "conditional_counts", "survival", "survival_counts")}
    return make_row(arm, benchmark, share=share, **missing, **lists)


def make_results(rows: list[Row]) -> Row:
    overall = [
        {"arm": arm, "ratio_to_ar": 1.5, "ratio_low": 1.25, "ratio_high": 1.75} for arm in {r["arm"]: 0 for r in rows}
    ]
    definitions = {"tokens_per_second": "New tokens over wall seconds, prefill inside."}
    return {"rows": rows, "overall": overall, "definitions": definitions, "reference": "ar", "level": 0.95}


NO_DRAFT: Row = {name: [] for name in ("conditional_acceptance", "conditional_counts", "survival", "survival_counts")}
NO_DRAFT |= {"tokens_per_verify": 1.0, "mean_drafted": 0.0, "acceptance_rate": None}
AR = make_row("ar", ratio_to_ar=1.0, ratio_low=1.0, ratio_high=1.0, **NO_DRAFT)
FULL = make_results(
    [
        AR | {"sample": True},
        make_row("pacer", sample=True, score={"strict": 0.25, "flexible": 0.3125, "n": 8}),
        make_row("hispec", sample=True, guarantee="lossy", exact=False, exact_detail="7/8 identical; p3 differs at 41"),
        no_rounds("hf_generate") | {"sample": True, "failed": 2},
        AR | {"benchmark": "xsum"},
        make_row("pacer", "xsum", exact=None, ratio_low=None, ratio_high=None),
        make_row("hispec", "xsum", guarantee="lossy", score={"rouge1": 0.2}),
        no_rounds("hf_generate", "xsum") | {"unfinished": 3},
    ]
)
