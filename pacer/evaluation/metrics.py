"""From trace lines to results: every number of a run is a function of its trace (schema: `pacer.decoding.trace`).

All values of a benchmark use its *paired* prompts: those that every arm finished (an arm that finished none does not
take part). Decoding metrics use rounds from 1 on; round 0 is the prefill.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pacer.errors import ConfigError
from pacer.evaluation.beside import beside
from pacer.evaluation.stats import Ratio, geometric_mean_ratio
from pacer.evaluation.tally import PARTS, measures, tally
from pacer.evaluation.traces import (
    FINISHED,
    Line,
    Requests,
    agreement,
    check_trace,
    compare_ids,
    group_requests,
    load_trace,
    paired_prompts,
    request_values,
    waits,
)

__all__ = [
    "DEFINITIONS", "FINISHED", "PARTS", "check_trace", "cost_model", "evaluate_trace", "group_requests", "jsonable",
    "load_trace", "measures", "tally",
]  # fmt: skip

DEFINITIONS = {
    "prompts": "Paired prompts: finished by every arm that finished any of the benchmark; a row uses these.",
    "failed": "Requests of this arm that ended with an error; not among the prompts.",
    "unfinished": "Requests that another arm has but this arm did not start or end (deadline, interruption).",
    "tokens_per_second": "New tokens up to and including the end token, over the wall seconds of the requests, prefill "
    "inside, warm-up and model loading outside; total over total (in a batch a request has its share of the time).",
    "median_tokens_per_second": "Median over prompts of new tokens / seconds of the request, prefill inside.",
    "decode_tokens_per_second": "Tokens emitted in rounds >= 1 / seconds of rounds >= 1: the speed without prefill.",
    "prefill_seconds": "Mean seconds of round 0: every model reads the prompt and the first token is emitted.",
    "latency_seconds_p50": "Median over prompts of the wall seconds of the request, prefill inside.",
    "latency_seconds_p95": "Their 95th percentile, linear between ranks.",
    "first_token_seconds_p50": "Median over prompts of the seconds to the first token, round 0. null: an arm without "
    "rounds (transformers' own).",
    "first_token_seconds_p95": "Their 95th percentile, linear between ranks.",
    "acceptance_by_context": "Accepted / drafted tokens, rounds >= 1, by the length of the context before the round: "
    "each class is named by where it begins, and ends where the next of 0, 128, 256, 512 ... begins.",
    "ratio_to_ar": "tokens_per_second over that of the AR arm on the same prompts; interval: paired bootstrap.",
    "tokens_per_verify": "Emitted tokens / target passes in rounds >= 1; at most draft length + 1 (often written tau).",
    "accepted_per_verify": "Accepted and emitted draft tokens / target passes, rounds >= 1; at most the draft length. "
    "Tokens that a lossy method keeps without asking the target are not among them.",
    "mean_drafted": "Drafted tokens / target passes in rounds >= 1, rounds without a draft included (gamma-bar); of a "
    "draft that branches, all its nodes, here and in acceptance_rate.",
    "acceptance_rate": "Accepted and emitted draft tokens / drafted tokens, rounds >= 1; unchecked ones in neither.",
    "conditional_acceptance": "Entry k-1: P(token k of a draft accepted | tokens 1..k-1 accepted), over rounds that "
    "drafted k tokens; conditional_counts holds how many rounds that is. Tokens past the end of the text do not count. "
    "Empty, as survival, where drafts branch.",
    "survival": "Entry k-1: P(tokens 1..k of a draft all accepted) over the rounds that drafted at least k tokens, "
    "counted as leading runs, not as a product of marginals; survival_counts holds how many rounds that is.",
    "share": "Share of the seconds of rounds >= 1 spent in each part; rest is everything outside model calls. Of a "
    "draft that is written beside the target, draft is the time that the loop waited for it.",
    "layer_tokens_per_token": "Layers of the target x tokens that passed them, per emitted token, rounds >= 1 (exits "
    "share these layers; adapters and draft models are not counted).",
    "exits": "Of each exit that verifies before the target, the first after the drafter first: its drafts per target "
    "pass, accepted / drafted tokens, and entry k-1: P(token k accepted | tokens 1..k-1 accepted). What it accepted "
    "and its own tokens are the draft that acceptance_rate and conditional_acceptance speak of.",
    "stops": "Rounds >= 1 by what ended their draft.",
    "finishes": "Paired prompts by what ended their text.",
    "exact": "Whether the ids of every prompt finished by both equal the AR arm's ids of the same run; positions in "
    "exact_detail count new tokens from 0. null: no AR arm, or sampled text.",
    "agreement": "Of the prompts finished by this arm and AR: share whose ids are all equal (same_requests), share of "
    "the tokens that come before the first difference, of the longer text, total over total (same_tokens).",
    "beside": "Arms that draft beside the target: median seconds of a pass of each side, alone with all threads and "
    "while both run (in turn: the same), measured on a made-up text before the run; width: tokens of a target pass; "
    "gamma: tokens drawn beside it. Of their drafts, the first token is checked as the target's own and not counted.",
    "overall": "Geometric mean of ratio_to_ar over all benchmarks; interval: prompts resampled inside each benchmark.",
}


@dataclass(frozen=True)
class _Cell:
    """One arm on one benchmark: its metrics and, where AR can be compared, the four arrays of the paired ratio."""

    row: Line
    pair: tuple[Any, Any, Any, Any] | None


def evaluate_trace(
    lines: Iterable[Line],
    *,
    arms: Sequence[str] = (),
    guarantees: Mapping[str, str] | None = None,
    samples: Collection[str] = (),
    scores: Mapping[tuple[str, str], Line] | None = None,
    reference: str = "ar",
    greedy: bool = True,
    resamples: int = 2000,
    seed: int = 0,
    level: float = 0.95,
    settings_hash: str | None = None,
) -> Line:
    """The results of a run, valid JSON: rows (benchmark by benchmark), overall ratios, definitions.

    Args:
        lines: trace lines; complete or of an interrupted run.
        arms: order of the arms; arms that are not named follow in order of appearance.
        guarantees: arm -> "exact" | "lossy"; missing: "exact".
        samples: benchmarks whose items were written for this project.
        scores: (arm, benchmark) -> task scores.
        reference: name of the AR arm.
        greedy: False for sampled text, whose ids are not comparable (``exact`` is None).
        resamples, seed, level: of the bootstrap intervals.
    """
    lines = list(lines)
    groups = group_requests(lines)
    order = list(dict.fromkeys([*arms, *(arm for arm, _ in groups)]))
    benchmarks = list(dict.fromkeys(benchmark for _, benchmark in groups))
    cells = {(arm, b): _cell(groups, arm, b, reference) for b in benchmarks for arm in order}

    def mean_ratio(keys: Sequence[tuple[str, str]]) -> Line:
        pairs = [pair for key in keys if (pair := cells[key].pair)]
        complete = pairs if len(pairs) == len(keys) else []
        ratio = Ratio(None, None, None, 0)
        if complete:
            ratio = geometric_mean_ratio(complete, resamples=resamples, seed=seed, level=level)
        return {"ratio_to_ar": ratio.value, "ratio_low": ratio.low, "ratio_high": ratio.high}

    rows = []
    for (arm, benchmark), cell in cells.items():
        ar = groups.get((reference, benchmark))
        exact, detail = compare_ids(groups.get((arm, benchmark), {}), ar) if greedy else (None, "sampled: not compared")
        rows.append(
            {
                "arm": arm,
                "benchmark": benchmark,
                "sample": benchmark in samples,
                "guarantee": (guarantees or {}).get(arm, "exact"),
                **cell.row,
                **mean_ratio([(arm, benchmark)]),
                "exact": exact,
                "exact_detail": detail,
                "agreement": agreement(groups.get((arm, benchmark), {}), ar) if greedy else None,
                "score": (scores or {}).get((arm, benchmark)),
            }
        )
    result = {
        "rows": rows,
        "overall": [{"arm": arm, **mean_ratio([(arm, b) for b in benchmarks])} for arm in order],
        "beside": beside(lines),
        "definitions": DEFINITIONS,
        "reference": reference,
        "level": level,
        "settings_hash": settings_hash,
    }
    return dict(jsonable(result))


def _cell(groups: Mapping[tuple[str, str], Requests], arm: str, benchmark: str, reference: str) -> _Cell:
    requests = groups.get((arm, benchmark), {})
    names = paired_prompts(groups, benchmark) if any(r.finished for r in requests.values()) else []
    everything = {name for (_, b), group in groups.items() if b == benchmark for name in group}
    ended = {name for name, r in requests.items() if r.line is not None}
    sums = tally(requests[name] for name in names)
    tokens, seconds = request_values(requests, names)
    row = {
        "prompts": len(names),
        "failed": sum(not requests[name].finished for name in ended),
        "unfinished": len(everything - ended),
        **measures(sums),
        "median_tokens_per_second": float(np.median(np.divide(tokens, seconds))) if names else None,
        **waits(requests, names),
        "totals": {name: getattr(sums, name) for name in _TOTALS},
    }
    ar = groups.get((reference, benchmark), {})
    comparable = names and all(name in ar and ar[name].finished for name in names)
    return _Cell(row, (tokens, seconds, *request_values(ar, names)) if comparable else None)


_TOTALS = (
    "new_tokens", "seconds", "prefills", "prefill_seconds", "target_passes", "emitted", "drafted", "accepted", "time",
)  # fmt: skip


def cost_model(
    tau: float,
    gamma_bar: float,
    v: Callable[[float], float] | Mapping[int, float],
    c: float,
    o: float = 0.0,
    p: float = 0.0,
) -> float:
    """Predicted speed over AR: ``tau / (v(gamma_bar + 1) + c * gamma_bar + o + p)``.

    The unit of all costs is one one-token target pass. ``v`` is read at the mean draft length, which is exact where it
    is linear over the lengths that occur.

    Args:
        tau: tokens per target pass.
        gamma_bar: mean drafted tokens per target pass.
        v: cost of a target pass over n tokens, as a function or as a table n -> cost (linear in between).
        c: cost of one draft pass.
        o: everything per round that is neither model.
        p: pre-verification per round.

    Raises:
        ConfigError: gamma_bar + 1 lies outside the table, or the cost is not positive.
    """
    n = gamma_bar + 1
    if isinstance(v, Mapping):
        sizes = sorted(v)
        if not sizes or not sizes[0] <= n <= sizes[-1]:
            raise ConfigError("tokens per verification outside the measured costs", value=n, allowed=f"within {sizes}")
        verify = float(np.interp(n, sizes, [v[size] for size in sizes]))
    else:
        verify = v(n)
    cost = verify + c * gamma_bar + o + p
    if not cost > 0:
        raise ConfigError("cost of a round", value=cost, allowed="above 0")
    return tau / cost


def jsonable(value: Any) -> Any:
    """The value in JSON's types; numbers that are not finite become None, numpy values become Python's."""
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple | np.ndarray):
        return [jsonable(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value
