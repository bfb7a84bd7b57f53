"""Locks and records: pieces that several workers share, what a killed one leaves, and what status says of it all."""

from __future__ import annotations

import errno
import fcntl
import json
import multiprocessing
import os
import shlex
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pacer import status
from pacer.artifacts import Stage, write_json
from pacer.errors import PacerError
from pacer.files import ArtifactError
from pacer.work.records import hold, is_held, recorded, records, try_hold
from pacer.work.standing import survey
from pacer.work.stopping import Stopped

PIECES = 6
context = multiprocessing.get_context("fork")


def stage(root: Path) -> Stage:
    return Stage(root, "corpus", {"model": "m"})


def worker(root: Path, number: int, pause: float, first: tuple[int, ...] = ()) -> None:
    """Makes pieces of a stage, and notes which."""

    def make(index: int) -> str:
        time.sleep(pause)
        with (root / "made").open("a") as file:
            file.write(f"{index}\n")
        return f"piece {index}\n"

    stage(root).fill(PIECES, make, first=first, extra={"texts": PIECES}, poll=0.02)


def started(root: Path, count: int, pause: float) -> list[Any]:
    workers = [context.Process(target=worker, args=(root, number, pause)) for number in range(count)]
    for each in workers:
        each.start()
    return workers


def ended(workers: list[Any]) -> list[int]:
    for each in workers:
        each.join(60)
    return [each.exitcode for each in workers]


def made(root: Path) -> list[int]:
    return [int(line) for line in (root / "made").read_text().split()]


def test_workers_share_the_pieces_of_a_stage(tmp_path: Path) -> None:
    """Each piece is made once, all of them wait for the last, one writes the manifest, and no lock is left."""
    assert ended(started(tmp_path, 3, 0.05)) == [0, 0, 0]
    assert sorted(made(tmp_path)) == list(range(PIECES))
    finished = stage(tmp_path)
    assert finished.complete and list(finished.manifest(verify=True)["files"]) == [
        f"shard-{i:05d}.jsonl" for i in range(PIECES)
    ]
    assert not list(finished.folder.glob(".lock-*")) and finished.manifest()["extra"] == {"texts": PIECES}
    worker(tmp_path, 0, 0)
    assert len(made(tmp_path)) == PIECES


def test_own_pieces_come_first(tmp_path: Path) -> None:
    worker(tmp_path, 0, 0, first=(4, 1))
    assert made(tmp_path) == [1, 4, 0, 2, 3, 5]


def test_what_a_killed_worker_held_is_taken_over(tmp_path: Path) -> None:
    killed, *_ = started(tmp_path, 1, 30.0)
    while not is_held(stage(tmp_path).folder / ".lock-00000"):
        time.sleep(0.01)
    (stage(tmp_path).folder / ".part-0-shard-00000.jsonl").write_text("half")
    other = started(tmp_path, 1, 0.01)
    while len(made(tmp_path) if (tmp_path / "made").exists() else []) < PIECES - 1:
        time.sleep(0.01)
    assert other[0].is_alive()  # it waits for the piece in the other's hands
    os.kill(killed.pid, signal.SIGKILL)
    assert ended(other) == [0] and sorted(made(tmp_path)) == list(range(PIECES))
    assert stage(tmp_path).complete and not list(tmp_path.rglob(".part-*"))


def test_a_piece_that_fails_leaves_the_others(tmp_path: Path) -> None:
    def make(index: int) -> str:
        if index == 2:
            raise PacerError("no such thing", value=index)
        return "x"

    with pytest.raises(PacerError):
        stage(tmp_path).fill(PIECES, make)
    assert stage(tmp_path).missing(PIECES) == [2, 3, 4, 5]
    record = records(stage(tmp_path).folder)[""]
    assert (record["state"], record["error"], record["pieces"]) == ("failed", "no such thing: 2", PIECES)
    worker(tmp_path, 0, 0)
    assert made(tmp_path) == [2, 3, 4, 5] and not records(stage(tmp_path).folder)


def test_a_lock_is_held_by_one(tmp_path: Path) -> None:
    with hold(tmp_path / "a"):
        assert is_held(tmp_path / "a" / ".lock")
        with try_hold(tmp_path / "a", "") as free:
            assert not free
        with try_hold(tmp_path / "a", "-part") as free:
            assert free
    assert not is_held(tmp_path / "a" / ".lock") and not is_held(tmp_path / "b" / ".lock")


def test_a_file_system_without_locks_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(ArtifactError, match=r"keeps no locks; put paths\.runs on one that does"), hold(tmp_path):
        pass


@pytest.mark.parametrize(
    ("error", "state", "said"),
    [
        (PacerError("widths differ", value=3), "failed", "widths differ: 3"),
        (ZeroDivisionError("a\nb"), "failed", "ZeroDivisionError: a"),
        (Stopped("SIGTERM"), "stopped", None),
        (KeyboardInterrupt(), "stopped", None),
    ],
)
def test_a_record_says_how_work_ended(tmp_path: Path, error: BaseException, state: str, said: str | None) -> None:
    with pytest.raises(type(error)), recorded(tmp_path, "-x", more=1) as record:
        assert records(tmp_path)["-x"]["state"] == "running"
        record["later"] = 2
        raise error
    found = records(tmp_path)["-x"]
    assert (found["state"], found.get("error"), found["more"], found["later"]) == (state, said, 1, 2)
    with recorded(tmp_path, "-x"):
        pass
    assert records(tmp_path)["-x"]["state"] == "done"
    (tmp_path / ".work-x.json").write_text("{")
    assert records(tmp_path) == {}


