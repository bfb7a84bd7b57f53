"""Progress of long work: a bar on a terminal, a plain line now and then elsewhere (log files, CI)."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

from tqdm import tqdm

LINE_SECONDS = 10.0
_LINE = "{desc}: {n_fmt}/{total_fmt} {unit} [{elapsed}<{remaining}, {rate_fmt}{postfix}]"
_LINE_OPEN = "{desc}: {n_fmt} {unit} [{elapsed}, {rate_fmt}{postfix}]"


class Lines(tqdm):
    """tqdm that writes whole lines instead of redrawing one."""

    disable: bool
    shown: tuple[Any, Any] | None = None  # what the last line said

    def display(self, msg: str | None = None, pos: int | None = None) -> bool:
        self.fp.write((msg or str(self)).strip() + "\n")
        self.fp.flush()
        self.shown = self.n, self.postfix
        return True

    def close(self) -> None:
        """One last line, unless it has been said; tqdm's own close would add control characters."""
        if not self.disable and self.shown != (self.n, self.postfix):
            self.display()
        self.disable = True


def progress(
    work: Iterable[Any] | int | None,
    desc: str,
    unit: str = "it",
    postfix: Mapping[str, object] | None = None,
    *,
    initial: int = 0,
) -> tqdm[Any]:
    """Follow work that takes a while, on stderr.

    Args:
        work: an iterable to go through, or the number of units to come (then call ``.update(n)``); None: unknown.
        desc: what is going on. unit: name of one unit. postfix: values shown behind (change: ``.set_postfix``).
        initial: units done before, when work resumes.

    Returns:
        A tqdm: iterate over it, or use it as a context manager.
    """
    total = work if isinstance(work, int) else None
    iterable = None if isinstance(work, int) else work
    common: dict[str, Any] = {"desc": desc, "unit": unit, "postfix": dict(postfix or {}), "initial": initial}
    if sys.stderr.isatty():
        return tqdm(iterable, total=total, file=sys.stderr, dynamic_ncols=True, **common)
    if total is None and hasattr(iterable, "__len__"):
        total = len(iterable)  # type: ignore[arg-type]  # hasattr does not narrow
    # miniters=1: tqdm's own adaptation skips updates of work that gets slower.
    return Lines(
        iterable,
        total=total,
        file=sys.stderr,
        bar_format=_LINE_OPEN if total is None else _LINE,
        mininterval=LINE_SECONDS,
        maxinterval=float("inf"),
        miniters=1,
        delay=LINE_SECONDS,
        **common,
    )
