"""Length rules one by one, on tables: where they stop, what they learn, and that they do not flap."""

from __future__ import annotations

import math
from dataclasses import fields, is_dataclass
from inspect import signature
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from pacer.decoding.controllers.adaedl import AdaEdl
from pacer.decoding.controllers.base import controller_class
from pacer.decoding.controllers.dynamic import Dynamic
from pacer.decoding.controllers.heuristic import Heuristic
from pacer.decoding.controllers.marginal import Marginal, Now
from pacer.decoding.controllers.online import Online
from pacer.decoding.controllers.svip import Svip
from pacer.decoding.distributions import signals
from pacer.decoding.record import Record
from pacer.decoding.request import Request, Row
from pacer.errors import ConfigError, MismatchError
from pacer.methods.arms import defaults
from pacer.methods.rules import needed_by
from pacer.models.stack import Stack
from tests.rules import CHEAP, KINDS, rule
from tests.tiny import make_preverifier, tiny_model

STACK = Stack(tiny_model(layers=1))
BASE, PLACES = 3, 40


def rows(count: int) -> list[Row]:
    return [Row(Request(f"r{i}", [0], 99), [0] * BASE, i) for i in range(count)]


def record(**drawn: list[list[float]]) -> Record:
    """A record whose rows drew tokens with these signals; every other place holds what must not be looked at."""
    found = Record(torch.zeros(len(next(iter(drawn.values()))), PLACES, dtype=torch.long), STACK)
    for name, values in drawn.items():
        table = getattr(found, name)
        table.fill_(-77)
        for i, row in enumerate(values):
            table[i, BASE : BASE + len(row)] = torch.tensor(row)
    return found


def verdicts(made: Any, seen: Record, drawn: int) -> list[bool]:
    everyone = rows(len(seen.ids))
    found, scores = made.judge(seen, everyone, drawn, [True] * len(everyone))
    assert scores is not None and scores.shape[0] == len(everyone)
    return [bool(value) for value in found.tolist()]


def learn(made: Any, drawn: list[int], accepted: list[int], probs: list[list[float]] | None = None) -> None:
    seen = record(logprob=[[math.log(p) for p in row] for row in probs]) if probs else None
    made.learn(seen, [BASE] * len(drawn), drawn, accepted)


# what a file of conf/controller and its class say of each other


@pytest.mark.parametrize("kind", sorted(kind for kind in defaults() if kind != "none"))
def test_the_file_and_the_class_agree(kind: str) -> None:
    """A42: the file's keys are the class's arguments, its values allowed, and the defaults of a dataclass."""
    file, found = defaults()[kind], controller_class(kind)
    wanted = signature(found).parameters
    parts = needed_by({"kind": kind, **file})
    assert set(file) - set(parts) <= set(wanted), "a key that the class does not take"
    found.check({key: value for key, value in file.items() if value is not None})
    if is_dataclass(found):
        own = {field.name: field.default for field in fields(found) if field.name not in ("rounds", "preverifier")}
        assert own == {key: value for key, value in file.items() if key not in parts}


@pytest.mark.parametrize("kind", KINDS)
def test_values_outside_their_range_are_refused(kind: str) -> None:
    """By the class, in the settings' words; a value of another kind too."""
    file, found = defaults()[kind], controller_class(kind)
    for key in found.allowed(file):
        for wrong in (-1, "nonsense", float("nan")):
            with pytest.raises(ConfigError, match=rf"{key} in here"):
                found.check({**{k: v for k, v in file.items() if v is not None}, key: wrong}, "here")


# svip, adaedl


def test_svip_stops_where_the_bound_exceeds_h() -> None:
    entropy = [[0.59, 0.61], [0.61, 0.0]]  # sqrt(0.15·0.6) = 0.3
    assert verdicts(Svip(), record(entropy=entropy), 1) == [True, False]
    assert verdicts(Svip(), record(entropy=entropy), 2) == [False, True]
    assert verdicts(Svip(h=0.31), record(entropy=entropy), 1) == [True, True]
    assert verdicts(Svip(scale=0.3), record(entropy=entropy), 1) == [False, False]


