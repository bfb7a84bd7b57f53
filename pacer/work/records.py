"""Who works in a folder: a lock that a killed worker lets go, and a record of the work, which `pacer.status` reads.

Locks are those of the file system (flock), so they hold between the machines of a cluster that share it.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import fcntl
import json
import logging
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from pacer.errors import PacerError
from pacer.files import ArtifactError, disk_errors, write_json
from pacer.provenance import command_text
from pacer.work.stopping import Stopped, check_stop

LOCK, RECORD = ".lock", ".work"  # how the names of locks and records begin
REPORTING = "-report"  # part of a run's work: putting together what its processes measured
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
log = logging.getLogger(__name__)


@contextmanager
def hold(folder: Path, part: str = "", poll: float = 0.5) -> Iterator[None]:
    """Hold a folder, or a part of its work, for this process; waits for another worker, and heeds stop requests.

    Look again inside whether there is anything to do: the other worker may have done it.
    """
    with _opened(folder / f"{LOCK}{part}") as file:
        waiting = False
        while not _try_lock(file, fcntl.LOCK_EX):
            if not waiting:
                log.info("waiting for another worker on %s", folder)
                waiting = True
            check_stop()
            time.sleep(poll)
        yield


@contextmanager
def try_hold(folder: Path, part: str) -> Iterator[bool]:
    """Hold a part if it is free: whether it was."""
    with _opened(folder / f"{LOCK}{part}") as file:
        yield _try_lock(file, fcntl.LOCK_EX)


def is_held(lock: Path) -> bool:
    """Whether a living worker holds this lock file."""
    try:
        with lock.open() as file:
            return not _try_lock(file, fcntl.LOCK_SH)
    except FileNotFoundError:
        return False


@contextmanager
def recorded(folder: Path, part: str = "", **more: Any) -> Iterator[dict[str, Any]]:
    """Leave word of the work inside: by whom and by which command, and in the end done, stopped, or failed and why.

    Args:
        more: what else to record. Yields the record; what is added to it inside is written at the end.
    """
    path = folder / f"{RECORD}{part}.json"
    record = {
        "state": "running", "command": command_text(sys.argv), "host": socket.gethostname(), "pid": os.getpid(),
        "job": os.environ.get("SLURM_JOB_ID"), "since": _now(), **more,
    }  # fmt: skip
    write_json(path, record)
    try:
        yield record
    except BaseException as error:
        stopped = isinstance(error, Stopped | KeyboardInterrupt | GeneratorExit)
        said = str(error) if isinstance(error, PacerError) else f"{type(error).__name__}: {error}"
        record |= {"state": "stopped"} if stopped else {"state": "failed", "error": said.splitlines()[0]}
        with contextlib.suppress(ArtifactError, OSError):  # what went wrong is the news, even on a full disk
            write_json(path, {**record, "until": _now()})
        raise
    write_json(path, {**record, "state": "done", "until": _now()})


def records(folder: Path) -> dict[str, dict[str, Any]]:
    """The records in a folder, by part; one that is damaged is left out."""
    found = {}
    for path in sorted(folder.glob(f"{RECORD}*.json")):
        with contextlib.suppress(ValueError, OSError):
            found[path.name.removeprefix(RECORD).removesuffix(".json")] = dict(json.loads(path.read_text("utf-8")))
    return found


def is_own(path: Path) -> bool:
    """Whether a file is a lock or a record: no output."""
    return path.name.startswith((LOCK, RECORD))


@contextmanager
def _opened(path: Path) -> Iterator[IO[str]]:
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("w")
    with file:
        yield file


def _try_lock(file: IO[str], kind: int) -> bool:
    try:
        fcntl.flock(file.fileno(), kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        remedy = "put paths.runs on one that does (Lustre: mounted with flock)"
        raise ArtifactError(f"the file system of {file.name} keeps no locks", remedy=remedy) from error
    return True


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
