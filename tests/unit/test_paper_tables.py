"""The papers' tables: gathering, what is published, choice of the run to show, and every form of the output."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from pacer.choices import TABLES as NAMES
from pacer.command.app import load_settings
from pacer.errors import ConfigError
from pacer.evaluation.cascade import theory
from pacer.reporting import cascade_plots
from pacer.reporting.gather import Run, finished, read_run
from pacer.reporting.paper import published as figures
from pacer.reporting.paper import render
from pacer.reporting.paper.rows import Found, Table, averaged, best, command_of, highest, in_file, of_arm, side_by_side
from pacer.reporting.paper.tables import TABLES
from pacer.resources import resource

ROOT = Path(__file__).resolve().parents[2]
COMMAND = "python -m pacer.report +experiment=table/x"
MADE = {
    "date": "2026-01-02T00:00:00+00:00", "commit": "0123456789", "command": ["scripts/bench_pacer.py", "smollm2"],
    "machine": {"processor": "A & B", "cores": 2, "devices": []},
}  # fmt: skip


def row(arm: str, benchmark: str = "gsm8k", **values: Any) -> dict[str, Any]:
    return {
        "arm": arm, "benchmark": benchmark, "sample": False, "prompts": 8, "tokens_per_second": 30.0,
        "ratio_to_ar": 1.5, "ratio_low": 1.4, "ratio_high": 1.6, "tokens_per_verify": 2.0, "acceptance_rate": 0.5,
        "share": {"preverify": 0.02, "target": 0.7, "draft": 0.28}, "totals": {"target_passes": 100},
    } | values  # fmt: skip


def run(rows: Sequence[dict[str, Any]], name: str = "one", pair: str = "smollm2", **files: Any) -> Run:
    overall = [{key: r[key] for key in ("arm", "ratio_to_ar", "ratio_low", "ratio_high")} for r in rows]
    settings = {"model": {"name": pair, "dtype": "float32", "target": {"id": f"/models/{pair}"}}, "name": pair,
                "benchmark": {"max_new_tokens": 64}, "sampling": {"temperature": 0.0}}  # fmt: skip
    results = {"rows": list(rows), "overall": overall}
    return Run(Path("runs/evaluate") / name, {"results": results, **files}, MADE, settings)


# ---- what is published


def test_published_figures_were_copied_rightly() -> None:
    """The table's own summary in the paper, and the places of this project that hold a part of it."""
    assert figures.over_layerskip().text == "mean 1.19, 0.94–1.76"
    models, cells = figures.speedups()
    assert len(models) == 6 and max(c.value or 0 for m in cells.values() for c in m.values()) == 2.08
    assert cells["Llama2-70B"].keys() == {(s, n) for s in ("hispec", "layerskip") for n in figures.sets()}
    assert figures.buffers() == cascade_plots.PUBLISHED_BUFFERS
    shares = [figures.published("hispec", f"acceptance/{name}").value for name in ("draft", "verified")]
    assert shares == pytest.approx([100 * (theory.PUBLISHED.direct or 0), 100 * theory.PUBLISHED.accept_f])


def test_every_published_figure_has_a_source_and_says_how_it_was_read() -> None:
    given = OmegaConf.load(Path(figures.__file__).with_name("published.yaml"))
    names = [(paper, name) for paper in ("pacer", "hispec") for name in given[paper].figures]
    every = [figures.published(*pair) for pair in names] + list(figures.sweep("verifier").values())
    assert len(names) >= 20
    for figure in every:
        assert figure.status in figures.STATUS and re.search(r"arXiv \d{4}\.\d{5}", figure.source)
        assert figure.text and str(figure).endswith(f"[{figure.status}]")
    assert str(figures.published("pacer", "over_ar")) == "up to 2.66 (best of the paper) [summary]"
    assert str(figures.published("hispec", "verification_over_draft")) == "2–6.9 (at most 10.3) [paper]"


# ---- gathering


