"""A drafter fed by the target: one decoder layer that goes on from the target's own last states (EAGLE, arXiv
2401.15077).

A *feature* is a last state after the final norm, scaled to a root mean square of one: what the head reads, and what one
layer can be asked to foresee. The entry of a token is made of the feature that *produced* it, the target's own where
the target has read that far, and the token's embedding; the layer turns it into the state from which the next token is
read, whose feature makes the next entry. So a draft's first token follows from what the target knows, the others from
what the layer foresees.

Trained are the layer, its norm and the input product; the target's embedding and head rows are the target's and in no
checkpoint, unless ``head`` says that the rows are trained too. Training and decoding use the same functions.

Shapes: B rows, n tokens, H width, V' ids in the head.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pacer.choices import CHOICES
from pacer.errors import ConfigError, UnsupportedError
from pacer.models.checkpoint import check_identity, identity, load_checkpoint, load_exactly, save_checkpoint
from pacer.models.exits import head_rows, make_adapter
from pacer.models.preverifier_layer import Layer, Layers
from pacer.models.stack import Stack

KIND = "feature_draft"


def scaled(states: Tensor) -> Tensor:
    """``(…, H)`` with a root mean square of one: embeddings are a tenth as large as features, or less."""
    return F.rms_norm(states, states.shape[-1:])


class FeatureDraft(nn.Module):
    """The layer and what is before and behind it. It starts as one that hands its input through, or as a target's.

    Args:
        head_ids: ids of a reduced head (V',); None: the whole vocabulary.
        head: of the target's head rows: ``frozen``, as they are; ``trained``, a copy.
        layer: the target's layer that it starts as. dtype: of its own tensors; None: the target's.

    Raises:
        ConfigError: an unknown head, or a layer that the target has not.
        UnsupportedError: a layer of the target that has other parts.
    """

    def __init__(
        self,
        target: Stack,
        head_ids: Tensor | None = None,
        *,
        head: str = "frozen",
        layer: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if head not in (heads := CHOICES["model.feature.head"]):
            raise ConfigError("unknown model.feature.head", value=head, allowed=heads)
        self.head_ids = None if head_ids is None else head_ids.to(target.device)
        self.inputs = nn.Linear(2 * target.width, target.width, bias=False)
        self.layers: Layers = make_adapter(target, attention_only=False)
        if layer is not None:
            start_as(self.layers, target, layer)
        rows = head_rows(target, self.head_ids)
        if head == "trained":
            self.own_head = rows = copy.deepcopy(rows)
        self._reads = (target, rows)  # in a tuple: the target's is neither trained nor saved here
        self.to(target.device).requires_grad_(True)
        for parameter in self.parameters():  # not the frequencies of rotary positions, which bfloat16 would spoil
            parameter.data = parameter.data.to(dtype or target.dtype)

    @property
    def target(self) -> Stack:
        return self._reads[0]

    @property
    def head(self) -> nn.Linear:
        """What reads out, its own or the target's rows."""
        return self._reads[1]

    @torch.no_grad()
    def heard(self, states: Tensor) -> Tensor:
        """The target's last states before its norm ``(…, H)`` → features."""
        return scaled(self.target.normed(states))

    def features(self, states: Tensor) -> Tensor:
        """Own states before the norm ``(…, H)`` → features."""
        return scaled(self.layers.normed(states))

    def entries(self, features: Tensor, ids: Tensor) -> Tensor:
        """What the layer reads ``(B, n, H)``: features of the places that produced the tokens ``ids (B, n)``; 0 for the
        first of a text, which nothing produced."""
        both = torch.cat([features, scaled(self.target.embed(ids)).to(features.dtype)], -1)
        return self.inputs(both.to(self.inputs.weight.dtype))

    def readout(self, states: Tensor) -> Tensor:
        """Own states before the norm ``(…, H)`` → logits of the next token ``(…, V')``."""
        return self.head(self.layers.normed(states).to(self.head.weight.dtype))


# Our layer's tensors: the parts of a Llama's layer that are stacked into each.
PARTS = {
    "norm.weight": ("input_layernorm.weight",),
    "norm_mlp.weight": ("post_attention_layernorm.weight",),
    "qkv.weight": ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    "o.weight": ("self_attn.o_proj.weight",),
    "gate_up.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "down.weight": ("mlp.down_proj.weight",),
}


@torch.no_grad()
def start_as(own: Layers, target: Stack, number: int) -> None:
    """Give our one layer the weights of the target's layer ``number``.

    Raises:
        ConfigError: there is no such layer. UnsupportedError: it has parts or sizes that ours has not.
    """
    if not 0 <= number < target.n_layers:
        raise ConfigError("model.feature.layer", value=number, allowed=f"0 … {target.n_layers - 1}")
    layer = own.layers[0]
    assert isinstance(layer, Layer)
    theirs = getattr(target.decoder, target.family.layers)[number].state_dict()
    wanted = {name for names in PARTS.values() for name in names}
    if found := sorted(theirs.keys() ^ wanted):
        _refuse(found)
    shape = layer.shape
    for name, parts in PARTS.items():
        rows = [theirs[part] for part in parts]
        if name == "qkv.weight":  # halves of a head turn together there, neighbours here
            turned = (row.unflatten(0, (-1, 2, shape.head_size // 2)).transpose(1, 2).flatten(0, 2) for row in rows[:2])
            rows = [*turned, rows[2]]
        stacked = torch.cat(rows)
        weight = layer.get_parameter(name)
        if weight.shape != stacked.shape:
            _refuse([f"{name} {tuple(stacked.shape)}"])
        weight.copy_(stacked)


def _refuse(found: list[str]) -> None:
    raise UnsupportedError(
        "the target's layer has other parts than a drafter's", value=found[:3], allowed="those of a Llama",
        remedy="set model.feature.layer=null",
    )  # fmt: skip


def save_feature(folder: Path, draft: FeatureDraft, extra: dict[str, Any], card: str) -> Path:
    """Save what was trained, in bfloat16, with the head's ids and the target's identity."""
    tensors = {k: v.to(torch.bfloat16) for k, v in draft.named_parameters()}
    if draft.head_ids is not None:
        tensors["head_ids"] = draft.head_ids.to(torch.int32)
    head = "trained" if "own_head.weight" in tensors else "frozen"
    return save_checkpoint(
        folder, tensors, {"kind": KIND, "head": head, "target": identity(draft.target, layers=True), **extra}, card
    )


def load_feature(folder: Path, target: Stack) -> FeatureDraft:
    """A drafter of this target's features, ready to decode.

    Raises:
        MismatchError: made for another model, or tensors that do not fit.
    """
    tensors, config = load_checkpoint(folder, KIND)
    check_identity(config["target"], target, f"feature drafter {folder.name}")
    head_ids = tensors.pop("head_ids", None)
    draft = FeatureDraft(target, None if head_ids is None else head_ids.long(), head=config["head"])
    load_exactly(draft, tensors, f"feature drafter {folder.name}")
    return draft.eval().requires_grad_(False)
