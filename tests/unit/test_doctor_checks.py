"""The doctor's checks: each planted fault is found, with its numbers, and a healthy pair has no such finding."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from transformers import PreTrainedModel

from pacer.data.corpus import Text
from pacer.data.labels import Rounds
from pacer.data.prompts import encode
from pacer.evaluation.doctor import identity, layers, limits, numerics, training
from pacer.evaluation.doctor.findings import LEAST, REFUSED, Finding, drop, excess, gain, ranked
from pacer.evaluation.doctor.measure import agreement, share
from pacer.models.draft import TrainableDraft
from pacer.models.stack import Stack
from pacer.settings import CostSettings, DraftSettings, SamplingSettings
from tests.folders import tiny_tokenizer
from tests.texts import as_text, draft, requests, target, written
from tests.tiny import VOCAB, generate, loud, make_decoder, near, tiny_model

TEXTS = 12


def texts() -> list[Text]:
    return list(written(TEXTS))


def test_effects_rank_and_chance_is_no_finding() -> None:
    rows = [Finding("a", "", {}, 0.1, ""), Finding("b", "", {}, 0.5, ""), Finding("c", "", {}, 0.1, "")]
    assert [finding.check for finding in ranked(rows)] == ["b", "a", "c"]
    own = torch.tensor([True, False] * 50)
    assert gain(own, own) == 0 and gain(own, ~own) == 0 and gain(torch.zeros(100), own) == 0.5
    assert gain(own, own | (torch.arange(100) == 1)) == 0, "one token more of a hundred"
    assert excess(own, torch.ones(100)) == 0.5 and excess(own, own[:10]) == 0 and excess(torch.ones(9), own) == 0
    assert drop(0.9, own) == pytest.approx(0.4) and drop(0.52, own) == 0 and drop(float("nan"), own) == 0


def test_agreement_is_what_greedy_rounds_accept() -> None:
    """Against the loop itself: with γ = 1 a round accepts its token where the draft agrees with the text."""
    from pacer.decoding.controllers.fixed import Fixed

    hits = dict(zip((t.id for t in texts()), agreement(draft(), texts(), VOCAB).split([36] * TEXTS), strict=True))
    for result in generate(make_decoder(target(), draft(), Fixed(1)), requests(TEXTS), 4):
        place = 1  # the first token comes from the prefill
        for line in result.rounds[1:]:
            accepted = int(line["accepted"][-1]) if line["drafted"] else 0  # type: ignore[index]
            assert not line["drafted"] or bool(hits[result.request.id][place]) == bool(accepted)
            place += accepted + 1
    assert 0.2 < share(agreement(draft(), texts(), VOCAB)) < 0.98
    assert share(agreement(target(), texts(), VOCAB)) == 1


def test_another_tokenizer() -> None:
    own, other = tiny_tokenizer(), tiny_tokenizer()
    assert identity.tokenizer(own, other, (320, 320), texts()) == []
    other.add_tokens(["<tool>"])
    (found,) = identity.tokenizer(own, other, (512, 512), texts())
    assert found.effect == REFUSED and found.evidence["ids_that_differ"] == 1 and "<tool>" in found.what
    other = tiny_tokenizer()
    other.eos_token = "<|endoftext|>"
    (found,) = identity.tokenizer(own, other, (320, 320), texts())
    assert "eos token differs" in found.what


def model_draft(scale: float = 0.004) -> PreTrainedModel:
    return near(tiny_model(), scale=scale)


def test_a_norm_that_is_not_the_drafts_own() -> None:
    assert numerics.readout(Stack(model_draft()), target(), texts()) == []
    assert numerics.readout(draft(), target(), texts()) == []
    model = model_draft()
    with torch.no_grad():
        model.model.norm.weight.copy_(torch.randn(32, generator=torch.Generator().manual_seed(0)).exp())
    (found,) = numerics.readout(Stack(model), target(), texts())
    assert found.evidence["readout"] == "with the target's final norm" and found.effect > 0.2
    assert found.effect == pytest.approx(
        float(str(found.evidence["agreement_other"])) - float(str(found.evidence["agreement"])), abs=1e-3
    )


def test_a_head_for_states_that_are_normed_already() -> None:
    """The norm's weight is in the head's columns too: read without the norm it agrees."""
    model = model_draft()
    with torch.no_grad():
        model.model.norm.weight.copy_(torch.randn(32, generator=torch.Generator().manual_seed(0)).exp())
        model.lm_head.weight.mul_(tiny_model().model.norm.weight)
    (found,) = numerics.readout(Stack(model), target(), texts())
    assert found.evidence["readout"] == "without its final norm" and found.effect > 0.2


def test_a_dtype_that_overflows_and_one_that_rounds_too_much() -> None:
    healthy, overflowing = model_draft(), loud(model_draft(), 4e4)
    assert numerics.dtype(Stack(copy.deepcopy(healthy).half()), Stack(healthy), texts(), VOCAB) == []
    assert share(agreement(Stack(overflowing), texts(), VOCAB)) > 0.8
    (found,) = numerics.dtype(Stack(copy.deepcopy(overflowing).half()), Stack(overflowing), texts(), VOCAB)
    assert "not finite" in found.what and float(str(found.evidence["not_finite"])) > 0.5 and found.effect > 0.3
    coarse = copy.deepcopy(healthy)
    with torch.no_grad():  # weights of a size where bfloat16 has few steps between them
        for parameter in coarse.parameters():
            parameter.copy_((parameter * 4).round() / 4)
    (found,) = numerics.dtype(Stack(coarse), Stack(healthy), texts(), VOCAB)
    assert found.check == "dtype" and found.effect > 0.1 and float(str(found.evidence["choices_changed"])) > 0.1
    assert found.remedy.startswith("set model.dtype=float32")
    (found,) = numerics.dtype(Stack(coarse), Stack(healthy), texts(), VOCAB, None, "model.draft.dtype")
    assert found.remedy.startswith("set model.draft.dtype=float32")


def test_a_draft_in_another_dtype_than_the_target() -> None:
    low = copy.deepcopy(model_draft()).bfloat16()
    assert numerics.readout(Stack(low), target(), texts()) == []
    with torch.no_grad():
        low.model.norm.weight.copy_(torch.randn(32, generator=torch.Generator().manual_seed(0)).exp())
    (found,) = numerics.readout(Stack(low), target(), texts())
    assert found.evidence["readout"] == "with the target's final norm"


def test_a_corpus_that_is_not_the_targets_own() -> None:
    assert training.own_text(target(), texts(), True) == []
    foreign = [replace(text, output_ids=other.output_ids) for text, other in zip(texts(), texts()[1:], strict=False)]
    (found,) = training.own_text(target(), foreign, True)
    assert "not the target's own" in found.what and found.effect > 0.5
    assert found.effect == pytest.approx(1 - float(str(found.evidence["own_share"])))
    (found,) = training.own_text(target(), [replace(texts()[0], output_ids=[VOCAB])], True)
    assert found.effect == REFUSED and found.evidence["highest_id"] == VOCAB


def test_a_sampled_corpus() -> None:
    sampling = SamplingSettings(temperature=1.0)
    sampled = list(map(as_text, generate(make_decoder(target(), sampling=sampling), requests(TEXTS), 4)))
    (found,) = training.own_text(target(), sampled, True)
    assert "sampled" in found.what and found.effect > 0.2
    assert training.own_text(target(), sampled, False) == [], "decoding samples too"


def test_a_corpus_in_another_template() -> None:
    tokenizer = tiny_tokenizer()
    prompts = ["the fox", "12 + 7", "def add", "How"]
    right = [Text(p, "t", encode(p, tokenizer), [5, 6], True) for p in prompts]
    own, on_corpus = torch.tensor([True, False] * 40), torch.tensor([True, False] * 40)
    assert training.corpus_template(tokenizer, right, own, on_corpus) == []
    plain = [Text(p, "t", tokenizer(p)["input_ids"], [5, 6], True) for p in prompts]
    (found,) = training.corpus_template(tokenizer, plain, own, on_corpus)
    assert (
        found.evidence["share"] == 1
        and "<|im_start|>user" in str(found.evidence["expected_begin"])
        and found.effect > 0
    )
    (worse,) = training.corpus_template(tokenizer, plain, own, torch.ones(80))
    assert worse.effect == 0.5
    (found,) = training.corpus_template(tokenizer, [*right, plain[0]], own, on_corpus)
    assert found.evidence["share"] == 0.2


def test_a_draft_that_knows_plain_text_alone() -> None:
    assert training.plain_text(torch.ones(50), torch.ones(50)) == []
    assert training.plain_text(torch.ones(50), torch.zeros(50)) == []
    (found,) = training.plain_text(torch.zeros(50), torch.ones(50))
    assert found.check == "template" and found.effect == 1


def silent(index: int) -> Stack:
    """A target one of whose layers adds nothing."""
    model = tiny_model()
    layer = model.model.layers[index]
    with torch.no_grad():
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    return Stack(model)


@pytest.mark.parametrize(("index", "chosen", "right"), [(2, [1, 2], [0, 1]), (0, [0, 1], [1, 2]), (1, [0, 1], [0, 2])])
def test_wrong_layers_of_an_untrained_draft(index: int, chosen: list[int], right: list[int]) -> None:
    stack = silent(index)
    own = list(map(as_text, generate(make_decoder(stack), requests(6), 3)))
    assert layers.choice(stack, right, own) == []
    (found,) = layers.choice(stack, chosen, own)
    assert found.evidence["layers"] == str(right) and found.evidence["agreement_other"] == 1 and found.effect > 0.2
    assert f"model.draft.layers={right}".replace(" ", "") in found.remedy


def layers_draft(order: list[int]) -> Stack:
    return TrainableDraft(target(), order, torch.arange(VOCAB)).merged()


def test_layers_stored_in_another_order_or_under_another_name() -> None:
    assert layers.order(layers_draft([0, 1, 2]), target(), [0, 1, 2], texts()) == []
    (found,) = layers.order(layers_draft([1, 0, 2]), target(), [0, 1, 2], texts())
    assert (
        found.evidence["order"] == "[1, 0, 2]" and found.evidence["agreement_other_order"] == 1 and found.effect > 0.2
    )
    assert found.evidence["stem_from"] == "[1, 0, 2]"
    assert layers.order(layers_draft([0, 1]), target(), [0, 1], texts()) == []
    (found,) = layers.order(layers_draft([0, 2]), target(), [0, 1], texts())
    assert "[0, 1]; the weights of layer 1 stem from 2" in found.what and found.effect == 0


def test_a_head_without_what_the_target_writes() -> None:
    common = sorted({id for text in texts() for id in text.output_ids})
    whole = TrainableDraft(target(), [0, 1, 2], torch.tensor(common)).merged()
    full = TrainableDraft(target(), [0, 1, 2], torch.tensor(common)).merged(full=True, target=target())
    assert identity.head(whole, full, texts(), common[:3], VOCAB) == []
    few = TrainableDraft(target(), [0, 1, 2], torch.tensor(common[::2])).merged()
    written_ids = [id for text in texts() for id in text.output_ids]
    outside = sum(id not in common[::2] for id in written_ids) / len(written_ids)
    (found,) = identity.head(few, full, texts(), [], VOCAB)
    assert found.effect == pytest.approx(outside) and found.evidence["share_outside"] == pytest.approx(
        outside, abs=1e-4
    )
    (_, lacking) = identity.head(few, full, texts(), common[:2], VOCAB)
    assert lacking.evidence["lacking"] == 1 and str(common[1]) in lacking.what


def test_settings_that_the_checkpoint_overrules() -> None:
    settings = DraftSettings(layers=[0, 1], head_size=40, copying=False)
    assert identity.declared({"layers": [0, 1]}, 40, settings, VOCAB) == []
    assert identity.declared({"layers": [0, 1]}, VOCAB, replace(settings, head_size=0), VOCAB) == []
    first, second = identity.declared({"layers": [0, 2]}, 50, settings, VOCAB)
    assert "[0, 2]" in first.what and "50 ids" in second.what and first.effect == second.effect == 0
    copies = {"layers": [0, 1], "copying": True}
    assert identity.declared(copies, 40, replace(settings, copying=True), VOCAB) == []
    (found,) = identity.declared(copies, 40, settings, VOCAB)
    assert "model.draft.copying says False, the checkpoint copies" in found.what and found.effect == 0


def test_an_agreement_that_was_better_once() -> None:
    own, share_of = agreement(draft(), texts(), VOCAB), {}
    for text, hits in zip(texts(), own.split([36] * TEXTS), strict=True):
        share_of.setdefault(text.task, []).append(share(hits))
    healthy = {f"val/agreement_{task}": sum(v) / len(v) for task, v in share_of.items()}
    assert identity.recorded({"validation": healthy}, texts(), own, 0.0) == []
    assert identity.recorded({}, texts(), own, 0.0) == []
    low = torch.zeros_like(own)
    found = identity.recorded({"validation": healthy}, texts(), low, 0.0)
    assert len(found) == 2 and sum(f.effect for f in found) == pytest.approx(share(own), abs=0.01)
    assert identity.recorded({"validation": healthy}, texts(), low, 1.0) == [], "explained by another finding"


def test_context_beyond_the_draft_and_beyond_training() -> None:
    before = torch.arange(400)
    own = torch.arange(400) % 10 < 7
    assert limits.context(own, before, 2048, 300) == [] and limits.context(own, before, 2048, None) == []
    (found,) = limits.context(own, before, 299, None)
    assert found.evidence["share"] == 0.25 and found.effect == pytest.approx(0.25 * 0.7)
    fading = own & (before < 200)
    (found,) = limits.context(fading, before, 2048, 200)
    assert found.effect == pytest.approx(0.5 * 0.7) and found.evidence["agreement ≤ 128"] == pytest.approx(
        0.7, abs=0.02
    )
    assert limits.context(fading, before, 2048, 500) == [], "as long as in training"
    assert limits.by_length(own, before) == {
        "≤ 128": share(own[1:129]),
        "≤ 256": share(own[129:257]),
        "≤ 512": share(own[257:]),
    }


def rounds(accepted: list[int], gamma: int = 8) -> list[Rounds]:
    count = len(accepted)
    empty = torch.zeros(count, gamma)
    fields = {name: empty for name in Rounds.__dataclass_fields__}
    whole = torch.full((count,), gamma)
    return [Rounds(**{**fields, "counts": whole, "known": whole, "accepted": torch.tensor(accepted)})]


def test_a_window_longer_than_the_runs_and_costs_that_cannot_be_earned() -> None:
    costs = CostSettings(draft=0.1, token=0.0, rest=0.0)
    runs = rounds([1, 2, 1, 2, 1, 2])
    assert limits.window(runs, 2, costs, 8) == [] and limits.window(runs, None, costs, 8) == []
    (found,) = limits.window(runs, 8, costs, 8)
    assert found.evidence["best_gamma"] == 2 and "gamma=2" in found.remedy
    assert found.effect == pytest.approx(1.5 / 2 - 1.5 / 8)
    assert limits.window(rounds([8] * 6), 8, costs, 8) == []
    (found,) = limits.window(runs, 2, replace(costs, draft=1.2), 8)
    assert found.check == "costs" and found.evidence["break_even"] == 1.2 and found.effect == pytest.approx(0.2)
    (found,) = limits.window(rounds([0] * 9 + [1]), 1, replace(costs, draft=0.2), 8)
    assert found.effect == pytest.approx(0.1)


def test_sampling_settings_that_cost_acceptance() -> None:
    def accept(sampling: SamplingSettings) -> torch.Tensor:
        share = 0.9 - 0.4 * (sampling.temperature > 0) - 0.2 * (sampling.repetition_penalty != 1)
        return torch.arange(200) < 200 * share

    assert limits.sampling(SamplingSettings(seed=3), accept) == []
    (found,) = limits.sampling(SamplingSettings(temperature=1.0), accept)
    assert found.evidence["temperature"] == 1.0 and found.effect == pytest.approx(0.4)
    first, second = limits.sampling(SamplingSettings(temperature=1.0, repetition_penalty=1.3), accept)
    assert (first.effect, second.effect) == (pytest.approx(0.4), pytest.approx(0.2))
    assert limits.sampling(SamplingSettings(temperature=1.0), lambda _: torch.ones(200)) == []
    assert 0 < LEAST < 0.1
