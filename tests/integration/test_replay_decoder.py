"""Replay against real decoding: every round of every rule, drafted, accepted, emitted, calls and what they read."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pacer.assemble import Models
from pacer.data.corpus import Text
from pacer.decoding.controllers.base import Controller
from pacer.decoding.controllers.fixed import Fixed
from pacer.decoding.controllers.preverifier import PreverifierRule
from pacer.decoding.controllers.threshold import Threshold
from pacer.decoding.request import Request
from pacer.evaluation.replay import rules
from pacer.evaluation.replay.stage import text_table
from pacer.evaluation.replay.table import Table, join
from pacer.evaluation.replay.walk import usage, walk
from pacer.models.preverifier import Preverifier
from pacer.models.stack import Stack
from tests.texts import as_text, draft, requests, target
from tests.tiny import generate, make_decoder, make_preverifier, proposer

GAMMA, STOPS = 7, (51, 75)
Round = tuple[int, int, int, int]


def the_models(module: Preverifier | None, by: Stack | None = None) -> Models:
    """Models as far as a table needs them."""
    return Models(target(), None, STOPS, None, by or draft(), preverifier=module)  # type: ignore[arg-type]


def made(
    module: Preverifier | None, asked: Sequence[Request], tail: int | None = None, by: Stack | None = None
) -> tuple[Table, list[Text]]:
    texts = [as_text(result) for result in generate(make_decoder(target()), asked, 4)]
    models = the_models(module, by)
    tables = [text_table(models, t, r.max_new_tokens, GAMMA, tail) for t, r in zip(texts, asked, strict=True)]
    return join(tables), texts


@functools.cache
def plain(new: int) -> tuple[Table, tuple[Text, ...]]:
    """The table without a pre-verifier, all signals kept."""
    table, texts = made(None, some_requests(new))
    return table, tuple(texts)


def decoded(controller: Controller, asked: Sequence[Request], by: Stack | None = None) -> dict[str, list[Round]]:
    """(committed, drafted, accepted, emitted) of each round after the prefill."""
    found = {}
    for request in asked:
        lines: list[dict[str, Any]] = make_decoder(target(), by or draft(), controller).generate([request])[0].rounds
        found[request.id] = [
            (line["committed"], len(line["drafted"]), line["accepted"][0], len(line["emitted"])) for line in lines[1:]
        ]
    return found


def replayed(table: Table, plan: rules.Plan) -> dict[str, list[Round]]:
    done = walk(table, plan)
    found: dict[str, list[Round]] = {name: [] for name in table.ids}
    columns = (table.start[done.row], done.drafted, done.accepted, done.emitted)
    for text, *round_ in zip(done.text.tolist(), *(c.tolist() for c in columns), strict=True):
        found[table.ids[text]].append(tuple(round_))  # type: ignore[arg-type]
    return found


def some_requests(new: int = 36) -> list[Request]:
    return requests(10, new, STOPS)


@pytest.mark.parametrize("new", [1, 2, 5, 36])
@pytest.mark.parametrize("gamma", [0, 1, 3, 7])
def test_fixed_windows(gamma: int, new: int) -> None:
    asked, (table, _) = some_requests(new), plain(new)
    assert replayed(table, rules.fixed(table, gamma)) == decoded(Fixed(gamma), asked)


THRESHOLDS = [
    ("probability", "last", 0.4), ("probability", "product", 0.2), ("entropy", "last", 2.0), ("margin", "last", 0.5),
    ("match", "last", 1.0),
]  # fmt: skip


@pytest.mark.parametrize(("signal", "rule", "t"), THRESHOLDS)
@pytest.mark.parametrize("new", [5, 36])
def test_thresholds(signal: str, rule: str, t: float, new: int) -> None:
    asked, (table, _) = some_requests(new), plain(new)
    plan = rules.threshold(table, signal, t, rule, 6)
    wanted = decoded(Threshold(signal, rule, t, 6), asked)
    assert replayed(table, plan) == wanted and not plan.open.any()
    assert len({drafted for rounds in wanted.values() for _, drafted, _, _ in rounds}) > 1  # the rule decides


class Counted(PreverifierRule):
    """PACER's controller; entries of each read are kept."""

    def __init__(self, *args: Any, **values: Any) -> None:
        super().__init__(*args, **values)
        self.entries: list[int] = []

    def ask(self, *args: Any) -> Any:
        before = list(self.lane.lengths)
        answer = super().ask(*args)
        self.entries += [after - had for after, had in zip(self.lane.lengths, before, strict=True)]
        return answer


