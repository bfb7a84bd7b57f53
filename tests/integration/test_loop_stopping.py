"""Where an output ends: stop ids, stop strings, budgets and context limits, as in plain decoding."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from pacer.decoding.controllers.fixed import Fixed
from pacer.decoding.controllers.preverifier import PreverifierRule
from pacer.decoding.loop import Decoder
from pacer.decoding.request import Request
from pacer.errors import ConfigError, PacerError, UnsupportedError
from pacer.models.stack import Stack
from pacer.settings import SamplingSettings
from tests.tiny import (
    generate,
    hf_generate,
    make_decoder,
    make_preverifier,
    near,
    plain_greedy,
    prompts,
    table_model,
    tiny_model,
    tiny_stack,
)

PROMPTS = prompts([5, 12, 8, 1])
REFERENCE = tiny_model(layers=2)
TARGET, DRAFT = tiny_stack(layers=2), Stack(near(tiny_model(layers=2)))
MODULE = make_preverifier(DRAFT)
NEW = 18
OUTPUTS = [plain_greedy(REFERENCE, prompt, NEW) for prompt in PROMPTS]
METHODS = ["ar", "sd", "self", "pacer"]


def _decoder(name: str, **options: Any) -> Decoder:
    if name == "pacer":
        return make_decoder(TARGET, DRAFT, PreverifierRule(MODULE, b=3, t0=0.2, gamma_max=8), **options)
    draft = {"ar": None, "sd": DRAFT, "self": TARGET}[name]
    return make_decoder(TARGET, draft, Fixed(4) if draft else None, **options)


def _requests(new: int = NEW, **options: Any) -> list[Request]:
    return [Request(f"r{i}", prompt, new, **options) for i, prompt in enumerate(PROMPTS)]


@pytest.mark.parametrize("place", [0, 1, 3, 4, 10, NEW - 1])
@pytest.mark.parametrize("name", METHODS)
def test_the_output_ends_at_the_first_stop_id(name: str, place: int) -> None:
    """S29, S33: anywhere in a block or from the prefill, equal to transformers' generate; other rows go on."""
    stop = OUTPUTS[0][place]
    expected = [hf_generate(REFERENCE, p, NEW, eos_token_id=stop) for p in PROMPTS[:2]]
    results = _decoder(name).generate(_requests(stop_ids=frozenset([stop]))[:2])
    assert [r.ids for r in results] == expected
    assert results[0].finish == "eos" and results[0].ids[-1] == stop and stop not in results[0].ids[:-1]
    last = results[0].rounds[-1]
    assert last["emitted"][-1] == stop and stop not in last["drafted"][:-1], "what follows a stop id is no draft"


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("order", [1, -1])
def test_of_several_stop_ids_the_earliest_place_wins(name: str, order: int) -> None:
    """S30."""
    ids = [OUTPUTS[0][9], OUTPUTS[0][4], OUTPUTS[0][7], OUTPUTS[1][6]][::order]
    results = _decoder(name).generate(_requests(stop_ids=frozenset(ids)))
    assert [r.ids for r in results] == [hf_generate(REFERENCE, p, NEW, eos_token_id=ids) for p in PROMPTS]


def test_each_request_has_its_own_stop_ids() -> None:
    stops = [frozenset([OUTPUTS[1][3]]), frozenset([OUTPUTS[1][5]]), frozenset(), frozenset(OUTPUTS[0])]
    requests = [Request(f"r{i}", p, NEW, s) for i, (p, s) in enumerate(zip(PROMPTS, stops, strict=True))]
    for name in METHODS:
        results = _decoder(name).generate(requests)
        for result, output, stop in zip(results, OUTPUTS, stops, strict=True):
            ends = [n for n in range(1, NEW + 1) if output[n - 1] in stop]
            assert result.ids == output[: ends[0] if ends else NEW]


def _text(ids: Sequence[int]) -> str:
    return "".join(f"<{i}>" for i in ids)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("place", [1, 4, 8])
def test_a_stop_string_inside_a_draft_cuts_as_in_plain_decoding(name: str, place: int) -> None:
    """S31: also where it spans two tokens, and where several strings compete."""
    spanning = _text(OUTPUTS[0][place : place + 2])[1:-1]
    late = _text(OUTPUTS[0][place + 3 : place + 4])
    results = _decoder(name, decode=_text).generate(_requests(stop=(late, spanning)))
    for result, output in zip(results, OUTPUTS, strict=True):
        ends = [n for n in range(1, NEW + 1) if any(s in _text(output[:n]) for s in (late, spanning))]
        assert result.ids == output[: ends[0] if ends else NEW]
        assert result.finish == ("stop_string" if ends else "length")
    assert results[0].finish == "stop_string"


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("new", [1, 2, 5])
def test_the_budget_is_exact(name: str, new: int) -> None:
    """S33, S34, S36: max_new_tokens 5 with γ 4 gives 5; without a stop id every row runs to it."""
    decoder = _decoder(name)
    results = decoder.generate(_requests(new))
    assert [r.ids for r in results] == [output[:new] for output in OUTPUTS]
    for result in results:
        assert result.finish == "length"
        for line in result.rounds:
            before = line["committed"] - len(result.request.prompt_ids)
            assert len(line["drafted"]) <= max(0, new - before - 1), "no draft that could not be emitted"


