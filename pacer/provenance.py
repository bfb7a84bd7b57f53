"""What made a file: versions, machine, command."""

from __future__ import annotations

import datetime
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pacer

LIBRARIES = ("torch", "transformers", "lightning", "numpy")


def provenance() -> dict[str, Any]:
    """Plain data: pacer's version, commit (None outside a checkout), library versions, machine, command, date (UTC)."""
    return {
        "pacer": pacer.__version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "libraries": {name: _version(name) for name in LIBRARIES},
        "machine": {
            "system": platform.platform(),
            "processor": _processor(),
            "cores": os.cpu_count(),
            "devices": _devices(),
        },
        "command": sys.argv,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def command_text(words: Sequence[str]) -> str:
    """A command as one types it, from the words of its process: ``python -m``, then ``pacer.VERB`` or ``scripts.NAME``.

    A notebook's kernel has words of its own, which say nothing of the notebook.
    """
    program = Path(words[0])
    if program.stem == "ipykernel_launcher":
        return "a notebook"
    package = "scripts" if program.parent.name == "scripts" else "pacer"
    return shlex.join(["python", "-m", f"{package}.{program.stem}", *words[1:]])


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The checkout's commit, with ``+changes`` where tracked files differ from it."""
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    commit = _git(root, "rev-parse", "HEAD")
    if not commit:
        return None
    return commit + ("+changes" if _git(root, "status", "--porcelain", "--untracked-files=no") else "")


def _git(root: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _processor() -> str:
    """The processor's model name; platform.processor is empty or vague on Linux."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _devices() -> list[str]:
    """Names of the accelerators, if torch is loaded: asking for them is no reason to import it."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
