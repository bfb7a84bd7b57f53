"""Pictures of a replay: there, labelled, the same bytes again; nothing to draw is said."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pacer.errors import ConfigError
from pacer.evaluation.replay import costs, search
from pacer.evaluation.replay.choice import halved
from pacer.evaluation.replay.results import results, to_text
from pacer.reporting import evidence_plots as plots
from pacer.settings import CostSettings
from tests.replays import planted

POINT = {"arm": "sd gamma=2", "benchmark": "gsm8k", "predicted": 20.0, "measured": 21.0}


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    table, prices = planted(starts=120), costs.from_settings(CostSettings())
    return results(table, search.families(table, prices, halved(table)), prices, [0.1, 0.4], [0.0, 0.5])


def drawings(result: dict[str, Any]) -> list[tuple[str, Callable[[Path], list[Path]]]]:
    command = "python -m pacer.replay +experiment=replay/demo"
    return [
        ("accepted tokens of a round", lambda p: plots.accepted_lengths(result["runs"], p, command=command)),
        ("accepted (%)", lambda p: plots.calibration(result["signals"], p, command=command)),
        ("share of the gap recovered (%)", lambda p: plots.gap_recovered(result["rows"], p, command=command)),
        ("c: draft pass / target pass", lambda p: plots.gain(result["over_c"], p, command=command, axis="c")),
        ("cost of each further verified", lambda p: plots.gain(result["over_v"], p, command=command, axis="v")),
        ("measured (decoded tokens/s)", lambda p: plots.predicted_and_measured([POINT], p, command=command)),
    ]  # fmt: skip


@pytest.mark.parametrize("number", range(6))
def test_pictures(result: dict[str, Any], number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    label, draw = drawings(result)[number]
    monkeypatch.setitem(plots.style._STYLE, "svg.fonttype", "none")  # texts as texts
    png, svg = draw(tmp_path / "one")
    assert png.stat().st_size > 5000 and label in svg.read_text()
    again = draw(tmp_path / "two")
    assert again[0].read_bytes() == png.read_bytes()


def test_nothing_to_draw() -> None:
    nothing = Path("nowhere")
    for draw in (
        lambda: plots.accepted_lengths({"rounds": 0}, nothing, command=""),
        lambda: plots.calibration([], nothing, command=""),
        lambda: plots.gap_recovered([], nothing, command=""),
        lambda: plots.gain([], nothing, command="", axis="c"),
        lambda: plots.predicted_and_measured([], nothing, command=""),
    ):
        with pytest.raises(ConfigError, match="nothing to plot"):
            draw()
    assert not nothing.exists()


def test_the_printed_table_has_every_rule_and_signal(result: dict[str, Any]) -> None:
    text = to_text(result)
    for row in result["rows"]:
        assert f"{row['ratio_to_ar']:.3f}" in text and row["arm"] in text
    assert "PACER, lazy" in text and "score" in text
    shares = {row["family"]: row["gap_share"] for row in result["rows"]}
    assert shares["fixed"] == 0 and shares["oracle"] == 1 and 0 < shares["probability"] <= 1
    for curve in (result["over_c"], result["over_v"]):
        assert all(point["ratio_to_ar"] >= 1 and point["over_fixed"] >= 1 - 1e-9 for point in curve if
                   point["family"] in ("fixed", "oracle"))  # fmt: skip
        best = {point["x"]: point["over_fixed"] for point in curve if point["family"] == "oracle"}
        assert all(point["over_fixed"] <= best[point["x"]] + 1e-9 for point in curve)
