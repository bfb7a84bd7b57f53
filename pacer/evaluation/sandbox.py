"""Runs generated programs, and only inside a sandbox that the kernel enforces.

bubblewrap gives the program its own user, process, network, IPC, host-name and control-group namespaces, a file
system of read-only binds (the interpreter and the system libraries, nothing else), 16 MB of private ``/tmp``, no
``/proc``, no capabilities and an empty environment; a seccomp filter (`pacer.evaluation.syscall_filter`) refuses
processes, threads and sockets; rlimits bound memory, CPU time and files; a wall clock kills all of it.

"Passed" means that the program ran to its end: the child then sends back a nonce that it has left unread until then, so
leaving early with status 0 is no pass. A program written to forge that by searching the interpreter that runs it can do
so; no test inside the tested process can prevent it. What it cannot do is leave the sandbox.
"""

from __future__ import annotations

import functools
import os
import platform
import secrets
import selectors
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import IO

from pacer.errors import ConfigError, PacerError
from pacer.evaluation.syscall_filter import filter_program

MODES = ("auto", "unsafe", "off")
FILE_BYTES = 8 << 20  # largest file a program may write
TMP_BYTES = 16 << 20  # its whole /tmp
REPORT_BYTES = 4096  # what is read of a report; more is cut off
DETAIL_CHARS = 400
SYSTEM_LIBRARIES = ("/usr/lib", "/usr/lib64", "/lib", "/lib64", "/etc/ld.so.cache")


@dataclass(frozen=True)
class Result:
    """How a program ended.

    Attributes:
        status: ``passed`` (ran to its end), ``failed`` (an exception, or it left early), ``timeout``, ``memory``
            (a MemoryError), or ``killed`` (a signal, such as a crash of the interpreter).
        detail: exception or signal, at most 400 characters; empty when passed.
    """

    status: str
    detail: str = ""


def run_program(source: str, *, seconds: float = 5.0, memory_mb: int = 512, mode: str = "auto") -> Result:
    """Run a Python program with the standard library alone; safe to call from several threads.

    Args:
        source: the whole program, its tests included; any exception means failure. ``__name__`` is ``"program"``.
        seconds: wall-clock limit, start of the interpreter included.
        memory_mb: address space of the process in MiB.
        mode: ``auto``: in the sandbox or not at all; ``unsafe``: where no sandbox works, in a plain process with
            rlimits and a warning.

    Raises:
        PacerError: there is no working sandbox and ``mode`` is not ``unsafe``, or ``mode`` is ``off``.
    """
    if require_sandbox(mode) == "off":
        raise PacerError("sandbox=off runs no code", remedy="use sandbox=auto")
    if sandbox_available() is None:
        return _run(source, seconds, memory_mb, sandboxed=True)
    warnings.warn(
        "UNSAFE: generated code runs WITHOUT a sandbox, as your user, with rlimits only (sandbox=unsafe)",
        RuntimeWarning,
        stacklevel=2,
    )
    return _run(source, seconds, memory_mb, sandboxed=False)


def require_sandbox(mode: str) -> str:
    """Check early, before hours of decoding, that ``mode`` can be honoured here; returns it.

    Raises:
        ConfigError: an unknown mode.
        PacerError: ``auto`` and no working sandbox.
    """
    if mode not in MODES:
        raise ConfigError("unknown sandbox mode", value=mode, allowed=MODES)
    reason = sandbox_available() if mode == "auto" else None
    if reason is not None:
        raise PacerError(
            f"generated code runs only in a sandbox, and there is none here ({reason})",
            remedy="install it with `apt-get install bubblewrap`, or leave code unscored with sandbox=off "
            "(sandbox=unsafe runs it unprotected)",
        )
    return mode


@functools.cache
def sandbox_available() -> str | None:
    """None where the sandbox works, found out by running an empty program in it; else the reason why it does not."""
    if not sys.platform.startswith("linux"):
        return f"it needs Linux, this is {sys.platform}"
    if filter_program(platform.machine()) is None:
        return f"no system-call filter for {platform.machine()}"
    if shutil.which("bwrap") is None:
        return "bubblewrap is not installed"
    result = _run("", 20.0, 512, sandboxed=True)
    return None if result.status == "passed" else f"bubblewrap does not work: {result.detail}"


def _run(source: str, seconds: float, memory_mb: int, *, sandboxed: bool) -> Result:
    deadline = time.monotonic() + seconds
    nonce = secrets.token_hex(16).encode()
    with tempfile.TemporaryFile() as program, tempfile.TemporaryDirectory() as folder, _pipes(3) as pipes:
        program.write(source.encode("utf-8", "surrogatepass"))
        program.seek(0)
        (nonce_out, nonce_in), (report_out, report_in), (filter_out, filter_in) = pipes
        nonce_in.write(nonce)
        filter_in.write(filter_program(platform.machine()) or b"")
        command = _child(nonce_out.fileno(), report_in.fileno(), seconds, memory_mb)
        if sandboxed:
            command = [*_bubblewrap(filter_out.fileno()), *command]
        process = subprocess.Popen(
            command,
            stdin=program,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            pass_fds=[nonce_out.fileno(), report_in.fileno(), filter_out.fileno()],
            cwd=folder,
            env={},
            start_new_session=True,
        )
        assert process.stderr is not None  # as asked for above
        for end in (nonce_out, nonce_in, report_in, filter_out, filter_in):
            end.close()
        try:
            report, errors = _read(report_out, process.stderr, deadline)
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return Result("timeout", f"more than {seconds:g} s")
        finally:
            _end(process)
    return _judge(report, nonce, process.returncode, errors)


