"""Parts of shared work: who makes which, from settings or from a cluster's variables."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pacer.data.splits import owner
from pacer.errors import ConfigError
from pacer.settings import ShardSettings
from pacer.work.shards import Shard, from_environment, pieces, shard_of


@given(st.lists(st.text(min_size=1, max_size=12), unique=True), st.integers(1, 9))
def test_every_sample_has_one_owner(ids: list[str], count: int) -> None:
    for id in ids:
        assert [Shard(index, count).owns(id) for index in range(count)].count(True) == 1


def test_owners_are_stable_and_even() -> None:
    assert [owner(f"gsm8k-test-{i}", 4) for i in range(8)] == [2, 0, 0, 1, 3, 3, 1, 1]  # on any machine
    counts = Counter(owner(f"row-{i}", 4) for i in range(4000))
    assert all(900 < counts[index] < 1100 for index in range(4))
    assert owner("cnn_dm-train-3>xsum#1", 7) == owner("cnn_dm-train-3", 7)  # all of a row


def test_pieces_of_a_part_come_first() -> None:
    texts = [f"row-{i}" for i in range(40)]
    parts = [pieces(texts, 3, Shard(index, 4), str) for index in range(4)]
    assert all(found == parts[0][0] and [t for piece in found for t in piece] == texts for found, _ in parts)
    assert sorted(number for _, own in parts for number in own) == list(range(14))
    assert pieces(texts, 3, Shard(), str)[1] == list(range(14)) and pieces([], 3, Shard(), str) == ([], [])


def test_settings_name_a_part() -> None:
    assert shard_of(ShardSettings()) == shard_of(ShardSettings(None, 1)) == Shard(0, 1)
    assert shard_of(ShardSettings(2, 3)) == Shard(2, 3)
    assert (Shard().name, Shard(2, 3).name) == ("", "-2-of-3")
    for wrong, what in ((ShardSettings(3, 3), "shard.index: 3; allowed: 0 … 2"), (ShardSettings(1), "half a shard"),
                        (ShardSettings(None, 4), "half a shard")):  # fmt: skip
        with pytest.raises(ConfigError, match=what):
            shard_of(wrong)


def array(id: int, count: int, low: int = 0, step: int = 1) -> dict[str, str]:
    values = {"ID": id, "COUNT": count, "MIN": low, "STEP": step}
    return {f"SLURM_ARRAY_TASK_{name}": str(value) for name, value in values.items()}


@pytest.mark.parametrize(
    ("environment", "wanted"),
    [
        ({}, ShardSettings()),
        (array(2, 4), ShardSettings(2, 4)),
        (array(7, 3, low=3, step=2), ShardSettings(2, 3)),
        (array(5, 1, low=5), ShardSettings(0, 1)),  # one task started again: what is missing is its
        ({"SLURM_ARRAY_TASK_ID": "2", "SLURM_ARRAY_TASK_COUNT": "4"}, ShardSettings(2, 4)),
        ({"RANK": "1", "WORLD_SIZE": "2"}, ShardSettings(1, 2)),
        ({"RANK": "1"}, ShardSettings()),
        ({**array(2, 4), "RANK": "1", "WORLD_SIZE": "2"}, ShardSettings(2, 4)),
    ],
)
def test_a_cluster_names_a_part(environment: dict[str, str], wanted: ShardSettings) -> None:
    assert from_environment(ShardSettings(), environment) == wanted
    assert from_environment(ShardSettings(0, 9), environment) == ShardSettings(0, 9)
    assert from_environment(ShardSettings(None, 1), environment) == ShardSettings(None, 1)


@pytest.mark.parametrize("gaps", [array(7, 3), array(4, 3, low=1, step=2)])
def test_an_array_with_gaps_is_refused(gaps: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"no shards: 'task .*set both shard\.index and shard\.count"):
        from_environment(ShardSettings(), gaps)
