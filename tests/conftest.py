"""Fixtures for all tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)  # tiny models: a second thread costs ten times what it gives on a busy machine


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test that needs the real model is a real test."""
    for item in items:
        if "smollm2" in getattr(item, "fixturenames", ()):
            item.add_marker("real")


@pytest.fixture(autouse=True)
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """Two threads for tests with the real model."""
    if request.node.get_closest_marker("real"):
        torch.set_num_threads(2)
        yield
        torch.set_num_threads(1)
    else:
        yield


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder of real data."""
    folder = os.environ.get("PACER_DATA")
    if not folder:
        pytest.skip("PACER_DATA is not set: it names the folder of real data")
    assert Path(folder).is_dir(), f"PACER_DATA={folder} is not a folder"
    return Path(folder)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of SmolLM2-135M-Instruct in Hugging Face form, fetched where it is not yet on this machine."""
    from pacer.app import load_settings  # imported here: most tests need neither Hydra nor the model sources
    from pacer.models.sources import fetch

    settings = load_settings(["+experiment=pacer/smollm2"])
    return fetch(settings.model.target, Path(settings.paths.cache), progress=False)