def test_a_certain_draft_goes_on() -> None:
    """A53: the entropy of a one-hot row is 0, not NaN; NaN itself never goes on."""
    logits = torch.full((1, 1, 7), -torch.inf)
    logits[0, 0, 3] = 1.0
    seen = record(entropy=[[0.0]])
    seen.drew(torch.tensor([[BASE]]), signals(logits, torch.tensor([[3]])), torch.zeros(1, 1).long())
    for made in (Svip(h=0.0), AdaEdl(t=1.0)):
        made.reset(rows(1), 9)
        assert verdicts(made, seen, 1) == [True]
        assert verdicts(made, record(entropy=[[math.nan]]), 1) == [False]


def test_adaedl_stops_below_a_threshold_that_follows_the_acceptance() -> None:
    made = AdaEdl(t=0.6)
    made.reset(rows(2), 9)
    entropy = [[0.79], [0.81]]  # 1 − sqrt(0.2·0.8) = 0.6
    assert verdicts(made, record(entropy=entropy), 1) == [True, False]
    learn(made, [4, 0], [4, 0])
    assert made.states[0].acceptance == 0.5 and made.states[0].t == pytest.approx(0.601)  # below alpha: stricter
    assert made.states[1] == made.fresh(), "a round without a draft teaches nothing"
    for _ in range(4):
        learn(made, [4, -1], [4, 0])
    assert made.states[0].acceptance == pytest.approx(1 - 0.5**5)
    assert made.states[0].t == pytest.approx(0.603 - 0.001 * 2)  # three rounds below 0.9, two above
    before = made.states[0].t
    learn(made, [20, -1], [20, 0])
    assert made.states[0].t == before, "only gamma_max ended the draft"


def test_adaedl_does_not_flap() -> None:
    """A48: one round moves the threshold by a thousandth."""
    made, rng = AdaEdl(), np.random.default_rng(0)
    made.reset(rows(1), 9)
    path = []
    for _ in range(200):
        learn(made, [4], [int(rng.integers(5))])
        path.append(made.states[0].t)
    assert np.abs(np.diff(path)).max() <= 0.001 + 1e-12


# heuristic, dynamic: parity with transformers is in tests/integration/test_hf_schedules.py


def test_heuristic_lengths() -> None:
    made = Heuristic(start=2, gamma_max=5)
    made.reset(rows(2), 9)
    seen = [list(made.limits(rows(2)))]
    for drawn, accepted in (([2, 2], [2, 1]), ([4, 1], [4, 0]), ([5, 1], [4, 0]), ([-1, 0], [0, 0])):
        learn(made, drawn, accepted)
        seen.append(list(made.limits(rows(2))))
    assert seen == [[2, 2], [4, 1], [5, 1], [5, 1], [5, 1]]


def test_dynamic_is_refitted_once_it_has_seen_enough() -> None:
    made = Dynamic(t=0.4)
    made.reset(rows(1), 9)
    learn(made, [3], [2], [[0.9, 0.8, 0.3]])
    learn(made, [2], [2], [[0.7, 0.95]])
    assert made.states[0].t == 0.4, "five tokens are too few"
    learn(made, [3], [1], [[0.6, 0.2, 0.99]])  # what follows a rejection was not judged
    assert made.states[0].probs == pytest.approx([0.9, 0.8, 0.3, 0.7, 0.95, 0.6, 0.2])
    assert made.states[0].t == pytest.approx(0.6) and verdicts(made, record(logprob=[[math.log(0.61)]]), 1) == [True]
    assert verdicts(made, record(logprob=[[math.log(0.59)]]), 1) == [False]


def test_dynamic_comes_to_rest() -> None:
    """A48: on rounds of one kind the threshold moves less and less."""
    moves = np.zeros(399)
    for seed in range(4):
        rng, made, path = np.random.default_rng(seed), Dynamic(), []
        made.reset(rows(1), 9)
        for _ in range(400):
            p = rng.uniform(0.05, 1.0, 4)
            learn(made, [4], [int(np.cumprod(rng.random(4) < p).sum())], [p.tolist()])
            path.append(made.states[0].t)
        moves += np.abs(np.diff(path))
    assert moves[200:].sum() < moves[:200].sum() / 2


