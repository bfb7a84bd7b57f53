"""Probabilities after temperature, top-k, top-p and repetition penalty; draws; a draft's signals."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LogitsProcessorList
from transformers.generation import (
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from pacer.decoding.distributions import check_sampling, draw, penalised, probabilities, seen_before, signals
from pacer.errors import UnsupportedError
from pacer.settings import SamplingSettings

VALUES = st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=12)
WITH_HOLES = st.lists(st.one_of(st.floats(-30, 30, width=32), st.just(-math.inf)), min_size=1, max_size=12)
SAMPLING = st.builds(
    SamplingSettings,
    temperature=st.one_of(st.just(0.0), st.floats(0.05, 4.0)),
    top_k=st.integers(0, 14),
    top_p=st.floats(0.01, 1.0),
)
BELOW_ONE = math.nextafter(1.0, 0.0)
UNIFORM = st.one_of(st.floats(0, BELOW_ONE), st.sampled_from([0.0, BELOW_ONE]))


@given(WITH_HOLES, SAMPLING)
def test_probabilities_are_a_distribution(values: list[float], sampling: SamplingSettings) -> None:
    values[0] = 0.0  # one id is possible
    p = probabilities(torch.tensor([values]), sampling)[0]
    assert p.dtype == torch.float32 and p.shape == (len(values),)
    assert (p >= 0).all() and p.sum().item() == pytest.approx(1, abs=1e-5)
    assert p[torch.tensor(values) == -math.inf].sum() == 0, "an impossible id stays impossible"
    assert p[torch.tensor(values) == max(values)].max() == p.max(), "the most probable id stays so (one of equal ones)"


@given(VALUES, st.integers(0, 14), st.floats(0.01, 1.0))
def test_temperature_0_is_one_hot_at_the_first_maximum(values: list[float], top_k: int, top_p: float) -> None:
    p = probabilities(torch.tensor(values), SamplingSettings(temperature=0.0, top_k=top_k, top_p=top_p))
    assert p.tolist() == [1.0 if i == values.index(max(values)) else 0.0 for i in range(len(values))]


@pytest.mark.parametrize("temperature", [1e-3, 1e-8, 1e-37, 5e-324])
@pytest.mark.parametrize("options", [{}, {"top_k": 2, "top_p": 0.5}])
def test_a_temperature_near_0_is_refused_or_greedy_but_never_nan(temperature: float, options: dict[str, float]) -> None:
    try:
        check_sampling(SamplingSettings(temperature=temperature))
    except UnsupportedError:
        return
    logits = torch.tensor([[-3.0, 12.0, 11.0, -50.0], [30.0, 0.0, -1.0, 29.0], [-2.0, -3.0, -4.0, -1.0]])
    p = probabilities(logits, SamplingSettings(temperature=temperature, **options))
    assert p.tolist() == torch.nn.functional.one_hot(logits.argmax(-1), 4).float().tolist()


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("top_k", [0, 1, 3, 11, 50])
@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 1.0])
def test_equal_to_the_warpers_of_transformers(temperature: float, top_k: int, top_p: float) -> None:
    generator = torch.Generator().manual_seed(top_k)
    logits = 3 * torch.randn(64, 11, generator=generator)
    logits[:16] = logits[:16].round()  # ties
    ids = torch.randint(0, 11, (64, 4), generator=generator)
    seen = torch.zeros(64, 11, dtype=torch.bool).scatter(1, ids, True)
    warpers = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.3), TemperatureLogitsWarper(temperature)])
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    wanted = warpers(ids, logits.clone()).softmax(-1)
    ours = probabilities(penalised(logits, seen, 1.3), SamplingSettings(temperature, top_k, top_p))
    assert torch.equal(ours > 0, wanted > 0), "the same ids are left"
    torch.testing.assert_close(ours, wanted, rtol=1e-6, atol=1e-7)


def test_probabilities_of_bfloat16_logits_are_made_in_float32() -> None:
    logits = torch.randn(5, 50, generator=torch.Generator().manual_seed(0)).bfloat16()
    sampling = SamplingSettings(temperature=0.7, top_k=20, top_p=0.9)
    assert torch.equal(probabilities(logits, sampling), probabilities(logits.float(), sampling))
    assert probabilities(logits, sampling).dtype == torch.float32
    assert probabilities(logits, SamplingSettings()).dtype == torch.float32


@given(st.lists(st.floats(0, 1, width=32), min_size=1, max_size=12), UNIFORM, st.floats(1e-3, 1e3))
def test_a_draw_is_the_inverse_of_the_cumulative_sum(weights: list[float], uniform: float, scale: float) -> None:
    """Also L6: an id of probability 0 is never drawn, at no uniform."""
    if sum(weights) < 1e-6:
        weights[-1] = 1.0
    probs = torch.tensor(weights, dtype=torch.float32) * scale
    drawn = int(draw(probs[None], torch.tensor([uniform], dtype=torch.float64)))
    assert probs[drawn] > 0
    total, below = sum(probs.tolist()), sum(probs.tolist()[:drawn])
    slack = 1e-12 * total
    assert below - slack <= uniform * total <= below + float(probs[drawn]) + slack


@given(st.lists(st.floats(0, 1, width=32), min_size=2, max_size=12), UNIFORM, UNIFORM)
def test_draws_grow_with_the_uniform(weights: list[float], first: float, second: float) -> None:
    weights[0] += 0.5
    probs, uniforms = torch.tensor([weights, weights]), torch.tensor(sorted([first, second]), dtype=torch.float64)
    low, high = draw(probs, uniforms).tolist()
    assert low <= high


def test_a_draw_ends_at_the_first_and_last_possible_id() -> None:
    probs = torch.tensor([[0.0, 0.25, 0.0, 0.75, 0.0]]).expand(3, -1)
    assert draw(probs, torch.tensor([0.0, 0.25, BELOW_ONE], dtype=torch.float64)).tolist() == [1, 3, 3]


def test_every_rare_id_of_a_large_vocabulary_can_be_drawn() -> None:
    """The sum runs in float64: in float32 ids of 1e-9 behind a sum of 1 would share one place."""
    ids = torch.tensor([1, 2, 500, 501, 25_000, 49_999])
    probs = torch.full((50_000,), 1e-9)
    probs[0] = 1.0
    middles = (1 + (ids.double() - 0.5) * 1e-9) / probs.double().sum()
    assert draw(probs.expand(len(ids), -1), middles).tolist() == ids.tolist()


@pytest.mark.parametrize("vocab", [1, 2, 7, 1000])
def test_entropy_of_a_certain_row_is_0(vocab: int) -> None:
    """A53: not NaN, whether the other logits are −∞ or only far away."""
    for low in (-math.inf, -1e30, -1e4):
        logits = torch.full((1, vocab), low)
        logits[0, 0] = 3.0
        said = signals(logits, torch.tensor([0]))
        assert said.entropy.tolist() == [0.0] and said.logprob.tolist() == [0.0]
        assert said.margin.tolist() == [100.0 if vocab > 1 else 0.0]  # as good as certain, and finite


def test_signals_are_log_probability_and_entropy_in_nats() -> None:
    logits = torch.randn(3, 2, 9, generator=torch.Generator().manual_seed(0))
    ids = torch.tensor([[0, 8], [3, 3], [1, 5]])
    logprob, entropy, margin = signals(logits, ids)
    p = logits.double().softmax(-1)
    best = p.log().sort(-1, descending=True).values
    torch.testing.assert_close(margin.double(), best[..., 0] - best[..., 1], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(entropy.double(), -(p * p.log()).sum(-1), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(logprob.double(), p.log().gather(-1, ids[..., None]).squeeze(-1), atol=1e-6, rtol=1e-6)
    assert signals(torch.zeros(1, 8), torch.tensor([2]))[1].item() == pytest.approx(math.log(8))


@given(st.data())
def test_each_position_has_seen_its_prefix_and_the_drafts_before_it(data: st.DataObject) -> None:
    """L12: a draft is seen by later positions only, so a rejected one leaves no trace in the committed row."""
    rows, g, vocab = data.draw(st.integers(1, 3)), data.draw(st.integers(0, 4)), data.draw(st.integers(1, 6))
    ids = st.integers(0, vocab - 1)
    draft = data.draw(st.lists(st.lists(ids, min_size=g, max_size=g), min_size=rows, max_size=rows))
    prefix = data.draw(st.lists(st.sets(ids), min_size=rows, max_size=rows))
    seen = torch.tensor([[i in p for i in range(vocab)] for p in prefix]).reshape(rows, vocab)
    before = seen.clone()
    found = seen_before(seen, torch.tensor(draft, dtype=torch.long).reshape(rows, g))
    pairs = zip(prefix, draft, strict=True)
    wanted = [[[i in p or i in d[:k] for i in range(vocab)] for k in range(g + 1)] for p, d in pairs]
    assert found.tolist() == wanted
    assert torch.equal(seen, before)


def test_a_penalty_of_1_changes_nothing() -> None:
    logits = torch.randn(2, 5)
    assert penalised(logits, torch.ones(2, 5, dtype=torch.bool), 1.0) is logits
    assert penalised(logits, None, 1.3) is logits


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1), ("temperature", math.nan), ("top_k", -1), ("top_p", 0.0), ("top_p", 1.01),
        ("top_p", math.nan), ("repetition_penalty", 0.0), ("repetition_penalty", -1.0),
    ],
)  # fmt: skip
def test_values_outside_their_range_are_refused(name: str, value: float) -> None:
    with pytest.raises(UnsupportedError, match=f"sampling.{name} out of range"):
        check_sampling(SamplingSettings(**{name: value}))
