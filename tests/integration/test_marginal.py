"""Marginal value through the loop: a rule that is off costs what plain decoding costs; what its times come from."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from pacer.assemble import Models, load_target, make_controller, make_decoder
from pacer.decoding.build import speculative
from pacer.decoding.controllers.marginal import Marginal
from pacer.decoding.drafters.model import ModelDrafter
from pacer.decoding.ladder import Ladder
from pacer.decoding.request import Request
from pacer.errors import ConfigError, UnsupportedError
from pacer.evaluation import rounds as rounds_module
from pacer.evaluation.profiler import Point
from pacer.evaluation.replay.costs import from_settings
from pacer.methods.arms import method_settings
from pacer.methods.rules import price_key
from pacer.models.draft import TrainableDraft
from pacer.models.exit_stack import ExitStack
from pacer.models.exits import shared_exits
from pacer.models.stack import Stack
from pacer.settings import (
    CostSettings,
    MethodSettings,
    ModelSettings,
    PathSettings,
    ProfileSettings,
    SamplingSettings,
    Settings,
    SourceSettings,
)
from pacer.stages.prices import attach_prices, rounds_of
from tests.features import feature_decoder
from tests.folders import tiny_folder
from tests.integration.test_feature_drafting import DRAFT, TARGET
from tests.tiny import make_decoder as toy_decoder
from tests.tiny import make_preverifier, plain_greedy, tiny_stack

PROMPT = [5, 17, 3, 88, 41]


@contextmanager
def reads(stack: Stack) -> Iterator[list[int]]:
    """Tokens of each pass over a model."""
    passes: list[int] = []
    embed = stack.embed

    def noting(ids: torch.Tensor) -> torch.Tensor:
        passes.append(ids.shape[1])
        return embed(ids)

    stack.embed = noting  # type: ignore[method-assign]
    try:
        yield passes
    finally:
        del stack.embed


def test_where_nothing_can_pay_the_draft_is_never_read() -> None:
    """A49: γ = 0 costs what plain decoding costs: the same passes, none of them the draft's, the prompt included."""
    target, draft = tiny_stack(layers=2), tiny_stack(layers=1, seed=9)
    decoder = toy_decoder(target, draft, Marginal([1 + n for n in range(9)]))
    with reads(target) as ours, reads(draft) as drafts:
        result = decoder.generate([Request("r", PROMPT, 30)])[0]
    with reads(target) as plain:
        expected = toy_decoder(target).generate([Request("r", PROMPT, 30)])[0]
    assert result.ids == expected.ids and ours == plain and drafts == []
    assert {line["stop"] for line in result.rounds} == {"prefill", "off"}


def test_while_a_request_goes_without_drafts_the_draft_is_not_read() -> None:
    """A49: between tries a round is one pass over one token; a try reads what was missed in one pass."""
    target, draft = tiny_stack(layers=2), tiny_stack(layers=1, seed=9)  # a draft that is never right
    rule = Marginal([1 + 0.4 * n for n in range(9)], gamma_max=8, trial=2, wait=8)
    decoder = toy_decoder(target, draft, rule)
    with reads(draft) as drafts, reads(target) as targets:
        result = decoder.generate([Request("r", PROMPT, 100)])[0]
    assert result.ids == plain_greedy(target.model, PROMPT, 100)
    rounds: list[dict[str, Any]] = result.rounds[1:]
    off = [line["stop"] == "off" for line in rounds]
    assert sum(off) > 60 and off.count(False) < 40
    assert all(len(line["drafted"]) == 0 for line, is_off in zip(rounds, off, strict=True) if is_off)
    # one pass of the draft per drawn token, and the prompt: none for the rounds without drafts
    drawn = sum(len(line["drafted"]) for line in rounds)
    assert len(drafts) == drawn + 1 and len(targets) == len(rounds) + 1
    tries = [i for i in range(1, len(off)) if off[i - 1] and not off[i]]
    assert len(tries) >= 2 and max(drafts[1:]) > rule.wait, "what was missed is read at once"


