"""Drafting beside the target: the target's own greedy text, round by round as PEARL has it."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pacer.decoding import contention
from pacer.decoding.build import beside
from pacer.decoding.concurrent import Beside, Worker
from pacer.decoding.request import Request
from pacer.decoding.writer import Draftsman
from pacer.errors import DecodingError, UnsupportedError
from pacer.models.stack import Stack
from pacer.settings import SamplingSettings
from tests.pearls import (
    COSTS,
    DRAFT,
    LAYERS,
    NEW,
    PROMPTS,
    TARGET,
    WANTED,
    in_turn,
    pearl,
    requests,
    rounds,
    skip_measuring,
    thread,
)
from tests.tiny import generate, make_decoder, near, plain_greedy, table_model, tiny_model

Make = Callable[[Draftsman], Worker]


@pytest.fixture
def measured() -> None:
    """For tests that measure both sides."""


@pytest.fixture(autouse=True)
def unmeasured(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    skip_measuring(request, monkeypatch)


def simulated(
    target: Sequence[int], draft: Sequence[int], prompt: Sequence[int], gamma: int, new: int
) -> list[tuple[int, int, int]]:
    """PEARL by its definition, on two table models (the next token of each): drafted, accepted, emitted per round."""
    text, chunk, found, left = list(prompt), list[int](), list[tuple[int, int, int]](), new
    while left > 0:
        ahead, last = list[int](), [*text, *chunk][-1]
        for _ in range(min(gamma, left - len(chunk) - 1)):
            ahead.append(last := draft[last])
        accepted, emitted, last = 0, list[int](), text[-1]
        while accepted < len(chunk) and chunk[accepted] == target[last]:
            emitted.append(last := chunk[accepted])
            accepted += 1
        emitted.append(target[last])
        whole = accepted == len(chunk) and len(ahead) > 1 and ahead[0] == emitted[-1]
        found.append((len(chunk), accepted, len(emitted)))
        text, left, chunk = text + emitted, left - len(emitted), ahead[1:] if whole else []
    return found[1:]


def one_hot(table: Sequence[int]) -> Stack:
    return Stack(table_model(8.0 * torch.nn.functional.one_hot(torch.tensor(table), len(table)).float()))


CYCLE = [1, 2, 3, 4, 5, 6, 7, 0]
DRAFTS = {
    "always right": CYCLE,
    "never right": [2, 3, 4, 5, 6, 7, 0, 1],
    "right every other time": [1, 3, 3, 5, 5, 7, 7, 1],
    "wrong once in a while": [1, 2, 3, 4, 5, 6, 0, 0],
}


@pytest.mark.parametrize("make", [in_turn, thread])
@pytest.mark.parametrize("gamma", [2, 4])
@pytest.mark.parametrize("name", DRAFTS)
def test_rounds_are_those_of_the_definition(name: str, gamma: int, make: Make) -> None:
    decoder = beside(one_hot(CYCLE), one_hot(DRAFTS[name]), gamma, worker=make)
    starts = ([0], [3, 3, 1], [6], [2, 5])
    texts = [Request(str(i), start, 21 + i) for i, start in enumerate(starts)]
    for batch in (1, 4):
        for result, start in zip(generate(decoder, texts, batch), starts, strict=True):
            own = [(start[-1] + 1 + k) % 8 for k in range(result.request.max_new_tokens)]
            assert result.ids == own
            assert rounds(result) == simulated(CYCLE, DRAFTS[name], start, gamma, len(own))
            if name == "always right":
                assert all(r == (gamma - 1, gamma - 1, gamma) for r in rounds(result)[:-2])
            if name == "never right":
                assert all(r == (0, 0, 1) for r in rounds(result))
    pearl(decoder).close()


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_greedy_identity_for_any_tables(data: st.DataObject) -> None:
    """Any agreement, prompts, budgets, stop ids, rows and γ; one decoder used for two batches."""
    ids = st.integers(0, 4)
    target, draft = (data.draw(st.lists(ids, min_size=5, max_size=5)) for _ in range(2))
    if data.draw(st.booleans()):
        draft = [data.draw(st.sampled_from([t, d])) for t, d in zip(target, draft, strict=True)]
    gamma, slots = data.draw(st.integers(2, 5)), data.draw(st.integers(1, 3))
    decoder = beside(one_hot(target), one_hot(draft), gamma, worker=data.draw(st.sampled_from([in_turn, thread])))
    for _ in range(2):
        batch = [
            Request(str(i), data.draw(st.lists(ids, min_size=1, max_size=6)), data.draw(st.integers(1, 14)),
                    data.draw(st.frozensets(ids, max_size=1)))
            for i in range(data.draw(st.integers(1, 4)))
        ]  # fmt: skip
        for result in decoder.generate(batch, slots=slots):
            request, last, own = result.request, result.request.prompt_ids[-1], list[int]()
            while len(own) < request.max_new_tokens and last not in (request.stop_ids if own else ()):
                own.append(last := target[last])
            assert result.ids == own
            if not request.stop_ids:
                assert rounds(result) == simulated(target, draft, request.prompt_ids, gamma, len(own))
    pearl(decoder).close()


@pytest.mark.parametrize("block", [None, 4])
@pytest.mark.parametrize("make", [in_turn, thread])
def test_output_is_the_targets_own(make: Make, block: int | None) -> None:
    decoder = beside(TARGET, DRAFT, 3, block=block, worker=make)
    for batch in (1, 4):
        assert [r.ids for r in generate(decoder, requests(), batch)] == WANTED
    results = decoder.generate([*requests(), Request("again", PROMPTS[1], NEW)], slots=2)
    assert [r.ids for r in results] == [*WANTED, WANTED[1]]
    assert any(drafted for r in results for drafted, _, _ in rounds(r)), "some chunks were verified"
    for result in results:
        assert [t for line in result.rounds for t in line["emitted"]] == result.ids
        assert {line["stop"] for line in result.rounds} <= {"prefill", "preverify", "postverify", "budget"}
        assert result.seconds == pytest.approx(sum(sum(line["time"].values()) for line in result.rounds))
    pearl(decoder).close()


def test_a_draft_that_is_the_target_fills_every_round() -> None:
    """C18, C20: full acceptance all along, whatever was rolled back."""
    decoder = beside(TARGET, TARGET, 4, worker=thread)
    (result,) = decoder.generate([Request("r", PROMPTS[0], 100)])
    assert result.ids == plain_greedy(TARGET.model, PROMPTS[0], 100)
    assert set(rounds(result)[:-1]) == {(3, 3, 4)} and result.rounds[1]["stop"] == "postverify"
    pearl(decoder).close()


@pytest.mark.parametrize("make", [in_turn, thread])
def test_ends(make: Make) -> None:
    """S29, S33, S34, S37: stop ids inside a chunk, budgets, stop strings, the target's context."""
    stop = WANTED[0][6]
    decoder = beside(TARGET, TARGET, 4, decode=lambda ids: "".join(chr(65 + i % 26) for i in ids), worker=make)
    plain = make_decoder(TARGET, decode=decoder.decode)
    word = decoder.decode(WANTED[1][5:7]) if decoder.decode else ""
    for budget in (1, 2, 5, 200):
        batch = [Request("a", PROMPTS[0], budget, frozenset({stop})), Request("b", PROMPTS[1], budget, stop=(word,)),
                 Request("c", PROMPTS[2], budget), Request("d", [3] * (TARGET.context - 3), budget)]  # fmt: skip
        found, own = decoder.generate(batch), plain.generate(batch)
        assert [(r.ids, r.finish) for r in found] == [(r.ids, r.finish) for r in own]
    assert found[2].finish == found[3].finish == "context"
    pearl(decoder).close()


