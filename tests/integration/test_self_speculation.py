"""Drafting and verifying with exits of the target itself: the output is the target's own, no layer runs twice."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pacer.decoding.controllers.base import Controller
from pacer.decoding.controllers.buffer import BufferRule, Stops
from pacer.decoding.controllers.fixed import Fixed
from pacer.decoding.controllers.threshold import Threshold
from pacer.decoding.distributions import probabilities
from pacer.decoding.ladder import Ladder
from pacer.decoding.loop import Decoder
from pacer.decoding.propose import Proposer
from pacer.decoding.request import Request, Result, Row
from pacer.decoding.staged import Staged
from pacer.errors import ConfigError
from pacer.evaluation.stats import chi_square
from pacer.models.stack import FAMILIES, Stack
from pacer.settings import SamplingSettings
from tests.exits import DEPTHS, LAYERS, confident, early_model, heads, self_speculative
from tests.tiny import generate, hf_generate, prompts

NEW = 22
TARGET = Stack(early_model())
HEADS, ADAPTERS = heads(TARGET), heads(TARGET, kind="adapter")
THREE = heads(TARGET, (1, 2, 4))
PROMPTS = prompts([5, 14, 8, 1])
Make = Callable[[], Decoder]

METHODS: dict[str, Make] = {
    "layerskip": lambda: self_speculative(TARGET, HEADS[:1], Fixed(3), ()),
    "kangaroo": lambda: self_speculative(TARGET, ADAPTERS[:1], Threshold(t=0.6, gamma_max=6), ()),
    "hispec": lambda: self_speculative(TARGET, HEADS, Fixed(2), (4,)),
    "hispec, no bonus": lambda: self_speculative(TARGET, HEADS, Fixed(2), (4,), bonus=False),
    "hispec, buffer of 1": lambda: self_speculative(TARGET, HEADS, Fixed(1), (1,)),
    "hispec, long": lambda: self_speculative(TARGET, HEADS, Fixed(4), (9,)),
    "hispec, adapters": lambda: self_speculative(TARGET, ADAPTERS, Fixed(3), (5,)),
    "hispec, rows go when full": lambda: self_speculative(TARGET, HEADS, Fixed(2), (5,), share=0.01),
    "hispec, half of the rows": lambda: self_speculative(TARGET, HEADS, Fixed(2), (5,), bonus=False, share=0.5),
    "three stages": lambda: self_speculative(TARGET, THREE, Fixed(2), (3, 6)),
    "three stages, when full": lambda: self_speculative(TARGET, THREE, Fixed(2), (3, 6), bonus=False, share=0.01),
    "adadecode": lambda: confident(TARGET, HEADS, 0.12),
    "adadecode, always sure": lambda: confident(TARGET, HEADS, 0.0),
    "adadecode, never sure": lambda: confident(TARGET, HEADS, 1.0),
    "adadecode, adapters": lambda: confident(TARGET, ADAPTERS, 0.1, 3),
}


def _requests(new: int = NEW, **options: Any) -> list[Request]:
    return [Request(f"r{i}", prompt, new, **options) for i, prompt in enumerate(PROMPTS)]


@pytest.fixture(scope="module")
def wanted() -> list[list[int]]:
    """What transformers generates."""
    reference = early_model()
    return [hf_generate(reference, prompt, NEW) for prompt in PROMPTS]


def _check_traces(results: Sequence[Result]) -> None:
    for result in results:
        assert [t for line in result.rounds for t in line["emitted"]] == result.ids
        for line in result.rounds:
            accepted, drafted = line["accepted"][-1], line["drafted"]
            assert line["emitted"][:accepted] == drafted[: min(accepted, len(line["emitted"]))]
            for inner in line.get("inner", []):
                assert inner["emitted"][: inner["accepted"]] == inner["drafted"][: inner["accepted"]]
            buffered = [t for inner in line.get("inner", []) for t in inner["emitted"]]
            assert "inner" not in line or buffered[: len(drafted)] == drafted


@pytest.mark.parametrize(("batch", "slots"), [(1, None), (4, None), (4, 2), (4, 3)])
@pytest.mark.parametrize("name", METHODS)
def test_greedy_output_is_the_targets_own(name: str, batch: int, slots: int | None, wanted: list[list[int]]) -> None:
    decoder = METHODS[name]()
    asked = _requests()
    parts = [decoder.generate(asked[i : i + batch], slots=slots) for i in range(0, len(asked), batch)]
    results = list(itertools.chain.from_iterable(parts))
    assert [r.ids for r in results] == wanted
    _check_traces(results)
    drafted = sum(len(line["drafted"]) for r in results for line in r.rounds)
    accepted = sum(line["accepted"][-1] for r in results for line in r.rounds)
    if name != "adadecode, never sure":
        assert 0 < accepted < drafted, "the test has seen both"


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family(family: str) -> None:
    model = early_model(family)
    target = Stack(model)
    wanted = [hf_generate(early_model(family), prompt, 12) for prompt in PROMPTS]
    for found, rules in ((heads(target)[:1], ()), (heads(target), (4,))):
        assert [r.ids for r in self_speculative(target, found, Fixed(2), rules).generate(_requests(12))] == wanted


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["hispec", "hispec, no bonus", "three stages", "layerskip", "adadecode"]),
    st.integers(1, 9),
    st.integers(0, 3),
    st.sets(st.integers(0, 96), max_size=12),
)
def test_budgets_and_stop_ids_anywhere(name: str, new: int, which: int, stops: set[int]) -> None:
    """S29, S33, S34: in a draft, in a buffer, as an exit's own token."""
    request = Request("r", PROMPTS[which], new, frozenset(stops))
    plain = Decoder(TARGET).generate([request])[0]
    found = METHODS[name]().generate([request])[0]
    assert (found.ids, found.finish) == (plain.ids, plain.finish)


