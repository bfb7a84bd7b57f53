"""Drafting from the target's own states: the output is the target's, memory is what a fresh pass would make it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from pacer.data.labels import draft_rounds
from pacer.data.packing import pack, produced_states
from pacer.decoding.controllers.base import Controller
from pacer.decoding.controllers.fixed import Fixed
from pacer.decoding.controllers.preverifier import PreverifierRule
from pacer.decoding.controllers.threshold import Threshold
from pacer.decoding.distributions import probabilities
from pacer.decoding.loop import Decoder
from pacer.decoding.request import Request, Result, Row
from pacer.evaluation.stats import chi_square
from pacer.models.feature import FeatureDraft
from pacer.models.feature_stack import FeatureStack
from pacer.models.stack import FAMILIES, Stack, causal_mask
from pacer.settings import SamplingSettings
from pacer.training.exits import collate_ids, rung_states
from pacer.training.feature import agreements
from tests.features import feature_decoder, lane_of, mirror, now_and_then, oracle, random_draft
from tests.texts import as_text
from tests.tiny import (
    VOCAB,
    Rule,
    generate,
    hf_generate,
    make_preverifier,
    prompts,
    proposer,
    tiny_model,
    tiny_stack,
)

NEW, GAMMA = 24, 4
TARGET = Stack(mirror())
REDUCED = torch.arange(0, VOCAB, 2)
DRAFT = now_and_then(TARGET)
PROMPTS = prompts([5, 14, 8, 1])
JUDGE = make_preverifier(FeatureStack(DRAFT), gamma_max=6)

RULES: dict[str, Controller] = {
    "fixed": Fixed(3),
    "one": Fixed(1),
    "threshold": Threshold(t=0.05, gamma_max=6),
    "entropy": Threshold("entropy", t=3.5, gamma_max=6),
    "pre-verifier": PreverifierRule(JUDGE, 2, 0.45, 1.05, 6),
    "pre-verifier, lazy": PreverifierRule(JUDGE, 2, 0.45, 1.0, 6, lo=0.001, hi=0.2),
}


def asked(new: int = NEW, **options: Any) -> list[Request]:
    return [Request(f"r{i}", prompt, new, **options) for i, prompt in enumerate(PROMPTS)]


def accepted(results: Sequence[Result]) -> tuple[int, int]:
    """Accepted and drafted tokens."""
    lines = [line for result in results for line in result.rounds]
    return sum(line["accepted"][0] for line in lines), sum(len(line["drafted"]) for line in lines)


@pytest.fixture(scope="module")
def wanted() -> list[list[int]]:
    """What transformers generates."""
    return [hf_generate(mirror(), prompt, NEW) for prompt in PROMPTS]


@pytest.mark.parametrize(("slots", "block"), [(4, None), (3, 4)])
@pytest.mark.parametrize("rule", RULES)
def test_greedy_output_is_the_targets_own(rule: str, slots: int, block: int | None, wanted: list[list[int]]) -> None:
    """Alone, in a batch, in a stream, over paged memory; and the same rounds in all of them."""
    results = feature_decoder(DRAFT, RULES[rule], block=block).generate(asked(), slots=slots)
    assert [r.ids for r in results] == wanted
    hits, drafted = accepted(results)
    assert 0 < hits < drafted, "the test has seen both"
    alone = feature_decoder(DRAFT, RULES[rule]).generate(asked()[1:2])[0]
    for one, other in zip(alone.rounds, results[1].rounds, strict=True):
        assert (one["drafted"], one["accepted"], one["stop"]) == (other["drafted"], other["accepted"], other["stop"])


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family(family: str) -> None:
    """Also with a reduced head, and one that was trained."""
    target = tiny_stack(family)
    plain = [r.ids for r in Decoder(target).generate(asked(9))]
    assert plain == [hf_generate(tiny_model(family), prompt, 9) for prompt in PROMPTS]
    for head in ("frozen", "trained"):
        draft = random_draft(target, REDUCED, head=head)
        results = feature_decoder(draft, Fixed(2)).generate(asked(9))
        assert [r.ids for r in results] == plain
        assert {t for r in results for line in r.rounds for t in line["drafted"]} <= set(REDUCED.tolist())


def test_a_drafter_that_is_the_target_is_always_right() -> None:
    """C18, C20: every token of every round over a long text, and memory is one token behind after each."""
    decoder = feature_decoder(oracle(TARGET), Fixed(3))
    lane, reader = lane_of(decoder), decoder.reader
    behind: list[int] = []
    results = decoder.generate(
        [Request("long", PROMPTS[0], 110)],
        on_commit=lambda row, line: behind.append(len(row.committed) - reader.lengths[0]),
    )
    assert results[0].ids == hf_generate(mirror(), PROMPTS[0], 110) and set(behind) == {1}
    assert all(line["accepted"] == [len(line["drafted"])] for line in results[0].rounds)
    assert [len(line["drafted"]) for line in results[0].rounds[1:-1]] == [3] * 27
    assert lane.layer_tokens[0] == sum(lane.lengths) + sum(
        max(0, len(line["drafted"]) - 1) for line in results[0].rounds
    )


def fresh(draft: FeatureDraft, text: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Keys and features of a pass over a whole text with the target's own states ``(T, G, D)``, ``(T, H)``."""
    ids = torch.tensor([list(text)])
    target = draft.target
    states = rung_states(target, ids, [target.n_layers])[target.n_layers]
    features = torch.nn.functional.pad(draft.heard(states)[:, :-1], (0, 0, 1, 0))
    stack, places = FeatureStack(draft), torch.arange(ids.shape[1])[None]
    cache = stack.new_cache(1, ids.shape[1])
    stack.run(
        draft.entries(features, ids), 0, 1, places, causal_mask(places, ids.shape[1]), cache.at(places, len(text))
    )
    return cache.keys[0, 0, : len(text)], features[0]


