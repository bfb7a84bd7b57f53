"""Checkpoints of trained parts: only trained tensors, and the identity of the frozen model they belong to.

A checkpoint is a folder: ``model.safetensors``, ``config.json`` (kind, settings, identity of the base model,
provenance) and ``README.md``, the card. It is written into a sibling folder first and renamed when whole.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from pacer.errors import MismatchError, SourceError
from pacer.files import remove, write_atomic
from pacer.models.stack import Stack

FORMAT = 1


def identity(stack: Stack, *, layers: bool = False) -> dict[str, Any]:
    """What a trained part must find again: family, sizes, and a fingerprint of some weights.

    The fingerprints are taken after rounding to bfloat16, so they are the same for a model loaded in any wider dtype.

    Args:
        layers: also of some rows of every weight of the layers, 4-bit ones too: for a draft, whose embedding is the
            target's, they are what tells one from another.
    """
    config = stack.config
    rows = stack.embedding.weight.detach()
    found = {
        "model_type": config.model_type,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": stack.n_layers,
        "vocab_size": config.vocab_size,
        "fingerprint": digest([rows[:: max(1, rows.shape[0] // 64)], stack.norm.weight.detach()]),
    }
    if layers:
        own = getattr(stack.decoder, stack.family.layers)
        weights = [w.detach() for w in (*own.parameters(), *own.buffers())]
        found["layers"] = digest([w[:: max(1, w.shape[0] // 16)] for w in weights])
    return found


def digest(tensors: Iterable[Tensor]) -> str:
    """A fingerprint of tensors, rounded to bfloat16."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.to(torch.bfloat16).contiguous().view(torch.int16).cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def check_identity(found: Mapping[str, Any], stack: Stack, part: str) -> None:
    """Refuse a part that was made for another model. Layers are compared where they were recorded.

    Raises:
        MismatchError: naming the first differing field and both values.
    """
    for key, value in identity(stack, layers="layers" in found).items():
        if found.get(key) != value:
            raise MismatchError(
                f"{part} belongs to another model: {key} is {value!r} here",
                value=found.get(key),
                remedy="use the model it was trained for, or train it again",
            )


def save_checkpoint(folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any], card: str) -> Path:
    """Write a checkpoint atomically; an existing folder of that name is replaced."""

    def fill(part: Path) -> None:
        part.mkdir()
        save_file({k: v.detach().cpu().contiguous() for k, v in tensors.items()}, part / "model.safetensors")
        text = json.dumps({"format": FORMAT, **config}, indent=1, allow_nan=False)
        (part / "config.json").write_text(text + "\n")
        (part / "README.md").write_text(card)
        remove(folder)  # a rename replaces no folder

    return write_atomic(folder, fill)


def load_checkpoint(folder: Path, kind: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and config of a checkpoint of this kind.

    Raises:
        SourceError: nothing complete there, or damaged. MismatchError: another kind or format.
    """
    if not (folder / "config.json").is_file() or not (folder / "model.safetensors").is_file():
        raise SourceError(
            f"no {kind} checkpoint", value=str(folder), remedy="train one: python -m pacer.train +experiment=…"
        )
    try:
        config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    except (ValueError, SafetensorError) as error:
        remedy = "delete the folder and run again"
        raise SourceError(f"the {kind} checkpoint is damaged ({error})", value=str(folder), remedy=remedy) from error
    if config.get("kind") != kind or config.get("format") != FORMAT:
        raise MismatchError(
            "checkpoint of another kind", value=f"{config.get('kind')} format {config.get('format')}",
            allowed=f"{kind} format {FORMAT}",
        )  # fmt: skip
    return tensors, config


def load_exactly(module: nn.Module, tensors: Mapping[str, Tensor], part: str) -> None:
    """Load trained tensors; a missing or unexpected key, or a wrong shape, is an error."""
    own = dict(module.named_parameters())
    missing, unexpected = sorted(own.keys() - tensors.keys()), sorted(tensors.keys() - own.keys())
    shapes = [k for k in own.keys() & tensors.keys() if own[k].shape != tensors[k].shape]
    if missing or unexpected or shapes:
        raise MismatchError(
            f"{part} does not fit", value={"missing": missing, "unexpected": unexpected, "wrong shape": sorted(shapes)}
        )
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(tensors[name])
