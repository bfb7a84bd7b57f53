"""PACER's rule: what the pre-verifier says while decoding, what it keeps, and how its word ends a draft."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pacer.choices import BLOCK_RULES, CHOICES, FEATURES
from pacer.decoding.controllers.preverifier import RULES, PreverifierRule, block_value, rule_for
from pacer.decoding.distributions import signals
from pacer.decoding.request import Request, Row
from pacer.errors import ConfigError, MismatchError
from pacer.models.copying import copied_last, supported
from pacer.models.preverifier import Preverifier, load_preverifier, save_preverifier
from pacer.models.stack import FAMILIES, Stack, causal_mask
from pacer.settings import PreverifierSettings, SamplingSettings
from tests.tiny import make_decoder, make_preverifier, near, prompts, tiny_model, tiny_stack

PROMPTS = prompts([5, 12, 8, 1])
TARGET, DRAFT = tiny_stack(layers=2), Stack(near(tiny_model(layers=2)))
FORMS: dict[str, dict[str, Any]] = {
    "default": {},
    "states only": {"features": [], "index_embedding": False},
    "after the norm, narrow, two layers": {"state": "after_norm", "width": 16, "depth": 2, "features": ["entropy"]},
    "wide": {"width": 48},
    "the draft alone": {"attention": "block"},
    "the draft alone, two layers": {"attention": "block", "depth": 2, "state": "before_norm", "index_embedding": False},
    "all signals": {"features": list(FEATURES), "label": "conditional"},
    "nothing attended to": {"attention": "none", "depth": 2},
    "a linear probe": {"attention": "none", "depth": 0, "token": False, "features": []},
}


def _requests(new: int = 24, count: int = 4, **options: Any) -> list[Request]:
    return [Request(f"r{i}", prompt, new, **options) for i, prompt in enumerate(PROMPTS[:count])]


def _in_one_pass(module: Preverifier, committed: Sequence[int], drafted: Sequence[int]) -> Tensor:
    """Estimates ``(g,)`` of a draft: prefix with index 0, draft with 1, 2 …, all read at once without a cache."""
    ids = torch.tensor([[*committed, *drafted]])
    n, draft = ids.shape[1], module.draft
    positions = torch.arange(n)[None]
    mask = causal_mask(positions, n)
    states = draft.run(draft.embed(ids), 0, draft.n_layers, positions, mask)
    produced = torch.cat([torch.zeros_like(states[:, :1]), states[:, :-1]], 1)
    index = (positions - len(committed) + 1).clamp_min(0)
    said = dict(zip(("logprob", "entropy", "margin"), signals(draft.readout(produced), ids), strict=True))
    said["match"] = torch.zeros_like(ids)
    for place in range(len(committed), n):
        found = copied_last(ids, torch.tensor([place]))
        said["match"][:, place] = supported(ids[:, place], found)
    drawn = torch.where(index > 0, said["logprob"], 0.0)
    features = module.select({**said, "cumulative": drawn.cumsum(1)}.__getitem__, index)
    if not module.sees_prefix:
        mask = mask & ((index[:, None, None] > 0) | (index[:, None, :, None] == 0))
    x = module.entries(produced, ids, index, features)
    hidden = module.stack.run(x, 0, module.stack.n_layers, positions, mask)
    return module.logits(hidden, features).sigmoid()[0, len(committed) :]


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_scores_while_decoding_equal_scores_of_one_pass(form: str, batch: int, temperature: float) -> None:
    """Blocks, caches, rollbacks and ragged rows change nothing: T82 in small."""
    module = make_preverifier(DRAFT, **FORMS[form])
    rule = PreverifierRule(module, b=2, t0=0.25, gamma_max=7)
    checked = []

    def compare(row: Row, line: dict[str, Any]) -> None:
        scores = [s for s in line["scores"] if s is not None]
        if scores:
            committed = row.committed[: line["committed"]]
            wanted = _in_one_pass(module, committed, line["drafted"])[: len(scores)]
            torch.testing.assert_close(torch.tensor(scores), wanted, atol=1e-5, rtol=0)
            checked.append(len(scores))

    decoder = make_decoder(TARGET, DRAFT, rule, SamplingSettings(temperature))
    decoder.generate(_requests(20)[4 - batch :], compare)
    assert sum(checked) > 10 * batch and max(checked) > 2, "several blocks were scored"


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family_scores_the_same_in_blocks_and_at_once(family: str) -> None:
    draft = Stack(near(tiny_model(family, 2)))
    module = make_preverifier(draft)
    seen: list[float] = []

    def compare(row: Row, line: dict[str, Any]) -> None:
        scores = [s for s in line["scores"] if s is not None]
        wanted = _in_one_pass(module, row.committed[: line["committed"]], line["drafted"])[: len(scores)]
        torch.testing.assert_close(torch.tensor(scores), wanted, atol=1e-5, rtol=0)
        seen.extend(scores)

    rule = PreverifierRule(module, b=3, t0=0.0, gamma_max=8)
    make_decoder(tiny_stack(family, 2), draft, rule).generate(_requests(12, 2), compare)
    assert max(seen) - min(seen) > 0.05, "the estimates vary"


@pytest.mark.parametrize("batch", [1, 4])
def test_its_memory_holds_the_verified_prefix_after_each_round(batch: int) -> None:
    """Drafts carry draft indices, so nothing of a draft is kept, accepted or not; the rest is read with index 0."""
    rule = PreverifierRule(make_preverifier(DRAFT), b=2, t0=0.35, gamma_max=6)
    decoder = make_decoder(TARGET, DRAFT, rule)
    read: list[tuple[list[int], list[int], list[int]]] = []
    plain_read, plain_finish, lengths = rule.read, decoder._finish, []

    def spy_read(record: Any, ends: Sequence[int], bases: Sequence[int]) -> Tensor:
        read.append((list(rule.lane.lengths), list(ends), list(bases)))
        scores = plain_read(record, ends, bases)
        assert rule.lane.lengths == [max(have, end) for have, end in zip(read[-1][0], ends, strict=True)]
        return scores

    def spy_finish(rows: list[Row], draft: Any, chosen: list[int], on_commit: Any) -> None:
        before = [len(row.committed) for row in rows]
        judged = list(rule.lane.lengths)
        plain_finish(rows, draft, chosen, on_commit)
        assert rule.lane.lengths == [min(have, keep) for have, keep in zip(judged, before, strict=True)]
        lengths.append(list(rule.lane.lengths))

    rule.read, decoder._finish = spy_read, spy_finish  # type: ignore[method-assign]  # spies
    decoder.generate(_requests(20, batch))
    assert lengths[0] == [len(p) for p in PROMPTS[:batch]], "the prompt was read by the prefill"
    assert len({tuple(x) for x in lengths}) > 4
    for have, ends, bases in read[1:]:
        fed = [(e, b, h) for e, b, h in zip(ends, bases, have, strict=True) if e > h]
        assert all(0 < e - b <= 6 for e, b, _ in fed)
        assert all(e - max(h, b) <= 2 for e, b, h in fed), "one block at a time"


def _constant(monkeypatch: pytest.MonkeyPatch, rule: PreverifierRule, scores: Sequence[float]) -> None:
    """The k-th entry of every draft gets ``scores[k − 1]``."""
    table = torch.tensor([0.5, *scores]).logit()
    entries = rule.module.entries
    last: list[Tensor] = []

    def spy(states: Tensor, ids: Tensor, index: Tensor, features: Tensor) -> Tensor:
        last.append(index)
        return entries(states, ids, index, features)

    monkeypatch.setattr(rule.module, "entries", spy)
    monkeypatch.setattr(rule.module, "logits", lambda hidden, features: table[last[-1].clamp_max(len(scores))])


# what a rule makes of given estimates: (b, t0, rho, gamma_max, rule), estimates, length of each draft
LENGTHS: list[tuple[tuple[int, float, float, int, str], list[float], int]] = [
    ((1, 0.5, 1.0, 8, "mean"), [0.9, 0.8, 0.5, 0.49, 0.9], 4),
    ((1, 0.49, 1.0, 8, "mean"), [0.9, 0.8, 0.5, 0.491, 0.9, 0.1], 6),
    ((1, 0.0, 1.0, 5, "mean"), [0.01] * 8, 5),
    ((1, 1.0, 1.0, 5, "mean"), [0.99] * 8, 1),
    ((2, 0.5, 1.0, 8, "mean"), [0.2, 0.85, 0.2, 0.75, 0.9, 0.9], 4),
    ((2, 0.5, 1.0, 8, "min"), [0.9, 0.85, 0.9, 0.4, 0.9, 0.9], 4),
    ((2, 0.5, 1.0, 8, "product"), [0.8, 0.7, 0.7, 0.7, 0.9, 0.9], 4),
    ((3, 0.5, 1.0, 8, "mean"), [0.6] * 8, 8),
    ((3, 0.7, 1.0, 8, "mean"), [0.6] * 8, 3),
    ((1, 0.5, 1.1, 8, "mean"), [0.6] * 8, 3),  # 0.5, 0.55, 0.605
    ((1, 0.5, 1.0, 8, "mean"), [0.6] * 8, 8),
    ((2, 0.5, 1.1, 8, "mean"), [0.6] * 8, 6),
    ((1, 0.8, 0.9, 8, "mean"), [0.8, 0.73, 0.65, 0.58, 0.5], 4),  # 0.8, 0.72, 0.648, 0.5832
    ((1, 0.5, 2.0, 8, "mean"), [0.99] * 8, 2),  # a threshold above 1 always stops
]


@pytest.mark.parametrize(("options", "scores", "length"), LENGTHS)
def test_threshold_growth_and_rule_set_the_length(
    options: tuple[int, float, float, int, str], scores: list[float], length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A42: what was set is what is used, from t0 again in each round."""
    b, t0, rho, gamma_max, name = options
    rule = PreverifierRule(make_preverifier(DRAFT), b, t0, rho, gamma_max, name)
    _constant(monkeypatch, rule, [*scores, *[scores[-1]] * 8][:8])
    results = make_decoder(TARGET, DRAFT, rule).generate(_requests(26, 2))
    for result in results:
        lines = [line for line in result.rounds[1:] if line["stop"] != "budget"]
        assert len(lines) > 1 and {len(line["drafted"]) for line in lines} == {length}
        assert {line["stop"] for line in lines} == {"gamma_max" if length == gamma_max else "controller"}


