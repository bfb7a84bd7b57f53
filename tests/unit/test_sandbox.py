"""Generated code stays contained, and "passed" means that it ran to its end."""

from __future__ import annotations

import os
import platform
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pacer.errors import ConfigError, PacerError
from pacer.evaluation import sandbox
from pacer.evaluation.sandbox import Result, require_sandbox, run_program, sandbox_available
from pacer.evaluation.syscall_filter import REFUSED, filter_program

needs_sandbox = pytest.mark.skipif(sandbox_available() is not None, reason=f"no sandbox: {sandbox_available()}")

# name: (program, seconds it may take, statuses that count as contained, what the detail holds)
HOSTILE = {
    # the first fork is a probe: a sandbox that let it through must fail this test, not blow up its machine
    "fork bomb": (
        "import os\ntry:\n  if os.fork() == 0: os._exit(0)\nexcept OSError:\n  while True:\n"
        "    try: os.fork()\n    except OSError: pass\n",
        2,
        {"timeout"},
        "",
    ),
    "fork": ("import os; os.fork()", 3, {"failed"}, "PermissionError"),
    "subprocess": ("import subprocess, sys; subprocess.run([sys.executable])", 3, {"failed"}, "PermissionError"),
    "clone3, io_uring and open_tree by number": (
        "import ctypes; c = ctypes.CDLL(None, use_errno=True)\n"
        "raise SystemError([(c.syscall(n, 0, 0, 0), ctypes.get_errno()) for n in (435, 425, 428)])",
        3,
        {"failed"},
        "[(-1, 1), (-1, 1), (-1, 1)]",  # EPERM, not EINVAL or EFAULT
    ),
    "threads": ("import threading; threading.Thread(target=print).start()", 3, {"failed"}, "can't start new thread"),
    "10 GB at once": ("x = bytearray(10 * 2**30)", 3, {"memory"}, "MemoryError"),
    "memory in steps": ("x = []\nwhile True: x.append(bytearray(2**20))", 10, {"memory"}, "MemoryError"),
    "memory beside the address space": ("import os; os.memfd_create('x')", 3, {"failed"}, "PermissionError"),
    "endless loop": ("while True: pass", 1, {"timeout"}, "1 s"),
    "sleep": ("import time; time.sleep(100)", 1, {"timeout"}, "1 s"),
    "loop that catches everything": (
        "while True:\n  try: raise SystemExit\n  except BaseException: pass",
        1,
        {"timeout"},
        "",
    ),
    "endless output": ("while True: print('x' * 10000)", 1, {"timeout"}, ""),
    "network": (
        "import socket; socket.create_connection(('127.0.0.1', 22), 1)",
        3,
        {"failed"},
        "Operation not permitted",
    ),
    "killing its parent": (
        "import os, signal\nfor pid in (os.getppid(), 1, -1, 2, 3, 4):\n"
        "  try: os.kill(pid, signal.SIGKILL)\n  except OSError: pass\nraise SystemError('still here')",
        3,
        {"failed", "killed"},
        "",
    ),
    "killing all it can name": (
        "import os\nfor kill in (os.kill, os.killpg):\n  for pid in range(-9, 3000):\n"
        "    if pid not in (0, 1, -1):\n      try: kill(pid, 9)\n      except (OSError, ValueError): pass\n"
        "raise SystemError('still here')",
        3,
        {"failed", "killed"},
        "",
    ),
    "writing to the system": ("open('/usr/lib/pacer-test', 'w')", 3, {"failed"}, "OSError"),
    "writing to the root": ("open('/pacer-test', 'w')", 3, {"failed"}, "Read-only"),
    "filling /tmp": (
        "for i in range(9):\n  with open(f'/tmp/{i}', 'wb') as f: f.write(bytes(2**22))",
        5,
        {"failed"},
        "No space left",
    ),
    "one large file": ("open('/tmp/x', 'wb').write(bytes(2**26))", 3, {"failed"}, "File too large"),
    "password file": ("open('/etc/shadow').read()", 3, {"failed"}, "No such file"),
    "environment": ("import os; raise SystemError(sorted(os.environ))", 3, {"failed"}, "['LC_CTYPE', 'PWD']"),
    "our package": ("import pacer", 3, {"failed"}, "ModuleNotFoundError"),
    "site-packages": ("import pip", 3, {"failed"}, "ModuleNotFoundError"),
    "raising its limits": (
        "import resource as r; r.setrlimit(r.RLIMIT_AS, (r.RLIM_INFINITY, r.RLIM_INFINITY))",
        3,
        {"failed"},
        "ValueError",
    ),
    "deep recursion": ("def f(n): return f(n + 1)\nf(0)", 3, {"failed"}, "RecursionError"),
    "bottomless recursion": (
        "import sys; sys.setrecursionlimit(10**9)\ndef f(n): return f(n + 1)\nf(0)",
        4,
        {"memory", "timeout", "killed", "failed"},  # CPython out of memory may end in a SystemError
        "",
    ),
    "crash of the interpreter": ("import ctypes; ctypes.string_at(0)", 3, {"killed"}, "SIGSEGV"),
    "asking for input": ("input()", 3, {"failed"}, "EOFError"),
}


