"""The cost model over tables: PACER's rule as the paper words it, as the decoder does it, and what must be monotone."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pacer.data.labels import draft_rounds
from pacer.data.packing import pack
from pacer.decoding.controllers.preverifier import PreverifierRule
from pacer.evaluation.simulate import best_fixed, blockwise, fixed, oracle, outcome, round_cost, tune
from pacer.settings import CostSettings
from pacer.training.preverify import packed_logits
from tests.texts import draft, path, requests, target, written
from tests.tiny import make_decoder, make_preverifier

COSTS = CostSettings(draft=0.2, preverify=0.05, token=0.01, rest=0.03)
EIGHTHS = st.integers(0, 8).map(lambda i: i / 8)  # sums of these are exact


def literal(
    scores: list[float], count: int, b: int, t0: float, rho: float, gamma_max: int, rule: str
) -> tuple[int, int]:
    """Draft length and calls of one round, step by step; ``count``: tokens up to and with a stop id."""
    top = min(gamma_max, len(scores))
    drawn = calls = blocks = 0
    while True:
        block = scores[drawn : min(drawn + b, top)]
        drawn += len(block)
        if drawn == top:
            return min(drawn, count), calls  # nothing left to decide
        calls += 1
        if count <= drawn:
            return count, calls  # a stop id was drawn
        value = {"mean": sum(block) / len(block), "min": min(block), "product": float(np.prod(block))}[rule]
        if value < t0 * rho**blocks:
            return drawn, calls
        blocks += 1


@settings(deadline=None)
@given(st.data())
def test_blockwise_is_the_rule(data: st.DataObject) -> None:
    width = data.draw(st.integers(1, 9))
    rounds = data.draw(st.integers(1, 5))
    scores = [data.draw(st.lists(EIGHTHS, min_size=width, max_size=width)) for _ in range(rounds)]
    counts = data.draw(st.lists(st.integers(1, width), min_size=rounds, max_size=rounds))
    b, gamma_max = data.draw(st.integers(1, 10)), data.draw(st.integers(1, 10))
    t0, rho = data.draw(EIGHTHS), data.draw(st.sampled_from([0.5, 1.0, 1.25, 2.0]))
    rule = data.draw(st.sampled_from(["mean", "min", "product"]))
    lengths, calls = blockwise(np.array(scores), np.array(counts), b, t0, rho, gamma_max, rule)
    wanted = [literal(row, n, b, t0, rho, gamma_max, rule) for row, n in zip(scores, counts, strict=True)]
    assert list(zip(lengths.tolist(), calls.tolist(), strict=True)) == wanted


class Counted(PreverifierRule):
    """PACER's controller, calls counted."""

    calls = 0

    def judge(self, *args: object) -> tuple[Tensor | None, Tensor | None]:
        self.calls += 1
        return super().judge(*args)  # type: ignore[arg-type]  # passed on as they came


RULES = [(1, 0.5, 1.0, "mean"), (2, 0.45, 1.1, "mean"), (3, 0.3, 1.0, "product"), (2, 0.4, 0.9, "min")]


@pytest.mark.parametrize("rule", RULES)
def test_blockwise_is_what_the_decoder_does(rule: tuple[int, float, float, str]) -> None:
    """Lengths and calls of every round of real decoding, from scores of packed simulated rounds."""
    b, t0, rho, name = rule
    gamma, stops = 7, (51, 75)
    module = make_preverifier(draft(), gamma_max=gamma)
    compared = ended = 0
    for text, request in zip(written(12, stop_ids=stops), requests(12, stop_ids=stops), strict=True):
        if len(text.output_ids) < 3:
            continue
        first = len(text.prompt_ids) + 1
        rounds = draft_rounds(draft(), text, torch.arange(first, len(path(text))), gamma, stops)
        scores = np.zeros((len(rounds.starts), gamma))
        packed = packed_logits(module, pack([[(text, rounds)]], "survival")).sigmoid()[0, len(path(text)) :]
        scores[np.arange(gamma) < rounds.counts[:, None].numpy()] = packed.double().numpy()
        lengths, calls = blockwise(scores, rounds.counts.numpy(), b, t0, rho, gamma, name)
        lines: list[tuple[dict[str, object], int]] = []
        controller = Counted(module, b, t0, rho, gamma, name)
        decoder = make_decoder(target(), draft(), controller)
        result = decoder.generate([request], lambda row, line, c=controller, to=lines: to.append((line, c.calls)))[0]
        assert result.ids == text.output_ids
        for (_, before), (line, after) in itertools.pairwise(lines):
            at = int(str(line["committed"])) - first
            if request.max_new_tokens - at - 2 < gamma:  # the budget is not part of the simulation
                continue
            assert (len(line["drafted"]), after - before) == (lengths[at], calls[at])
            assert line["accepted"] == [min(int(lengths[at]), int(rounds.accepted[at]))]
            compared += 1
            ended += line["stop"] == "eos"
    assert compared > 40 and ended > 0


