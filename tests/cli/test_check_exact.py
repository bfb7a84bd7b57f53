"""The gate of exactness: it sees a difference, knows a near-tie, and goes on where it was stopped."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pacer.assemble import Models
from pacer.decoding.request import Request
from pacer.methods.arms import method_settings
from pacer.models.stack import Stack
from pacer.settings import SamplingSettings
from pacer.work.stopping import Stopped
from scripts import check_exact
from tests.cli.test_verbs import words
from tests.folders import tiny_folder, tiny_tokenizer
from tests.tiny import tiny_model

ASKED = [Request("one", [5, 6], 6), Request("two", [7, 8], 6)]
WANTED = {"one": [1, 2, 3, 4, 5, 6], "two": [9, 8, 7, 6, 5, 4]}


def compared(outputs: dict[str, list[int]], gap: float, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Of a method that writes these texts, whatever prefix it goes on from, with this margin everywhere."""
    monkeypatch.setattr(check_exact, "margin", lambda *_: gap)

    def run(requests: Sequence[Request]) -> list[list[int]]:
        return [outputs[r.id][len(r.prompt_ids) - 2 :] for r in requests]

    models: Any = None  # the margin above asks no model
    return check_exact.compare("x", run, ASKED, WANTED, models)


def test_equal_texts_are_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compared(WANTED, 0.0, monkeypatch) == {"tokens": 12, "near_ties": [], "differences": []}


@pytest.mark.parametrize(("gap", "kind"), [(1e-5, "near_ties"), (1e-3, "differences"), (float("inf"), "differences")])
def test_a_difference_is_a_near_tie_only_below_the_margin(
    gap: float, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L11."""
    found = compared({**WANTED, "two": [9, 8, 0, 6, 5, 4]}, gap, monkeypatch)
    (event,) = found[kind]
    assert (event["prompt"], event["reference"], event["got"], event["position"]) == ("two", 7, 0, 4)
    assert sum(len(found[name]) for name in ("near_ties", "differences")) == 1
    assert found["tokens"] == (15 if kind == "near_ties" else 12), "after a near-tie the rest is compared too"


def test_a_text_that_goes_on_after_the_end_is_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    for other in (WANTED["one"][:-1], [*WANTED["one"], 3]):
        found = compared({**WANTED, "one": other}, 1e-9, monkeypatch)
        assert len(found["differences"]) == (len(other) > 6) and len(found["near_ties"]) == (len(other) < 6)


def test_it_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_exact, "METHODS", ("ar", "prompt_lookup"))
    monkeypatch.setattr(check_exact, "provenance", lambda: {"commit": "abc"})
    models = Models(Stack(tiny_model()), tiny_tokenizer(), (), tmp_path)
    stops = iter([None] * 3)

    def stop() -> None:
        if next(stops, "now"):
            raise Stopped("SIGTERM")

    path = tmp_path / "checked.json"
    monkeypatch.setattr(check_exact, "check_stop", stop)
    with pytest.raises(Stopped):
        check_exact.check(models, ASKED, SamplingSettings(), path)
    before = path.read_text()
    monkeypatch.setattr(check_exact, "check_stop", lambda: None)
    rows = check_exact.check(models, ASKED, SamplingSettings(), path)
    assert [(row["method"], row["batch"]) for row in rows] == [
        (method, batch) for method in ("ar", "prompt_lookup") for batch in (1, 4, 16)
    ]
    assert not any(row["differences"] for row in rows) and len(path.read_text()) > len(before)
    again = check_exact.begun(path, "abc")
    assert len(again["rows"]) == 6 and len(again["reference"]) == 2
    for other in ("abd", "abc+changes", None):
        assert not check_exact.begun(path, other)["rows"]


def test_the_whole_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_folder(tmp_path / "target", layers=4)
    monkeypatch.setattr(check_exact, "METHODS", ("ar", "sd gamma=4", "pacer", "specdecpp", "feature gamma=3"))
    done = SimpleNamespace(run=lambda *_, **__: SimpleNamespace(returncode=0))
    monkeypatch.setattr(check_exact, "subprocess", done)  # the chi-square tests are in this suite
    command = words(tmp_path, "hispec/demo", "benchmark.sets=[gsm8k]", "benchmark.limit=1")
    assert check_exact.main(command) == 0
    assert '"differences": 0' in capsys.readouterr().out.splitlines()[-1]


def test_every_lossless_method_is_in_it() -> None:
    listed = {name.split()[0] for name in check_exact.METHODS}
    known = {path.stem for path in (Path(check_exact.__file__).parents[1] / "conf" / "method").glob("*.yaml")}
    lossless = {name for name in known if method_settings(name).guarantee == "exact"}
    assert lossless - listed == {"sd_full"}, "the same draft with another head"
