"""The HTML report as text: it needs nothing else, says what it must, and reads nothing as markup."""

from __future__ import annotations

import json
import re
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from pacer.errors import ConfigError
from pacer.reporting.gather import read_run
from pacer.reporting.page import make_page
from tests.traces import line, run_folder, trace

HOSTILE = "</script><script>alert(1)</script>"
COMMAND = "python -m pacer.report run=a&b"
ROUNDS = [line([], 0, [7], "prefill", 0), line([1, 2], 1, [1, 9], "controller", scores=[0.9, 0.2])]
LINES = [
    *trace(ROUNDS, {"7": HOSTILE, "1": "<b>", "2": '"&', "9": "\n"}),
    *trace([line([], 0, [7], "prefill", 0), line([], 0, [1], "off")], {}, arm="ar"),
]


def draw(results: dict[str, Any], folder: Path, command: str) -> None:
    """In place of the real plots, which take seconds."""
    assert results["rows"] and command == "python -m pacer.evaluate +experiment=x"
    (folder / "speed.svg").write_text("<svg xmlns='http://www.w3.org/2000/svg'/>")


def page(tmp_path: Path, lines: list[dict[str, Any]] = LINES) -> str:
    folder = run_folder(tmp_path / "run<1>", lines)
    (folder / "plots").mkdir()
    (folder / "plots" / "where_it_pays.png").write_bytes(b"\x89PNG")
    (folder / "plots" / "speed.png").write_bytes(b"old")
    return make_page([read_run(folder)], tmp_path / "out", tmp_path, COMMAND, draw)


def test_the_page_needs_no_network(tmp_path: Path) -> None:
    text = page(tmp_path)
    outside = re.findall(r"""(?:src|href|url)\s*[=(]\s*["']?(?!data:|#)([^"')\s]+)""", text)
    assert outside == [] and "@import" not in text and "fetch(" not in text
    assert "default-src 'none'" in text
    assert text.count("data:image/svg+xml;base64,") == 1 and text.count("data:image/png;base64,") == 1  # drawn, others


def test_tokens_and_names_are_text(tmp_path: Path) -> None:
    text = page(tmp_path)
    assert HOSTILE not in text and "alert(1)" in text
    assert text.count("</script>") == 4 and "run<1>" not in text and "run&lt;1&gt;" in text
    (stored,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    (run,) = json.loads(stored)["runs"]
    assert run["texts"]["7"] == HOSTILE and {r["arm"] for r in run["requests"]} == {"pacer", "ar"}


def test_the_page_says_what_it_is_and_what_made_it(tmp_path: Path) -> None:
    text = unescape(page(tmp_path))
    for said in ("tiny float32: speculative decoding on gsm8k", "python -m pacer.evaluate +experiment=x", COMMAND,
                 "A & B, 2 cores", "pacer", "tokens/s", "gsm8k: 1 prompt", "Round by round", "where it pays",
                 "Speed of each method over plain decoding"):  # fmt: skip
        assert said in text, said
    legend = text[text.index('class="legend"') : text.index('id="strip"')]
    assert all(name in legend for name in ("draft, accepted", "correction", "target alone", "prefill", "refused"))
    assert "intermediate" not in legend and "bonus" not in legend  # what does not occur is not explained


def test_results_without_a_trace_have_tables_and_no_rounds(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", LINES)
    text = make_page([read_run(folder)], tmp_path / "out", tmp_path, COMMAND, draw)
    row = {"arm": "ar", "benchmark": "xsum"}
    from pacer.evaluation.metrics import evaluate_trace

    results = evaluate_trace([{**each, **row} for each in LINES])
    (folder / "results.json").write_text(json.dumps(results))
    (folder / "trace.jsonl").unlink()
    text = make_page([read_run(folder)], tmp_path / "out", tmp_path, COMMAND, draw)
    assert "No trace lies beside these results" in text and "xsum: 1 prompt" in text and "pick-arm" not in text


def test_a_run_that_decoded_nothing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing was decoded.*pacer\.evaluate"):
        page(tmp_path, [])


def test_without_a_tokenizer_old_traces_show_numbers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    text = page(tmp_path, trace(ROUNDS))
    assert "its tokens are shown as numbers" in caplog.text and '"texts":{}' in text
