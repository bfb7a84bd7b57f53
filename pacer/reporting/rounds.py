"""Rounds as a reader sees them: where each token comes from, what became of each draft, what estimates were worth.

Everything here is a function of trace lines (schema: `pacer.decoding.trace`); times are milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from pacer.decoding.trace import ids_of
from pacer.evaluation.tally import PARTS
from pacer.evaluation.traces import Line, RequestTrace, group_requests

# Origins of an emitted token: its letter in the data of the page, its name, what that means.
ORIGINS = {
    "a": ("draft, accepted", "the draft wrote it and every verifier kept it"),
    "i": ("intermediate verifier", "of what checks drafts before the target, an exit of it or a draft model; kept"),
    "u": ("draft, unchecked", "kept though no verifier judged it: the method is lossy"),
    "c": ("correction", "the target's own token, in place of a draft token that it refused"),
    "b": ("bonus", "the target's own token, after a draft that it kept whole"),
    "t": ("target alone", "no draft was made: plain decoding"),
    "p": ("prefill", "the first token, from reading the prompt"),
}  # fmt: skip
# Fates of a drafted token.
FATES = {
    "a": ("accepted", "kept by the verifier"),
    "u": ("unchecked", "kept without being judged"),
    "r": ("refused", "the first that the verifier refused"),
    "x": ("dropped", "after a refused one: never judged"),
    "z": ("past the end", "accepted, but the text had ended before it"),
}
# Why a draft ended, as trace lines say it; other reasons are shown as they are.
STOPS = {
    "prefill": "prefill (no draft)", "off": "no drafting", "controller": "the rule stopped it", "fixed": "window full",
    "gamma_max": "longest draft reached", "eos": "end of text drafted", "budget": "token budget",
    "context": "context full", "unconfident": "the exit was not sure", "ngrams": "n-grams all written",
    "preverify": "the target looks at the first token", "postverify": "the target's pass ended",
}  # fmt: skip
BINS = 10


def fates(line: Mapping[str, Any]) -> str:
    """What became of each drafted token, a letter of FATES each."""
    drafted, branch = len(line["drafted"]), _branch(line)
    unchecked = line.get("unchecked", 0)
    found = ["x"] * drafted
    for node in _asked(line, branch):
        found[node] = "r"
    if _accepted(line) > len(branch):  # the text ended before tokens that were accepted
        found = ["z"] * drafted
    for place, node in enumerate(branch):
        found[node] = "u" if place < unchecked else "a"
    return "".join(found)


def origins(line: Mapping[str, Any]) -> str:
    """Where each emitted token of a round comes from, a letter of ORIGINS each."""
    emitted, branch = len(line["emitted"]), _branch(line)
    if line.get("round") == 0:
        return "p" * emitted
    kept = ["u" if place < line.get("unchecked", 0) else authors(line)[node] for place, node in enumerate(branch)]
    last = branch[-1] if branch else -1
    own = "t" if not line["drafted"] else "c" if last in _parents(line) else "b"  # was there more to follow the last?
    return "".join(kept) + own * (emitted - len(kept))


def authors(line: Mapping[str, Any]) -> str:
    """Who wrote each drafted token: the draft (``a``), or an exit that verified it (``i``)."""
    drafted = len(line["drafted"])
    written = "".join(
        "".join(authors(inner)[node] for node in _branch(inner)).ljust(len(inner["emitted"]), "i")
        for inner in line.get("inner", ())
    )
    return written[:drafted].ljust(drafted, "a")


def _accepted(line: Mapping[str, Any]) -> int:
    """Drafted tokens that the verifier of this round kept, an exit's or the target's."""
    found = line["accepted"]
    return found if isinstance(found, int) else found[-1] if found else 0


def _parents(line: Mapping[str, Any]) -> list[int]:
    """The drafted token that each one follows, -1: the text before. A draft without branches is a chain."""
    return list(line.get("parents", range(-1, len(line["drafted"]) - 1)))


def _branch(line: Mapping[str, Any]) -> list[int]:
    """Drafted tokens, by their number, that are in the text: from the first on, each follows the one before."""
    drafted, parents = line["drafted"], _parents(line)
    branch: list[int] = []
    for token in line["emitted"][: _accepted(line)]:
        last = branch[-1] if branch else -1
        node = next((n for n, parent in enumerate(parents) if parent == last and drafted[n] == token), None)
        if node is None:
            break
        branch.append(node)
    return branch


def _asked(line: Mapping[str, Any], branch: Sequence[int]) -> list[int]:
    """Drafted tokens that the verifier looked at and refused: what follows a kept one, or the text, and is not kept."""
    kept = {-1, *branch}
    return [node for node, parent in enumerate(_parents(line)) if parent in kept and node not in kept]


def estimates(rounds: Iterable[Mapping[str, Any]]) -> list[tuple[float, bool]]:
    """Every estimate that a rule made of a drafted token that was judged, and whether it and all before it were
    accepted."""
    return [
        (float(score), fate == "a")
        for line in rounds
        for score, fate in zip(line.get("scores", ()), fates(line), strict=False)
        if score is not None and fate not in "uz"
    ]


def binned(pairs: Sequence[tuple[float, bool]]) -> list[dict[str, Any]]:
    """Estimates in bins of equal width over [0, 1]: how many, their mean, the share accepted (None: an empty bin)."""
    scores = np.array([score for score, _ in pairs])
    kept = np.array([survived for _, survived in pairs])
    where = np.clip((scores * BINS).astype(int), 0, BINS - 1) if pairs else np.array([], int)
    found = []
    for number in range(BINS):
        mine = where == number
        n = int(mine.sum())
        mean, share = (float(part[mine].mean()) if n else None for part in (scores, kept))
        found.append({"low": number / BINS, "high": (number + 1) / BINS, "n": n, "mean": mean, "accepted": share})
    return found


def verdicts(rounds: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Rounds that a rule stopped: how many were kept whole (it could have gone on), how many held refused tokens, and
    how many tokens those drafted in vain."""
    counts = {"stopped": 0, "whole": 0, "late": 0, "in_vain": 0}
    for line in rounds:
        if line["stop"] != "controller" or not line["drafted"]:
            continue
        vain = sum(fate in "rx" for fate in fates(line))
        counts["stopped"] += 1
        counts["late" if vain else "whole"] += 1
        counts["in_vain"] += vain
    return counts


