"""Key/value memory and the lanes that write to it."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pacer.decoding import lane as lane_module
from pacer.decoding.controllers.preverifier import PreverifierRule
from pacer.decoding.lane import Lane, last_of, padded
from pacer.decoding.request import Request
from pacer.errors import DecodingError
from pacer.models.cache import ContiguousCache
from pacer.models.stack import Stack, causal_mask
from tests.tiny import make_decoder, make_preverifier, near, proposer, tiny_model, tiny_stack

STACK = tiny_stack(layers=2, vocab=13)


def _cache(rows: int = 2, capacity: int = 6, layers: range = range(1)) -> ContiguousCache:
    return ContiguousCache(layers, rows, capacity, 1, 2, dtype=torch.float32, device=torch.device("cpu"))


def _new(values: list[list[float]]) -> Tensor:
    """Entries ``(B, 1, n, 2)``."""
    return torch.tensor(values)[:, None, :, None].expand(-1, 1, -1, 2)


def _once(stack: Stack, ids: list[int]) -> Tensor:
    """States ``(n, H)`` of one text in one pass without a cache."""
    positions = torch.arange(len(ids))[None]
    x = stack.embed(torch.tensor([ids]))
    return stack.run(x, 0, stack.n_layers, positions, causal_mask(positions, len(ids)))[0]


def _feed(lane: Lane, rows: list[list[int]]) -> tuple[Tensor, list[int]]:
    ids, counts = padded(rows, lane.stack.device)
    return lane.feed_ids(ids, counts), counts


def test_update_writes_at_the_slots_and_returns_up_to_the_extent() -> None:
    cache = _cache()
    cache.at(torch.tensor([[0, 1], [0, 6]]), 2).update(_new([[1, 2], [3, 99]]), _new([[5, 6], [7, 99]]), 0)
    keys, values = cache.at(torch.tensor([[2], [1]]), 3).update(_new([[8], [9]]), _new([[10], [11]]), 0)
    assert keys.shape == values.shape == (2, 1, 3, 2)
    assert keys[:, 0, :, 0].tolist() == [[1, 2, 8], [3, 9, 0]], "slot 6 is scratch: its 99 is nowhere in reach"
    assert values[:, 0, :, 0].tolist() == [[5, 6, 10], [7, 11, 0]]


def test_a_cache_is_full_at_its_capacity_and_not_before() -> None:
    """A51."""
    cache = _cache(capacity=3)
    cache.at(torch.tensor([[2], [2]]), 3).update(_new([[1], [1]]), _new([[1], [1]]), 0)
    with pytest.raises(DecodingError, match="cache is full: 4; allowed: up to 3 tokens"):
        cache.at(torch.tensor([[3], [3]]), 4)


def test_a_slice_of_the_layers_has_its_own_memory() -> None:
    cache = _cache(layers=range(2, 5))
    assert len(cache.keys) == 3 and cache.nbytes() == 2 * 3 * 2 * 7 * 2 * 4
    cache.at(torch.tensor([[0], [0]]), 1)
    for layer in (2, 3, 4):
        cache.update(_new([[layer], [layer]]), _new([[0], [0]]), layer)
    assert cache.keys[:, 0, 0, 0, 0].tolist() == [2, 3, 4]


@pytest.mark.parametrize("keep", [0, 1, 5, 10])
def test_truncate_is_a_length(keep: int) -> None:
    """C21: at 0, 1, n and n + 5; afterwards the lane goes on as if the rest had never been read."""
    lane = Lane(STACK)
    lane.reset(1, 16)
    _feed(lane, [[1, 2, 3, 4, 5]])
    lane.truncate([keep])
    kept = min(keep, 5)
    assert lane.lengths == [kept]
    states, _ = _feed(lane, [[7, 8]])
    assert lane.lengths == [kept + 2]
    torch.testing.assert_close(states[0], _once(STACK, [*[1, 2, 3, 4, 5][:kept], 7, 8])[-2:], atol=1e-5, rtol=1e-5)


IDS = st.lists(st.integers(0, 12), max_size=5)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 3).flatmap(lambda rows: st.lists(
    st.tuples(st.lists(IDS, min_size=rows, max_size=rows), st.lists(st.integers(0, 12), min_size=rows, max_size=rows)),
    min_size=1, max_size=5,
)), st.integers(1, 6))  # fmt: skip
def test_any_history_of_ragged_reads_and_rollbacks_equals_one_pass(
    history: list[tuple[list[list[int]], list[int]]], chunk: int
) -> None:
    """Rows of different lengths, empty rows, prompts in chunks; every state is that of the row read alone at once."""
    rows = len(history[0][0])
    lane, texts = Lane(STACK), [[] for _ in range(rows)]
    lane.reset(rows, 25)
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(lane_module, "PREFILL_CHUNK", chunk)
        for new, keep in history:
            if not any(new):
                continue
            texts = [text + ids for text, ids in zip(texts, new, strict=True)]
            states, counts = _feed(lane, new)
            assert lane.lengths == [len(text) for text in texts]
            last = last_of(states, counts)
            for i, text in enumerate(texts):
                if counts[i]:
                    wanted = _once(STACK, text)[-counts[i] :]
                    torch.testing.assert_close(states[i, : counts[i]], wanted, atol=2e-5, rtol=2e-5)
                    assert torch.equal(last[i, 0], states[i, counts[i] - 1])
            lane.truncate(keep)
            texts = [text[:k] for text, k in zip(texts, keep, strict=True)]
            assert lane.lengths == [len(text) for text in texts]


def test_padding_goes_to_the_scratch_place_only() -> None:
    """Neither over another entry nor behind a row's own length."""
    lane = Lane(STACK)
    lane.reset(3, 12)
    for rows, lengths in (([[1, 2, 3], [1], [1] * 11], [3, 1, 11]), ([[], [4, 5], [6]], [3, 3, 12])):
        before = lane.cache.keys.clone()
        _feed(lane, rows)
        changed = (lane.cache.keys != before).any(-1).any(-1).any(0)  # (R, T + 1)
        new = [list(range(n - len(ids), n)) for ids, n in zip(rows, lengths, strict=True)]
        assert [row[:12].nonzero().flatten().tolist() for row in changed] == new
        assert lane.lengths == lengths


