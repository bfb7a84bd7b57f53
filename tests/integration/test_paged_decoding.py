"""Decoding on paged memory equals decoding on contiguous memory, bit for bit, and holds no more than it needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pacer.decoding import lane as lane_module
from pacer.decoding.controllers.fixed import Fixed
from pacer.decoding.controllers.preverifier import PreverifierRule
from pacer.decoding.lane import Lane, padded
from pacer.decoding.loop import Decoder
from pacer.decoding.request import Request, Result
from pacer.errors import DecodingError
from pacer.models.paged import PagedCache
from pacer.models.stack import Stack
from tests.exits import early_model, heads, self_speculative
from tests.tiny import generate, make_decoder, make_preverifier, near, plain_greedy, prompts, tiny_model, tiny_stack

NEW = 16
PROMPTS = prompts([5, 14, 8, 1])
TARGET, DRAFT, EARLY = tiny_stack(layers=2), Stack(near(tiny_model(layers=2))), Stack(early_model())
MODULE, EXITS, ADAPTER = make_preverifier(DRAFT), heads(EARLY), heads(EARLY, (2,), "adapter")

METHODS: dict[str, Callable[[], Decoder]] = {
    "ar": lambda: make_decoder(TARGET),
    "sd gamma=1": lambda: make_decoder(TARGET, DRAFT, Fixed(1)),
    "sd gamma=6": lambda: make_decoder(TARGET, DRAFT, Fixed(6)),
    "pacer": lambda: make_decoder(TARGET, DRAFT, PreverifierRule(MODULE, b=2, t0=0.3, rho=1.2, gamma_max=7)),
    "hispec": lambda: self_speculative(EARLY, EXITS),
    "hispec, rows that are ready": lambda: self_speculative(EARLY, EXITS, share=0.01),
    "kangaroo": lambda: self_speculative(EARLY, ADAPTER, Fixed(3), rules=()),
}


@contextmanager
def _paged(block: int) -> Iterator[list[Lane]]:
    """All lanes made meanwhile are paged; what they hold is checked after every pass and every rollback."""
    made: list[Lane] = []
    init, feed, truncate = Lane.__init__, Lane.feed, Lane.truncate

    def paged_init(self: Lane, stack: Any, a: int = 0, b: int | None = None, *_: object, **__: object) -> None:
        init(self, stack, a, b, block)
        made.append(self)

    def checked_feed(self: Lane, *args: Any, **kwargs: Any) -> Tensor:
        states = feed(self, *args, **kwargs)
        _check_memory(self)
        return states

    def checked_truncate(self: Lane, lengths: Sequence[int]) -> None:
        truncate(self, lengths)
        _check_memory(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Lane, "__init__", paged_init)
        patch.setattr(Lane, "feed", checked_feed)
        patch.setattr(Lane, "truncate", checked_truncate)
        yield made


def _memory(lane: Lane) -> PagedCache:
    assert isinstance(lane.cache, PagedCache)
    return lane.cache


def _check_memory(lane: Lane) -> None:
    """At most one block per row more than the tokens it holds."""
    memory, rows = _memory(lane), len(lane.lengths)
    assert memory.blocks.lengths[:rows] == lane.lengths
    assert memory.allocated_tokens() <= sum(lane.lengths) + rows * memory.block


def _requests(new: int = NEW, **options: Any) -> list[Request]:
    return [Request(f"r{i}", prompt, new, **options) for i, prompt in enumerate(PROMPTS)]


def _told(results: list[Result]) -> list[Any]:
    """All that decoding says, times apart."""
    return [
        (r.ids, r.finish, [{key: value for key, value in line.items() if key != "time"} for line in r.rounds])
        for r in results
    ]


def _feed(lane: Lane, rows: list[list[int]], chosen: Sequence[int] | None = None) -> Tensor:
    ids, counts = padded(rows, lane.stack.device)
    return lane.feed_ids(ids, counts, chosen)


def _pair(rows: int, block: int = 4, capacity: int = 32) -> tuple[Lane, Lane]:
    """A contiguous lane and a paged one over the same layers."""
    lanes = Lane(TARGET), Lane(TARGET, block=block)
    for lane in lanes:
        lane.reset(rows, capacity)
    return lanes


@cache
def _expected(name: str, batch: int) -> list[Any]:
    """On contiguous memory."""
    return _told(generate(METHODS[name](), _requests(), batch))


@pytest.mark.parametrize("block", [3, 16])
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("name", METHODS)
def test_paged_decoding_equals_contiguous_decoding(name: str, batch: int, block: int) -> None:
    """Ids, rounds and the pre-verifier's estimates; a decoder is used again, so its pools are too."""
    with _paged(block) as made:
        decoder = METHODS[name]()
        for _ in range(2):
            assert _told(generate(decoder, _requests(), batch)) == _expected(name, batch)
    assert made
    if batch == 1:
        assert all(lane.cache.workspace_bytes() == 0 for lane in made), "a row alone is read where it lies"
    else:
        assert all(lane.cache.workspace_bytes() > 0 for lane in made)


