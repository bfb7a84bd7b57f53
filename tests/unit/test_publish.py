"""A finished run is kept without this machine's paths, and the README shows its table where it says so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts import publish

PAGE = """before
<!-- demo output: written by scripts/publish.py -->
old
<!-- end of demo output -->
between
<!-- ranks: written by scripts/publish.py -->
<!-- end of ranks -->
after
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(publish, "ROOT", tmp_path)
    (tmp_path / "README.md").write_text(PAGE)
    folder = tmp_path / "runs" / "evaluate" / "demo" / "0123"
    folder.mkdir(parents=True)
    (folder / "settings.yaml").write_text("paths:\n  data_dir: /secret/data\n")
    (folder / "provenance.json").write_text(json.dumps({"date": "2026-01-02T03:04:05", "commit": "abcdef0123456"}))
    (folder / "results.json").write_text(f'{{"read": "/secret/data/gsm8k", "in": "{tmp_path}/runs"}}')
    (folder / "table.md").write_text("| demo |\n")
    return folder


def test_a_table_is_shown_in_its_place(run: Path, tmp_path: Path) -> None:
    for _ in range(2):  # the second time the same
        publish.main(run, "mine", readme=True)
        page = (tmp_path / "README.md").read_text()
        assert "old" not in page and page.count("| demo |") == 1
        assert page.index("What it printed on 2026-01-02, commit abcdef01") < page.index("between")
    kept = tmp_path / "data" / "results" / "2026-01-02-mine"
    assert json.loads((kept / "results.json").read_text()) == {"read": "$PACER_DATA/gsm8k", "in": "runs"}


def test_ranks_have_a_place_of_their_own(run: Path, tmp_path: Path) -> None:
    (run / "ranks.md").write_text("| ranks |\n")
    publish.main(run, "all", readme=True)
    page = (tmp_path / "README.md").read_text()
    assert "old" in page and page.index("between") < page.index("| ranks |") < page.index("after")
