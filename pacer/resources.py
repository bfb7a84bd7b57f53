"""Where the files that ship beside the code are: in a checkout and in an installed wheel."""

from __future__ import annotations

import os
from pathlib import Path

from pacer.errors import SourceError

NAMES = ("conf", "data/samples", "data/checkpoints")
PACKAGE = Path(__file__).resolve().parent


def resource(name: str) -> Path:
    """The folder `name`, one of `NAMES`: top-level in a checkout, ``pacer/_resources/<name>`` in a wheel.

    Raises:
        SourceError: an unknown name, or a broken installation without that folder.
    """
    if name not in NAMES:
        raise SourceError("unknown resource", value=name, allowed=NAMES)
    return locate(name, PACKAGE)


def configs() -> list[Path]:
    """Folders of configs: that of pacer, then those in PACER_CONF (as in PATH), where a user keeps parts of their own.

    Raises:
        SourceError: PACER_CONF names what is no folder.
    """
    own = [Path(word).expanduser().resolve() for word in os.environ.get("PACER_CONF", "").split(os.pathsep) if word]
    for folder in own:
        if not folder.is_dir():
            raise SourceError("PACER_CONF names no folder", value=str(folder))
    return [resource("conf"), *own]


def locate(name: str, package: Path) -> Path:
    """`resource` for the package in the folder `package` (apart, so that both layouts can be tested)."""
    root = package.parent
    folder = root / name if _is_checkout(root) else package / "_resources" / name
    if not folder.is_dir():
        raise SourceError("a folder of this installation is missing", value=str(folder), remedy="reinstall pacer")
    return folder


def _is_checkout(root: Path) -> bool:
    """Whether `root` holds pacer's own pyproject.toml; another project's may lie beside `pip install --target`."""
    project = root / "pyproject.toml"
    return project.is_file() and 'name = "pacer"' in project.read_text(encoding="utf-8")
