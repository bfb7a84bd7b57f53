"""Exit heads: what a frozen model says after some of its layers.

The states after E layers are read out by a norm and rows of a vocabulary head. Kinds, from what costs nothing to train:

- ``shared``: the model's own final norm and head (LayerSkip checkpoints, arXiv 2404.16710); nothing is trained.
- ``norm``: a norm of its own before the model's head.
- ``linear``: a norm and a vocabulary head of its own (AdaDecode, arXiv 2506.03700).
- ``adapter``: a decoder layer of its own with its own key/value memory, or attention and norms alone (Kangaroo,
  arXiv 2404.18911), then a norm of its own and the model's head. It starts as the identity.

The model's head rows are the model's and are in no checkpoint; exits of one set share them. Every kind starts as the
shared exit. Training and decoding read out by the same function.

Shapes: B rows, T tokens, H width, V vocabulary, V' ids in the head, L layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from pacer.choices import CHOICES
from pacer.errors import ConfigError, MismatchError
from pacer.models.cache import Cache
from pacer.models.checkpoint import check_identity, identity, load_checkpoint, load_exactly, save_checkpoint
from pacer.models.draft import frequent_ids
from pacer.models.placed import own_copy
from pacer.models.preverifier_layer import Layer, Layers, Shape, shape_like
from pacer.models.stack import Stack

KIND = "exits"
RECORD = "training.json"  # in the folder of a tuned model: what the config of other checkpoints holds


class AttentionLayer(Layer):
    """A decoder layer without its MLP."""

    def __init__(self, shape: Shape, number: int) -> None:
        super().__init__(shape, number)
        del self.norm_mlp, self.gate_up, self.down

    def forward(self, x: Tensor, rotation: Tensor, mask: Tensor | BlockMask | None, cache: Cache | None) -> Tensor:
        """As :meth:`Layer.forward`."""
        return self.attend(x, rotation, mask, cache)


def make_adapter(target: Stack, attention_only: bool) -> Layers:
    """One layer of the target's shape that hands its input through, under a copy of the target's final norm."""
    shape = shape_like(target.config, target.width)
    adapter = Layers(shape, 1)
    if attention_only:
        adapter.layers[0] = AttentionLayer(shape, 0)
    for name, weight in adapter.named_parameters():
        if name.endswith(("o.weight", "down.weight")):
            nn.init.zeros_(weight)
    adapter.norm = own_copy(target.norm, target.device)
    return adapter


class ExitHead(nn.Module):
    """What reads out states after ``layer`` layers. Its parameters are what is trained, none of the target's.

    Args:
        layer: E, the number of layers below. kind: see above.
        rows: the target's head, or its rows of ``head_ids`` (V',); None: the whole vocabulary.
        attention_only: of kind adapter: without an MLP. dtype: of its own tensors; None: the target's.

    ``adapter`` is run by whoever keeps its memory: states ``(B, n, H)`` after E layers → what :meth:`readout` reads.

    Raises:
        ConfigError: an unknown kind.
    """

    def __init__(
        self,
        target: Stack,
        layer: int,
        kind: str,
        rows: nn.Linear,
        head_ids: Tensor | None = None,
        *,
        attention_only: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if kind not in (kinds := CHOICES["model.exits.kind"]):
            raise ConfigError("unknown model.exits.kind", value=kind, allowed=kinds)
        self.layer, self.kind, self.head_ids = layer, kind, head_ids
        self.adapter: Layers | None = None
        norm, head = target.norm, rows
        if kind == "adapter":
            self.adapter = make_adapter(target, attention_only)
            norm = self.adapter.norm
        elif kind != "shared":
            self.own_norm = norm = own_copy(target.norm, target.device)
        if kind == "linear":
            self.own_head = head = own_copy(rows, target.device)
        self._reads: tuple[Any, nn.Linear] = (norm, head)  # in a tuple: the target's is neither trained nor saved here
        self.to(target.device).requires_grad_(True)
        for parameter in self.parameters():  # not the frequencies of rotary positions, which bfloat16 would spoil
            parameter.data = parameter.data.to(dtype or target.dtype)

    @property
    def norm(self) -> Any:
        """The norm in front of the head, its own or the target's."""
        return self._reads[0]

    @property
    def head(self) -> nn.Linear:
        """What reads out, its own or the target's rows."""
        return self._reads[1]

    def adapted(self, states: Tensor, positions: Tensor, mask: Tensor | BlockMask | None) -> Tensor:
        """Whole texts, without memory: states ``(B, T, H)`` after E layers → what :meth:`readout` reads."""
        if self.adapter is None:
            return states
        return self.adapter.run(states.to(self.adapter.dtype), 0, 1, positions, mask)

    def readout(self, states: Tensor) -> Tensor:
        """States ``(…, H)``, of the adapter where there is one → logits ``(…, V')``: one norm and one product."""
        normed = self.norm(states)
        return self.head(normed.to(self.head.weight.dtype)).to(states.device)


