"""What a newcomer does, as scripts/tour.sh does it; and that the README says how."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.test_readme import ROOT

TOUR = ROOT / "scripts" / "tour.sh"
STEPS = ["models", "demo", "prompt", "own-model", "own-data", "sweep", "table", "report", "export"]


def tour(folder: Path, python: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("PACER_DATA", "PACER_DEBUG")}
    environment = {**kept, "TINY": "1", "PACER_PYTHON": python}
    return subprocess.run(
        ["bash", str(TOUR), str(folder)], env=environment, capture_output=True, text=True, timeout=500
    )


@pytest.mark.long
def test_every_step_is_done_and_timed(tmp_path: Path) -> None:
    done = tour(tmp_path, sys.executable)
    assert done.returncode == 0, done.stdout + done.stderr
    *steps, last = done.stdout.splitlines()
    assert [re.sub(r" +\d+ s  ", " ", line) for line in steps] == [f"{name} ok" for name in STEPS]
    assert last.startswith("all of it: ") and last.endswith(str(tmp_path))
    assert (
        len(list((tmp_path / "runs" / "evaluate").rglob("table.md"))) == 5
    )  # demo, own model, own data, two of the sweep
    assert (tmp_path / "exported" / "model.safetensors").is_file()
    assert list((tmp_path / "runs" / "report").rglob("report.html")) and not list((tmp_path / "runs").rglob("*.part"))


def test_it_ends_at_the_first_step_that_fails(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/bash\necho "$*"\n[ "${2:-}" != pacer.generate ] || { echo "no luck" >&2; exit 3; }\n')
    python.chmod(0o755)
    done = tour(tmp_path / "tour", str(python))
    assert done.returncode == 3 and "no luck" in done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == STEPS[:3]
    assert "FAILED, exit code 3: " in done.stdout


def test_the_readme_has_its_commands() -> None:
    """The verb of each step."""
    said = (ROOT / "README.md").read_text()
    verbs = re.findall(r"^ *(?:verb \S+ |step \S+ \"\$PYTHON\" -m pacer\.)(\w+)", TOUR.read_text(), re.M)
    assert len(verbs) == len(STEPS) - 1 and all(f"python -m pacer.{verb} " in said for verb in verbs)