def test_a_higher_threshold_drafts_less() -> None:
    """A42 with real estimates."""
    module, means = make_preverifier(DRAFT), []
    for t0 in (0.0, 0.3, 0.5, 0.7, 1.0):
        results = make_decoder(TARGET, DRAFT, PreverifierRule(module, b=1, t0=t0, gamma_max=8)).generate(_requests(24))
        lengths = [len(line["drafted"]) for r in results for line in r.rounds[1:] if line["stop"] != "budget"]
        means.append(sum(lengths) / len(lengths))
    assert means == sorted(means, reverse=True) and means[0] == 8 and means[-1] == 1 and len(set(means)) >= 4


@pytest.mark.parametrize("gamma_max", [1, 2, 5, 8, 9, 12])
def test_gamma_max_holds_also_beyond_the_pre_verifiers_own(gamma_max: int) -> None:
    """A51: index embeddings and caches at γ_max (8 here), one more, and where it is no multiple of b."""
    rule = PreverifierRule(make_preverifier(DRAFT), b=min(2, gamma_max), t0=0.0, gamma_max=gamma_max)
    for result in make_decoder(TARGET, DRAFT, rule).generate(_requests(30, 2)):
        full = [len(line["drafted"]) for line in result.rounds[1:] if line["stop"] != "budget"]
        assert full and set(full) == {gamma_max}
        assert all(len(line["drafted"]) <= gamma_max for line in result.rounds)


