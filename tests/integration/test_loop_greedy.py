"""Greedy decoding by every method equals transformers' own ``generate`` in float32, token by token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pacer.decoding import lane as lane_module
from pacer.decoding.controllers.fixed import Fixed
from pacer.decoding.controllers.preverifier import PreverifierRule
from pacer.decoding.loop import Decoder
from pacer.decoding.request import Request, Result, Row
from pacer.models.stack import FAMILIES, Stack
from pacer.settings import SamplingSettings
from tests.tiny import (
    Rule,
    generate,
    hf_generate,
    make_decoder,
    make_preverifier,
    near,
    plain_greedy,
    prompts,
    proposer,
    random_table,
    table_model,
    tiny_model,
    tiny_stack,
)

NEW, LAYERS = 22, 2
PROMPTS = prompts([5, 14, 8, 1])
TARGET, DRAFT = tiny_stack(layers=LAYERS), Stack(near(tiny_model(layers=LAYERS)))
MODULE = make_preverifier(DRAFT)
Make = Callable[[], Decoder]

METHODS: dict[str, Make] = {
    "ar": lambda: make_decoder(TARGET),
    **{f"sd gamma={g}": lambda g=g: make_decoder(TARGET, DRAFT, Fixed(g)) for g in (0, 1, 4, 8)},
    **{
        f"pacer {options}": lambda options=options: make_decoder(TARGET, DRAFT, PreverifierRule(MODULE, **options))
        for options in (
            {"b": 1, "t0": 0.5, "gamma_max": 8},
            {"b": 2, "t0": 0.3, "rho": 1.2, "gamma_max": 7},
            {"b": 3, "t0": 0.45, "rho": 0.9, "gamma_max": 8, "rule": "min"},
            {"b": 4, "t0": 0.05, "rho": 1.1, "gamma_max": 9, "rule": "product"},
            {"b": 2, "t0": 0.0, "gamma_max": 16},
            {"b": 1, "t0": 1.0, "gamma_max": 4},
        )
    },
    "stops on the drawn value": lambda: make_decoder(TARGET, DRAFT, Rule(lambda ids: ids[:, -1] % 3 > 0, gamma_max=6)),
}


def _requests(new: int = NEW, **options: Any) -> list[Request]:
    return [Request(f"r{i}", prompt, new, **options) for i, prompt in enumerate(PROMPTS)]


@pytest.fixture(scope="module")
def wanted() -> list[list[int]]:
    """What transformers generates."""
    reference = tiny_model(layers=LAYERS)
    return [hf_generate(reference, prompt, NEW) for prompt in PROMPTS]


def _check_traces(results: list[Result], gamma_max: int) -> None:
    """L14, M69, M74: the rounds of a request make up its output and nothing else."""
    for result in results:
        emitted = [t for line in result.rounds for t in line["emitted"]]
        assert emitted == result.ids
        committed = len(result.request.prompt_ids)
        for number, line in enumerate(result.rounds):
            drafted, new = line["drafted"], line["emitted"]
            (accepted,) = line["accepted"]
            assert line["round"] == number and line["committed"] == committed
            assert accepted <= len(drafted) <= gamma_max and 1 <= len(new) <= accepted + 1 <= gamma_max + 1
            assert new[:accepted] == drafted[: min(accepted, len(new))]
            assert len(line["scores"]) <= len(drafted)
            assert set(line["time"]) == {"draft", "preverify", "intermediate", "target", "rest"}
            assert all(seconds >= 0 for seconds in line["time"].values())
            committed += len(new)
        assert result.rounds[0]["stop"] == "prefill" and result.rounds[0]["drafted"] == []
        assert result.seconds == pytest.approx(sum(sum(line["time"].values()) for line in result.rounds))


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("name", METHODS)
def test_greedy_output_is_the_targets_own(name: str, batch: int, wanted: list[list[int]]) -> None:
    decoder = METHODS[name]()
    results = generate(decoder, _requests(), batch)
    assert [r.ids for r in results] == wanted
    assert [r.finish for r in results] == ["length"] * 4
    _check_traces(results, proposer(decoder).controller.gamma_max if decoder.proposer else 0)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_greedy_output_is_the_targets_own_in_every_family(family: str) -> None:
    reference = tiny_model(family)
    target, draft = tiny_stack(family), Stack(near(tiny_model(family)))
    rule = PreverifierRule(make_preverifier(draft), b=2, t0=0.4, gamma_max=6)
    requests = _requests(16)
    expected = [hf_generate(reference, prompt, 16) for prompt in PROMPTS]
    for decoder in (make_decoder(target), make_decoder(target, draft, Fixed(3)), make_decoder(target, draft, rule)):
        results = decoder.generate(requests)
        assert [r.ids for r in results] == expected
    assert any(sum(line["accepted"]) for r in results for line in r.rounds), "some drafts were accepted"


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_greedy_identity_for_any_settings(data: st.DataObject) -> None:
    """Random batches, budgets, stop ids, drafts and rules against decoding without any cache; lists are used again."""
    rows = data.draw(st.integers(1, 4))
    lengths = data.draw(st.lists(st.integers(1, 9), min_size=rows, max_size=rows))
    texts = prompts(lengths, seed=data.draw(st.integers(0, 99)))
    outputs = [plain_greedy(TARGET.model, text, 10) for text in texts]
    budgets = data.draw(st.lists(st.integers(1, 10), min_size=rows, max_size=rows))
    stops = [data.draw(st.frozensets(st.sampled_from(out), max_size=1)) for out in outputs]
    requests = [Request(str(i), text, n, s) for i, (text, n, s) in enumerate(zip(texts, budgets, stops, strict=True))]
    if data.draw(st.booleans()):
        controller: Any = Fixed(data.draw(st.integers(0, 6)))
    else:
        b, t0, rho = data.draw(st.integers(1, 4)), data.draw(st.floats(0, 1)), data.draw(st.floats(0.5, 2))
        controller = PreverifierRule(MODULE, b, t0, rho, b + data.draw(st.integers(0, 5)))
    results = make_decoder(TARGET, data.draw(st.sampled_from([DRAFT, TARGET])), controller).generate(requests)
    for result, output, budget, stop in zip(results, outputs, budgets, stops, strict=True):
        ends = [n for n in range(1, budget + 1) if output[n - 1] in stop]
        assert result.ids == output[: ends[0] if ends else budget]
        assert result.finish == ("eos" if ends else "length")


@pytest.mark.parametrize("gamma", [1, 4])
def test_greedy_acceptance_is_not_softmax_acceptance(gamma: int) -> None:
    """L1: flat table models, 12 tokens; a softmax ratio would accept or correct otherwise."""
    for seed in range(5):
        table = random_table(6, seed, scale=0.3)
        target, draft = Stack(table_model(table)), Stack(table_model(table + 0.2 * random_table(6, seed + 50)))
        best = table.argmax(-1).tolist()
        output, token = [], seed
        for _ in range(12):
            token = best[token]
            output.append(token)
        result = make_decoder(target, draft, Fixed(gamma)).generate([Request("t", [0, seed], 12)])[0]
        assert result.ids == output


def test_ties_go_to_the_first_id_as_in_transformers() -> None:
    table = torch.zeros(5, 5)
    table[0, 2] = table[0, 4] = table[2, 1] = table[2, 3] = 1.0
    decoder = make_decoder(Stack(table_model(table)), Stack(table_model(table)), Fixed(3))
    assert decoder.generate([Request("t", [0], 9)])[0].ids == hf_generate(table_model(table), [0], 9) == [2, 1, 0] * 3


@pytest.mark.parametrize("gamma", [1, 4, 8])
@pytest.mark.parametrize("batch", [1, 3])
def test_a_draft_that_is_the_target_is_always_right(gamma: int, batch: int) -> None:
    """C18, C20: over 200 tokens every draft of every round is accepted, and all caches end at committed − 1."""
    target = tiny_stack(layers=1, context=256)
    decoder = make_decoder(target, target, Fixed(gamma))
    rows: dict[str, Row] = {}
    reads: list[int] = []

    def after_round(row: Row, line: dict[str, Any]) -> None:
        rows[row.request.id] = row

    requests = [Request(str(i), prompt, 200) for i, prompt in enumerate(prompts([4, 9, 1][:batch]))]
    finish, drafter = decoder._finish, proposer(decoder).drafter
    read = drafter.read

    def counted_read(live: Any, wanted: Any) -> None:
        reads.extend(len(row.committed) - have for row, have in zip(live, drafter.lane.lengths, strict=True))
        read(live, wanted)

    def checked(live: list[Row], draft: Any, chosen: list[int], on_commit: Any) -> None:
        finish(live, draft, chosen, on_commit)
        for i, row in enumerate(live):
            if row.finish is None:
                assert decoder.reader.lengths[i] == len(row.committed) - 1
                behind = 2 if row.rounds > 1 else 1  # the last draft was never fed, the bonus token neither
                assert drafter.lane.lengths[i] == len(row.committed) - behind

    decoder._finish, drafter.read = checked, counted_read  # type: ignore[method-assign]  # spies
    for result in decoder.generate(requests, after_round):
        for line in result.rounds[1:]:
            assert line["accepted"] == [len(line["drafted"])]
            assert len(line["drafted"]) == gamma or line["stop"] == "budget"
        assert len(result.ids) == 200
    assert set(reads[2 * batch :]) <= {1, 2} and 2 in reads, "after full acceptance the draft reads two tokens"


@pytest.mark.parametrize(("penalty", "batch"), [(1.3, 1), (1.3, 4), (0.8, 4)])
def test_a_repetition_penalty_sees_prefix_output_and_drafts(penalty: float, batch: int) -> None:
    """L12: as transformers' generate; rejected drafts leave no trace."""
    reference = tiny_model(layers=LAYERS)
    expected = [hf_generate(reference, prompt, 20, repetition_penalty=penalty) for prompt in PROMPTS]
    sampling = SamplingSettings(repetition_penalty=penalty)
    rule = PreverifierRule(MODULE, b=2, t0=0.4, gamma_max=6)
    for controller in (None, Fixed(1), Fixed(5), rule):
        results = generate(make_decoder(TARGET, DRAFT, controller, sampling), _requests(20), batch)
        assert [r.ids for r in results] == expected
    same = make_decoder(TARGET, TARGET, Fixed(4), sampling).generate(_requests(30))
    assert all(line["accepted"] == [len(line["drafted"])] for r in same for line in r.rounds), "the draft sees the same"