@pytest.mark.parametrize("name", ["hispec", "three stages", "hispec, no bonus", "layerskip", "adadecode"])
def test_at_the_end_of_the_context(name: str) -> None:
    """S37: drafts and buffers shrink to the room that is left."""
    prompt = prompts([TARGET.context - 9])[0]
    request = Request("r", prompt, 50)
    plain = Decoder(TARGET).generate([request])[0]
    found = METHODS[name]().generate([request])[0]
    assert (found.ids, found.finish) == (plain.ids, "context")


def test_no_layer_runs_twice() -> None:
    """C28: what a round runs is what its tokens need. Per inner round: the token before the draft and the draft, on
    the layers up to the exit that verifies; then that exit's own last token there; then everything on the rest."""
    high = DEPTHS[1]
    (result,) = METHODS["hispec"]().generate(_requests()[1:2])
    assert result.rounds[0]["layer_tokens"] == len(PROMPTS[1]) * LAYERS
    for line in result.rounds[1:]:
        inner, drafted = line["inner"], len(line["drafted"])
        read = sum(1 + len(one["drafted"]) for one in inner)
        own_is_last = not inner or len(inner[-1]["emitted"]) > inner[-1]["accepted"]
        assert line["layer_tokens"] == (read + own_is_last) * high + (1 + drafted) * (LAYERS - high)
    (skip,) = METHODS["layerskip"]().generate(_requests()[1:2])
    for line in skip.rounds[1:]:
        assert line["layer_tokens"] == (1 + len(line["drafted"])) * LAYERS


def test_exits_by_confidence_run_each_layer_once_per_token() -> None:
    (result,) = METHODS["adadecode, always sure"]().generate(_requests()[:1])
    for line in result.rounds[1:]:
        assert line["layer_tokens"] == (1 + len(line["drafted"])) * LAYERS
    (result,) = METHODS["adadecode, never sure"]().generate(_requests()[:1])
    assert all(line["layer_tokens"] == LAYERS and line["drafted"] == [] for line in result.rounds[1:])
    assert {line["stop"] for line in result.rounds[1:-1]} == {"unconfident"}


def test_depths_that_are_none_are_refused() -> None:
    for depths in ((0, LAYERS), (4, 2, LAYERS), (2, 2, LAYERS), (2, 4)):
        with pytest.raises(ConfigError, match="exits of the method"):
            Ladder(TARGET, depths)


VOCAB = 5
SMALL = Stack(early_model(layers=3, vocab=VOCAB, fade=0.7, seed=4))
SMALL_HEADS = heads(SMALL, (1, 2))
WARM = SamplingSettings(temperature=1.0)
DRAWS, BATCH = 3000, 300


class Whim(BufferRule):
    """Full when the last token is odd: on the value of what was drawn."""

    longest = 6

    def judge(self, rows: Sequence[Row], numbers: Sequence[int], buffered: list[int], fresh: list[int]) -> Stops:
        full = [row.committed[-1] % 2 > 0 or have >= self.longest for row, have in zip(rows, buffered, strict=True)]
        return ["whim" if is_full else None for is_full in full], [[] for _ in full]


