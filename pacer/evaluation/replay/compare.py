"""Replay beside measurement: rounds exactly, speed by the cost model. A function of a trace and of the table of its AR.

The unit of time is AR measured in the same run, benchmark by benchmark; AR's own point is therefore right by
construction. A round that differs is a *near-tie* where something that decides it is closer than 1e-4 to deciding
otherwise: two logits of the target, two of the draft, or a signal and its threshold.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from pacer.data.corpus import Text
from pacer.decoding.parts import resolved
from pacer.decoding.request import Request
from pacer.errors import ConfigError, PacerError
from pacer.evaluation.profiler import Point
from pacer.evaluation.replay import rules
from pacer.evaluation.replay.costs import from_points
from pacer.evaluation.replay.table import Table
from pacer.evaluation.replay.walk import Walk, usage, walk
from pacer.evaluation.traces import Line, Requests, group_requests, paired_prompts
from pacer.methods.arms import method_settings

NEAR = 1e-4
Margin = Callable[[Sequence[int]], float]  # the target's top-2 difference of logits after a prefix


def ar_texts(lines: Sequence[Line], requests: Mapping[str, Mapping[str, Request]]) -> list[Text]:
    """The texts of the AR arm, benchmark by benchmark, of the prompts that every arm finished.

    Args:
        requests: benchmark → name → request.

    Raises:
        ConfigError: the trace has no AR arm.
    """
    groups = group_requests(lines)
    texts = []
    for benchmark in dict.fromkeys(b for _, b in groups):
        finished = groups.get(("ar", benchmark), {})
        for name in paired_prompts(groups, benchmark):
            if name not in finished:
                raise ConfigError("no AR arm to replay on", value=benchmark, remedy="measure the arm ar too")
            asked, line = requests[benchmark][name], finished[name].line
            assert line is not None
            ids = list(line["ids"])
            texts.append(Text(name, benchmark, list(asked.prompt_ids), ids, line["finish"] != "eos"))
    return texts


def replayable(arms: Sequence[str], tuned: Mapping[str, Any] | None) -> tuple[dict[str, rules.Rule], dict[str, str]]:
    """The arms' rules, and why the others cannot be replayed."""
    found: dict[str, rules.Rule] = {}
    refused: dict[str, str] = {}
    for arm in arms:
        try:
            found[arm] = rules.rule_of(arm, tuned)
        except PacerError as error:
            refused[arm] = str(error)
    return found, refused


def compare_rounds(
    table: Table, texts: Sequence[Text], groups: Mapping[tuple[str, str], Requests], arm: str, rule: rules.Rule,
    tuned: Mapping[str, Any] | None, margin: Margin,
) -> dict[str, Any]:  # fmt: skip
    """Every round of every request: committed, drafted, accepted, emitted. After a difference, the rounds that begin at
    the same place are still compared; beyond a difference of the texts none is."""
    done = walk(table, rule(table))
    found: dict[str, Any] = {"arm": arm, "rounds": 0, "tokens": 0, "skipped": 0, "near_ties": [], "differences": []}
    for number, text in enumerate(texts):
        measured = groups[arm, text.task][text.id]
        assert measured.line is not None
        mine, row_at = _rounds(table, done, number)
        theirs = {r["committed"]: (len(r["drafted"]), r["accepted"][0], len(r["emitted"])) for r in measured.rounds[1:]}
        end, events = _same_up_to(text, measured.line["ids"], margin)
        for start, got in theirs.items():
            if start + got[2] > end or start not in mine:
                found["skipped"] += 1
                continue
            found["rounds"], found["tokens"] = found["rounds"] + 1, found["tokens"] + got[2]
            if got != mine[start]:
                most = max(got[0], mine[start][0]) + 1
                gap = min(_target_gap(text, start, most, margin), _own_gap(table, row_at[start], arm, tuned, most))
                events.append({"committed": start, "replayed": mine[start], "measured": got, "gap": gap})
        if not events and list(mine) != list(theirs):
            events.append({"committed": None, "replayed": len(mine), "measured": len(theirs), "gap": 1e9})
        for event in events:
            kind = "near_ties" if event["gap"] < NEAR else "differences"
            found[kind].append({"arm": arm, "prompt": text.id, **event})
    return found


