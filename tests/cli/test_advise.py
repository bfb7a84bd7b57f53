"""``python -m pacer.advise`` on a tiny model: predictions, a short measurement, and a command that works."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from pacer import advise, generate
from tests.cli.test_verbs import words
from tests.folders import tiny_folder


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("home")
    tiny_folder(home / "target", layers=4)
    return home


SHORT = ("advise.texts=2", "advise.prompts=1", "advise.measured=2", "advise.repeats=1", "benchmark.sets=[gsm8k]")


@pytest.mark.parametrize("rows", [1, 2])
def test_advice(home: Path, rows: int, capsys: pytest.CaptureFixture[str]) -> None:
    command = words(home, "pacer/demo", *SHORT, "model.exits.layers=[1,2]", f"benchmark.batch_size={rows}")
    advise.main(command)
    out = capsys.readouterr().out
    files = (home / "runs" / "advise").glob("*/*/advice.json")
    advice = json.loads(max(files, key=lambda path: path.stat().st_mtime_ns).read_text())
    families = {candidate["family"] for candidate in advice["predicted"]}
    assert {"plain", "fixed", "product", "pacer"} <= families and "oracle" not in families
    assert ("layerskip" in families) == ("hispec" in families) == (rows == 1)  # exits are priced for one row
    assert len(advice["measured"]) == 3 and advice["arm"] in {row["arm"] for row in advice["measured"]}
    said = shlex.split(out.strip().splitlines()[-1])
    assert said[:4] == ["python", "-m", "pacer.generate", "your prompt"]


def test_the_command_that_is_advised_works(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = advise.command("sd gamma=2", words(home, "pacer/demo", *SHORT))
    generate.main([*shlex.split(said)[3:], "generate.max_new_tokens=3"])
    assert capsys.readouterr().out