def reduced_ids(texts: Iterable[Sequence[int]], size: int, always: Iterable[int], vocab_size: int) -> Tensor | None:
    """The ids of a reduced head as :func:`frequent_ids` chooses them; None for the whole vocabulary."""
    found = frequent_ids(texts, size, always, vocab_size)
    return None if len(found) == vocab_size else found


def check_layers(target: Stack, layers: Sequence[int]) -> None:
    """Refuse exits that are none of this model's.

    Raises:
        ConfigError: none, twice the same, or beyond the model's layers.
    """
    allowed = f"different numbers from 1 to {target.n_layers - 1}"
    if not layers or len(set(layers)) < len(layers) or not all(0 < e < target.n_layers for e in layers):
        raise ConfigError("exits after so many layers", value=list(layers), allowed=allowed)


def make_exits(
    target: Stack,
    kind: str,
    layers: Sequence[int],
    head_ids: Tensor | None = None,
    *,
    attention_only: bool = False,
    dtype: torch.dtype | None = None,
) -> dict[int, ExitHead]:
    """Exits after so many layers, as they are before training; arguments and errors as those of :class:`ExitHead`."""
    check_layers(target, layers)
    head_ids = None if head_ids is None else head_ids.to(target.device)
    rows = head_rows(target, head_ids)
    options: dict[str, Any] = {"attention_only": attention_only, "dtype": dtype}
    return {layer: ExitHead(target, layer, kind, rows, head_ids, **options) for layer in sorted(layers)}


def head_rows(target: Stack, head_ids: Tensor | None) -> nn.Linear:
    """The target's head, or a frozen copy of its rows of ``head_ids`` (V',)."""
    if head_ids is None:
        return target.head
    rows = nn.Linear(target.head.in_features, len(head_ids), bias=False, device="meta")
    weight = target.head.weight.detach()
    rows.weight = nn.Parameter(weight[head_ids.to(weight.device)].to(target.device), requires_grad=False)
    return rows


def shared_exits(target: Stack, layers: Sequence[int], head_ids: Tensor | None = None) -> dict[int, ExitHead]:
    """Exits that read by the target's own final norm and head; nothing is trained."""
    return make_exits(target, "shared", layers, head_ids)


def as_module(heads: dict[int, ExitHead]) -> nn.ModuleDict:
    """A set of exits as one module, in order of their layers."""
    return nn.ModuleDict({str(layer): heads[layer] for layer in sorted(heads)})


def save_exits(folder: Path, heads: dict[int, ExitHead], target: Stack, extra: dict[str, Any], card: str) -> Path:
    """Save what was trained, in bfloat16, with the head's ids and the target's identity.

    Args:
        heads: of one kind, over the same ids.
    """
    tensors = {k: v.to(torch.bfloat16) for k, v in as_module(heads).named_parameters()}
    one = next(iter(heads.values()))
    if one.head_ids is not None:
        tensors["head_ids"] = one.head_ids.to(torch.int32)
    attention_only = one.adapter is not None and isinstance(one.adapter.layers[0], AttentionLayer)
    config = {
        "kind": KIND, "exit_kind": one.kind, "layers": sorted(heads), "attention_only": attention_only,
        "target": identity(target, layers=True), **extra,
    }  # fmt: skip
    return save_checkpoint(folder, tensors, config, card)


def load_exits(folder: Path, target: Stack, layers: Sequence[int] | None = None) -> dict[int, ExitHead]:
    """Exits of this target, ready to decode.

    Args:
        layers: which of them; None: all that there are.

    Raises:
        MismatchError: made for another model, tensors that do not fit, or an exit that the checkpoint lacks.
    """
    tensors, config = load_checkpoint(folder, KIND)
    check_identity(config["target"], target, f"exits {folder.name}")
    check_wanted(config["layers"] if layers is None else layers, config["layers"], str(folder))
    head_ids = tensors.pop("head_ids", None)
    heads = make_exits(
        target, config["exit_kind"], config["layers"], None if head_ids is None else head_ids.long(),
        attention_only=config["attention_only"],
    )  # fmt: skip
    module = as_module(heads)
    load_exactly(module, tensors, f"exits {folder.name}")
    module.eval().requires_grad_(False)
    return {layer: heads[layer] for layer in (heads if layers is None else sorted(set(layers)))}


def check_wanted(wanted: Iterable[int], there: Sequence[int], where: str) -> None:
    """Refuse an exit that is not among those of a checkpoint.

    Raises:
        MismatchError: lists the exits there are.
    """
    if lacking := sorted(set(wanted) - set(there)):
        remedy = "ask for one of those, or train the exit: python -m pacer.train +experiment=exits/…"
        raise MismatchError(f"{where} has no exit after so many layers", value=lacking, allowed=there, remedy=remedy)
