"""Lookahead, prompt lookup and Ouroboros through the whole loop: the target's own output, and as their papers say.

Chi-square tests use fixed seeds; each would raise a false alarm with probability 1e-4 on other seeds."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from pacer.assemble import Models, make_decoder
from pacer.decoding.distributions import probabilities
from pacer.decoding.drafters.model import ModelDrafter
from pacer.decoding.drafters.ouroboros import Ouroboros
from pacer.decoding.lane import Lane
from pacer.decoding.loop import Decoder
from pacer.decoding.request import Request, Result, Row
from pacer.errors import ConfigError, UnsupportedError
from pacer.evaluation.stats import chi_square
from pacer.evaluation.traces import check_trace
from pacer.methods.arms import method_settings
from pacer.models.draft import TrainableDraft
from pacer.models.stack import Stack
from pacer.settings import SamplingSettings
from tests.tiny import (
    generate,
    make_preverifier,
    near,
    plain_greedy,
    prompts,
    random_table,
    table_model,
    tiny_model,
    tiny_stack,
)

ALPHA, NEW = 1e-4, 30
PROMPTS = [*prompts([5, 14, 1]), prompts([4])[0] * 4]
TARGET, DRAFT = tiny_stack(layers=2), Stack(near(tiny_model(layers=2)))
GREEDY = SamplingSettings()


def _copier() -> Stack:
    """Two layers of the target, a head of half the ids, and gates wide enough to copy now and then."""
    draft = TrainableDraft(TARGET, [0, 1], torch.arange(0, TARGET.vocab_size, 2), copying=True)
    assert draft.copying is not None
    with torch.no_grad():
        torch.nn.init.normal_(draft.copying.gate.weight, std=0.1)
    return draft.merged()


def _models(draft: Stack | None = DRAFT, target: Stack = TARGET, block: int | None = None) -> Models:
    models = Models(target, None, (), Path(), draft, block=block)  # type: ignore[arg-type]  # no text is decoded
    if draft is not None:
        models.preverifier, models.tuned = make_preverifier(draft, gamma_max=12), {"b": 2, "t0": 0.45, "rho": 1.0}
    return models


COPIER = _copier()
DRAFTS = {"near": DRAFT, "same": TARGET, "copies": COPIER}
ARMS = [
    ("lookahead", "near"), ("lookahead level=3 window=4 guesses=5 from_prompt=true", "near"),
    ("lookahead level=2 window=1 warm=true", "near"), ("prompt_lookup", "near"),
    ("prompt_lookup branches=3 gamma=4 longest=2", "near"), ("prompt_lookup prefer=earliest", "near"),
    ("ouroboros", "near"), ("ouroboros gamma=7 window=5 guesses=6 level=4 phrases=5", "near"),
    ("ouroboros warm=true", "near"), ("ouroboros phrases=0 guesses=0", "near"), ("ouroboros", "same"),
    ("ouroboros gamma=6", "copies"), ("ouroboros_pacer", "near"), ("ouroboros_pacer b=3 t0=0.6 rho=1.05", "copies"),
]  # fmt: skip


def _decoder(arm: str, draft: str | None = "near", sampling: SamplingSettings = GREEDY, **options: Any) -> Decoder:
    return make_decoder(method_settings(arm), _models(None if draft is None else DRAFTS[draft], **options), sampling)


def _requests(new: int = NEW, **options: Any) -> list[Request]:
    return [Request(f"r{i}", prompt, new, **options) for i, prompt in enumerate(PROMPTS)]


@pytest.fixture(scope="module")
def wanted() -> list[list[int]]:
    return [plain_greedy(TARGET.model, prompt, NEW) for prompt in PROMPTS]


def _rounds(results: Sequence[Result]) -> list[dict[str, Any]]:
    return [line for result in results for line in result.rounds]


@pytest.mark.parametrize(("batch", "slots", "block"), [(1, None, None), (4, 2, 4)])
@pytest.mark.parametrize(("arm", "draft"), ARMS)
def test_greedy_output_is_the_targets_own(
    arm: str, draft: str, batch: int, slots: int | None, block: int | None, wanted: list[list[int]]
) -> None:
    """Memory ends at committed − 1 in every round; with a warm pool the second time is another way to the same text."""
    decoder, requests = _decoder(arm, draft, block=block), _requests()
    finish = decoder._finish

    def checked(rows: list[Row], *rest: Any) -> None:
        finish(rows, *rest)
        assert all(
            decoder.reader.lengths[i] == len(r.committed) - 1
            for i, r in enumerate(rows)
            if r.finish is None and r.rounds
        )

    decoder._finish = checked  # type: ignore[method-assign, assignment]  # a spy
    for _ in range(2 if "warm" in arm else 1):
        results = [r for i in range(0, 4, batch) for r in decoder.generate(requests[i : i + batch], slots=slots)]
        assert [r.ids for r in results] == wanted
        lines = [{**line, "arm": "a", "benchmark": "b"} for line in _rounds(results)]
        assert check_trace(lines) == []
        assert any(line["accepted"][0] > 0 for line in lines), "the test has seen accepted drafts"


@pytest.mark.parametrize("new", [1, 2, 3, 7])
@pytest.mark.parametrize(("arm", "draft"), ARMS[::3])
def test_budgets_and_stop_ids_end_as_plain_decoding(arm: str, draft: str, new: int) -> None:
    for stops in (frozenset(), frozenset(range(0, 97, 6))):
        plain = Decoder(TARGET).generate(_requests(new, stop_ids=stops))
        found = _decoder(arm, draft).generate(_requests(new, stop_ids=stops))
        assert [(r.ids, r.finish) for r in found] == [(r.ids, r.finish) for r in plain]


def test_lookahead_finds_the_n_grams_of_a_text_that_repeats_itself() -> None:
    """A table model ends in a cycle: after it is known, whole n-grams are accepted."""
    decoder = _decoder("lookahead level=5 window=3 guesses=3", None, target=Stack(CYCLES))
    result = decoder.generate([Request("a", [0, 1], 120)])[0]
    assert result.ids == plain_greedy(CYCLES, [0, 1], 120)
    accepted = [line["accepted"][0] for line in result.rounds]  # type: ignore[index]
    assert min(accepted[-6:-1]) >= 4 and sum(accepted) > 3 * len(accepted)


CYCLES = table_model(random_table(8, 0), context=256)  # every greedy text of it ends in a cycle


@pytest.mark.parametrize(("longest", "gamma"), [(1, 3), (2, 10), (3, 4)])
def test_prompt_lookup_drafts_what_transformers_does(longest: int, gamma: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draft by draft and token by token, with transformers' choice of matches."""
    told: dict[int, list[int]] = {}
    get = PromptLookupCandidateGenerator.get_candidates

    def spy(self: Any, input_ids: Any, **kwargs: Any) -> Any:
        out = get(self, input_ids, **kwargs)
        told[input_ids.shape[1]] = out[0][0, input_ids.shape[1] :].tolist()
        return out

    monkeypatch.setattr(PromptLookupCandidateGenerator, "get_candidates", spy)
    arm, accepted = f"prompt_lookup gamma={gamma} longest={longest} prefer=earliest", 0
    reference: Any = copy.deepcopy(CYCLES)
    decoder = _decoder(arm, None, target=Stack(CYCLES))
    reference.set_attn_implementation("eager")
    for request in [Request(str(i), prompt, NEW) for i, prompt in enumerate(prompts([5, 14, 1, 9], vocab=8))]:
        told.clear()
        ids: Any = torch.tensor([list(request.prompt_ids)])
        out: Any = reference.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW, pad_token_id=0,
            prompt_lookup_num_tokens=gamma, max_matching_ngram_size=longest,
        )  # fmt: skip
        result = decoder.generate([request])[0]
        assert result.ids == out[0, ids.shape[1] :].tolist()
        for line in result.rounds[1:]:
            room = NEW - (int(line["committed"]) - ids.shape[1]) - 1  # type: ignore[call-overload]
            if room > 0:
                assert line["drafted"] == told[line["committed"]][:room]  # type: ignore[index]
                accepted += line["accepted"][0]  # type: ignore[index]
    assert accepted > 15


