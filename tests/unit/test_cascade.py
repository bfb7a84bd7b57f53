"""The cost model of exits: the walk against a slow simulation and against decoding, prices, search, the closed form."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pacer.data.corpus import Text
from pacer.decoding.controllers.fixed import Fixed
from pacer.decoding.loop import Decoder
from pacer.decoding.request import Request
from pacer.errors import ConfigError
from pacer.evaluation.cascade import costs, search, theory
from pacer.evaluation.cascade.profile import IN_A_ROW, RungPoint, profile_rungs
from pacer.evaluation.cascade.table import ExitTable, choices, exit_tables, figures
from pacer.evaluation.cascade.walk import Cascade, stages, usage
from pacer.models.exits import make_exits
from pacer.models.preverifier_layer import Layers
from pacer.models.stack import Stack
from tests.exits import LAYERS, early_model, heads, self_speculative
from tests.tiny import prompts

L = 12


def table(agree: Sequence[Sequence[Sequence[bool]]], cut: Sequence[bool], exits: Sequence[int] = ()) -> ExitTable:
    """A table of texts; ``agree[k][i]``: where exit k says what exit k + 1 (at the end: the model) says on text i."""
    layers = tuple(exits) or tuple(range(1, len(agree) + 1))
    rows = np.array([len(text) for text in agree[0]])
    truth = np.zeros(int(rows.sum()), dtype=np.int64)
    said = [truth]
    for pair in reversed(agree):
        differs = ~np.concatenate([np.array(text, dtype=bool) for text in pair])
        said.insert(0, said[0] + differs)
    names = [f"text-{i}" for i in range(len(rows))]
    tasks = ["even" if i % 2 == 0 else "odd" for i in range(len(rows))]
    choice = np.stack(said[:-1])
    return ExitTable(names, tasks, layers, L, rows, np.array(cut), truth, choice, np.full(choice.shape, 0.5))


class Ladder:
    """Stages on one text, token by token: who has read what is a length, as in decoding."""

    def __init__(self, agree: Sequence[Sequence[bool]], cut: bool, cascade: Cascade) -> None:
        self.agree, self.cascade, self.n = agree, cascade, len(agree[0])
        self.ended, self.top = not cut, len(agree)
        self.lengths = [0] * (self.top + 1)
        self.passes: list[Counter[int]] = [Counter() for _ in self.lengths]
        self.heads: list[Counter[int]] = [Counter() for _ in self.lengths]
        self.verified, self.shown, self.taken = ([0] * self.top for _ in range(3))
        self.emitted: list[int] = []
        place = 1
        while place < self.n:
            self.emitted.append(min(self.verify(self.top, place, self.n - place + self.ended), self.n - place))
            place += self.emitted[-1]

    def read(self, k: int, upto: int) -> None:
        if k > 0 and self.lengths[k - 1] < upto:
            self.read(k - 1, upto)
        assert upto > self.lengths[k]
        self.passes[k][upto - self.lengths[k]] += 1
        self.lengths[k] = upto

    def gather(self, k: int, place: int, room: int) -> int:
        wanted = min(self.cascade.buffers[k], room)
        got = 0
        while got < wanted:
            if k == 0:
                self.read(0, place + got)
                self.heads[0][1] += 1
                got += 1
            else:
                got += self.verify(k, place + got, room - got)
        return got

    def verify(self, k: int, place: int, room: int) -> int:
        m = self.gather(k - 1, place, room - 1)
        final = k == self.top
        adds = self.cascade.bonus or final or m == 0
        self.read(k, place + m if adds else place + m - 1)
        self.heads[k][m + 1] += 1
        accepted = 0
        while accepted < m and self.agree[k - 1][place + accepted]:
            accepted += 1
        self.verified[k - 1] += m > 0
        self.shown[k - 1] += m
        self.taken[k - 1] += accepted
        self.lengths[: k + 1] = [min(have, place + accepted) for have in self.lengths[: k + 1]]
        return accepted + (adds or accepted < m)


@st.composite
def cascades(draw: st.DrawFn) -> tuple[list[list[list[bool]]], list[bool], Cascade]:
    count = draw(st.integers(1, 3))
    sizes = draw(st.lists(st.integers(1, 24), min_size=1, max_size=3))
    flips = [[draw(st.lists(st.booleans(), min_size=n, max_size=n)) for n in sizes] for _ in range(count)]
    cut = [draw(st.booleans()) for _ in sizes]
    least = 0 if count == 1 else 1
    buffers = tuple(draw(st.integers(least, 6)) for _ in range(count))
    return flips, cut, Cascade(tuple(range(1, count + 1)), buffers, draw(st.booleans()))


@settings(max_examples=300, deadline=None)
@given(cascades())
def test_the_walk_counts_what_a_ladder_runs(case: tuple[list[list[list[bool]]], list[bool], Cascade]) -> None:
    agree, cut, cascade = case
    used = usage(table(agree, cut), cascade)
    for i, is_cut in enumerate(cut):
        slow = Ladder([pair[i] for pair in agree], is_cut, cascade)
        assert (used.emitted[i], used.rounds[i]) == (sum(slow.emitted), len(slow.emitted))
        for fast, counted in ((used.passes, slow.passes), (used.reads, slow.heads)):
            found = [{n: int(c) for n, c in enumerate(row) if c} for row in fast[i]]
            assert found == [dict(counter) for counter in counted]
        for name in ("verified", "shown", "taken"):
            assert getattr(used, name)[i].tolist() == getattr(slow, name)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.booleans(), min_size=3, max_size=40), st.integers(0, 8), st.integers(0, 100))
def test_more_agreement_never_needs_more_rounds(hits: list[bool], gamma: int, at: int) -> None:
    more = list(hits)
    more[at % len(hits)] = True
    before, after = (usage(table([[flips]], [True]), Cascade((1,), (gamma,))) for flips in (hits, more))
    assert after.rounds.sum() <= before.rounds.sum()


@pytest.mark.parametrize(("exits", "buffers"), [((1,), (4,)), ((1, 2), (2, 4)), ((1, 2, 3), (2, 3, 8))])
def test_limits(exits: tuple[int, ...], buffers: tuple[int, ...]) -> None:
    """All agree: every round emits its whole buffer and one more; the model disagrees everywhere: one token a round."""
    n = 601
    always, never = [[[True] * n] for _ in exits], [[[False] * n] for _ in exits]
    used = usage(table(always, [True]), Cascade(exits, buffers))
    grown = buffers[0]
    for size in buffers[1:]:
        grown = (grown + 1) * -(-size // (grown + 1))
    assert used.tokens_per_verify == pytest.approx(grown + 1, rel=0.01)
    assert used.acceptance == [1.0] * len(exits)
    used = usage(table(never, [True]), Cascade(exits, buffers))
    assert used.tokens_per_verify == 1 and used.acceptance == [0.0] * len(exits)
    plain = usage(table(always[:1], [True]), Cascade((1,), (0,)))
    assert plain.rounds.sum() == n - 1 and plain.layer_tokens(Cascade((1,), (0,)), L) == L


def test_settings_that_do_not_fit() -> None:
    for exits, buffers in (((2, 1), (1, 1)), ((1, 2), (1,)), ((), ()), ((1, 2), (0, 4)), ((0,), (2,)), ((1,), (-1,))):
        with pytest.raises(ConfigError, match="exits and buffers"):
            Cascade(exits, buffers)
    with pytest.raises(ConfigError, match="no such exit"):
        usage(table([[[True] * 4]], [True]), Cascade((3,), (1,)))


def test_names_of_arms() -> None:
    assert Cascade((4,), (3,)).arm == "layerskip exits=[4] gamma=3"
    assert Cascade((4, 8), (2, 4)).arm == "hispec exits=[4,8] gamma=2 n=4"
    assert Cascade((4, 8), (2, 4), bonus=False).arm == "hispec exits=[4,8] gamma=2 n=4 bonus=false"
    assert Cascade((2, 4, 8), (2, 3, 6)).arm == "hispec exits=[2,4,8] gamma=2 n=[3,6]"


# --- against decoding

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


# --- the table


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


# --- prices


def test_plain_decoding_costs_one() -> None:
    of, plain = table([[[True, False] * 20]], [True], exits=(2,)), Cascade((2,), (0,))
    for prices in (costs.synthetic(L, [2], head=0.3, token=0.2, rest=0.5), costs.from_points(points(), rest=0.5)):
        assert prices.ratio(plain, usage(of, plain)) == pytest.approx(1)
        assert theory.speed(plain, (0.5,), prices) == pytest.approx(1)
    prices = costs.synthetic(L, [2], head=0.3)
    whole = prices.group(0, L)[1] + prices.heads[L][1]
    assert whole == pytest.approx(1) and prices.group(0, 2)[1] + prices.group(2, L)[1] == pytest.approx(0.7)


def test_a_round_by_hand() -> None:
    """12 layers in 0.76, heads 0.24 and 0.1, further tokens 0.5 each. Exits 3 and 6, N_d 2, N_i 4; all agree; the text
    is 8 tokens: one after the prefill, then two inner rounds of 3 and the target's: 7."""
    of = table([[[True] * 8], [[True] * 8]], [True], exits=(3, 6))
    prices = costs.synthetic(L, (3, 6), head=0.24, exit_head=0.1, token=0.5, rest=0.01)
    cascade = Cascade((3, 6), (2, 4))
    layer = 0.76 / 12
    step, below = 3 * layer + 0.1, 3 * layer
    inner = 2 * step + below + (3 * layer + 0.1) * 2.0 + 0.01  # L_i reads 3 tokens: 1 + 2 · 0.5
    final = below + 3 * layer + (6 * layer + 0.24) * 4.0 + 0.01  # 7 tokens: 1 + 6 · 0.5
    used = usage(of, cascade)
    assert used.emitted.tolist() == [7] and prices.cost(cascade, used).tolist() == pytest.approx([2 * inner + final])
    tokens = (2 * 3 + 1) * 3 + (2 * 3 + 1) * 3 + 7 * 6
    assert used.layer_tokens(cascade, L) == pytest.approx(tokens / 7)
    with pytest.raises(ConfigError, match="exits without a price"):
        prices.cost(Cascade((2,), (1,)), usage(table([[[True] * 8]], [True], exits=(2,)), Cascade((2,), (1,))))


