"""SpecDec++'s rule: lossless whatever its head says, lengths by the product of its estimates, between its bounds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from pacer.assemble import Models, make_controller
from pacer.decoding.controllers.head import HeadRule
from pacer.decoding.controllers.probe import Probe
from pacer.decoding.controllers.specdecpp import SpecDecPP
from pacer.decoding.request import Request
from pacer.errors import ConfigError, MismatchError, UnsupportedError
from pacer.evaluation.stats import chi_square
from pacer.methods.arms import method_settings
from pacer.models.preverifier import Preverifier
from pacer.models.stack import Stack
from pacer.settings import SamplingSettings
from tests.tiny import (
    generate,
    make_decoder,
    make_preverifier,
    near,
    plain_greedy,
    prompts,
    random_table,
    table_model,
    tiny_model,
)

ALPHA = 1e-4  # false-alarm rate of each chi-square test on other seeds
VOCAB = 5
TABLE = random_table(VOCAB, 1)
TARGET, DRAFT = Stack(table_model(TABLE)), Stack(table_model(TABLE + random_table(VOCAB, 2, 0.9)))
STATE = {"attention": "none", "token": False, "index_embedding": False, "features": []}
TINY, CLOSE = tiny_model(layers=2), near(tiny_model(layers=2), 0.05)
PROMPTS = prompts([5, 9, 3, 7])


def head(draft: Stack, depth: int = 1, **settings: Any) -> Preverifier:
    return make_preverifier(draft, depth=depth, **{**STATE, "label": "conditional", **settings})


def requests(new: int = 24) -> list[Request]:
    return [Request(f"r{i}", prompt, new) for i, prompt in enumerate(PROMPTS)]


ADVERSARIES: dict[str, Any] = {
    "specdecpp": lambda: SpecDecPP(head(DRAFT), t=0.7, gamma_max=4),
    # reads the drawn token too, so its value decides about the next draw
    "specdecpp that sees the token": lambda: SpecDecPP(head(DRAFT, 2, token=True), t=0.7, gamma_min=1, gamma_max=4),
    "probe that sees the token": lambda: Probe(head(DRAFT, token=True), t=0.5, gamma_max=4),
}


@pytest.mark.parametrize("name", ADVERSARIES)
def test_sampled_output_has_the_target_s_law(name: str) -> None:
    """Under a verifier that checks every token, whatever the head decides and by whatever it sees."""
    decoder = make_decoder(TARGET, DRAFT, ADVERSARIES[name](), SamplingSettings(temperature=1.0))
    results = generate(decoder, [Request(f"q{i}", [2, 0], 5) for i in range(2500)], 250)
    p = TABLE.softmax(-1).double()
    law = (p[0, :, None, None] * p[:, :, None] * p[None, :, :]).flatten()
    codes = [sum(t * VOCAB ** (2 - k) for k, t in enumerate(r.ids[:3])) for r in results]
    assert chi_square(torch.bincount(torch.tensor(codes), minlength=VOCAB**3).tolist(), law.tolist()) > ALPHA
    lines: list[Any] = [line for r in results for line in r.rounds[1:]]
    assert len({len(line["drafted"]) for line in lines}) > 1 and {"controller"} < {line["stop"] for line in lines}


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("gamma_min", [1, 2, 5])
def test_greedy_output_is_the_target_s_and_lengths_follow_the_product(gamma_min: int, batch: int) -> None:
    """The draft goes on exactly while 1 − Π ≤ t, and never ends before gamma_min or after gamma_max tokens."""
    t, most = 0.8, 6
    rule = SpecDecPP(head(Stack(CLOSE), 3), t=t, gamma_min=gamma_min, gamma_max=most)
    results = generate(make_decoder(Stack(TINY), Stack(CLOSE), rule), requests(), batch)
    assert [r.ids for r in results] == [plain_greedy(TINY, prompt, 24) for prompt in PROMPTS]
    lines: list[Any] = [line for r in results for line in r.rounds[1:]]
    for line in lines:
        scores, drafted = torch.tensor([s for s in line["scores"] if s is not None]), len(line["drafted"])
        within = (1 - scores.cumprod(0) <= t)[gamma_min - 1 :].tolist()
        assert drafted <= most and all(within[: max(0, drafted - gamma_min)])
        if line["stop"] == "controller":
            assert drafted >= gamma_min and len(scores) == drafted and not within[drafted - gamma_min]
        elif line["stop"] == "gamma_max":
            assert drafted == most
    assert {"controller", "gamma_max"} <= {line["stop"] for line in lines}


@pytest.mark.parametrize(("gamma_min", "gamma_max"), [(1, 1), (2, 2), (2, 3), (7, 8)])
def test_bounds_of_the_length(gamma_min: int, gamma_max: int) -> None:
    """A51: at gamma_max, and one less; a rule that always stops drafts gamma_min, one that never does gamma_max."""
    module = head(Stack(CLOSE))
    for t, wanted in ((0.0, gamma_min), (1.0, gamma_max)):
        rule = SpecDecPP(module, t=t, gamma_min=gamma_min, gamma_max=gamma_max)
        results = make_decoder(Stack(TINY), Stack(CLOSE), rule).generate(requests(20))
        lengths = [len(line["drafted"]) for r in results for line in r.rounds[1:] if line["stop"] != "budget"]  # type: ignore[arg-type]
        assert set(lengths) == {wanted}
        assert [r.ids for r in results] == [plain_greedy(TINY, prompt, 20) for prompt in PROMPTS]
    with pytest.raises(ConfigError, match=rf"gamma_max out of range.*≥ {gamma_max + 1}"):
        SpecDecPP(module, t=0.3, gamma_min=gamma_max + 1, gamma_max=gamma_max)


def models(label: str = "conditional", **settings: Any) -> Models:
    found = Models(Stack(TINY), None, (), None, Stack(CLOSE))  # type: ignore[arg-type]  # no text
    assert found.draft is not None
    for name, own in (("specdecpp", label), ("probe", "certain")):
        found.judges[(name,)] = (head(found.draft, label=own, **settings), None)
    return found


def test_the_papers_values_are_the_defaults_and_what_is_set_is_used() -> None:
    """A42: the threshold of the arm is the rule's, and another one changes lengths."""
    rule, probe = (make_controller(method_settings(arm), models()) for arm in ("specdecpp", "sprinter"))
    assert isinstance(rule, HeadRule) and (rule.t, rule.gamma_min, rule.gamma_max) == (0.3, 2, 20)
    assert isinstance(probe, HeadRule) and (probe.t, probe.gamma_min, probe.gamma_max) == (0.5, 1, 20)
    sprinter = method_settings("sprinter t=0.25 gamma_max=6")
    assert (sprinter.checks, sprinter.guarantee) == ("last", "lossy")
    drafted = []
    for arm in ("specdecpp t=0.05 gamma_max=8", "specdecpp t=0.9 gamma_max=8", "specdecpp t=0.9 gamma_max=3"):
        chosen = make_controller(method_settings(arm), models())
        assert isinstance(chosen, HeadRule) and f"t={chosen.t}" in arm
        results = make_decoder(Stack(TINY), Stack(CLOSE), chosen).generate(requests())
        drafted.append([len(line["drafted"]) for r in results for line in r.rounds[1:]])  # type: ignore[arg-type]
    assert sum(drafted[0]) / len(drafted[0]) < sum(drafted[1]) / len(drafted[1]) and max(drafted[2]) == 3