def test_memory_is_kept_where_it_is_enough_and_old_entries_are_out_of_sight() -> None:
    lane = Lane(STACK)
    lane.reset(3, 10)
    _feed(lane, [[1] * 10, [2] * 10, [3] * 10])
    memory = lane.cache
    lane.reset(2, 6)
    assert lane.cache is memory and lane.lengths == [0, 0]
    states, _ = _feed(lane, [[4, 5, 6], [7]])
    torch.testing.assert_close(states[0], _once(STACK, [4, 5, 6]), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(states[1, :1], _once(STACK, [7]), atol=1e-5, rtol=1e-5)
    lane.reset(4, 6)
    assert lane.cache is not memory and lane.cache.rows == 4


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_entries_beyond_a_length_are_out_of_sight_whatever_they_hold(poison: float) -> None:
    """A request that ended in NaN must not reach the next one through memory that is used again."""
    lane = Lane(STACK)
    lane.reset(2, 8)
    lane.cache.keys.fill_(poison)
    lane.cache.values.fill_(poison)
    lane.reset(2, 8)
    states, _ = _feed(lane, [[4, 5, 6, 7], [7]])
    torch.testing.assert_close(states[1, :1], _once(STACK, [7]), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(states[0], _once(STACK, [4, 5, 6, 7]), atol=1e-5, rtol=1e-5)


def test_no_two_models_share_a_cache() -> None:
    """C24: target, draft and pre-verifier each have their own, even where the draft is the target itself."""
    draft = Stack(near(tiny_model(layers=2)))
    for draft_stack, target in ((draft, tiny_stack(layers=2)), (draft, draft)):
        decoder = make_decoder(target, draft_stack, PreverifierRule(make_preverifier(draft_stack), gamma_max=4))
        other = make_decoder(target, draft_stack, PreverifierRule(make_preverifier(draft_stack), gamma_max=4))
        places = []
        for each in (decoder, other):
            each.generate([Request("a", [1, 2, 3], 6)])
            drafts = proposer(each)
            assert isinstance(drafts.controller, PreverifierRule)
            lanes = [each.reader, drafts.drafter.lane, drafts.controller.lane]
            caches = [lane.cache for lane in lanes if isinstance(lane, Lane)]
            places += [tensor.data_ptr() for cache in caches for tensor in (cache.keys, cache.values)]
        assert len(set(places)) == len(places) == 12
