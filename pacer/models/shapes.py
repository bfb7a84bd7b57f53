"""Models of a given shape with random weights: time and memory do not depend on what weights say.

A shape is that of a config (a local ``config.json``, or the hub's) or, for the models of ``conf/model``, plain numbers
in ``shapes.yaml``, which need no network.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from pacer.errors import ConfigError, SourceError
from pacer.models.sizes import read_config
from pacer.models.sources import DTYPES
from pacer.settings import SourceSettings

CONTEXT = 4096
LEAST_LAYERS = 4  # of a model scaled down: two exits and what verifies them


@dataclass(frozen=True)
class ModelShape:
    """``mlp``: width of the MLP; ``ids``: vocabulary; ``head``: size of a head, None: width / heads."""

    family: str
    width: int
    layers: int
    heads: int
    kv_heads: int
    mlp: int
    ids: int
    head: int | None = None
    tied: bool = False

    @property
    def head_size(self) -> int:
        return self.head or self.width // self.heads

    def scaled(self, factor: int) -> ModelShape:
        """Layers, heads, MLP and vocabulary over ``factor``; heads keep their size, groups of queries theirs about."""
        kv_heads = max(1, round(self.kv_heads / factor))
        heads = kv_heads * max(1, round(self.heads / factor / kv_heads))
        return replace(
            self, width=heads * self.head_size, layers=max(min(LEAST_LAYERS, self.layers), round(self.layers / factor)),
            heads=heads, kv_heads=kv_heads, mlp=max(8, self.mlp // factor), ids=max(64, self.ids // factor),
        )  # fmt: skip

    def config(self) -> Any:
        """As transformers has it; positions as usual in the family, up to `CONTEXT`."""
        sizes = {
            "hidden_size": self.width, "num_hidden_layers": self.layers, "num_attention_heads": self.heads,
            "vocab_size": self.ids, "max_position_embeddings": CONTEXT, "tie_word_embeddings": self.tied,
        }  # fmt: skip
        if self.family == "opt":
            return AutoConfig.for_model("opt", ffn_dim=self.mlp, word_embed_proj_dim=self.width, **sizes)
        grouped = {"num_key_value_heads": self.kv_heads, "head_dim": self.head_size, "intermediate_size": self.mlp}
        return AutoConfig.for_model(self.family, **grouped, **sizes)


@cache
def _file() -> dict[str, dict[str, Any]]:
    found: Any = OmegaConf.to_container(OmegaConf.load(Path(__file__).with_name("shapes.yaml")))
    return dict(found)


def known_shapes() -> dict[str, tuple[ModelShape, float]]:
    """Shapes by hub id, and the parameters that were published with each model, in billions."""
    return {
        id: (ModelShape(**{key: value for key, value in numbers.items() if key != "parameters"}), numbers["parameters"])
        for id, numbers in _file().items()
    }


def shape_of(config: Any) -> ModelShape:
    """The numbers of a transformers config."""
    heads = config.num_attention_heads
    mlp = getattr(config, "intermediate_size", None) or getattr(config, "ffn_dim", None) or 4 * config.hidden_size
    return ModelShape(
        config.model_type, config.hidden_size, config.num_hidden_layers, heads,
        getattr(config, "num_key_value_heads", None) or heads, mlp, config.vocab_size,
        getattr(config, "head_dim", None), bool(config.tie_word_embeddings),
    )  # fmt: skip


def config_of(source: SourceSettings, cache: Path, scale: int = 1) -> Any:
    """The config of a model whose weights are not needed, its shape divided by ``scale``.

    Raises:
        SourceError: no shape is shipped for it, and there is no config to be had.
    """
    known = known_shapes().get(source.id)
    if known is not None:
        return known[0].scaled(scale).config() if scale > 1 else known[0].config()
    found = read_config(source, cache)
    if isinstance(found, str):
        remedy = "give a folder with its config.json: model.target.id=FOLDER"
        raise SourceError(f"the shape of this model is not known ({found})", value=source.id, remedy=remedy)
    return shape_of(found).scaled(scale).config() if scale > 1 else found


def random_model(config: Any, dtype: str, device: torch.device, seed: int = 0) -> PreTrainedModel:
    """A model with random weights, made on the device itself: eval mode, no gradients.

    Raises:
        ConfigError: the device does not hold it.
    """
    try:
        with torch.random.fork_rng(devices=[device.index or 0] if device.type == "cuda" else []), torch.device(device):
            torch.manual_seed(seed)
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=DTYPES[dtype])
    except torch.OutOfMemoryError as error:
        shape = f"{config.num_hidden_layers} layers of width {config.hidden_size}, {dtype}"
        remedy = "take a smaller model, or profile.scale=N"
        raise ConfigError("this device does not hold the model", value=shape, remedy=remedy) from error
    return model.eval().requires_grad_(False)
