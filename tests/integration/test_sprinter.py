"""SPRINTER is lossy exactly as its rule says: tokens before a draft's last are kept unchecked, the last is checked."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from pacer.decoding.build import speculative
from pacer.decoding.controllers.fixed import Fixed
from pacer.decoding.controllers.probe import Probe
from pacer.decoding.drafters.model import ModelDrafter
from pacer.decoding.loop import Decoder
from pacer.decoding.request import Request, Result
from pacer.decoding.trace import request_line
from pacer.errors import DecodingError
from pacer.evaluation.metrics import check_trace, evaluate_trace
from pacer.evaluation.stats import chi_square
from pacer.models.stack import Stack
from pacer.reporting import tables
from pacer.settings import SamplingSettings
from tests.tiny import (
    Rule,
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
VOCAB = 6
TARGET_TABLE, DRAFT_TABLE = random_table(VOCAB, 1), random_table(VOCAB, 4)
TARGET, DRAFT = Stack(table_model(TARGET_TABLE)), Stack(table_model(DRAFT_TABLE))
WARM = SamplingSettings(temperature=1.0)


def sprinter(target: Stack, draft: Stack, controller: Any, sampling: SamplingSettings | None = None) -> Decoder:
    sampling = sampling or SamplingSettings()
    drafter = ModelDrafter(draft, target.vocab_size, sampling, record=controller.reads_record)
    return speculative(target, drafter, controller, sampling, str, last_only=True)


def by_the_rule(prompt: Sequence[int], new: int, go_on: Any, gamma_max: int, stops: Sequence[int] = ()) -> list[int]:
    """Greedy tables: the first token is the target's, then drafts whose last token alone is compared."""
    best, drafts = TARGET_TABLE.argmax(1).tolist(), DRAFT_TABLE.argmax(1).tolist()
    text = [*prompt, best[prompt[-1]]]
    while len(text) - len(prompt) < new and text[-1] not in stops:
        room = new - (len(text) - len(prompt)) - 1
        drafted: list[int] = []
        while len(drafted) < min(gamma_max, room):
            drafted.append(drafts[[*text, *drafted][-1]])
            if drafted[-1] in stops or not go_on(drafted):
                break
        own = best[[*text, *drafted[:-1]][-1]]  # what the target would write in place of the last draft
        kept = [*drafted[:-1], own] if drafted else [own]
        if drafted and own == drafted[-1] and own not in stops:
            kept.append(best[own])
        text += kept
    return text[len(prompt) :]


RULES = {
    "goes on after even ids": lambda drafted: drafted[-1] % 2 == 0,
    "always": lambda drafted: True,
    "never": lambda drafted: False,
    "until the third": lambda drafted: len(drafted) < 3,
}


@pytest.mark.parametrize("stops", [(), (5,), (2, 4)])
@pytest.mark.parametrize("name", RULES)
def test_greedy_output_is_what_the_rule_says(name: str, stops: tuple[int, ...]) -> None:
    """On table models, for every first token, alone and in a batch: also where a stop id or the budget ends a draft."""
    go_on = RULES[name]

    def verdicts(ids: Tensor) -> Tensor:
        return torch.tensor([go_on(row) for row in ids.tolist()])

    decoder = sprinter(TARGET, DRAFT, Rule(verdicts, gamma_max=4))
    for new in (1, 2, 13):
        asked = [Request(f"q{i}", [3, i], new, frozenset(stops)) for i in range(VOCAB)]
        wanted = [by_the_rule([3, i], new, go_on, 4, stops) for i in range(VOCAB)]
        for batch in (1, VOCAB):
            assert [r.ids for r in generate(decoder, asked, batch)] == wanted
    if name == "always":  # in a window that is drawn at once, what follows a stop id is no draft
        fixed = sprinter(TARGET, DRAFT, Fixed(4)).generate(asked)
        assert [r.ids for r in fixed] == wanted
    exact = [plain_greedy(TARGET.model, [3, i], 13) for i in range(VOCAB)]
    if not stops:
        assert ([by_the_rule([3, i], 13, go_on, 4) for i in range(VOCAB)] == exact) == (name == "never")


@pytest.mark.parametrize("gamma", [1, 2, 3])
def test_sampled_output_has_the_draft_s_law_up_to_the_last_token(gamma: int) -> None:
    """The first token is the target's; of a draft all but the last are distributed as q, the last as p."""
    decoder = sprinter(TARGET, DRAFT, Fixed(gamma), WARM)
    results = generate(decoder, [Request(f"q{i}", [2, 0], gamma + 2) for i in range(2500)], 250)
    p, q = TARGET_TABLE.softmax(-1).double(), DRAFT_TABLE.softmax(-1).double()
    laws = [p, *[q] * (gamma - 1), p]
    shown = laws[-2:] if gamma > 2 else laws  # with three drafts: the last unchecked token and the checked one
    start, first = torch.eye(VOCAB, dtype=torch.float64)[0], gamma + 1 - len(shown)
    for law in laws[:first]:
        start = start @ law
    found = torch.zeros([VOCAB] * len(shown))
    for r in results:
        found[tuple(r.ids[first : gamma + 1])] += 1
    wanted = []
    for ids in itertools.product(range(VOCAB), repeat=len(shown)):
        pairs = zip(ids, ids[1:], shown[1:], strict=False)
        chance = float((start @ shown[0])[ids[0]])
        for before, after, law in pairs:
            chance *= float(law[before, after])
        wanted.append(chance)
    assert chi_square(found.long().flatten().tolist(), wanted) > ALPHA