def test_costs_and_outcome_by_hand() -> None:
    lengths, calls, accepted = np.array([0, 3, 2]), np.array([0, 1, 2]), np.array([4, 1, 2])
    assert round_cost(COSTS, lengths, calls) == pytest.approx([1.03, 1.71, 1.55])
    found = outcome(lengths, calls, accepted, COSTS)
    assert found.speedup == pytest.approx((1 + 2 + 3) / (1.03 + 1.71 + 1.55))
    assert (found.tokens_per_verify, found.drafted, found.accepted) == pytest.approx((2.0, 5 / 3, 1.0))


def test_no_draft_is_plain_decoding() -> None:
    found = fixed(np.array([3, 0, 2]), np.array([5, 5, 5]), 0, CostSettings(rest=0.0))
    assert (found.speedup, found.tokens_per_verify, found.drafted, found.accepted) == (1.0, 1.0, 0.0, 0.0)


def tables(seed: int, rounds: int = 200, gamma: int = 8) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Scores that tell something about the accepted length, counts, accepted."""
    rng = np.random.default_rng(seed)
    counts = np.where(rng.random(rounds) < 0.2, rng.integers(1, gamma + 1, rounds), gamma)
    accepted = np.minimum(rng.geometric(0.4, rounds) - 1, counts)
    truth = np.arange(gamma) < accepted[:, None]
    return np.clip(0.25 + 0.5 * truth + 0.3 * rng.standard_normal((rounds, gamma)), 0, 1), counts, accepted


@pytest.mark.parametrize("seed", range(3))
def test_the_oracle_bounds_and_tuning_finds_the_best(seed: int) -> None:
    scores, counts, accepted = tables(seed)
    values, found = tune(scores, counts, accepted, COSTS, 8)
    best = oracle(accepted, COSTS)
    gamma, window = best_fixed(accepted, counts, COSTS, 8)
    assert window == fixed(accepted, counts, gamma, COSTS)
    for g in range(9):
        assert fixed(accepted, counts, g, COSTS).speedup <= window.speedup <= best.speedup
    again = outcome(*blockwise(scores, counts, values["b"], values["t0"], values["rho"], 8), accepted, COSTS)  # type: ignore[arg-type]  # b is whole
    assert again == found and found.speedup <= best.speedup
    for b, t0, rho in itertools.product((1, 2, 5), (0.1, 0.4, 0.8), (1.0, 1.2)):
        lengths, calls = blockwise(scores, counts, b, t0, rho, 8)
        assert outcome(lengths, calls, accepted, COSTS).speedup <= found.speedup
    smaller, less = tune(scores, counts, accepted, COSTS, 8, blocks=(2, 3), thresholds=(0.3, 0.5), growths=(1.0,))
    assert less.speedup <= found.speedup and smaller["b"] in (2, 3)


def test_higher_thresholds_never_lengthen_and_calls_cost() -> None:
    scores, counts, accepted = tables(7)
    before, _ = blockwise(scores, counts, 2, 0.0, 1.0, 8)
    assert (before == np.minimum(counts, 8)).all()
    for t0 in np.arange(0.05, 1.01, 0.05):
        now, calls = blockwise(scores, counts, 2, float(t0), 1.0, 8)
        assert (now <= before).all() and (calls >= 1).all()
        before = now
    cheap, dear = (CostSettings(preverify=cost) for cost in (0.0, 0.5))
    assert tune(scores, counts, accepted, cheap, 8)[1].speedup > tune(scores, counts, accepted, dear, 8)[1].speedup


def test_perfect_scores_reach_the_oracle_where_calls_are_free() -> None:
    """The rule must draw the first rejected token to see it, the oracle does not: free drafts make them equal."""
    _, counts, accepted = tables(1)
    scores = (np.arange(8) < accepted[:, None]).astype(float)
    free = CostSettings(draft=0.0, preverify=0.0, token=0.0)
    assert tune(scores, counts, accepted, free, 8)[1].speedup == pytest.approx(oracle(accepted, free).speedup)


def test_gamma_max_limits_blocks() -> None:
    scores, counts, accepted = tables(2)
    values, found = tune(scores, counts, accepted, COSTS, 2)
    assert values["b"] <= 2 and found.drafted <= 2
    lengths, calls = blockwise(np.ones((1, 8)), np.array([8]), 3, 0.5, 1.0, 8)
    assert (lengths.tolist(), calls.tolist()) == ([8], [2])  # 3, 3, then the 2 that fit, which nobody judges