@pytest.mark.parametrize("draft", DRAFTS)
def test_the_draft_model_writes_what_it_would_write_alone(draft: str) -> None:
    """Lookahead inside the draft model changes how many passes its drafts take, not what they are; so does copying."""
    results = _decoder("ouroboros gamma=6 phrases=0", draft).generate(_requests())
    stack, told = DRAFTS[draft], 0
    for line, result in [(line, r) for r in results for line in r.rounds[1:]][::3]:
        if drafted := list(line["drafted"]):  # type: ignore[call-overload]
            start = int(line["committed"])  # type: ignore[call-overload]
            prefix = [*result.request.prompt_ids, *result.ids][:start]
            assert _draft_alone(stack, prefix, len(drafted)) == drafted
            told += 1
    assert told > 3


def _draft_alone(stack: Stack, prefix: Sequence[int], n: int) -> list[int]:
    """What a draft model writes after a text, token by token."""
    row = Row(Request("x", list(prefix), n + 1), list(prefix), 0)
    drafter = ModelDrafter(stack, TARGET.vocab_size, GREEDY)
    drafter.reset([row], len(prefix) + n + 1)
    with torch.inference_mode():
        drafter.read([row], [True])
        return [int(drafter.draw(k, [True])[0]) for k in range(n)]


def test_lookahead_saves_passes_of_the_draft_model() -> None:
    """C18: with the target as its own draft every draft is accepted, and phrases lengthen some of them."""
    results = _decoder("ouroboros gamma=5", "same").generate([Request("a", PROMPTS[3], 90)])
    lines = _rounds(results)[1:]
    buffers = [[t for inner in line["inner"] for t in inner["emitted"]] for line in lines]
    assert all(line["accepted"][0] >= len(buffer) for line, buffer in zip(lines, buffers, strict=True))
    assert sum(len(line["inner"]) for line in lines) < sum(map(len, buffers))
    assert any(line["accepted"][0] > len(buffer) for line, buffer in zip(lines, buffers, strict=True))
    lengthened = [line for line, buffer in zip(lines, buffers, strict=True) if len(line["drafted"]) > len(buffer)]
    assert lengthened and all("parents" in line or line["accepted"] for line in lengthened)


