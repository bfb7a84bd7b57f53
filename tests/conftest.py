"""Fixtures for all tests."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import absl.logging
import pytest
import torch

# rouge_score brings absl, whose log handler closes the stream it was made with once logging is configured anew:
# that must not be pytest's.
absl.logging.get_absl_handler().python_handler.stream = sys.__stderr__
# A shell that starts a job in the background tells it to ignore Ctrl-C; tests that send it need the usual handler.
signal.signal(signal.SIGINT, signal.default_int_handler)
torch.set_num_threads(1)  # tiny models: a second thread costs ten times what it gives on a busy machine
# Seconds of one core that a group of tests may take; the summary says what it took.
BUDGETS = {"unit": 420, "integration": 1020, "cli": 1200, "real": 240}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test that needs the real model is a real test."""
    for item in items:
        if "smollm2" in getattr(item, "fixturenames", ()):
            item.add_marker("real")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What each group took, set-up inside, beside its budget."""
    took = dict.fromkeys(BUDGETS, 0.0)
    for reports in terminalreporter.stats.values():
        for report in reports:
            group = str(getattr(report, "nodeid", "")).partition("/")[2].partition("/")[0]
            if group in took:
                took[group] += getattr(report, "duration", 0.0)
    for group, seconds in took.items():
        if seconds:
            over = "" if seconds <= BUDGETS[group] else ", over its budget"
            terminalreporter.write_line(f"tests/{group}: {seconds:.0f} s of {BUDGETS[group]} s{over}")


@pytest.fixture(autouse=True)
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """One thread, whatever the tests before left; two with the real model, where no other worker needs the core."""
    real = request.node.get_closest_marker("real") and "PYTEST_XDIST_WORKER" not in os.environ
    torch.set_num_threads(2 if real else 1)
    yield
    torch.set_num_threads(1)


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
    from pacer.command.app import load_settings  # imported here: most tests need neither Hydra nor the model sources
    from pacer.models.sources import fetch

    settings = load_settings(["+experiment=pacer/smollm2"])
    return fetch(settings.model.target, Path(settings.paths.cache), progress=False)
