"""Splits by a stable hash of the id: the same on every machine, whatever else is in the set."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping


def _share(text: str) -> float:
    """A number in [0, 1) that depends on the text alone."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big") / 2**56


def part_of(id: str, parts: Mapping[str, float]) -> str:
    """Which part an id belongs to; ``parts`` maps names to shares (of their sum), in order."""
    point = _share(f"part:{id}") * sum(parts.values())
    for name, share in parts.items():
        point -= share
        if point < 0:
            return name
    return next(reversed(list(parts)))


def is_tuning(id: str) -> bool:
    """True for the fixed quarter of the evaluation prompts that settings are tuned on; reports use the rest."""
    return _share(f"tune:{id}") < 0.25