def test_the_seed_changes_nothing_in_greedy_decoding(wanted: list[list[int]]) -> None:
    """R64."""
    for seed in (0, 1, 12345):
        decoder = make_decoder(TARGET, DRAFT, Fixed(3), SamplingSettings(seed=seed, top_k=5, top_p=0.5))
        assert [r.ids for r in decoder.generate(_requests())] == wanted


def test_stream_result_and_history_are_one_list(wanted: list[list[int]]) -> None:
    """L14."""
    streamed: dict[str, list[int]] = {}

    def on_commit(row: Row, line: dict[str, Any]) -> None:
        streamed.setdefault(row.request.id, []).extend(line["emitted"])
        assert streamed[row.request.id] == row.output and row.trace[-1] is line and line["time"]

    for result in METHODS["sd gamma=4"]().generate(_requests(), on_commit):
        assert streamed[result.request.id] == result.ids
    assert list(streamed.values()) == wanted


@pytest.mark.parametrize("gamma_max", [4, 5, 8, 9])
def test_drafts_reach_gamma_max_and_never_exceed_it(gamma_max: int) -> None:
    """A51: at the pre-verifier's own γ_max of 8 and one more, and where γ_max is no multiple of b."""
    rule = PreverifierRule(MODULE, b=4, t0=0.0, gamma_max=gamma_max)
    result = make_decoder(TARGET, DRAFT, rule).generate([Request("a", PROMPTS[0], 40)])[0]
    lengths = [len(line["drafted"]) for line in result.rounds[1:]]
    assert max(lengths) == gamma_max and result.rounds[1]["stop"] == "gamma_max"
    assert result.ids == plain_greedy(TARGET.model, PROMPTS[0], 40)


@pytest.mark.parametrize("chunk", [1, 3])
def test_prompts_are_read_in_chunks(chunk: int, wanted: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane_module, "PREFILL_CHUNK", chunk)
    for name in ("sd gamma=4", "pacer {'b': 2, 't0': 0.0, 'gamma_max': 16}"):
        assert [r.ids for r in METHODS[name]().generate(_requests())] == wanted


def test_a_decoder_is_used_again_for_batches_of_any_size(wanted: list[list[int]]) -> None:
    for name in ("ar", "pacer {'b': 2, 't0': 0.3, 'rho': 1.2, 'gamma_max': 7}"):
        decoder, requests = METHODS[name](), _requests()
        for batch in ([0, 1, 2, 3], [2], [1, 1, 1, 1, 1], [3, 0]):
            assert [r.ids for r in decoder.generate([requests[i] for i in batch])] == [wanted[i] for i in batch]
