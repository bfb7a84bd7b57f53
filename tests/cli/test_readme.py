"""Every command in README and CONTRIBUTING runs, with tiny models in place of the named ones (T94)."""

from __future__ import annotations

import importlib
import json
import os
import re
import shlex
import subprocess
import textwrap
from pathlib import Path
from typing import Any

import pytest

import pacer
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


@pytest.mark.parametrize("command", [line for line in VERBS if "launcher=slurm" not in line])  # tests/cli/test_slurm.py
def test_a_verb_command_runs(home: Path, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    places = {"/models/big": home / "target", "/models/mine": home / "target", "/models/small": home / "small",
              "/data/mine.jsonl": home / "mine.jsonl", "/models/exported": home / "exported"}  # fmt: skip
    for name, place in places.items():
        command = command.replace(name, str(place))
    _, _, module, *rest = shlex.split(command)
    if module == "pacer.status":
        assert importlib.import_module(module).main([str(home)]) in (0, 1) and capsys.readouterr().out.strip()
        return
    given = [word for word in rest if "=" in word]
    names = {word.split("=")[0].lstrip("+") for word in given}
    experiment = next((word.split("=")[1] for word in given if word.startswith("+experiment")), "pacer/demo")
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


def test_python_runs(home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The README's lines of Python, as they stand."""
    code = re.search(r"^    import pacer\n(?:(?:    .*)?\n)*", (ROOT / "README.md").read_text(), re.M)
    assert code is not None

    def load(experiment: str, *overrides: str, **more: Any) -> pacer.Pacer:
        return real(experiment, *words(home, experiment)[1:], *overrides, **more)

    real = pacer.load
    monkeypatch.setattr(pacer, "load", load)
    exec(compile(textwrap.dedent(code[0]), "README.md", "exec"), {})
    assert float(capsys.readouterr().out.split()[-1]) >= 1


SCRIPTS = commands(r"(\w+=\S+ )*scripts/")


def test_scripts_are_named() -> None:
    assert len(SCRIPTS) > 10


@pytest.mark.parametrize("command", SCRIPTS)
def test_a_script_is_a_sound_program_that_reads_what_is_given(command: str) -> None:
    given = [word.partition("=")[0] for word in command.split(" scripts/")[0].split() if "=" in word]
    (name,) = re.findall(r"scripts/[\w/]+\.sh", command)
    program = ROOT / name
    assert os.access(program, os.X_OK)
    done = subprocess.run(["bash", "-n", str(program)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    shared = ("setup.sh", "reproduce.sh") if "reproduce_" in name else ("setup.sh",)
    sources = [program, program.with_suffix(".py"), *(ROOT / "scripts" / other for other in shared)]
    read = "".join(path.read_text() for path in sources if path.is_file())
    assert all(f"${{{variable}:-" in read or f"environ.get('{variable}'" in read for variable in given), given


def test_every_file_that_the_pages_name_exists() -> None:
    for page in PAGES:
        for name in re.findall(r"`((?:pacer|conf|scripts|data|tests)/[\w./-]+)`", (ROOT / page).read_text()):
            assert (ROOT / name).exists(), f"{page} names {name}"