def test_a_warm_pool_is_faster_and_writes_the_same() -> None:
    requests = [Request("a", PROMPTS[0], NEW), Request("b", PROMPTS[0], NEW)]
    rounds: dict[str, list[int]] = {}
    for warm in ("false", "true"):
        results = generate(_decoder(f"ouroboros warm={warm}"), requests, 1)
        rounds[warm] = [sum(len(line["inner"]) for line in r.rounds[1:]) for r in results]  # type: ignore[misc,arg-type]
        assert results[0].ids == results[1].ids == plain_greedy(TARGET.model, PROMPTS[0], NEW)
    assert rounds["false"][0] == rounds["false"][1] == rounds["true"][0] > rounds["true"][1]


@pytest.mark.parametrize("sampling", [GREEDY, SamplingSettings(2.0)])
@pytest.mark.parametrize(
    "arm", ["lookahead", "lookahead from_prompt=true guesses=3", "prompt_lookup branches=2", "ouroboros_pacer"]
)
def test_a_cold_request_is_the_same_alone_and_in_any_batch(arm: str, sampling: SamplingSettings) -> None:
    if arm.startswith("ouroboros") and sampling.temperature > 0:
        return
    decoder, requests = _decoder(arm, sampling=sampling), _requests()
    alone = {r.request.id: (r.ids, [line["drafted"] for line in r.rounds]) for r in generate(decoder, requests, 1)}
    for order in ([0, 1, 2, 3], [3, 1, 0, 2]):
        for r in decoder.generate([requests[i] for i in order], slots=3):
            assert (r.ids, [line["drafted"] for line in r.rounds]) == alone[r.request.id]


VOCAB, DRAWS, BATCH = 5, 2000, 500
TABLE = random_table(VOCAB, 1)


