"""Stage outputs: named by their key, complete or resumable, and loud when damaged."""

from __future__ import annotations

import dataclasses
import errno
import json
import multiprocessing
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pacer.artifacts import ArtifactError, Stage, canonical_json, provenance, stable_hash, write_atomic, write_json
from pacer.errors import PacerError
from pacer.settings import Settings
from pacer.work.progress import Lines, progress

KEY = {"model": "m", "limit": 3}


def finished(root: Path) -> Stage:
    stage = Stage(root, "corpus", KEY)
    with stage.lock():
        for index in stage.missing(2):
            write_atomic(stage.shard(index), f"text {index}\n")
        stage.finish({"texts": 2})
    return stage


def test_hash_is_stable() -> None:
    assert stable_hash({"b": 1, "a": [1.5, None, True, "ö"]}) == stable_hash({"a": (1.5, None, True, "ö"), "b": 1})
    assert stable_hash({"a": 1}) == "015abd7f5cc57a2dd94b7590f04ad8084273905ee33ec5cebeae62276a97f862"  # on any machine
    assert stable_hash({"a": 1}) != stable_hash({"a": "1"})
    assert canonical_json({"p": Path("x"), "n": np.float32(0.5), "i": np.int64(3)}) == '{"i":3,"n":0.5,"p":"x"}'
    assert json.loads(canonical_json(Settings()))["trainer"]["lr"] == 1e-3
    with pytest.raises(ValueError, match="JSON compliant"):
        canonical_json({"a": float("nan")})
    with pytest.raises(TypeError, match="not plain data"):
        canonical_json({"a": object()})


def test_stage_life(tmp_path: Path) -> None:
    stage = Stage(tmp_path, "corpus", KEY)
    assert stage.folder.parent == tmp_path / "corpus" and len(stage.folder.name) == 16
    assert not stage.complete and not stage.folder.exists()  # looking makes nothing
    with pytest.raises(ArtifactError, match="not finished"):
        stage.manifest()
    finished(tmp_path)
    assert stage.complete
    manifest = stage.manifest(verify=True)
    assert (manifest["kind"], manifest["key"], manifest["extra"]) == ("corpus", KEY, {"texts": 2})
    assert sorted(manifest["files"]) == ["shard-00000.jsonl", "shard-00001.jsonl"]
    assert manifest["files"]["shard-00000.jsonl"]["size"] == 7
    assert manifest["provenance"]["pacer"]
    assert not Stage(tmp_path, "corpus", {**KEY, "limit": 4}).complete


def test_resume_keeps_complete_shards(tmp_path: Path) -> None:
    stage = Stage(tmp_path, "corpus", KEY)
    with pytest.raises(RuntimeError), stage.lock():
        write_atomic(stage.shard(1), "done")
        raise RuntimeError("killed")
    (stage.folder / ".part-0-shard-00000.jsonl").write_text("half")  # what a killed writer leaves
    assert not stage.complete and stage.missing(3) == [0, 2]
    with stage.lock():
        assert [path.name for path in stage.folder.iterdir() if "part" in path.name] == []
        stage.finish()
    assert list(stage.manifest()["files"]) == ["shard-00001.jsonl"]


def _cut(folder: Path) -> None:
    (folder / "shard-00000.jsonl").write_text("t")


def _remove(folder: Path) -> None:
    (folder / "shard-00001.jsonl").unlink()


