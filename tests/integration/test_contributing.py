"""The examples of CONTRIBUTING.md are whole: taken from the page, each decodes exactly, found by its name alone."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from pacer.assemble import Models, load_target, make_decoder
from pacer.command.app import load_settings
from pacer.decoding.request import Request
from pacer.errors import ConfigError
from pacer.evaluation.replay import rules
from pacer.evaluation.stats import chi_square
from pacer.methods.arms import controllers, method_settings
from pacer.models.draft import TrainableDraft
from pacer.models.exits import shared_exits
from pacer.models.stack import Stack
from pacer.settings import ModelSettings, SamplingSettings, SourceSettings
from tests.folders import tiny_folder
from tests.integration.test_loop_sampling import ALPHA, CLOSE, TABLE, VOCAB, WARM, _joint, _law
from tests.tiny import plain_greedy

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```(python|yaml)\n# (\S+)\n(.*?)^```$", re.M | re.S)
EXAMPLES = {match[2]: match[3] for match in BLOCK.finditer((ROOT / "CONTRIBUTING.md").read_text())}
PROMPT = [5, 17, 3, 5, 17, 3, 5, 17]


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The examples as somebody's own package and folder of configs, outside this one."""
    for name, text in EXAMPLES.items():
        path = tmp_path / name.replace("pacer/decoding/", "mine/")
        path.parent.mkdir(parents=True, exist_ok=True)
        text = re.sub(r"^(kind|drafter): (falling|echo)$", _outside, text, flags=re.M)
        path.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PACER_CONF", str(tmp_path / "conf"))
    return tmp_path


def _outside(match: re.Match[str]) -> str:
    room = {"kind": "controllers", "drafter": "drafters"}[match[1]]
    return f"{match[1]}: mine.{room}.{match[2]}"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder = tiny_folder(tmp_path_factory.mktemp("contributing") / "target")
    found = load_target(ModelSettings("tiny", SourceSettings(str(folder)), dtype="float32", device="cpu"), folder)
    found.draft = TrainableDraft(found.target, [0, 1], torch.arange(0, found.target.vocab_size, 2)).merged()
    found.exits = {("shared", layer): head for layer, head in shared_exits(found.target, [1]).items()}
    return found


def decoded(arm: str, models: Models, sampling: SamplingSettings | None = None, count: int = 1, new: int = 30) -> Any:
    decoder = make_decoder(method_settings(arm), models, sampling or SamplingSettings())
    prompt = PROMPT if models.target.vocab_size > VOCAB else [2, 0]
    return decoder.generate([Request(f"q{i}", prompt, new) for i in range(count)])


def test_the_page_has_a_rule_and_a_drafter_each_one_file_and_one_yaml() -> None:
    assert sorted(EXAMPLES) == [
        "conf/controller/falling.yaml", "conf/method/echo.yaml", "pacer/decoding/controllers/falling.py",
        "pacer/decoding/drafters/echo.py",
    ]  # fmt: skip
    assert not any((ROOT / name).exists() for name in EXAMPLES), "they are examples, not parts"
    for name in ("pacer/decoding/controllers/falling.py", "pacer/decoding/drafters/echo.py"):
        assert len([line for line in EXAMPLES[name].splitlines() if line.strip()]) <= 20


@pytest.mark.parametrize("arm", ["sd controller=falling t=0.3", "layerskip exits=[1] controller=falling t=0.3"])
def test_the_rule_decodes_exactly_with_every_drafter(arm: str, mine: Path, models: Models) -> None:
    result = decoded(arm, models)[0]
    assert result.ids == plain_greedy(models.target.model, PROMPT, 30)
    assert len({len(line["drafted"]) for line in result.rounds[1:] if line["stop"] == "controller"}) > 1
    assert controllers()["mine.controllers.falling"] == ["t", "gamma_max"]
    assert load_settings(["method=sd", "controller@method.controller=falling"]).method.controller == {
        "kind": "mine.controllers.falling", "t": 0.5, "gamma_max": 8
    }  # fmt: skip
    for word, part in (("t=2", r"t in arm .*\[0, 1\]"), ("tt=1", "unknown key.*t, gamma_max")):
        with pytest.raises(ConfigError, match=part):
            method_settings(f"sd controller=falling {word}")
    rules.rule_of("sd controller=falling t=0.3")  # it can be replayed too


def test_the_drafter_decodes_exactly(mine: Path, models: Models) -> None:
    result = decoded("echo gamma=4 n=1", models)[0]
    assert result.ids == plain_greedy(models.target.model, PROMPT, 30)
    assert result.rounds[1]["stop"] == "fixed" and len(result.rounds[1]["drafted"]) == 4
    assert load_settings(["method=echo"]).method.drafting == {"n": 2}
    with pytest.raises(ConfigError, match=r"n in arm .*whole numbers ≥ 1"):
        method_settings("echo n=0")


@pytest.mark.parametrize("arm", ["echo gamma=3 n=1", "sd controller=falling t=0.6"])
def test_both_sample_from_the_targets_distribution(arm: str, mine: Path) -> None:
    """L9: a draft that was certain is accepted with u < p(x), else p without x."""
    toys = Models(TABLE, None, (), None, Stack(CLOSE.model))  # type: ignore[arg-type]  # no text
    results = decoded(arm, toys, WARM, 1500, 6)
    assert chi_square(_joint(results, VOCAB, 3), _law(TABLE, [2, 0], 3, WARM).tolist()) > ALPHA
    rounds = [line for result in results for line in result.rounds]
    assert {line["accepted"][0] for line in rounds} >= {0, 1} and any(line["drafted"] for line in rounds)