@pytest.mark.parametrize(
    "arm", ["lookahead level=3 window=2 guesses=2", "lookahead level=4 window=3 guesses=3 from_prompt=true warm=true",
            "prompt_lookup gamma=3", "prompt_lookup gamma=3 branches=3"],
)  # fmt: skip
def test_sampling_keeps_the_joint_distribution(arm: str) -> None:
    """The law of three tokens; n-grams come from the text so far and from the model's choices."""
    sampling, stack, prompt = SamplingSettings(temperature=1.0), Stack(table_model(TABLE)), [2, 0, 3, 0, 1, 2, 0]
    decoder = _decoder(arm, None, sampling, target=stack)
    results = generate(decoder, [Request(f"q{i}", prompt, 5) for i in range(DRAWS)], BATCH)
    p, law, last = probabilities(TABLE, sampling).double(), torch.ones(1, dtype=torch.float64), torch.tensor([0])
    for _ in range(3):
        law = (law[:, None] * p[last]).flatten()
        last = torch.arange(VOCAB).repeat(len(law) // VOCAB)
    codes = [sum(t * VOCAB ** (2 - k) for k, t in enumerate(r.ids[:3])) for r in results]
    assert chi_square(torch.bincount(torch.tensor(codes), minlength=VOCAB**3).tolist(), law.tolist()) > ALPHA
    accepted = [line["accepted"][0] for line in _rounds(results)]
    assert accepted.count(1) > 100 and max(accepted) > 1


@pytest.mark.parametrize("draft", ["near", "copies"])
def test_the_pre_verifier_is_told_what_it_is_told_in_pacer(draft: str) -> None:
    """The estimates of a draft are those of the same tokens drawn one by one: states, signals, indices, copies."""
    models = _models(DRAFTS[draft])
    arm = "ouroboros_pacer b=2 t0=0 gamma_max=6 phrases=0"
    results = make_decoder(method_settings(arm), models, GREEDY).generate(_requests())
    pacer = make_decoder(method_settings("pacer b=2 t0=0 gamma_max=12 lo=0 hi=1"), models, GREEDY)
    compared = 0
    for result in results:
        first = result.rounds[1]
        alone = pacer.generate([Request("x", result.request.prompt_ids, NEW)])[0].rounds[1]
        drafted, scores = list(first["drafted"]), list(first["scores"])  # type: ignore[call-overload]
        n = min(len(drafted), len(alone["drafted"]), len(scores), len(alone["scores"]))  # type: ignore[arg-type]
        assert drafted[:n] == alone["drafted"][:n] and n >= 6  # type: ignore[index]
        assert scores[:n] == pytest.approx(alone["scores"][:n], abs=1e-4)  # type: ignore[index]
        compared += n
    assert compared >= 24


@pytest.mark.parametrize("b", [1, 3])
def test_the_pre_verifier_is_asked_once_there_are_b_tokens(b: int) -> None:
    results = _decoder(f"ouroboros_pacer b={b} t0=0.5 rho=1.0 gamma_max=12").generate(_requests())
    stops, lengths = set(), set()
    for line in _rounds(results)[1:]:
        if "inner" in line and line["drafted"]:
            sizes = [len(inner["emitted"]) for inner in line["inner"]]
            scores = [s for s in line["scores"] if s is not None]
            blocks: list[int] = []
            new = 0
            for size in sizes:
                new += size
                if new >= b or sum(blocks) + new >= 12:
                    blocks.append(new)
                    new = 0
            assert len(scores) in (sum(blocks), sum(blocks[:-1])), "all but the block in which the text ended"
            stops.add(line["stop"])
            lengths.add(sum(sizes))
    assert "controller" in stops and len(lengths) > 2


def test_past_the_drafts_context_it_goes_on_without_drafting() -> None:
    """S37, with one warning; also for a prompt that is too long from the start."""
    draft = Stack(near(tiny_model(layers=2, context=24)))
    decoder = make_decoder(method_settings("ouroboros"), _models(draft), GREEDY)
    requests = [Request("a", PROMPTS[0], 40), Request("b", prompts([30])[0], 10)]
    with pytest.warns(UserWarning, match="the draft model's context of 24 tokens is used up") as caught:
        results = decoder.generate(requests)
    assert len(caught) == 1
    assert [r.ids for r in results] == [plain_greedy(TARGET.model, r.prompt_ids, r.max_new_tokens) for r in requests]
    assert "context" in {line["stop"] for line in results[0].rounds} and results[1].rounds[1]["drafted"] == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        decoder.generate(requests[:1])


def test_a_padded_id_of_the_target_may_be_none_of_the_drafts() -> None:
    draft = Stack(near(tiny_model(layers=2, vocab=90)))
    results = make_decoder(method_settings("ouroboros"), replace(_models(draft)), GREEDY).generate(_requests())
    assert [r.ids for r in results] == [plain_greedy(TARGET.model, prompt, NEW) for prompt in PROMPTS]


def test_what_is_not_supported_is_refused() -> None:
    """S39."""
    for arm in ("ouroboros", "ouroboros_pacer"):
        with pytest.raises(UnsupportedError, match=f"method {arm} decodes greedily only: 'temperature=0.7'"):
            _decoder(arm, sampling=SamplingSettings(0.7))
        with pytest.raises(UnsupportedError, match=f"method {arm} needs a draft model"):
            _decoder(arm, None)
    models = _models()
    models.preverifier = None
    with pytest.raises(UnsupportedError, match="needs a pre-verifier"):
        make_decoder(method_settings("ouroboros_pacer"), models, GREEDY)
    for arm, kind in (("lookahead", "fixed"), ("prompt_lookup", "preverifier"), ("ouroboros", "threshold")):
        method = method_settings(arm)
        method.controller = {"kind": kind, "gamma": 3}
        with pytest.raises(ConfigError, match=f"controller of method {arm}: '{kind}'; allowed: none"):
            make_decoder(method, _models(), GREEDY)


def test_off_is_plain_decoding() -> None:
    """A44, A49: no rule and γ = 0 mean no drafts, where a rule decides their length."""
    for arm in ("prompt_lookup gamma=0", "ouroboros gamma=0"):
        assert _decoder(arm).proposer is None
    for arm in ("prompt_lookup", "ouroboros"):
        method = method_settings(arm)
        method.controller = None
        assert make_decoder(method, _models(), GREEDY).proposer is None
    assert isinstance(_decoder("ouroboros").proposer, Ouroboros) and isinstance(_decoder("ouroboros").reader, Lane)
