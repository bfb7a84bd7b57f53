"""Tables of small results."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from pathlib import Path

import pytest

from pacer.evaluation.metrics import evaluate_trace
from pacer.reporting import plots, tables
from tests.result_rows import AR, COMMAND, FULL, MACHINE, make_results, make_row


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
