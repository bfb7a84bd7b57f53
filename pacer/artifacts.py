"""Stage outputs: a folder named by the hash of what made it, written piece by piece, complete with its manifest.

A worker looks first (`Stage.complete`), else takes the lock, writes the pieces that are missing and finishes::

    stage = Stage(cache, "corpus", key)
    if not stage.complete:
        with stage.lock():
            for i in stage.missing(count):
                write_atomic(stage.shard(i), make(i))
            stage.finish({"texts": n})
"""

from __future__ import annotations

import fcntl
import json
import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pacer.files import (
    PART,
    ArtifactError,
    canonical_json,
    disk_errors,
    plain,
    remove,
    sha256,
    stable_hash,
    write_atomic,
    write_json,
)
from pacer.provenance import provenance
from pacer.stopping import check_stop

__all__ = [
    "ArtifactError", "Stage", "canonical_json", "provenance", "stable_hash", "write_atomic", "write_json",
]  # fmt: skip

FORMAT = 1
_MANIFEST, _LOCK = "manifest.json", ".lock"
log = logging.getLogger(__name__)


class Stage:
    """The outputs of one stage of work, in ``root/kind/<first 16 digits of the hash of key>``.

    Args:
        root: folder of all stages, usually ``paths.cache`` or a run folder.
        kind: name of the stage, such as ``corpus``.
        key: everything the outputs depend on, as plain data; equal keys share the folder.
    """

    def __init__(self, root: Path, kind: str, key: Mapping[str, Any]) -> None:
        self.kind, self.key, self.hash = kind, key, stable_hash(key)
        self.folder = Path(root) / kind / self.hash[:16]

    @property
    def complete(self) -> bool:
        """Whether the stage was finished: all its files are there and have their recorded sizes.

        Raises:
            ArtifactError: it was finished, and has been damaged since.
        """
        return (self.folder / _MANIFEST).exists() and bool(self.manifest())

    def manifest(self, verify: bool = False) -> dict[str, Any]:
        """The record of a finished stage: format, kind, key, hash, files (size, sha256), extra, provenance.

        Args:
            verify: also read every file and compare its sha256.

        Raises:
            ArtifactError: the stage is not finished, or its manifest or a file is damaged or missing.
        """
        path = self.folder / _MANIFEST
        try:
            manifest = json.loads(path.read_text(encoding="utf-8"))
            files = {name: (int(entry["size"]), str(entry["sha256"])) for name, entry in manifest["files"].items()}
            belongs = manifest["hash"] == self.hash
        except FileNotFoundError:
            raise ArtifactError(f"stage {self.kind} is not finished", value=str(self.folder)) from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise self._damaged(f"{path.name} cannot be read ({type(error).__name__})") from error
        if not belongs:
            raise self._damaged(f"{path.name} belongs to another key")
        for name, (size, digest) in files.items():
            file = self.folder / name
            if not file.is_file():
                raise self._damaged(f"{name} is missing")
            if file.stat().st_size != size:
                raise self._damaged(f"{name} has {file.stat().st_size} bytes instead of {size}")
            if verify and sha256(file) != digest:
                raise self._damaged(f"{name} has another content than when it was written")
        return dict(manifest)

    def shard(self, index: int, suffix: str = ".jsonl") -> Path:
        """Path of a numbered piece; it exists if and only if it is complete, when written by `write_atomic`."""
        return self.folder / f"shard-{index:05d}{suffix}"

    def missing(self, count: int, suffix: str = ".jsonl") -> list[int]:
        """Which of `count` shards are still to be written."""
        return [index for index in range(count) if not self.shard(index, suffix).exists()]

    @contextmanager
    def lock(self, poll: float = 0.5) -> Iterator[None]:
        """Hold the stage for this process; waits for another worker, and heeds stop requests meanwhile.

        Look at `complete` again inside: the other worker may have finished the stage.
        """
        with disk_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            file = (self.folder / _LOCK).open("w")
        with file:
            waiting = False
            while not _try_lock(file.fileno()):
                if not waiting:
                    log.info("waiting for another worker on %s", self.folder)
                    waiting = True
                check_stop()
                time.sleep(poll)
            for leftover in self.folder.rglob(f"{PART}*"):  # of killed workers: we hold the lock, so nobody else writes
                remove(leftover)
            yield

    def finish(self, extra: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Write the manifest over all files in the folder, after which the stage is complete.

        Args:
            extra: figures to record, as plain data without NaN.

        Returns:
            The manifest.
        """
        files = {
            str(path.relative_to(self.folder)): {"size": path.stat().st_size, "sha256": sha256(path)}
            for path in sorted(self.folder.rglob("*"))
            if path.is_file() and path.name not in (_MANIFEST, _LOCK) and not path.name.startswith(PART)
        }
        manifest = {"format": FORMAT, "kind": self.kind, "hash": self.hash, "key": plain(self.key), "files": files}
        manifest |= {"extra": plain(extra or {}), "provenance": provenance()}
        write_json(self.folder / _MANIFEST, manifest)
        return manifest

    def _damaged(self, what: str) -> ArtifactError:
        remedy = f"delete the folder {self.folder} and run again"
        return ArtifactError(f"stage {self.kind} is damaged: {what}", remedy=remedy)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
