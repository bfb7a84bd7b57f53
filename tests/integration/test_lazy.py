"""Lazy pre-verification and threshold rules in the loop: who is asked, what is read, and that no output changes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from pacer.decoding.controllers.base import Controller
from pacer.decoding.controllers.fixed import Fixed
from pacer.decoding.controllers.preverifier import PreverifierRule
from pacer.decoding.controllers.threshold import Threshold
from pacer.decoding.loop import Decoder
from pacer.decoding.request import Request, Result
from pacer.models.stack import Stack
from pacer.settings import SamplingSettings
from tests.tiny import generate, make_decoder, make_preverifier, near, plain_greedy, prompts, tiny_model, tiny_stack

NEW = 24
PROMPTS = prompts([5, 12, 8, 1])
TARGET, DRAFT = tiny_stack(layers=2), Stack(near(tiny_model(layers=2)))
MODULE = make_preverifier(DRAFT)
OUTPUTS = [plain_greedy(TARGET.model, prompt, NEW) for prompt in PROMPTS]
RULES: dict[str, Callable[[], Controller]] = {
    "probability": lambda: Threshold("probability", t=0.11, gamma_max=6),
    "product": lambda: Threshold("probability", "product", t=0.002, gamma_max=6),
    "entropy": lambda: Threshold("entropy", t=3.75, gamma_max=6),
    "margin": lambda: Threshold("margin", t=0.3, gamma_max=6),
    "match": lambda: Threshold("match", t=1, gamma_max=6),
    "lazy b=1": lambda: PreverifierRule(MODULE, b=1, t0=0.3, gamma_max=6, lo=0.09, hi=0.14),
    "lazy b=2": lambda: PreverifierRule(MODULE, b=2, t0=0.3, rho=1.1, gamma_max=7, rule="min", lo=0.01, hi=0.025),
    "lazy lo": lambda: PreverifierRule(MODULE, b=3, t0=0.2, gamma_max=8, lo=0.0014),
    "lazy hi": lambda: PreverifierRule(MODULE, b=2, t0=0.3, gamma_max=8, hi=0.02),
}
LAZY = [name for name in RULES if name.startswith("lazy")]


def _requests(new: int = NEW, count: int = 4, stop: Sequence[int] = ()) -> list[Request]:
    return [Request(f"r{i}", prompt, new, frozenset(stop)) for i, prompt in enumerate(PROMPTS[:count])]


def _rounds(results: Sequence[Result]) -> list[tuple[Result, dict[str, Any]]]:
    return [(result, line) for result in results for line in result.rounds[1:]]


def _probabilities(result: Result, line: dict[str, Any]) -> list[float]:
    """The draft's probability of each drafted token, from one pass over the text without any cache."""
    prefix = [*result.request.prompt_ids, *result.ids][: line["committed"]]
    logits = DRAFT.model(input_ids=torch.tensor([[*prefix, *line["drafted"]]]), use_cache=False).logits[0]
    p = logits[len(prefix) - 1 : -1].softmax(-1)
    return [float(row[token]) for row, token in zip(p, line["drafted"], strict=True)]


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("name", RULES)
def test_greedy_output_is_the_targets_own(name: str, batch: int) -> None:
    results = generate(make_decoder(TARGET, DRAFT, RULES[name]()), _requests(), batch)
    assert [r.ids for r in results] == OUTPUTS
    stops = {line["stop"] for _, line in _rounds(results)}
    assert "controller" in stops and stops <= {"controller", "gamma_max", "budget"}
    assert name == "match" or len({len(line["drafted"]) for _, line in _rounds(results)}) > 2


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("name", RULES)
def test_greedy_output_ends_at_stop_ids(name: str, batch: int) -> None:
    """Also where one is drawn in the middle of a draft that would have gone on: then nobody is asked."""
    stop = [OUTPUTS[0][7], OUTPUTS[1][4]]
    results = generate(make_decoder(TARGET, DRAFT, RULES[name]()), _requests(stop=stop), batch)
    for result, output in zip(results, OUTPUTS, strict=True):
        end = next((i + 1 for i, token in enumerate(output) if token in stop), NEW)
        assert result.ids == output[:end]
    for _, line in _rounds(results):
        assert not set(stop) & set(line["drafted"][:-1])
        full = line["stop"] in ("gamma_max", "budget")  # the last token that fits may be a stop id
        assert (line["stop"] == "eos") == (bool(set(stop) & set(line["drafted"])) and not full)


@pytest.mark.parametrize("temperature", [0.0, 0.5])
@pytest.mark.parametrize("name", ["probability", "product"])
def test_a_threshold_decides_by_the_drafts_probability(name: str, temperature: float) -> None:
    """A42: each draft ends at the first token whose value is below t; at temperature 1 whatever the sampling."""
    rule = RULES[name]()
    assert isinstance(rule, Threshold)
    sampling = SamplingSettings(temperature, top_k=20)
    for result, line in _rounds(generate(make_decoder(TARGET, DRAFT, rule, sampling), _requests(), 4)):
        p = _probabilities(result, line)
        values = list(itertools.accumulate(p, lambda a, b: a * b)) if name == "product" else p
        assert [v >= rule.t for v in values[:-1]] == [True] * (len(values) - 1)
        if line["stop"] == "controller":
            assert values[-1] < rule.t
        scores = [score for score in line["scores"] if score is not None]  # the last is not judged where the room ends
        assert scores == pytest.approx(values[: len(scores)], abs=1e-4)
        assert len(scores) == (len(values) if line["stop"] == "controller" else max(0, len(values) - 1))


