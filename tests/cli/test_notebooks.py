"""The notebooks run from top to bottom, on a tiny model; those that are stored hold their outputs and pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from tests.cli.test_verbs import words
from tests.folders import tiny_folder

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
SMALL = {  # what stands in the cell of parameters, and what is given beside the tiny model's settings
    "01_quickstart": ("pacer/demo", ["preverifier.gamma_max=4"], 'PROMPT, TOKENS = "How many?", 12'),
    "02_why_adaptive_lengths": ("replay/demo", ["replay.texts=corpus", "replay.gamma_max=4"], ""),
    "03_train_a_preverifier": ("pacer/demo", ["preverifier.gamma_max=4"], ""),
    "04_hispec_layers": ("hispec/demo", ["replay.limit=2", "benchmark.sets=[gsm8k]"], "LAYERS = [1, 2]"),
    "05_bring_your_model": ("", [], ""),
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("home")
    tiny_folder(home / "target", layers=4)
    return home


def parameters(name: str, home: Path) -> str:
    experiment, more, others = SMALL[name]
    if not experiment:  # makes models of its own
        return (
            f"from pathlib import Path\nHOME, TOKENIZER = Path({str(home / 'own')!r}), Path({str(home / 'target')!r})"
        )
    kept = [word for word in words(home, experiment) if not word.startswith(("+experiment", "model.exits.layers"))]
    return f"EXPERIMENT, SETTINGS = {experiment!r}, {[*kept, *more]!r}\n{others}"


def tagged(notebook: Any) -> Any:
    return next(cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", []))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs(path: Path, home: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    (home / "own").mkdir(exist_ok=True)
    tagged(notebook).source = parameters(path.stem, home)
    NotebookClient(notebook, timeout=240, kernel_name="python3", resources={"metadata": {"path": str(ROOT)}}).execute()
    kinds = {kind for cell in notebook.cells for out in cell.get("outputs", []) for kind in out.get("data", {})}
    assert "image/png" in kinds or path.stem.startswith("05")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_is_stored_with_its_outputs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))  # run in order, nothing left out
    outputs = [out for cell in code for out in cell.outputs]
    assert outputs and not [out for out in outputs if out.output_type == "error"]
    text = path.read_text()
    assert "/root/" not in text and "/home/" not in text and "/tmp/" not in text  # says nothing of whose machine


def test_there_are_the_notebooks_that_are_promised() -> None:
    assert [path.stem for path in NOTEBOOKS] == sorted(SMALL)
