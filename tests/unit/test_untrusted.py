"""What others made is data: no pickle, no code, no shell. The sources are read for calls that would make it more."""

from __future__ import annotations

import ast
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pacer.data.prompts import load_prompts
from pacer.errors import PacerError, SourceError
from pacer.models.wheel import check_gguf
from pacer.settings import SourceSettings
from pacer.training.saving import AtomicCheckpoints

ROOT = Path(__file__).parents[2]
SOURCES = sorted(path for name in ("pacer", "scripts", "hydra_plugins") for path in (ROOT / name).rglob("*.py"))
PICKLES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "shelve", "marshal", "joblib", "tarfile"}
SHELLS = {"os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput", "pty.spawn"}
PROCESSES = {f"subprocess.{name}" for name in ("run", "Popen", "call", "check_call", "check_output")}
# Each with its reason.
ALLOWED = {
    ("pacer/decoding/concurrent.py", "import pickle"): "the error alone: what cannot be sent to our own worker",
    ("pacer/evaluation/sandbox_child.py", "exec"): "the program that is scored, inside the sandbox",
    ("pacer/evaluation/sandbox_child.py", "compile"): "the same",
}


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def findings(source: str) -> Iterator[str]:
    """Calls and imports by which what was read could do more than be read."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            yield from (f"import {name}" for name in names if name.split(".")[0] in PICKLES)
        elif isinstance(node, ast.Call):
            yield from _call(dotted(node.func), node, {word.arg: word.value for word in node.keywords})


def _call(name: str, node: ast.Call, named: dict[str | None, ast.expr]) -> Iterator[str]:
    def is_(argument: str, value: object) -> bool:
        found = named.get(argument)
        return isinstance(found, ast.Constant) and found.value is value

    if name in ("eval", "exec", "compile", "__import__"):
        yield name
    if ("weights_only" in named or name == "torch.load") and not is_("weights_only", True):
        yield f"{name} without weights_only=True"
    if name in ("np.load", "numpy.load") and not is_("allow_pickle", False):
        yield f"{name} without allow_pickle=False"
    if name in ("yaml.load", "yaml.unsafe_load", "yaml.full_load") or name.endswith(".extractall"):
        yield name
    if is_("trust_remote_code", True):
        yield "trust_remote_code=True"
    if name in SHELLS or ("shell" in named and not is_("shell", False)):
        yield f"{name} by a shell"
    if name in PROCESSES and node.args and isinstance(node.args[0], ast.Constant | ast.JoinedStr):
        yield f"{name} of a line of text"


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import pickle", "import pickle"),
        ("from pickle import loads", "import pickle"),
        ("torch.load(path)", "torch.load without weights_only=True"),
        ("torch.load(path, weights_only=False)", "torch.load without weights_only=True"),
        ("trainer.fit(x, weights_only=y)", "trainer.fit without weights_only=True"),
        ("np.load(path)", "np.load without allow_pickle=False"),
        ("archive.extractall(folder)", "archive.extractall"),
        ("eval('1')", "eval"),
        ("exec(code)", "exec"),
        ("os.system(name)", "os.system by a shell"),
        ("subprocess.run(['ls'], shell=True)", "subprocess.run by a shell"),
        ("subprocess.run(f'ls {name}')", "subprocess.run of a line of text"),
        ("load(path, trust_remote_code=True)", "trust_remote_code=True"),
        ("torch.load(path, weights_only=True); np.load(p, allow_pickle=False); model.eval(); run(['ls'])", None),
        ("subprocess.run(['ls', name], shell=False); load(path, trust_remote_code=source.trust)", None),
    ],
)
def test_what_is_found(source: str, found: str | None) -> None:
    assert list(findings(source)) == ([] if found is None else [found])


def test_nothing_that_is_read_is_run() -> None:
    found = {(str(path.relative_to(ROOT)), what) for path in SOURCES for what in findings(path.read_text("utf-8"))}
    assert len(SOURCES) > 100 and found == set(ALLOWED)


class Evil:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return open, (str(self.path), "w")


def test_a_state_of_a_training_runs_nothing(tmp_path: Path) -> None:
    torch.save({"state_dict": Evil(tmp_path / "ran")}, tmp_path / "last.ckpt")
    with pytest.raises(pickle.UnpicklingError, match=r"[Ww]eights"):
        AtomicCheckpoints().load_checkpoint(tmp_path / "last.ckpt", weights_only=True)
    assert not (tmp_path / "ran").exists()


def test_code_is_trusted_only_where_it_is_asked_for() -> None:
    assert SourceSettings().trust_remote_code is False


@pytest.mark.parametrize("name", ["gsm8k; touch ran", "$(touch ran)", "`touch ran`", "../../etc/passwd", "--help"])
def test_names_of_data_reach_no_shell(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PacerError):
        load_prompts(name, split="train", data_dir=None)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is no GGUF file of"),
        (b"PK\x03\x04" + bytes(40), "is no GGUF file of"),
        (b"GGUF" + (9).to_bytes(4, "little") + bytes(40), "is no GGUF file of"),
        (b"GGUF" + (3).to_bytes(4, "little") + (2**40).to_bytes(8, "little") + bytes(40), "names more than it holds"),
        (b"GGUF" + (3).to_bytes(4, "little") + (1).to_bytes(8, "little") + b"\xff" * 8, "names more than it holds"),
    ],
)
def test_a_gguf_is_looked_at_before_it_is_read(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "model.gguf").write_bytes(content)
    with pytest.raises(SourceError, match=said):
        check_gguf(tmp_path / "model.gguf")