PACERS = [
    {"b": 1, "t0": 0.5, "rho": 1.0, "rule": "mean"}, {"b": 2, "t0": 0.45, "rho": 1.1, "rule": "mean"},
    {"b": 3, "t0": 0.3, "rho": 1.0, "rule": "product"}, {"b": 2, "t0": 0.4, "rho": 0.9, "rule": "min"},
    {"b": 2, "t0": 0.45, "rho": 1.0, "rule": "mean", "lo": 0.002, "hi": 0.6},
    {"b": 1, "t0": 0.45, "rho": 1.0, "rule": "mean", "lo": 0.1, "hi": 0.8},
]  # fmt: skip


@pytest.mark.parametrize("values", PACERS)
@pytest.mark.parametrize("attention", ["prefix", "block"])
def test_pacer(values: dict[str, Any], attention: str) -> None:
    asked = some_requests()
    label = "conditional" if values["rule"] == "product" else "survival"
    module = make_preverifier(draft(), gamma_max=GAMMA, attention=attention, label=label)
    table, _ = made(module, asked)
    plan = rules.preverified(table, **values)
    controller = Counted(module, gamma_max=GAMMA, **values)
    wanted = decoded(controller, asked)
    assert replayed(table, plan) == wanted and not plan.open.any()
    assert len({drafted for rounds in wanted.values() for _, drafted, _, _ in rounds}) > 1
    passes = usage(table, plan).passes.sum(0)[2]
    assert passes.tolist() == np.bincount(controller.entries, minlength=len(passes)).tolist()
    assert passes.sum() > 10


