"""Runs of wandb: one for each training and each measurement of a job, jobs of one sweep in one group.

Offline a run is a folder, and the command that uploads it is said.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pacer.settings import LoggerSettings

if TYPE_CHECKING:
    from wandb.sdk.wandb_run import Run

log = logging.getLogger(__name__)


@contextmanager
def wandb_run(settings: LoggerSettings, folder: Path, kind: str) -> Iterator[Run | None]:
    """A run for the work in a folder, ended with it, so that the next job of this process opens one of its own; None
    where the settings want none."""
    if settings.wandb == "disabled":
        yield None
        return
    import wandb  # takes a second

    run = wandb.init(
        project=settings.project, group=settings.group, name=f"{kind}-{folder.name}", job_type=kind, dir=folder,
        mode="offline" if settings.wandb == "offline" else "online",
    )  # fmt: skip
    code = 1
    try:
        yield run
        code = 0
    finally:
        run.finish(exit_code=code)
        if settings.wandb == "offline":
            log.info("to upload: wandb sync %s", run.settings.sync_dir)


def log_results(
    settings: LoggerSettings, folder: Path, kind: str, tables: Mapping[str, Sequence[Mapping[str, Any]]]
) -> None:
    """Tables (their plain columns) and all plots of a folder, as one run.

    Args:
        tables: rows by name.
    """
    with wandb_run(settings, folder, kind) as run:
        if run is None:
            return
        import wandb

        plots = [path for path in sorted(folder.rglob("*.png")) if "wandb" not in path.relative_to(folder).parts]
        logged: dict[str, Any] = {path.stem: wandb.Image(str(path)) for path in plots}
        for name, rows in tables.items():
            keys = rows[0] if rows else {}
            columns: list[str | int] = [key for key in keys if all(_is_plain(row.get(key)) for row in rows)]
            logged[name] = wandb.Table(columns=columns, data=[[row.get(str(key)) for key in columns] for row in rows])
        run.log(logged)


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, bool | int | float | str)
