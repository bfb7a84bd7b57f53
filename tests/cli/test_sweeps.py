"""Sweeps on one machine: by the basic launcher and by joblib; what fails is named, every job has its own records."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pacer import evaluate, status, train
from pacer.command.words import as_config_error
from pacer.settings import Settings
from tests.cli.test_verbs import words
from tests.folders import tiny_folder

VERB = '''
import os, sys, time
from pacer.command.app import check_stop, verb
from pacer.settings import Settings

@verb
def main(settings: Settings) -> None:
    """One job."""
    with open(f"job-{settings.trainer.lr:g}", "w") as file:
        print(settings.logger.group, settings.shard.count, settings.corpus.file, *sys.argv[1:], file=file)
    if settings.trainer.lr == 3:
        raise ZeroDivisionError("a bug")
    while settings.name == "endless":
        time.sleep(0.01)
        check_stop()

if __name__ == "__main__":
    main()
'''
JOBLIB = ("hydra/launcher=joblib", "hydra.launcher.n_jobs=2")


def started(folder: Path, *more: str, **environment: str) -> subprocess.Popen[str]:
    (folder / "toy.py").write_text(VERB)
    kept = {key: value for key, value in os.environ.items() if key not in ("PACER_DEBUG", "HYDRA_FULL_ERROR")}
    env = {**kept, "PYTHONPATH": os.pathsep.join(sys.path), **environment}
    command = [sys.executable, "toy.py", "-m", "paths.runs=out", *more]
    return subprocess.Popen(command, cwd=folder, env=env, stderr=subprocess.PIPE, text=True)


def jobs(folder: Path) -> dict[str, str]:
    """State of each job by its number."""
    (sweep,) = (folder / "out" / "multirun").iterdir()
    return {p.parent.name: json.loads(p.read_text())["state"] for p in sorted(sweep.glob("*/.work.json"))}


@pytest.mark.parametrize("launcher", [(), JOBLIB], ids=["basic", "joblib"])
def test_others_finish_and_each_failed_one_is_named(tmp_path: Path, launcher: tuple[str, ...]) -> None:
    """K104; the numbers of an array that runs the sweep are no shards."""
    array = {"SLURM_ARRAY_TASK_ID": "1", "SLURM_ARRAY_TASK_COUNT": "4"}
    process = started(tmp_path, "trainer.lr=1,-1,2,3", "data=real", *launcher, **array, PACER_DATA="/d")
    _, error = process.communicate(timeout=120)
    assert process.returncode != 0
    assert "error: paths.runs=out trainer.lr=-1 data=real: trainer.lr: -1.0; allowed: > 0\n" in error
    assert "error: paths.runs=out trainer.lr=3 data=real: ZeroDivisionError: a bug\n" in error
    (sweep,) = (tmp_path / "out" / "multirun").iterdir()
    for rate in (1, 2):
        said = (tmp_path / f"job-{rate}").read_text().split()
        found = [sweep.name, "None", "/d/corpus_smollm2.jsonl.gz"]  # composed in the job's own process, too
        assert said == [*found, "paths.runs=out", f"trainer.lr={rate}", "data=real"]
    assert jobs(tmp_path) == {"0": "done", "1": "failed", "2": "done", "3": "failed"}
    again = started(tmp_path, "trainer.lr=1,-1,2,3", "data=real", *launcher)  # the same words, the same folder
    again.communicate(timeout=120)
    assert len(list((tmp_path / "out" / "multirun").iterdir())) == 1


def test_joblib_stops_at_safe_points(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    process = started(tmp_path, "trainer.lr=1,2,4", "name=endless", *JOBLIB)
    while not (tmp_path / "job-1").exists() or not (tmp_path / "job-2").exists():
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 75 and "the same command resumes" in error and "Traceback" not in error
    assert jobs(tmp_path) == {"0": "stopped", "1": "stopped"}
    assert status.main([str(tmp_path / "out")]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "2 stopped, 1 missing"
    command = "         python -m pacer.toy paths.runs=out trainer.lr={} name=endless"
    assert [line for line in lines if "python" in line] == [command.format(rate) for rate in (4, 1, 2)]


def test_a_launcher_that_is_not_installed_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from hydra.errors import MissingConfigException

    for name in ("joblib", "submitit_slurm"):
        line = str(as_config_error(MissingConfigException("no", f"hydra/launcher/{name}", ["basic"])))
        assert line == f"this launcher is not installed: '{name}'; pip install 'pacer[cluster]'"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("sweeps")
    tiny_folder(home / "target")
    return home


def test_every_job_has_a_run_of_its_own(home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """K103: wandb's runs of a sweep are one group, offline; the line that uploads each is said."""
    train.main(["-m", *words(home, "draft/smollm2", "trainer.lr=0.1,0.01", "logger=wandb")])
    runs = sorted((home / "runs" / "stages" / "draft").glob("*/wandb/offline-run-*"))
    assert len(runs) == 2 and len({run.parents[1] for run in runs}) == 2
    said = capfd.readouterr().err
    assert all(f"wandb sync {run}" in said for run in runs)
    (sweep,) = (home / "runs" / "multirun").glob("train-*")
    for run in runs:
        (file,) = run.glob("run-*.wandb")
        assert sweep.name.encode() in file.read_bytes()
    csv = sorted((home / "runs" / "stages" / "draft").glob("*/metrics/*/metrics.csv"))
    assert len(csv) == 2


def test_a_sweep_over_temperatures_logs_tables_and_plots(home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """And sent again, it measures nothing twice (K104)."""
    command = [
        "-m", *words(home, "pacer/demo", "sampling.temperature=0,0.7", "benchmark.sets=[gsm8k]", "logger=wandb"),
        'benchmark.arms=[ar,"sd gamma=2"]', "benchmark.score=false",
    ]  # fmt: skip
    evaluate.main(command)
    out, error = capfd.readouterr()
    assert out.count("gsm8k (samples): 1 prompt") == 2 and error.count("wandb sync") >= 2
    folders = sorted((home / "runs" / "evaluate" / "demo").iterdir())
    assert len(folders) == 2
    for folder in folders:
        (run,) = (folder / "wandb").glob("offline-run-*")
        kinds = {path.parent.name for path in (run / "files" / "media").rglob("*.*")}
        assert kinds == {"table", "images"}
        assert " sampling.temperature=" in json.loads((folder / ".work.json").read_text())["command"]
    traces = {folder: (folder / "trace.jsonl").read_bytes() for folder in folders}
    evaluate.main([word for word in command if not word.startswith("logger")])
    assert sorted((home / "runs" / "evaluate" / "demo").iterdir()) == folders
    assert all((folder / "trace.jsonl").read_bytes() == trace for folder, trace in traces.items())


def test_several_processes_in_a_sweep_are_refused(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """K102."""
    with pytest.raises(SystemExit) as stop:
        train.main(["-m", *words(home, "draft/smollm2", "trainer.lr=0.2,0.02", "trainer.devices=2")])
    line = "several processes per training in a sweep: trainer.devices × trainer.nodes: 2; allowed: 1"
    assert stop.value.code == 2 and capsys.readouterr().err.count(line) == 3  # each job, and the end


def test_settings_have_no_shard_by_themselves() -> None:
    assert (Settings().shard.index, Settings().shard.count) == (None, None)
