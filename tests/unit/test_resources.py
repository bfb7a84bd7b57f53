"""Resources in a checkout, in a wheel, and beside another project."""

from pathlib import Path

import pytest

from pacer.errors import SourceError
from pacer.resources import locate, resource


def _layout(root: Path, project: str | None) -> Path:
    package = root / "pacer"
    for folder in (root / "conf", package / "_resources" / "conf"):
        folder.mkdir(parents=True)
    if project is not None:
        (root / "pyproject.toml").write_text(f'[project]\nname = "{project}"\n')
    return package


def test_a_checkout_uses_the_top_level(tmp_path: Path) -> None:
    assert locate("conf", _layout(tmp_path, "pacer")) == tmp_path / "conf"


@pytest.mark.parametrize("project", [None, "another"])
def test_an_installation_uses_its_own_copy(tmp_path: Path, project: str | None) -> None:
    package = _layout(tmp_path, project)
    assert locate("conf", package) == package / "_resources" / "conf"


def test_this_installation_has_samples() -> None:
    assert (resource("data/samples") / "gsm8k" / "test.jsonl").is_file()


def test_missing_and_unknown_names_are_errors(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"missing.*checkpoints"):
        locate("data/checkpoints", _layout(tmp_path, "pacer"))
    with pytest.raises(SourceError, match=r"unknown resource: '\.\./secrets'.*conf"):
        resource("../secrets")
