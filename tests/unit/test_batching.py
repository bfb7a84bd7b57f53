"""Batches hold every item once per epoch within their budget, and a loader goes on where it was."""

from __future__ import annotations

from collections import Counter

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pacer.data.batching import Loader, token_batches
from pacer.data.corpus import Text
from pacer.data.labels import Rounds
from pacer.data.packing import first_fit

LENGTHS = st.lists(st.integers(1, 300), max_size=60)


@settings(deadline=None)
@given(LENGTHS, st.integers(1, 300))
def test_first_fit(lengths: list[int], capacity: int) -> None:
    bins = first_fit(lengths, capacity)
    assert sorted(i for members in bins for i in members) == list(range(len(lengths)))
    loads = [sum(lengths[i] for i in members) for members in bins]
    assert all(load <= capacity or len(members) == 1 for load, members in zip(loads, bins, strict=True))
    # an item is opened a new bin for only where none before it had room
    for number, members in enumerate(bins):
        smallest = min(lengths[i] for i in members)
        assert all(load + smallest > capacity for load in loads[:number])
    assert bins == first_fit(lengths, capacity)


@settings(deadline=None)
@given(LENGTHS, st.integers(1, 900), st.integers(0, 3), st.integers(1, 3))
def test_token_batches(lengths: list[int], budget: int, seed: int, epochs: int) -> None:
    batches = token_batches(lengths, budget, seed=seed, epochs=epochs)
    assert Counter(i for batch in batches for i in batch) == dict.fromkeys(range(len(lengths)), epochs)
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(lengths[i] for i in batch) <= budget
    one = token_batches(lengths, budget, seed=seed)
    assert batches[: len(one)] == one  # more epochs change nothing before them
    assert sorted(i for batch in one for i in batch) == list(range(len(lengths)))


def test_the_seed_makes_the_order() -> None:
    lengths = [10 + 7 * i % 90 for i in range(50)]
    first = token_batches(lengths, 300, seed=1, epochs=2)
    assert first == token_batches(lengths, 300, seed=1, epochs=2)
    assert first != token_batches(lengths, 300, seed=2, epochs=2)
    epoch = len(token_batches(lengths, 300, seed=1))
    assert first[:epoch] != first[epoch:]


def test_neighbours_in_length_share_a_batch() -> None:
    lengths = [5] * 40 + [100] * 4
    padded = sum(len(b) * max(lengths[i] for i in b) for b in token_batches(lengths, 100, seed=0))
    assert padded == sum(lengths)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 60), st.lists(st.integers(1, 8), min_size=1, max_size=5)), max_size=25))
def test_packed_batches(sizes: list[tuple[int, list[int]]]) -> None:
    from pacer.training.preverifier_run import packed_batches  # Lightning takes seconds to import

    pairs = [_pair(length, counts) for length, counts in sizes]
    lengths = [length + sum(counts) for length, counts in sizes]
    batches = packed_batches(pairs, 200, seed=5, epochs=2)
    found = Counter(i for batch in batches for row in batch for i in row)
    assert found == dict.fromkeys(range(len(pairs)), 2)
    for batch in batches:
        longest = max(sum(lengths[i] for i in row) for row in batch)
        assert longest * len(batch) <= 200 or len(batch) == 1
    assert batches == packed_batches(pairs, 200, seed=5, epochs=2)


def _pair(length: int, counts: list[int]) -> tuple[Text, Rounds]:
    shape = (len(counts), 8)
    zeros = torch.zeros(shape)
    starts = torch.zeros(len(counts), dtype=torch.long)
    rounds = Rounds(starts, zeros.long(), zeros, zeros, zeros, zeros.long(), torch.tensor(counts), starts, starts)
    return Text("x", "t", [0], [0] * (length - 1), True), rounds


def loader() -> Loader:
    return Loader([[1], [2, 3], [4], [5]], sum)


def test_a_loader_goes_on_where_it_was() -> None:
    whole = list(loader())
    assert whole == [1, 5, 4, 5] and len(loader()) == 4
    for stop in range(1, 4):
        first = loader()
        iterator = iter(first)
        seen = [next(iterator) for _ in range(stop)]
        assert first.state_dict() == {"position": stop}
        second = loader()
        second.load_state_dict(first.state_dict())
        assert seen + list(second) == whole
        assert list(second) == whole  # and then starts over


def test_a_pass_that_ended_early_at_the_last_batch_starts_over() -> None:
    """Lightning does not ask again once it has had as many batches as there are."""
    data = loader()
    iterator = iter(data)
    for _ in range(4):
        next(iterator)
    assert list(data) == [1, 5, 4, 5]


def test_batches_are_made_on_demand() -> None:
    made = []
    iterator = iter(Loader([1, 2, 3], made.append))
    next(iterator)
    assert made == [1]