def test_a_higher_threshold_drafts_less() -> None:
    """A42."""
    means = []
    for t in (0.0, 0.09, 0.12, 0.2, 1.0):
        results = make_decoder(TARGET, DRAFT, Threshold(t=t, gamma_max=8)).generate(_requests())
        lengths = [len(line["drafted"]) for _, line in _rounds(results) if line["stop"] != "budget"]
        means.append(sum(lengths) / len(lengths))
    assert means == sorted(means, reverse=True) and means[0] == 8 and means[-1] == 1 and len(set(means)) >= 4


@pytest.mark.parametrize("temperature", [0.0, 0.5])
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("name", LAZY)
def test_the_pre_verifier_is_called_only_where_the_draft_leaves_it_open(
    name: str, batch: int, temperature: float
) -> None:
    """Each block of each trace line, judged again by hand: below lo the end, above hi on, else M_B's word."""
    rule = RULES[name]()
    assert isinstance(rule, PreverifierRule)
    seen = dict.fromkeys(("below", "above", "asked"), 0)
    results = generate(make_decoder(TARGET, DRAFT, rule, SamplingSettings(temperature)), _requests(), batch)
    for result, line in _rounds(results):
        drafted, scores = line["drafted"], [*line["scores"], *[None] * 9]
        p = _probabilities(result, line)
        for k, start in enumerate(range(0, len(drafted), rule.b)):
            block = slice(start, min(start + rule.b, len(drafted)))
            last = block.stop == len(drafted)
            if last and line["stop"] != "controller":
                assert scores[block] == [None] * len(scores[block])
                continue
            product = math.prod(p[block])
            assert min(abs(product - rule.lo), abs(product - rule.hi)) > 1e-6, "too near for this test to judge"
            case = "below" if product < rule.lo else "above" if product > rule.hi else "asked"
            seen[case] += 1
            if case == "asked":
                value = min(scores[block]) if rule.rule == "min" else sum(scores[block]) / rule.b
                assert (value >= rule.t0 * rule.rho**k) == (not last)
            else:
                assert scores[block] == [None] * rule.b and last == (case == "below")
    assert seen["asked"] > 3 and (seen["below"] > 0) == (rule.lo > 0) and (seen["above"] > 0) == (rule.hi < 1)


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("settings", [{}, {"width": 16, "depth": 2}])
def test_what_was_skipped_is_read_with_the_next_call(settings: dict[str, Any], batch: int) -> None:
    """The estimates that are given are those of a pre-verifier that was called for every block."""
    module = make_preverifier(DRAFT, **settings)
    always = make_decoder(TARGET, DRAFT, PreverifierRule(module, b=2, t0=0.0, gamma_max=8))
    lazy = make_decoder(TARGET, DRAFT, PreverifierRule(module, b=2, t0=0.0, gamma_max=8, hi=0.015))
    given = left_out = after = 0
    for (_, one), (_, other) in zip(
        *(_rounds(generate(decoder, _requests(), batch)) for decoder in (always, lazy)), strict=True
    ):
        assert one["drafted"] == other["drafted"]
        for place, score in enumerate(other["scores"]):
            if score is None:
                left_out += one["scores"][place] is not None
            else:
                assert score == pytest.approx(one["scores"][place], abs=2e-5)
                given += 1
                after += None in other["scores"][:place]
    assert given > 10 and left_out > 10 and after > 2


def test_rows_that_need_no_call_are_not_fed() -> None:
    """In a batch each row decides for itself; without a row that needs it there is no call at all."""
    rule = PreverifierRule(MODULE, b=2, t0=0.0, gamma_max=8, lo=0.005, hi=0.02)
    read, reads, asked = rule.read, [], []
    ask = rule.ask

    def spy_ask(record: Any, rows: Any, drawn: int, wanted: Sequence[bool]) -> Any:
        asked.append(list(wanted))
        return ask(record, rows, drawn, wanted)

    def spy_read(record: Any, ends: Sequence[int], bases: Sequence[int]) -> Tensor:
        before = list(rule.lane.lengths)
        scores = read(record, ends, bases)
        reads.append([now > was for now, was in zip(rule.lane.lengths, before, strict=True)])
        return scores

    rule.ask, rule.read = spy_ask, spy_read  # type: ignore[method-assign]  # spies
    results = make_decoder(TARGET, DRAFT, rule).generate(_requests())
    assert reads[1:] == asked, "the first is the prefill"
    assert all(any(rows) for rows in asked) and any(not all(rows) for rows in asked)
    blocks = sum(math.ceil(len(line["drafted"]) / 2) for _, line in _rounds(results))
    assert sum(map(sum, asked)) < blocks


