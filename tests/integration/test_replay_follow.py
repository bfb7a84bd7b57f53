"""Rules that learn are replayed by leading them through the table: the rounds of real decoding, one by one."""

from __future__ import annotations

from typing import Any

import pytest

from pacer.errors import ConfigError, UnsupportedError
from pacer.evaluation.replay import rules
from pacer.evaluation.replay.follow import follow
from pacer.evaluation.replay.walk import usage
from tests.integration.test_replay_decoder import GAMMA, decoded, plain, replayed, some_requests
from tests.rules import CHEAP, rule
from tests.texts import draft

ARMS: dict[str, dict[str, Any]] = {
    "svip": {"h": 0.6, "gamma_max": 6},
    "adaedl": {"t": 0.3, "epsilon": 0.3, "beta2": 0.5, "gamma_max": 6},
    "dynamic": {"t": 0.2, "gamma_max": GAMMA},
    "heuristic": {"start": 2, "gamma_max": GAMMA},
    "marginal": {"gamma_max": GAMMA, "trial": 1, "wait": 3, "margin": 0.2},
    "threshold": {"t": 0.3, "gamma_max": 5},
    "fixed": {"gamma": 3},
}


@pytest.mark.parametrize("kind", ARMS)
def test_every_round_is_that_of_decoding(kind: str) -> None:
    asked, (table, _) = some_requests(), plain(36)
    wanted = decoded(rule(kind, draft(), **ARMS[kind]), asked)
    plan = follow(table, lambda: rule(kind, draft(), **ARMS[kind]))
    assert replayed(table, plan) == wanted and not plan.open.any()
    assert kind == "fixed" or len({drafted for rounds in wanted.values() for _, drafted, _, _ in rounds}) > 1


@pytest.mark.parametrize("kind", [kind for kind in ARMS if kind not in ("fixed", "threshold")])
def test_an_arm_is_replayed_by_its_name(kind: str) -> None:
    table, _ = plain(36)
    arm = " ".join([kind, *(f"{key}={value}" for key, value in ARMS[kind].items())])
    plan = rules.rule_of(arm, rounds=CHEAP)(table)
    assert replayed(table, plan) == replayed(table, follow(table, lambda: rule(kind, draft(), **ARMS[kind])))
    assert usage(table, plan).emitted.sum() == usage(table, rules.fixed(table, 0)).emitted.sum()


def test_what_cannot_be_replayed_says_why() -> None:
    table, _ = plain(36)
    with pytest.raises(UnsupportedError, match="reads the draft's states"):
        rules.rule_of("specdecpp")
    with pytest.raises(UnsupportedError, match="needs times of its rounds"):
        rules.rule_of("marginal")
    for arm in ("heuristic", "svip"):
        with pytest.raises(ConfigError, match="drafts past the table"):
            rules.rule_of(arm)(table)
