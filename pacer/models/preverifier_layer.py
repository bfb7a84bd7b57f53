"""The pre-verifier's own decoder layers: pre-norm, rotary positions, grouped queries, SwiGLU.

The kind of layer that all supported drafts are made of, written out: a call reads one to four entries, and
transformers' own layer spends several times as long on its way there as on the arithmetic. Queries, keys and values
are one product, gate and up another; pairs for the rotation lie side by side, so turning them is one complex product.

Shapes: B rows, n entries, S keys attended to, W width, D head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from pacer.errors import ConfigError
from pacer.models.cache import Cache
from pacer.models.paged import make_cache
from pacer.models.stack import attention

STEP = 8  # widths are multiples of it: every head size that a kernel likes divides them


@dataclass(frozen=True)
class Shape:
    """Sizes of a layer. ``hidden``: of the MLP. ``theta``: base of the rotary frequencies."""

    width: int
    heads: int
    kv_heads: int
    head_size: int
    hidden: int
    eps: float = 1e-5
    theta: float = 10000.0


def shape_like(config: Any, width: int) -> Shape:
    """The shape of a draft's layers (transformers config) at another width; heads keep their size where it divides.

    Raises:
        ConfigError: no multiple of 8.
    """
    if width % STEP:
        raise ConfigError("preverifier.width", value=width, allowed=f"multiples of {STEP}")
    heads_there = config.num_attention_heads
    size_there = getattr(config, "head_dim", None) or config.hidden_size // heads_there
    groups = heads_there // (getattr(config, "num_key_value_heads", None) or heads_there)
    size = max(d for d in range(2, size_there + 1, 2) if width % d == 0)
    heads = width // size
    hidden = getattr(config, "intermediate_size", None) or getattr(config, "ffn_dim", None) or 4 * config.hidden_size
    rope = getattr(config, "rope_parameters", None) or {}
    return Shape(
        width, heads, max(h for h in range(1, max(1, heads // groups) + 1) if heads % h == 0), size,
        STEP * max(1, round(hidden * width / config.hidden_size / STEP)),
        getattr(config, "rms_norm_eps", None) or 1e-5,
        rope.get("rope_theta") or getattr(config, "rope_theta", None) or 10000.0,
    )  # fmt: skip


class Layer(nn.Module):
    """One pre-norm decoder layer; ``number`` is its place in the cache."""

    def __init__(self, shape: Shape, number: int) -> None:
        super().__init__()
        self.shape, self.number = shape, number
        inner = shape.heads * shape.head_size
        self.norm, self.norm_mlp = (nn.RMSNorm(shape.width, shape.eps) for _ in range(2))
        self.qkv = nn.Linear(shape.width, inner + 2 * shape.kv_heads * shape.head_size, bias=False)
        self.o = nn.Linear(inner, shape.width, bias=False)
        self.gate_up = nn.Linear(shape.width, 2 * shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: Tensor, rotation: Tensor, mask: Tensor | BlockMask | None, cache: Cache | None) -> Tensor:
        """States ``(B, n, W)`` → ``(B, n, W)``; ``rotation (B, n, 1, D / 2)`` is complex."""
        x = self.attend(x, rotation, mask, cache)
        gate, up = self.gate_up(self.norm_mlp(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)

    def attend(self, x: Tensor, rotation: Tensor, mask: Tensor | BlockMask | None, cache: Cache | None) -> Tensor:
        """The layer's first half."""
        heads, kv = self.shape.heads, self.shape.kv_heads
        parts = self.qkv(self.norm(x)).unflatten(-1, (heads + 2 * kv, self.shape.head_size))
        pairs = torch.view_as_complex(parts[:, :, : heads + kv].float().unflatten(-1, (-1, 2)))
        turned = torch.view_as_real(pairs * rotation).flatten(-2).to(parts.dtype)
        query, key = turned.transpose(1, 2).split([heads, kv], 1)
        value = parts[:, :, heads + kv :].transpose(1, 2)
        if cache is not None:
            key, value = cache.update(key, value, self.number)
        return x + self.o(attention(self, query, key, value, mask)[0].flatten(2))


class Layers(nn.Module):
    """Layers and the final norm, run and cached as a :class:`~pacer.models.stack.Stack` is."""

    def __init__(self, shape: Shape, depth: int) -> None:
        super().__init__()
        self.shape, self.n_layers = shape, depth
        self.layers = nn.ModuleList(Layer(shape, number) for number in range(depth))
        self.norm = nn.RMSNorm(shape.width, shape.eps)
        frequencies = shape.theta ** (-torch.arange(0, shape.head_size, 2) / shape.head_size)
        self.register_buffer("frequencies", frequencies, persistent=False)
        self.frequencies: Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.norm.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.norm.weight.device

    def run(
        self,
        x: Tensor,
        a: int,
        b: int,
        positions: Tensor,
        mask: Tensor | BlockMask | None,
        cache: Cache | None = None,
    ) -> Tensor:
        """Layers a … b − 1 on entries ``(B, n, W)`` at ``positions (B, n)``; arguments as those of a stack."""
        angles = positions[..., None, None] * self.frequencies.float()
        rotation = torch.polar(torch.ones_like(angles), angles)
        for layer in list(self.layers)[a:b]:
            x = layer(x, rotation, mask, cache)
        return x

    def normed(self, states: Tensor) -> Tensor:
        """The final norm."""
        return self.norm(states)

    def new_cache(self, rows: int, capacity: int, a: int = 0, b: int | None = None, block: int | None = None) -> Cache:
        """A cache for layers a … b − 1, paged in blocks of ``block`` tokens (None: contiguous)."""
        layers: Sequence[int] = range(a, self.n_layers if b is None else b)
        sizes = (self.shape.kv_heads, self.shape.head_size)
        return make_cache(layers, rows, capacity, *sizes, block, dtype=self.dtype, device=self.device)