def test_past_the_drafts_context_with_one_warning() -> None:
    draft = Stack(near(tiny_model(layers=LAYERS, context=24), 0.0))
    decoder = beside(TARGET, draft, 4, worker=in_turn)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = decoder.generate(requests())
    assert [r.ids for r in results] == WANTED
    assert [str(w.message) for w in caught] == [
        "the draft model's context of 24 tokens is used up: going on without drafting"
    ]
    assert max(line["committed"] + len(line["drafted"]) for r in results for line in r.rounds if line["drafted"]) <= 25


def test_a_repetition_penalty() -> None:
    """L12."""
    sampling = SamplingSettings(repetition_penalty=1.3)
    own = [r.ids for r in make_decoder(TARGET, sampling=sampling).generate(requests())]
    decoder = beside(TARGET, TARGET, 3, sampling, worker=in_turn)
    results = decoder.generate(requests())
    assert own != WANTED and [r.ids for r in results] == own
    assert {r for result in results for r in rounds(result)[:-2]} == {(2, 2, 3)}, "the draft is penalised alike"


def test_the_loop_itself_never_runs_the_draft() -> None:
    """The loop itself never touches the draft: its tokens come as whole numbers."""
    decoder = beside(TARGET, DRAFT, 3, worker=thread)
    called: list[int] = []
    real = DRAFT.readout

    def readout(states: Any, copied: Any = None) -> Any:
        called.append(threading.get_ident())
        return real(states, copied)

    try:
        DRAFT.readout = readout  # type: ignore[method-assign]  # a spy
        decoder.generate(requests())
    finally:
        del DRAFT.readout
    pearl(decoder).close()
    assert called and threading.get_ident() not in called