def test_rows_end_at_their_own_time() -> None:
    budgets = [1, 17, 4, 9]
    requests = [Request(f"r{i}", p, n) for i, (p, n) in enumerate(zip(PROMPTS, budgets, strict=True))]
    for name in METHODS:
        results = _decoder(name).generate(requests)
        assert [r.ids for r in results] == [out[:n] for out, n in zip(OUTPUTS, budgets, strict=True)]
        last = max(results, key=lambda r: len(r.rounds)).rounds[-1]
        assert last["rows"] < 4, "finished rows are not counted"


@pytest.mark.parametrize("name", ["ar", "sd", "self", "pacer"])
@pytest.mark.parametrize("batch", [1, 4])
def test_the_targets_context_ends_the_output(name: str, batch: int) -> None:
    """S37: no draft reaches beyond it, and no row is disturbed by one that fills its own."""
    context = 20
    target, draft = tiny_stack(layers=2, context=context), Stack(near(tiny_model(layers=2, context=context)))
    draft = target if name == "self" else draft
    controller = PreverifierRule(make_preverifier(draft), b=2, t0=0.0, gamma_max=6) if name == "pacer" else Fixed(4)
    decoder = make_decoder(target, draft, None if name == "ar" else controller)
    results = generate(decoder, [Request(str(i), p, 50) for i, p in enumerate(PROMPTS)], batch)
    for result, prompt in zip(results, PROMPTS, strict=True):
        assert result.finish == "context" and len(prompt) + len(result.ids) == context
        assert result.ids == plain_greedy(target.model, prompt, context - len(prompt))
        assert all(line["committed"] + len(line["drafted"]) <= context for line in result.rounds)


@pytest.mark.parametrize("sampling", [SamplingSettings(), SamplingSettings(1.0, top_k=1)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", ["sd", "pacer", "pacer that reads the whole draft's probability"])
@pytest.mark.parametrize("context", [4, 9, 13])
def test_past_the_drafts_context_decoding_goes_on(name: str, context: int, sampling: SamplingSettings) -> None:
    """S37: γ shrinks to the room left, then speculation is off, with one warning in all; some prompts are longer than
    the draft's context from the start."""
    draft = Stack(near(tiny_model(layers=2, context=context)))
    features = ["logprob", *(["cumulative"] if "whole" in name else [])]
    rule = PreverifierRule(make_preverifier(draft, features=features), b=2, t0=0.0, gamma_max=5)
    decoder = make_decoder(TARGET, draft, Fixed(4) if name == "sd" else rule, sampling)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in (4, 1):
            results = generate(decoder, _requests(), batch)
            assert [r.ids for r in results] == OUTPUTS
            for result in results:
                for line in result.rounds[1:]:
                    room = max(0, context - line["committed"] + 1)
                    assert len(line["drafted"]) <= room
                    if room == 0:
                        assert line["stop"] in ("context", "budget") and line["drafted"] == []
            cut = [line for r in results for line in r.rounds[1:] if line["stop"] == "context"]
            assert any(0 < len(line["drafted"]) < 4 for line in cut)
    ours = [w for w in caught if "draft model's context" in str(w.message)]
    assert len(ours) == 1 and str(context) in str(ours[0].message)


@pytest.mark.parametrize(
    ("prompt", "new"),
    [([], 5), ([1] * 128, 5), ([1] * 200, 5), ([1, 2], 0), ([1, 2], -3)],
    ids=["empty", "full", "long", "no budget", "negative budget"],
)
@pytest.mark.parametrize("name", ["ar", "sd"])
def test_requests_that_do_not_fit_are_refused_by_name(name: str, prompt: list[int], new: int) -> None:
    with pytest.raises(ConfigError, match="request odd does not fit"):
        _decoder(name).generate([Request("fine", [1], 3), Request("odd", prompt, new)])


def test_options_that_cannot_be_served_are_errors() -> None:
    """S39."""
    with pytest.raises(PacerError, match="stop strings need a tokenizer"):
        _decoder("sd").generate(_requests(stop=("x",)))
    with pytest.raises(UnsupportedError, match=r"temperature out of range"):
        make_decoder(TARGET, sampling=SamplingSettings(temperature=-1.0))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_stop_id_from_the_prefill_ends_the_output(temperature: float) -> None:
    """S33: the first token is looked at like any other."""
    table = torch.full((3, 3), -1e9)
    table[:, 2] = 0.0
    stack = Stack(table_model(table))
    decoder = make_decoder(stack, stack, Fixed(3), SamplingSettings(temperature))
    result = decoder.generate([Request("t", [0], 9, frozenset([2]))])[0]
    assert result.ids == [2] and result.finish == "eos" and len(result.rounds) == 1
