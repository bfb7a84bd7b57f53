"""A draft model at work while something else runs: in a process of its own on a CPU, on a stream of its own on a GPU.

One protocol for both. Orders go in, each with a number; token ids come out, one line per draw, with the number of the
order that they answer. An order makes the one before it void, and the worker looks for the next one between any two
draws, so nobody waits for what is not wanted any more. Nothing but whole numbers crosses: the worker owns the draft's
memory and rolls it back by length; its weights are those of the parent, in shared memory.

The worker ends when the other end of its pipe is closed: on :meth:`Beside.close`, when its owner is collected, at the
interpreter's end, and when the parent dies, however it dies.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.util import Finalize
from pickle import PicklingError
from time import perf_counter
from typing import Any, NoReturn, Protocol

import torch.multiprocessing as multiprocessing

from pacer.decoding.serve import in_process, in_thread, one_line
from pacer.decoding.writer import Draftsman, Job, Room
from pacer.errors import DecodingError

GRACE = 10.0  # seconds a worker has to end by itself: at most one pass over a long prompt is in its way
_CANNOT = (OSError, RuntimeError, TypeError, AttributeError, ValueError, AssertionError, PicklingError)

Order = Job | Room | None  # None: nothing; what was going on is void


class Worker(Protocol):
    """Where a draft is written.

    Attributes:
        kind: process | thread | in turn. spent: seconds that the last draw took whoever drew it.
    """

    kind: str
    spent: float

    def reset(self, room: Room) -> None:
        """A new batch."""

    def start(self, job: Job) -> None:
        """Begin this job; the one before it is void. Its answers are taken one by one."""

    def next(self) -> list[int]:
        """The next token of each row of the present job, waiting for it if need be."""

    def ready(self) -> bool:
        """Whether there is an answer that need not be waited for."""

    def rest(self) -> None:
        """Void the job, and wait until nothing runs."""

    def close(self) -> None:
        """End it. Another batch begins it anew."""


class InTurn:
    """No concurrency: what is asked for is drawn then and there, and nothing else."""

    kind = "in turn"

    def __init__(self, draftsman: Draftsman) -> None:
        self.writer, self.spent = draftsman.writer(), 0.0

    def reset(self, room: Room) -> None:
        self.writer.reset(room)

    def start(self, job: Job) -> None:
        self.writer.begin(job)

    def next(self) -> list[int]:
        start = perf_counter()
        ids = self.writer.draw()
        self.spent = perf_counter() - start
        return ids

    def ready(self) -> bool:
        return True

    def rest(self) -> None:
        """Nothing runs."""

    def close(self) -> None:
        """There is nothing to end."""


class Beside:
    """A worker at the other end of a pipe. It starts with its first batch.

    Args:
        own_process: a process with one thread and the same weights; else a thread, on a GPU with a stream of its own.
            None: what suits the draft's device.

    Raises (when it starts):
        CannotRun: there is one core, the draft cannot be shared with another process, or no process can be made.
    """

    def __init__(self, draftsman: Draftsman, own_process: bool | None = None) -> None:
        self.draftsman = draftsman
        self.own_process = draftsman.stack.device.type != "cuda" if own_process is None else own_process
        self.kind, self.spent = "process" if self.own_process else "thread", 0.0
        self._number = 0
        self._pipe: Connection | None = None
        self._body: Any = None  # Process | Thread
        self._end: Finalize | None = None

    @property
    def pid(self) -> int | None:
        """Of the process, while there is one."""
        return self._body.pid if self.own_process and self._body is not None else None

    def reset(self, room: Room) -> None:
        if self._pipe is not None:
            self._send(room)
            self._answer()
            return
        self._open()
        try:
            self._send(room)
            self._answer()
        except DecodingError as error:  # it has never run
            raise CannotRun(str(error)) from error

    def start(self, job: Job) -> None:
        self._send(job)

    def next(self) -> list[int]:
        spent, ids = self._answer()
        self.spent = spent / 1e9
        return ids

    def ready(self) -> bool:
        return self._pipe is not None and self._pipe.poll()

    def rest(self) -> None:
        if self._pipe is not None:
            self._send(None)
            self._answer()

    def close(self) -> None:
        if self._end is not None:
            self._end()
        self._pipe = self._body = self._end = None

    def _open(self) -> None:
        if self.own_process and cores() < 2:
            raise CannotRun("this process may use one core only")
        context = multiprocessing.get_context("spawn")  # a fork would inherit locks of torch's threads
        ours, theirs = context.Pipe()
        body: Any
        if self.own_process:
            body = context.Process(target=in_process, args=(theirs, self.draftsman), daemon=True)
        else:
            body = threading.Thread(target=in_thread, args=(theirs, self.draftsman), daemon=True)
        try:
            with _signals_held():
                body.start()  # moves the weights into shared memory, which may fail
        except _CANNOT as error:
            raise CannotRun(one_line(error)) from error
        if self.own_process:  # its copy is its own
            theirs.close()
        self._pipe, self._body = ours, body
        self._end = Finalize(self, _shut, (ours, body), exitpriority=100)

    def _send(self, order: Order) -> None:
        assert self._pipe is not None, "reset() comes first"
        self._number += 1
        try:
            self._pipe.send((self._number, order))
        except OSError:
            self._fail()

    def _answer(self) -> tuple[int, list[int]]:
        """Nanoseconds and ids of the next answer to the last order."""
        assert self._pipe is not None, "reset() comes first"
        while True:
            try:
                number, spent, ids = self._pipe.recv()
            except (EOFError, OSError):
                self._fail()
            if isinstance(ids, str):
                self.close()
                raise DecodingError("the draft beside the target failed", value=ids)
            if number == self._number:
                return spent, ids

    def _fail(self) -> NoReturn:
        code = None
        if self.own_process:
            self._body.join(GRACE)
            code = self._body.exitcode
        self.close()
        raise DecodingError(
            "the draft's process ended", value=f"exit code {code}", remedy="run again; it may have lacked memory"
        )


class CannotRun(Exception):
    """Why there is no worker beside."""


def cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextmanager
def _signals_held() -> Iterator[None]:
    """What is started inside never hears signals to the whole group (Ctrl-C, a scheduler's): they are the parent's
    affair, which then closes the pipe."""
    resource_tracker.ensure_running()  # it holds and frees the same signals as it starts
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _shut(pipe: Connection, body: Any) -> None:
    """End a worker: it hears of it by its pipe; a process that does not listen is killed."""
    pipe.close()
    if body is threading.current_thread():  # collected by the worker itself, on its way out
        return
    body.join(GRACE)
    if not isinstance(body, threading.Thread) and body.is_alive():
        body.kill()
        body.join()