def _rounds(table: Table, done: Walk, text: int) -> tuple[dict[int, tuple[int, int, int]], dict[int, int]]:
    """(drafted, accepted, emitted) of a text's rounds, and their rows, by committed length."""
    mine = np.flatnonzero(done.text == text)
    starts, rows = table.start[done.row[mine]].tolist(), done.row[mine].tolist()
    columns = (done.drafted[mine].tolist(), done.accepted[mine].tolist(), done.emitted[mine].tolist())
    return dict(zip(starts, zip(*columns, strict=True), strict=True)), dict(zip(starts, rows, strict=True))


def _same_up_to(text: Text, ids: Sequence[int], margin: Margin) -> tuple[int, list[dict[str, Any]]]:
    """How far an arm wrote AR's text (in committed tokens), and the event that ended it."""
    first, wrote = len(text.prompt_ids), text.output_ids
    if list(ids) == wrote:
        return first + len(ids), []
    same = next((i for i, (a, b) in enumerate(zip(ids, wrote, strict=False)) if a != b), min(len(ids), len(wrote)))
    gap = margin([*text.prompt_ids, *wrote[:same]]) if same < min(len(ids), len(wrote)) else 1e9
    return first + same, [{"committed": first + same, "replayed": "AR's text", "measured": "another", "gap": gap}]


def _target_gap(text: Text, start: int, count: int, margin: Margin) -> float:
    """The smallest top-2 difference of the target in a round."""
    path = [*text.prompt_ids, *text.output_ids]
    return min(margin(path[:end]) for end in range(start, min(start + count, len(path) + 1)))


def _own_gap(table: Table, row: int, arm: str, tuned: Mapping[str, Any] | None, count: int) -> float:
    """How close the draft and the rule were to deciding otherwise in this round."""
    count = min(count, table.width)
    gaps = [*table.signals["margin"][row, :count]]
    controller = method_settings(arm).controller or {}
    values = resolved(controller, tuned)
    if controller.get("kind") == "threshold":
        name = "product" if values["rule"] == "product" else values["signal"]
        gaps += [*np.abs(rules.signal(table, name)[row, :count] - values["t"])]
    if controller.get("kind") == "preverifier":
        for k, start in enumerate(range(0, count, values["b"])):
            block = table.signals["score"][row : row + 1, start : start + values["b"]]
            value = rules.BLOCK_VALUES[values.get("rule", "mean")](block)[0]
            gaps.append(abs(value - values["t0"] * values.get("rho", 1.0) ** k))
            sure = float(np.exp(table.signals["logprob"][row, start : start + values["b"]].sum()))
            gaps += [abs(sure - values[name]) for name in ("lo", "hi") if name in values]
    return float(np.nanmin(gaps))


def compare_speeds(
    table: Table, texts: Sequence[Text], groups: Mapping[tuple[str, str], Requests], found: Mapping[str, rules.Rule],
    points: Sequence[Point], rest: float = 0.0,
) -> list[dict[str, Any]]:  # fmt: skip
    """Predicted and measured decoded tokens/s of each arm on each benchmark, prefill left out, none omitted.

    Args:
        rest: what a drafting round takes beyond its passes and beyond a round of plain decoding, whose own overhead is
            the phase `rest` of AR. Nothing of the arms' own times enters their prediction.
    """
    out = []
    for benchmark in dict.fromkeys(table.tasks):
        mask = np.array([task == benchmark for task in table.tasks])
        names = [text.id for text in texts if text.task == benchmark]
        context = float(table.start[mask[table.text]].mean())
        tokens, seconds = decoded(groups["ar", benchmark], names)
        overhead = decoded(groups["ar", benchmark], names, "rest")[1] / tokens  # AR: a token is a round
        prices = from_points(points, context, rest, 1e3 * overhead)
        for arm, rule in found.items():
            measured_tokens, measured_seconds = decoded(groups[arm, benchmark], names)
            ratio = float(prices.ratio(usage(table, rule(table)).of(mask)))
            predicted, measured = tokens / seconds * ratio, measured_tokens / measured_seconds
            out.append({"arm": arm, "benchmark": benchmark, "predicted": predicted, "measured": measured,
                        "error": predicted / measured - 1, "by_construction": arm == "ar"})  # fmt: skip
    return out


def decoded(requests: Requests, names: Sequence[str], phase: str | None = None) -> tuple[int, float]:
    """Tokens and seconds of the rounds after the prefill, or of one phase of them."""
    lines = [line for name in names for line in requests[name].rounds[1:]]
    times = [line["time"] if phase is None else {phase: line["time"].get(phase, 0.0)} for line in lines]
    return sum(len(line["emitted"]) for line in lines), sum(sum(time.values()) for time in times)
