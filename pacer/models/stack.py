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
from collections.abc import Sequence
from itertools import groupby
from operator import attrgetter
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
from pacer.models.families import FAMILIES, check_supported, kv_shape
from pacer.models.paged import make_cache
from pacer.models.placed import SplitCache

__all__ = ["FAMILIES", "Stack", "attention", "causal_mask", "check_supported"]


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


class NoPositions(nn.Module):
    """In place of learned positions, where they were added before."""

    zero: Tensor

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.register_buffer("zero", torch.zeros((), device=device))

    def forward(self, *_: object, **__: object) -> Tensor:
        return self.zero


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
        self.decoder: Any = attrgetter(self.family.decoder)(model)
        self.embedding: nn.Embedding = getattr(self.decoder, self.family.embed)
        self.norm: Any = getattr(self.decoder, self.family.norm)
        self.folded = self._fold()
        self.head: nn.Linear = getattr(model, self.family.head)
        self.n_layers = len(getattr(self.decoder, self.family.layers))
        self.width: int = self.config.hidden_size
        self.context: int = self.config.max_position_embeddings
        self.vocab_size: int = self.config.vocab_size  # of the ids, padded rows included
        # transformers renamed the argument; the class's own signature says which name this version takes
        names = inspect.signature(type(self.decoder).forward).parameters
        self._cache_argument = "cache" if "cache" in names else "past_key_values"
        self._slices: dict[tuple[int, int, bool], nn.Module] = {}

    @property
    def dtype(self) -> torch.dtype:
        return next(self.decoder.parameters()).dtype

    @property
    def device(self) -> torch.device:
        return next(self.decoder.parameters()).device

    def embed(self, ids: Tensor) -> Tensor:
        """Token ids ``(B, n)`` → states ``(B, n, H)``, without positions.

        Padding of a larger vocabulary, which another model may write and this one has no row for, reads as the last id.
        """
        states = self.embedding(ids.clamp_max(self.vocab_size - 1))
        project = self._part("project_in")
        return states if project is None else project(states)

    def text_entries(self, ids: Tensor, positions: Tensor, mask: Tensor | BlockMask | None) -> Tensor:
        """What the layers read of whole texts ``(B, n)``: embeddings; of one that another model feeds, more."""
        return self.embed(ids)

    def next_entries(self, ids: Tensor, states: Tensor) -> Tensor:
        """What the layers read of tokens ``(B, n)`` that own last states ``(B, n, H)`` produced."""
        return self.embed(ids)

    def read_packed(
        self, ids: Tensor, positions: Tensor, mask: Tensor | BlockMask, source: Tensor, index: Tensor
    ) -> Tensor:
        """Last states before the norm of packed texts and drafts (`pacer.data.packing`), ``(B, N)`` → ``(B, N, H)``."""
        return self.run(self.embed(ids), 0, self.n_layers, positions, mask)

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
        return self._forward(self._slice(a, b, a == 0), x, positions, mask, cache)

    def run_in_turn(
        self, x: Tensor, layers: Sequence[int], positions: Tensor, mask: Tensor | BlockMask | None
    ) -> Tensor:
        """Single layers in any order, as a model made of them would run them; arguments as those of :meth:`run`."""
        for place, layer in enumerate(layers):
            x = self._forward(self._slice(layer, layer + 1, place == 0), x, positions, mask, None)
        return x

    def _forward(
        self, part: nn.Module, x: Tensor, positions: Tensor, mask: Tensor | BlockMask | None, cache: Cache | None
    ) -> Tensor:
        if mask is None:
            mask = torch.ones(x.shape[0], 1, x.shape[1], x.shape[1], dtype=torch.bool, device=x.device)
        kwargs = {self._cache_argument: cache, "use_cache": cache is not None}
        states: Tensor = part(inputs_embeds=x, position_ids=positions, attention_mask=mask, **kwargs).last_hidden_state
        return states.to(x.device)  # from where the last layer is, of a model over several devices

    def normed(self, states: Tensor) -> Tensor:
        """The final norm, which :meth:`run` leaves out: ``(…, H)`` → ``(…, H)``."""
        return self.norm(states).to(states.device)

    def readout(self, states: Tensor, copied: Copied | None = None) -> Tensor:
        """States before the final norm ``(…, H)`` → logits ``(…, V)``; of any layer, for shared-head exits too.

        With candidates ``(…)`` of a stack that copies: ``(…, V + 1)``, the last row for a candidate the head lacks.
        """
        normed = self.normed(states)
        logits = self.head(normed).to(states.device)
        return logits if copied is None or self.copying is None else self.copying(normed, logits, copied)

    def new_cache(self, rows: int, capacity: int, a: int = 0, b: int | None = None, block: int | None = None) -> Cache:
        """A cache for layers a … b − 1 (all by default), paged in blocks of ``block`` tokens (None: contiguous)."""
        own = getattr(self.decoder, self.family.layers)
        numbers = range(a, self.n_layers if b is None else b)
        places = [(d, list(g)) for d, g in groupby(numbers, key=lambda i: next(own[i].parameters()).device)]
        parts = [
            make_cache(layers, rows, capacity, *kv_shape(self.config), block, dtype=self.dtype, device=device)
            for device, layers in places
        ]
        return parts[0] if len(parts) == 1 else SplitCache(parts, [len(layers) for _, layers in places], a)

    def _slice(self, a: int, b: int, entry: bool) -> nn.Module:
        """Layers a … b − 1; ``entry``: the text meets them first, so that they come with learned positions."""
        if (a, b, entry) not in self._slices:
            if not 0 <= a < b <= self.n_layers:
                raise UnsupportedError("no such layers", value=f"[{a}:{b}]", allowed=f"0 ≤ a < b ≤ {self.n_layers}")
            part = copy.copy(self.decoder)
            part.__dict__.pop("forward", None)  # a hook's, bound to the whole decoder: the layers have their own
            part._modules = dict(self.decoder._modules)  # copy.copy shares the registry: give the slice its own
            layers = getattr(self.decoder, self.family.layers)
            setattr(part, self.family.layers, nn.ModuleList(layers[a:b]))
            setattr(part, self.family.norm, nn.Identity())
            if self.family.project_in:
                setattr(part, self.family.project_in, None)  # embed() has done it
            if self.family.positions and not entry:
                setattr(part, self.family.positions, NoPositions(self.device))
            if self.family.dropout and not entry:
                setattr(part, self.family.dropout, nn.Identity())
            self._slices[a, b, entry] = part
        return self._slices[a, b, entry]

    def _part(self, role: str) -> nn.Module | None:
        """What the decoder has in a role that not every family knows."""
        name = getattr(self.family, role)
        part: nn.Module | None = getattr(self.decoder, name) if name else None
        return part

    @torch.no_grad()
    def _fold(self) -> bool:
        """Multiply a projection behind the final norm into the head, so that every head reads states of width H.

        The model is changed, what it computes is not: transformers' own ``generate`` goes on with it. Whether it was.
        """
        if (project := self._part("project_out")) is None:
            return False
        head = getattr(self.model, self.family.head)
        folded = nn.Linear(self.config.hidden_size, head.out_features, bias=False, device="meta")
        folded.weight = nn.Parameter(head.weight @ project.weight, requires_grad=False)
        setattr(self.model, self.family.head, folded)
        setattr(self.decoder, str(self.family.project_out), None)
        return True


def causal_mask(positions: Tensor, extent: int) -> Tensor:
    """``(B, 1, n, S)``: a query at position t sees cache slots 0 … t."""
    return torch.arange(extent, device=positions.device)[None, None, None, :] <= positions[:, None, :, None]