def test_finished_runs_are_found_in_runs_and_among_the_kept(tmp_path: Path) -> None:
    for place in ("runs/evaluate/demo/ab", "kept/2026-01-02-demo", "runs/evaluate/demo/unfinished", "runs/stages/x/y"):
        (tmp_path / place).mkdir(parents=True)
    for place in ("runs/evaluate/demo/ab", "kept/2026-01-02-demo"):
        (tmp_path / place / "results.json").write_text(json.dumps({"rows": [row("ar")]}))
        (tmp_path / place / "provenance.json").write_text(json.dumps(MADE))
        (tmp_path / place / "settings.yaml").write_text("model: {name: local, dtype: float32, target: {id: /m/mine}}\n")
    (tmp_path / "runs/evaluate/demo/unfinished/trace.jsonl").write_text("")
    (tmp_path / "runs/stages/x/y/manifest.json").write_text("{}")
    found = finished(tmp_path / "runs", [tmp_path / "kept", tmp_path / "absent"])
    assert [one.folder.name for one in found] == ["ab", "2026-01-02-demo"]
    assert (found[0].pair, found[0].machine, found[0].date, found[0].commit) == (
        "mine", "A & B, 2 cores", "2026-01-02", "01234567"
    )  # fmt: skip
    assert found[0].command == "python -m scripts.bench_pacer smollm2"


