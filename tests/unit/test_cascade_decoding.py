"""Tables of exits against decoding: rounds, layer-tokens, choices, kinds of heads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from pacer.data.corpus import Text
from pacer.decoding.controllers.fixed import Fixed
from pacer.decoding.loop import Decoder
from pacer.decoding.request import Request
from pacer.errors import ConfigError
from pacer.evaluation.cascade.table import ExitTable, choices, exit_tables, figures
from pacer.evaluation.cascade.walk import Cascade, stages, usage
from pacer.models.exits import make_exits
from pacer.models.stack import Stack
from tests.cascades import table
from tests.exits import LAYERS, early_model, heads, self_speculative
from tests.tiny import prompts

EXITS = (1, 2, 4)


def decoded(model: Any, depths: Sequence[int], cascade: Cascade, kind: str = "shared") -> tuple[list[Any], ExitTable]:
    """Results of decoding, and the exit table of the same texts."""
    target = Stack(model)
    found = heads(target, depths, kind)
    decoder = self_speculative(target, found, Fixed(cascade.buffers[0]), cascade.buffers[1:], bonus=cascade.bonus)
    asked = [Request(f"r{i}", prompt, 40) for i, prompt in enumerate(prompts([5, 14, 8, 1]))]
    texts = [
        Text(r.request.id, "t", list(r.request.prompt_ids), r.ids, r.finish != "eos")
        for r in Decoder(target).generate(asked)
    ]
    tables = exit_tables(target, {kind: {head.layer: head for head in found}}, texts, target.vocab_size)
    return [decoder.generate([request])[0] for request in asked], tables[kind]


@pytest.mark.parametrize("kind", ["shared", "adapter"])
@pytest.mark.parametrize(
    "cascade",
    [
        Cascade((2,), (3,)), Cascade((2, 4), (2, 4)), Cascade((2, 4), (2, 4), bonus=False), Cascade((2, 4), (4, 9)),
        Cascade(EXITS, (2, 3, 6)), Cascade(EXITS, (2, 3, 6), bonus=False),
    ],
)  # fmt: skip
def test_rounds_are_those_of_decoding(cascade: Cascade, kind: str) -> None:
    results, of = decoded(early_model(), cascade.exits, cascade, kind)
    gained, first = stages(of, cascade)[-1].gained, of.first
    accepted = 0
    for i, result in enumerate(results):
        place, lengths = int(first[i]) + 1, []
        while place < first[i + 1]:
            lengths.append(int(gained[place]))
            place += lengths[-1]
        assert lengths == [len(line["emitted"]) for line in result.rounds[1:]]
        accepted += sum(length > 1 for length in lengths)
    assert accepted > 3
    if len(cascade.exits) == 1:  # fixed drafts: nothing is modelled
        run = sum(line["layer_tokens"] for result in results for line in result.rounds[1:])
        used = usage(of, cascade)
        assert used.layer_tokens(cascade, LAYERS) * used.emitted.sum() == pytest.approx(run)


@pytest.mark.parametrize("bonus", [True, False])
@pytest.mark.parametrize(("exits", "buffers"), [((2, 4), (2, 5)), (EXITS, (2, 3, 6))])
def test_layer_tokens_are_those_of_decoding(exits: tuple[int, ...], buffers: tuple[int, ...], bonus: bool) -> None:
    """Layers above the last exit say nothing, so no draft leaves the text: all passes are known, budgets included."""
    model = early_model()
    with torch.no_grad():
        for layer in model.model.layers[exits[-1] :]:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    cascade = Cascade(exits, buffers, bonus)
    if len(exits) > 2:  # two verifying exits that agree: only the first draft may be wrong
        for layer in model.model.layers[exits[1] : exits[-1]]:
            torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
            torch.nn.init.zeros_(layer.mlp.down_proj.weight)
    results, of = decoded(model, exits, cascade)
    used = usage(of, cascade)
    run = sum(line["layer_tokens"] for result in results for line in result.rounds[1:])
    assert used.layer_tokens(cascade, LAYERS) * used.emitted.sum() == pytest.approx(run)
    assert used.acceptance[0] != 1.0 and used.acceptance[-1] == 1.0


def test_choices_are_those_of_the_exits() -> None:
    """Against transformers' own hidden states; whole and reduced heads of one forward."""
    model = early_model()
    target = Stack(model)
    prompt, output = prompts([6, 12])
    text = Text("a", "t", prompt, output, True)
    whole = make_exits(target, "shared", [2, 4])
    some = make_exits(target, "shared", [2], torch.arange(10, 50))
    found, sure = choices(target, [whole[4], some[2], whole[2]], text, target.vocab_size)
    ids = torch.tensor([[*prompt, *output[:-1]]])
    with torch.no_grad():
        states = model(input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states
        logits = {e: model.lm_head(model.model.norm(states[e]))[0, len(prompt) - 1 :] for e in (2, 4)}
    assert found[0].tolist() == logits[4].argmax(-1).tolist() and found[2].tolist() == logits[2].argmax(-1).tolist()
    assert found[1].tolist() == (10 + logits[2][:, 10:50].argmax(-1)).tolist()
    torch.testing.assert_close(sure[0], logits[4].softmax(-1).amax(-1))
    padded, _ = choices(target, [whole[2]], text, 20)  # ids beyond 20 are padding
    assert padded[0].tolist() == logits[2][:, :20].argmax(-1).tolist()


def test_an_adapter_reads_what_is_before_it() -> None:
    target = Stack(early_model())
    (head,) = heads(target, [2], "adapter")
    prompt, output = prompts([6, 12])
    whole, sure = choices(target, [head], Text("a", "t", prompt, output, True), target.vocab_size)
    for n in (1, 5):
        part, _ = choices(target, [head], Text("a", "t", prompt, output[:n], True), target.vocab_size)
        assert part[0].tolist() == whole[0, :n].tolist()
    _, without = choices(target, heads(target, [2]), Text("a", "t", prompt, output, True), target.vocab_size)
    assert (without - sure).abs().max() > 1e-4, "the adapter is read"


def test_tables_of_several_kinds() -> None:
    target = Stack(early_model())
    texts = [Text(f"{i}", f"task{i % 2}", prompt, prompts([9], seed=i)[0], i > 1) for i, prompt in
             enumerate(prompts([3, 5, 4]))]  # fmt: skip
    texts.append(Text("empty", "t", [1], [], False))
    families = {kind: {h.layer: h for h in heads(target, [2, 4], kind)} for kind in ("shared", "adapter")}
    found = exit_tables(target, families, texts, target.vocab_size)
    alone = exit_tables(target, {"adapter": families["adapter"]}, texts[1:2], target.vocab_size)["adapter"]
    both = found["adapter"]
    assert both.ids == ["0", "1", "2"] and both.cut.tolist() == [False, False, True] and both.layers == (2, 4)
    assert both.only(np.array([False, True, False])).choice.tolist() == alone.choice.tolist()
    assert np.abs(found["shared"].probability - both.probability).max() > 1e-4
    assert [len(part.ids) for part in both.by_task().values()] == [2, 1]
    assert both.agrees(4, LAYERS).tolist() == (both.choice[1] == both.truth).tolist()
    with pytest.raises(ConfigError, match="no exit table"):
        exit_tables(target, families, texts[3:], target.vocab_size)


def test_figures_by_hand() -> None:
    """Window 2: places with two left are 0, 1, 2 of the first text and 0 of the second."""
    of = table([[[True, True, False, True], [False, True]]], [True, True])
    found = figures(of, 1, window=2)
    assert found["agreement"] == 4 / 6 and found["by_task"] == {"even": 3 / 4, "odd": 1 / 2}
    assert found["counts"] == [4, 2, 1] and found["survival"] == [0.5, 0.25]
    assert found["conditional_acceptance"] == [0.5, 0.5]
    assert (found["accepted_sum"], found["accepted_count"], found["expected_accepted"]) == (3, 4, 0.75)
    assert len(figures(of, 1)["survival"]) == 4, "no text is longer"
    nowhere = figures(table([[[False] * 5]], [True]), 1, window=3)
    assert nowhere["conditional_acceptance"] == [0.0, None, None] and nowhere["expected_accepted"] == 0
