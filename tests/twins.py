"""Tiny random likenesses of the models in conf/model: same classes, tokenizer kind, special tokens, unequal padding.

Saved as folders, as a user would have them.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GPT2Tokenizer,
    GPTNeoXTokenizer,
    LlamaTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen2Tokenizer,
)

from tests.exits import early_model
from tests.folders import TEMPLATE
from tests.tiny import near

LAYERS, CONTEXT = 4, 1024
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())


def _sentencepiece() -> PreTrainedTokenizerBase:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *map(chr, range(33, 127))]
    return LlamaTokenizer(vocab={text: id for id, text in enumerate(pieces)}, merges=[])


def _byte_level(bos: str, eos: str, *more: str) -> PreTrainedTokenizerBase:
    """As Llama 3 and DeepSeek-Coder have it: no class of its own, special tokens after all others."""
    backend = Tokenizer(models.BPE({text: id for id, text in enumerate(BYTES)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    found = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=bos, eos_token=eos)
    found.add_special_tokens({"additional_special_tokens": list(more)})
    return found


def _of_class(kind: type[Any], *special: str, **names: str | None) -> PreTrainedTokenizerBase:
    found: PreTrainedTokenizerBase = kind(
        vocab={text: id for id, text in enumerate([*special, *BYTES])}, merges=[], **names
    )
    return found


TOKENIZERS = {
    "llama 2": _sentencepiece,
    "llama 3": lambda: _byte_level("<|begin_of_text|>", "<|eot_id|>", "<|end_of_text|>", "<|eom_id|>"),
    "deepseek": lambda: _byte_level("<|begin▁of▁sentence|>", "<|EOT|>"),
    "qwen": lambda: _of_class(Qwen2Tokenizer, "<|endoftext|>", "<|im_start|>", "<|im_end|>", eos_token="<|im_end|>"),
    "gpt-2": lambda: _of_class(
        GPT2Tokenizer, "<pad>", "</s>", bos_token="</s>", eos_token="</s>", unk_token="</s>", pad_token="<pad>"
    ),
    "gpt-neox": lambda: _of_class(GPTNeoXTokenizer, "<|endoftext|>", "<|padding|>"),
}


@dataclass(frozen=True)
class Twin:
    """``spare``: rows of the vocabularies of target and draft beyond their tokenizer's ids. ``stops``: tokens beside
    EOS that the generation config names as ends."""

    family: str  # or a variant, as tests.tiny knows them
    tokenizer: str
    chat: bool = True
    spare: tuple[int, int] = (0, 0)
    stops: tuple[str, ...] = ()
    config: dict[str, Any] = field(default_factory=dict)


LINEAR = {"rope_parameters": {"rope_type": "linear", "rope_theta": 100_000.0, "factor": 4.0}}
TWINS = {
    "deepseek": Twin("llama", "deepseek", spare=(6, 6), config=LINEAR),
    "llama2": Twin("llama", "llama 2"),
    "llama31": Twin(
        "llama 3", "llama 3", stops=("<|end_of_text|>", "<|eom_id|>"), config={"tie_word_embeddings": True}
    ),
    "layerskip_llama2": Twin("llama", "llama 2", chat=False),
    "layerskip_llama3": Twin("llama", "llama 3", chat=False, stops=("<|end_of_text|>",)),
    "qwen25": Twin("qwen2", "qwen", spare=(9, 3)),
    "qwen3": Twin("qwen3", "qwen", spare=(4, 4)),
    "opt": Twin("opt", "gpt-2", chat=False, config={"tie_word_embeddings": True}),
    "mistral": Twin("mistral", "llama 2"),
    "gpt_neox": Twin("gpt_neox", "gpt-neox", chat=False, spare=(2, 5)),
}
OTHERS = ("mistral", "gpt_neox")  # families that no file of conf/model needs
_PREFIXES = {
    "layerskip_llama2": "layerskip_llama2", "layerskip_codellama": "layerskip_llama2",
    "layerskip_llama3": "layerskip_llama3", "deepseek": "deepseek", "tinyllama": "llama2", "llama2": "llama2",
    "llama31": "llama31", "qwen25": "qwen25", "qwen3": "qwen3", "opt": "opt",
}  # fmt: skip


def twin_of(config: str) -> str:
    """The name of the twin of a file of conf/model; a name of `OTHERS` is its own."""
    return next((name for prefix, name in _PREFIXES.items() if config.startswith(prefix)), config)


def save_pair(home: Path, twin: Twin, *, added: Sequence[str] = (), seed: int = 0) -> tuple[Path, Path]:
    """Folders of a target and of a draft that agrees with it now and then.

    Args:
        added: tokens that are added to both tokenizers.
    """
    tokenizer = TOKENIZERS[twin.tokenizer]()
    tokenizer.add_tokens(list(added))
    tokenizer.chat_template = TEMPLATE if twin.chat else None
    size = len(tokenizer)
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    model = early_model(
        twin.family, LAYERS, vocab=size + twin.spare[0], context=CONTEXT, seed=seed, **ends, **twin.config
    )
    stops = [tokenizer.eos_token_id, *map(tokenizer.convert_tokens_to_ids, twin.stops)]
    model.generation_config.eos_token_id = stops if twin.stops else stops[0]
    draft = resized(near(model, 0.01), size + twin.spare[1])
    for folder, one in ((home / "target", model), (home / "draft", draft)):
        one.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return home / "target", home / "draft"


def resized(model: PreTrainedModel, rows: int) -> PreTrainedModel:
    """The model with another number of ids; new rows are those of other ids, so that they are as likely."""
    model = copy.deepcopy(model)
    known = model.config.vocab_size
    model.resize_token_embeddings(rows, mean_resizing=False)
    with torch.no_grad():
        for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
            layer.weight[known:] = layer.weight[: max(0, rows - known)]
    return model.eval().requires_grad_(False)
