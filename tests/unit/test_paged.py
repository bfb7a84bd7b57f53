"""Paged key/value memory, and the interface it shares with the contiguous one, against plain lists.

Entries are numbers of their own for every token, layer, head and place, so that none can stand in for another.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import count
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pacer.errors import DecodingError
from pacer.models.blocks import Blocks, Copy
from pacer.models.cache import Cache, ContiguousCache
from pacer.models.paged import ZEROS, PagedCache, make_cache

CAPACITY, LAYERS = 12, range(2, 4)
WHERE: dict[str, Any] = {"dtype": torch.float32, "device": torch.device("cpu")}
GRID = torch.tensor([[[0.0, 0.125]], [[0.25, 0.5]]])  # (G, 1, D): of head and place


def _cache(block: int | None = 4, rows: int = 3) -> Cache:
    return make_cache(LAYERS, rows, CAPACITY, 2, 2, block, **WHERE)


def _paged(block: int = 4, rows: int = 3, capacity_tokens: int | None = None) -> PagedCache:
    return PagedCache(LAYERS, rows, CAPACITY, 2, 2, block=block, capacity_tokens=capacity_tokens, **WHERE)


def _entries(tokens: Sequence[Sequence[float]], layer: int) -> tuple[Tensor, Tensor]:
    """Keys and values ``(B, G, n, D)`` of tokens ``(B, n)``."""
    keys = torch.tensor(tokens)[:, None, :, None] + GRID + 1000 * layer
    return keys, -keys


def _append(
    cache: Cache, new: Sequence[Sequence[float]], lengths: Sequence[int], rows: Sequence[int] | None = None
) -> list[tuple[Tensor, Tensor]]:
    """Write ``new[j]`` behind what row j has, NaN as padding; keys and values ``(B, G, S, D)`` read in each layer."""
    chosen, n, ends = list(range(len(new)) if rows is None else rows), max(1, *map(len, new)), list(lengths)
    for i, tokens in zip(chosen, new, strict=True):
        ends[i] += len(tokens)
    cache.reserve(ends)
    slots = [
        [lengths[i] + j if j < len(tokens) else cache.capacity for j in range(n)]
        for i, tokens in zip(chosen, new, strict=True)
    ]
    padded = [[*tokens, *[math.nan] * (n - len(tokens))] for tokens in new]
    cache.at(torch.tensor(slots), max(ends[i] for i in chosen), rows)
    return [cache.update(*_entries(padded, layer), layer) for layer in LAYERS]


def _check(read: list[tuple[Tensor, Tensor]], wanted: Sequence[Sequence[float]]) -> None:
    """Each row begins with its tokens in every layer; what else a query would read over is finite."""
    for layer, pair in zip(LAYERS, read, strict=True):
        for i, tokens in enumerate(wanted):
            for found, expected in zip(pair, _entries([tokens], layer), strict=True):
                assert torch.equal(found[i, :, : len(tokens)], expected[0])
        assert all(torch.isfinite(found).all() for found in pair)


def _check_blocks(cache: PagedCache, lengths: Sequence[int]) -> None:
    """Every block is free or held by as many rows as its count says; rows hold no more than they need."""
    blocks = cache.blocks
    held = Counter(block for table in blocks.tables for block in table)
    assert blocks.references == dict(held)
    assert not blocks.free & set(held)
    assert blocks.free | set(held) == set(range(blocks.first, blocks.first + blocks.total))
    assert cache.keys.shape[1] == cache.values.shape[1] == blocks.first + blocks.total
    assert blocks.lengths == list(lengths)
    assert [len(table) for table in blocks.tables] == [math.ceil(length / blocks.size) for length in lengths]
    assert max(lengths) <= cache.allocated_tokens() == len(held) * blocks.size
    assert cache.allocated_tokens() <= sum(lengths) + len(lengths) * blocks.size
    assert not cache.keys[:, ZEROS].any() and not cache.values[:, ZEROS].any()


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_history_equals_plain_lists(data: st.DataObject) -> None:
    """Ragged appends to some of the rows, of which some entries are kept and moved together, rollbacks, forks and
    releases; after each step every row is read."""
    rows, block = data.draw(st.integers(1, 4)), data.draw(st.sampled_from([None, 1, 2, 3, 5]))
    cache, fresh = _cache(block, rows), count(1)
    texts: list[list[float]] = [[] for _ in range(rows)]
    some_rows = st.lists(st.integers(0, rows - 1), min_size=1, max_size=rows, unique=True)
    for _ in range(data.draw(st.integers(1, 12))):
        step = data.draw(st.sampled_from(["append", "append", "truncate", "share", "release"]))
        lengths = [len(text) for text in texts]
        if step == "append":
            chosen = data.draw(some_rows)
            new = [[float(next(fresh)) for _ in range(data.draw(st.integers(0, min(5, CAPACITY - lengths[i]))))]
                   for i in chosen]  # fmt: skip
            read = _append(cache, new, lengths, chosen)
            for i, tokens in zip(chosen, new, strict=True):
                texts[i] += tokens
            _check(read, [texts[i] for i in chosen])
            if data.draw(st.booleans()):
                kept = {}
                for i, tokens in zip(chosen, new, strict=True):
                    some = st.sets(st.sampled_from(range(lengths[i], len(texts[i])))) if tokens else st.just(set())
                    kept[i] = sorted(data.draw(some))
                cache.move(kept, {i: lengths[i] for i in chosen})
                texts = [
                    text[: lengths[i]] + [text[slot] for slot in kept[i]] if i in kept else text
                    for i, text in enumerate(texts)
                ]
                cache.truncate([len(text) for text in texts])
        elif step == "truncate":
            keep = data.draw(st.lists(st.integers(0, CAPACITY + 2), min_size=rows, max_size=rows))
            cache.truncate(keep)
            texts = [text[:k] for text, k in zip(texts, keep, strict=True)]
        elif step == "release":
            row = data.draw(st.integers(0, rows - 1))
            cache.release(row)
            texts[row] = []
        elif 0 in lengths:
            row, other = lengths.index(0), data.draw(st.integers(0, rows - 1))
            length = data.draw(st.integers(0, lengths[other]))
            cache.share(row, other, length)
            texts[row] = texts[other][:length]
        lengths = [len(text) for text in texts]
        _check(_append(cache, [[]] * rows, lengths), texts)
        if isinstance(cache, PagedCache):
            _check_blocks(cache, lengths)


@pytest.mark.parametrize(("writers", "blocks"), [([1], 3), ([0], 3), ([0, 1], 3), ([], 2)])
def test_a_shared_block_is_copied_by_the_first_who_writes_and_by_nobody_else(writers: list[int], blocks: int) -> None:
    cache, text = _paged(block=4), [1.0, 2, 3, 4, 5, 6]
    _append(cache, [text], [0, 0, 0])
    cache.share(1, 0, 6)
    assert cache.allocated_tokens() == 8 and cache.blocks.tables[0] == cache.blocks.tables[1]
    new = [[10.0 * (i + 1)] if i in writers else [] for i in range(2)]
    _check(_append(cache, new, [6, 6, 0]), [text + tokens for tokens in new])
    first, second = cache.blocks.tables[:2]
    assert first[0] == second[0] and (first[1] == second[1]) == (not writers)
    assert cache.allocated_tokens() == 4 * blocks


def test_a_prefix_of_whole_blocks_is_never_copied() -> None:
    cache, text = _paged(block=4), [1.0, 2, 3, 4, 5, 6, 7]
    _append(cache, [text], [0, 0, 0])
    cache.share(1, 0, 4)
    cache.share(2, 0, 4)
    assert cache.allocated_tokens() == 8
    _check(_append(cache, [[8.0], [9.0], []], [7, 4, 4]), [[*text, 8], [*text[:4], 9], text[:4]])
    assert cache.allocated_tokens() == 12 and cache.blocks.references[cache.blocks.tables[0][0]] == 3


def test_a_row_that_goes_back_into_a_shared_prefix_leaves_the_others_as_they_are() -> None:
    cache, text = _paged(block=4), [1.0, 2, 3, 4, 5, 6, 7, 8]
    _append(cache, [text], [0, 0, 0])
    cache.share(1, 0, 8)
    cache.truncate([2, 8, 0])  # of row 0, whose blocks these were
    _check(_append(cache, [[30.0, 40.0], []], [2, 8, 0]), [[1, 2, 30, 40], text])
    cache.release(0)
    _check(_append(cache, [[], []], [0, 8, 0]), [[], text])


@pytest.mark.parametrize("block", [None, 4])
def test_what_a_row_leaves_behind_does_not_reach_the_next(block: int | None) -> None:
    """0 · NaN = NaN: neither in a block or a row that is used again, nor beside a longer row."""
    cache = _cache(block)
    _append(cache, [[math.nan] * 9, [1.0], []], [0, 0, 0])
    cache.release(0)
    _check(_append(cache, [[2.0], [3.0], [4.0] * 11], [0, 1, 0]), [[2], [1, 3], [4] * 11])


def test_a_copied_block_brings_only_the_tokens_that_are_shared() -> None:
    """What the other row wrote behind them is not this row's, and may be NaN."""
    cache = _paged(block=4)
    _append(cache, [[1.0, 2.0, math.nan, math.nan], [], [5.0]], [0, 0, 0])
    cache.share(1, 0, 2)
    read = _append(cache, [[6.0], [7.0, 8.0, 9.0, 10.0]], [4, 2, 1], [1, 2])
    _check(read, [[1, 2, 6], [5, 7, 8, 9, 10]])


