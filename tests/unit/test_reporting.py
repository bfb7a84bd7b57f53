"""Tables and pictures of small results."""

from __future__ import annotations

import csv
import io
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
from pacer.evaluation.metrics import evaluate_trace
from pacer.reporting import plots, style, tables

COMMAND = "python -m pacer.evaluate +experiment=pacer/smollm2"
MACHINE = "2 CPU cores, bf16"
Row = dict[str, Any]


def make_row(arm: str, benchmark: str = "gsm8k", **values: Any) -> Row:
    row: Row = {
        "arm": arm, "benchmark": benchmark, "sample": False, "guarantee": "exact", "prompts": 8, "failed": 0,
        "unfinished": 0, "tokens_per_second": 40.04, "decode_tokens_per_second": 44.0, "prefill_seconds": 0.1,
        "median_tokens_per_second": 39.0, "ratio_to_ar": 1.317, "ratio_low": 1.201, "ratio_high": 1.449,
        "tokens_per_verify": 2.054, "mean_drafted": 3.25, "accepted_per_verify": 1.05, "acceptance_rate": 0.324,
        "conditional_acceptance": [0.7, 0.6], "conditional_counts": [100, 70], "survival": [0.7, 0.42],
        "survival_counts": [100, 100], "stops": {"fixed": 100}, "finishes": {"length": 8}, "exact": True,
        "exact_detail": "8/8 identical", "score": None,
        "share": {"draft": 0.25, "preverify": 0.05, "intermediate": 0.0, "target": 0.66, "rest": 0.04},
    }  # fmt: skip
    return row | values


def no_rounds(arm: str, benchmark: str = "gsm8k") -> Row:
    share = dict.fromkeys(["draft", "preverify", "intermediate", "target", "rest"])
    missing: Row = dict.fromkeys(["tokens_per_verify", "mean_drafted", "accepted_per_verify", "acceptance_rate"])
    lists: Row = {name: [] for name in ("conditional_acceptance", "conditional_counts", "survival", "survival_counts")}
    return make_row(arm, benchmark, share=share, **missing, **lists)


def make_results(rows: list[Row]) -> Row:
    overall = [
        {"arm": arm, "ratio_to_ar": 1.5, "ratio_low": 1.25, "ratio_high": 1.75} for arm in {r["arm"]: 0 for r in rows}
    ]
    definitions = {"tokens_per_second": "New tokens over wall seconds, prefill inside."}
    return {"rows": rows, "overall": overall, "definitions": definitions, "reference": "ar", "level": 0.95}


NO_DRAFT: Row = {name: [] for name in ("conditional_acceptance", "conditional_counts", "survival", "survival_counts")}
NO_DRAFT |= {"tokens_per_verify": 1.0, "mean_drafted": 0.0, "acceptance_rate": None}
AR = make_row("ar", ratio_to_ar=1.0, ratio_low=1.0, ratio_high=1.0, **NO_DRAFT)
FULL = make_results(
    [
        AR | {"sample": True},
        make_row("pacer", sample=True, score={"strict": 0.25, "flexible": 0.3125, "n": 8}),
        make_row("hispec", sample=True, guarantee="lossy", exact=False, exact_detail="7/8 identical; p3 differs at 41"),
        no_rounds("hf_generate") | {"sample": True, "failed": 2},
        AR | {"benchmark": "xsum"},
        make_row("pacer", "xsum", exact=None, ratio_low=None, ratio_high=None),
        make_row("hispec", "xsum", guarantee="lossy", score={"rouge1": 0.2}),
        no_rounds("hf_generate", "xsum") | {"unfinished": 3},
    ]
)


def cells(text: str, method: str) -> list[str]:
    """Cells of the first line of a Markdown table that starts with the method."""
    line = next(line for line in text.splitlines() if line.startswith(f"| {method} |"))
    return [cell.strip() for cell in line.strip("|").split(" | ")]


def test_markdown_row() -> None:
    text = tables.to_markdown(FULL, command=COMMAND, machine=MACHINE)
    assert cells(text, "method") == [
        "method", "speed (tokens/s)", "ratio to AR (× [95 % interval])", "τ (tok/pass)", "mean draft (tokens)",
        "accepted (%)", "draft (% time)", "pre-verify (% time)", "target (% time)", "rest (% time)", "exact",
    ]  # fmt: skip
    assert cells(text, "pacer") == [
        "pacer", "40.0", "1.32 [1.20, 1.45]", "2.05", "3.25", "32", "25", "5", "66", "4", "yes",
    ]  # fmt: skip
    assert cells(text, "hf_generate") == ["hf_generate", "40.0", "1.32 [1.20, 1.45]", *["–"] * 7, "yes"]
    assert cells(text, "ar")[-1] == "ref."
    assert cells(text, "hispec (lossy)")[-1] == "no"


def test_markdown_tables_have_equal_rows_and_escape_bars() -> None:
    text = tables.to_markdown(make_results([make_row("a|b")]), command=COMMAND, machine=MACHINE)
    widths = {line.replace("\\|", "").count("|") for line in text.splitlines() if line.startswith("|")}
    assert widths == {12}


@pytest.mark.parametrize("render", [tables.to_markdown, tables.to_text])
def test_notes_and_labels(render: Callable[..., str]) -> None:
    text = render(FULL, command=COMMAND, machine=MACHINE, notes=["fp32 reference cached."])
    for expected in (
        "gsm8k (samples): 8 prompts", "xsum: 8 prompts", "geometric mean over the 2 benchmarks", "prefill inside",
        "hf_generate on gsm8k: 2", "hf_generate on xsum: 3", "hispec (lossy) on gsm8k: 7/8 identical; p3 differs at 41",
        COMMAND, MACHINE, "fp32 reference cached.", "1.50 [1.25, 1.75]", "0.312", "written for this project",
    ):  # fmt: skip
        assert expected in text
    named = [line for line in text.splitlines() if line.lstrip("| ").startswith("hispec")]
    assert len(named) == 6  # two benchmarks, the mean, the scores, what is lost on each
    assert all("(lossy)" in line for line in named)


