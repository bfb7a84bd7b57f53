"""Splits by a hash of the id: the same on every machine and for ever, since checkpoints depend on them."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from pacer.data.splits import is_tuning, part_of
from pacer.settings import CorpusSettings

PARTS = CorpusSettings().parts
PINNED = {
    "gsm8k-train-0": ("draft", True),
    "gsm8k-train-2": ("preverifier", False),
    "HumanEval-7": ("draft", False),
    "mbpp-700": ("draft", True),
    "instruct-5": ("tuning", True),
}
NAMES = [f"{task}-{split}-{i}" for task in ("gsm8k", "xsum") for split in ("train", "test") for i in range(500)]


def test_pinned() -> None:
    """Changing these mixes the texts of published checkpoints with those that judge them."""
    assert {name: (part_of(name, PARTS), is_tuning(name)) for name in PINNED} == PINNED


def test_shares() -> None:
    counts = Counter(part_of(name, PARTS) for name in NAMES)
    assert all(abs(counts[part] / len(NAMES) - share) < 0.03 for part, share in PARTS.items())
    assert abs(sum(map(is_tuning, NAMES)) / len(NAMES) - 0.25) < 0.03


def test_the_two_splits_are_independent() -> None:
    tuning = [name for name in NAMES if is_tuning(name)]
    counts = Counter(part_of(name, PARTS) for name in tuning)
    assert all(abs(counts[part] / len(tuning) - share) < 0.06 for part, share in PARTS.items())


@settings(deadline=None)
@given(st.text(), st.dictionaries(st.sampled_from("abcd"), st.floats(0, 10), min_size=1))
def test_every_id_has_a_part(name: str, parts: dict[str, float]) -> None:
    part = part_of(name, parts)
    assert part in parts
    scaled = {key: 2 * share for key, share in parts.items()}
    assert part_of(name, scaled) == part  # shares of their sum


def test_a_part_without_share_gets_nothing() -> None:
    parts = {"draft": 0.0, "preverifier": 1.0, "tuning": 0.0}
    assert {part_of(name, parts) for name in NAMES} == {"preverifier"}
