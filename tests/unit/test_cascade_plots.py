"""Pictures of the cost model of exits: there, labelled, the same bytes again; nothing to draw is said."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pacer.errors import ConfigError
from pacer.evaluation.cascade import costs, search, theory
from pacer.reporting import cascade_plots as plots
from tests.cascades import coins

COMMAND = "python -m scripts.sweep_layers +experiment=exits/demo"
Draw = Callable[[Path], list[Path]]


def agreement_rows() -> list[dict[str, Any]]:
    took = {"shared": (0.0, 0), "norm": (None, 400_000), "linear": (9.8, 1_200_000), "other": (3.0, 10_000)}
    return [
        {"kind": kind, "layer": layer, "agreement": 0.1 + 0.03 * layer + 0.05 * i, "expected_accepted": 0.2 * layer + i,
         "window": 16, "minutes": minutes, "tokens": tokens}
        for i, (kind, (minutes, tokens)) in enumerate(took.items())
        for layer in (2, 4, 8)
        if (kind, layer) != ("other", 8)
    ]  # fmt: skip


@pytest.fixture(scope="module")
def drawings() -> dict[str, tuple[list[str], Draw]]:
    """Picture → texts in it, and how it is drawn."""
    table, prices = coins((0.5, 0.9, 0.7), 4, 150), costs.synthetic(12, (1, 2, 3), token=0.02)
    grid = search.layer_grid(table, prices)
    curves = search.buffer_curves(table, prices, (1, 2), drafts=(1, 2))
    measured = [{"n_d": 2, "n_i": 4, "ratio_to_ar": 1.1}]
    points = [theory.PUBLISHED, theory.Point("mine", 0.8, 0.7, 0.6)]
    maps = [theory.where_it_pays((1, 2), prices, name, points, steps=5) for name in ("one", "two")]
    compared = [
        {"arm": arm, "benchmark": b, "tau_predicted": 1.5 + x, "tau_measured": 1.6 + x, "ratio_predicted": 1.0 + x,
         "ratio_measured": 0.95 + x}
        for x, (arm, b) in enumerate(itertools.product(("layerskip exits=[2] gamma=3", "hispec n=4"), ("a", "b")))
    ]  # fmt: skip
    return {
        "agreement": (["exit after so many layers", "linear: 10 min, 1.2 M tokens", "norm: 0.4 M tokens",
                       "shared: untrained"],
                      lambda p: plots.agreement_bars(agreement_rows(), p, command=COMMAND)),
        "layers": (["draft exit L_d (layers)", "intermediate verifier L_i (layers)", "diagonal"],
                   lambda p: plots.layer_map(grid, p, command=COMMAND)),
        "buffers": (["speed / speed of AR (×)", "N_d = 2", "published: Llama3-8B, N_d = 2", "measured"],
                    lambda p: plots.buffer_curve(curves, p, command=COMMAND, measured=measured)),
        "pays": (["draft token accepted by L_i (%)", "buffered token accepted by the model (%)", "published"],
                 lambda p: plots.pays_map(maps, p, command=COMMAND)),
        "checked": (["measured: emitted tokens per target pass", "modelled: speed / speed of AR (×)", "hispec n=4"],
                    lambda p: plots.checked(compared, p, command=COMMAND)),
    }  # fmt: skip


@pytest.mark.parametrize("name", ["agreement", "layers", "buffers", "pays", "checked"])
def test_pictures(
    drawings: dict[str, tuple[list[str], Draw]], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts, draw = drawings[name]
    monkeypatch.setitem(plots.style._STYLE, "svg.fonttype", "none")  # texts as texts
    png, svg = draw(tmp_path / "one")
    drawn = svg.read_text()
    assert png.stat().st_size > 5000 and all(text in drawn for text in texts)
    assert "made by: python -m scripts.sweep_layers" in drawn
    assert draw(tmp_path / "two")[0].read_bytes() == png.read_bytes()


def test_one_pair_and_one_speed_still_plot(tmp_path: Path) -> None:
    """A grid of equal values, a map without a border of 1, a curve of one point."""
    table, prices = coins((1.0, 1.0), 2, 40), costs.synthetic(12, (1, 2))
    grid = [row for row in search.layer_grid(table, prices) if row["verifier"] is None][:1]
    assert plots.layer_map(grid, tmp_path / "grid", command=COMMAND)[0].is_file()
    flat = {
        **theory.where_it_pays((1, 2), prices, "flat", steps=2),
        "over_same": np.ones((2, 2)).tolist(),
        "points": [],
    }
    assert plots.pays_map([flat], tmp_path / "map", command=COMMAND)[0].is_file()
    curve = search.buffer_curves(table, prices, (1, 2), drafts=(2,))[:1]
    assert plots.buffer_curve(curve, tmp_path / "curve", command=COMMAND)[0].is_file()


def test_nothing_to_draw(tmp_path: Path) -> None:
    for draw in (plots.agreement_bars, plots.layer_map, plots.buffer_curve, plots.pays_map, plots.checked):
        with pytest.raises(ConfigError, match="nothing to plot"):
            draw([], tmp_path / "nothing", command="")
    assert not list(tmp_path.iterdir())
