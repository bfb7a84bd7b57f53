"""The benches, end to end on a tiny model; a second run measures nothing anew."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from pacer.data.corpus import Text
from pacer.models.copying import LONGEST_MATCH
from pacer.models.draft import TrainableDraft
from pacer.models.stack import Stack
from pacer.settings import CostSettings, Settings
from scripts import bench_ablation, bench_pacer, measure_packed, search_draft, search_skip
from tests.cli.test_verbs import words
from tests.folders import tiny_folder
from tests.tiny import plain_greedy, tiny_stack


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("home")
    tiny_folder(home / "target")
    return home


def last_line(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    return found


def tiny(home: Path, experiment: str) -> list[str]:
    return [word for word in words(home, experiment) if "experiment=" not in word] + ["benchmark.score=false"]


def test_bench_pacer(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["demo", *tiny(home, "pacer/demo"), "replay.limit=2", "benchmark.limit=2"]
    bench_pacer.main(command)
    (figures,) = last_line(capsys)["pairs"]
    assert figures["arms"]["fixed"].startswith("sd gamma=") and figures["arms"]["threshold"].startswith("threshold ")
    assert figures["hindsight_predicted"].keys() == figures["tuning_predicted"].keys() - {"fixed_here"}
    own = {"ar", figures["arms"]["fixed"], figures["arms"]["threshold"], figures["arms"]["pacer"]}
    theirs = {"hf_generate", "hf_dynamic"}
    assert set(figures["over_ar"]) > own | theirs
    traces = {path: path.stat().st_size for path in (home / "runs" / "evaluate").rglob("trace.jsonl")}
    bench_pacer.main(command)
    assert {path: path.stat().st_size for path in (home / "runs" / "evaluate").rglob("trace.jsonl")} == traces


def test_a_goal_is_reached_or_not() -> None:
    interval = {"value": 1.1, "low": 1.0, "high": 1.2}
    figures: dict[str, Any] = {
        "pair": "a", "over_fixed": interval, "over_threshold": {**interval, "value": 1.0}, "call_in_layers": 1.0,
        "over_fixed_by_benchmark": {"x": interval}, "over_threshold_by_benchmark": {"x": {**interval, "high": 0.9}},
        "rest_share": {"pacer b=1": 0.2}, "arms": {"pacer": "pacer b=1"},
    }  # fmt: skip
    reached = [
        value >= bound if sign == "≥" else value <= bound for _, value, sign, bound in bench_pacer.wanted(figures)
    ]
    assert reached == [True, False, False, True, False]


@pytest.mark.parametrize(("learnt", "lengths"), [(16, {8, 16}), (32, {8, 16, 32}), (12, {8, 12})])
def test_ablations_of_length_end_where_the_preverifier_does(learnt: int, lengths: set[int]) -> None:
    found = bench_ablation.changes("survival", learnt)
    assert {change["gamma_max"] for change in found if list(change) == ["gamma_max"]} == lengths
    assert all(change["gamma_max"] == learnt for change in found if "b" in change)


@pytest.mark.parametrize("temperature", [0, 0.7])
def test_bench_ablation(
    home: Path, temperature: float, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_ablation, "changes", lambda label, longest: [{}, {"b": 2, "gamma_max": 4}])
    more = [f"sampling.temperature={temperature}", "replay.limit=2", "benchmark.limit=2"]
    bench_ablation.main(["demo", *tiny(home, "pacer/demo"), *more])
    rows = last_line(capsys)["rows"]
    assert [row["arm"] for row in rows] == ["pacer", "pacer b=2 gamma_max=4"]
    for row in rows:
        assert row["ratio_low"] <= row["ratio_to_ar"] <= row["ratio_high"]
        assert (row["predicted"] is None) == (temperature > 0)


def test_search_draft(home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """All variants are judged on the same texts, also one that learnt from fewer."""
    chosen = {"first": [], "no copying": ["model.draft.copying=false"], "ready corpus alone": ["corpus.extend=[]"]}
    judged: list[list[str]] = []
    judge = search_draft.judge

    def spy(draft: Stack, target: Stack, texts: Sequence[Text], settings: Settings) -> dict[str, Any]:
        judged.append([text.id for text in texts])
        return judge(draft, target, texts, settings)

    monkeypatch.setattr(search_draft, "judge", spy)
    monkeypatch.setattr(search_draft, "VARIANTS", chosen)
    more = ["corpus.prompts=[gsm8k/train,instruct/train,mbpp/train]", "corpus.extend=[xsum/train]"]
    command = words(home, "draft/smollm2", *more, "model.draft.layers=[0]")
    monkeypatch.setattr("sys.argv", ["search_draft.py", *command])
    assert search_draft.main() == 0
    assert judged[0] == judged[1] == judged[2] and not any(name.startswith("xsum") for name in judged[0])
    best = last_line(capsys)["best"]
    rows = {found["variant"]: found for found in json.loads((home / "runs" / "search_draft.json").read_text())["rows"]}
    assert list(rows) == list(chosen) and best == rows[best["variant"]]
    assert best["speed"] == max(found["speed"] for found in rows.values())
    assert rows["ready corpus alone"]["weights"] == rows["first"]["weights"] > rows["no copying"]["weights"]
    monkeypatch.setattr("sys.argv", ["search_draft.py", "no copying", *command])  # by name, one of them
    assert search_draft.main() == 0 and last_line(capsys)["best"] == rows["no copying"]
    monkeypatch.setattr("sys.argv", ["search_draft.py", "no copyin", *command])
    assert search_draft.main() != 0 and "first, no copying, ready corpus alone" in capsys.readouterr().err


def test_rounds_from_every_place() -> None:
    accepted, counts = search_draft.runs([torch.tensor([True, True, False, True]), torch.tensor([False])])
    assert accepted.tolist() == [2, 1, 0, 1, 0] and counts.tolist() == [4, 3, 2, 1, 1]


def test_weights_of_a_pass() -> None:
    """Layers, norm and head: not the embedding; a draft that copies has gates, and its projection beside the head."""
    target = tiny_stack(layers=3)
    layer = sum(weight.numel() for weight in target.decoder.layers[0].parameters())
    assert search_draft.weights(target) == 3 * layer + 32 + 32 * target.vocab_size
    plain, copying = (TrainableDraft(target, [0], torch.arange(20), copies).merged() for copies in (False, True))
    assert search_draft.weights(plain) == layer + 32 + 32 * 20
    assert search_draft.weights(copying) - search_draft.weights(plain) == 32 * 32 + (32 + 1) * LONGEST_MATCH


def test_speed_is_of_the_windows_that_the_texts_allow() -> None:
    """The target drafts for itself at its own price: nothing is gained; for nothing, a window is written per pass."""
    target = tiny_stack(layers=3)
    prompt = [3, 4, 5]
    texts = [Text("a", "t", prompt, plain_greedy(target.model, prompt, 32), True)]
    settings = Settings(costs=CostSettings(draft=9.0, token=0.0, rest=0.0))
    found = search_draft.judge(target, target, texts, settings)
    assert found["all"] == found["t"] == found["weights"] == found["speed"] == 1
    cheap = TrainableDraft(target, [0, 1, 2], torch.tensor(sorted(set(texts[0].output_ids)))).merged()
    found = search_draft.judge(cheap, target, texts, settings)
    assert found["weights"] < 1 < found["speed"] and found["gamma"] == search_draft.WINDOWS


def test_what_is_left_out_costs_least_and_has_no_neighbours() -> None:
    assert search_skip.leave_out({0: 0.1, 1: 0.9, 2: 0.95, 3: 0.8, 4: 0.3}, 2) == [2, 4]


def test_agreement_counts_the_targets_own_text() -> None:
    stack = tiny_stack(layers=3)
    prompt = [3, 4, 5]
    output = plain_greedy(stack.model, prompt, 12)
    text = Text("a", "t", prompt, output, True)
    assert search_skip.kept(stack, [0, 1, 2], [text]) == 1.0
    wrong = Text("b", "t", prompt, [(output[0] + 1) % 40], True)
    assert search_skip.kept(stack, [0, 1, 2], [text, wrong]) == pytest.approx(12 / 13)


@pytest.mark.parametrize("script", [bench_pacer, bench_ablation, search_draft, search_skip, measure_packed])
def test_a_wrong_setting_is_one_line(script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main(["demo", "trainer.lrr=1"] if script in (bench_pacer, bench_ablation) else ["trainer.lrr=1"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and "lrr" in error


def test_measure_packed(home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_packed, "WIDTHS", (1, 3))
    assert measure_packed.main([*words(home, "pacer/demo"), "profile.contexts=[16]", "profile.repeats=2"]) == 0
    found = last_line(capsys)
    assert [(row["part"], row["n"]) for row in found["rows"]] == [("target", 1), ("target", 3), ("draft", 1)]
    for row in found["rows"]:
        assert row["low"] <= row["ratio"] <= row["high"] and row["plain_ms"] > 0 < row["packed_ms"]
    assert found["rows"][0]["plain_passes"] == found["rows"][0]["packed_passes"] == 1
    assert Path(found["written"]).with_name("packed.md").read_text().count("\n") == 2 + len(found["rows"])