def test_texts_that_were_cut_are_counted_beside_their_scores() -> None:
    """A demo of 64 tokens scores 0 on GSM8K: a stranger must see why."""
    rows = [
        AR | {"score": {"strict": 0.0}, "finishes": {"length": 6, "eos": 2}},
        AR | {"benchmark": "xsum", "score": {"rouge1": 0.2}, "finishes": {"eos": 8}},
        AR | {"benchmark": "mine", "finishes": {"length": 8}},  # not scored
        make_row("pacer", score={"strict": 0.0}),
    ]
    said = "Scores: 6 of 16 texts of ar were cut by length (benchmark.max_new_tokens): "
    assert said + "an answer that comes later is missed." in tables.notes_of(make_results(rows))
    whole = [AR | {"score": {"strict": 0.5}, "finishes": {"eos": 8}}, make_row("pacer", score={"strict": 0.5})]
    assert not any("cut by length" in note for note in tables.notes_of(make_results(whole)))


def test_what_a_lossy_method_loses_stands_beside_what_ar_has() -> None:
    """The share of AR's texts and tokens that is left, and scores beside AR's; lossless methods are not in it."""
    lost = {"same_requests": 0.25, "same_tokens": 0.625}
    rows = [
        AR | {"score": {"strict": 0.5}}, make_row("pacer", score={"strict": 0.5}),
        make_row("sprinter", guarantee="lossy", exact=False, agreement=lost, score={"strict": 0.375}),
    ]  # fmt: skip
    text = tables.to_markdown(make_results(rows), command=COMMAND, machine=MACHINE)
    block = text[text.index("**gsm8k: loss**") :].split("\n\n")[1].splitlines()
    assert [[cell.strip() for cell in line.strip("|").split(" | ")] for line in (block[0], *block[2:])] == [
        ["method", "same texts (%)", "same tokens (%)", "strict (ar's)"],
        ["sprinter (lossy)", "25", "62", "0.375 (0.500)"],
    ]
    (row,) = [line for line in csv.DictReader(io.StringIO(tables.to_csv(make_results(rows[2:]))))]
    assert (row["same_requests"], row["same_tokens"], row["guarantee"]) == ("0.25", "0.625", "lossy")
    assert "loss**" not in tables.to_markdown(make_results(rows[:2]), command=COMMAND, machine=MACHINE)


def test_text_fits_a_terminal() -> None:
    rows = [
        make_row(
            arm, "humaneval", sample=True, share={"draft": 0.3, "intermediate": 0.1, "target": 0.6}, guarantee=kind
        )
        for arm, kind in [("sd gamma=8", "exact"), ("hispec", "lossy")]
    ]
    text = tables.to_text(make_results(rows), command=COMMAND, machine=MACHINE)
    assert max(len(line) for line in text.splitlines()) <= 120
    assert "interm." in text
    head = text.splitlines()[2]
    assert head.index("τ") < head.index("mean draft") < head.index("accepted")  # never acceptance alone
    assert "interm." not in tables.to_text(FULL, command=COMMAND, machine=MACHINE)


def test_text_without_anything() -> None:
    assert "Machine" in tables.to_text({"rows": [], "overall": []}, command=COMMAND, machine=MACHINE)


def test_csv_is_stable_and_complete() -> None:
    text = tables.to_csv(FULL)
    read = list(csv.DictReader(io.StringIO(text)))
    assert tuple(read[0]) == tables.CSV_COLUMNS
    assert len(read) == 8
    assert float(read[1]["tokens_per_second"]) == 40.04  # full precision
    assert (read[1]["share_preverify"], read[1]["exact"], read[1]["sample"]) == ("0.05", "true", "true")
    assert read[1]["survival"] == "[0.7, 0.42]"
    assert (read[3]["tokens_per_verify"], read[3]["share_draft"], read[3]["survival"]) == ("", "", "")
    assert read[5]["exact"] == ""
    reordered = make_results([dict(reversed(row.items())) for row in FULL["rows"]])
    assert tables.to_csv(reordered) == text


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


def test_results_of_a_trace_can_be_reported(tmp_path: Path) -> None:
    names = {"arm": "pacer", "benchmark": "gsm8k", "request": "p1"}
    seconds = {"draft": 0.1, "preverify": 0.0, "intermediate": 0.0, "target": 0.3, "rest": 0.1}
    lines = [
        {"kind": "round", "round": 1, "committed": 9, "drafted": [1, 2], "accepted": [1], "emitted": [1, 3],
         "stop": "fixed", "time": seconds} | names,
        {"kind": "request", "new_tokens": 2, "finish": "length", "seconds": 0.5, "ids": [1, 3]} | names,
    ]  # fmt: skip
    results = evaluate_trace(lines)
    row = results["rows"][0]
    assert set(make_row("pacer")) <= set(row)  # the rows of these tests are rows of the real thing
    assert set(tables.CSV_COLUMNS) - {f"share_{part}" for part in row["share"]} - set(row["agreement"]) <= set(row)
    text = tables.to_text(results, command=COMMAND, machine=MACHINE)
    assert next(line for line in text.splitlines() if line.startswith("pacer")).split() == [
        "pacer", "4.0", "–", "2.00", "2.00", "50", "20", "0", "60", "20", "–",
    ]  # fmt: skip
    assert "4.0" in tables.to_csv(results)
    assert len(plots.acceptance_by_index(results["rows"], tmp_path / "a", command=COMMAND)) == 2
