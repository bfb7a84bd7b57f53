"""Jobs of a sweep (``-m``): named by their words, each with a record of its own, wherever a launcher runs it.

A sweep's folder is ``paths.runs/multirun/<verb>-<hash of its words>``, so the same command finds it again; job N leaves
its record in the folder N inside (`pacer.work.records`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode

from pacer.command.quiet import quiet_libraries
from pacer.command.words import is_assignment
from pacer.errors import EXIT_REQUEUE, PacerError
from pacer.files import stable_hash
from pacer.settings import Settings
from pacer.work.records import recorded, try_hold
from pacer.work.stopping import Stopped, check_stop, keep_stop_signals

_FLAGS = ("-m", "--multirun")


def in_sweep() -> bool:
    """Whether what runs here is a job of a sweep."""
    return HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN


def sweep_folder(verb: str, words: Sequence[str]) -> str:
    """The word that says where a sweep keeps its records; how and where its jobs run does not change its name."""
    kept = [word for word in words if word not in _FLAGS and not word.startswith(("hydra/", "hydra."))]
    return f"hydra.sweep.dir=${{paths.runs}}/multirun/{verb}-{stable_hash(kept)[:8]}"


def job_words(words: Sequence[str]) -> list[str]:
    """The words of this job alone, of the words of its sweep."""
    flags = [word for word in words if not is_assignment(word) and word not in _FLAGS]
    return [*flags, *HydraConfig.get().overrides.task]


def name_group(settings: Settings) -> None:
    """Runs that a logger keeps of one sweep are a group."""
    if settings.logger.group is None:
        settings.logger.group = Path(HydraConfig.get().sweep.dir).name


@contextmanager
def job_record() -> Iterator[None]:
    """Leave word of this job; one that fails is named, and the sweep's other jobs go on."""
    folder, words = Path(HydraConfig.get().runtime.output_dir), list(HydraConfig.get().overrides.task)
    with try_hold(folder, ""), recorded(folder, overrides=words):
        try:
            yield
        except Exception as error:
            said = str(error) if isinstance(error, PacerError) else f"{type(error).__name__}: {error}"
            print(f"error: {' '.join(words)}: {said}", file=sys.stderr, flush=True)
            raise


@contextmanager
def own_process(launcher: int, loud: bool) -> Iterator[None]:
    """What a job needs that runs in another process than its launcher (joblib, Slurm): quiet libraries and signals.

    Stopped there, a job of Slurm ends with the code that has it requeued, one of joblib is for the launcher a failed
    one: it has been asked to stop, too.

    Args:
        launcher: its process. loud: libraries may speak.
    """
    if os.getpid() == launcher:
        yield
        return
    keep_stop_signals()
    try:
        with quiet_libraries(loud):
            check_stop()
            yield
    except Stopped as stop:
        if "SUBMITIT_EXECUTOR" not in os.environ:
            raise PacerError(f"stopped by {stop}", remedy="the same command resumes") from None
        print(f"stopped ({stop}): to be requeued", file=sys.stderr, flush=True)
        raise SystemExit(EXIT_REQUEUE) from None


@contextmanager
def stopped_launcher() -> Iterator[None]:
    """Jobs of a sweep that were stopped with their launcher are no failed ones."""
    try:
        yield
    except Exception:
        check_stop()
        raise