@pytest.mark.parametrize(("rule", "slots"), [("fixed", 1), ("one", 4), ("threshold", 3)])
def test_memory_is_that_of_a_fresh_pass_over_the_targets_features(rule: str, slots: int) -> None:
    """After every round, with whatever was drafted and lost in it: no entry that stays rests on a feature of its own,
    and rows that are taken by another request begin anew."""
    decoder = feature_decoder(DRAFT, RULES[rule])
    lane, heard = lane_of(decoder), {"rounds": 0, "rejected": 0, "accepted": 0}

    def check(row: Row, line: dict[str, Any]) -> None:
        index = rows.index(row.request.id)
        have, known = lane.lengths[index], len(row.committed)
        assert have == (line["committed"] if line["drafted"] else 0) or line["stop"] == "budget"
        keys, features = fresh(DRAFT, row.committed)
        torch.testing.assert_close(lane.cache.keys[0, index, :have], keys[:have], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(lane.features[index, :known], features, atol=1e-5, rtol=1e-4)
        lost = line["accepted"][0] < len(line["drafted"])
        for name, more in (("rounds", have > 0), ("rejected", lost), ("accepted", line["accepted"][0] > 0)):
            heard[name] += more

    rows = [request.id for request in asked()[:slots]]
    admit = decoder._admit

    def admitted(index: int, row: Row) -> None:
        rows[index] = row.request.id
        admit(index, row)

    decoder._admit = admitted  # type: ignore[method-assign]
    decoder.generate(asked(), on_commit=check, slots=slots)
    assert min(heard.values()) > 5


class Now(Rule):
    """Drafts in every third round alone."""

    rounds = 0

    def block(self, drawn: int) -> int:
        return super().block(drawn) if self.rounds % 3 == 2 else 0

    def end(self, committed: Sequence[int]) -> None:
        self.rounds += 1


@pytest.mark.parametrize("head_ids", [None, REDUCED])
def test_training_counts_what_decoding_accepts(head_ids: Tensor | None) -> None:
    """T82, to the token: of every round, by the same function over whole texts."""
    draft = now_and_then(TARGET, head_ids)
    results = feature_decoder(draft, Fixed(GAMMA)).generate(asked(40))
    batch = collate_ids([as_text(result) for result in results], 0.0)
    ids, places = batch["ids"], batch["weights"] == 1.0
    states = rung_states(TARGET, ids, [TARGET.n_layers])[TARGET.n_layers]
    agree = agreements(draft, states, ids, places, GAMMA)
    seen = set()
    for row, result in enumerate(results):
        for line in result.rounds[1:]:
            first = line["committed"] - 1
            said = [bool(agree[k, row, first + k]) for k in range(len(line["drafted"]))]
            run = next((k for k, hit in enumerate(said) if not hit), len(said))
            assert line["accepted"] == [run]
            seen.add(run)
    assert seen >= {0, 1, 2}


@pytest.mark.parametrize("head_ids", [None, REDUCED])
def test_simulated_rounds_are_those_of_decoding(head_ids: Tensor | None) -> None:
    """What pre-verifiers and replay learn from: tokens, signals and verdict of every round, and the states of each
    token in a packed pass as decoding's record has them."""
    draft = now_and_then(TARGET, head_ids)
    stack, decoder = FeatureStack(draft), feature_decoder(draft, Rule(lambda ids: ids[:, -1] >= 0, GAMMA))
    drafter, said = proposer(decoder).drafter, list[tuple[Tensor, Tensor]]()

    def note(row: Row, line: dict[str, Any]) -> None:
        record, own = drafter.record, slice(line["committed"], line["committed"] + len(line["drafted"]))
        assert record is not None
        if line["drafted"]:
            said.append((record.produced[0, own].clone(), record.logprob[0, own].clone()))

    (result,) = decoder.generate([Request("r", PROMPTS[1], 40)], on_commit=note)
    text, lines = as_text(result), [line for line in result.rounds if line["drafted"]]
    rounds = draft_rounds(stack, text, torch.tensor([line["committed"] for line in lines]), GAMMA, ())
    counts = torch.tensor([len(line["drafted"]) for line in lines])
    assert [row[:n].tolist() for row, n in zip(rounds.tokens, counts, strict=True)] == [x["drafted"] for x in lines]
    assert torch.minimum(rounds.accepted, counts).tolist() == [line["accepted"][0] for line in lines]
    assert len(lines) > 5 and max(counts) == GAMMA
    packed = pack([[(text, rounds)]], "survival")
    states, path = produced_states(stack, packed)[0], len(text.prompt_ids) + len(text.output_ids)
    for number, (produced, logprob) in enumerate(said, 1):
        own = states[path:][packed.segment[0, path:] == number][: len(produced)]
        torch.testing.assert_close(own, produced, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(rounds.logprob[number - 1, : len(logprob)], logprob, atol=1e-4, rtol=1e-4)
    last, record = lines[-1]["committed"], drafter.record
    assert record is not None
    torch.testing.assert_close(states[1:last], record.produced[0, 1:last], atol=1e-4, rtol=1e-4)


def test_a_full_batch_stops_where_plain_decoding_does() -> None:
    """S29, S33, S34 are the loop's; here: a stop id inside a draft leaves memory as it should be for the next text."""
    plain = Decoder(TARGET).generate(asked(30))
    stops = frozenset(result.ids[5 + i] for i, result in enumerate(plain))
    requests = [*asked(30, stop_ids=stops), *asked(7)]
    names = [Request(f"n{i}", r.prompt_ids, r.max_new_tokens, r.stop_ids) for i, r in enumerate(requests)]
    wanted = Decoder(TARGET).generate(names)
    found = feature_decoder(DRAFT, Fixed(3)).generate(names, slots=3)
    assert [(r.ids, r.finish) for r in found] == [(r.ids, r.finish) for r in wanted]


def test_at_the_end_of_the_context() -> None:
    """S37: drafts shrink to the room that is left."""
    request = Request("r", prompts([TARGET.context - 9])[0], 50)
    plain = Decoder(TARGET).generate([request])[0]
    found = feature_decoder(oracle(TARGET), Fixed(4)).generate([request])[0]
    assert (found.ids, found.finish) == (plain.ids, "context")


def test_a_window_of_nothing_is_plain_decoding() -> None:
    """A49: nobody listens, and prompts may be shared again."""
    decoder = feature_decoder(DRAFT, Fixed(0), block=4)
    assert decoder.proposer is None and decoder.reader.heard is None
    assert [r.ids for r in decoder.generate(asked(6))] == [r.ids for r in Decoder(TARGET).generate(asked(6))]


def test_rounds_without_a_draft(wanted: list[list[int]]) -> None:
    """What the target read meanwhile is read together later."""
    results = feature_decoder(oracle(TARGET), Now(lambda ids: ids[:, -1] >= 0, 2)).generate(asked())
    assert [r.ids for r in results] == wanted
    counts = {len(line["drafted"]) for r in results for line in r.rounds}
    assert {0, 2} <= counts and all(line["accepted"] == [len(line["drafted"])] for r in results for line in r.rounds)


SMALL = 5
SAMPLED = Stack(mirror(vocab=SMALL, context=32))
LAW = SamplingSettings(temperature=1.3)
ALPHA = 1e-4  # false alarms on other seeds
DRAWS, BATCH = 3000, 300


@pytest.mark.parametrize(
    ("head_ids", "rule"),
    [(None, Fixed(3)), (torch.tensor([0, 1, 3]), Fixed(2)), (None, Rule(lambda ids: ids[:, -1] % 2 == 0))],
    ids=["fixed", "reduced head", "ends after an odd id"],
)
def test_samples_have_the_targets_distribution(head_ids: Tensor | None, rule: Controller) -> None:
    """Chi-square of the joint law of three tokens, also where a controller looks at the token just drawn."""
    draft = now_and_then(SAMPLED, head_ids)
    decoder = feature_decoder(draft, rule, LAW)
    results = generate(decoder, [Request(f"q{i}", [2, 0], 5) for i in range(DRAWS)], BATCH)
    law = torch.ones(1, dtype=torch.float64)
    for k in range(3):
        texts = torch.tensor([[2, 0, *tail] for tail in itertools.product(range(SMALL), repeat=k)])
        logits = SAMPLED.model(input_ids=texts, use_cache=False).logits[:, -1]
        law = (law[:, None] * probabilities(logits, LAW).double()).flatten()
    codes = [sum(t * SMALL ** (2 - k) for k, t in enumerate(r.ids[:3])) for r in results]
    counts = torch.bincount(torch.tensor(codes), minlength=SMALL**3).tolist()
    assert chi_square(counts, law.tolist()) > ALPHA
    hits, drafted = accepted(results)
    assert 500 < hits < drafted - 500


def test_a_samples_text_is_its_own_in_any_batch() -> None:
    requests = [Request(f"q{i}", PROMPTS[i % 4], 12) for i in range(6)]
    alone = [feature_decoder(DRAFT, Fixed(3), LAW).generate([request])[0].ids for request in requests]
    assert [r.ids for r in feature_decoder(DRAFT, Fixed(3), LAW).generate(requests, slots=4)] == alone
