"""The rounds a decoder would really make along each text, and the passes they take. Exact in tokens.

A round at ``p`` committed tokens draws what the rule says, keeps the leading run of what the text says, and adds the
target's own token: the next round starts behind it, the text ends at its stop id or the budget, as the loop does.

Shapes: T texts, R rounds, W widths of a pass.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pacer.evaluation.replay.rules import Plan
from pacer.evaluation.replay.table import Bools, Ints, Table

WIDTHS = 64  # passes over more tokens are counted as this many less one
PARTS = ("target", "draft", "preverifier", "signals")


@dataclass(frozen=True)
class Walk:
    """Rounds in order, text by text, ``(R,)``: ``row`` of the table, ``drawn``, ``drafted`` (up to a stop id),
    ``accepted``, ``emitted``; ``open``: the rule's answer lies beyond the table."""

    row: Ints
    text: Ints
    drawn: Ints
    drafted: Ints
    accepted: Ints
    emitted: Ints
    open: Bools


def walk(table: Table, plan: Plan) -> Walk:
    """Follow a plan through every text; the first output token comes from the prefill."""
    drafted = np.minimum(plan.drawn, table.counts)
    accepted = np.minimum(drafted, table.run)
    text = table.text
    left = table.prompt[text] + table.output[text] - table.start
    emitted = np.minimum(accepted + 1, left)  # an accepted stop id is the end: the target adds nothing
    following = (np.arange(len(emitted)) + emitted).tolist()
    rows: list[int] = []
    first = table.first.tolist()
    for row, end in itertools.pairwise(first):
        while row < end:
            rows.append(row)
            row = following[row]
    at = np.array(rows, dtype=np.int64)
    return Walk(at, text[at], plan.drawn[at], drafted[at], accepted[at], emitted[at], plan.open[at])


@dataclass(frozen=True)
class Usage:
    """What the texts took, ``(…, T)`` each.

    ``passes (…, T, 4, W)``: of target, draft and pre-verifier by the tokens they read, and drawn tokens whose signals a
    rule looks at (width 1). ``emitted``, ``rounds``, ``drafting`` rounds that drafted, ``drafted``, ``accepted``,
    ``open`` rounds.
    """

    passes: Ints
    emitted: Ints
    rounds: Ints
    drafting: Ints
    drafted: Ints
    accepted: Ints
    open: Ints

    def of(self, texts: Bools) -> Usage:
        """Of some of the texts ``(T,)``."""
        return Usage(
            self.passes[..., texts, :, :],
            *(value[..., texts] for name, value in vars(self).items() if name != "passes"),
        )


def stack(usages: Sequence[Usage]) -> Usage:
    """Several rules' usages along a new first axis."""
    return Usage(*(np.stack([getattr(u, name) for u in usages]) for name in Usage.__dataclass_fields__))


def usage(table: Table, plan: Plan, rounds: Walk | None = None) -> Usage:
    """Passes of the rounds that the plan leads to.

    The first draft pass of a round reads what the draft has not seen (two tokens after a full acceptance); the first
    call of the pre-verifier reads all that was verified since its last one; the last drawn token is never fed.
    """
    done = walk(table, plan) if rounds is None else rounds
    texts, text = len(table.ids), done.text
    p: Ints = table.start[done.row]
    drafts: Bools = done.drawn > 0
    after = p + np.minimum(done.drawn - 1, done.accepted)
    fed = p - _had(drafts, after, text, table.prompt)
    passes = np.zeros((texts, len(PARTS), WIDTHS), dtype=np.int64)
    _count(passes[:, 0], text, done.drawn + 1)
    _count(passes[:, 1], text[drafts], fed[drafts])
    np.add.at(passes[:, 1, 1], text[drafts], done.drawn[drafts] - 1)
    if plan.looks:
        np.add.at(passes[:, 3, 1], text, done.drawn)
    if plan.asked is not None:
        asked = plan.asked[done.row]
        called: Bools = np.asarray(asked.any(1))
        ends = np.where(asked, np.arange(1, asked.shape[1] + 1), 0)
        before = np.maximum.accumulate(np.pad(ends, ((0, 0), (1, 0)))[:, :-1], 1)  # read by the calls so far
        verified = p - _had(called, p, text, table.prompt) if table.reads_prefix else np.zeros_like(p)
        sizes = ends - before + np.where(before == 0, verified[:, None], 0)
        _count(passes[:, 2], np.repeat(text, asked.sum(1)), sizes[asked])

    def total(values: Ints | Bools) -> Ints:
        return np.bincount(text, values, texts).astype(np.int64)

    ones = np.ones(len(text), dtype=np.int64)
    columns = (done.emitted, ones, drafts, done.drafted, done.accepted, done.open)
    return Usage(passes, *(total(column) for column in columns))


def _had(used: Bools, after: Ints, text: Ints, prompt: Ints) -> Ints:
    """Tokens a model has read before each round: ``after`` its last round of this text, else the prompt."""
    order = np.where(used, np.arange(len(used)), -1)
    last = np.concatenate([[-1], np.maximum.accumulate(order)[:-1]]) if len(order) else order
    mine = (last >= 0) & (text[last] == text)
    return np.where(mine, after[last], prompt[text])


def _count(table: Ints, text: Ints, width: Ints) -> None:
    np.add.at(table, (text, np.minimum(width, WIDTHS - 1)), 1)