@pytest.mark.parametrize("features", [list(FEATURES), ["entropy", "logprob"], []])
def test_verified_tokens_have_no_features(features: list[str]) -> None:
    """Their drafts' signals are not known for every one of them: index 0 carries zeros, drafted tokens their own."""
    module = make_preverifier(DRAFT, features=features)
    signs = {
        "logprob": torch.tensor([[-1.0, -2.0, -3.0]]), "entropy": torch.tensor([[0.5, 0.25, 0.125]]),
        "margin": torch.tensor([[1.0, 4.0, 99.0]]), "match": torch.tensor([[5, 0, 7]]),
        "cumulative": torch.tensor([[-1.0, 0.0, -90.0]]),
    }  # fmt: skip
    wanted = {
        "logprob": [math.log(p / (1 - p)) / 4 for p in (math.exp(-2), math.exp(-3))], "entropy": [0.0625, 0.03125],
        "margin": [0.5, 2.0], "match": [0.0, math.log(8) / 2], "cumulative": [2.0, -2.0],
    }  # fmt: skip
    chosen = module.select(signs.__getitem__, torch.tensor([[0, 1, 2]]))
    assert chosen.shape == (1, 3, len(features)) and chosen[0, 0].abs().sum() == 0
    for k, name in enumerate(features):
        assert chosen[0, 1:, k].tolist() == pytest.approx(wanted[name])


