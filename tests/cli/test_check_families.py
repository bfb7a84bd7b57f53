"""Every file of conf/model: it composes, its likeness exists, and the whole chain works on it."""

from __future__ import annotations

import json

import pytest

from pacer.command.app import load_settings
from pacer.models.sources import HUB_ID
from pacer.resources import resource
from scripts import check_families
from tests.twins import OTHERS, TWINS, twin_of

CONFIGS = check_families.configs()
FAST = ("qwen25_05b_7b", "opt_7b")  # unequal padding and a draft of its own; trained exits and a draft of target layers


@pytest.mark.parametrize("config", [name for name in CONFIGS if name not in OTHERS])
def test_a_hub_model_composes(config: str) -> None:
    """By the experiment that is for it: a pair, a model tuned to exit early, or one whose exits are trained."""
    kind = "pacer"
    if twin_of(config) in ("qwen3", "opt") or config.startswith("layerskip"):
        kind = "hispec" if config.startswith("layerskip") else "exits"
    settings = load_settings([f"+experiment={kind}/hub", f"model={config}"])
    assert settings.model.name == config.replace("_", "-") and settings.name == f"{kind}-{settings.model.name}"
    for id in (settings.model.target.id, settings.model.draft.source):
        assert id is None or (HUB_ID.fullmatch(id) and "/" in id)
    assert settings.corpus.file is None, "another model's texts are no corpus"
    assert (settings.model.draft.kind == "model") == (kind == "pacer") == (not settings.model.exits.layers)
    assert (settings.model.exits.kind == "adapter") == (kind == "exits")


def test_every_hub_model_and_family_has_a_likeness() -> None:
    files = {path.stem for path in (resource("conf") / "model").glob("*.yaml") if not path.stem.startswith("smollm2")}
    assert set(CONFIGS) == (files - {"local"}) | set(OTHERS)
    assert {twin_of(name) for name in CONFIGS} == set(TWINS)


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(name, marks=[] if name in FAST else pytest.mark.long)
        for name in (next(c for c in [*FAST, *CONFIGS] if twin_of(c) == twin) for twin in TWINS)
    ],
)
def test_the_whole_chain(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert check_families.main([config]) == 0
    *_, table, last = capsys.readouterr().out.splitlines()
    (row,) = json.loads(last)["rows"]
    assert table.startswith(config) and table.count(" yes") == len(check_families.COLUMNS)
    assert row["difference"] < 1e-4
    assert all(0 < row[f"{column}_accepted"] < 1 for column in check_families.ARMS), "drafts are right now and then"


def test_a_failure_is_seen(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that is refused is a row of no, its reason, and exit code 1; an unknown one is an error."""
    monkeypatch.setitem(TWINS["opt"].config, "do_layer_norm_before", False)
    assert check_families.main(["opt_7b"]) == 1
    out = capsys.readouterr().out
    assert out.count(" NO") == len(check_families.COLUMNS) and "do_layer_norm_before=False" in out
    assert json.loads(out.splitlines()[-1])["ok"] is False
    assert check_families.main(["opt_8b"]) == 2
    assert "opt_7b" in capsys.readouterr().err