def test_in_a_batch_only_the_rows_that_draft_are_read() -> None:
    target, draft = tiny_stack(layers=2), tiny_stack(layers=1, seed=9)
    rule = Marginal([1 + 0.4 * n for n in range(9)], gamma_max=8, trial=2, wait=8)
    requests = [Request(f"r{i}", [*PROMPT[: i + 1], 7], 40 + 5 * i) for i in range(5)]
    decoder = toy_decoder(target, draft, rule)
    alone = [decoder.generate([request])[0] for request in requests]
    together = decoder.generate(requests, slots=3)
    for one, other in zip(alone, together, strict=True):
        assert one.ids == other.ids
        assert [line["drafted"] for line in one.rounds] == [line["drafted"] for line in other.rounds]


# where times come from


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder = tiny_folder(tmp_path_factory.mktemp("marginal") / "target")
    found = load_target(ModelSettings("tiny", SourceSettings(str(folder)), dtype="float32", device="cpu"), folder)
    found.draft = TrainableDraft(found.target, [0, 1], torch.arange(0, found.target.vocab_size, 2)).merged()
    found.preverifier = make_preverifier(found.draft, gamma_max=5)
    found.exits = {("shared", layer): head for layer, head in shared_exits(found.target, [1]).items()}
    return found


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    costs = CostSettings(draft=0.1, preverify=0.05, token=0.02, rest=0.01)
    return Settings(costs=costs, paths=PathSettings(str(tmp_path / "runs"), ""), profile=ProfileSettings(contexts=[9]))


def decoded(method: MethodSettings, models: Models) -> Any:
    return make_decoder(method, models, SamplingSettings()).generate([Request("r", PROMPT, 20)])[0]


EXIT = MethodSettings("exit", "exit", exits=[1])


@pytest.mark.parametrize(
    "arm",
    ["marginal", "marginal prices=settings", "marginal signal=preverifier b=2 gamma_max=5", "exit"],
)
def test_every_source_of_times(arm: str, models: Models, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds_module, "SWEEPS", 1)
    controller = method_settings("marginal gamma_max=4").controller
    method = replace(EXIT, controller=controller) if arm == "exit" else method_settings(arm)
    with pytest.raises(UnsupportedError, match="needs times of its rounds"):
        decoded(method, replace(models, prices={}))
    models = replace(models, prices={})
    attach_prices(settings, models, [method])
    times = models.prices[price_key(method)]
    assert len(times) == 1 + {"exit": 4, "marginal": 16, "marginal prices=settings": 16}.get(arm, 4)
    assert all(a <= b for a, b in pairwise(times)) and times[0] > 0
    plain = plain_greedy(models.target.model, PROMPT, 20)
    assert decoded(method, models).ids == plain
    made = list(Path(settings.paths.runs).rglob("rounds.json"))
    assert len(made) == (0 if "settings" in arm else 1)
    monkeypatch.setattr("pacer.stages.prices.measure_rounds", None)  # measured once: found again
    again = replace(models, prices={})
    attach_prices(settings, again, [method])
    assert again.prices == models.prices


def test_times_of_the_costs_block(settings: Settings) -> None:
    prices = from_settings(settings.costs)
    assert rounds_of(prices, 3) == pytest.approx([1, 1 + 0.02 + 0.1 + 0.01, 1.25, 1.37])
    assert rounds_of(prices, 3, block=2) == pytest.approx([1, 1.18, 1.3, 1.47])


