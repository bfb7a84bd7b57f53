"""What n-gram methods remember, by hand: the pool, Lookahead's window, Ouroboros' agreements, prompt lookup's rule."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pacer.decoding.clock import Clock
from pacer.decoding.drafters.lookahead import Lookahead
from pacer.decoding.drafters.ouroboros import agreements
from pacer.decoding.drafters.prompt_lookup import PromptLookup
from pacer.decoding.pool import Pool
from pacer.decoding.request import Request, Row
from pacer.decoding.tree import ROOT
from pacer.decoding.verdict import Verdict
from pacer.errors import ConfigError

CPU = torch.device("cpu")
CLOCK = Clock(CPU)


def row(text: Sequence[int], new: int = 50, key: int = 0) -> Row:
    return Row(Request("a", list(text), new), list(text), key)


def test_a_pool_keeps_the_latest_phrases_of_a_token() -> None:
    pool = Pool(most=2, longest=3)
    for phrase in ([1, 2, 3, 4], [5], [6, 7], [5]):
        pool.add(0, phrase)
    assert pool.after(0) == [(5,), (6, 7)] and pool.after(1) == []
    pool.add(0, [6, 7])
    assert pool.after(0) == [(6, 7), (5,)], "a known one becomes the latest"
    pool.add(0, [])
    assert pool.after(0) == [(6, 7), (5,)]
    nothing = Pool(most=0, longest=3)
    nothing.add(0, [1])
    assert nothing.after(0) == []


def test_a_phrase_is_corrected_in_its_place() -> None:
    pool = Pool(most=3, longest=2)
    for phrase in ([1, 2], [3, 4], [5, 6]):
        pool.add(0, phrase)
    pool.replace(0, (3, 4), [3, 9, 9])
    assert pool.after(0) == [(5, 6), (3, 9), (1, 2)]
    pool.replace(0, (3, 9), [5, 6])
    assert pool.after(0) == [(5, 6), (1, 2)], "not twice"
    pool.replace(0, (1, 2), [1, 2])
    pool.replace(0, (8, 8), [7, 7])
    pool.replace(4, (1, 2), [7, 7])
    assert pool.after(0) == [(5, 6), (1, 2)] and pool.after(4) == []


def test_a_text_has_the_phrases_behind_each_of_its_tokens() -> None:
    pool = Pool(most=3, longest=2)
    pool.learn([1, 2, 3, 1, 2, 4, 1])
    assert pool.after(1) == [(2, 4), (2, 3)] and pool.after(2) == [(4, 1), (3, 1)] and pool.after(4) == []


def said(choices: list[int]) -> Verdict:
    """A verdict of which only the choices matter."""
    return Verdict([[]], [0], [0], [[]], [-1], None, choices=[choices])


def test_a_window_moves_on_by_a_token_and_leaves_n_grams() -> None:
    """N = 3, W = 3 by hand: nodes (0, 1), (0, 2) and (1, 0 … 2), each column's choice at its end."""
    drafter = Lookahead(99, CPU, CLOCK, level=3, window=3, guesses=2)
    text = row([10, 11, 12, 13, 14, 15, 16])
    drafter.reset([text], 99, torch.empty(1, 0))
    drafter._columns[0] = [[20], [31, 21], [32, 22]]
    draft = drafter.propose([text])
    assert draft.parents is not None
    assert draft.tokens[0].tolist() == [20, 31, 21, 32, 22]  # (1, 0); (0, 1), (1, 1); (0, 2), (1, 2)
    assert draft.parents[0].tolist() == [-1, -1, 1, 1, 3]
    drafter.saw([text], [0], said([0, 1, 2, 3, 4, 5]))
    assert drafter._columns[0] == [[1], [21, 3], [22, 5]]
    pool = drafter.pools[0]
    assert (pool.after(16), pool.after(31), pool.after(32)) == ([(20, 1)], [(21, 3)], [(22, 5)])
    text.committed.append(31)
    draft = drafter.propose([text])
    assert draft.tokens[0].tolist() == [21, 3, 1, 22, 5], "the guess (21, 3) is the window's own second column"
    assert draft.parents is not None and draft.parents[0].tolist() == [-1, 0, -1, 0, 3]


