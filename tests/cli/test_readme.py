"""Every command in README and CONTRIBUTING runs, with tiny models in place of the named ones."""

from __future__ import annotations

import importlib
import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.cli.test_verbs import words
from tests.folders import tiny_folder

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("README.md", "CONTRIBUTING.md", "data/README.md")


def commands(pattern: str) -> list[str]:
    """Indented command lines of the pages, continuation lines joined, trailing comments cut."""
    text = "\n".join((ROOT / page).read_text() for page in PAGES).replace("\\\n", " ")
    return [re.sub(r"\s+#.*", "", line).strip() for line in text.splitlines() if re.match(rf"    {pattern}", line)]


VERBS = commands(r"\.venv/bin/python -m pacer\.")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("readme")
    tiny_folder(home / "target", layers=4)
    tiny_folder(home / "small", layers=2, seed=1)
    prompts = "".join(json.dumps({"prompt": text}) + "\n" for text in ("How many?", "Why is the sky blue?"))
    (home / "mine.jsonl").write_text(prompts)
    return home


def test_the_pages_have_commands() -> None:
    assert len(VERBS) >= 6


@pytest.mark.parametrize("command", VERBS)
def test_a_verb_command_runs(home: Path, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    places = {"/models/big": home / "target", "/models/mine": home / "target", "/models/small": home / "small",
              "/data/mine.jsonl": home / "mine.jsonl"}  # fmt: skip
    for name, place in places.items():
        command = command.replace(name, str(place))
    _, _, module, *rest = shlex.split(command)
    given = [word for word in rest if "=" in word]
    names = {word.split("=")[0].lstrip("+") for word in given}
    experiment = next(word.split("=")[1] for word in given if word.startswith("+experiment"))
    own_draft = {"model.draft.layers", "model.draft.head_size"} if "model=local" in given else set()
    tiny = [w for w in words(home, experiment) if w.split("=")[0].lstrip("+") not in names | own_draft]
    if "model=local" in given:  # its draft is a model of its own
        tiny = [w for w in tiny if not w.startswith(("model.target.file", "model.target.sha256"))]
    sets = [] if "benchmark.sets" in names else ["benchmark.sets=[gsm8k]"]
    importlib.import_module(module).main([*rest, *tiny, *sets, "benchmark.score=false"])
    assert capsys.readouterr().out.strip()


def test_make_targets_exist() -> None:
    for command in commands("make "):
        done = subprocess.run(["make", "-n", *shlex.split(command)[1:]], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_scripts_exist_and_are_sound_shell() -> None:
    named = {match for command in commands(r"(\w+=\w+ )*scripts/") for match in re.findall(r"scripts/\S+\.sh", command)}
    assert named
    for name in named:
        done = subprocess.run(["bash", "-n", str(ROOT / name)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_every_file_that_the_pages_name_exists() -> None:
    for page in PAGES:
        for name in re.findall(r"`((?:pacer|conf|scripts|data|tests)/[\w./-]+)`", (ROOT / page).read_text()):
            assert (ROOT / name).exists(), f"{page} names {name}"