@pytest.mark.parametrize("name", METHODS)
def test_requests_that_join_find_nothing_of_those_that_ended(name: str) -> None:
    """A stream of six requests through two rows; the answer is the one that each gets alone."""
    alone = [ids for ids, _, _ in _expected(name, 1)]
    budgets = [NEW, 3, 9, 5, 1, 7]
    requests = [Request(f"r{i}", PROMPTS[i % 4], budget) for i, budget in enumerate(budgets)]
    with _paged(4):
        results = METHODS[name]().generate(requests, slots=2)
    assert [r.ids for r in results] == [alone[i % 4][:budget] for i, budget in enumerate(budgets)]


@pytest.mark.parametrize("slots", [2, 5])
def test_equal_beginnings_of_prompts_are_held_once(slots: int) -> None:
    """Nine common tokens; rows that share them and rows that do not, together and one after the other."""
    common, tails = PROMPTS[1][:9], ([7], [8, 9, 10], [7], [11] * 6)
    requests = [Request(str(i), [*common, *tail], 8) for i, tail in enumerate(tails)]
    requests.insert(2, Request("other", PROMPTS[2], 8))
    expected = [plain_greedy(TARGET.model, r.prompt_ids, 8) for r in requests]
    lane, most = Lane(TARGET, block=4), 0

    def look(*_: Any) -> None:
        nonlocal most
        most = max(most, *_memory(lane).blocks.references.values())
        _check_memory(lane)

    results = Decoder(TARGET, reader=lane, shares_prefixes=True).generate(requests, look, slots=slots)
    assert [r.ids for r in results] == expected
    assert most == (2 if slots == 2 else 4)


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_requests_end_as_in_plain_greedy_decoding(data: st.DataObject) -> None:
    """Random batches, budgets, stop ids and drafts."""
    rows = data.draw(st.integers(1, 4))
    lengths = data.draw(st.lists(st.integers(1, 9), min_size=rows, max_size=rows))
    texts = prompts(lengths, seed=data.draw(st.integers(0, 99)))
    outputs = [plain_greedy(TARGET.model, text, 10) for text in texts]
    budgets = data.draw(st.lists(st.integers(1, 10), min_size=rows, max_size=rows))
    stops = [data.draw(st.frozensets(st.sampled_from(out), max_size=2)) for out in outputs]
    requests = [Request(str(i), text, n, s) for i, (text, n, s) in enumerate(zip(texts, budgets, stops, strict=True))]
    with _paged(data.draw(st.integers(1, 6))):
        draft = data.draw(st.sampled_from([DRAFT, TARGET]))
        decoder = make_decoder(TARGET, draft, Fixed(data.draw(st.integers(0, 6))))
        results = decoder.generate(requests)
    for result, output, budget, stop in zip(results, outputs, budgets, stops, strict=True):
        ends = [n for n in range(1, budget + 1) if output[n - 1] in stop]
        assert result.ids == output[: ends[0] if ends else budget]
        assert result.finish == ("eos" if ends else "length")


@pytest.mark.parametrize("batch", [1, 3])
def test_a_draft_that_is_the_target_is_always_right(batch: int) -> None:
    """C18, C20: over 200 tokens, with rollbacks of nothing and two tokens fed after each full acceptance."""
    target = tiny_stack(layers=1, context=256)
    with _paged(16) as made:
        decoder = make_decoder(target, target, Fixed(4))
        requests = [Request(str(i), prompt, 200) for i, prompt in enumerate(prompts([4, 9, 1][:batch]))]
        results = decoder.generate(requests)
    for _, _, lines in _told(results):
        assert all(line["accepted"] == [len(line["drafted"])] for line in lines[1:])
    assert [len(r.ids) for r in results] == [200] * batch and made


def test_no_two_lanes_share_a_pool() -> None:
    """C24."""
    with _paged(4) as made:
        for _ in range(2):
            METHODS["pacer"]().generate(_requests())
    places = [store.data_ptr() for lane in made for store in (lane.cache.keys, lane.cache.values)]
    assert len(set(places)) == len(places) == 12


