"""Sums over the rounds of requests, and the metrics made of them: kept as (sum, count), divided once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from pacer.errors import ConfigError
from pacer.evaluation.traces import Line, RequestTrace

PARTS = ("draft", "preverify", "intermediate", "target", "rest")
CONTEXTS = (0, 128, 256, 512, 1024, 2048, 4096, 8192)  # where classes of context lengths begin


@dataclass
class Runs:
    """What an exit made of drafts. Lists are by draft index, as in :class:`Tally`."""

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    kept: list[int] = field(default_factory=list)
    reached: list[int] = field(default_factory=list)
    trees: int = 0

    def add(self, drafted: int, accepted: int, branches: bool = False) -> None:
        """One more draft; whether it branches."""
        self.rounds += 1
        self.drafted += drafted
        self.accepted += accepted
        self.trees += branches
        if branches:
            return
        for counts in (self.kept, self.reached):
            counts.extend([0] * (drafted - len(counts)))
        for k in range(drafted):
            self.reached[k] += accepted >= k
            self.kept[k] += accepted > k


@dataclass
class Tally:
    """Sums over requests; lists are by draft index. Two tallies of different prompts may be added field by field."""

    prompts: int = 0
    new_tokens: int = 0
    seconds: float = 0.0
    prefills: int = 0
    prefill_seconds: float = 0.0
    target_passes: int = 0
    emitted: int = 0
    drafted: int = 0
    accepted: int = 0
    unchecked: int = 0  # drafted tokens that are in the text though nobody checked them: of lossy methods
    time: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    run_kept: list[int] = field(default_factory=list)  # rounds whose first k tokens were all accepted
    run_reached: list[int] = field(default_factory=list)  # of those with k - 1 accepted: rounds that drafted k
    run_drafted: list[int] = field(default_factory=list)  # rounds that drafted k
    trees: int = 0  # rounds whose draft branched: a token has no one index there, and the runs are not known
    layer_tokens: int = 0
    exits: list[Runs] = field(default_factory=list)  # exits that verify, the first after the drafter first
    drafted_at: Counter[int] = field(default_factory=Counter)  # by the class of the context's length
    accepted_at: Counter[int] = field(default_factory=Counter)
    stops: Counter[str] = field(default_factory=Counter)
    finishes: Counter[str] = field(default_factory=Counter)


def tally(requests: Iterable[RequestTrace], sums: Tally | None = None) -> Tally:
    """Sums over finished requests; ``sums``: those so far, to which these are added."""
    sums = Tally() if sums is None else sums
    for request in requests:
        if request.line is None:
            raise ConfigError("an unfinished request cannot be counted", allowed="finished requests")
        sums.prompts += 1
        sums.new_tokens += request.line["new_tokens"]
        sums.seconds += request.line["seconds"]
        sums.finishes[request.line["finish"]] += 1
        for line in request.rounds:
            if line["round"] == 0:
                sums.prefills += 1
                sums.prefill_seconds += sum(line["time"].values())
            else:
                _add_round(sums, line)
    return sums


def _add_round(sums: Tally, line: Line) -> None:
    drafted, emitted = len(line["drafted"]), len(line["emitted"])
    judged = line["accepted"][-1] if line["accepted"] else 0
    accepted = min(judged, emitted)  # accepted tokens past EOS or the budget are not part of the text
    unchecked = min(line.get("unchecked", 0), emitted)
    at_risk = emitted if judged > emitted else drafted  # the fate of later tokens has no meaning then
    sums.target_passes += 1
    sums.emitted += emitted
    sums.drafted += drafted
    sums.accepted += accepted - unchecked
    sums.unchecked += unchecked
    context = max(begin for begin in CONTEXTS if begin <= line["committed"])
    sums.drafted_at[context] += drafted - unchecked
    sums.accepted_at[context] += accepted - unchecked
    sums.stops[line["stop"]] += 1
    sums.layer_tokens += line.get("layer_tokens", 0)
    _add_exits(sums, line.get("inner", []))
    for part, seconds in line["time"].items():
        sums.time[part] += seconds
    sums.trees += "parents" in line
    if "unchecked" in line or "parents" in line:
        return  # one token of the draft met its verifier, or drafts branch: no run of accepted tokens is known
    for counts in (sums.run_kept, sums.run_reached, sums.run_drafted):
        counts.extend([0] * (at_risk - len(counts)))
    for k in range(at_risk):
        sums.run_drafted[k] += 1
        sums.run_reached[k] += accepted >= k
        sums.run_kept[k] += accepted > k


def _add_exits(sums: Tally, rounds: list[Line]) -> int:
    """Rounds of an exit, and of those below it; returns how many exits verified before this round's verifier."""
    below = max((_add_exits(sums, line.get("inner", [])) for line in rounds), default=-1)
    if not rounds:
        return 0
    while len(sums.exits) <= below:
        sums.exits.append(Runs())
    for line in rounds:
        sums.exits[below].add(len(line["drafted"]), line["accepted"], "parents" in line)
    return below + 1


def measures(sums: Tally) -> Line:
    """The metrics of a tally, each divided once; None where nothing was counted. Definitions: `DEFINITIONS`."""
    decode_seconds = sum(sums.time.values())
    timed = sums.target_passes > 0 and decode_seconds > 0
    return {
        "tokens_per_second": _divide(sums.new_tokens, sums.seconds),
        "decode_tokens_per_second": _divide(sums.emitted, decode_seconds),
        "prefill_seconds": _divide(sums.prefill_seconds, sums.prefills),
        "tokens_per_verify": _divide(sums.emitted, sums.target_passes),
        "mean_drafted": _divide(sums.drafted, sums.target_passes),
        "accepted_per_verify": _divide(sums.accepted, sums.target_passes),
        "acceptance_rate": _divide(sums.accepted, sums.drafted - sums.unchecked),
        "conditional_acceptance": _rates(sums.run_kept, sums.run_reached, sums.trees),
        "conditional_counts": [] if sums.trees else list(sums.run_reached),
        "survival": _rates(sums.run_kept, sums.run_drafted, sums.trees),
        "survival_counts": [] if sums.trees else list(sums.run_drafted),
        "share": {part: sums.time[part] / decode_seconds if timed else None for part in PARTS},
        "layer_tokens_per_token": _divide(sums.layer_tokens, sums.emitted),
        "exits": [
            {
                "drafts_per_verify": _divide(runs.rounds, sums.target_passes),
                "acceptance_rate": _divide(runs.accepted, runs.drafted),
                "conditional_acceptance": _rates(runs.kept, runs.reached, runs.trees),
            }
            for runs in sums.exits
        ],
        "acceptance_by_context": {
            str(begin): _divide(sums.accepted_at[begin], drafted) for begin, drafted in sorted(sums.drafted_at.items())
        },
        "stops": dict(sorted(sums.stops.items())),
        "finishes": dict(sorted(sums.finishes.items())),
    }


def _rates(totals: list[int], counts: list[int], trees: int) -> list[float | None]:
    """By draft index; none where some drafts branched, since those that did not are no sample of all."""
    return [] if trees else [_divide(a, b) for a, b in zip(totals, counts, strict=True)]


def _divide(total: float, count: float) -> float | None:
    return total / count if count else None