def test_a_write_without_a_block_of_its_own_goes_nowhere() -> None:
    """Behind the end of a short row, at a place that a longer one has."""
    cache = _paged(block=4)
    _append(cache, [[1.0] * 6, [2.0]], [0, 0, 0])
    cache.at(torch.tensor([[5], [5]]), 6)
    read = [cache.update(*_entries([[3.0], [9.0]], layer), layer) for layer in LAYERS]
    _check(read, [[1, 1, 1, 1, 1, 3], [2]])
    _check_blocks(cache, [6, 1, 0])


def test_a_pool_grows_by_doubling_and_keeps_what_it_holds() -> None:
    cache, text, sizes = _paged(block=1, rows=1), [], []
    for token in range(CAPACITY):
        read = _append(cache, [[float(token)]], [token])
        text.append(float(token))
        _check(read, [text])
        sizes.append(cache.blocks.total)
        assert cache.nbytes() == 2 * 2 * (2 + sizes[-1]) * 1 * 2 * 2 * 4
    assert sizes == [1, 2, 4, 4, *[8] * 4, *[16] * 4]


def test_a_pool_of_fixed_size_says_what_is_needed_and_stays_as_it_was() -> None:
    cache = _paged(block=4, capacity_tokens=10)
    size = cache.nbytes()
    _append(cache, [[1.0] * 4, [2.0] * 2, []], [0, 0, 0])
    cache.share(2, 1, 2)
    with pytest.raises(DecodingError, match=r"used up: '20 tokens needed'; allowed: 12 tokens in blocks of 4; raise "):
        cache.reserve([9, 3, 3])  # two more blocks, and a copy of the one that two rows write to
    _check_blocks(cache, [4, 2, 2])
    _check(_append(cache, [[], [3.0], [5.0]], [4, 2, 2]), [[1] * 4, [2, 2, 3], [2, 2, 5]])
    assert cache.allocated_tokens() == 12 and cache.nbytes() == size


