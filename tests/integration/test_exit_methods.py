"""Methods over exits by name: from an arm's words to a decoder, heads and pre-verifiers made where they are missing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pacer.assemble import make_decoder
from pacer.decoding.controllers.preverified import Preverified
from pacer.decoding.request import Request
from pacer.decoding.staged import Staged
from pacer.errors import ConfigError
from pacer.methods.arms import method_settings
from pacer.methods.exits import exits_of, wanted_exits, wanted_judges
from pacer.settings import ExitSettings, SamplingSettings
from tests.cli.test_verbs import words
from tests.folders import tiny_folder


def test_words_of_an_arm() -> None:
    method = method_settings("hispec exits=[4,8] gamma=3 n=6 bonus=false share=0.5")
    assert (method.exits, method.bonus, method.share) == ([4, 8], False, 0.5)
    assert method.controller == {"kind": "fixed", "gamma": 3} and method.buffer == {"kind": "enough", "n": 6}
    assert method_settings("hispec exits=[2,8,15] n=[3,6]").buffer == {"kind": "enough", "n": [3, 6]}
    assert method_settings("hispec").controller == {"kind": "fixed", "gamma": 2}, "the paper's"
    assert method_settings("kangaroo t=0.5").head == "adapter"
    pacer = method_settings("hispec_pacer buffer.t0=0.4 t0=0.6")
    assert pacer.buffer is not None and pacer.controller is not None
    assert (pacer.buffer["t0"], pacer.controller["t0"]) == (0.4, 0.6)


@pytest.mark.parametrize(
    ("arm", "said"),
    [
        ("hispec exits=[8,4]", "rising"), ("hispec n=0", "whole numbers"), ("hispec share=0", "share"),
        ("layerskip exits=[]", "rising"), ("sd exits=[4]", "draft with exits"), ("hispec head=mlp", "head"),
        ("adadecode t=1.5", "t in"), ("hispec buffer.x=1", "unknown key"), ("hispec nope=1", "unknown key"),
        ("layerskip n=4", "unknown key"),
    ],
)  # fmt: skip
def test_words_that_do_not_fit_are_refused(arm: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        method_settings(arm)


def test_which_exits_and_pre_verifiers_methods_need() -> None:
    methods = [method_settings(arm) for arm in ("layerskip", "hispec_pacer", "kangaroo exits=[3]", "sd", "ar")]
    exits = ExitSettings(layers=[2, 5, 9])
    assert [exits_of(method, exits.layers) for method in methods[:3]] == [[2], [2, 5], [3]]
    assert wanted_exits(methods, exits) == {"shared": [2, 5], "adapter": [3]}
    assert wanted_judges(methods, exits) == {("shared", 2, 5), ("shared", 5, None)}
    with pytest.raises(ConfigError, match="needs 2 exits"):
        exits_of(methods[1], [4])


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exits")
    tiny_folder(folder / "target", layers=4)
    return folder


def test_every_method_is_built_and_exact(home: Path) -> None:
    """Heads of two kinds, pre-verifiers on two exits, all from one experiment, in float32."""
    from pacer.command.app import load_settings
    from pacer.stages.build import build

    arms = ["layerskip exits=[1]", "hispec exits=[1,2] n=2", "hispec exits=[1,2,3] n=[2,3]", "kangaroo exits=[1]",
            "adadecode exits=[1,2] t=0.02", "hispec_pacer exits=[1,2]", "sd gamma=2"]  # fmt: skip
    settings = load_settings([*words(home, "hispec/demo"), "model.dtype=float32", "model.exits.layers=[1,2]"])
    methods = [method_settings(arm) for arm in arms]
    models = build(settings, methods)
    assert {kind for kind, _ in models.exits} == {"shared", "adapter"}
    assert set(models.judges) == {("preverifier", "shared", 1, 2), ("preverifier", "shared", 2, None)}
    asked = [Request(f"r{i}", [3 + i, 7, 9, 4], 9) for i in range(3)]
    plain = [r.ids for r in make_decoder(method_settings("ar"), models, SamplingSettings()).generate(asked)]
    for method in methods:
        decoder = make_decoder(method, models, SamplingSettings())
        assert [r.ids for r in decoder.generate(asked)] == plain, method.name
        assert [r.ids for r in decoder.generate(asked, slots=2)] == plain, method.name
        if method.name.startswith("hispec_pacer"):
            assert isinstance(decoder.proposer, Staged) and isinstance(decoder.proposer.rule, Preverified)
            lines = [line for r in decoder.generate(asked) for line in r.rounds if line.get("inner")]
            assert any(line["scores"] for line in lines), "the second pre-verifier was asked"


def test_evaluate_measures_them(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from pacer import evaluate

    evaluate.main(
        [*words(home, "hispec/demo"), "model.exits.layers=[1,2]", "benchmark.sets=[gsm8k]", "benchmark.score=false",
         "benchmark.arms=[ar,layerskip,hispec]", "benchmark.limit=2", "benchmark.batch_size=2", "model.block=4"]
    )  # fmt: skip
    out = capsys.readouterr().out
    results = json.loads(next(Path(line.strip()) for line in out.splitlines() if "results.json" in line).read_text())
    rows = {row["arm"]: row for row in results["rows"]}
    assert rows["ar"]["layer_tokens_per_token"] == 4 and rows["ar"]["exits"] == []
    assert rows["hispec"]["exits"][0]["acceptance_rate"] is not None
    assert rows["hispec"]["layer_tokens_per_token"] >= 4