SAMPLERS: dict[str, Callable[[SamplingSettings], Decoder]] = {
    "layerskip": lambda s: self_speculative(SMALL, SMALL_HEADS[:1], Fixed(2), (), s),
    "hispec": lambda s: self_speculative(SMALL, SMALL_HEADS, Fixed(2), (3,), s),
    "hispec, no bonus": lambda s: self_speculative(SMALL, SMALL_HEADS, Fixed(2), (3,), s, bonus=False),
    "hispec, on a whim": lambda s: self_speculative(SMALL, SMALL_HEADS, Fixed(1), (Whim(),), s),
    "hispec, when full": lambda s: self_speculative(SMALL, SMALL_HEADS, Fixed(2), (3,), s, share=0.01),
    "adadecode": lambda s: confident(SMALL, SMALL_HEADS, 0.4, 4, s),
}


def _law(prompt: list[int], n: int) -> list[float]:
    law = torch.ones(1, dtype=torch.float64)
    for k in range(n):
        texts = torch.tensor([[*prompt, *tail] for tail in itertools.product(range(VOCAB), repeat=k)])
        with torch.no_grad():
            logits = SMALL.model(input_ids=texts, use_cache=False).logits[:, -1]
        law = (law[:, None] * probabilities(logits, WARM).double()).flatten()
    found: list[float] = law.tolist()
    return found


@pytest.mark.parametrize("name", SAMPLERS)
def test_sampled_output_has_the_targets_distribution(name: str) -> None:
    """L17: through two stages. On other seeds a false alarm has probability 1e-4."""
    asked = [Request(f"q{i}", [2, 0, 1], 6) for i in range(DRAWS)]
    results = generate(SAMPLERS[name](WARM), asked, BATCH)
    codes = [sum(t * VOCAB ** (2 - k) for k, t in enumerate(r.ids[:3])) for r in results]
    counts = torch.bincount(torch.tensor(codes), minlength=VOCAB**3).tolist()
    assert chi_square(counts, _law([2, 0, 1], 3)) > 1e-4
    rounds = [line for r in results for line in r.rounds[1:]]
    assert sum(line["accepted"][-1] for line in rounds) > 500
    assert sum(line["accepted"][-1] < len(line["drafted"]) for line in rounds) > 300


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_request_draws_the_same_alone_in_any_batch_and_in_any_order(name: str) -> None:
    asked = [Request(f"q{i}", prompt, 12) for i, prompt in enumerate(prompts([3, 6, 1, 4, 2], VOCAB))]
    sampling = SamplingSettings(temperature=1.2, seed=3)
    alone = [SAMPLERS[name](sampling).generate([request])[0].ids for request in asked]
    assert [r.ids for r in SAMPLERS[name](sampling).generate(asked)] == alone
    turned = SAMPLERS[name](sampling).generate(asked[::-1], slots=2)
    assert [r.ids for r in turned][::-1] == alone


class Doubts(Controller):
    """A controller on the record of an exit: goes on while the exit's own probability is high."""

    reads_record = True
    stop, full, gamma_max = "controller", "gamma_max", 5

    def block(self, drawn: int) -> int:
        return min(1, self.gamma_max - drawn)

    def judge(self, record: Any, rows: Sequence[Row], drawn: int, open_rows: Sequence[bool]) -> Any:
        places = torch.tensor([[min(len(r.committed) + drawn - 1, record.ids.shape[1] - 1)] for r in rows])
        seen: Tensor = record.produced.gather(1, places[..., None].expand(-1, -1, record.produced.shape[2]))
        self.states.append(seen.clone())
        return record.logprob.gather(1, places).squeeze(1).exp() > 0.3, None

    def __init__(self) -> None:
        self.states: list[Tensor] = []


def test_a_controller_sees_the_exits_states_of_prompt_and_draft(wanted: list[list[int]]) -> None:
    """The target's own first pass fills the record with the prompt; the last draft's state comes with verification."""
    rule = Doubts()
    decoder = self_speculative(TARGET, HEADS, rule, (4,))
    (result,) = decoder.generate(_requests()[:1])
    assert result.ids == wanted[0]
    assert isinstance(decoder.proposer, Staged) and isinstance(decoder.proposer.inner, Proposer)
    drafter = decoder.proposer.inner.drafter
    assert drafter.record is not None
    text = [*PROMPTS[0], *result.ids]
    ids = torch.tensor([text[:-1]])
    positions = torch.arange(len(text) - 1)[None]
    mask = torch.ones(len(text) - 1, len(text) - 1, dtype=torch.bool).tril()[None, None]
    states = TARGET.run(TARGET.embed(ids), 0, DEPTHS[0], positions, mask)
    known = min(decoder.reader.lengths[0], len(text) - 2)
    torch.testing.assert_close(drafter.record.produced[0, 1 : known + 1], states[0, :known])
    assert drafter.record.ids[0, :known].tolist() == text[:known]
