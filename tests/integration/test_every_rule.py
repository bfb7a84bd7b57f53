"""What holds for every length rule, over all there are: a new one is covered by its file in conf/controller.

Whatever a rule makes of the tokens it has seen, of those of earlier rounds too, output keeps the target's distribution
and, greedy, its text; a request is the same alone and in any batch; no draft is longer than gamma_max.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pacer.decoding.controllers.base import Controller
from pacer.decoding.distributions import probabilities
from pacer.decoding.request import Request
from pacer.evaluation.stats import chi_square
from pacer.models.stack import Stack
from pacer.settings import SamplingSettings
from tests.integration.test_loop_sampling import ALPHA, CLOSE, FAR, ORDERS, TABLE, WARM, _joint, _law, _mixed, _plain
from tests.rules import KINDS, rule
from tests.tiny import generate, make_decoder, near, plain_greedy, proposer, tiny_model, tiny_stack

# Values under which lengths vary on these toys; a rule that is not here runs with those of its file.
VALUES: dict[str, dict[str, Any]] = {
    "fixed": {"gamma": 3},
    "confidence": {"gamma_max": 3},
    "threshold": {"t": 0.3, "gamma_max": 5},
    "preverifier": {"b": 2, "t0": 0.45, "gamma_max": 6},
    "svip": {"h": 0.38, "gamma_max": 5},
    "adaedl": {"t": 0.55, "epsilon": 0.5, "beta2": 0.8, "gamma_max": 5},
    "dynamic": {"t": 0.3, "gamma_max": 5},
    "heuristic": {"start": 2, "gamma_max": 5},
    "marginal": {"gamma_max": 5, "trial": 1, "wait": 2, "margin": 0.2, "weight": 0.5},
    "probe": {"gamma_max": 5},
    "specdecpp": {"t": 0.8, "gamma_max": 6},
    "marginal, pre-verified": {"signal": "preverifier", "b": 2, "gamma_max": 6, "acceptance": 0.9},
}
CASES = [*KINDS, "marginal, pre-verified"]


def made(case: str, draft: Stack) -> Controller:
    """A rule under the values of its case."""
    return rule(case.split(",")[0], draft, **VALUES.get(case, {}))


FIRST, LATER, NEW = 3, 6, 9  # tokens whose joint law is tested: the first three, and two after some rounds
VOCAB = TABLE.vocab_size


def _pairs(start: int) -> list[float]:
    """The law of tokens LATER and LATER + 1 (from 0) of the table model after a prompt that ends with ``start``."""
    p = probabilities(TABLE.readout(TABLE.embed(torch.arange(VOCAB))[None]), WARM)[0].double()
    state = torch.nn.functional.one_hot(torch.tensor(start), VOCAB).double() @ torch.linalg.matrix_power(p, LATER + 1)
    return (state[:, None] * p).flatten().tolist()


def test_the_law_of_later_tokens_is_known() -> None:
    law = _law(TABLE, [2, 0], 4, WARM).reshape(VOCAB, VOCAB, VOCAB, VOCAB)
    p = probabilities(TABLE.readout(TABLE.embed(torch.arange(VOCAB))[None]), WARM)[0].double()
    first = torch.nn.functional.one_hot(torch.tensor(0), VOCAB).double()
    torch.testing.assert_close(law.sum((0, 1, 2)), first @ torch.linalg.matrix_power(p, 4), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("case", CASES)
def test_sampling_keeps_the_distribution(case: str) -> None:
    """The seeds are fixed; on others each would raise a false alarm with probability 2e-4."""
    decoder = make_decoder(TABLE, CLOSE, made(case, CLOSE), WARM)
    results = generate(decoder, [Request(f"q{i}", [2, 0], NEW) for i in range(1000)], 500)
    assert chi_square(_joint(results, VOCAB, FIRST), _law(TABLE, [2, 0], FIRST, WARM).tolist()) > ALPHA
    later = [r.ids[LATER] * VOCAB + r.ids[LATER + 1] for r in results]
    assert chi_square(torch.bincount(torch.tensor(later), minlength=VOCAB**2).tolist(), _pairs(0)) > ALPHA
    lines: list[dict[str, Any]] = [line for r in results for line in r.rounds[1:] if line["drafted"]]
    lengths = {len(line["drafted"]) for line in lines if line["stop"] != "budget"}
    assert len(lengths) > 1 or case in ("fixed", "confidence"), "name values in VALUES under which lengths vary"
    assert len({line["accepted"][0] < len(line["drafted"]) for line in lines}) == 2


@pytest.mark.parametrize("case", CASES)
def test_greedy_output_is_the_targets_own(case: str) -> None:
    target = tiny_stack(layers=2)
    prompt = [5, 17, 3, 88, 41]
    draft = Stack(near(tiny_model(layers=2), 0.02))
    result = make_decoder(target, draft, made(case, draft)).generate([Request("g", prompt, 32)])[0]
    assert result.ids == plain_greedy(target.model, prompt, 32)
    lines: list[dict[str, Any]] = result.rounds
    assert sum(line["accepted"][0] for line in lines) > 5


SMALL = 11
TINY = tiny_stack(layers=2, vocab=SMALL)
TINY_DRAFT = Stack(near(tiny_model(layers=2, vocab=SMALL), 0.05))


@pytest.mark.parametrize("case", CASES)
def test_a_request_is_the_same_alone_in_any_batch_and_as_a_stream(case: str) -> None:
    """What was drafted, scored and accepted in every round too; also where a request takes the row of another."""
    decoder = make_decoder(TINY, TINY_DRAFT, made(case, TINY_DRAFT), SamplingSettings(2.0))
    requests = _mixed(14)
    alone = {r.request.id: ([_plain(line) for line in r.rounds], r.ids) for r in generate(decoder, requests, 1)}
    for order, slots in zip(ORDERS, (None, 2), strict=True):
        for result in decoder.generate([requests[i] for i in order], slots=slots):
            assert ([_plain(line) for line in result.rounds], result.ids) == alone[result.request.id]


@pytest.mark.parametrize("case", CASES)
def test_no_draft_is_longer_than_gamma_max(case: str) -> None:
    """A51: at a context that ends where the longest draft does, and one place before and after it."""
    longest = made(case, CLOSE).gamma_max
    prompt = [2, 0, 1]
    for context in (3 + longest, 4 + longest, 5 + longest):
        target, draft = (Stack(s.model, s.head_ids) for s in (TABLE, FAR))
        for stack in (target, draft):
            stack.context = context
        decoder = make_decoder(target, draft, made(case, draft), WARM)
        results = decoder.generate([Request(f"c{i}", prompt, 40) for i in range(20)])
        assert all(r.finish == "context" and len(prompt) + len(r.ids) == context for r in results)
        lines: list[dict[str, Any]] = [line for r in results for line in r.rounds]
        lengths = [len(line["drafted"]) for line in lines]
        assert 0 < max(lengths) <= longest


# Of each rule that has one, a value and another under which drafts are shorter.
STRICTER: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fixed": ({"gamma": 4}, {"gamma": 2}),
    "confidence": ({"gamma_max": 4}, {"gamma_max": 2}),
    "threshold": ({"t": 0.1}, {"t": 0.6}),
    "preverifier": ({"t0": 0.1}, {"t0": 0.9}),
    "svip": ({"h": 0.4}, {"h": 0.3}),
    "adaedl": ({"t": 0.3}, {"t": 0.7}),
    "dynamic": ({"t": 0.05}, {"t": 0.9}),
    "heuristic": ({"start": 9}, {"start": 1}),
    "marginal": ({"acceptance": 0.9, "weight": 100.0}, {"acceptance": 0.1, "weight": 100.0}),
    "probe": ({"t": 0.1}, {"t": 0.9}),
    "specdecpp": ({"t": 0.9}, {"t": 0.1}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_value_that_is_set_is_the_value_that_is_used(kind: str) -> None:
    """A42: lengths change with it."""
    assert kind in STRICTER, "name two values of the new rule, the stricter one last"
    means = []
    for values in STRICTER[kind]:
        decoder = make_decoder(TABLE, CLOSE, rule(kind, CLOSE, **values), WARM)
        results = decoder.generate([Request(f"q{i}", [2, 0], 10) for i in range(60)])
        lines: list[dict[str, Any]] = [line for r in results for line in r.rounds[1:-1]]
        means.append(sum(len(line["drafted"]) for line in lines) / len(lines))
    assert means[1] < 0.9 * means[0], means


@pytest.mark.parametrize("kind", KINDS)
def test_a_rule_keeps_a_record_only_where_it_reads_one(kind: str) -> None:
    found = rule(kind, CLOSE)
    assert proposer(make_decoder(TABLE, CLOSE, found)).drafter.keeps_record == found.reads_record