def _half(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_text(path.read_text()[:40])


def _empty(folder: Path) -> None:
    (folder / "manifest.json").write_text("[]")


def _foreign(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace(stable_hash(KEY), stable_hash({})))


@pytest.mark.parametrize("damage", [_cut, _remove, _half, _empty, _foreign])
def test_damage_is_an_error_with_the_remedy(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    stage = finished(tmp_path)
    damage(stage.folder)
    with pytest.raises(ArtifactError) as caught:
        assert stage.complete
    assert f"delete the folder {stage.folder}" in str(caught.value)


def test_changed_content_is_found_by_verify(tmp_path: Path) -> None:
    stage = finished(tmp_path)
    stage.shard(0).write_text("text 9\n")
    assert stage.complete
    with pytest.raises(ArtifactError, match=r"shard-00000.*another content"):
        stage.manifest(verify=True)


def test_write_is_all_or_nothing(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.npz"
    write_atomic(path, lambda part: np.savez(part, x=np.arange(3)))  # the suffix is kept, so savez adds none
    assert np.load(path)["x"].tolist() == [0, 1, 2]

    def fails(part: Path) -> None:
        part.write_text("half")
        raise ZeroDivisionError

    before = path.read_bytes()
    with pytest.raises(ZeroDivisionError):
        write_atomic(path, fails)
    assert path.read_bytes() == before
    assert [file.name for file in path.parent.iterdir()] == ["a.npz"]
    assert write_atomic(path, b"\x00\xff").read_bytes() == b"\x00\xff"
    assert write_atomic(path, "ö").read_bytes() == "ö".encode()


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "the disk is full"),
        (OSError(errno.EROFS, "Read-only file system"), "the disk is read-only"),
        (PermissionError(errno.EACCES, "Permission denied"), "no permission"),
        (
            RuntimeError("I/O error: No space left on device (os error 28)"),
            "the disk is full",
        ),  # as safetensors says it
    ],
)
def test_disk_trouble_is_one_clear_line(tmp_path: Path, error: Exception, reason: str) -> None:
    def fails(part: Path) -> None:
        raise error

    with pytest.raises(PacerError) as caught:
        write_atomic(tmp_path / "a", fails)
    message = str(caught.value)
    assert reason in message and str(tmp_path / "a") in message and "PACER_CACHE" in message and "\n" not in message


def test_a_file_where_a_folder_must_be_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("")
    with pytest.raises(OSError, match="a"):
        write_atomic(tmp_path / "a" / "b", "x")


def test_json_refuses_nan_and_names_the_place(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    with pytest.raises(ArtifactError, match=r"\$\.rows\[1\]\.ratio"):
        write_json(path, {"rows": [{"ratio": 1.0}, {"ratio": float("nan")}]})
    assert not path.exists()
    with pytest.raises(ArtifactError, match=r"\$\.x"):
        write_json(path, {"x": np.float32("inf")})
    write_json(path, {"rows": [{"ratio": None, "n": np.int64(2)}], "name": "ö"})
    assert json.loads(path.read_text(encoding="utf-8")) == {"rows": [{"ratio": None, "n": 2}], "name": "ö"}


def _work(root: str, log: str) -> None:
    stage = Stage(Path(root), "slow", {})
    with stage.lock(poll=0.02):
        with Path(log).open("a") as file:
            file.write("in\n")
        time.sleep(0.3)
        with Path(log).open("a") as file:
            file.write("out\n")


def test_two_workers_take_turns(tmp_path: Path) -> None:
    log = tmp_path / "log"
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_work, args=(str(tmp_path), str(log))) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert log.read_text().split() == ["in", "out", "in", "out"]


def test_a_killed_worker_leaves_no_lock(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from pacer.artifacts import Stage\n"
        "with Stage(Path(sys.argv[1]), 'slow', {}).lock(): print('locked', flush=True); time.sleep(60)"
    )
    worker = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert worker.stdout is not None and worker.stdout.readline() == "locked\n"
    worker.send_signal(signal.SIGKILL)
    worker.wait(10)
    with Stage(tmp_path, "slow", {}).lock():
        pass


def test_provenance_is_plain_data() -> None:
    record = json.loads(json.dumps(provenance(), allow_nan=False))
    assert set(record) == {"pacer", "commit", "python", "libraries", "machine", "command", "date"}
    assert record["libraries"]["torch"].startswith("2.") and record["machine"]["processor"]
    assert record["date"].endswith("+00:00")


def test_progress_off_a_terminal_is_lines(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pacer.work.progress.LINE_SECONDS", 0.05)
    assert [item for item in progress([1, 2, 3], "corpus", "text") if not time.sleep(0.06)] == [1, 2, 3]
    with progress(10, "train", "step", {"loss": 2.0}, initial=4) as bar:
        bar.update(3)
        bar.set_postfix(loss=1.0, refresh=False)
    output = capsys.readouterr().err
    lines = output.splitlines()
    assert "\r" not in output and all(lines)
    assert lines[-1].startswith("train: 7/10 step") and lines[-1].endswith("loss=1]")
    assert sum(line.startswith("corpus: 3/3 text") for line in lines) == 1
    assert isinstance(bar, Lines) and len(lines) <= 5


def test_progress_lines_are_rare(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in progress(iter(range(5000)), "stream"):
        pass
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_settings_are_plain_data() -> None:
    assert json.loads(canonical_json(Settings())) == json.loads(json.dumps(dataclasses.asdict(Settings())))