@contextmanager
def _pipes(count: int) -> Iterator[list[tuple[FileIO, FileIO]]]:
    """Unbuffered (read, write) pairs, closed at the end; not inherited by processes that other threads start."""
    pairs = [os.pipe() for _ in range(count)]
    files = [(FileIO(out, "rb"), FileIO(into, "wb")) for out, into in pairs]
    try:
        yield files
    finally:
        for pair in files:
            for file in pair:
                file.close()


def _child(nonce: int, report: int, seconds: float, memory_mb: int) -> list[str]:
    code = Path(__file__).with_name("sandbox_child.py").read_text(encoding="utf-8")
    numbers = (nonce, report, int(seconds) + 1, memory_mb, FILE_BYTES)
    # -I: no environment, no user site, no script folder; -S: no site-packages; -B: no bytecode files
    return [_interpreter(), "-I", "-S", "-B", "-c", code, *map(str, numbers)]


def _interpreter() -> str:
    """The interpreter behind the virtual environment: no package of ours is visible to the program."""
    return os.path.realpath(getattr(sys, "_base_executable", sys.executable))


def _bubblewrap(filter_fd: int) -> list[str]:
    command = [shutil.which("bwrap") or "bwrap", "--unshare-all", "--unshare-user", "--die-with-parent"]
    # as process 1 the program is waited for: with bubblewrap's own init between them, each run would leave a zombie
    command += ["--as-pid-1", "--new-session"]
    command += ["--clearenv", "--uid", "65534", "--gid", "65534", "--cap-drop", "ALL", "--seccomp", str(filter_fd)]
    for path in SYSTEM_LIBRARIES:
        command += ["--ro-bind-try", path, path]
    for path in _interpreter_paths():
        command += ["--ro-bind", path, path]
    packages = os.path.join(sysconfig.get_path("stdlib"), "site-packages")
    if os.path.isdir(packages):
        command += ["--tmpfs", packages, "--remount-ro", packages]
    command += ["--dev-bind-try", "/dev/null", "/dev/null", "--size", str(TMP_BYTES), "--tmpfs", "/tmp"]
    return [*command, "--remount-ro", "/", "--chdir", "/tmp", "--"]


@functools.cache
def _interpreter_paths() -> tuple[str, ...]:
    """What the interpreter reads beside the system's libraries: itself, its standard library, its shared libraries."""
    prefixes = (sys.base_prefix, sys.base_exec_prefix)
    paths = [_interpreter(), *(os.path.join(prefix, "lib") for prefix in prefixes)]
    # the system's own interpreter keeps its libraries where SYSTEM_LIBRARIES has them
    return tuple(dict.fromkeys(path for path in paths if path != "/usr/lib" and os.path.exists(path)))


def _read(report: IO[bytes], errors: IO[bytes], deadline: float) -> tuple[bytes, bytes]:
    """Both streams to their ends, only the first bytes kept.

    Raises:
        subprocess.TimeoutExpired: the deadline passed first.
    """
    kept = {report: b"", errors: b""}
    with selectors.DefaultSelector() as selector:
        for stream in kept:
            selector.register(stream, selectors.EVENT_READ, stream)
        while selector.get_map():
            left = deadline - time.monotonic()
            if left <= 0:
                raise subprocess.TimeoutExpired("program", 0)
            for key, _ in selector.select(left):
                chunk = os.read(key.fd, REPORT_BYTES)
                kept[key.data] = (kept[key.data] + chunk)[:REPORT_BYTES]
                if not chunk:
                    selector.unregister(key.data)
    return kept[report], kept[errors]


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left. The sandbox's processes die with bubblewrap: its process namespace ends."""
    if process.poll() is None:
        # not yet reaped, so the number still names this group
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stderr is not None:
        process.stderr.close()


def _judge(report: bytes, nonce: bytes, code: int, errors: bytes) -> Result:
    if report == b"passed " + nonce:
        return Result("passed")
    kind, _, message = report.decode("utf-8", "replace").partition(" ")
    if kind in ("failed", "memory"):
        return Result(kind, message[:DETAIL_CHARS])
    number = -code if code < 0 else code - 128  # bubblewrap gives 128 + signal
    if number == signal.SIGXCPU:
        return Result("timeout", "CPU time")
    if number in set(signal.Signals):
        return Result("killed", signal.Signals(number).name)
    text = errors.decode("utf-8", "replace").strip() or "ended before its end was reached"
    return Result("failed", text[-DETAIL_CHARS:])