def test_temperature_is_refused() -> None:
    """S39."""
    with pytest.raises(UnsupportedError, match=r"greedy.*temperature=0\.7.*allowed: sampling\.temperature=0"):
        beside(TARGET, DRAFT, 3, SamplingSettings(temperature=0.7))


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_whatever_ends_a_batch_ends_the_worker_and_gives_threads_back(error: type[BaseException]) -> None:
    decoder = beside(TARGET, DRAFT, 4, worker=thread)
    threads = torch.get_num_threads()

    def stop(*_: Any) -> None:
        torch.set_num_threads(threads + 1)  # as while a process of its own drafts
        raise error("stop")

    with pytest.raises(error):
        decoder.generate(requests(), on_commit=stop)
    assert torch.get_num_threads() == threads
    worker = pearl(decoder).worker
    assert isinstance(worker, Beside) and worker._body is None
    assert [r.ids for r in decoder.generate(requests())] == WANTED
    pearl(decoder).close()


def test_an_error_of_the_draft_names_itself() -> None:
    draft = Stack(near(tiny_model(layers=LAYERS), 0.005))
    decoder = beside(TARGET, draft, 3, worker=thread)
    draft.head = None  # type: ignore[assignment]
    with pytest.raises(DecodingError, match=r"the draft beside the target failed: .TypeError: .NoneType") as found:
        decoder.generate(requests())
    assert "\n" not in str(found.value)


@pytest.mark.parametrize("make", [in_turn, thread])
def test_both_sides_are_measured(make: Make, measured: None) -> None:
    """Outside the batch's time, once for each number of rows; γ follows from it unless it is given."""
    decoder = beside(TARGET, DRAFT, worker=make)
    first = decoder.generate(requests()[:1])[0]
    assert first.ids == WANTED[0]
    costs = pearl(decoder).costs[1]
    assert costs.rows == 1 and min(costs.target_alone, costs.target_beside, costs.draft_alone, costs.draft_beside) > 0
    assert (costs.target_beside == costs.target_alone) == (make is in_turn)
    assert max(r[0] for r in rounds(first)) < costs.gamma
    assert pearl(decoder).report() == {**vars(costs), "gamma": costs.gamma}
    decoder.generate(requests()[:2])
    decoder.generate(requests()[:1])
    assert sorted(pearl(decoder).costs) == [1, 2] and pearl(decoder).costs[1] is costs
    given = beside(TARGET, DRAFT, 5, worker=make)
    given.generate(requests()[:1])
    assert pearl(given).costs[1].width == pearl(given).report()["gamma"] == 5
    for each in (decoder, given):
        pearl(each).close()


def test_gamma_is_the_ratio_of_costs_while_both_run() -> None:
    assert COSTS.gamma == 4 and replace(COSTS, draft_beside=2e-3).gamma == 2, "2.5 rounds to even"
    assert replace(COSTS, draft_beside=1.0).gamma == 2 and replace(COSTS, draft_beside=1e-9).gamma == contention.DRAWS
