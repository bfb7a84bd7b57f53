"""Rounds of exits counted on a table: those that a ladder would run, limits, names of arms."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pacer.errors import ConfigError
from pacer.evaluation.cascade.walk import Cascade, usage
from tests.cascades import L, table


class Ladder:
    """Stages on one text, token by token: who has read what is a length, as in decoding."""

    def __init__(self, agree: Sequence[Sequence[bool]], cut: bool, cascade: Cascade) -> None:
        self.agree, self.cascade, self.n = agree, cascade, len(agree[0])
        self.ended, self.top = not cut, len(agree)
        self.lengths = [0] * (self.top + 1)
        self.passes: list[Counter[int]] = [Counter() for _ in self.lengths]
        self.heads: list[Counter[int]] = [Counter() for _ in self.lengths]
        self.verified, self.shown, self.taken = ([0] * self.top for _ in range(3))
        self.emitted: list[int] = []
        place = 1
        while place < self.n:
            self.emitted.append(min(self.verify(self.top, place, self.n - place + self.ended), self.n - place))
            place += self.emitted[-1]

    def read(self, k: int, upto: int) -> None:
        if k > 0 and self.lengths[k - 1] < upto:
            self.read(k - 1, upto)
        assert upto > self.lengths[k]
        self.passes[k][upto - self.lengths[k]] += 1
        self.lengths[k] = upto

    def gather(self, k: int, place: int, room: int) -> int:
        wanted = min(self.cascade.buffers[k], room)
        got = 0
        while got < wanted:
            if k == 0:
                self.read(0, place + got)
                self.heads[0][1] += 1
                got += 1
            else:
                got += self.verify(k, place + got, room - got)
        return got

    def verify(self, k: int, place: int, room: int) -> int:
        m = self.gather(k - 1, place, room - 1)
        final = k == self.top
        adds = self.cascade.bonus or final or m == 0
        self.read(k, place + m if adds else place + m - 1)
        self.heads[k][m + 1] += 1
        accepted = 0
        while accepted < m and self.agree[k - 1][place + accepted]:
            accepted += 1
        self.verified[k - 1] += m > 0
        self.shown[k - 1] += m
        self.taken[k - 1] += accepted
        self.lengths[: k + 1] = [min(have, place + accepted) for have in self.lengths[: k + 1]]
        return accepted + (adds or accepted < m)


@st.composite
def cascades(draw: st.DrawFn) -> tuple[list[list[list[bool]]], list[bool], Cascade]:
    count = draw(st.integers(1, 3))
    sizes = draw(st.lists(st.integers(1, 24), min_size=1, max_size=3))
    flips = [[draw(st.lists(st.booleans(), min_size=n, max_size=n)) for n in sizes] for _ in range(count)]
    cut = [draw(st.booleans()) for _ in sizes]
    least = 0 if count == 1 else 1
    buffers = tuple(draw(st.integers(least, 6)) for _ in range(count))
    return flips, cut, Cascade(tuple(range(1, count + 1)), buffers, draw(st.booleans()))


@settings(max_examples=300, deadline=None)
@given(cascades())
def test_the_walk_counts_what_a_ladder_runs(case: tuple[list[list[list[bool]]], list[bool], Cascade]) -> None:
    agree, cut, cascade = case
    used = usage(table(agree, cut), cascade)
    for i, is_cut in enumerate(cut):
        slow = Ladder([pair[i] for pair in agree], is_cut, cascade)
        assert (used.emitted[i], used.rounds[i]) == (sum(slow.emitted), len(slow.emitted))
        for fast, counted in ((used.passes, slow.passes), (used.reads, slow.heads)):
            found = [{n: int(c) for n, c in enumerate(row) if c} for row in fast[i]]
            assert found == [dict(counter) for counter in counted]
        for name in ("verified", "shown", "taken"):
            assert getattr(used, name)[i].tolist() == getattr(slow, name)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.booleans(), min_size=3, max_size=40), st.integers(0, 8), st.integers(0, 100))
def test_more_agreement_never_needs_more_rounds(hits: list[bool], gamma: int, at: int) -> None:
    more = list(hits)
    more[at % len(hits)] = True
    before, after = (usage(table([[flips]], [True]), Cascade((1,), (gamma,))) for flips in (hits, more))
    assert after.rounds.sum() <= before.rounds.sum()


@pytest.mark.parametrize(("exits", "buffers"), [((1,), (4,)), ((1, 2), (2, 4)), ((1, 2, 3), (2, 3, 8))])
def test_limits(exits: tuple[int, ...], buffers: tuple[int, ...]) -> None:
    """All agree: every round emits its whole buffer and one more; the model disagrees everywhere: one token a round."""
    n = 601
    always, never = [[[True] * n] for _ in exits], [[[False] * n] for _ in exits]
    used = usage(table(always, [True]), Cascade(exits, buffers))
    grown = buffers[0]
    for size in buffers[1:]:
        grown = (grown + 1) * -(-size // (grown + 1))
    assert used.tokens_per_verify == pytest.approx(grown + 1, rel=0.01)
    assert used.acceptance == [1.0] * len(exits)
    used = usage(table(never, [True]), Cascade(exits, buffers))
    assert used.tokens_per_verify == 1 and used.acceptance == [0.0] * len(exits)
    plain = usage(table(always[:1], [True]), Cascade((1,), (0,)))
    assert plain.rounds.sum() == n - 1 and plain.layer_tokens(Cascade((1,), (0,)), L) == L


def test_settings_that_do_not_fit() -> None:
    for exits, buffers in (((2, 1), (1, 1)), ((1, 2), (1,)), ((), ()), ((1, 2), (0, 4)), ((0,), (2,)), ((1,), (-1,))):
        with pytest.raises(ConfigError, match="exits and buffers"):
            Cascade(exits, buffers)
    with pytest.raises(ConfigError, match="no such exit"):
        usage(table([[[True] * 4]], [True]), Cascade((3,), (1,)))


def test_names_of_arms() -> None:
    assert Cascade((4,), (3,)).arm == "layerskip exits=[4] gamma=3"
    assert Cascade((4, 8), (2, 4)).arm == "hispec exits=[4,8] gamma=2 n=4"
    assert Cascade((4, 8), (2, 4), bonus=False).arm == "hispec exits=[4,8] gamma=2 n=4 bonus=false"
    assert Cascade((2, 4, 8), (2, 3, 6)).arm == "hispec exits=[2,4,8] gamma=2 n=[3,6]"