def test_times_of_a_profile(models: Models, settings: Settings, tmp_path: Path) -> None:
    """Those of the batch that is decoded, where the profile has it."""
    points = [
        Point(part, n, batch, 128, ms, ms, ms)
        for batch in (1, 4)
        for part, n, ms in (
            ("target", 1, 10.0),
            ("target", 3, 10.0 + 2 * batch),
            ("draft", 1, 1.0),
            ("signals", 1, 0.5),
        )
    ]
    file = tmp_path / "profile.json"
    file.write_text(json.dumps({"points": [vars(point) for point in points]}))
    method = method_settings(f"marginal prices={file} gamma_max=2")
    for batch, slope in ((1, 0.1), (4, 0.4), (3, 0.1)):
        settings.benchmark.batch_size, models.prices = batch, {}
        attach_prices(settings, models, [method])
        expected = [1, 1 + slope + 0.15 + 0.01, 1 + 2 * slope + 0.3 + 0.01]
        assert models.prices[price_key(method)] == pytest.approx(expected)
    with pytest.raises(ConfigError, match=r"prices is no profile.*measure, settings"):
        attach_prices(settings, models, [method_settings("marginal prices=nowhere")])


def test_drafts_that_an_exit_verifies_have_no_times(models: Models, settings: Settings) -> None:
    rule = method_settings("marginal prices=settings").controller
    method = MethodSettings("hispec", "exit", controller=rule, exits=[1, 2])
    attach_prices(settings, models, [method])
    assert price_key(method) not in models.prices


def test_measured_rounds_grow_with_the_draft_and_hold_the_whole_round(models: Models) -> None:
    """M77: warm-up is outside; rounds that the budget shortens do not count."""
    always = method_settings("threshold t=0.0 gamma_max=3")
    decoders = {
        0: make_decoder(method_settings("ar"), models, SamplingSettings()),
        3: make_decoder(always, models, SamplingSettings()),
    }
    found = rounds_module.measure_rounds(decoders, models.target.vocab_size, batch=2, context=9)
    assert len(found) == 4 and found == sorted(found)
    assert found[1] == pytest.approx((2 * found[0] + found[3]) / 3)
    assert rounds_module.windows(16) == [0, 1, 2, 3, 4, 6, 8, 12, 16] and rounds_module.windows(5, 2) == [0, 2, 4]


def test_the_times_that_are_given_are_those_that_decide(models: Models, settings: Settings) -> None:
    """A42, A46: the same text under dear passes gets no drafts, under cheap ones long ones."""
    method = method_settings("marginal prices=settings gamma_max=6")
    lengths = []
    for draft, token in ((0.01, 0.0), (0.9, 0.3)):
        settings.costs = CostSettings(draft=draft, token=token, rest=0.0)
        models.prices = {}
        attach_prices(settings, models, [method])
        rule = make_controller(method, models)
        assert isinstance(rule, Marginal)
        lengths.append(rule.gamma_max)
    assert lengths == [6, 0]


@pytest.mark.parametrize("drafter", ["model", "exit", "feature"])
def test_a_rule_that_is_off_now_and_then_works_with_every_drafter(drafter: str, models: Models) -> None:
    """What a drafter missed while it was not asked is there when it is: its drafts are those it would make anyway."""
    target = TARGET if drafter == "feature" else models.target
    rule = Marginal([1 + 0.7 * n for n in range(7)], gamma_max=6, trial=1, wait=3)
    sampling = SamplingSettings()
    if drafter == "feature":
        decoder = feature_decoder(DRAFT, rule)
    elif drafter == "exit":
        ladder = Ladder(target, (1, target.n_layers), {}, None)
        exit = ExitStack(target, models.exits["shared", 1])
        own = ModelDrafter(exit, target.vocab_size, sampling, record=True, reader=ladder.rungs[0])
        decoder = speculative(target, own, rule, sampling, ladder=ladder)
    else:
        assert models.draft is not None
        decoder = toy_decoder(target, models.draft, rule)
    requests = [Request(f"r{i}", PROMPT[: 3 + i], 40) for i in range(2)]
    for result in decoder.generate(requests, slots=1):
        assert result.ids == plain_greedy(target.model, result.request.prompt_ids, 40)
        rounds: list[dict[str, Any]] = result.rounds[1:]
        drafted = [len(line["drafted"]) for line in rounds]
        assert 0 in drafted[:-1] and max(drafted[drafted.index(0) :]) > 0