@pytest.mark.parametrize("block", [None, 4])
def test_a_row_is_full_at_its_capacity(block: int | None) -> None:
    cache = _cache(block)
    _append(cache, [[1.0] * CAPACITY], [0, 0, 0])
    with pytest.raises(DecodingError, match=f"cache is full: 13; allowed: up to {CAPACITY} tokens"):
        cache.reserve([CAPACITY + 1, 0, 0])


def test_places_are_reserved_before_they_are_used() -> None:
    cache = _paged()
    cache.reserve([3, 9, 0])
    with pytest.raises(DecodingError, match="no blocks were reserved: 4; allowed: up to 3 tokens"):
        cache.at(torch.tensor([[3], [0]]), 4, [0, 2])


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 7), st.integers(0, CAPACITY)), min_size=1, max_size=8), st.integers(1, 5))
def test_a_single_row_is_read_where_it_lies(history: list[tuple[int, int]], block: int) -> None:
    """Through growth, rollbacks and a new text in the same row its blocks stay consecutive: nothing is gathered."""
    cache, length = _paged(block, rows=1), 0
    for new, keep in history:
        tokens = [1.0] * min(new, CAPACITY - length)
        read = _append(cache, [tokens], [length])
        length += len(tokens)
        for layer, pair in enumerate(read):
            for found, pool in zip(pair, (cache.keys, cache.values), strict=True):
                assert found.data_ptr() == pool[layer, cache.blocks.tables[0][0]].data_ptr()
        cache.truncate([keep])
        length = min(length, keep)
    assert cache.workspace_bytes() == 0