def standing(root: Path) -> list[tuple[str, str, str | None]]:
    return [(s.state, s.where.removeprefix(f"{root}/"), s.command) for s in survey(root)]


def sweep(root: Path, *words: str) -> Path:
    folder = root / "multirun" / "train-1"
    (folder / "0").mkdir(parents=True)
    config = {"hydra": {"job": {"name": "train"}, "overrides": {"task": list(words)}}}
    (folder / "multirun.yaml").write_text(json.dumps(config))
    return folder


def test_status_of_stages_and_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["pacer/train.py", "name=a b"])
    command = "python -m pacer.train 'name=a b'"
    worker(tmp_path / "stages", 0, 0)
    corpus = stage(tmp_path / "stages").folder.relative_to(tmp_path)
    draft = Stage(tmp_path / "stages", "draft", {})
    with pytest.raises(PacerError), draft.lock():
        raise PacerError("out of memory")
    labels = Stage(tmp_path / "stages", "labels", {})
    with pytest.raises(Stopped):
        labels.fill(3, lambda index: "x" if index < 2 else exit_by(Stopped("SIGTERM")))
    run = tmp_path / "evaluate" / "demo" / "12345678"
    with recorded(run, "-0-of-3", requests=8) as record:
        record["measured"] = 8
    with recorded(run, "-1-of-3", requests=8) as record:
        record["measured"] = 5  # a time box ended
    (tmp_path / "profile").mkdir()
    write_json(tmp_path / "profile" / "results.json", {})
    assert standing(tmp_path) == [
        ("failed", f"{draft.folder.relative_to(tmp_path)}", command),
        ("missing", "evaluate/demo/12345678-2-of-3", f"{command} shard.index=2 shard.count=3"),
        ("stopped", "evaluate/demo/12345678-1-of-3", command),
        ("stopped", f"{labels.folder.relative_to(tmp_path)}", command),
        ("done", "evaluate/demo/12345678-0-of-3", None),
        ("done", "profile", None),
        ("done", f"{corpus}", None),
    ]
    details = {s.where.removeprefix(f"{tmp_path}/"): s.detail for s in survey(tmp_path)}
    assert details[f"{labels.folder.relative_to(tmp_path)}"].startswith("2 of 3 pieces; at ")
    assert details["evaluate/demo/12345678-1-of-3"] == "5 of 8 requests"
    assert details[f"{corpus}"] == "6 texts" and details[f"{draft.folder.relative_to(tmp_path)}"] == "out of memory"
    write_json(run / "results.json", {})  # all parts were merged
    assert [s for s in standing(tmp_path) if "12345678" in s[1]] == [("done", "evaluate/demo/12345678", None)]


def exit_by(error: BaseException) -> str:
    raise error


def test_status_of_a_sweep(tmp_path: Path) -> None:
    folder = sweep(tmp_path, "+experiment=pacer/demo", "trainer.lr=1,2,3,4", 'name="a b"')
    with recorded(folder / "0"):
        pass
    with pytest.raises(PacerError), recorded(folder / "1"):
        raise PacerError("bad")
    with recorded(folder / "2"), try_hold(folder / "2", ""):
        found = survey(tmp_path)
    assert [(s.state, s.where.split(" #")[1]) for s in found] == [
        ("failed", '1: +experiment=pacer/demo trainer.lr=2 name="a b"'),
        ("missing", '3: +experiment=pacer/demo trainer.lr=4 name="a b"'),
        ("running", '2: +experiment=pacer/demo trainer.lr=3 name="a b"'),
        ("done", '0: +experiment=pacer/demo trainer.lr=1 name="a b"'),
    ]
    assert found[1].detail == "not begun" and found[1].command is not None
    assert shlex.split(found[1].command)[3:] == ["+experiment=pacer/demo", "trainer.lr=4", 'name="a b"']
    (folder / "multirun.yaml").write_text("hydra: {")
    with pytest.raises(ArtifactError, match=r"multirun\.yaml cannot be read"):
        survey(tmp_path)


def test_a_killed_worker_is_no_running_one(tmp_path: Path) -> None:
    def work() -> None:
        with hold(tmp_path), recorded(tmp_path):
            time.sleep(60)

    process = context.Process(target=work)
    process.start()
    while not (tmp_path / ".work.json").exists():
        time.sleep(0.01)
    (running,) = survey(tmp_path)
    assert running.state == "running" and running.command is None and f"process {process.pid}" in running.detail
    process.kill()
    process.join()
    (killed,) = survey(tmp_path)
    assert killed.state == "stopped" and "killed" in killed.detail and killed.command is not None


@pytest.mark.parametrize(
    ("act", "code", "last"),
    [
        (lambda folder: None, 0, "nothing here"),
        (lambda folder: worker(folder, 0, 0), 0, "1 done"),
        (lambda folder: sweep(folder, "trainer.lr=1,2"), 1, "2 missing"),
    ],
)
def test_the_verb(
    tmp_path: Path, act: Callable[[Path], object], code: int, last: str, capsys: pytest.CaptureFixture[str]
) -> None:
    act(tmp_path)
    assert status.main([str(tmp_path)]) == code
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == last and (code == 0 or lines[1].strip() == "python -m pacer.train trainer.lr=1")


@pytest.mark.parametrize("word", ["nowhere", "-v", "trainer.lr=1"])
def test_the_verb_refuses_what_is_no_folder(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert status.main([word]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and word in error