def points(scale: float = 1.0) -> list[RungPoint]:
    """A machine with 1 ms a call and 2 ms a layer, half as much more for each further token."""
    found = []
    for n in (1, 2, 4):
        size = scale * (1 + 0.5 * (n - 1))
        found += [RungPoint("rung", a, b, n, size * (1 + 2 * (b - a)), 0, 0) for a, b in ((0, 2), (2, 6), (6, L))]
        found += [RungPoint("head", 0, 2, n, size * 3, 0, 0), RungPoint("head", 6, L, n, size * 6, 0, 0)]
        found.append(RungPoint("adapter", 0, 2, n, size * 0.5, 0, 0))
    return [*found, RungPoint("draft", 0, 2, 1, scale * 7, 0, 0), RungPoint("whole", 0, L, 1, scale * 20, 0, 0)]


def test_prices_from_a_profile() -> None:
    prices = costs.from_points(points(0.8) + points(1.2), rest=0.01)
    assert prices.n_layers == L and prices.exits == (2,) and prices.worst_fit < 1e-9
    assert prices.group(2, 5)[[0, 1, 2, 3, 4, 6]].tolist() == pytest.approx(
        [0, 7 / 20, 10.5 / 20, 14 / 20, 17.5 / 20, 24.5 / 20]  # 3: between; 6: on the line
    )
    assert prices.group(0, 2)[1] == pytest.approx(5.5 / 20), "with the adapter"
    assert prices.heads[2][1] == pytest.approx(3 / 20) and prices.drafts[2] == pytest.approx(7 / 20)
    slow = costs.from_points(points(), overhead_ms=5.0)
    assert slow.heads[L][1] == pytest.approx((6 + 5) / 25) and slow.heads[2][1] == pytest.approx(3 / 25)
    crooked = [dataclasses.replace(p, median_ms=9.0) if (p.part, p.a, p.n) == ("rung", 0, 1) else p for p in points()]
    assert costs.from_points(crooked).worst_fit > 0.1
    falling = [dataclasses.replace(p, median_ms=0.1) if (p.part, p.a) == ("rung", 0) else p for p in points()]
    assert (costs.from_points(falling).call == 0).all() and (costs.from_points(falling).layer[1:] > 0).all()
    with pytest.raises(ConfigError, match="no pass of the whole model"):
        costs.from_points([p for p in points() if p.part != "whole"])


