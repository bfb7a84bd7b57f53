"""`pacer.report` on a run of `pacer.evaluate`, as a user would: the table, the page, and what is wrong in one line."""

from __future__ import annotations

import csv
import json
import re
import shlex
from pathlib import Path

import pytest

from pacer import evaluate, report
from pacer.evaluation.metrics import load_trace
from tests.cli.test_verbs import words
from tests.folders import tiny_folder


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("home")
    tiny_folder(home / "target")
    return home


@pytest.fixture(scope="module")
def run(home: Path) -> Path:
    """A finished run of AR and PACER."""
    more = ("benchmark.sets=[gsm8k]", "benchmark.arms=[ar,pacer]", "benchmark.score=false", "benchmark.limit=2")
    evaluate.main(words(home, "pacer/demo", *more))
    (folder,) = (home / "runs" / "evaluate").glob("*/*")
    return folder


def test_a_table_shows_the_run_beside_what_is_published(
    home: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report.main(["+experiment=table/pacer_main", f"paths.runs={home / 'runs'}", "report.kept=[]"])
    out = capsys.readouterr().out
    folder = home / "runs" / "report" / "pacer_main"
    assert all(f"  {folder / name}" in out for name in ("table.md", "table.csv", "table.tex"))
    rows = {row["what"]: row for row in csv.DictReader((folder / "table.csv").open())}
    results = json.loads((run / "results.json").read_text())
    speed = next(r["tokens_per_second"] for r in results["rows"] if r["arm"] == "pacer")
    assert float(rows["PACER, gsm8k"]["measured"]) == speed and rows["PACER, gsm8k"]["published"] == "39.69"
    assert rows["PACER, gsm8k"]["run"] == str(run)
    assert rows["PACER over AR, xsum"]["command"] in out and "not run" in out
    assert "+experiment=table/pacer_main" in (folder / "table.md").read_text().splitlines()[-1]


def test_a_run_becomes_one_page_that_holds_its_texts(
    home: Path, run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pacer.models.sources.load_tokenizer", lambda *_: pytest.fail("the trace holds the texts"))
    report.main([f"run={run}", f"paths.runs={home / 'runs'}"])
    page = Path(capsys.readouterr().out.split()[-1])
    text = page.read_text()
    assert page.name == "report.html" and page.parent.name == f"{run.parent.name}-{run.name}"
    (stored,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    (shown,) = json.loads(stored)["runs"]
    lines = load_trace(run / "trace.jsonl")
    assert len(shown["requests"]) == 4
    for request in shown["requests"]:
        mine = [line for line in lines if (line["arm"], line["request"]) == (request["arm"], request["name"])]
        emitted = [token for line in request["rounds"] for token in line["e"]]
        assert emitted == mine[-1]["ids"]
        if "�" not in mine[-1]["text"]:
            assert (
                "".join(shown["texts"][str(token)] for token in emitted)
                .strip()
                .startswith(mine[-1]["text"].strip()[:5])
            )
    assert text.count("data:image/svg+xml") >= 2


def test_evaluate_says_how_to_look_at_it(home: Path, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = ("benchmark.sets=[gsm8k]", "benchmark.arms=[ar,pacer]", "benchmark.score=false", "benchmark.limit=2")
    evaluate.main(words(home, "pacer/demo", *more))  # finished: nothing is measured again
    command = shlex.split(capsys.readouterr().out.strip().splitlines()[-1].partition(": ")[2])
    assert command == ["python", "-m", "pacer.report", f"run={run}"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], ("nothing to report", "+experiment=table/hispec_main", "run=FOLDER")),
        (["report.table=pacer"], ("report.table", "pacer_main")),
        (["run=/no/such/folder"], ("no such run", "/no/such/folder")),
        (["run=[]"], ("run", "a folder")),
    ],
)
def test_what_is_wrong_is_one_line(
    home: Path, arguments: list[str], said: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        report.main([*arguments, f"paths.runs={home / 'runs'}"])
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert stop.value.code == 2 and line.startswith("error: ") and all(part in line for part in said)
