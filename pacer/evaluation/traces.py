"""Reading traces (schema: `pacer.decoding.trace`): lines to requests, pairing of arms, comparison of ids."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pacer.errors import ConfigError

Line = dict[str, Any]
FINISHED = ("eos", "length", "stop_string", "context")  # any other `finish` of a request counts as failed


@dataclass
class RequestTrace:
    """One request of one arm: its rounds in order and its closing line (None while unfinished)."""

    rounds: list[Line] = field(default_factory=list)
    line: Line | None = None

    @property
    def finished(self) -> bool:
        return self.line is not None and self.line["finish"] in FINISHED


Requests = dict[str, RequestTrace]  # by request name, in order of appearance


def load_trace(path: Path) -> list[Line]:
    """The lines of a JSON-lines trace; a last line cut by an interruption is dropped.

    Raises:
        ConfigError: any other line is not a JSON object.
    """
    texts = path.read_text(encoding="utf-8", errors="replace").split("\n")
    lines: list[Line] = []
    for number, text in enumerate(texts, start=1):
        if not text.strip():
            continue
        try:
            line = json.loads(text)
            if not isinstance(line, dict):
                raise ValueError("not an object")
        except ValueError as error:
            if number == len(texts):  # the file does not end in a newline: the writer was stopped inside this line
                break
            raise ConfigError(f"{path}, line {number}: not a JSON object", remedy="restore the trace") from error
        lines.append(line)
    return lines


def group_requests(lines: Iterable[Line]) -> dict[tuple[str, str], Requests]:
    """Requests by (arm, benchmark). A round 0 starts a request anew: of a repeated request the last attempt counts."""
    groups: dict[tuple[str, str], Requests] = {}
    for line in lines:
        requests = groups.setdefault((line["arm"], line["benchmark"]), {})
        request = requests.setdefault(line["request"], RequestTrace())
        if line["kind"] == "request":
            request.line = line
        elif line["kind"] == "round":
            if line["round"] == 0:
                request = requests[line["request"]] = RequestTrace()
            request.rounds.append(line)
    return groups


def check_trace(lines: Iterable[Line]) -> list[str]:
    """What contradicts itself in a trace, one sentence each; empty for a sound one."""
    problems = []
    for (arm, _), requests in group_requests(lines).items():
        for name, request in requests.items():
            where = f"{arm}, {name}"
            for line in request.rounds:
                if line["accepted"] and line["accepted"][-1] > len(line["drafted"]):
                    problems.append(f"{where}, round {line['round']}: more accepted than drafted")
                if len(line["emitted"]) > len(line["drafted"]) + 1:
                    problems.append(f"{where}, round {line['round']}: more emitted than drafted + 1")
                if "parents" in line and not _is_branch(line):
                    problems.append(f"{where}, round {line['round']}: what was accepted is no branch of the tree")
            if request.line is None:
                continue
            if len(request.line["ids"]) != request.line["new_tokens"]:
                problems.append(f"{where}: new_tokens is not the number of ids")
            if request.rounds and [t for r in request.rounds for t in r["emitted"]] != request.line["ids"]:
                problems.append(f"{where}: the emitted tokens of the rounds are not the ids of the request")
    return problems


def _is_branch(line: Line) -> bool:
    """Whether the accepted tokens of a round, as far as they were emitted, are a branch of its tree."""
    drafted, parents = line["drafted"], line["parents"]
    if len(parents) != len(drafted) or not all(-1 <= parent < node for node, parent in enumerate(parents)):
        return False
    reached = {-1}
    for token in line["emitted"][: line["accepted"][-1]]:
        children = zip(parents, drafted, strict=True)
        reached = {node for node, (parent, own) in enumerate(children) if parent in reached and own == token}
    return bool(reached)


def paired_prompts(groups: Mapping[tuple[str, str], Requests], benchmark: str) -> list[str]:
    """Names of the prompts finished by every arm of the benchmark that finished any, in the first such arm's order."""
    finished = [[n for n, r in requests.items() if r.finished] for (_, b), requests in groups.items() if b == benchmark]
    finished = [names for names in finished if names]
    common = set(finished[0]).intersection(*finished) if finished else set()
    return [name for name in finished[0] if name in common] if finished else []


def request_values(requests: Requests, names: Sequence[str]) -> tuple[list[int], list[float]]:
    """New tokens and wall seconds of the named requests, in that order: what the bootstrap resamples."""
    lines = [line for name in names if (line := requests[name].line) is not None]
    return [line["new_tokens"] for line in lines], [line["seconds"] for line in lines]


def waits(requests: Requests, names: Sequence[str]) -> dict[str, float | None]:
    """What users of the named requests wait for, in seconds: medians and 95th percentiles; None where not recorded."""
    chosen = [requests[name] for name in names]
    whole = [float(r.line["latency"]) for r in chosen if r.line is not None and "latency" in r.line]
    first = [sum(r.rounds[0]["time"].values()) for r in chosen if r.rounds]
    return {
        f"{what}_p{q}": float(np.percentile(values, q)) if len(values) == len(names) > 0 else None
        for what, values in (("latency_seconds", whole), ("first_token_seconds", first))
        for q in (50, 95)
    }


def agreement(requests: Requests, reference: Requests | None) -> dict[str, float | None]:
    """Shares of prompts whose ids are equal, and of tokens before the first difference (of the longer text's)."""
    pairs = _both(requests, reference or {})
    longest = sum(max(len(a), len(b)) for _, a, b in pairs)
    return {
        "same_requests": sum(a == b for _, a, b in pairs) / len(pairs) if pairs else None,
        "same_tokens": sum(_parting(a, b) for _, a, b in pairs) / longest if longest else None,
    }


def _parting(one: Sequence[int], other: Sequence[int]) -> int:
    """Where two texts first differ; where one goes on, that is the other's end."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def _both(requests: Requests, reference: Requests) -> list[tuple[str, list[int], list[int]]]:
    """Name and ids of the prompts finished in both."""
    lines = [(name, r.line, reference[name].line) for name, r in requests.items() if r.finished and name in reference]
    return [(name, a["ids"], b["ids"]) for name, a, b in lines if a and b and b["finish"] in FINISHED]


def compare_ids(requests: Requests, reference: Requests | None) -> tuple[bool | None, str]:
    """Whether the ids of all prompts finished in both are equal, and a detail naming the first that differs."""
    if reference is None:
        return None, "no AR arm in this run"
    pairs = _both(requests, reference)
    if not pairs:
        return None, "no prompt finished by this arm and AR"
    different = [(name, a, b) for name, a, b in pairs if a != b]
    detail = f"{len(pairs) - len(different)}/{len(pairs)} identical"
    if different:
        name, a, b = different[0]
        detail += f"; {name} differs at {_parting(a, b)}"
    return not different, detail
