"""Errors for people: one line with what is wrong, the value, what is allowed and the remedy."""

from __future__ import annotations

EXIT_ERROR = 2  # a PacerError reached the command line
EXIT_REQUEUE = 75  # stopped by a signal with its state saved (EX_TEMPFAIL): run the same command again


class PacerError(Exception):
    """A problem the user can solve.

    Args:
        what: what is wrong, a short clause.
        value: the offending value, shown with ``repr``; omitted when None.
        allowed: what would have been accepted (a sentence part or a sequence of names).
        remedy: what to do, starting with a verb.
    """

    def __init__(
        self,
        what: str,
        *,
        value: object = None,
        allowed: object = None,
        remedy: str | None = None,
    ) -> None:
        if allowed is not None and not isinstance(allowed, str):
            allowed = ", ".join(str(a) for a in allowed)  # type: ignore[attr-defined]
        parts = [what]
        if value is not None:
            parts[0] += f": {value!r}"
        if allowed:
            parts.append(f"allowed: {allowed}")
        if remedy:
            parts.append(remedy)
        super().__init__("; ".join(parts).replace("\n", " "))
        self.what, self.value, self.allowed, self.remedy = what, value, allowed, remedy


class ConfigError(PacerError):
    """A configuration key or value that does not exist or does not fit."""


class SourceError(PacerError):
    """A model or data set that cannot be found, reached or trusted."""


class MismatchError(PacerError):
    """Two parts that do not belong together: tokenizers, widths, vocabularies, checkpoints."""


class UnsupportedError(PacerError):
    """An architecture or option that a method does not support."""


class DecodingError(PacerError):
    """The decoder met values it must not continue with, such as NaN logits."""
