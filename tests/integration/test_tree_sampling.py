"""Drafts that branch keep the target's joint distribution, before one verifier and before two.

Chi-square tests use fixed seeds; each would raise a false alarm with probability 1e-4 on other seeds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from pacer.decoding.clock import Clock
from pacer.decoding.controllers.buffer import Enough
from pacer.decoding.distributions import probabilities
from pacer.decoding.lane import Lane
from pacer.decoding.loop import Decoder
from pacer.decoding.request import Request, Result, Row
from pacer.decoding.staged import Staged
from pacer.decoding.verifier import Verifier
from pacer.evaluation.stats import chi_square
from pacer.models.stack import Stack
from pacer.settings import SamplingSettings
from tests.tiny import generate, plain_greedy, random_table, table_model
from tests.tree_decoders import DRAFT, NEW, PROMPTS, SHAPE, TARGET, _decoder, _hash, _requests, _texts
from tests.trees import KINDS, Nodes, Scripted, drawn, guessed

ALPHA = 1e-4
WARM = SamplingSettings(temperature=1.0)
VOCAB = 5
TABLE = random_table(VOCAB, 1)
STACK, CLOSE = Stack(table_model(TABLE)), Stack(table_model(TABLE + random_table(VOCAB, 2, 0.7)))
CLOSE_Q, FAR_Q = (TABLE + random_table(VOCAB, 2, 0.7)).softmax(-1), random_table(VOCAB, 3, 2.0).softmax(-1)
DRAWS, BATCH = 2000, 500
SMALL = [-1, -1, -1, 0, 1, 1, 5]


def _law(n: int, first: int = 0) -> Tensor:
    """The probability of every sequence of n tokens ``(V^n,)`` after id ``first``."""
    p, law, last = probabilities(TABLE, WARM).double(), torch.ones(1, dtype=torch.float64), torch.tensor([first])
    for _ in range(n):
        law = (law[:, None] * p[last]).flatten()
        last = torch.arange(VOCAB).repeat(len(law) // VOCAB)
    return law


def _joint(results: list[Result], n: int) -> list[int]:
    codes = [sum(t * VOCAB ** (n - 1 - k) for k, t in enumerate(r.ids[:n])) for r in results]
    return torch.bincount(torch.tensor(codes), minlength=VOCAB**n).tolist()


def _many(new: int = 4, **options: Any) -> list[Request]:
    return [Request(f"q{i}", [2, 0], new, **options) for i in range(DRAWS)]


@pytest.mark.parametrize(("kind", "q"), [*((kind, CLOSE_Q) for kind in KINDS), ("certain", FAR_Q)])
def test_sampling_keeps_the_joint_distribution(kind: str, q: Tensor) -> None:
    decoder = _decoder(drawn(SMALL, q, kind), STACK, sampling=WARM)
    results = generate(decoder, _many(), BATCH)
    assert chi_square(_joint(results, 3), _law(3).tolist()) > ALPHA
    accepted = [line["accepted"][0] for r in results for line in r.rounds[1:]]  # type: ignore[index]  # a list
    assert {accepted.count(n) > 50 for n in range(3)} == {True}


def test_a_script_that_follows_the_text_keeps_the_joint_distribution() -> None:
    """Certain trees may depend on all that was written before: n-grams of the row's own output do."""

    def grow(row: Row) -> Nodes:
        text = row.committed
        tokens = [text[-1 - (k % len(text))] for k in range(len(SMALL))]
        tokens[1] = tokens[0]  # a sibling that repeats another
        return tokens, list(SMALL), None

    results = generate(_decoder(grow, STACK, sampling=WARM), _many(), BATCH)
    assert chi_square(_joint(results, 3), _law(3).tolist()) > ALPHA


@pytest.mark.parametrize("kind", KINDS[:2])
def test_stop_ids_keep_the_joint_distribution(kind: str) -> None:
    law = _law(2).reshape(VOCAB, VOCAB).clone()
    law[2, 0], law[2, 1:] = law[2].sum(), 0.0
    decoder = _decoder(drawn(SMALL, CLOSE_Q, kind), STACK, sampling=WARM)
    results = generate(decoder, _many(4, stop_ids=frozenset([2])), BATCH)
    assert all((r.finish == "eos") == (r.ids[-1] == 2) and 2 not in r.ids[:-1] for r in results)
    pairs = [Result(r.request, [*r.ids, 0][:2], "", 0, 0) for r in results]
    assert chi_square(_joint(pairs, 2), law.flatten().tolist()) > ALPHA


def _staged(
    grow: Callable[[Row], Nodes], target: Stack, middle: Stack, sampling: SamplingSettings, bonus: bool
) -> Decoder:
    """A tree that a second model verifies before the target does."""

    class Model(Lane):
        """Nobody fills its memory but the loop."""

    lane = Model(middle)
    inner = Scripted(grow, target.context - 1, target.vocab_size)
    check = Verifier(lane, middle.readout, sampling, target.vocab_size, target.device)
    clock = Clock(target.device)

    class Own(Staged):
        def reset(self, rows: Any, capacity: int, stop_ids: Tensor) -> None:
            super().reset(rows, capacity, stop_ids)
            lane.reset(len(rows), capacity + inner.spare)

        def admit(self, index: int, row: Row) -> None:
            super().admit(index, row)
            lane.release(index)

        def end(self, before: Any, verified: Any, chosen: Any) -> None:
            super().end(before, verified, chosen)
            lane.truncate(verified)

    return Decoder(target, Own(inner, check, Enough(4), target.context, clock, bonus=bonus), sampling, clock=clock)


@pytest.mark.parametrize("bonus", [True, False])
@pytest.mark.parametrize(("batch", "slots"), [(1, None), (4, 2)])
def test_a_tree_that_an_earlier_verifier_reads(bonus: bool, batch: int, slots: int | None) -> None:
    grow = guessed(_texts(NEW, DRAFT.model), SHAPE, _hash)
    decoder = _staged(grow, TARGET, DRAFT, SamplingSettings(), bonus)
    requests = _requests()
    results = [r for i in range(0, 4, batch) for r in decoder.generate(requests[i : i + batch], slots=slots)]
    assert [r.ids for r in results] == [plain_greedy(TARGET.model, prompt, NEW) for prompt in PROMPTS]
    rounds: list[Any] = [line for r in results for line in r.rounds]
    inner = [line for outer in rounds for line in outer.get("inner", [])]
    assert {line["accepted"] for line in inner} >= {0, 4} and all(
        "parents" in line for line in inner if line["drafted"]
    )
    assert all(len(line["emitted"]) <= line["accepted"] + 1 for line in inner)


def _behind(row: Row) -> Nodes:
    """A branch of the likeliest tokens behind a first child that is hardly ever right."""
    best = CLOSE_Q.argmax(-1).tolist()
    first = best[row.committed[-1]]
    return [int(CLOSE_Q[row.committed[-1]].argmin()), first, best[first]], [-1, -1, 1], None


@pytest.mark.parametrize(
    ("grow", "bonus"),
    [(_behind, True), (drawn(SMALL, FAR_Q, "certain"), False), (drawn(SMALL, FAR_Q, "independent"), True)],
    ids=["behind another", "certain", "independent"],
)
def test_two_verifiers_of_a_tree_keep_the_joint_distribution(grow: Callable[[Row], Nodes], bonus: bool) -> None:
    """L17: the second test uses what the buffer is distributed as, row by row of the accepted branch."""
    decoder = _staged(grow, STACK, CLOSE, WARM, bonus)
    results = generate(decoder, _many(5), BATCH)
    assert chi_square(_joint(results, 3), _law(3).tolist()) > ALPHA
