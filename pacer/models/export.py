"""Trained parts in the formats that others read; each loads back with equal logits.

- A draft of the target's layers is a whole causal LM folder. Its head covers every id: where the trained head has no
  row, the target's own row goes through the trained projection (a linear head cannot say −∞), as ``full_head`` decodes.
  The copy head is left out: it reads the context, which no transformers model does.
- Exits that the target's own norm and head read out are the model's folder itself, which is what LayerSkip and
  transformers' ``assistant_early_exit`` read.
- The drafter fed by the target has no equal elsewhere. EAGLE-1 as speculators and vLLM read it (``fusion_fc``, a layer
  without its first norm, no norm before the head) takes features and embeddings as they come; ours scales both, norms
  before the layer and before the head, and drafts from the normed state. Its tensors carry a Llama layer's names, so
  that ``LlamaDecoderLayer`` loads them; no ``model_type`` claims to be EAGLE.
- Exits with heads of their own, and pre-verifiers, are their checkpoints: safetensors and config.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, PreTrainedTokenizerBase

from pacer.errors import ConfigError, UnsupportedError
from pacer.files import write_atomic
from pacer.models.checkpoint import identity, load_checkpoint
from pacer.models.feature import PARTS, FeatureDraft
from pacer.models.sources import HUB_FILES
from pacer.models.stack import Stack

MODEL_FILES = (*HUB_FILES, "LICENSE*", "NOTICE*")
FORMAT = "pacer feature draft 1"


def check_free(to: Path) -> None:
    """Refuse a place where something is.

    Raises:
        ConfigError: a file, or a folder that is not empty.
    """
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise ConfigError("export.to is not empty", value=str(to), allowed="a folder that is new or empty")


def write_folder(to: Path, write: Callable[[Path], object], card: Sequence[str]) -> Path:
    """A folder that is there completely or not at all.

    Args:
        to: new or empty. write: fills the folder it is given, which exists.
        card: lines of its README.md, where what is written brings none.

    Raises:
        ConfigError: something is there. ArtifactError: the disk refuses.
    """
    check_free(to)

    def fill(part: Path) -> None:
        part.mkdir()
        write(part)
        if not (part / "README.md").exists():
            (part / "README.md").write_text("".join(f"- {line}\n" for line in card), encoding="utf-8")

    return write_atomic(to, fill)


def write_draft(folder: Path, draft: Stack, tokenizer: PreTrainedTokenizerBase) -> None:
    """A draft over the whole vocabulary as a causal LM folder, in its own dtype.

    Raises:
        UnsupportedError: a head that its family's config does not describe.
    """
    if draft.head.in_features != getattr(draft.config, "word_embed_proj_dim", draft.width):
        raise UnsupportedError(
            "a draft whose head has a projection before it is no folder of its family", value=draft.config.model_type,
            remedy="use its checkpoint: model.draft.source=FOLDER",
        )  # fmt: skip
    ids = {name: getattr(draft.config, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    draft.model.generation_config = GenerationConfig(**ids)
    draft.model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def copy_model(folder: Path, model: Path) -> None:
    """The files of a model's folder: configs, weights, tokenizer, licence."""
    for file in sorted({file for pattern in MODEL_FILES for file in model.glob(pattern) if file.is_file()}):
        shutil.copy(file, folder / file.name)


def copy_checkpoint(folder: Path, checkpoint: Path, kind: str) -> None:
    """The files of a trained part.

    Raises:
        SourceError: nothing complete there. MismatchError: another kind.
    """
    load_checkpoint(checkpoint, kind)
    for file in sorted(file for file in checkpoint.iterdir() if file.is_file()):
        shutil.copy(file, folder / file.name)


def write_feature(folder: Path, draft: FeatureDraft) -> None:
    """A drafter fed by the target: ``model.safetensors`` and ``config.json``, which says how they are used."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in feature_tensors(draft).items()}
    save_file(tensors, folder / "model.safetensors")
    text = json.dumps(feature_config(draft), indent=1, allow_nan=False)
    (folder / "config.json").write_text(text + "\n")


def feature_tensors(draft: FeatureDraft) -> dict[str, Tensor]:
    """By a Llama layer's names: stacked parts apart, halves of a head turn together, the embedding's columns first."""
    found: dict[str, Tensor] = {}
    own = dict(draft.named_parameters())
    heard, embedded = own.pop("inputs.weight").chunk(2, 1)
    found["fusion_fc.weight"] = torch.cat([embedded, heard], 1)
    shape = draft.layers.shape
    kv = shape.kv_heads * shape.head_size
    sizes = {"qkv.weight": [shape.heads * shape.head_size, kv, kv], "gate_up.weight": [shape.hidden] * 2}
    for name, names in PARTS.items():
        weight = own.pop(f"layers.layers.0.{name}")
        parts = list(weight.split(sizes[name])) if name in sizes else [weight]
        if name == "qkv.weight":  # neighbours turn together here
            parts[:2] = [
                part.unflatten(0, (-1, shape.head_size // 2, 2)).transpose(1, 2).flatten(0, 2) for part in parts[:2]
            ]
        found |= {f"transformer.{theirs}": part for theirs, part in zip(names, parts, strict=True)}
    if "own_head.weight" in own:
        found["lm_head.weight"] = own.pop("own_head.weight")
    found |= {name.replace("layers.norm.", "pre_lm_head_layernorm."): weight for name, weight in own.items()}
    if draft.head_ids is not None:
        found["head_ids"] = draft.head_ids.to(torch.int32)
    return found


def feature_config(draft: FeatureDraft) -> dict[str, Any]:
    """What the tensors are: the layer as a Llama's, what it reads, what reads it."""
    shape = draft.layers.shape
    norm: Any = draft.layers.norm
    layer = LlamaConfig(
        hidden_size=shape.width, intermediate_size=shape.hidden, num_hidden_layers=1, num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads, head_dim=shape.head_size, rms_norm_eps=shape.eps,
        rope_parameters={"rope_type": "default", "rope_theta": shape.theta}, vocab_size=draft.target.vocab_size,
        max_position_embeddings=draft.target.context,
    )  # fmt: skip
    eps = getattr(norm, "eps", None) or norm.variance_epsilon
    return {
        "format": FORMAT,
        "transformer_layer_architecture": "LlamaDecoderLayer",
        "transformer_layer_config": layer.to_diff_dict(),
        "fusion_fc": "of [embedding, feature], each divided by its root mean square",
        "feature": "after the final norm: of the target for what it has read, else the drafter's own; 0 at the start",
        "pre_lm_head_layernorm": {"kind": "layer" if hasattr(norm, "bias") else "rms", "eps": float(eps)},
        "lm_head": "own" if "own_head.weight" in dict(draft.named_parameters()) else "the target's rows",
        "head_ids": None if draft.head_ids is None else len(draft.head_ids),
        "target": identity(draft.target, layers=True),
    }