def test_the_workspace_is_the_largest_gather() -> None:
    token = 2 * 2 * 2 * 4  # bytes of a key and a value
    cache = _paged(block=4)
    _append(cache, [[1.0] * 9, [2.0]], [0, 0, 0])
    assert cache.workspace_bytes() == 2 * 12 * token
    _append(cache, [[], [1.0]], [9, 1, 0])
    _append(cache, [[3.0]], [9, 2, 0], [0])  # consecutive: no gather
    assert cache.workspace_bytes() == 2 * 12 * token
    _append(cache, [[], [], [1.0]], [10, 2, 0])
    assert cache.workspace_bytes() == 3 * 12 * token
    contiguous = _cache(None)
    _append(contiguous, [[1.0], [2.0, 3.0], [4.0]], [0, 0, 0])
    _append(contiguous, [[5.0], [6.0]], [1, 2, 1], [1, 2])
    assert contiguous.workspace_bytes() == 0, "rows side by side are views"
    _append(contiguous, [[5.0], [6.0]], [1, 3, 2], [2, 0])
    assert contiguous.workspace_bytes() == 2 * 3 * token


def test_figures_of_both_memories() -> None:
    contiguous, paged = _cache(None), _cache(4)
    assert isinstance(contiguous, ContiguousCache)
    for cache in (contiguous, paged):
        _append(cache, [[1.0] * 5, [2.0], []], [0, 0, 0])
    assert contiguous.allocated_tokens() == 3 * CAPACITY and paged.allocated_tokens() == 12
    paged.clear(3, CAPACITY)
    assert paged.allocated_tokens() == 0
    _check(_append(paged, [[3.0]], [0, 0, 0]), [[3]])


def test_blocks_are_handed_out_in_order_and_copies_are_named() -> None:
    blocks = Blocks(rows=2, size=4, first=2)
    assert blocks.missing([9, 0]) == 3
    blocks.grow(3)
    assert blocks.reserve([9, 0]) == ([2, 3, 4], [])
    blocks.share(1, 0, 6)
    assert blocks.missing([9, 6]) == 0 and blocks.missing([9, 7]) == 1
    blocks.grow(3)
    assert blocks.reserve([9, 7]) == ([5], [Copy(3, 5, 2)])
    assert blocks.tables == [[2, 3, 4], [2, 5]] and blocks.references == {2: 2, 3: 1, 4: 1, 5: 1}
    blocks.release(0)
    assert blocks.free == {3, 4, 6, 7} and blocks.tables == [[], [2, 5]]
    assert blocks.reserve([1, 9]) == ([3, 6], [])
