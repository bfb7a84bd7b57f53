"""Pictures of small results."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pytest
from matplotlib.text import Text

from pacer.errors import ConfigError
from pacer.reporting import plots, style
from tests.result_rows import AR, COMMAND, FULL, Row, make_row, no_rounds


def point(part: str = "target", n: int = 1, **values: Any) -> Row:
    return {
        "part": part,
        "n": n,
        "batch": 1,
        "context": 128,
        "median_ms": 20.0,
        "low_ms": 19.0,
        "high_ms": 22.0,
    } | values


PROFILE = {
    "points": [
        point(part, n, context=context, median_ms=cost * n, low_ms=0.9 * cost * n, high_ms=None)
        for context in (128, 512)
        for part, cost in [("target", 20.0), ("draft", 3.0), ("preverifier", 0.5)]
        for n in (1, 2, 4)
    ]
}


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> list[style.Canvas]:
    """Catches figures instead of saving them."""
    caught: list[style.Canvas] = []

    def save(page: style.Canvas, path: Path) -> list[Path]:
        page.figure.draw_without_rendering()
        caught.append(page)
        return []

    monkeypatch.setattr(style, "save", save)
    return caught


def texts(page: style.Canvas) -> list[str]:
    return [t.get_text() for t in page.figure.findobj(Text) if t.get_visible() and t.get_text()]


DRAW: list[Callable[[], list[Path]]] = [
    lambda: plots.speed_bars(FULL["rows"], Path("x"), command=COMMAND, overall=FULL["overall"]),
    lambda: plots.time_breakdown(FULL["rows"], Path("x"), command=COMMAND),
    lambda: plots.acceptance_by_index(FULL["rows"], Path("x"), command=COMMAND),
    lambda: plots.profile_curves(PROFILE, Path("x"), command=COMMAND),
]


@pytest.mark.parametrize("draw", DRAW)
def test_pictures_are_labelled(draw: Callable[[], list[Path]], pages: list[style.Canvas]) -> None:
    draw()
    (page,) = pages
    assert f"made by: {COMMAND}" in " ".join(texts(page)).replace("\n", " ")
    sizes = {t.get_fontsize() for t in page.figure.findobj(Text) if t.get_text()}
    assert min(sizes) >= 9
    axes = page.body.axes
    assert all(axis.get_xlabel() or not axis.get_subplotspec().is_last_row() for axis in axes)
    assert any("(" in axis.get_xlabel() + axis.get_ylabel() for axis in axes)  # a unit


def test_speed_bars_show_ratios_intervals_and_lossy(pages: list[style.Canvas]) -> None:
    DRAW[0]()
    first, _, mean = pages[0].body.axes
    assert [b.get_width() for b in first.patches] == [1.317] * 3  # AR is the dashed line
    assert [t.get_text() for t in first.get_yticklabels()] == ["pacer", "hispec (lossy)", "hf_generate"]
    assert first.get_title() == "gsm8k (samples)"
    segments = first.containers[1].lines[2][0].get_segments()
    assert segments[0][:, 0] == pytest.approx([1.201, 1.449])
    assert (mean.get_title(), [b.get_width() for b in mean.patches]) == ("geometric mean", [1.5] * 3)
    assert first.patches[1].get_hatch() and not first.patches[0].get_hatch()


def test_missing_values_are_named_not_drawn(pages: list[style.Canvas]) -> None:
    rows = [make_row("pacer", ratio_to_ar=None, ratio_low=None, ratio_high=None), no_rounds("hf_generate")]
    plots.speed_bars(rows, Path("x"), command=COMMAND)
    plots.time_breakdown(rows, Path("x"), command=COMMAND)
    assert all("not measured" in texts(page) for page in pages)
    assert len(pages[0].body.axes[0].patches) == 1


@pytest.mark.parametrize("short", [1, 4])
def test_long_names_of_neighbours_do_not_touch(pages: list[style.Canvas], short: int) -> None:
    long = "threshold signal=probability rule=product t=0.45 gamma_max=16 and more of the kind"
    rows = [make_row(arm) for arm in (long, f"{long} b", *[f"ar{i}" for i in range(short)])]
    plots.speed_bars(rows, Path("x"), command=COMMAND)
    plots.time_breakdown(rows, Path("x"), command=COMMAND)
    for page in pages:
        page.figure.draw_without_rendering()
        boxes = [label.get_window_extent() for label in page.body.axes[0].get_yticklabels()]
        assert all(above.y0 > below.y1 for above, below in itertools.pairwise(boxes))


def test_time_breakdown_stacks_to_one_hundred(pages: list[style.Canvas]) -> None:
    plots.time_breakdown([make_row("pacer")], Path("x"), command=COMMAND)
    bars = pages[0].body.axes[0].patches
    assert [b.get_width() for b in bars] == pytest.approx([25, 5, 66, 4])
    assert [b.get_x() for b in bars] == pytest.approx([0, 25, 30, 96])


def test_acceptance_shows_drafts_tau_and_counts(pages: list[style.Canvas]) -> None:
    plots.acceptance_by_index([AR, make_row("pacer")], Path("x"), command=COMMAND)
    top, middle, bottom = pages[0].body.axes
    assert top.lines[0].get_ydata() == pytest.approx([70, 60])
    assert middle.lines[0].get_ydata() == pytest.approx([70, 42])
    assert bottom.lines[0].get_ydata() == pytest.approx([100, 100])
    # Wilson at 70 of 100: (0.6042, 0.7810).
    assert top.containers[0].lines[2][0].get_segments()[0][:, 1] == pytest.approx([60.42, 78.10], abs=0.01)
    assert "pacer: drafts 3.2, τ 2.05" in texts(pages[0])


def test_acceptance_keeps_the_longest_drafts(pages: list[style.Canvas]) -> None:
    rows = [
        make_row(f"sd gamma={g}", survival=[0.5] * g, survival_counts=[9] * g, conditional_acceptance=[0.5] * g,
                 conditional_counts=[9] * g)
        for g in range(1, 9)
    ]  # fmt: skip
    plots.acceptance_by_index(rows, Path("x"), command=COMMAND)
    plots.acceptance_by_index(rows, Path("x"), command=COMMAND, arms=["sd gamma=2"])
    named = [[t.split(":")[0] for t in texts(page) if t.startswith("sd")] for page in pages]
    assert named == [[f"sd gamma={g}" for g in (5, 6, 7, 8)], ["sd gamma=2"]]


def test_profile_scales_and_panels(pages: list[style.Canvas]) -> None:
    plots.profile_curves(PROFILE, Path("x"), command=COMMAND)
    plots.profile_curves({"points": [point(n=n) for n in (1, 2)]}, Path("x"), command=COMMAND)
    wide, narrow = (page.body.axes for page in pages)
    assert [axis.get_title() for axis in wide] == ["batch 1, context 128 tokens", "batch 1, context 512 tokens"]
    assert wide[0].get_yscale() == "log" and "log scale" in wide[0].get_ylabel()
    assert narrow[0].get_yscale() == "linear" and narrow[0].get_ylim()[0] == 0
    assert wide[0].lines[0].get_ydata() == pytest.approx([20, 40, 80])


def test_one_by_three_and_one_by_one_are_saved(tmp_path: Path) -> None:
    three = [make_row("pacer", name) for name in ("gsm8k", "humaneval", "xsum")]
    saved = plots.speed_bars(three, tmp_path / "new" / "speed.png", command=COMMAND)
    assert saved == [tmp_path / "new" / "speed.png", tmp_path / "new" / "speed.svg"]
    single = make_row(
        "pacer", survival=[0.0], survival_counts=[1], conditional_acceptance=[0.0], conditional_counts=[1]
    )
    saved += plots.time_breakdown([single], tmp_path / "time", command=COMMAND)
    saved += plots.acceptance_by_index([single], tmp_path / "acceptance", command=COMMAND)
    saved += plots.profile_curves({"points": [point()]}, tmp_path / "profile", command=COMMAND)
    saved += plots.speed_bars([AR], tmp_path / "ar", command=COMMAND)
    for path in saved:
        head = path.read_bytes()[:100]
        assert head.startswith(b"\x89PNG" if path.suffix == ".png" else b"<?xml")


def test_same_input_same_bytes(tmp_path: Path) -> None:
    first, second = (
        plots.speed_bars([make_row("pacer")], tmp_path / name / "speed.png", command=COMMAND) for name in "ab"
    )
    assert [p.read_bytes() for p in first] == [p.read_bytes() for p in second]


def test_nothing_to_plot_is_an_error(tmp_path: Path) -> None:
    for draw in (plots.speed_bars, plots.time_breakdown, plots.acceptance_by_index):
        with pytest.raises(ConfigError, match="nothing to plot"):
            draw([], tmp_path / "x", command=COMMAND)
    with pytest.raises(ConfigError, match="nothing to plot"):
        plots.acceptance_by_index([AR], tmp_path / "x", command=COMMAND)
    with pytest.raises(ConfigError, match="nothing to plot"):
        plots.profile_curves({"points": []}, tmp_path / "x", command=COMMAND)


def test_plots_leave_matplotlib_alone(tmp_path: Path) -> None:
    before = dict(mpl.rcParams)
    plots.time_breakdown([make_row("pacer")], tmp_path / "time", command=COMMAND)
    assert dict(mpl.rcParams) == before
    code = (
        "import sys; from pathlib import Path; import pacer.reporting.plots as p;"
        "p.profile_curves({'points': [dict(part='target', n=1, batch=1, context=1, median_ms=1.0)]},"
        f" Path({str(tmp_path / 'headless')!r}), command='x');"
        "sys.exit('matplotlib.pyplot' in sys.modules)"
    )
    environment = {name: value for name, value in os.environ.items() if name not in ("DISPLAY", "MPLBACKEND")}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, timeout=120)
    assert (tmp_path / "headless.png").exists()
