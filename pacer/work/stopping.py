"""Stopping at safe points: a signal sets a flag, long loops look at it between their units of work.

The first SIGTERM or SIGINT asks; `check_stop` then raises `Stopped` at the next unit boundary, where finished work is
already on disk, so the same command resumes. A unit that takes longer than PATIENCE after that is given up: Slurm kills
a minute after it asked. A second SIGINT interrupts at once.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

PATIENCE = 20.0  # seconds that a unit has to end in once a stop was requested
_requested: list[tuple[int, float]] = []  # signals received since the verb started: number and time


class Stopped(BaseException):
    """The run was asked to stop and did: what is finished is on disk.

    Not an ``Exception``: neither a library's catch-all nor a sweep's launcher may take it for a failed job and go on.
    """


def stop_requested() -> bool:
    """Whether a signal asked this process to stop."""
    return bool(_requested)


def check_stop(patience: float = 0.0) -> None:
    """Raise `Stopped` when a stop was requested; call it at unit boundaries, after the unit's output is on disk.

    Args:
        patience: seconds since the request below which it does nothing. Inside a unit that may take minutes: PATIENCE.
    """
    if _requested and time.monotonic() - _requested[0][1] >= patience:
        raise Stopped(signal.Signals(_requested[0][0]).name)


def _on_signal(number: int, frame: FrameType | None) -> None:
    again = number == signal.SIGINT and any(earlier == number for earlier, _ in _requested)
    _requested.append((number, time.monotonic()))
    if again:
        raise KeyboardInterrupt
    _pass_on()
    # os.write: a handler may run in the middle of a print, whose buffer must not be entered twice.
    os.write(2, b"\nstopping at the next safe point (Ctrl-C twice: at once)\n")


def _pass_on() -> None:
    """To joblib's workers, which stop at safe points of their own; what else runs beside us ends with its work."""
    for worker in multiprocessing.active_children():
        if worker.name.startswith("LokyProcess"):
            worker.terminate()


def keep_stop_signals() -> None:
    """Turn SIGTERM and SIGINT into stop requests for the rest of this process: a stopped worker starts nothing more."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _on_signal)


@contextmanager
def stop_signals(last: bool = False) -> Iterator[None]:
    """Turn SIGTERM and SIGINT into stop requests inside the block; outside the main thread this changes nothing.

    Args:
        last: the process ends after the block. A SIGTERM that comes after it is ignored: it is too late to change what
            was done, so it must not change the exit code either (a finished job would be queued again as a dead one).
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.signal(number, _on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, signal.SIG_IGN if last and number == signal.SIGTERM else handler)
        _requested.clear()