@pytest.mark.parametrize("kind", [kind for kind in KINDS if issubclass(controller_class(kind), Online)])
def test_state_is_the_requests_own_unless_it_is_kept_warm(kind: str) -> None:
    for warm in (False, True):
        made = rule(kind, STACK, warm=warm)
        assert isinstance(made, Online)
        made.reset(rows(2), 9)
        learn(made, [2, 2], [2, 0], [[0.9, 0.9]] * 2)
        taught = [repr(state) for state in made.states]
        assert taught[0] != taught[1] != repr(made.fresh())
        made.admit(1)
        assert (repr(made.states[1]) == taught[1]) == warm and repr(made.states[0]) == taught[0]
        made.reset(rows(3), 9)
        assert (repr(made.states[0]) == taught[0]) == warm and repr(made.states[2]) == repr(made.fresh())


# marginal


def marginal(**values: Any) -> Marginal:
    made = Marginal(values.pop("rounds", CHEAP), **values)
    made.reset(rows(1), 99)
    return made


def drafted(made: Marginal, probs: list[float]) -> int:
    """Tokens that are drawn when the draft gives its tokens these probabilities."""
    if not made.limits(rows(1))[0]:
        return 0
    for n in range(made.b, made.gamma_max, made.b):
        if not verdicts(made, record(logprob=[[math.log(p) for p in probs[:n]]]), n)[0]:
            return n
    return made.gamma_max


def simulate(made: Marginal, chance: Any, rounds: int, seed: int = 0) -> list[int]:
    """Draft lengths of a request whose tokens are accepted with ``chance(round)``, of which the draft is right."""
    rng, lengths = np.random.default_rng(seed), []
    for k in range(rounds):
        p = [chance(k)] * made.gamma_max
        n = drafted(made, p)
        lengths.append(n)
        run = int(np.cumprod(rng.random(n) < p[:n]).sum())
        learn(made, [n], [run], [p])
    return lengths


@pytest.mark.parametrize(("chance", "each"), [(0.8, 0.1), (0.6, 0.1), (0.9, 0.25), (0.7, 0.05)])
def test_the_fractional_rule_finds_the_best_length(chance: float, each: float) -> None:
    """With one acceptance for all tokens the best rule is the best window, and the request's speed leads there."""
    times = [1 + each * n for n in range(25)]
    speeds = [(1 - chance ** (n + 1)) / (1 - chance) / times[n] for n in range(25)]
    best = max(speeds)
    lengths = simulate(marginal(rounds=times, gamma_max=24, acceptance=chance), lambda k: chance, 400)
    settled = lengths[100:]
    assert np.mean([speeds[n] for n in settled]) > 0.97 * best
    assert abs(np.mean(settled) - int(np.argmax(speeds))) < 1.6


def test_a_block_pays_as_the_formula_says() -> None:
    made = marginal(b=2, gamma_max=6, acceptance=0.5, weight=1e9, rounds=[1, 1.2, 1.5, 1.7, 2.0, 2.2, 2.5])
    made.states[0].emitted, made.states[0].spent = 3.0, 2.0  # speed 1.5
    now = Now(made, torch.device("cpu"))
    for drawn in (2, 4):
        for survival in np.linspace(0.0, 1.0, 21):
            gains = [(survival * sum(0.5**j for j in range(1, m + 1)), made.times[drawn + m] - made.times[drawn])
                     for m in range(2, 6 - drawn + 1, 2)]  # fmt: skip
            margin = max(gain - 1.5 * time for gain, time in gains)
            if abs(margin) > 1e-6:
                assert bool(now.pays(torch.tensor([survival]), drawn)) == (margin > 0)


