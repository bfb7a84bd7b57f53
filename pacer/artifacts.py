"""Stage outputs: a folder named by the hash of what made it, written piece by piece, complete with its manifest.

A worker looks first (`Stage.complete`). Work that falls into pieces is shared by all who come::

    stage = Stage(cache, "corpus", key)
    if not stage.complete:
        stage.fill(count, make, extra={"texts": n})

Other work is one worker's, under `Stage.lock`, which `Stage.finish` completes.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pacer.files import (
    PART,
    ArtifactError,
    canonical_json,
    is_part,
    plain,
    remove,
    sha256,
    stable_hash,
    write_atomic,
    write_json,
)
from pacer.provenance import provenance
from pacer.work.records import LOCK, RECORD, hold, is_own, recorded, try_hold
from pacer.work.stopping import check_stop

__all__ = [
    "ArtifactError", "Stage", "canonical_json", "provenance", "stable_hash", "write_atomic", "write_json",
]  # fmt: skip

FORMAT = 1
MANIFEST = "manifest.json"
LOGGED = "wandb"  # a folder that others write to later: wandb's service, wandb sync
Content = bytes | str | Callable[[Path], object]  # of a file, as `write_atomic` takes it
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
        return (self.folder / MANIFEST).exists() and bool(self.manifest())

    def manifest(self, verify: bool = False) -> dict[str, Any]:
        """The record of a finished stage: format, kind, key, hash, files (size, sha256), extra, provenance.

        Args:
            verify: also read every file and compare its sha256.

        Raises:
            ArtifactError: the stage is not finished, or its manifest or a file is damaged or missing.
        """
        path = self.folder / MANIFEST
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

    def fill(
        self,
        count: int,
        make: Callable[[int], Content],
        *,
        suffix: str = ".jsonl",
        first: Collection[int] = (),
        extra: Mapping[str, Any] | None = None,
        poll: float = 0.5,
    ) -> None:
        """Make the numbered pieces that are missing, and finish the stage; several workers share the pieces.

        A piece is locked while it is made, so nobody makes it a second time. A worker who finds none free waits, and
        takes over what a killed one leaves.

        Args:
            make: number of a piece → its content. first: pieces that this worker takes before the others.
            extra: figures to record in the manifest.
        """
        with recorded(self.folder, pieces=count):
            waiting = False
            while missing := self.missing(count, suffix):
                made = [self._make(index, make, suffix) for index in sorted(missing, key=lambda i: (i not in first, i))]
                if not any(made):
                    if not waiting:
                        log.info("waiting for other workers on %s: %d pieces are theirs", self.folder, len(missing))
                        waiting = True
                    check_stop()
                    time.sleep(poll)
        with self.lock(poll):
            if not self.complete:
                self.finish(extra)
            for lock in self.folder.glob(f"{LOCK}-*"):  # every piece is there: nobody waits for one
                lock.unlink(missing_ok=True)

    def _make(self, index: int, make: Callable[[int], Content], suffix: str) -> bool:
        """Make a piece if it is missing and nobody else is at it; whether it was made."""
        path = self.shard(index, suffix)
        with try_hold(self.folder, f"-{index:05d}") as held:
            if not held or path.exists():
                return False
            for leftover in self.folder.glob(f"{PART}*-{path.name}"):
                remove(leftover)
            write_atomic(path, make(index))
        check_stop()
        return True

    @contextmanager
    def lock(self, poll: float = 0.5) -> Iterator[None]:
        """Hold the stage for this process; waits for another worker, and heeds stop requests meanwhile.

        Look at `complete` again inside: the other worker may have finished the stage.
        """
        with hold(self.folder, poll=poll):
            # of killed workers: we hold the lock, so nobody else writes
            for leftover in [*self.folder.rglob(f"{PART}*")]:
                if RECORD not in leftover.name:  # but its record
                    remove(leftover)
            if self.complete:
                yield
                return
            with recorded(self.folder):
                yield
            if self.complete:
                (self.folder / f"{RECORD}.json").unlink(missing_ok=True)

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
            if path.is_file()
            and path.name != MANIFEST
            and not is_own(path)
            and not is_part(path.relative_to(self.folder))
            and LOGGED not in path.relative_to(self.folder).parts
        }
        manifest = {"format": FORMAT, "kind": self.kind, "hash": self.hash, "key": plain(self.key), "files": files}
        manifest |= {"extra": plain(extra or {}), "provenance": provenance()}
        write_json(self.folder / MANIFEST, manifest)
        return manifest

    def _damaged(self, what: str) -> ArtifactError:
        remedy = f"delete the folder {self.folder} and run again"
        return ArtifactError(f"stage {self.kind} is damaged: {what}", remedy=remedy)