@needs_sandbox
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_program_ends_contained(name: str) -> None:
    program, seconds, statuses, detail = HOSTILE[name]
    started = time.monotonic()
    # the memory limit is an argument of the process: an odd value finds what this test started
    result = run_program(program, seconds=seconds, memory_mb=257)
    assert result.status in statuses, result
    assert detail in result.detail
    assert time.monotonic() - started < seconds + 2
    _wait_until(lambda: not _alive("257"), 2)


@needs_sandbox
def test_files_of_the_user_are_out_of_reach(tmp_path: Path) -> None:
    secret, target = tmp_path / "secret", tmp_path / "target"
    secret.write_text("x")
    for program in (f"open({str(secret)!r}).read()", f"open({str(target)!r}, 'w').write('x')"):
        assert run_program(program).detail.startswith("FileNotFoundError")
    home = f"import os; raise SystemError(os.listdir({str(Path.home())!r}))"
    shown = run_program(home).detail
    assert "No such file" in shown or not any(
        f"'{name}'" in shown for name in (".bashrc", ".profile", ".ssh", ".cache")
    )
    assert not target.exists()


OUTSIDE = [
    "/",
    "/etc",
    "/usr",
    "/usr/lib",
    "/home",
    "/root",
    "/var/tmp",
    "/dev",
    "/dev/shm",
    "/run",
    "/proc",
    "/sys",
    "/tmp",
]
WAYS = {
    "a file": "open(path, 'w').write('x')",
    "a folder": "os.mkdir(path)",
    "a symbolic link": "os.symlink('/tmp', path)",
    "a pipe": "os.mkfifo(path)",
    "a file moved there": "open('/tmp/x', 'w').close(); os.rename('/tmp/x', path)",
    "a file by way of a link": "os.symlink(folder, '/tmp/out'); open('/tmp/out/' + name, 'w').write('x')",
    "a file by way of ..": "os.chdir('/tmp'); open('..' + path, 'w').write('x')",
}


@needs_sandbox
@pytest.mark.parametrize("way", WAYS)
def test_nothing_is_written_outside(way: str, tmp_path: Path) -> None:
    """Whatever the program makes, nothing of it is on the host: refused, or in the sandbox's own /tmp."""
    name = f"pacer-outside-{os.getpid()}"
    folders = [*OUTSIDE, str(Path.home()), str(Path.cwd()), str(tmp_path)]
    tries = f"import os\nname = {name!r}\nfor folder in {folders!r}:\n  path = os.path.join(folder, name)\n"
    tries += f"  try: {WAYS[way]}\n  except OSError: pass\n"
    tries += "  if os.path.islink('/tmp/out'): os.unlink('/tmp/out')\n"
    assert run_program(tries) == Result("passed")
    assert [folder for folder in folders if os.path.lexists(os.path.join(folder, name))] == []


@needs_sandbox
def test_listening_host_is_not_reached() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert run_program(f"import socket; socket.create_connection(('127.0.0.1', {port}), 1)").status == "failed"
        server.settimeout(0.2)
        with pytest.raises(TimeoutError):
            server.accept()


@needs_sandbox
@pytest.mark.parametrize(
    "program",
    [
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "raise SystemExit",
        "quit = 1\nraise KeyboardInterrupt",
        "print('passed'); import os; os._exit(0)",
        "import os\nfor fd in range(64):\n  try: os.write(fd, b'passed ')\n  except OSError: pass\nos._exit(0)",
        "import os; os.closerange(0, 64)",
        "import os; os.execv('/usr/bin/true', ['true'])",
        "assert False",
        "def broken(:",
        "x = '\udcff'",
        "x = 1\0",
        "class E(Exception):\n  def __str__(self): raise SystemExit(0)\nraise E",
    ],
)
def test_leaving_early_is_no_pass(program: str) -> None:
    result = run_program(program)
    assert result.status == "failed" and result.detail


@needs_sandbox
def test_replaced_functions_do_not_hide_the_end() -> None:
    assert run_program("import os\nos.read = os.write = os._exit = None").status == "passed"


