"""What Hydra is told beside the user's words, and how it says what goes wrong."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from pacer.command.sweeps import sweep_folder
from pacer.command.words import flags_first
from pacer.resources import configs

FULL_ERROR = "HYDRA_FULL_ERROR"


@contextmanager
def hydra_line(name: str, overrides: list[str]) -> Iterator[None]:
    """Hydra reads sys.argv; the process's own words come back at the end."""
    before = sys.argv
    ours = [f"hydra.job.name={name}", sweep_folder(name, overrides), *search_path()]
    sys.argv = [before[0], *flags_first([*ours, *overrides])]
    try:
        yield
    finally:
        sys.argv = before


def search_path() -> list[str]:
    """The word that shows Hydra the user's own folders of configs."""
    own = ",".join(f'"file://{folder}"' for folder in configs()[1:])
    return [f"hydra.searchpath=[{own}]"] if own else []


@contextmanager
def full_error(value: str | None) -> Iterator[None]:
    """Sets HYDRAFULL_ERROR: with "1" Hydra raises errors instead of printing them over several lines."""
    before = os.environ.get(FULL_ERROR)
    _set_environment(FULL_ERROR, value)
    try:
        yield
    finally:
        _set_environment(FULL_ERROR, before)


def _set_environment(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value
