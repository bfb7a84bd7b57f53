"""The ablation of the pre-verifier, one step a variant: a row each, kept, and what they are made of."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pacer.choices import FEATURES
from pacer.models.preverifier import check_settings
from pacer.settings import PreverifierSettings
from scripts import ablate_preverifier as ablate
from tests.cli.test_verbs import words
from tests.folders import tiny_folder

CHOSEN = ("as set", "… cumulative", "conditional labels", "sees the draft alone", "starts: rounds", "half the texts")


def test_variants_are_settings_that_exist() -> None:
    found = ablate.variants(192)
    assert len({variant.name for variant in found}) == len(found) == 22
    for variant in found:
        check_settings(PreverifierSettings(**variant.preverifier))
    assert {str(variant.preverifier) for variant in found} > {str({"width": 192, "features": list(FEATURES)})}


def test_every_variant_leaves_a_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_folder(tmp_path / "target")
    chosen = [variant for variant in ablate.variants(16) if variant.name in CHOSEN]
    monkeypatch.setattr(ablate, "variants", lambda width: chosen)
    command = words(tmp_path, "pacer/demo", "preverifier.width=16", "corpus.limit=12", "profile.contexts=[16]")
    command = [word for word in command if not word.startswith("corpus.parts")]
    command += ["corpus.parts={draft: 0.4, preverifier: 0.4, tuning: 0.2}"]
    assert ablate.main(command) == 0
    folder = Path(capsys.readouterr().out.strip().splitlines()[-1].removeprefix("saved in "))
    found = json.loads((folder / "ablation.json").read_text())
    rows = {row["variant"]: row for row in found["rows"]}
    alone = rows.pop("no layer: the draft's probabilities")
    assert alone["call"] == 0 and alone["speed"] == alone["speed_free"] and 0 <= alone["ece"] <= 1
    assert alone["best_fixed"] == rows["as set"]["best_fixed"] and alone["oracle"] == rows["as set"]["oracle"]
    assert tuple(rows) == CHOSEN
    for row in rows.values():
        assert 0 <= row["auc"] <= 1 and 0 <= row["ece"] <= 1 and row["call"] > 0 and row["steps"] == 1
        assert row["speed_free"] >= row["speed"] and row["oracle"] >= row["best_fixed"] > 0
        assert row["best_fixed"] == rows["as set"]["best_fixed"], "one set of held-out rounds"
        assert row["oracle"] >= row["speed_free"] - 1e-9
    assert rows["conditional labels"]["rule"]["rule"] == "product"
    assert rows["half the texts"]["texts"] < rows["as set"]["texts"]
    assert rows["sees the draft alone"]["settings"]["attention"] == "block"
    assert (folder / "ablation.md").read_text().count("\n") == len(CHOSEN) + 3
    monkeypatch.setattr(ablate, "train_preverifier", None)
    assert ablate.main(command) == 0, "finished variants are kept"
    assert json.loads((folder / "ablation.json").read_text()) == found
