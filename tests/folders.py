"""Model folders as a user would have them: a tiny random Llama with a tokenizer and a chat template, saved to disk."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tests.tiny import tiny_model

TEXT = ["the quick brown fox jumps over the lazy dog", "def add(a, b): return a + b", "12 + 7 = 19.", "#### 42"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE of a few hundred ids: every text encodes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(TEXT, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|im_start|>", eos_token="<|im_end|>", unk_token="<|endoftext|>",
        pad_token="<|im_end|>", chat_template=TEMPLATE,
    )  # fmt: skip


def tiny_folder(folder: Path, layers: int = 3, seed: int = 0) -> Path:
    """A causal LM folder; its texts rarely end by themselves."""
    tokenizer = tiny_tokenizer()
    model = tiny_model("llama", layers, seed, vocab=len(tokenizer), context=2048, eos_token_id=2, bos_token_id=1)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
