"""Splits by a stable hash of the row's id: the same on every machine, whatever else is in the set.

All prompts that were made of one row, its parts and other renderings, fall on the same side of every split.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping

SUFFIX = re.compile(r"(>\w+)?(#\d+)?\Z")  # what `pacer.data.renderings` adds to the id of a row


def row_of(id: str) -> str:
    """The id of the row that a prompt was made of: ``cnn_dm-train-3>xsum#1`` → ``cnn_dm-train-3``."""
    return SUFFIX.sub("", id, count=1)


def _share(text: str) -> float:
    """A number in [0, 1) that depends on the text alone."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big") / 2**56


def part_of(id: str, parts: Mapping[str, float]) -> str:
    """Which part an id belongs to, with all of its row; ``parts`` maps names to shares (of their sum), in order."""
    point = _share(f"part:{row_of(id)}") * sum(parts.values())
    for name, share in parts.items():
        point -= share
        if point < 0:
            return name
    return next(reversed(list(parts)))


def owner(id: str, count: int) -> int:
    """Which of ``count`` processes an id's row belongs to, where they share work."""
    return int(_share(f"shard:{row_of(id)}") * count)


def is_tuning(id: str) -> bool:
    """True for the fixed quarter of the evaluation prompts that settings are tuned on; reports use the rest."""
    return _share(f"tune:{row_of(id)}") < 0.25
