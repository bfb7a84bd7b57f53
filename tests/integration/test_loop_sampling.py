"""Sampling through the whole loop has the target's distribution, whatever drafts and decides.

Chi-square tests of the joint law of the first tokens; the seeds are fixed, on other seeds each test would raise a false
alarm with probability 1e-4. A batch holds many requests, whose ids give them independent numbers.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from pacer.decoding import verifier as verifier_module
from pacer.decoding.controllers.fixed import Fixed
from pacer.decoding.controllers.preverifier import PreverifierRule
from pacer.decoding.controllers.threshold import Threshold
from pacer.decoding.distributions import penalised, probabilities
from pacer.decoding.record import Record
from pacer.decoding.request import Request, Result, Row
from pacer.evaluation.stats import chi_square
from pacer.models.stack import Stack
from pacer.settings import SamplingSettings
from tests.tiny import (
    Rule,
    generate,
    make_decoder,
    make_preverifier,
    near,
    prompts,
    proposer,
    random_table,
    table_model,
    tiny_model,
    tiny_stack,
)

ALPHA = 1e-4
WARM = SamplingSettings(temperature=1.0)


def _joint(results: list[Result], vocab: int, n: int) -> list[int]:
    """How often each sequence of the first n tokens occurred, in the order of itertools.product."""
    codes = [sum(t * vocab ** (n - 1 - k) for k, t in enumerate(r.ids[:n])) for r in results]
    return torch.bincount(torch.tensor(codes), minlength=vocab**n).tolist()


def _requests(count: int, prompt: list[int], new: int, **options: Any) -> list[Request]:
    return [Request(f"q{i}", prompt, new, **options) for i in range(count)]


def _law(stack: Stack, prompt: list[int], n: int, sampling: SamplingSettings) -> Tensor:
    """The exact probability of every sequence of n tokens ``(V^n,)``, each from a pass over the whole text."""
    vocab, law = stack.vocab_size, torch.ones(1, dtype=torch.float64)
    for k in range(n):
        texts = torch.tensor([[*prompt, *tail] for tail in itertools.product(range(vocab), repeat=k)])
        with torch.no_grad():
            logits = stack.model(input_ids=texts, use_cache=False).logits[:, -1]
        seen = torch.zeros(len(texts), vocab, dtype=torch.bool).scatter(1, texts, True)
        p = probabilities(penalised(logits, seen, sampling.repetition_penalty), sampling).double()
        law = (law[:, None] * p).flatten()
    return law


VOCAB = 5
TABLE = Stack(table_model(random_table(VOCAB, 1)))
CLOSE = Stack(table_model(random_table(VOCAB, 1) + random_table(VOCAB, 2, 0.7)))
FAR = Stack(table_model(random_table(VOCAB, 3, 2.0)))
ADVERSARIES = {
    "ends after an even id": lambda ids: ids[:, -1] % 2 > 0,
    "ends after an odd id": lambda ids: ids[:, -1] % 2 == 0,
    "ends when an id repeats": lambda ids: ~(ids[:, :-1] == ids[:, -1:]).any(1),
    "goes on only after id 3": lambda ids: ids[:, -1] == 3,
    "ends when the sum of the draft is large": lambda ids: ids.sum(1) < 4,
}


NAMES = {id(TABLE): "same", id(CLOSE): "close", id(FAR): "far"}
CASES = [
    *((CLOSE, rule) for rule in ("sd gamma=3", *ADVERSARIES)),
    *((FAR, rule) for rule in ("sd gamma=1", "ends after an odd id", "ends when an id repeats")),
    (TABLE, "goes on only after id 3"),
]
DRAWS, BATCH = 3000, 300


def _controller(name: str) -> Fixed | Rule:
    return Fixed(int(name[-1])) if name.startswith("sd") else Rule(ADVERSARIES[name])


@pytest.mark.parametrize(("draft", "name"), CASES, ids=[f"{name}, {NAMES[id(draft)]}" for draft, name in CASES])
def test_table_models_keep_the_joint_distribution(draft: Stack, name: str) -> None:
    """Also where a controller decides on the value of the token just drawn."""
    decoder = make_decoder(TABLE, draft, _controller(name), WARM)
    results = generate(decoder, _requests(DRAWS, [2, 0], 5), BATCH)
    assert chi_square(_joint(results, VOCAB, 3), _law(TABLE, [2, 0], 3, WARM).tolist()) > ALPHA
    rejected = sum(line["accepted"][0] < len(line["drafted"]) for r in results for line in r.rounds)
    accepted = sum(line["accepted"][0] for r in results for line in r.rounds)
    assert accepted > 500 and (rejected > 500) == (draft is not TABLE)
    lengths = {len(line["drafted"]) for r in results for line in r.rounds[1:]}
    assert len(lengths) > 1


class Remembers(Rule):
    """Drafts on to a place only if what it once drew there, and lost to a rejection before it, was an odd id."""

    def reset(self, rows: Sequence[Row], capacity: int) -> None:
        self.drew: list[dict[int, int]] = [{} for _ in rows]

    def judge(
        self, record: Record | None, rows: Sequence[Row], drawn: int, open_rows: Sequence[bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        assert record is not None
        places = [len(row.committed) + drawn - 1 for row in rows]
        ids = record.ids.tolist()
        go_on = []
        for i, place in enumerate(places):
            go_on.append(self.drew[i].get(place + 1, 1) % 2 > 0)
            self.drew[i][place] = ids[i][min(place, len(ids[i]) - 1)]
        return torch.tensor(go_on), None


@pytest.mark.parametrize("gamma_max", [4, 5])  # 3 leaves nothing to remember
def test_a_controller_that_remembers_lost_draws_keeps_the_distribution(gamma_max: int) -> None:
    """A place drafted again gets fresh numbers; the same ones again would tell the controller what it will draw."""
    decoder = make_decoder(TABLE, FAR, Remembers(lambda ids: ids, gamma_max), WARM)
    results = generate(decoder, _requests(DRAWS, [2, 0], 8), BATCH)
    assert chi_square(_joint(results, VOCAB, 3), _law(TABLE, [2, 0], 3, WARM).tolist()) > ALPHA
    ended = {line["stop"] for r in results for line in r.rounds[2:]}
    assert {"controller", "gamma_max"} <= ended


OPTIONS = {
    "cold": SamplingSettings(0.6),
    "hot": SamplingSettings(1.7, seed=5),
    "top-k": SamplingSettings(1.2, top_k=3),
    "top-p": SamplingSettings(1.0, top_p=0.8),
    "penalty": SamplingSettings(0.9, repetition_penalty=1.5),
    "all": SamplingSettings(0.8, top_k=4, top_p=0.95, repetition_penalty=1.2, seed=3),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_every_sampling_option_keeps_the_joint_distribution(name: str) -> None:
    sampling = OPTIONS[name]
    law = _law(TABLE, [1], 3, sampling).tolist()
    for name_of_rule in ("sd gamma=2", "ends after an even id"):
        decoder = make_decoder(TABLE, CLOSE, _controller(name_of_rule), sampling)
        results = generate(decoder, _requests(2000, [1], 4), BATCH)
        assert chi_square(_joint(results, VOCAB, 3), law) > ALPHA


@pytest.mark.parametrize("stop", [0, 2])
def test_stop_ids_keep_the_joint_distribution(stop: int) -> None:
    """A draft is cut behind a drawn stop id: what follows it would be thrown away anyway."""
    law = _law(TABLE, [2, 0], 2, WARM).reshape(VOCAB, VOCAB)
    law[stop, 0], law[stop, 1:] = law[stop].sum(), 0.0
    for name in ("sd gamma=3", "ends after an odd id"):
        decoder = make_decoder(TABLE, CLOSE, _controller(name), WARM)
        results = generate(decoder, _requests(2000, [2, 0], 4, stop_ids=frozenset([stop])), BATCH)
        assert all((r.finish == "eos") == (r.ids[-1] == stop) and stop not in r.ids[:-1] for r in results)
        pairs = [Result(r.request, [*r.ids, 0][:2], "", 0, 0) for r in results]
        assert chi_square(_joint(pairs, VOCAB, 2), law.flatten().tolist()) > ALPHA


def test_the_chi_square_notices_a_wrong_distribution() -> None:
    """The tests above can fail: a temperature a fifth off is found with the same number of draws."""
    decoder = make_decoder(TABLE, CLOSE, Fixed(3), SamplingSettings(1.2))
    results = generate(decoder, _requests(DRAWS, [2, 0], 4), BATCH)
    assert chi_square(_joint(results, VOCAB, 3), _law(TABLE, [2, 0], 3, WARM).tolist()) < 1e-6


SMALL = 11
TINY = tiny_stack(layers=2, vocab=SMALL)
TINY_DRAFT = Stack(near(tiny_model(layers=2, vocab=SMALL), 0.05))
TINY_MODULE = make_preverifier(TINY_DRAFT)
TINY_PROMPT = [3, 1, 4, 1, 5]
TINY_WARM = SamplingSettings(temperature=2.5)


@pytest.mark.parametrize(
    "controller",
    [
        Fixed(3),
        PreverifierRule(TINY_MODULE, b=1, t0=0.5, gamma_max=5),
        PreverifierRule(TINY_MODULE, b=2, t0=0.3, rho=1.3, gamma_max=5, rule="min"),
        PreverifierRule(TINY_MODULE, b=2, t0=0.3, gamma_max=5, lo=0.02, hi=0.1),
        Threshold(t=0.2, gamma_max=5),
        Threshold("probability", "product", t=0.02, gamma_max=5),
        Threshold("entropy", t=1.6, gamma_max=5),
        Threshold("margin", t=0.3, gamma_max=5),
        Rule(lambda ids: ids[:, -1] % 2 > 0),
    ],
    ids=["sd", "pacer b=1", "pacer b=2", "lazy", "probability", "product", "entropy", "margin", "adversary"],
)
def test_a_tiny_model_keeps_the_joint_distribution(controller: Any) -> None:
    """A real architecture, whose distribution depends on the whole prefix and so on every cache entry."""
    decoder = make_decoder(TINY, TINY_DRAFT, controller, TINY_WARM)
    results = generate(decoder, _requests(DRAWS, TINY_PROMPT, 4), BATCH)
    law = _law(TINY, TINY_PROMPT, 3, TINY_WARM)
    assert chi_square(_joint(results, SMALL, 3), law.tolist()) > ALPHA
    assert len({len(line["drafted"]) for r in results for line in r.rounds[1:]}) > 1
    accepted = [line["accepted"][0] for r in results for line in r.rounds[1:]]
    assert len(set(accepted)) > 2


def _mixed(new: int = 8) -> list[Request]:
    lengths = [5, 9, 1, 3, 7, 2]
    stops = [frozenset(), frozenset([4]), frozenset(), frozenset([1, 7]), frozenset([9]), frozenset()]
    texts = prompts(lengths, vocab=SMALL)
    return [Request(f"m{i}", text, new + i, stop) for i, (text, stop) in enumerate(zip(texts, stops, strict=True))]


def _plain(line: dict[str, Any]) -> dict[str, Any]:
    """A trace line without what belongs to the batch, scores rounded; scores never given are left out."""
    kept = {k: v for k, v in line.items() if k not in ("time", "rows", "scores")}
    scores = [None if s is None else round(s, 3) for s in line["scores"]]
    while scores and scores[-1] is None:
        scores.pop()
    return {**kept, "scores": scores}


CONTROLLERS = {
    "ar": lambda: None,
    "sd gamma=4": lambda: Fixed(4),
    "pacer b=1": lambda: PreverifierRule(TINY_MODULE, b=1, t0=0.5, gamma_max=6),
    "pacer b=2": lambda: PreverifierRule(TINY_MODULE, b=2, t0=0.35, rho=1.2, gamma_max=7),
    "lazy": lambda: PreverifierRule(TINY_MODULE, b=2, t0=0.3, gamma_max=7, lo=0.02, hi=0.1),
    "threshold": lambda: Threshold("probability", "product", t=0.02, gamma_max=6),
    "adversary": lambda: Rule(lambda ids: ids[:, -1] % 3 > 0, gamma_max=5),
}


ORDERS = ([0, 1, 2, 3, 4, 5], [5, 3, 1, 0, 2, 4])


PENALTY = SamplingSettings(2.0, top_k=6, repetition_penalty=1.2, seed=4)


@pytest.mark.parametrize("sampling", [TINY_WARM, SamplingSettings(), PENALTY], ids=["sampled", "greedy", "penalty"])
@pytest.mark.parametrize("name", CONTROLLERS)
def test_a_request_is_the_same_alone_in_any_batch_and_in_any_order(name: str, sampling: SamplingSettings) -> None:
    """The requests of a batch have their own lengths, budgets and stop ids."""
    requests = _mixed()
    decoder = make_decoder(TINY, TINY_DRAFT, CONTROLLERS[name](), sampling)
    alone = {r.request.id: (r.ids, r.finish) for r in generate(decoder, requests, 1)}
    for order in ORDERS:
        for result in decoder.generate([requests[i] for i in order]):
            assert (result.ids, result.finish) == alone[result.request.id]


@pytest.mark.parametrize("stops", [False, True])
@pytest.mark.parametrize("name", CONTROLLERS)
def test_the_trace_of_a_request_is_the_same_alone_and_in_any_batch(name: str, stops: bool) -> None:
    """What was drafted, scored and accepted, and why drafts ended; a score that was not given is null or left out."""
    requests = _mixed() if stops else [Request(r.id, r.prompt_ids, r.max_new_tokens) for r in _mixed()]
    decoder = make_decoder(TINY, TINY_DRAFT, CONTROLLERS[name](), TINY_WARM)
    alone = {r.request.id: [_plain(line) for line in r.rounds] for r in generate(decoder, requests, 1)}
    for order in ORDERS:
        for result in decoder.generate([requests[i] for i in order]):
            assert [_plain(line) for line in result.rounds] == alone[result.request.id]


def test_requests_and_seeds_have_their_own_numbers() -> None:
    """R66: seed 0 is a seed; equal prompts under other names or seeds differ, the same name repeats itself."""
    outputs = {}
    for seed in (0, 1, 2):
        decoder = make_decoder(TINY, TINY_DRAFT, Fixed(3), SamplingSettings(3.0, seed=seed))
        for name in ("a", "b"):
            first, second = (decoder.generate([Request(name, TINY_PROMPT, 12)])[0].ids for _ in range(2))
            assert first == second
            outputs[seed, name] = tuple(first)
    assert len(set(outputs.values())) == len(outputs)


def test_top_k_1_is_greedy_whatever_the_seed() -> None:
    greedy = make_decoder(TINY).generate(_requests(1, TINY_PROMPT, 20))[0].ids
    for seed in range(3):
        decoder = make_decoder(TINY, TINY_DRAFT, Fixed(3), SamplingSettings(1.0, top_k=1, seed=seed))
        assert decoder.generate(_requests(1, TINY_PROMPT, 20))[0].ids == greedy


@pytest.mark.parametrize("reduced", [False, True])
def test_verification_gets_what_was_drawn_from(reduced: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """L3, L5: one tensor for both; the token drawn is possible under it, and it sums to 1 over the target's ids."""
    draft = TINY_DRAFT
    if reduced:
        model, ids = near(tiny_model(layers=2, vocab=SMALL), 0.05), torch.tensor([1, 2, 5, 9])
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight[ids], requires_grad=False)
        draft = Stack(model, ids)
    decoder = make_decoder(TINY, draft, Fixed(3), SamplingSettings(2.0, top_k=3))
    drawn: list[Tensor] = []
    compared: list[int] = []
    drafter = proposer(decoder).drafter
    choose, verify = drafter._choose, verifier_module.verify

    def spy_choose(logits: Tensor, offset: int) -> tuple[Tensor, Tensor | None]:
        row, q = choose(logits, offset)
        assert q is not None
        drawn.append(q)
        return row, q

    def spy_verify(p: Tensor, q: Tensor | None, tokens: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        assert p.dtype == torch.float32
        if tokens.shape[1]:
            assert q is not None and q.shape == (len(tokens), tokens.shape[1], SMALL)
            used = torch.cat(drawn, 1)
            if len(tokens) == 4:  # else some rows have ended, and only the others are verified
                assert torch.equal(q if not reduced else q[..., ids], used)
                compared.append(len(tokens))
            assert (q.gather(2, tokens[..., None]) > 0).all() and (q > 0).sum(-1).max() <= 3
            torch.testing.assert_close(q.sum(-1), torch.ones(len(tokens), tokens.shape[1]))
        drawn.clear()
        return verify(p, q, tokens, *rest)

    drafter._choose = spy_choose  # type: ignore[method-assign]  # a spy
    monkeypatch.setattr(verifier_module, "verify", spy_verify)
    decoder.generate(_requests(4, TINY_PROMPT, 9))
    assert compared
