"""The arm ``pearl``: how it is set, what it refuses, and what it costs each side in the trace, results and tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pacer.assemble import Models, load_target, make_decoder
from pacer.command.app import load_settings
from pacer.decoding import build
from pacer.decoding.concurrent import Beside
from pacer.decoding.drafters import pearl as pearl_module
from pacer.decoding.loop import Decoder
from pacer.decoding.request import Request
from pacer.errors import ConfigError, UnsupportedError
from pacer.evaluation.arms import make_arm
from pacer.evaluation.beside import beside, sentence
from pacer.evaluation.metrics import check_trace, evaluate_trace
from pacer.methods.arms import method_settings
from pacer.models.draft import TrainableDraft
from pacer.reporting import tables
from pacer.settings import ModelSettings, SamplingSettings, SourceSettings
from scripts import measure_beside
from tests.cli.test_verbs import words
from tests.folders import tiny_folder
from tests.pearls import COSTS

GREEDY = SamplingSettings()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("pearl") / "target")


@pytest.fixture(scope="module")
def models(folder: Path) -> Models:
    found = load_target(ModelSettings("tiny", SourceSettings(str(folder)), dtype="float32", device="cpu"), folder)
    found.draft = TrainableDraft(found.target, [0, 1], torch.arange(0, found.target.vocab_size, 2)).merged()
    return found


@pytest.fixture(autouse=True)
def in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """No process of its own, which takes seconds to start; both sides cost what is written here."""
    monkeypatch.setattr(build, "Beside", lambda draftsman: Beside(draftsman, own_process=False))
    monkeypatch.setattr(pearl_module, "measure", lambda *_: COSTS)


def requests(count: int = 2) -> list[Request]:
    return [Request(f"r{i}", [5 + i, 9, 30], 12) for i in range(count)]


def gamma_of(decoder: Decoder) -> int | None:
    assert isinstance(decoder.proposer, pearl_module.Pearl)
    return decoder.proposer.gamma


def test_gamma_is_set_or_measured(models: Models) -> None:
    """A42, A44."""
    assert gamma_of(make_decoder(method_settings("pearl"), models, GREEDY)) is None
    assert gamma_of(make_decoder(method_settings("pearl gamma=3"), models, GREEDY)) == 3
    off = method_settings("pearl")
    off.controller = None
    assert make_decoder(off, models, GREEDY).proposer is None


def test_what_cannot_be_is_refused(models: Models) -> None:
    """S39."""
    for arm, match in (
        ("pearl gamma=1", "gamma in arm 'pearl gamma=1': 1; allowed: whole numbers ≥ 2"),
        ("pearl t=0.5", "unknown key in arm"),
    ):
        with pytest.raises(ConfigError, match=match):
            method_settings(arm)
    for words_of in (["method=pearl"], ["benchmark.arms=[ar,pearl]"]):
        assert load_settings(words_of)
        with pytest.raises(ConfigError, match=r"sampling\.temperature with method pearl: 0\.7; allowed: 0; it decodes"):
            load_settings([*words_of, "sampling.temperature=0.7"])
    with pytest.raises(UnsupportedError, match=r"allowed: sampling\.temperature=0"):
        make_decoder(method_settings("pearl"), models, SamplingSettings(temperature=1.0))
    other = method_settings("pearl")
    other.controller = {"kind": "fixed", "gamma": 4}
    with pytest.raises(ConfigError, match="controller of method pearl: 'fixed'; allowed: balanced, none"):
        make_decoder(other, models, GREEDY)
    waits = method_settings("sd")
    waits.controller = {"kind": "balanced", "gamma": 4}
    with pytest.raises(UnsupportedError, match="method sd needs a draft beside the target; use method=pearl"):
        make_decoder(waits, models, GREEDY)


def test_what_it_costs_each_side_is_in_trace_results_and_table(models: Models) -> None:
    lines: list[dict[str, Any]] = []
    for arm in ("ar", "pearl gamma=3"):
        ran = make_arm(arm, models, GREEDY).run(requests())
        lines += [{"arm": arm, "benchmark": "gsm8k", **json.loads(json.dumps(line))} for line in ran]
    told = [line["beside"] for line in lines if "beside" in line]
    assert len(told) == 2 and told[0] == {**vars(COSTS), "gamma": 3}
    assert check_trace(lines) == []
    results = evaluate_trace(lines, resamples=20)
    assert results["beside"] == {
        "pearl gamma=3": {
            "worker": ["in turn"], "rows": [1], "width": [4], "gamma": [3], "target_alone": 4e-3,
            "target_beside": 5e-3, "draft_alone": 1e-3, "draft_beside": 1.25e-3,
        }
    }  # fmt: skip
    assert all(row["exact"] for row in results["rows"])
    text = tables.to_markdown(results, command="c", machine="m")
    assert text.count("pearl gamma=3: γ = 3; drafted in turn") == 1


def test_costs_of_many_requests_are_medians_in_words() -> None:
    def line(arm: str, **values: Any) -> dict[str, Any]:
        return {"kind": "request", "arm": arm, "beside": {**vars(COSTS), "worker": "process", "gamma": 4, **values}}

    found = beside([
        line("a"), line("a", target_beside=6e-3, gamma=5), line("a", target_beside=8e-3), {"kind": "round"},
        {"kind": "request", "arm": "ar"}, line("b", worker="thread", rows=2),
    ])  # fmt: skip
    assert found["a"]["target_beside"] == 6e-3 and found["a"]["gamma"] == [4, 5] and set(found) == {"a", "b"}
    assert sentence("a", found["a"]) == (
        "a: γ = 4, 5; while draft (process) and target both run, a target pass over 4 tokens (rows: 1) takes "
        "6.0 ms instead of 4.0 (× 1.50), a draft pass 1.2 ms instead of 1.0 (× 1.25)."
    )
    assert beside([]) == {}


def test_measure_beside(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    home = tmp_path
    (home / "target").symlink_to(folder)
    command = [*words(home, "pacer/demo"), "--rows", "1", "2"]
    assert measure_beside.main(command) == 1, "these costs were measured in turn"
    line = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert [costs["gamma"] for costs in line["costs"]] == [COSTS.gamma] * 2 and not line["ok"]