@needs_sandbox
def test_ordinary_programs_pass() -> None:
    program = """
        from __future__ import annotations
        import bisect, collections, copy, ctypes, datetime, decimal, fractions, functools, hashlib, heapq, itertools
        import json, math, random, re, sqlite3, statistics, string, sys, tempfile, typing
        from dataclasses import dataclass
        @dataclass
        class Point:
            x: int = 1
        assert Point() == Point(1) and __name__ == "program"
        assert hashlib.md5(b"x").hexdigest()
        with tempfile.TemporaryFile() as file:
            file.write(b"x" * 2**20)
        if __name__ == "__main__":
            raise SystemExit
    """
    assert run_program("\n".join(line[8:] for line in program.split("\n"))) == Result("passed")


@needs_sandbox
def test_detail_is_cut() -> None:
    assert len(run_program("raise ValueError('x' * 10**6)").detail) <= sandbox.DETAIL_CHARS


@needs_sandbox
def test_sandbox_dies_with_the_process_that_started_it() -> None:
    code = (
        "from pacer.evaluation.sandbox import run_program\nrun_program('while True: pass', seconds=30, memory_mb=259)"
    )
    host = subprocess.Popen([sys.executable, "-c", code], cwd=Path(sandbox.__file__).parents[2])
    _wait_until(lambda: _alive("259"), 20)
    host.send_signal(signal.SIGKILL)
    host.wait()
    _wait_until(lambda: not _alive("259"), 5)


def test_without_a_sandbox_code_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "sandbox_available", lambda: "bubblewrap is not installed")
    with pytest.raises(PacerError, match=r"not installed.*apt-get install bubblewrap"):
        run_program("x = 1")
    with pytest.raises(PacerError, match="apt-get install bubblewrap"):
        require_sandbox("auto")
    with pytest.raises(PacerError, match="runs no code"):
        run_program("x = 1", mode="off")
    with pytest.raises(ConfigError, match="auto, unsafe, off"):
        run_program("x = 1", mode="yes")
    assert require_sandbox("off") == "off"


def test_unsafe_runs_limited_and_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "sandbox_available", lambda: "bubblewrap is not installed")
    cases = [
        ("x = 1", "passed"),
        ("while True: pass", "timeout"),
        ("x = bytearray(2**40)", "memory"),
        ("1 / 0", "failed"),
    ]
    for program, status in cases:
        with pytest.warns(RuntimeWarning, match="UNSAFE"):
            assert run_program(program, seconds=2, memory_mb=261, mode="unsafe").status == status
    _wait_until(lambda: not _alive("261"), 2)


def test_missing_bubblewrap_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox.shutil, "which", lambda name: None)
    reason = sandbox.sandbox_available.__wrapped__()
    assert reason is not None and ("not installed" in reason or "Linux" in reason or "filter" in reason)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs a shell script as bwrap")
def test_broken_bubblewrap_is_noticed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake = tmp_path / "bwrap"
    fake.write_text("#!/bin/sh\necho 'bwrap: setting up uid map: Permission denied' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setattr(sandbox.shutil, "which", lambda name: str(fake))
    monkeypatch.setattr(sandbox.platform, "machine", lambda: "x86_64")
    assert "Permission denied" in (sandbox.sandbox_available.__wrapped__() or "")


def test_filter_refuses_each_call_of_its_table() -> None:
    for machine, column in (("x86_64", 0), ("aarch64", 1)):
        rows = list(struct.iter_unpack("=HBBI", filter_program(machine) or b""))
        numbers = {number for call in REFUSED.values() if (number := call[column]) is not None}
        assert all(_verdict(rows, machine, number) == 0x00050001 for number in numbers)
        for number in set(range(500)) - numbers:
            assert _verdict(rows, machine, number) == 0x7FFF0000
        assert _verdict(rows, "other", 0) == _verdict(rows, machine, 0x40000000) == 0x80000000
    assert filter_program("riscv128") is None
    assert platform.machine() not in ("x86_64", "aarch64") or filter_program(platform.machine())


def _verdict(rows: list[tuple[int, int, int, int]], machine: str, number: int) -> int:
    """What a filter of loads, jumps and returns answers for one system call."""
    data = {0: number, 4: {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}.get(machine, 1)}
    at, loaded = 0, 0
    while True:
        code, then, otherwise, value = rows[at]
        at += 1
        if code == 0x20:
            loaded = data[value]
        elif code == 0x06:
            return value
        else:
            at += then if (loaded == value if code == 0x15 else loaded >= value) else otherwise


def _alive(memory_mb: str) -> list[str]:
    """Running sandbox processes that were given this memory limit; zombies have no command line."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:  # it has ended meanwhile
            continue
        if len(words) > 3 and words[-3] == memory_mb.encode():
            found.append(folder.name)
    return found


def _wait_until(condition: Callable[[], object], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "nothing happened in time"
        time.sleep(0.05)