@pytest.mark.parametrize("name", ["fixed", "threshold"])
def test_passes_of_the_models(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Target and draft passes by the tokens they read, counted where they are fed."""
    asked, (table, _) = some_requests(), plain(36)
    plans = {"fixed": rules.fixed(table, 3), "threshold": rules.threshold(table, "probability", 0.4, "last", 5)}
    controllers = {"fixed": Fixed(3), "threshold": Threshold("probability", "last", 0.4, 5)}
    used = usage(table, plans[name]).passes.sum(0)
    fed: dict[str, list[int]] = {"target": [], "draft": []}
    for request in asked:
        decoder = make_decoder(target(), draft(), controllers[name])
        for part, lane in (("target", decoder.reader), ("draft", proposer(decoder).drafter.lane)):
            feed = lane.feed_ids

            def counting(
                ids: Tensor, counts: Sequence[int], *rest: Any, feed: Any = feed, to: list[int] = fed[part]
            ) -> Tensor:
                to.append(max(counts))
                return feed(ids, counts, *rest)

            monkeypatch.setattr(lane, "feed_ids", counting)
        decoder.generate([request], lambda row, line: None)
        fed["target"].remove(len(request.prompt_ids))  # the prefills
        fed["draft"].remove(len(request.prompt_ids))
    for part, at in (("target", 0), ("draft", 1)):
        assert used[at].tolist() == np.bincount(fed[part], minlength=used.shape[1]).tolist()


def test_a_tail_is_said_and_ends_the_draft() -> None:
    """With a short tail a rule that would go on is ended there; a rule that stops before is not touched."""
    asked = some_requests()
    whole, _ = plain(36)
    short, _ = made(None, asked, tail=1)
    eager, cut = (rules.threshold(table, "probability", 0.0, "last", GAMMA) for table in (whole, short))
    assert cut.open.any() and not eager.open.any()
    assert (cut.drawn[~cut.open] == eager.drawn[~cut.open]).all() and (
        cut.drawn[cut.open] < eager.drawn[cut.open]
    ).all()
    assert (cut.drawn[cut.open] == np.minimum(short.run, GAMMA)[cut.open] + 2).all()
    for t in (0.3, 0.9):
        a, b = (rules.threshold(table, "probability", t, "last", GAMMA) for table in (whole, short))
        assert (a.drawn[~b.open] == b.drawn[~b.open]).all()


def test_an_end_of_the_text_in_a_draft() -> None:
    """Stop ids inside drafts, accepted and not, are among the rounds that the tests above compare."""
    table, texts = plain(36)
    done = walk(table, rules.fixed(table, GAMMA))
    ended = [text for text in texts if not text.cut]
    assert len(ended) > 2 and (done.emitted < done.accepted + 1).any()
    assert (done.drafted < done.drawn).any()
    total = np.bincount(done.text, done.emitted, len(texts))
    assert total.tolist() == [len(text.output_ids) - 1 for text in texts]


def test_estimates_do_not_depend_on_how_they_are_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    from pacer.evaluation.replay import stage

    asked = some_requests()[:2]
    module = make_preverifier(draft(), gamma_max=GAMMA)
    one, _ = made(module, asked)
    monkeypatch.setattr(stage, "PACKED", 20)
    two, _ = made(module, asked)
    assert np.allclose(one.signals["score"], two.signals["score"], atol=1e-5, equal_nan=True)
    assert np.isfinite(one.signals["score"]).sum() == one.counts.sum()


def test_arms_by_name() -> None:
    """An arm that can be measured is replayed from its name, with the values tuned for the checkpoint."""
    asked = some_requests()
    module = make_preverifier(draft(), gamma_max=GAMMA)
    table, _ = made(module, asked)
    tuned = {"b": 2, "t0": 0.45, "rho": 1.1, "rule": "min", "gamma_max": 5, "lo": 0.005, "hi": 0.9}
    pairs = [
        ("ar", rules.fixed(table, 0)), ("sd gamma=2", rules.fixed(table, 2)),
        ("threshold signal=entropy t=1.5 gamma_max=5", rules.threshold(table, "entropy", 1.5, "last", 5)),
        ("threshold rule=product t=0.1 gamma_max=4", rules.threshold(table, "probability", 0.1, "product", 4)),
        ("pacer", rules.preverified(table, **tuned)),
        ("pacer b=3 t0=0.2 lo=0.0 hi=1.0", rules.preverified(table, **{**tuned, "b": 3, "t0": 0.2, "lo": 0, "hi": 1})),
        ("oracle", rules.oracle(table)), ("oracle gamma=2", rules.oracle(table, 2)),
    ]  # fmt: skip
    plans = [rules.rule_of(arm, tuned)(table) for arm, _ in pairs]
    for plan, (arm, wanted) in zip(plans, pairs, strict=True):
        assert (plan.drawn == wanted.drawn).all(), arm
        assert (plan.asked is None) == (wanted.asked is None), arm
    for (_, one), (_, two) in itertools.combinations(pairs, 2):
        assert not (one.drawn == two.drawn).all()


def test_the_table_survives_the_disk(tmp_path: Any) -> None:
    from pacer.evaluation.replay.table import load, save

    table, _ = made(make_preverifier(draft(), gamma_max=12, label="conditional"), some_requests())
    save(table, tmp_path / "t.npz")
    again = load(tmp_path / "t.npz")
    assert again.ids == table.ids and again.tasks == table.tasks and again.score_width == table.score_width
    assert table.score_width == 12  # the module's own longest draft, not the table's
    assert again.label == table.label == "conditional"
    assert again.reads_prefix == table.reads_prefix and list(again.signals) == list(table.signals)
    for name in ("prompt", "output", "rows", "start", "room", "run", "counts", "known", "reach"):
        assert (getattr(again, name) == getattr(table, name)).all()
    assert all(np.array_equal(again.signals[n], v, equal_nan=True) for n, v in table.signals.items())
    assert torch.from_numpy(again.signals["score"]).isfinite().any()
