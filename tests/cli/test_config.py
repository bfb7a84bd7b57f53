"""A verb as a process: help, configuration, errors, prompts and signals, as a user meets them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pacer.command.app import load_settings
from pacer.methods.arms import methods

VERB = '''
import json, time
from pacer.command.app import check_stop, verb
from pacer.settings import Settings

@verb(positional="generate.prompt")
def main(settings: Settings) -> None:
    """Say what was set.

    A second paragraph with $signs and {braces}.
    """
    print(json.dumps({"prompt": settings.generate.prompt, "lr": settings.trainer.lr}), flush=True)
    while settings.name == "endless":
        time.sleep(0.01)
        check_stop()

if __name__ == "__main__":
    main()
'''


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    path = tmp_path / "toy.py"
    path.write_text(VERB)
    return path


def run(toy: Path, *argv: str, stdin: bytes = b"", **environment: str) -> subprocess.CompletedProcess[bytes]:
    env = {key: value for key, value in os.environ.items() if key not in ("PACER_DEBUG", "HYDRA_FULL_ERROR")}
    env |= {"PYTHONPATH": os.pathsep.join(sys.path), **environment}
    return subprocess.run(
        [sys.executable, toy.name, *argv], cwd=toy.parent, env=env, input=stdin, capture_output=True, timeout=120
    )


def test_help(toy: Path) -> None:
    done = run(toy, "--help")
    text = done.stdout.decode()
    assert done.returncode == 0, done.stderr
    assert text.startswith("Say what was set.") and "$signs and {braces}" in text
    assert "experiment/pacer: copy4, demo, hub, skip, smollm2" in text and "tokens_per_batch: 4096" in text


def test_show_configuration(toy: Path) -> None:
    done = run(toy, "+experiment=pacer/demo", "--cfg", "job", "trainer.lr=0.25")
    assert done.returncode == 0
    assert "name: demo" in done.stdout.decode() and "  lr: 0.25" in done.stdout.decode()
    typo = run(toy, "+trainer.lrr=0.25", "--cfg", "job")
    assert typo.returncode == 2 and b"trainer.lrr" in typo.stderr


@pytest.mark.parametrize(
    ("word", "part"),
    [
        ("+experiment=pacer/dmo", "pacer/demo"),
        ("+trainer.lrr=1", "did you mean lr?"),
        ("model=local", "model.target.id"),
        ("--frobnicate", "frobnicate"),
    ],
)
def test_errors(toy: Path, word: str, part: str) -> None:
    done = run(toy, word)
    error = done.stderr.decode()
    assert done.returncode == 2 and part in error and "Traceback" not in error
    assert word.startswith("--") or (error.startswith("error: ") and error.count("\n") == 1)
    assert [path.name for path in toy.parent.iterdir()] == ["toy.py"]


def test_every_method_can_be_chosen() -> None:
    for name in methods():
        assert load_settings([f"method={name}"]).method.name == name


def test_words_are_checked_without_torch() -> None:
    code = "import sys, pacer.checks; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_debug_shows_the_traceback(toy: Path) -> None:
    assert b"Traceback" in run(toy, "trainer.lr=-1", PACER_DEBUG="1").stderr


def test_prompts_survive(toy: Path) -> None:
    prompt = "${a} = \"b\" 'c' {d: [e]} \\n\n\n naïve 漢字 🙂"
    done = run(toy, prompt, "trainer.lr=0.5")
    assert json.loads(done.stdout) == {"prompt": prompt, "lr": 0.5}
    assert json.loads(run(toy, "two", "words").stdout)["prompt"] == "two words"
    piped = 'trainer.lr=1 "x"\r\n\t+{y}\n'
    assert json.loads(run(toy, "-", "trainer.lr=0.5", stdin=piped.encode()).stdout) == {"prompt": piped, "lr": 0.5}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals(toy: Path, number: signal.Signals) -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [sys.executable, toy.name, "name=endless"],
        cwd=toy.parent,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None and process.stdout.readline()
    process.send_signal(number)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 75
    assert b"the same command resumes" in error and b"Traceback" not in error


@pytest.mark.parametrize(("name", "code"), [("done", 0), ("endless", 75)])
def test_a_signal_after_the_work_does_not_change_the_exit_code(toy: Path, name: str, code: int) -> None:
    term = "os.kill(os.getpid(), signal.SIGTERM)"
    late = "import atexit, os, signal\natexit.register(lambda: " + term + ")\n"
    toy.write_text(late + VERB.replace("time.sleep(0.01)", term))
    done = run(toy, f"name={name}")
    assert done.returncode == code, done.stderr
