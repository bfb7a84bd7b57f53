"""The architectures that can be cut into layers: what their parts are called, and which variants of them cannot.

Shapes: H width, E width of the embedding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pacer.errors import UnsupportedError


@dataclass(frozen=True)
class Family:
    """Attribute names of one architecture: ``decoder`` (a path) of the model, ``attention`` of a layer, the others of
    the decoder.

    ``positions`` is added to what enters layer 0, ``dropout`` is applied to it, ``project_in`` (E → H) comes before,
    ``project_out`` (H → E) after the final norm; None: there is no such part. ``needs``: what a config must say.
    """

    decoder: str = "model"
    embed: str = "embed_tokens"
    layers: str = "layers"
    norm: str = "norm"
    head: str = "lm_head"
    attention: str = "self_attn"
    positions: str | None = None
    dropout: str | None = None
    project_in: str | None = None
    project_out: str | None = None
    needs: Mapping[str, object] = field(default_factory=dict)


FAMILIES: dict[str, Family] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), Family()),
    "gpt_neox": Family("gpt_neox", "embed_in", norm="final_layer_norm", attention="attention", dropout="emb_dropout"),
    "opt": Family(
        "model.decoder", norm="final_layer_norm", positions="embed_positions",
        project_in="project_in", project_out="project_out",
        # opt-350m norms after it adds, so that no norm is left for the end, nor for an exit
        needs={
            "do_layer_norm_before": True, "_remove_final_layer_norm": False, "layer_norm_elementwise_affine": True
        },
    ),
}  # fmt: skip


def check_supported(config: Any) -> Family:
    """The family of a config, or :class:`UnsupportedError` with what is supported.

    Caches that cannot be rolled back (recurrent, sliding window) are refused here, before anything is built.
    """
    kind = getattr(config, "model_type", None)
    if kind not in FAMILIES:
        raise UnsupportedError("unsupported architecture", value=kind, allowed=sorted(FAMILIES))
    for name, wanted in FAMILIES[kind].needs.items():
        if (found := getattr(config, name, wanted)) != wanted:
            raise UnsupportedError(
                f"a variant of {kind} that cannot be cut into layers", value=f"{name}={found}",
                allowed=f"{name}={wanted}", remedy="use a checkpoint of the usual kind",
            )  # fmt: skip
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


def kv_shape(config: Any) -> tuple[int, int]:
    """Key/value heads and the size of a head."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return heads, getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
