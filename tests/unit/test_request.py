"""One committed list: what of the verified tokens is emitted, and why a request ends."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pacer.decoding.request import Request, Row
from pacer.errors import PacerError

FAR = 10_000
PIECES = ["a", "b", "ab", "ba", "", "é", "c c", "aab"]


def _row(prompt: int = 3, new: int = 20, stop_ids: Sequence[int] = (), stop: Sequence[str] = ()) -> Row:
    return Row(Request("r", [0] * prompt, new, frozenset(stop_ids), tuple(stop)), [0] * prompt, key=0)


def _decode(ids: Sequence[int]) -> str:
    return "".join(PIECES[i] for i in ids)


def test_output_is_what_follows_the_prompt() -> None:
    row = _row(prompt=2, new=5)
    assert row.output == [] and row.left == 5
    assert row.commit([7, 8], FAR, None) == [7, 8]
    assert row.output == [7, 8] and row.left == 3 and row.committed == [0, 0, 7, 8] and row.finish is None


@pytest.mark.parametrize("stop_ids", [(5,), (5, 9), (9, 5), (2, 9, 5)])
def test_the_output_ends_at_the_first_stop_id(stop_ids: tuple[int, ...]) -> None:
    """S29, S30, M74: inside a block, whatever the order of the ids; nothing after it is committed."""
    row = _row(stop_ids=stop_ids)
    assert row.commit([1, 5, 9, 4], FAR, None) == [1, 5]
    assert row.output == [1, 5] and row.finish == "eos"


def test_an_id_that_is_not_a_stop_id_of_this_request_is_text() -> None:
    """S36."""
    row = _row(new=4)
    assert row.commit([5, 5, 5], FAR, None) == [5, 5, 5] and row.finish is None
    assert row.commit([5, 5], FAR, None) == [5] and row.finish == "length"


@pytest.mark.parametrize("new", [1, 2, 5])
def test_the_budget_is_exact(new: int) -> None:
    """S33, S34."""
    row = _row(new=new, stop_ids=[9])
    assert row.commit([1] * 8, FAR, None) == [1] * new and row.finish == "length" and row.left == 0


def test_a_stop_id_on_the_last_token_of_the_budget_is_an_eos() -> None:
    row = _row(new=2, stop_ids=[9])
    assert row.commit([1, 9, 9], FAR, None) == [1, 9] and row.finish == "eos"


def test_the_context_ends_the_output() -> None:
    """S37."""
    row = _row(prompt=3, new=20)
    assert row.commit([1] * 9, 6, None) == [1, 1, 1] and row.finish == "context" and len(row.committed) == 6


def test_stop_strings_need_a_decoder() -> None:
    """S39: never ignored."""
    with pytest.raises(PacerError, match="stop strings need a tokenizer"):
        _row(stop=["x"]).commit([1], FAR, None)


@given(
    st.lists(st.integers(0, len(PIECES) - 1), min_size=1, max_size=40),
    st.lists(st.text("abcé ", min_size=1, max_size=6), min_size=1, max_size=3),
    st.lists(st.integers(1, 9), min_size=40, max_size=40),
)
def test_a_stop_string_cuts_where_plain_decoding_would(ids: list[int], stop: list[str], blocks: list[int]) -> None:
    """S31: the output ends with the token whose text completes the first stop string, however rounds cut the tokens."""
    ends = [n for n in range(1, len(ids) + 1) if any(s in _decode(ids[:n]) for s in stop)]
    row, start = _row(prompt=2, new=FAR, stop=stop), 0
    for size in blocks:
        row.commit(ids[start : start + size], FAR * 10, _decode)
        start += size
        if row.finish or start >= len(ids):
            break
    assert row.output == ids[: ends[0]] if ends else row.output == ids
    assert row.finish == ("stop_string" if ends else None)


def test_a_stop_string_inside_the_prompt_does_not_count() -> None:
    row = Row(Request("r", [0, 1], 5, stop=("ab",)), [0, 1], key=0)
    assert row.commit([1, 0], FAR, _decode) == [1, 0] and row.finish is None


def test_a_match_over_prompt_and_output_does_not_count() -> None:
    row = Row(Request("r", [0], 5, stop=("ab",)), [0], key=0)
    assert row.commit([1, 1], FAR, _decode) == [1, 1] and row.finish is None


def test_a_long_run_without_text_does_not_hide_a_stop_string() -> None:
    """Special tokens decode to nothing: a stop string may lie more tokens back than it has letters."""
    row = _row(new=FAR, stop=["ab"])
    row.commit([0, *[4] * 30], FAR * 10, _decode)
    assert row.commit([1, 1], FAR * 10, _decode) == [1] and row.finish == "stop_string"