@given(
    st.integers(2, 6), st.integers(1, 6), st.integers(0, 4), st.lists(st.integers(0, 4), min_size=1, max_size=8),
    st.integers(2, 12), st.integers(0, 10**6),
)  # fmt: skip
def test_windows_of_any_size(level: int, window: int, guesses: int, text: list[int], new: int, seed: int) -> None:
    """Columns stay as long as they are, trees inside the room, pools and memory inside their bounds."""
    drafter = Lookahead(99, CPU, CLOCK, level, window, guesses)
    one = row(text, new, key=seed)
    drafter.reset([one], 99, torch.empty(1, 0))
    generator = torch.Generator().manual_seed(seed)
    while one.left > 1:
        draft = drafter.propose([one])
        nodes = draft.counts[0]
        assert nodes <= drafter.spare and [len(c) for c in drafter._columns[0]] == [
            level - 2,
            *[level - 1] * (window - 1),
        ]
        parents = [*range(-1, nodes - 1)] if draft.parents is None else draft.parents[0].tolist()
        depths: list[int] = []
        for parent in parents:
            depths.append(1 if parent == ROOT else depths[parent] + 1)
        assert max(depths, default=0) <= one.left - 1
        choices = torch.randint(0, 5, (nodes + 1,), generator=generator).tolist()
        one.committed.append(choices[0])
        drafter.saw([one], [0], said(choices))
        for key in range(5):
            phrases = drafter.pools[0].after(key)
            assert len(phrases) <= guesses and all(len(phrase) == level - 1 for phrase in phrases)


def test_a_prompts_own_n_grams_are_guesses() -> None:
    drafter = Lookahead(99, CPU, CLOCK, level=3, window=1, guesses=2, from_prompt=True)
    text = row([1, 2, 3, 1, 4, 5, 1])
    drafter.reset([text], 99, torch.empty(1, 0))
    drafter._columns[0] = [[9]]
    assert drafter.propose([text]).tokens[0].tolist() == [4, 5, 2, 3, 9]


def test_runs_where_the_target_agrees_again_are_phrases() -> None:
    draft, choices = [1, 2, 3, 4, 5, 6], [1, 9, 3, 4, 8, 6, 7]  # 2 is rejected; 3, 4 and then 6 are agreed on
    assert agreements(draft, choices, 2) == [(2, [3, 4, 8]), (5, [6, 7])]
    assert agreements(draft, choices, 7) == [] and agreements(draft, choices, 4) == [(5, [6, 7])]


def lookup(text: list[int], new: int = 50, **options: object) -> tuple[list[int], list[int] | None]:
    drafter = PromptLookup(99, CPU, CLOCK, **options)  # type: ignore[arg-type]  # of a test
    one = row(text, new)
    drafter.reset([one], 99, torch.empty(1, 0))
    draft = drafter.propose([one])
    return draft.tokens[0, : draft.counts[0]].tolist(), None if draft.parents is None else draft.parents[0].tolist()


def test_the_longest_match_drafts_and_the_latest_of_equals() -> None:
    text = [1, 2, 3, 4, 9, 2, 3, 5, 8, 1, 2, 3]
    assert lookup(text, gamma=3) == ([4, 9, 2], None)  # 1 2 3 has been there once
    assert lookup(text, gamma=3, longest=2) == ([5, 8, 1], None)
    assert lookup(text, gamma=3, longest=2, prefer="earliest") == ([4, 9, 2], None)
    assert lookup(text, gamma=2, branches=2) == ([4, 9, 5, 8], [-1, 0, -1, 2])
    assert lookup(text, gamma=3, new=3)[0] == [4, 9], "the target adds a token of its own"
    assert lookup([1, 2, 3]) == ([], None) and lookup([7]) == ([], None)
    assert lookup([7, 7]) == ([7], None), "up to the text's end"


@given(st.lists(st.integers(0, 2), min_size=1, max_size=14), st.integers(1, 4), st.booleans())
def test_the_rule_is_that_of_a_search(text: list[int], longest: int, earliest: bool) -> None:
    wanted: list[int] = []
    for n in range(min(longest, len(text) - 1), 0, -1):
        places = [at + n for at in range(len(text) - n) if text[at : at + n] == text[-n:]]
        if places:
            place = places[0] if earliest else places[-1]
            wanted = text[place : place + 5]
            break
    found, parents = lookup(text, gamma=5, longest=longest, prefer="earliest" if earliest else "latest")
    assert found == wanted and parents is None


def test_values_outside_their_ranges_are_refused() -> None:
    for options in ({"level": 1}, {"window": 0}, {"guesses": -1}, {"warm": 1.5}):
        with pytest.raises(ConfigError, match=f"drafting.{next(iter(options))} out of range"):
            Lookahead(9, CPU, CLOCK, **options)
    with pytest.raises(ConfigError, match=r"drafting\.prefer out of range: 'first'; allowed: latest, earliest"):
        PromptLookup(9, CPU, CLOCK, prefer="first")