def test_acceptance_is_learnt_by_tenth_of_the_probability() -> None:
    made = marginal(weight=2.0)
    now = Now(made, torch.device("cpu"))
    probs = torch.tensor([[0.05, 0.55, 0.93, 1.0, math.nan]])
    torch.testing.assert_close(now.accepted(probs), torch.tensor([[0.05, 0.55, 0.93, 1.0, 0.0]]))
    for _ in range(4):
        learn(made, [3], [1], [[0.93, 0.55, 0.93]])  # accepted, rejected, not judged
    now = Now(made, torch.device("cpu"))
    expected = [(0 + 2 * 0.55) / 6, (4 + 2 * 0.93) / 6]
    torch.testing.assert_close(now.accepted(torch.tensor([[0.55, 0.93]])), torch.tensor([expected]))
    table = [0.5] * 11
    assert Now(marginal(table=table), torch.device("cpu")).accepted(torch.tensor([[0.07, 0.9]])).tolist() == [[0.5] * 2]


def test_where_full_acceptance_does_not_pay_nothing_is_ever_drafted() -> None:
    assert marginal(rounds=[1.0, 2.0, 3.0, 4.0]).gamma_max == 0
    assert marginal(rounds=[2.0, 4.0, 6.0]).gamma_max == 0, "in whatever unit"
    assert marginal(rounds=[1.0, 2.0, 2.1]).gamma_max == 2
    assert marginal(gamma_max=50, rounds=[1, 1.1, 1.2]).gamma_max == 2, "no longer than times are known"


def test_a_draft_that_does_not_pay_is_given_up_and_tried_ever_more_rarely() -> None:
    """A46, A49: acceptance counts for nothing, tokens over time decide, no draft included."""
    made = marginal(rounds=[1 + 0.4 * n for n in range(9)], gamma_max=8)
    lengths = simulate(made, lambda k: 0.15, 600)
    on = [n > 0 for n in lengths]
    assert 0 < sum(on[:60]) < 30 and sum(on[300:]) <= 2 * made.trial
    assert made.states[0].wait == 16 * made.wait, "the longest wait"


def test_a_draft_that_pays_is_kept() -> None:
    for seed in range(3):
        lengths = simulate(marginal(), lambda k: 0.8, 150, seed)
        assert sum(n == 0 for n in lengths) == 0


def test_drafting_comes_back_when_it_pays_again() -> None:
    made = marginal(rounds=[1 + 0.3 * n for n in range(9)], gamma_max=8)
    lengths = simulate(made, lambda k: 0.1 if k < 150 else 0.95, 700)
    assert np.mean([n > 0 for n in lengths[50:150]]) < 0.3 and np.mean([n > 0 for n in lengths[500:]]) == 1


def test_near_the_break_even_the_choice_does_not_flap() -> None:
    """A48: at an acceptance with which drafting is worth as much as it costs."""
    times = [1 + 0.5 * n for n in range(5)]
    switches = []
    for seed in range(8):
        on = [n > 0 for n in simulate(marginal(rounds=times, gamma_max=4), lambda k: 0.5, 400, seed)]
        switches.append(sum(a != b for a, b in pairwise(on)))
    assert np.mean(switches) < 12, switches


def test_a_pre_verifier_of_survival_is_wanted() -> None:
    for label in ("conditional", "next"):
        judge = (make_preverifier(STACK, label=label), None)
        with pytest.raises(MismatchError, match=f"survival.*{label}"):
            Marginal(CHEAP, judge, signal="preverifier")
    made = Marginal(CHEAP, (make_preverifier(STACK, gamma_max=6), None), signal="preverifier", b=2)
    assert made.gamma_max == 6, "longer drafts were never trained on"


def test_a_table_that_is_none_is_refused() -> None:
    for table in ([0.5], [0.5] * 10 + [1.5], "abcdefghijk"):
        with pytest.raises(ConfigError, match=r"table in here.*11 numbers"):
            Marginal.check({"table": table}, "here")
    assert SimpleNamespace(**vars(Marginal(CHEAP, table=[0.1] * 11))).knots == [0.1] * 11
