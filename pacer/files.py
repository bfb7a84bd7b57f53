"""Files that are there completely or not at all, JSON without NaN, and hashes that do not depend on the process."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

from pacer.errors import PacerError

PART = ".part-"  # how the names of unfinished files begin
_DISK = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EROFS: "the disk is read-only",
    errno.EACCES: "no permission there",
    errno.EPERM: "no permission there",
    errno.ENOENT: "it is gone, or was never there",
}
_ELSEWHERE = "free space, or point paths.runs and paths.cache (PACER_CACHE) elsewhere; the same command resumes"


class ArtifactError(PacerError):
    """Outputs that are damaged or cannot be written."""


def write_atomic(path: Path, data: bytes | str | Callable[[Path], object]) -> Path:
    """Write a file so that it is there completely or not at all: temporary name in the same folder, fsync, rename.

    Args:
        path: where to; missing folders are made.
        data: the content, or a function that writes a file or a folder to the path it is given (of the same name, in
            a temporary folder, since a library that is killed leaves temporary files of its own beside what it writes).

    Returns:
        `path`.

    Raises:
        ArtifactError: the disk is full or not writable.
    """
    path = Path(path)
    part = path.with_name(f"{PART}{uuid.uuid4().hex[:8]}-{path.name}")
    try:
        with disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            if callable(data):
                part.mkdir()
                whole = part / path.name
                data(whole)
            else:
                whole = part
                part.write_bytes(data.encode("utf-8") if isinstance(data, str) else data)
            _sync(whole)
            os.replace(whole, path)
            _sync(path.parent)
    finally:
        remove(part)
    return path


def is_part(path: Path) -> bool:
    """Whether a path leads to something unfinished: what a killed writer left, or another is writing."""
    return any(name.startswith(PART) for name in path.parts)


def write_json(path: Path, value: object) -> Path:
    """Write indented JSON atomically; absent figures are null.

    Raises:
        ArtifactError: a number is NaN or infinite (its place is named), or the disk refuses.
    """
    tree = plain(value)
    place = _non_finite(tree)
    if place is not None:
        raise ArtifactError(f"{path.name}: the number at {place} is not finite", remedy="write null for what is absent")
    return write_atomic(path, json.dumps(tree, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def stable_hash(value: object) -> str:
    """sha256, as hex digits, of the canonical JSON of plain data; equal across processes, machines and key orders."""
    return hashlib.sha256(canonical_json(value).encode("utf-8")).hexdigest()


def canonical_json(value: object) -> str:
    """JSON with sorted keys and no spaces. Raises ValueError on NaN, TypeError on what is not plain data."""
    return json.dumps(plain(value), sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def plain(value: object) -> Any:
    """Dataclasses, mappings, sequences, paths, numpy scalars as JSON's own types. Raises TypeError on other things."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:  # a numpy or torch scalar
        return value.item()
    raise TypeError(f"{type(value).__name__} is not plain data: {value!r}")


def sha256(path: Path) -> str:
    """Hex digest of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turns what a full or read-only disk raises, also inside a library's writer, into one clear line."""
    try:
        yield
    except Exception as error:
        reason = _DISK.get(error.errno or 0) if isinstance(error, OSError) else None
        if reason is None and ("No space left" in str(error) or _is_full(path)):
            reason = _DISK[errno.ENOSPC]
        if reason is None:
            raise
        raise ArtifactError(f"cannot write {path}: {reason}", remedy=_ELSEWHERE) from error


@contextmanager
def file_errors() -> Iterator[None]:
    """Turns what a disk refuses anywhere in a run into one clear line."""
    try:
        yield
    except OSError as error:
        gone = isinstance(error, FileNotFoundError)
        if not (gone or error.filename or error.errno in _DISK):
            raise  # of a connection, a pipe
        reason = _DISK.get(error.errno or 0, error.strerror or str(error))
        remedy = "the same command makes again what was deleted meanwhile" if gone else _ELSEWHERE
        raise ArtifactError(f"cannot read or write {error.filename or 'a file'}: {reason}", remedy=remedy) from error


def _is_full(path: Path) -> bool:
    folder = next((parent for parent in Path(path).absolute().parents if parent.exists()), None)
    return folder is not None and shutil.disk_usage(folder).free < 64 * 1024


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _non_finite(tree: Any, place: str = "$") -> str | None:
    """Where the first NaN or infinity is, as a JSON path; None without one."""
    if isinstance(tree, float):
        return None if math.isfinite(tree) else place
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    name = "{}.{}" if isinstance(tree, dict) else "{}[{}]"
    found = (_non_finite(item, name.format(place, key)) for key, item in items)
    return next((where for where in found if where), None)