def test_a_damaged_file_is_said_and_the_others_are_still_shown(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name, text in (("good", json.dumps({"rows": [row("ar")]})), ("bad", '{"rows": [')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "results.json").write_text(text)
    assert [one.folder.name for one in finished(tmp_path / "none", [tmp_path])] == ["good"]
    assert "bad" in caplog.text and caplog.text.count("not a JSON file") == 1
    with pytest.raises(ConfigError, match="no such run"):
        read_run(tmp_path / "absent")


def test_a_role_is_what_a_bench_tuned_or_the_one_arm_of_that_name() -> None:
    several = run([row("ar"), row("sd gamma=2"), row("sd gamma=4"), row("pacer")])
    assert (several.arm("pacer"), several.arm("sd"), several.arm("fixed")) == ("pacer", None, None)
    tuned = run([row("sd gamma=2"), row("pacer b=1"), row("pacer b=2")], bench_pacer={"arms": {"pacer": "pacer b=1"}})
    assert (tuned.arm("pacer"), tuned.arm("sd")) == ("pacer b=1", "sd gamma=2")


# ---- rows


def test_real_data_then_prompts_then_the_date_decide_which_run_is_shown() -> None:
    samples = run([row("pacer", sample=True, prompts=99)], "samples")
    few, many = (run([row("pacer", prompts=n, ratio_to_ar=1 + n / 10)], f"n{n}") for n in (3, 5))
    other = run([row("pacer")], "other", pair="skip")
    shown = best([many, samples, few, other], of_arm("pacer", "gsm8k"))
    assert {pair: one.run.folder.name for pair, one in shown.items()} == {"smollm2": "n5", "skip": "other"}
    alone = best([samples], of_arm("pacer", "gsm8k"))["smollm2"]
    assert "gsm8k (samples), 99 prompts of ≤ 64 tokens" in alone.setting


def test_picks_read_the_numbers_and_their_intervals() -> None:
    one = run([row("pacer", "xsum", ratio_to_ar=1.2), row("pacer", "gsm8k")],
              bench_pacer={"arms": {}, "over_fixed": {"value": 1.06, "low": 1.0, "high": None}, "c": 0.25})  # fmt: skip
    assert of_arm("pacer", "gsm8k")(one) == Found(1.5, 1.4, 1.6, "pacer", "gsm8k, 8 prompts of ≤ 64 tokens")
    assert of_arm("pacer", "gsm8k", "share.target", 100)(one) == Found(
        70.0, what="pacer", texts="gsm8k, 8 prompts of ≤ 64 tokens"
    )
    assert of_arm("pacer", "mbpp")(one) is None and of_arm("sd", "gsm8k")(one) is None
    top = highest("pacer")(one)
    assert top is not None and (top.value, top.texts[:5]) == (1.5, "gsm8k")
    mean = averaged("pacer", "ratio_to_ar")(one)
    assert mean is not None and mean.value == pytest.approx(1.35)
    tuned = in_file("bench_pacer", "over_fixed", what="pacer")(one)
    assert tuned is not None and (tuned.value, tuned.low, tuned.high) == (1.06, 1.0, None)
    assert in_file("bench_pacer", "over_fixed", "nothing", what="pacer")(one) is None
    stand_in = run([row("hispec", "mt_bench for sharegpt")])
    assert "mt_bench for sharegpt" in (of_arm("hispec", "sharegpt")(stand_in) or Found(0)).texts
    assert of_arm("pacer", "translation")(run([row("pacer", "/data/translation.jsonl")])) is not None


def test_what_was_not_run_names_its_command_and_a_method_that_is_not_here_says_so() -> None:
    (empty,) = side_by_side([], "x", "×", None, of_arm("pacer", "gsm8k"), "make it")
    assert empty.measured is None and empty.command == "make it"
    (modelled,) = side_by_side([run([row("a")])], "x", "×", None, None, "make it", of_arm("a", "gsm8k"))
    assert modelled.modelled is not None and modelled.command is None  # there is nothing to decode
    assert command_of("run it", "pacer", "hispec") == "run it"
    assert command_of("run it", "pacer", "no_such") == "no method no_such in this version"


# ---- forms


def one_table() -> Table:
    runs = [run([row("pacer", ratio_low=None), row("ar")]), run([row("sd")], "two", pair="skip_50%")]
    figure = figures.published("pacer", "over_ar/cnn_dm")
    rows = [
        *side_by_side(runs, "PACER, gsm8k", "×", figure, of_arm("pacer", "gsm8k"), None),
        *side_by_side(runs, "SD | gsm8k", "×", None, of_arm("sd", "gsm8k"), "none"),
        *side_by_side(runs, "HiSpec", "×", None, of_arm("hispec", "gsm8k"), "scripts/bench_hispec.sh 8 'a=[b]'"),
    ]
    return Table("x", "PACER & 100 %", ("published",), rows, ["A note."])


def test_markdown_shows_both_sides_the_setting_the_machine_and_the_command() -> None:
    text = render.to_markdown(one_table(), COMMAND)
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert {line.replace("\\|", "").count("|") for line in lines} == {7}
    assert lines[2].split(" | ")[1:3] == ["1.71 (best of the paper) [summary]", "1.50"]  # a bound is missing
    assert "1.50 [1.40, 1.60]" in lines[3] and "skip_50% float32" in lines[3] and "A & B, 2 cores [2]" in lines[3]
    assert "not run" in lines[4] and "run: scripts/bench_hispec.sh 8 'a=[b]'" in lines[4]
    for note in ("A note.", "arXiv 2602.01274", f"Made by: `{COMMAND}`", "[1] runs/evaluate/one", "Not run: HiSpec"):
        assert note in text


def test_csv_is_full_precision_and_missing_is_empty() -> None:
    """M78: what is not there is an empty cell, not a word or a NaN."""
    read = list(csv.DictReader(io.StringIO(render.to_csv(one_table()))))
    assert read[0]["published"] == "1.71" and read[0]["published_status"] == "summary"
    assert (read[0]["measured"], read[0]["low"], read[0]["high"]) == ("1.5", "", "1.6")
    assert read[1]["published"] == "" and read[1]["made_by"] == "python -m scripts.bench_pacer smollm2"
    assert (read[2]["measured"], read[2]["machine"], read[2]["command"]) == (
        "",
        "",
        "scripts/bench_hispec.sh 8 'a=[b]'",
    )
    assert "nan" not in render.to_csv(one_table()).lower()


def test_latex_escapes_everything() -> None:
    hostile = r"50% of a_b & {c} #1 $x \y ~ ^ × τ γ ≤ ² – <|> " + '"q"'
    plain = re.sub(r"\\(text[a-z]+|char34|ldots)\{\}", "", render.escaped(hostile))
    plain = re.sub(r"\$[^$]*\$", "", plain.replace(r"\$", ""))
    assert not re.search(r"(?<!\\)[&%#_{}~^\"×τγ≤²–]", plain.replace("\\{", "").replace("\\}", ""))
    text = render.to_latex(one_table(), COMMAND)
    body = text[text.index(r"\midrule") : text.index(r"\bottomrule")]
    assert text.count(r"\toprule") == text.count(r"\midrule") == text.count(r"\bottomrule") == 1
    assert all(len(re.findall(r"(?<!\\)&", line)) == 5 for line in body.splitlines()[1:])
    assert r"PACER \& 100 \%" in text and r"skip\_50\%" in text
    assert text.isascii() or not re.search(r"[^\x00-\x7f]", re.sub(r"(?m)^%.*$", "", text))


def test_console_text_is_aligned_and_wraps() -> None:
    lines = render.to_text(one_table(), COMMAND).splitlines()
    rule = next(i for i, line in enumerate(lines) if line.startswith("---"))
    at = lines[rule - 1].index("setting")
    assert lines[rule + 1][at:].startswith("pacer, smollm2")
    assert max(map(len, lines[: rule + 6])) <= 180


# ---- the tables themselves


def test_every_table_has_an_experiment_that_names_it() -> None:
    assert set(TABLES) == set(NAMES)
    files = list((resource("conf") / "experiment" / "table").glob("*.yaml"))
    assert {path.stem: OmegaConf.load(path).report.table for path in files} == {name: name for name in NAMES}


@pytest.fixture(scope="module")
def kept() -> list[Run]:
    return finished(Path("absent"), [ROOT / "data" / "results"])


@pytest.mark.parametrize("name", NAMES)
def test_every_table_can_be_made_of_nothing_and_of_the_kept_results(name: str, kept: list[Run]) -> None:
    for runs in ([], kept):
        table = TABLES[name](runs)
        texts = [make(table, COMMAND) for make in (render.to_markdown, render.to_latex, render.to_text)]
        assert all(texts) and render.to_csv(table).count("\n") == 1 + len(table.rows)
        assert any(figure for row in table.rows for figure in row.published)
    assert any(row.measured for row in TABLES[name](kept).rows) or name in ("pacer_ablation", "hispec_sweep")


def test_published_stands_beside_measured(kept: list[Run]) -> None:
    rows = {r.what: r for r in TABLES["pacer_main"](kept).rows if (r.measured or r.modelled)
            and (r.measured or r.modelled).run.pair == "smollm2"}  # type: ignore[union-attr]  # fmt: skip
    row = rows["PACER over AR, cnn_dm"]
    assert row.published[0] is not None and row.published[0].value == 1.71
    assert row.measured is not None and row.measured.found.low is not None
    results = json.loads((row.measured.run.folder / "results.json").read_text())
    ratios = [r["ratio_to_ar"] for r in results["rows"] if r["benchmark"] == "cnn_dm" and r["arm"].startswith("pacer")]
    assert ratios == [row.measured.found.value]


@pytest.mark.parametrize("name", NAMES)
def test_commands_for_what_is_missing_can_be_given(name: str) -> None:
    """Scripts exist; the settings of verbs compose."""
    for command, rows in render.missing(TABLES[name]([])):
        assert rows
        if command.startswith("no method"):
            continue
        if found := re.search(r"scripts/\w+\.sh", command):
            assert (ROOT / found[0]).is_file(), command
        else:
            words = [word.strip("'") for word in re.findall(r"'[^']*'|\S+", command)]
            assert words[:2] == ["python", "-m"]
            load_settings(words[3:])


def test_ablation_sweep_and_batch_show_what_their_scripts_wrote() -> None:
    ablation = {"rows": [{"arm": "pacer rho=1.0", "predicted": 1.3, "ratio_to_ar": 1.25, "ratio_low": 1.2,
                          "ratio_high": 1.3}]}  # fmt: skip
    variants = {"rows": [{"variant": "no index embedding", "speed": 1.4, "texts": 50}]}
    runs = [run([row("pacer")], bench_ablation=ablation), run([], "two", ablation=variants)]
    slower = [r for r in TABLES["pacer_ablation"](runs).rows if r.published[0]]
    assert [(r.modelled.found.value if r.modelled else None) for r in slower] == [1.3, 1.4]
    assert slower[0].measured and slower[0].measured.found.value == 1.25 and slower[1].command is None
    batch = {"table": [{"arm": "hispec", "rows": 4, "tokens_per_second": 50.0, "repeats": 3, "over_ar": 0.9,
                        "low": 0.8, "high": 1.0}]}  # fmt: skip
    rows = TABLES["hispec_batch"]([run([], bench_batch=batch)]).rows
    assert rows[0].what == "hispec, 4 rows, over AR" and rows[0].measured and rows[0].measured.found.low == 0.8
    fixed = {"arm": "hispec exits=[4,10] gamma=2 n=4", "ratio_to_ar": 0.9}
    curve = {"n_d": 2, "n_i": 4, "exits": [4, 10], **fixed}
    sweep = {"grid": [{"draft": 4, "verifier": None, "fixed": None}, {"draft": 4, "verifier": 10, "fixed": fixed}],
             "buffers": [curve], "pays": [{"n_layers": 30}], "texts": 64}  # fmt: skip
    compared = {"compared": [{"arm": fixed["arm"], "ratio_measured": value, "prompts": 6} for value in (0.5, 2.0)]}
    found = {r.what: r for r in TABLES["hispec_sweep"]([run([], sweep=sweep, checked=compared)]).rows}
    for what in ("L_i 10 of 30 layers, L_d 4, over AR", "N_i 4, N_d 2, exits 4 and 10, over AR"):
        measured, modelled = found[what].measured, found[what].modelled
        assert measured and measured.found.value == pytest.approx(1.0) and modelled and modelled.found.value == 0.9
