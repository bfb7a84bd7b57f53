"""What goes wrong on a machine is one clear line, leaves nothing half-written, and the same command goes on."""

from __future__ import annotations

import errno
import gzip
import json
import os
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from pacer import evaluate, files, label
from pacer.errors import EXIT_ERROR, EXIT_REQUEUE, SourceError
from pacer.files import ArtifactError, is_part, write_atomic
from pacer.models.checkpoint import load_checkpoint
from pacer.stages import texts as text_stages
from pacer.work.records import hold
from tests.cli.test_verbs import run_folders, words
from tests.folders import tiny_folder

CAPTURE = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tiny target and a finished corpus of it."""
    home = tmp_path_factory.mktemp("faults")
    tiny_folder(home / "target")
    label.main(command(home))
    return home


@pytest.fixture
def home(target: Path, tmp_path: Path) -> Path:
    (tmp_path / "target").symlink_to(target / "target")
    return tmp_path


def command(home: Path, *more: str) -> list[str]:
    """Three pieces of a corpus, or what ``more`` says; one model, so that all have the same names."""
    one = f"model.target.id={(home / 'target').resolve()}"
    known = {
        word.partition("=")[0]: word
        for word in (
            *words(home, "draft/smollm2"), one, "corpus.prompts=[gsm8k/train]", "corpus.shard_size=2", "corpus.limit=6",
            *more,
        )
    }  # fmt: skip
    return list(known.values())


def one_line(main: Callable[[list[str]], None], line: list[str], capsys: CAPTURE, code: int = EXIT_ERROR) -> str:
    """The last line on stderr of a verb that fails; it is the only one that speaks of an error."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main(line)
    told = capsys.readouterr().err.strip().splitlines()
    assert ended.value.code == code and "Traceback" not in "".join(told), told
    assert sum("error" in text.lower() for text in told) == (code == EXIT_ERROR), told
    return told[-1]


def corpus(home: Path) -> dict[str, str]:
    """The texts that are there, by file."""
    found = sorted((home / "runs" / "stages" / "corpus").rglob("shard-*"))
    return {str(path.relative_to(home)): path.read_text() for path in found if not is_part(path)}


def refusing(number: int, after: int, function: Callable[..., object]) -> Callable[..., object]:
    """The function, at whose later calls the system says no."""
    calls = []

    def wrapped(*arguments: object, **named: object) -> object:
        calls.append(arguments)
        if len(calls) > after:
            raise OSError(number, os.strerror(number))
        return function(*arguments, **named)

    return wrapped


@pytest.mark.parametrize(
    ("number", "said"), [(errno.ENOSPC, "the disk is full"), (errno.EDQUOT, "quota"), (errno.EROFS, "read-only")]
)
def test_a_disk_that_refuses_in_the_middle(
    target: Path, home: Path, capsys: CAPTURE, monkeypatch: pytest.MonkeyPatch, number: int, said: str
) -> None:
    with monkeypatch.context() as full:
        full.setattr(files, "_sync", refusing(number, 4, files._sync))  # a record and a piece are two calls each
        told = one_line(label.main, command(home), capsys)
    assert told.startswith("error: cannot write ") and said in told and "the same command resumes" in told
    assert "shard-00001" in told and len(corpus(home)) == 1
    assert not [path for path in home.rglob("*") if is_part(path.relative_to(home))]
    label.main(command(home))
    assert corpus(home) == corpus(target)


@pytest.mark.skipif(not Path("/sys/kernel").is_dir(), reason="no folder that nobody may write to")
def test_a_folder_that_nobody_may_write_to(home: Path, capsys: CAPTURE) -> None:
    told = one_line(label.main, command(home, "paths.runs=/sys/kernel/pacer"), capsys)
    assert told.startswith("error: cannot write /sys/kernel/pacer/") and "PACER_CACHE" in told


