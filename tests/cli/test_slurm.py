"""On a real Slurm of one node: sweeps, jobs that are stopped, requeued, cancelled; arrays that share work; ranks."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

from pacer import status, train
from tests.cli.test_verbs import words
from tests.folders import tiny_folder

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")
pytestmark = [
    pytest.mark.slurm,
    pytest.mark.skipif(
        not all(shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") for name in PROGRAMS),
        reason="Slurm is not installed: make slurm",
    ),
]


@pytest.fixture(scope="module", autouse=True)
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Slurm on this machine, with this project's python in its jobs."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = min(probe.getsockname()[1], 65000)
    folder = tmp_path_factory.mktemp("slurm")
    own = {"SLURM_LOCAL": str(folder), "SLURM_LOCAL_PORT": str(port)}
    script = [str(ROOT / "scripts" / "slurm_local.sh")]
    subprocess.run([*script, "start"], check=True, env={**os.environ, **own}, timeout=60)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
        patch.setenv("PACER_PYTHON", sys.executable)
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *sys.path]))
        for name in ("PACER_DEBUG", "HYDRA_FULL_ERROR"):
            patch.delenv(name, raising=False)
        yield
    subprocess.run([*script, "stop"], check=True, env={**os.environ, **own}, timeout=60)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("home")
    tiny_folder(home / "target")
    return home


def ask(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


def submitted(folder: Path, *arguments: str, options: tuple[str, ...] = ()) -> str:
    """The number of a job by scripts/verb.sbatch."""
    script = str(ROOT / "scripts" / "verb.sbatch")
    return ask("sbatch", "--parsable", f"--chdir={folder}", "--time=10", *options, script, *arguments).strip()


def until(condition: Callable[[], object], what: str, seconds: float = 240.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


def field(job: str, name: str) -> str:
    found = [word for word in ask("scontrol", "show", "job", job).split() if word.startswith(f"{name}=")]
    return found[0].partition("=")[2]


def ended(job: str) -> str:
    """The state in which a job ended; of an array, of its last task."""
    until(lambda: not ask("squeue", "--noheader", "--states=all", "--array", f"--jobs={job}", "--format=%T").replace(
        "COMPLETED", "").replace("CANCELLED", "").replace("FAILED", "").split(), f"job {job} does not end")  # fmt: skip
    return field(job, "JobState")


PRETENDS = """#!/bin/bash
trap 'sleep 0.3; exit 75' TERM
echo "start ${SLURM_RESTART_COUNT:-0} $*" >>said
[ -n "$SLURM_RESTART_COUNT" ] || { sleep 60 & wait; }
"""


@pytest.mark.parametrize(
    ("act", "state", "restarts"),
    [
        (("scancel", "--signal=TERM"), "COMPLETED", "1"),  # as before the time is up
        (("scontrol", "requeue"), "COMPLETED", "1"),  # as in a preemption
        (("scancel",), "CANCELLED", "0"),
    ],
)
def test_a_stopped_job_is_queued_again_and_a_cancelled_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, act: tuple[str, ...], state: str, restarts: str
) -> None:
    """What the batch script does with exit code 75."""
    program = tmp_path / "python"
    program.write_text(PRETENDS)
    program.chmod(0o755)
    monkeypatch.setenv("PACER_PYTHON", str(program))
    job = submitted(tmp_path, "train", "a b")
    until((tmp_path / "said").exists, "the job does not start")
    ask(*act, job)
    time.sleep(1)
    assert (ended(job), field(job, "Restarts")) == (state, restarts)
    lines = [f"start {n} -m pacer.train a b" for n in range(int(restarts) + 1)]
    assert (tmp_path / "said").read_text().splitlines() == lines


@pytest.mark.parametrize("words", [("./python",), ("env", "A=b", "./python")], ids=["path", "env"])
def test_a_program_in_place_of_a_verb(tmp_path: Path, words: tuple[str, ...]) -> None:
    """As scripts/reproduce.sh queues them."""
    program = tmp_path / "python"
    program.write_text(f"#!/bin/bash\n{PRETENDS.splitlines()[2]}\n")
    program.chmod(0o755)
    job = submitted(tmp_path, *words, "a b", "c")
    assert ended(job) == "COMPLETED" and (tmp_path / "said").read_text() == "start 0 a b c\n"


def slow(home: Path, runs: Path, *more: str) -> list[str]:
    """A training that lasts some seconds."""
    given = ("paths.runs", "trainer.")
    return [
        *(word for word in words(home, "draft/smollm2") if not word.startswith(given)), f"paths.runs={runs}",
        "trainer.precision=fp32", "trainer.max_steps=60", "trainer.epochs=400", "trainer.tokens_per_batch=256",
        "trainer.checkpoint_every=3", "trainer.val_every=20", "threads=1", *more,
    ]  # fmt: skip


def trained(runs: Path) -> Path:
    (file,) = runs.glob("stages/draft/*/draft/model.safetensors")
    return file


def test_requeued_in_the_middle_of_training(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """K101: stopped by a signal, queued again, and the parameters are those of a run that was left alone."""
    train.main(slow(home, tmp_path / "alone"))
    capsys.readouterr()
    runs = tmp_path / "requeued"
    job = submitted(tmp_path, "train", *slow(home, runs))
    until(lambda: list(runs.glob("stages/draft/*/last.ckpt")), "no state is saved")
    ask("scancel", "--signal=TERM", job)
    until(lambda: field(job, "Restarts") == "1", "it is not queued again")
    assert status.main([str(runs)]) == 1 and "stopped" in capsys.readouterr().out
    assert ended(job) == "COMPLETED", (tmp_path / f"pacer-{job}.log").read_text()
    said = (tmp_path / f"pacer-{job}.log").read_text()
    assert "the same command resumes" in said and said.count("training a draft of layers") == 2
    assert trained(runs).read_bytes() == trained(tmp_path / "alone").read_bytes()  # bit for bit
    assert status.main([str(runs)]) == 0


def test_a_sweep_with_a_failing_job(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """K104: four jobs of one array, one is refused, the others end with tables."""
    command = [
        sys.executable, "-m", "pacer.evaluate", "-m", *words(home, "pacer/demo"), "hydra/launcher=slurm",
        "hydra.launcher.timeout_min=10", "sampling.temperature=0,-1,0.5,0.7", "benchmark.sets=[gsm8k]",
        'benchmark.arms=[ar,"sd gamma=2"]', "benchmark.score=false", f"paths.runs={tmp_path}", "threads=1",
    ]  # fmt: skip
    command = [word for word in command if word != f"paths.runs={home / 'runs'}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, cwd=ROOT)
    assert done.returncode == 2
    named = [line for line in done.stderr.splitlines() if line.startswith("error: ") and "=" in line.split(":")[1]]
    assert len(named) == 1 and "sampling.temperature=-1" in named[0] and "sampling.temperature: -1" in named[0]
    traces = list(tmp_path.glob("evaluate/demo/*/trace.jsonl"))
    assert len(traces) == 3 and all((trace.parent / "table.md").is_file() for trace in traces)
    (sweep,) = (tmp_path / "multirun").iterdir()
    records = [json.loads((sweep / str(n) / ".work.json").read_text()) for n in range(4)]
    assert [record["state"] for record in records] == ["done", "failed", "done", "done"]
    assert len({record["job"] for record in records}) == 4 and "-m pacer.evaluate +exp" in records[0]["command"]
    assert status.main([str(sweep)]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "3 done, 1 failed"


def test_an_array_shares_labelling_and_ranks_a_training(home: Path, tmp_path: Path) -> None:
    """Two jobs label together; then two tasks of one job train together what one process trains that accumulates."""
    runs = tmp_path / "shared"
    more = ("corpus.shard_size=2", "corpus.limit=4")
    options = slow(home, runs, "trainer.max_steps=3", *more)
    array = submitted(tmp_path, "label", *options, options=("--array=0-1",))
    assert ended(array) == "COMPLETED"
    assert all("tokens (" in log.read_text() for log in tmp_path.glob("pacer-*.log"))
    two = submitted(tmp_path, "train", *options, "trainer.devices=2", options=("--ntasks=2",))
    assert ended(two) == "COMPLETED", (tmp_path / f"pacer-{two}.log").read_text()
    assert "saved in" in (tmp_path / f"pacer-{two}.log").read_text()
    train.main(slow(home, tmp_path / "alone", "trainer.max_steps=3", "trainer.accumulate=2", *more))
    one, other = trained(tmp_path / "alone"), trained(runs)
    assert one.parents[1].name == other.parents[1].name  # one stage, however many made it
    for name, value in load_file(one).items():
        assert load_file(other)[name].float().allclose(value.float(), rtol=1e-2, atol=1e-4), name