TINY, CLOSE = tiny_model(layers=2), near(tiny_model(layers=2), 0.05)
PROMPTS = prompts([5, 9, 3, 7])


@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.3}, {"temperature": 1.0, "seed": 3}])
def test_a_draft_that_is_the_target_loses_nothing(options: dict[str, Any]) -> None:
    """Unchecked tokens are then the target's own; a penalty sees the drafts before the token that is checked."""
    sampling = SamplingSettings(**options)
    asked = [Request(f"r{i}", prompt, 20) for i, prompt in enumerate(PROMPTS)]
    own = sprinter(Stack(TINY), Stack(TINY), Fixed(3), sampling)
    accepted = [line for r in own.generate(asked) for line in r.rounds[1:]]
    assert all(line["accepted"][0] == len(line["drafted"]) for line in accepted)  # type: ignore[index,arg-type]
    if sampling.temperature == 0:
        plain = make_decoder(Stack(TINY), sampling=sampling)
        assert [r.ids for r in own.generate(asked)] == [r.ids for r in plain.generate(asked)]


def lines_of(arm: str, results: Sequence[Result]) -> list[dict[str, Any]]:
    named = {"arm": arm, "benchmark": "gsm8k"}
    return [json.loads(json.dumps({**named, **line})) for r in results for line in [*r.rounds, request_line(r, "")]]


def test_the_trace_says_what_was_unchecked_and_the_table_that_it_is_lossy() -> None:
    """Rates count what the target was asked about; the loss against AR stands in a table of its own (A45)."""
    asked = [Request(f"r{i}", prompt, 20) for i, prompt in enumerate(PROMPTS)]
    module = make_preverifier(Stack(CLOSE), attention="none", token=False, depth=0, index_embedding=False, features=[])
    probe = Probe(module, t=0.45)
    results = sprinter(Stack(TINY), Stack(CLOSE), probe).generate(asked)
    exact = make_decoder(Stack(TINY)).generate(asked)
    lines = [*lines_of("ar", exact), *lines_of("sprinter", results)]
    rounds = [line for line in lines if line["arm"] == "sprinter" and line["kind"] == "round" and line["round"] > 0]
    assert not check_trace(lines)
    assert all(line["unchecked"] == max(0, len(line["drafted"]) - 1) for line in rounds)
    assert all(line["accepted"][0] - line["unchecked"] in (0, 1) for line in rounds)
    assert len({len(line["drafted"]) for line in rounds}) > 2 and all(
        all(score >= 0.45 for score in line["scores"][:-1]) for line in rounds
    )
    found = evaluate_trace(lines, arms=["ar", "sprinter"], guarantees={"sprinter": "lossy"}, resamples=20)
    row = next(row for row in found["rows"] if row["arm"] == "sprinter")
    checked = [line for line in rounds if line["drafted"]]
    kept = sum(line["accepted"][0] > line["unchecked"] for line in checked)
    assert row["acceptance_rate"] == pytest.approx(kept / len(checked), abs=0.1)  # ends of budgets aside
    assert row["conditional_acceptance"] == [] == row["survival"]
    assert row["tokens_per_verify"] == pytest.approx(sum(len(line["emitted"]) for line in rounds) / len(rounds))
    same = [a.ids == b.ids for a, b in zip(results, exact, strict=True)]
    at = [next((i for i, (x, y) in enumerate(zip(a.ids, b.ids, strict=True)) if x != y), 20)
          for a, b in zip(results, exact, strict=True)]  # fmt: skip
    assert row["agreement"] == {"same_requests": sum(same) / 4, "same_tokens": sum(at) / 80}
    assert row["agreement"]["same_tokens"] < 1
    text = tables.to_markdown(found, command="c", machine="m")
    assert "| sprinter |" not in text and text.count("| sprinter (lossy) |") == 2 and "gsm8k: loss" in text


def test_a_bad_target_is_found_where_it_is_read() -> None:
    table = TARGET_TABLE.clone()
    table[int(DRAFT_TABLE[int(DRAFT_TABLE[1].argmax())].argmax())] = torch.nan
    table[0] = torch.nn.functional.one_hot(torch.tensor(1), VOCAB).float()
    decoder = sprinter(Stack(table_model(table)), DRAFT, Fixed(2))
    with pytest.raises(DecodingError, match="not finite for request q"):
        decoder.generate([Request("q", [0], 12)])