def test_a_full_disk_while_measuring(home: Path, capsys: CAPTURE, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines are added to a trace, not renamed: what was measured before is kept."""
    line = command(home, "benchmark.arms=[ar]", "benchmark.sets=[gsm8k]", "benchmark.limit=3", "benchmark.score=false")
    with monkeypatch.context() as full:
        full.setattr(os, "fsync", refusing(errno.ENOSPC, 9, os.fsync))  # records are 8 calls
        told = one_line(evaluate.main, line, capsys)
    assert told.startswith("error: cannot ") and "the disk is full" in told
    (folder,) = run_folders(home, "evaluate")
    before = (folder / "trace.jsonl").read_text()
    evaluate.main(line)
    assert before and (folder / "trace.jsonl").read_text().startswith(before)


def test_a_truncated_piece(target: Path, home: Path, capsys: CAPTURE) -> None:
    shutil.copytree(target / "runs", home / "runs")
    piece = home / next(iter(corpus(home)))
    piece.write_bytes(piece.read_bytes()[:-20])
    told = one_line(label.main, command(home), capsys)
    assert f"error: stage corpus is damaged: {piece.name} has " in told and f"delete the folder {piece.parent}" in told
    shutil.rmtree(piece.parent)
    label.main(command(home))
    assert corpus(home) == corpus(target)


def test_a_truncated_file_of_ones_own(target: Path, home: Path, capsys: CAPTURE) -> None:
    """A cut archive, and a cut line."""
    file, text = home / "texts.jsonl.gz", "".join(corpus(target).values())
    file.write_bytes(gzip.compress(text.encode())[:-30])
    told = one_line(label.main, command(home, f"corpus.file={file}"), capsys)
    assert "the corpus file is damaged" in told and str(file) in told
    (plain := home / "texts.jsonl").write_text(text[:-30])
    told = one_line(label.main, command(home, f"corpus.file={plain}"), capsys)
    assert f"line {text.count(chr(10))} of {plain} is not a corpus record" in told


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_truncated_checkpoint(tmp_path: Path, name: str) -> None:
    from pacer.models.checkpoint import save_checkpoint
    from tests.tiny import tiny_model

    folder = save_checkpoint(tmp_path / "draft", dict(tiny_model("llama", 1, 0).named_parameters()), {"kind": "k"}, "")
    assert load_checkpoint(folder, "k")[1]["kind"] == "k"
    file = folder / name
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(SourceError, match=r"the k checkpoint is damaged .*draft'; delete the folder and run again"):
        load_checkpoint(folder, "k")


def test_a_folder_that_is_deleted_meanwhile(
    target: Path, home: Path, capsys: CAPTURE, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces that are gone are made again; a model that is gone is one line."""
    real, calls = text_stages._continuations, []

    def continuations(*arguments: object) -> object:
        calls.append(len(corpus(home)))
        if len(calls) == 3:
            shutil.rmtree(home / "runs")
        return real(*arguments)  # type: ignore[arg-type]  # as it was called

    with monkeypatch.context() as deleting:
        deleting.setattr(text_stages, "_continuations", continuations)
        label.main(command(home))
    assert corpus(home) == corpus(target) and calls == [0, 1, 2, 1, 2]
    shutil.copytree((home / "target").resolve(), home / "model")

    def gone(*_: object) -> object:
        shutil.rmtree(home / "model")
        return (home / "model" / "config.json").read_text()

    monkeypatch.setattr(text_stages, "_continuations", gone)
    told = one_line(label.main, command(home, f"model.target.id={home / 'model'}"), capsys)
    assert f"cannot read or write {home / 'model' / 'config.json'}: it is gone" in told and "makes again" in told


def test_two_runs_in_one_folder(home: Path, capsys: CAPTURE) -> None:
    """The second says whom it waits for and measures nothing; asked to stop, it does."""
    line = command(home, "benchmark.arms=[ar]", "benchmark.sets=[gsm8k]", "benchmark.score=false")
    evaluate.main(line)
    (folder,) = run_folders(home, "evaluate")
    before = (folder / "trace.jsonl").stat().st_mtime_ns
    told = threading.Event()
    with hold(folder):
        stop = threading.Thread(target=lambda: told.wait(3) or os.kill(os.getpid(), signal.SIGTERM))
        stop.start()
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            evaluate.main(line)
        stop.join()
    error = capsys.readouterr().err
    assert ended.value.code == EXIT_REQUEUE and f"waiting for another worker on {folder}" in error
    assert (folder / "trace.jsonl").stat().st_mtime_ns == before


def test_what_a_killed_library_leaves_is_no_output(tmp_path: Path) -> None:
    """safetensors writes to a name of its own first: it lies in the folder that goes with the writer."""

    def killed(part: Path) -> None:
        (part.parent / ".tmpAbC").write_text("half")
        assert part.name == "x.safetensors" and is_part(part.parent / ".tmpAbC")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_atomic(tmp_path / "x.safetensors", killed)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (FileNotFoundError("No such file or directory: a.safetensors"), "a.safetensors; the same command makes again"),
        (FileNotFoundError(errno.ENOENT, "No such file", "/x/y"), "/x/y: it is gone, or was never there; the same"),
        (OSError(errno.ENOSPC, "No space left on device"), "a file: the disk is full; free space"),
        (IsADirectoryError(errno.EISDIR, "Is a directory", "/x"), "/x: Is a directory"),
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), None),
    ],
)
def test_system_errors_of_files_are_one_line(error: OSError, said: str | None) -> None:
    with pytest.raises(type(error) if said is None else ArtifactError) as caught, files.file_errors():
        raise error
    assert said is None or (said in str(caught.value) and "\n" not in str(caught.value))


def test_records_of_faults_are_json(target: Path) -> None:
    for path in target.rglob("*.json"):
        json.loads(path.read_text())
