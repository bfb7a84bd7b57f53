"""Stateless random numbers: a function of (seed, request, round, offset, purpose), nothing else.

A request draws the same numbers alone, in any batch and in any order. The round is part of the counter, so that a
position drafted again after a rejection gets fresh numbers: a controller that remembers an earlier draw of the same
position must not be able to predict the next one.
"""

from __future__ import annotations

import hashlib

from torch import Tensor

DRAFT, ACCEPT, NEXT = 1, 2, 3  # purposes
_ROUND, _OFFSET = 0x9E3779B97F4A7C15, 0xD1B54A32D192ED03  # odd constants keep counters apart


def _signed(value: int) -> int:
    """A 64-bit pattern as the int64 that torch holds."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >= 1 << 63 else value


def request_key(seed: int, request: str) -> int:
    """The int64 key of a request; seed 0 is a seed like any other."""
    return _signed(int.from_bytes(hashlib.sha256(f"{seed}:{request}".encode()).digest()[:8], "big"))


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    """The splitmix64 finaliser (Steele, Lea, Flood 2014) in wrapping int64 arithmetic."""
    x = (x ^ _shift(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shift(x, 31)


def uniforms(keys: Tensor, rounds: Tensor, offsets: Tensor, purpose: int) -> Tensor:
    """Float64 numbers in [0, 1).

    Args:
        keys, rounds: ``(B,)`` int64. offsets: ``(n,)`` int64, the place inside the round.

    Returns:
        ``(B, n)``.
    """
    x = _mix(keys + _signed(_ROUND * (2 * purpose + 1)))
    x = _mix(x ^ (rounds * _signed(_ROUND)))
    x = _mix(x[:, None] ^ (offsets[None, :] * _signed(_OFFSET)))
    return _shift(_mix(x), 11).double() * 2.0**-53
