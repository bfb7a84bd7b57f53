"""What runs inside the sandbox, given to ``python -I -S -B -c``: limits first, then the program, then the report.

Arguments: the file descriptor of the nonce, that of the report, seconds, memory in MB, the largest file in bytes. The
program comes on standard input. The report is ``passed <nonce>`` or a kind and a message. The nonce stays unread in its
pipe until the program has ended, so that nothing the program prints, returns or exits with says "passed" for it.
Standard library only; nothing of the package is visible here.
"""

from __future__ import annotations

import os
import resource
import sys
from types import ModuleType


def set_limits(seconds: int, memory_mb: int, file_bytes: int) -> None:
    """Lower the limits for good: soft and hard, in a process that may not raise them again."""
    limits = {
        resource.RLIMIT_AS: (memory_mb << 20, memory_mb << 20),
        resource.RLIMIT_CPU: (seconds, seconds + 1),
        resource.RLIMIT_NPROC: (0, 0),
        resource.RLIMIT_FSIZE: (file_bytes, file_bytes),
        resource.RLIMIT_NOFILE: (64, 64),
        resource.RLIMIT_CORE: (0, 0),
        resource.RLIMIT_MEMLOCK: (0, 0),
        resource.RLIMIT_MSGQUEUE: (0, 0),
    }
    for limit, (soft, hard) in limits.items():
        ceiling = resource.getrlimit(limit)[1]
        if ceiling != resource.RLIM_INFINITY:
            soft, hard = min(soft, ceiling), min(hard, ceiling)
        resource.setrlimit(limit, (soft, hard))


def silence() -> None:
    """Point standard input, output and error to nowhere: the program cannot flood its reader."""
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    os.close(null)


def explain(error: BaseException) -> bytes:
    """Kind and message of what ended the program; its own ``__str__`` is code of the program and may fail."""
    if isinstance(error, MemoryError):
        return b"memory MemoryError"
    if isinstance(error, SystemExit):
        return b"failed exited before the end"
    try:
        text = f"{type(error).__name__}: {error}".rstrip(": ")
    except BaseException:  # whatever it raises, the program has failed already
        text = "an exception that cannot be shown"
    return b"failed " + text[:400].encode("utf-8", "replace")


def main() -> None:
    nonce, report, seconds, memory_mb, file_bytes = (int(argument) for argument in sys.argv[1:])
    # bound now: the program may replace what the module os offers
    read, write, leave = os.read, os.write, os._exit
    source = sys.stdin.buffer.read()
    for stream in (nonce, report):
        os.set_inheritable(stream, False)
    silence()
    sys.argv[:] = ["program"]
    # not __main__, as in the HumanEval harness: demo code under that guard stays unused
    module = ModuleType("program")
    sys.modules["program"] = module
    set_limits(seconds, memory_mb, file_bytes)
    try:
        exec(compile(source, "program.py", "exec"), module.__dict__)
    except BaseException as error:  # SystemExit and KeyboardInterrupt of the program included
        outcome = explain(error)
    else:
        outcome = b"passed " + read(nonce, 64)
    write(report, outcome)
    leave(0)


if __name__ == "__main__":
    main()