IDS = st.lists(st.integers(0, 96), max_size=5)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_every_state_is_the_same_in_both_memories(data: st.DataObject) -> None:
    """Some rows read at a time, prompts in chunks, rollbacks, forks, other texts in old rows: bit for bit."""
    rows, chunk = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 6))
    contiguous, paged = _pair(rows, data.draw(st.integers(1, 6)))
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(lane_module, "PREFILL_CHUNK", chunk)
        for _ in range(data.draw(st.integers(1, 6))):
            chosen = data.draw(st.lists(st.integers(0, rows - 1), min_size=1, max_size=rows, unique=True))
            new = [data.draw(IDS) for _ in chosen]
            if any(new) and max(contiguous.lengths[i] + len(ids) for i, ids in zip(chosen, new, strict=True)) <= 32:
                expected, states = (_feed(lane, new, chosen) for lane in (contiguous, paged))
                for j, ids in enumerate(new):
                    assert torch.equal(states[j, : len(ids)], expected[j, : len(ids)])
            keep = data.draw(st.lists(st.integers(0, 14), min_size=rows, max_size=rows))
            fork = data.draw(st.permutations(range(rows)))[:2] if data.draw(st.booleans()) else []
            for lane in (contiguous, paged):
                lane.truncate(keep)
                if len(fork) == 2:
                    row, other = fork
                    lane.release(row)
                    lane.adopt(row, other, lane.lengths[other] * 2 // 3)
            assert contiguous.lengths == paged.lengths
            _check_memory(paged)


@pytest.mark.parametrize("block", [None, 4])
def test_a_row_begins_as_another_does(block: int | None) -> None:
    """Three rows with an equal prefix of ten tokens, which is read once; each then equals its text read alone."""
    prefix, tails = PROMPTS[1][:10], [[1, 2, 3], [4], [5, 6, 7, 8, 9]]
    lane = Lane(TARGET, block=block)
    lane.reset(3, 32)
    _feed(lane, [prefix], [0])
    lane.adopt(1, 0, 10)
    lane.adopt(2, 0, 10)
    assert lane.lengths == [10, 10, 10]
    if block is not None:
        assert lane.cache.allocated_tokens() == 12, "one prefix"
    states = _feed(lane, tails)
    for i, tail in enumerate(tails):
        alone = Lane(TARGET)
        alone.reset(1, 32)
        expected = _feed(alone, [prefix + tail])[0, 10:]
        torch.testing.assert_close(states[i, : len(tail)], expected, atol=2e-5, rtol=2e-5)
    if block is not None:
        assert lane.cache.allocated_tokens() == 8 + 8 + 4 + 8, "two blocks are shared, the third is each row's own"


@pytest.mark.parametrize("block", [None, 4])
def test_only_an_empty_row_begins_as_another_and_only_with_what_is_there(block: int | None) -> None:
    lane = Lane(TARGET, block=block)
    lane.reset(2, 16)
    _feed(lane, [[1, 2, 3], []])
    with pytest.raises(DecodingError, match="row 1 cannot begin as row 0 does: '4 tokens'; allowed: up to 3"):
        lane.adopt(1, 0, 4)
    _feed(lane, [[], [5]])
    with pytest.raises(DecodingError, match="row 1 cannot begin as row 0 does"):
        lane.adopt(1, 0, 2)
    lane.release(1)
    lane.adopt(1, 0, 2)
    assert lane.lengths == [3, 2]


def test_lengths_that_were_set_by_hand_are_a_rollback_too() -> None:
    """A row set back into a prefix that another holds does not write over it."""
    contiguous, paged = _pair(2)
    for lane in (contiguous, paged):
        _feed(lane, [[1, 2, 3, 4, 5, 6], []])
        lane.adopt(1, 0, 6)
        lane.lengths = [1, 6]
        _feed(lane, [[7, 8, 9], []])
    expected, states = (_feed(lane, [[3], [4]]) for lane in (contiguous, paged))
    assert torch.equal(states, expected)
    _check_memory(paged)


@pytest.mark.parametrize("block", [None, 4])
def test_a_text_that_ended_in_nan_does_not_reach_the_next_one_in_its_row(block: int | None) -> None:
    lane = Lane(TARGET, block=block)
    lane.reset(2, 16)
    with torch.no_grad():
        lane.feed(torch.full((2, 9, TARGET.width), torch.nan), [9, 0])
        lane.release(0)
        states = _feed(lane, [[4], [5, 6, 7, 8, 9, 10]])
        fresh = Lane(TARGET, block=block)
        fresh.reset(2, 16)
        assert torch.equal(states, _feed(fresh, [[4], [5, 6, 7, 8, 9, 10]]))
    assert torch.isfinite(states[0, 0]).all() and torch.isfinite(states[1]).all()


def test_slices_of_the_layers_hold_their_own_lengths() -> None:
    """C28, the memory's side: each slice has the tokens it has read, and all together they are the whole model."""
    whole, low, high = Lane(TARGET), Lane(TARGET, 0, 1, block=4), Lane(TARGET, 1, 2, block=4)
    for lane in (whole, low, high):
        lane.reset(2, 32)
    expected = _feed(whole, [[1, 2, 3], [4, 5, 6]])
    waiting = [_feed(low, [[1], [4]]), _feed(low, [[2, 3], [5, 6]])]
    assert low.lengths == [3, 3] and high.lengths == [0, 0]
    assert low.cache.allocated_tokens() == 8 and high.cache.allocated_tokens() == 0
    states = high.feed(torch.cat(waiting, 1), [3, 3])
    torch.testing.assert_close(states, expected, atol=2e-5, rtol=2e-5)
    low.truncate([1, 3])
    assert (low.lengths, high.lengths) == ([1, 3], [3, 3]) and high.cache.allocated_tokens() == 8