@pytest.mark.parametrize("kind", ["shared", "adapter"])
def test_a_profile_of_a_model(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, run = [], Layers.run

    def spy(self: Layers, *arguments: Any) -> torch.Tensor:
        calls.append(self)
        return run(self, *arguments)

    monkeypatch.setattr(Layers, "run", spy)
    target = Stack(early_model())
    found = {head.layer: head for head in heads(target, (2, 4), kind)}
    measured = profile_rungs(target, (2, 3, 4), found, context=8, widths=(1, 3), repeats=2)
    parts = {(p.part, p.a, p.b, p.n) for p in measured}
    rungs = {("rung", a, b, n) for a, b in ((0, 2), (2, 3), (3, 4), (4, LAYERS)) for n in (1, 3)}
    read = {("head", a, b, n) for a, b in ((0, 2), (3, 4), (4, LAYERS)) for n in (1, 3)}
    own = {("adapter", a, b, n) for a, b in ((0, 2), (3, 4)) for n in (1, 3)} if kind == "adapter" else set()
    steps = {("draft", 0, 2, 1), ("draft", 0, 4, 1), ("whole", 0, LAYERS, 1)}
    assert parts == rungs | read | own | steps and len(measured) == len(parts)
    assert all(0 < p.low_ms <= p.median_ms <= p.high_ms for p in measured)
    prices = costs.from_points(measured)
    assert prices.exits == (2, 4) and (len(prices.adapters) == 2) == (kind == "adapter")
    assert prices.drafts[4] > 0 and prices.as_json()["heads"].keys() == {2, 4, LAYERS}
    # three rounds: at two widths, and in a row of drafting steps with one untimed
    assert len(calls) == (2 * 3 * (2 + IN_A_ROW + 1) if kind == "adapter" else 0)


# --- the search


def coins(chances: Sequence[float], texts: int = 20, places: int = 3000, seed: int = 0) -> ExitTable:
    rng = np.random.default_rng(seed)
    return table([[(rng.random(places) < chance).tolist() for _ in range(texts)] for chance in chances], [True] * texts)


def test_both_families_try_as_many_settings() -> None:
    of, prices = coins((0.3, 0.9, 0.6), 6, 200), costs.synthetic(L, (1, 2, 3), token=0.02)
    skip = search.best_layerskip(of, prices)
    assert len(skip.speeds) == 3 * len(search.WINDOWS)
    found = search.best_hispec(of, prices, len(skip.speeds))
    assert len(found.speeds) == len(skip.speeds), "the budget is used, and kept"
    assert found.speeds[found.fastest()] == max(found.speeds.values())
    first = next(iter(found.speeds))
    assert (first.exits, first.buffers) == ((1, 3), (2, 4)), "an eighth and a quarter of 12 are 1.5 and 3"
    assert search.pairs((2, 3, 4, 8, 15), 32)[0] == (4, 8)


def test_the_search_finds_what_is_best() -> None:
    """L_d rarely agrees with L_i, L_i nearly always with the model: a filter pays; where L_d is as good, none."""
    prices = costs.synthetic(24, (1, 8))
    filtered = dataclasses.replace(coins((0.5, 0.97), 4, 800), layers=(1, 8), n_layers=24)
    rows = {row["family"]: row for row in search.chosen(filtered, prices) if row["benchmark"] == "all"}
    assert rows["hispec"]["ratio_to_ar"] > 1.05 * rows["layerskip"]["ratio_to_ar"]
    equal = dataclasses.replace(coins((1.0, 0.8), 4, 800), layers=(1, 8), n_layers=24)
    rows = {row["family"]: row for row in search.chosen(equal, prices) if row["benchmark"] == "all"}
    assert rows["hispec"]["ratio_to_ar"] < rows["layerskip"]["ratio_to_ar"]
    assert rows["layerskip"]["exits"] == [1]


def test_what_is_chosen_is_judged_on_other_texts() -> None:
    tuning, report = coins((0.6, 0.9), 4, 300), coins((0.2, 0.5), 4, 300, seed=1)
    prices = costs.synthetic(L, (1, 2))
    rows = search.chosen(tuning, prices, report)
    assert {(r["benchmark"], r["family"]) for r in rows} == set(
        itertools.product(("even", "odd", "all"), ("layerskip", "hispec"))
    )
    for row in rows:
        assert row["ratio_to_ar"] < row["ratio_in_sample"] and row["tried"] <= 2 * len(search.WINDOWS)
        cascade = Cascade(tuple(row["exits"]), tuple(row["buffers"]), row["bonus"])
        assert row["arm"] == cascade.arm
        part = {**report.by_task(), "all": report}[row["benchmark"]]
        assert row["tokens_per_verify"] == usage(part, cascade).tokens_per_verify
    one = search.chosen(tuning, prices, exits=[2])
    assert {row["family"] for row in one} == {"layerskip"}, "one exit has nothing to verify with"


def test_grids() -> None:
    of, prices = coins((0.4, 0.9, 0.7), 4, 200), costs.synthetic(L, (1, 2, 3), token=0.02)
    rows = {(r["draft"], r["verifier"]): r for r in search.layer_grid(of, prices)}
    assert rows.keys() == {(1, None), (2, None), (3, None), (1, 2), (1, 3), (2, 3)}
    for (_, verifier), row in rows.items():
        if verifier is not None:
            assert row["best"]["ratio_to_ar"] >= row["fixed"]["ratio_to_ar"]
            assert row["fixed"]["buffers"] == [2, 4] and row["fixed"]["exits"] == row["best"]["exits"]
    curves = search.buffer_curves(of, prices, (1, 2), drafts=(2,))
    assert [r["n_i"] for r in curves] == list(range(1, 17)) and {r["n_d"] for r in curves} == {2}
    best = max(r["ratio_to_ar"] for r in curves)
    assert best <= rows[1, 2]["best"]["ratio_to_ar"] + 0.05


# --- the closed form


@pytest.mark.parametrize(
    "cascade",
    [
        Cascade((2,), (0,)), Cascade((2,), (5,)), Cascade((2, 4), (2, 4)), Cascade((2, 4), (2, 4), bonus=False),
        Cascade((2, 4), (4, 9)), Cascade((1, 2, 4), (2, 3, 6)), Cascade((1, 2, 4), (2, 3, 6), bonus=False),
    ],
)  # fmt: skip
@pytest.mark.parametrize("chances", [(0.5, 0.8, 0.9), (0.9, 0.6, 0.7), (1.0, 0.0, 1.0)])
def test_the_closed_form_is_the_walk_on_coins(cascade: Cascade, chances: tuple[float, ...]) -> None:
    used_chances = chances[: len(cascade.exits)]
    of = dataclasses.replace(coins(used_chances, places=6000), layers=cascade.exits)
    prices = costs.synthetic(L, cascade.exits, head=0.2, exit_head=0.05, token=0.03, rest=0.01)
    walked = prices.ratio(cascade, usage(of, cascade))
    assert theory.speed(cascade, used_chances, prices) == pytest.approx(walked, rel=0.012)


@settings(max_examples=60, deadline=None)
@given(st.floats(0.05, 0.95), st.floats(0.05, 0.95), st.integers(1, 6), st.integers(1, 12), st.booleans())
def test_more_acceptance_is_never_slower(low: float, high: float, drafts: int, size: int, bonus: bool) -> None:
    """By the model, whatever it costs; by L_i, more tokens per round cost."""
    prices, cascade = costs.synthetic(L, (2, 4), token=0.05), Cascade((2, 4), (drafts, size), bonus)
    assert theory.speed(cascade, (low, high), prices) <= theory.speed(cascade, (low, min(1.0, high + 0.05)), prices)
    length, cost = theory.gathered(cascade, (low,), prices)
    assert length.sum() == pytest.approx(1) and (length[:size] == 0).all() and cost > 0


def test_where_it_pays() -> None:
    prices = costs.synthetic(80, (10, 20))
    point = theory.Point("mine", 0.4, 0.95, direct=0.5)
    found = theory.where_it_pays((10, 20), prices, "70B", [theory.PUBLISHED, point], steps=7)
    over = np.array(found["over_same"])
    assert over.shape == (7, 7) and (over[-1, :-1] < 1).all(), "a draft that L_i hardly corrects needs no L_i"
    assert over[2, -1] > 1.05, "a poor draft, and a filter that is nearly the model"
    best = np.array(found["over_best"])
    assert (best <= over + 1e-9).all() and best[1, -1] < 0.9 * over[1, -1], "a poor L_d, a good L_i: draft from that"
    published, mine = found["points"]
    assert published["published"] and published["accept_i"] * published["accept_f"] == pytest.approx(0.397)
    product = theory.where_it_pays((10, 20), prices, "", [dataclasses.replace(point, direct=None)], steps=2)["points"]
    assert mine["over_same"] < product[0]["over_same"], "0.5 is more than 0.4 · 0.95"
    i, f = found["accept_i"][3], found["accept_f"][4]
    slow = max(
        theory.speed(Cascade((10, 20), (a, b), bonus), (i, f), prices)
        for a, b, bonus in itertools.product(search.DRAFTS, search.BUFFERS, (True, False))
    )
    same = max(theory.speed(Cascade((10,), (n,)), (i * f,), prices) for n in search.WINDOWS)
    assert over[3, 4] == pytest.approx(slow / same, abs=1e-3)
