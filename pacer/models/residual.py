"""Residual blocks on each entry by itself: what stands in for decoder layers where nothing is attended to.

No block is a linear probe (SPRINTER, arXiv 2502.04557); three are SpecDec++'s head (arXiv 2405.19715). The authors' own
code repeats one block three times; here each has weights of its own.

Shapes: B rows, n entries, W width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from pacer.models.cache import Cache
from pacer.models.paged import make_cache


class Residual(nn.Module):
    """``depth`` blocks x + SiLU(Wx + b), run as decoder layers are; nothing is remembered."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.n_layers = depth
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.register_buffer("zero", torch.zeros(()), persistent=False)  # of a probe: its number type and place
        self.zero: Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.zero.dtype

    @property
    def device(self) -> torch.device:
        return self.zero.device

    def run(
        self,
        x: Tensor,
        a: int,
        b: int,
        positions: Tensor | None = None,
        mask: Tensor | BlockMask | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """Blocks a … b − 1 on entries ``(B, n, W)``; what decoder layers need beside them is not looked at."""
        for block in self.blocks[a:b]:
            x = x + F.silu(block(x))
        return x

    def normed(self, states: Tensor) -> Tensor:
        """Nothing: the states come normed."""
        return states

    def new_cache(self, rows: int, capacity: int, a: int = 0, b: int | None = None, block: int | None = None) -> Cache:
        """A cache that holds no layer, so a reader can count what was read."""
        return make_cache(range(0), rows, capacity, 1, 1, block, dtype=self.dtype, device=self.device)
