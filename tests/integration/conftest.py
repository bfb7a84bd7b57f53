"""Of tests of stages: a folder with a tiny target and prompts, and all that its methods need, built once per file."""

from __future__ import annotations

from pathlib import Path

import pytest

from pacer.assemble import Models
from pacer.stages.build import build
from tests.homes import METHODS, make, make_home


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_home(tmp_path_factory.mktemp("home"))


@pytest.fixture(scope="module")
def built(home: Path) -> Models:
    return build(make(home), METHODS)
