"""Threshold rules on hand-made signals; which settings exist; what null and none mean."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pacer.assemble import Models, make_controller
from pacer.choices import FEATURES
from pacer.decoding.controllers.base import ASK, GO, STOP
from pacer.decoding.controllers.fixed import Fixed
from pacer.decoding.controllers.preverifier import RULES as BLOCK_RULES
from pacer.decoding.controllers.preverifier import PreverifierRule, block_value
from pacer.decoding.controllers.threshold import RULES, SIGNALS, Threshold
from pacer.decoding.distributions import signals
from pacer.decoding.parts import resolved
from pacer.decoding.record import Record
from pacer.decoding.request import Request, Row
from pacer.errors import ConfigError
from pacer.evaluation.replay import rules
from pacer.methods.arms import check_controller, controllers, method_settings, methods, normal_controller
from pacer.models.preverifier import SCALES
from pacer.models.stack import Stack
from tests.tiny import make_preverifier, tiny_model

STACK = Stack(tiny_model(layers=1))
PLACES = 12
BASES = (3, 5)  # committed tokens of the two rows


def _rows(bases: tuple[int, ...] = BASES) -> list[Row]:
    return [Row(Request(f"r{i}", [0], 9), [0] * base, i) for i, base in enumerate(bases)]


def _record(**drawn: list[list[float]]) -> Record:
    """A record whose rows drew tokens with these signals; every other place holds what must not be looked at."""
    record = Record(torch.zeros(2, PLACES, dtype=torch.long), STACK)
    for name, rows in drawn.items():
        table = getattr(record, name)
        table.fill_(-77)
        for i, (base, values) in enumerate(zip(BASES, rows, strict=True)):
            table[i, base : base + len(values)] = torch.tensor(values)
    return record


def _judge(rule: Threshold, record: Record, drawn: int) -> tuple[list[bool], list[float]]:
    verdicts, scores = rule.judge(record, _rows(), drawn, [True, True])
    assert verdicts is not None and scores is not None and scores.shape == (2, 1)
    return verdicts.tolist(), scores.flatten().tolist()


P = [[0.9, 0.5, 0.8], [0.25, 1.0, 0.5]]
LOGPROB = [torch.tensor(row).log().tolist() for row in P]


@pytest.mark.parametrize(
    ("options", "drawn", "value", "go_on"),
    [
        ({"t": 0.5}, 1, [0.9, 0.25], [True, False]),
        ({"t": 0.5}, 2, [0.5, 1.0], [True, True]),  # equal to t: on
        ({"t": 0.51}, 2, [0.5, 1.0], [False, True]),
        ({"t": 0.5}, 3, [0.8, 0.5], [True, True]),
        ({"t": 0.3, "rule": "product"}, 1, [0.9, 0.25], [True, False]),
        ({"t": 0.3, "rule": "product"}, 3, [0.36, 0.125], [True, False]),
        ({"t": 0.4, "rule": "product"}, 3, [0.36, 0.125], [False, False]),
        ({"t": 0.0, "rule": "product"}, 3, [0.36, 0.125], [True, True]),
    ],
)
def test_probability(options: dict[str, Any], drawn: int, value: list[float], go_on: list[bool]) -> None:
    found, scores = _judge(Threshold("probability", **options), _record(logprob=LOGPROB), drawn)
    assert scores == pytest.approx(value, abs=1e-6) and found == go_on


@pytest.mark.parametrize(
    ("signal", "t", "go_on"),
    [
        ("entropy", 1.5, [[True, True], [False, True]]),  # on iff at most t
        ("entropy", 1.0, [[True, True], [False, False]]),
        ("margin", 1.5, [[False, False], [True, False]]),
        ("margin", 0.5, [[True, True], [True, True]]),
        ("match", 1, [[False, False], [True, True]]),
    ],
)
def test_other_signals(signal: str, t: float, go_on: list[list[bool]]) -> None:
    values = [[0.0, 3.0], [0.0, 1.0]] if signal == "match" else [[1.0, 2.0], [0.5, 1.25]]
    for drawn in (1, 2):
        found, scores = _judge(Threshold(signal, t=t), _record(**{signal: values}), drawn)
        assert found == go_on[drawn - 1] and scores == [values[0][drawn - 1], values[1][drawn - 1]]


def test_a_certain_draft_goes_on_at_entropy_0() -> None:
    """A53: the entropy of a one-hot row is 0, not NaN, so even t = 0 goes on; NaN never goes on."""
    logits = torch.full((2, 1, 7), -torch.inf)
    logits[:, 0, 3] = 1.0
    record = _record()
    record.drew(torch.tensor(BASES)[:, None], signals(logits, torch.tensor([[3], [3]])), torch.zeros(2, 1).long())
    assert _judge(Threshold("entropy", t=0.0), record, 1) == ([True, True], [0.0, 0.0])
    assert _judge(Threshold("probability", t=1.0), record, 1) == ([True, True], [1.0, 1.0])
    for rule in (Threshold("entropy", t=9.0), Threshold(t=0.0)):
        assert _judge(rule, _record(entropy=[[torch.nan]] * 2, logprob=[[torch.nan]] * 2), 1)[0] == [False, False]


def test_a_row_that_has_ended_at_the_records_end_does_no_harm() -> None:
    """A51: the other rows draft on, to places that this one does not have."""
    rows = _rows((3, PLACES))
    for rule in ("last", "product"):
        verdicts, _ = Threshold(rule=rule, t=0.1).judge(_record(logprob=LOGPROB), rows, 3, [True, False])
        assert verdicts is not None and verdicts.tolist()[0] is True


def test_blocks_end_at_gamma_max() -> None:
    assert [Threshold(gamma_max=2).block(drawn) for drawn in range(4)] == [1, 1, 0, -1]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("signal", {"signal": "index"}),
        ("rule", {"rule": "mean"}),
        *(("rule", {"rule": "product", "signal": signal}) for signal in SIGNALS[1:]),
        ("t", {"t": 1.01}),
        ("t", {"t": -0.1}),
        ("t", {"t": float("nan")}),
        ("t", {"t": -1, "signal": "entropy"}),
        ("gamma_max", {"gamma_max": 0}),
    ],
)
def test_values_outside_their_range_are_refused(name: str, options: dict[str, Any]) -> None:
    """By the rule, and by the check of the settings long before any model is loaded."""
    with pytest.raises(ConfigError, match=f"controller.{name} out of range"):
        Threshold(**options)
    given = {"kind": "threshold", "signal": "probability", "rule": "last", "t": 0.4, "gamma_max": 9, **options}
    with pytest.raises(ConfigError, match=f"{name} in here"):
        check_controller(given, "here")


def test_arms() -> None:
    settings = method_settings("threshold signal=probability rule=product t=0.25 gamma_max=6")
    controller = make_controller(settings, MODELS)
    assert isinstance(controller, Threshold)
    assert (controller.signal, controller.rule, controller.t, controller.gamma_max) == (
        "probability",
        "product",
        0.25,
        6,
    )
    assert vars(make_controller(method_settings("threshold"), MODELS)) == vars(Threshold())
    assert controllers()["threshold"] == ["signal", "rule", "t", "gamma_max"] and set(RULES) == {"last", "product"}
    for arm, part in (
        ("threshold t=null", r"t in .*allowed: \[0, 1\]"),
        ("threshold t0=0.3", "did you mean t"),
        ("threshold signal=match rule=product", "rule in .*allowed: last"),
        ("pacer lo=0.7 hi=0.5", r"hi in .*allowed: \[0.7, 1\]"),
        ("pacer lo=-0.1", r"lo in .*allowed: \[0, 1\]"),
        ("pacer rule=last", "rule in .*allowed: mean, min, product"),
        ("sd gamma=null", "gamma in .*whole numbers"),
    ):
        with pytest.raises(ConfigError, match=part):
            method_settings(arm)


MODELS = Models(STACK, None, (), None, STACK, preverifier=make_preverifier(STACK, gamma_max=7))  # type: ignore[arg-type]  # no text
TUNED = {"b": 3, "t0": 0.35, "rho": 1.1, "rule": "min", "lo": 0.2, "hi": 0.8, "gamma_max": 6}


def _values(arm: str, tuned: dict[str, Any] | None) -> dict[str, Any]:
    MODELS.tuned = tuned
    controller = make_controller(method_settings(arm), MODELS)
    assert isinstance(controller, PreverifierRule)
    return {name: getattr(controller, name) for name in TUNED}


def test_null_is_the_value_tuned_for_the_checkpoint() -> None:
    """A42, A44: and a value that was set is never replaced; without a tuned one the rule's own default holds."""
    assert _values("pacer", TUNED) == TUNED
    assert _values("pacer t0=0.0 lo=0 hi=1 rule=mean b=1", TUNED) == {
        **TUNED, "t0": 0.0, "lo": 0, "hi": 1, "rule": "mean", "b": 1
    }  # fmt: skip
    plain = {"b": 2, "t0": 0.5, "rho": 1.0, "rule": "mean", "lo": 0.0, "hi": 1.0, "gamma_max": 7}
    assert _values("pacer", None) == plain
    assert _values("pacer", {"b": 4}) == {**plain, "b": 4}
    assert _values("pacer gamma_max=4", TUNED)["gamma_max"] == 4
    assert _values("pacer gamma_max=99", TUNED)["gamma_max"] == 7, "longer drafts were never trained on"
    with pytest.raises(ConfigError, match=r"controller.hi out of range.*\[0.2, 1\]"):
        _values("pacer hi=0.1", TUNED)