def test_a_drawn_stop_id_ends_the_draft_at_the_block() -> None:
    plain = make_decoder(TARGET, DRAFT, PreverifierRule(make_preverifier(DRAFT), b=2, t0=0.0, gamma_max=8))
    drafted = plain.generate(_requests(24, 1))[0].rounds[1]["drafted"]
    stop = frozenset([drafted[2]])
    line = plain.generate(_requests(24, 1, stop_ids=stop))[0].rounds[1]
    assert line["drafted"] == drafted[:3] and line["stop"] == "eos"


@pytest.mark.parametrize("label", CHOICES["preverifier.label"])
@pytest.mark.parametrize("rule", RULES)
def test_a_rule_reads_what_the_layer_has_learnt(label: str, rule: str) -> None:
    """Two label meanings, never mixed (DESIGN): a product of survival estimates is the chance of nothing."""
    module = make_preverifier(DRAFT, label=label)
    given = {"b": 2, "t0": 0.5, "rule": rule}
    if rule == "min" or (rule == "product") == (label == "conditional"):
        assert PreverifierRule.build(given, preverifier=(module, None)).rule == rule
    else:
        with pytest.raises(MismatchError, match=rf"does not read .* of {label} labels: '{rule}'.*preverifier\.label"):
            PreverifierRule.build(given, preverifier=(module, None))
        with pytest.raises(MismatchError):  # as tuned for the checkpoint
            PreverifierRule.build({"b": 2, "t0": None, "rule": None}, preverifier=(module, given))
    assert PreverifierRule.build({**given, "b": 1}, preverifier=(module, None)).b == 1, "of one token all are the same"
    own = PreverifierRule.build({"b": 2, "rule": None}, preverifier=(module, None)).rule
    assert own == rule_for(label, 2, None) == BLOCK_RULES[label][0]


@given(st.lists(st.floats(0, 1, width=32), min_size=1, max_size=6))
def test_a_blocks_value(scores: list[float]) -> None:
    block = torch.tensor([scores])
    assert block_value(block, "mean").item() == pytest.approx(sum(scores) / len(scores), abs=1e-6)
    assert block_value(block, "min").item() == min(scores)
    assert block_value(block, "product").item() == pytest.approx(math.prod(scores), abs=1e-6)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("b", value) for value in (0, -1)),
        *(("t0", value) for value in (-0.1, 1.1, math.nan)),
        *(("rho", value) for value in (0.0, -1.0)),
        ("gamma_max", 1),
        ("rule", "median"),
    ],
)
def test_values_outside_their_range_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"controller.{name} out of range"):
        PreverifierRule(make_preverifier(DRAFT), **{"b": 2, name: value})
    assert set(RULES) == {"mean", "min", "product"}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("state", "middle"),
        ("label", "soft"),
        ("attention", "some"),
        ("features", ["surprise"]),
        ("features", ["margin", "margin"]),
        ("width", 20),
        ("width", 4),
    ],
)
def test_settings_that_do_not_exist_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name):
        Preverifier(DRAFT, PreverifierSettings(**{name: value}))


@pytest.mark.parametrize("form", FORMS)
def test_a_saved_pre_verifier_scores_the_same(form: str, tmp_path: Path) -> None:
    """T90, K99: exactly; the file holds trained tensors only."""
    module = make_preverifier(DRAFT, **FORMS[form])
    folder = save_preverifier(tmp_path / "m", module, TARGET, {"controller": {"t0": 0.5}}, "card")
    loaded, config = load_preverifier(folder, TARGET, DRAFT)
    assert config["controller"] == {"t0": 0.5} and loaded.settings == module.settings
    assert {k: v.shape for k, v in loaded.named_parameters()} == {k: v.shape for k, v in module.named_parameters()}
    for text in ([3, 1, 4], [7] * 9):
        assert torch.equal(_in_one_pass(loaded, text, [1, 2]), _in_one_pass(module, text, [1, 2]))


def test_a_pre_verifier_of_other_models_is_refused(tmp_path: Path) -> None:
    """V60."""
    folder = save_preverifier(tmp_path / "m", make_preverifier(DRAFT), TARGET, {}, "card")
    others = [
        (TARGET, tiny_stack(layers=2, seed=8)),
        (tiny_stack(layers=2, seed=9), DRAFT),
        (TARGET, tiny_stack(hidden_size=16)),
        (tiny_stack(vocab=99), DRAFT),
    ]
    for target, draft in others:
        with pytest.raises(MismatchError, match="belongs to another model"):
            load_preverifier(folder, target, draft)
