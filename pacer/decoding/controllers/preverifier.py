"""PACER's rule: blocks of b tokens, each judged by the pre-verification layer (arXiv 2602.01274).

The mean estimate of the block below t ends the draft; otherwise t grows by ρ and the next block is written. t starts
again at t0 in each round. M_B runs once per block, on the block's entries only: its key/value memory holds the
verified prefix (index 0) and the current draft, and is cut back to the prefix after each round.

Shapes: B rows, n entries, b block, T places.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pacer.decoding.drafters.model import Record
from pacer.decoding.lane import Lane
from pacer.decoding.request import Row
from pacer.errors import ConfigError
from pacer.models.preverifier import Preverifier

RULES = ("mean", "min", "product")


def block_value(scores: Tensor, rule: str) -> Tensor:
    """One number of a block's estimates ``(…, b)`` → ``(…)``."""
    if rule == "mean":
        return scores.mean(-1)
    return scores.amin(-1) if rule == "min" else scores.prod(-1)


class PreverifierRule:
    """Stop when the pre-verifier doubts the block just drawn.

    Args:
        b: block size. t0: first threshold. rho: its growth per block. gamma_max: longest draft.
        rule: how a block's estimates become one number.
    """

    reads_record = True
    stop, full = "controller", "gamma_max"

    def __init__(
        self,
        module: Preverifier,
        b: int = 2,
        t0: float = 0.5,
        rho: float = 1.0,
        gamma_max: int = 16,
        rule: str = "mean",
    ) -> None:
        for name, value, ok, allowed in (
            ("b", b, b >= 1, "≥ 1"),
            ("t0", t0, 0 <= t0 <= 1, "in [0, 1]"),
            ("rho", rho, rho > 0, "> 0"),
            ("gamma_max", gamma_max, gamma_max >= b, f"≥ b = {b}"),
            ("rule", rule, rule in RULES, ", ".join(RULES)),
        ):
            if not ok:
                raise ConfigError(f"controller.{name} out of range", value=value, allowed=allowed)
        self.module, self.lane = module, Lane(module.stack)
        self.b, self.t0, self.rho, self.gamma_max, self.rule = b, t0, rho, gamma_max, rule

    def reset(self, rows: Sequence[Row], capacity: int) -> None:
        self.lane.reset(len(rows), capacity + 1)

    def prefill(self, record: Record | None, rows: Sequence[Row]) -> None:
        assert record is not None
        self._read(record, [len(row.committed) for row in rows], [len(row.committed) for row in rows])

    def block(self, drawn: int) -> int:
        return min(self.b, self.gamma_max - drawn)

    def judge(
        self, record: Record | None, rows: Sequence[Row], drawn: int, open_rows: Sequence[bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        assert record is not None
        bases = [len(row.committed) for row in rows]
        blocks = (drawn + self.b - 1) // self.b
        fresh = drawn - (blocks - 1) * self.b
        ends = [
            base + drawn if is_open else have
            for base, have, is_open in zip(bases, self.lane.lengths, open_rows, strict=True)
        ]
        scores = self._read(record, ends, bases)[:, -fresh:]
        return block_value(scores, self.rule) >= self.t0 * self.rho ** (blocks - 1), scores

    def end(self, committed: Sequence[int]) -> None:
        self.lane.truncate(committed)  # what was drafted carries draft indices; accepted tokens come again with index 0

    def _read(self, record: Record, ends: Sequence[int], bases: Sequence[int]) -> Tensor:
        """Feed each row's entries up to place ``ends`` (exclusive); returns estimates, right-aligned ``(B, n)``."""
        counts = [max(0, end - have) for end, have in zip(ends, self.lane.lengths, strict=True)]
        n = max(counts)
        device = record.ids.device
        table = torch.tensor([self.lane.lengths, list(bases), counts], device=device)
        places = (table[0, :, None] + torch.arange(n, device=device)).clamp_max(record.ids.shape[1] - 1)
        index = (places - table[1, :, None] + 1).clamp_min(0)
        features = self.module.select(record.logprob.gather(1, places), record.entropy.gather(1, places), index)
        states = record.produced.gather(1, places[..., None].expand(-1, -1, record.produced.shape[2]))
        hidden = self.lane.feed(self.module.entries(states, record.ids.gather(1, places), index, features), counts)
        scores = self.module.logits(hidden, features).float().sigmoid()
        if min(counts) == n:
            return scores
        shift = (torch.arange(n, device=device)[None] - (n - table[2, :, None])) % n  # right-align ragged rows
        return scores.gather(1, shift)
