"""A transformers causal LM as embed → layers[a:b] → readout.

The only file that touches a transformers decoder. A slice is a shallow copy of the decoder that owns ``layers[a:b]``
and a neutral final norm, called through its public ``forward``; no modelling code is copied. Positions and the
4-D boolean mask (True: may attend) are always explicit, since transformers' defaults assume one length for all rows.

Shapes: B rows, n new tokens, S keys attended to, H width, V vocabulary (of the head), L layers.
"""

from __future__ import annotations

import copy
import functools
import inspect
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from pacer.errors import UnsupportedError
from pacer.models.cache import Cache
from pacer.models.copying import Copied, CopyHead
from pacer.models.paged import make_cache


@dataclass(frozen=True)
class Family:
    """Attribute names of one architecture."""

    decoder: str = "model"
    embed: str = "embed_tokens"
    layers: str = "layers"
    norm: str = "norm"
    head: str = "lm_head"


FAMILIES: dict[str, Family] = {"llama": Family(), "qwen2": Family(), "qwen3": Family(), "mistral": Family()}


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | BlockMask | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """SDPA that reads grouped key/value heads where they lie (transformers copies them per head under a mask).

    A block mask, which packed training uses on a GPU, goes to FlexAttention.
    """
    if isinstance(attention_mask, BlockMask):
        flex = flex_attention if query.device.type == "cpu" else _compiled_flex()
        out = flex(query, key, value, block_mask=attention_mask, scale=scaling, enable_gqa=True)
        return out.transpose(1, 2).contiguous(), None
    out = F.scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, dropout_p=dropout, scale=scaling, enable_gqa=True
    )
    return out.transpose(1, 2).contiguous(), None


@functools.cache
def _compiled_flex() -> Any:
    return torch.compile(flex_attention)


def _explicit_mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """Transformers' own SDPA mask, never left out: our attention function knows no implicit causality."""
    return sdpa_mask(*args, **{**kwargs, "allow_is_causal_skip": False})


AttentionInterface.register("pacer_sdpa", attention)
AttentionMaskInterface.register("pacer_sdpa", _explicit_mask)


def check_supported(config: Any) -> Family:
    """The family of a config, or :class:`UnsupportedError` with what is supported.

    Caches that cannot be rolled back (recurrent, sliding window) are refused here, before anything is built.
    """
    kind = getattr(config, "model_type", None)
    if kind not in FAMILIES:
        raise UnsupportedError("unsupported architecture", value=kind, allowed=sorted(FAMILIES))
    mixed = set(getattr(config, "layer_types", None) or ["full_attention"]) - {"full_attention"}
    window = getattr(config, "sliding_window", None)
    if getattr(config, "use_sliding_window", True) is False:
        window = None
    if mixed or (window is not None and window < config.max_position_embeddings):
        raise UnsupportedError(
            "attention that forgets cannot be rolled back",
            value=sorted(mixed) or f"sliding_window={window}",
            allowed="full attention in every layer",
            remedy="use a checkpoint without sliding-window or recurrent layers",
        )
    rope = getattr(config, "rope_parameters", None) or {}
    scaling = rope.get("rope_type")
    if scaling in ("dynamic", "longrope"):
        raise UnsupportedError(
            "positions that change with the text's length cannot be cached for drafts and batches",
            value=f"rope_type={scaling}",
            allowed="default, linear, yarn, llama3",
        )
    return FAMILIES[kind]