@pytest.mark.parametrize("batch", [1, 4])
def test_host_reads(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One per block that is decided without a call, two with one, one per drawn token of a threshold."""
    reads = [0]
    tolist = Tensor.tolist

    def counting(self: Tensor) -> Any:
        reads[0] += 1
        return tolist(self)

    for name in ("lazy b=1", "lazy b=2", "probability"):
        rule = RULES[name]()
        decoder = make_decoder(TARGET, DRAFT, rule)
        judge, ask, calls = rule.judge, rule.ask, {"judge": 0, "ask": 0}

        def spy(kind: str, plain: Any, calls: dict[str, int] = calls) -> Any:
            def called(*args: Any) -> Any:
                calls[kind] += 1
                before = reads[0]
                found = plain(*args)
                assert reads[0] == before, "a controller leaves the reading to the loop"
                return found

            return called

        rule.judge, rule.ask = spy("judge", judge), spy("ask", ask)  # type: ignore[method-assign]  # spies
        assert decoder.proposer is not None
        propose = decoder.proposer.propose
        inside = [0]

        def counted(rows: Any, propose: Any = propose, inside: list[int] = inside) -> Any:
            before = reads[0]
            draft = propose(rows)
            inside[0] += reads[0] - before
            return draft

        decoder.proposer.propose = counted  # type: ignore[method-assign]  # a spy
        with monkeypatch.context() as patch:
            patch.setattr(Tensor, "tolist", counting)
            decoder.generate(_requests(count=batch))
        assert inside[0] == calls["judge"] + calls["ask"] and calls["judge"] > calls["ask"]
        assert (calls["ask"] > 0) == (name in LAZY)


GAMMA = 4
AT_LIMITS: dict[str, Callable[[Stack, int], Controller]] = {
    "fixed": lambda _, gamma: Fixed(gamma),
    "threshold": lambda _, gamma: Threshold(t=0.0, gamma_max=gamma),
    "product": lambda _, gamma: Threshold(rule="product", t=0.0, gamma_max=gamma),
    "pacer": lambda draft, gamma: PreverifierRule(make_preverifier(draft, gamma_max=GAMMA), 2, 0.0, gamma_max=gamma),
    "lazy": lambda draft, gamma: PreverifierRule(
        make_preverifier(draft, gamma_max=GAMMA), 2, 0.0, gamma_max=gamma, hi=0.015
    ),
}


@pytest.mark.parametrize("gamma", [GAMMA, GAMMA + 1])
@pytest.mark.parametrize("name", AT_LIMITS)
def test_full_drafts_at_the_end_of_every_buffer(name: str, gamma: int) -> None:
    """A51: γ_max and γ_max + 1 (of a pre-verifier trained for γ_max) where budget or context leave just that room."""
    for room in (gamma, gamma + 1, gamma + 2):
        rule = AT_LIMITS[name](DRAFT, gamma)
        results = make_decoder(TARGET, DRAFT, rule).generate(_requests(room + 1))
        assert [r.ids for r in results] == [output[: room + 1] for output in OUTPUTS]
        assert max(len(line["drafted"]) for _, line in _rounds(results)) == min(gamma, room - 1)
    context = len(PROMPTS[1]) + gamma + 2
    target, draft = tiny_stack(layers=2, context=context), Stack(near(tiny_model(layers=2, context=context)))
    for mine in (draft, target):  # a draft that is the target fills the context with accepted tokens
        results = make_decoder(target, mine, AT_LIMITS[name](mine, gamma)).generate(_requests(50))
        for result, prompt in zip(results, PROMPTS, strict=True):
            assert result.finish == "context"
            assert result.ids == plain_greedy(target.model, prompt, context - len(prompt))


def test_a_window_of_0_is_plain_decoding() -> None:
    """A49: the draft is neither read nor given a cache, and every target pass is the one of plain decoding."""

    def passes(decoder: Decoder, stack: Stack, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Any], list[Result]]:
        seen: list[Any] = []
        run = stack.run

        def counting(x: Tensor, *args: Any, **options: Any) -> Tensor:
            seen.append(tuple(x.shape))
            return run(x, *args, **options)

        monkeypatch.setattr(stack, "run", counting)
        monkeypatch.setattr(DRAFT, "run", _never)
        monkeypatch.setattr(DRAFT, "new_cache", _never)
        return seen, decoder.generate(_requests())

    found = []
    for decoder in (make_decoder(TARGET), make_decoder(TARGET, DRAFT, Fixed(0))):
        with pytest.MonkeyPatch.context() as patch:
            seen, results = passes(decoder, TARGET, patch)
        lines = [[{**line, "time": {}} for line in r.rounds] for r in results]
        found.append((seen, lines, [r.ids for r in results]))
        assert all(line["time"]["draft"] == line["time"]["preverify"] == 0 for _, line in _rounds(results))
    assert found[0] == found[1] and found[0][2] == OUTPUTS and len(found[0][0]) == NEW


def _never(*_: object, **__: object) -> None:
    raise AssertionError("the draft is not used")