def test_none_is_off_and_every_method_names_its_controller() -> None:
    """A44: nothing is replaced by a default. Lookahead's passes decide for themselves."""
    settings = method_settings("pacer")
    for off in (None, {"kind": "none"}):
        settings.controller = normal_controller(off)
        assert settings.controller is None and make_controller(settings, MODELS) is None
    kinds = {name: (method_settings(name).controller or {}).get("kind") for name in methods()}
    assert {name for name, kind in kinds.items() if kind is None} == {"ar", "lookahead"}
    assert all(kind in controllers() for kind in kinds.values() if kind is not None)
    zero = make_controller(method_settings("sd gamma=0"), MODELS)
    assert isinstance(zero, Fixed) and zero.gamma_max == 0


def test_verdicts_count_as_bools() -> None:
    assert (STOP, GO) == (False, True) and ASK not in (STOP, GO)


@pytest.mark.parametrize("arm", ["pacer", "pacer t0=0.0 lo=0 hi=1 rule=mean b=1", "pacer gamma_max=9 rho=1.3"])
def test_replay_fills_in_null_as_decoding_does(arm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr(rules, "preverified", lambda table, **values: seen.append(values))
    rules.rule_of(arm, TUNED)(SimpleNamespace(width=16, score_width=7))  # type: ignore[arg-type]
    assert seen == [_values(arm, TUNED)]


def test_null_is_left_to_the_rule_where_nothing_was_tuned() -> None:
    given = {"kind": "preverifier", "b": None, "t0": 0.0, "lo": 0, "rule": None}
    assert resolved(given, None) == {"t0": 0.0, "lo": 0}
    assert resolved(given, {"b": 4, "t0": 0.9, "rho": 2.0}) == {"b": 4, "t0": 0.0, "lo": 0}


def test_every_choice_is_implemented() -> None:
    assert set(rules.BLOCK_VALUES) == set(BLOCK_RULES)
    assert set(SCALES) == set(FEATURES)
    for signal in SIGNALS:
        assert Threshold(signal, t=0.5).signal == signal
    scores = torch.tensor([0.5, 0.2])
    values = [block_value(scores, rule).item() for rule in BLOCK_RULES]
    assert values == pytest.approx([0.35, 0.2, 0.1])