class Stack:
    """A causal LM as replaceable pieces. ``head_ids`` (V,) maps rows of a reduced head to token ids, None: identity.

    ``copying``: of a draft that copies from its context.

    Raises:
        UnsupportedError: architecture or attention kind that cannot be cut or rolled back.
    """

    def __init__(self, model: PreTrainedModel, head_ids: Tensor | None = None, copying: CopyHead | None = None) -> None:
        self.family = check_supported(model.config)
        self.model: Any = model
        self.config, self.head_ids, self.copying = model.config, head_ids, copying
        model.set_attn_implementation("pacer_sdpa")
        self.decoder: Any = getattr(model, self.family.decoder)
        self.embedding: nn.Embedding = getattr(self.decoder, self.family.embed)
        self.norm: Any = getattr(self.decoder, self.family.norm)
        self.head: nn.Linear = getattr(model, self.family.head)
        self.n_layers = len(getattr(self.decoder, self.family.layers))
        self.width: int = self.config.hidden_size
        self.context: int = self.config.max_position_embeddings
        self.vocab_size: int = self.config.vocab_size  # of the ids, padded rows included
        # transformers renamed the argument; the class's own signature says which name this version takes
        names = inspect.signature(type(self.decoder).forward).parameters
        self._cache_argument = "cache" if "cache" in names else "past_key_values"
        self._slices: dict[tuple[int, int], nn.Module] = {}

    @property
    def dtype(self) -> torch.dtype:
        return next(self.decoder.parameters()).dtype

    @property
    def device(self) -> torch.device:
        return next(self.decoder.parameters()).device

    def embed(self, ids: Tensor) -> Tensor:
        """Token ids ``(B, n)`` → states ``(B, n, H)``."""
        return self.embedding(ids)

    def run(
        self,
        x: Tensor,
        a: int,
        b: int,
        positions: Tensor,
        mask: Tensor | BlockMask | None,
        cache: Cache | None = None,
    ) -> Tensor:
        """Layers a … b − 1 on states ``(B, n, H)``.

        Args:
            positions: ``(B, n)`` absolute positions.
            mask: ``(B, 1, n, S)`` bool, True where a query may attend (or a FlexAttention block mask); None: all.
            cache: where keys and values go; None: the n tokens see only each other.

        Returns:
            States ``(B, n, H)`` after layer b − 1, before any final norm.
        """
        if mask is None:
            mask = torch.ones(x.shape[0], 1, x.shape[1], x.shape[1], dtype=torch.bool, device=x.device)
        kwargs = {self._cache_argument: cache, "use_cache": cache is not None}
        return self._slice(a, b)(
            inputs_embeds=x, position_ids=positions, attention_mask=mask, **kwargs
        ).last_hidden_state

    def normed(self, states: Tensor) -> Tensor:
        """The final norm, which :meth:`run` leaves out: ``(…, H)`` → ``(…, H)``."""
        return self.norm(states)

    def readout(self, states: Tensor, copied: Copied | None = None) -> Tensor:
        """States before the final norm ``(…, H)`` → logits ``(…, V)``; of any layer, for shared-head exits too.

        With candidates ``(…)`` of a stack that copies: ``(…, V + 1)``, the last row for a candidate the head lacks.
        """
        normed = self.normed(states)
        logits = self.head(normed)
        return logits if copied is None or self.copying is None else self.copying(normed, logits, copied)

    def new_cache(self, rows: int, capacity: int, a: int = 0, b: int | None = None, block: int | None = None) -> Cache:
        """A cache for layers a … b − 1 (all by default), paged in blocks of ``block`` tokens (None: contiguous)."""
        heads = getattr(self.config, "num_key_value_heads", None) or self.config.num_attention_heads
        size = getattr(self.config, "head_dim", None) or self.width // self.config.num_attention_heads
        layers = range(a, self.n_layers if b is None else b)
        return make_cache(layers, rows, capacity, heads, size, block, dtype=self.dtype, device=self.device)

    def _slice(self, a: int, b: int) -> nn.Module:
        if (a, b) not in self._slices:
            if not 0 <= a < b <= self.n_layers:
                raise UnsupportedError("no such layers", value=f"[{a}:{b}]", allowed=f"0 ≤ a < b ≤ {self.n_layers}")
            part = copy.copy(self.decoder)
            part._modules = dict(self.decoder._modules)  # copy.copy shares the registry: give the slice its own
            layers = getattr(self.decoder, self.family.layers)
            setattr(part, self.family.layers, nn.ModuleList(layers[a:b]))
            setattr(part, self.family.norm, nn.Identity())
            self._slices[a, b] = part
        return self._slices[a, b]


def causal_mask(positions: Tensor, extent: int) -> Tensor:
    """``(B, 1, n, S)``: a query at position t sees cache slots 0 … t."""
    return torch.arange(extent, device=positions.device)[None, None, None, :] <= positions[:, None, :, None]