def page_data(lines: Iterable[Line], texts: Callable[[set[int]], Mapping[int, str]] | None = None) -> dict[str, Any]:
    """A trace as the page's data: requests with their rounds, what their tokens say, estimates by arm.

    Args:
        texts: the texts of ids, for traces that do not hold them; None: such ids are shown as numbers.
    """
    groups = group_requests(lines)
    known, unknown = _pieces(groups)
    if texts is not None and unknown:
        known |= {str(id): piece for id, piece in texts(unknown).items()}
    stops: dict[str, int] = {}
    requests = [
        _request(arm, benchmark, name, request, stops)
        for (arm, benchmark), group in groups.items()
        for name, request in group.items()
        if request.line is not None
    ]
    lines_of: dict[str, list[Line]] = {}
    for (arm, _), group in groups.items():
        lines_of.setdefault(arm, []).extend(line for request in group.values() for line in request.rounds)
    judged = [
        {"arm": arm, "bins": binned(pairs), **verdicts(rounds)}
        for arm, rounds in lines_of.items()
        if (pairs := estimates(rounds))
    ]
    return {
        "requests": requests,
        "texts": known,
        "stops": [[key, STOPS.get(key, key)] for key in stops],
        "judged": judged,
    }


def _pieces(groups: Mapping[tuple[str, str], Mapping[str, RequestTrace]]) -> tuple[dict[str, str], set[int]]:
    """Texts of ids by their number, and ids whose text no line holds."""
    known: dict[str, str] = {}
    wanted: set[int] = set()
    for group in groups.values():
        for request in group.values():
            wanted |= ids_of(request.rounds)
            known |= (request.line or {}).get("pieces", {})
    return known, {id for id in wanted if str(id) not in known}


def _request(arm: str, benchmark: str, name: str, request: RequestTrace, stops: dict[str, int]) -> dict[str, Any]:
    line = request.line or {}
    return {
        "arm": arm, "benchmark": benchmark, "name": name, "finish": line["finish"], "tokens": line["new_tokens"],
        "prompt": line.get("prompt_tokens"), "seconds": line["seconds"], "text": line.get("text", ""),
        "rounds": [_round(each, stops) for each in request.rounds],
    }  # fmt: skip


def _round(line: Mapping[str, Any], stops: dict[str, int]) -> dict[str, Any]:
    """A round in short keys, since there are thousands; what is empty is left out.

    Drafted ids ``d``, their fates ``f``, authors ``by`` and estimates ``s``; emitted ids ``e`` and their origins ``o``;
    ``w``: the number of its stop reason; ``ms``: its time by part; ``in``: rounds of the exit that verified before.
    """
    found: dict[str, Any] = {
        "d": line["drafted"], "f": fates(line), "e": line["emitted"], "o": origins(line), "by": authors(line),
        "w": stops.setdefault(line["stop"], len(stops)),
    }  # fmt: skip
    if any(score is not None for score in line.get("scores", ())):
        found["s"] = line["scores"]
    if "time" in line:
        found["rows"] = line.get("rows", 1)
        found["ms"] = [round(1e3 * line["time"].get(part, 0.0), 3) for part in PARTS]
    if "parents" in line:
        found["tree"] = True
    if line.get("inner"):
        found["in"] = [_round({**inner, "exit": True}, stops) for inner in line["inner"]]
    if line.get("exit"):  # what an exit writes itself is its own, whether a correction or more
        found["o"] = found["o"].translate(_EXIT)
    return found


_EXIT = str.maketrans("cbt", "iii")