@pytest.mark.parametrize("label", ["survival", "next", "certain"])
def test_a_product_reads_conditional_labels_alone(label: str) -> None:
    """Two label meanings, never mixed: a product of survival estimates is the chance of nothing."""
    with pytest.raises(MismatchError, match=rf"specdecpp cannot read a head of this label: '{label}'.*conditional"):
        make_controller(method_settings("specdecpp"), models(label))


def test_what_a_head_is_not_is_refused() -> None:
    whole = models()
    assert whole.draft is not None
    whole.judges[("specdecpp",)] = (make_preverifier(whole.draft, label="conditional"), None)
    with pytest.raises(MismatchError, match="a head of this attention: 'prefix'"):
        make_controller(method_settings("specdecpp"), whole)
    with pytest.raises(UnsupportedError, match=r"sprinter needs an acceptance head.*trainer=probe"):
        make_controller(method_settings("sprinter"), replace(whole, judges={}))
    for arm, message in (
        ("specdecpp t=1.5", r"t in arm .*\[0, 1\]"), ("specdecpp gamma_min=0", "gamma_min in arm"),
        ("specdecpp gamma_min=9 gamma_max=8", "gamma_max in arm .*≥ 9"), ("sprinter gamma=4", "unknown key"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=message):
            method_settings(arm)
