"""Toys for tests: random models of every supported family, and table models (a fixed row of logits per last token)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from pacer.decoding.build import speculative
from pacer.decoding.controllers.base import Controller
from pacer.decoding.drafters.model import ModelDrafter
from pacer.decoding.loop import Decoder
from pacer.decoding.propose import Proposer
from pacer.decoding.record import Record
from pacer.decoding.request import Request, Result, Row
from pacer.models.preverifier import Preverifier
from pacer.models.stack import Stack
from pacer.settings import PreverifierSettings, SamplingSettings

VOCAB, CONTEXT = 97, 128
EXTRA: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 8},
    "mistral": {"head_dim": 8, "sliding_window": None},
    "qwen3": {"head_dim": 16},  # not width / heads
    "gpt_neox": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
}
# What a family has variants of: name → family, config.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "opt, projected": ("opt", {"word_embed_proj_dim": 24}),
    "gpt_neox, sequential": ("gpt_neox", {"use_parallel_residual": False, "attention_bias": False}),
    "llama 3": ("llama", {"rope_parameters": {
        "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }}),
}  # fmt: skip
FOREIGN = {"gpt_neox": ["num_key_value_heads"], "opt": ["num_key_value_heads", "intermediate_size"]}  # keys it lacks


def tiny_model(
    family: str = "llama", layers: int = 3, seed: int = 0, vocab: int = VOCAB, context: int = CONTEXT, **config: Any
) -> PreTrainedModel:
    """A random float32 model, the same for the same arguments; norms and biases too: none can be left out."""
    family, variant = VARIANTS.get(family, (family, {}))
    settings = {
        "vocab_size": vocab, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": layers,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": context,
        "bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "tie_word_embeddings": False,
        **EXTRA.get(family, {}), **variant, **config,
    }  # fmt: skip
    for name in FOREIGN.get(family, ()):
        settings.pop(name, None)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **settings), attn_implementation="eager")
    return randomise(model, seed)


def randomise(model: PreTrainedModel, seed: int, scale: float = 0.25) -> PreTrainedModel:
    """Fresh random weights: matrices around 0, norm weights around 1, biases around 0."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            is_norm = parameter.dim() == 1 and name.endswith("weight")
            parameter.copy_(1 + 0.2 * noise if is_norm else scale * noise)
    return model.eval().requires_grad_(False)


def near(model: PreTrainedModel, scale: float = 0.02, seed: int = 7) -> PreTrainedModel:
    """A copy with a little noise: a draft that agrees now and then."""
    twin = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator))
    return twin


def loud(model: PreTrainedModel, factor: float) -> PreTrainedModel:
    """The same function with a louder residual stream: every norm takes the factor out again."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(factor)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(factor)
            layer.mlp.down_proj.weight.mul_(factor)
    return model


def tiny_stack(family: str = "llama", layers: int = 3, seed: int = 0, **config: Any) -> Stack:
    return Stack(tiny_model(family, layers, seed, **config))


def table_model(table: Sequence[Sequence[float]] | Tensor, context: int = 64) -> PreTrainedModel:
    """A Llama whose logits are exactly ``table[last token]``: one-hot embedding, silent layers, the table as head.

    Args:
        table: ``(V, V)``.
    """
    rows = torch.as_tensor(table, dtype=torch.float32)
    vocab, width = len(rows), 16
    assert rows.shape == (vocab, vocab) and vocab <= width
    config = LlamaConfig(
        vocab_size=vocab, hidden_size=width, intermediate_size=4, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, head_dim=width, max_position_embeddings=context, rms_norm_eps=0.0,
        bos_token_id=None, eos_token_id=None, pad_token_id=None, tie_word_embeddings=False, attn_implementation="eager",
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        # 4 in one of 16 places has a root mean square of 1; the norm's weight brings it back to 1
        model.model.embed_tokens.weight[:, :vocab] = 4 * torch.eye(vocab)
        for layer in model.model.layers:
            layer.input_layernorm.weight.fill_(1.0)
            layer.post_attention_layernorm.weight.fill_(1.0)
        model.model.norm.weight.fill_(0.25)
        model.lm_head.weight[:, :vocab] = rows.T
    return model.eval().requires_grad_(False)


def random_table(vocab: int, seed: int, scale: float = 1.5) -> Tensor:
    return scale * torch.randn(vocab, vocab, generator=torch.Generator().manual_seed(seed))


def prompts(lengths: Sequence[int], vocab: int = VOCAB, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocab, (n,), generator=generator).tolist() for n in lengths]


def hf_generate(model: PreTrainedModel, prompt: Sequence[int], new: int, **options: Any) -> list[int]:
    """New ids of transformers' own greedy ``generate``."""
    settings = {"do_sample": False, "max_new_tokens": new, "eos_token_id": None, "pad_token_id": 0, **options}
    if settings["eos_token_id"] is None:
        settings["min_new_tokens"] = new
    ids = torch.tensor([list(prompt)])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
    return out[0, len(prompt) :].tolist()


def plain_greedy(model: PreTrainedModel, prompt: Sequence[int], new: int) -> list[int]:
    """Greedy decoding without any cache: the whole text through the whole model for every token."""
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(new):
            ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def make_preverifier(draft: Stack, seed: int = 3, scale: float = 0.3, **settings: Any) -> Preverifier:
    """A pre-verifier with random weights, so that its estimates vary."""
    module = Preverifier(draft, PreverifierSettings(**{"gamma_max": 8, **settings}))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            base = 1.0 if parameter.dim() == 1 and parameter.numel() > 1 else 0.0
            parameter.copy_(base + scale * torch.randn(parameter.shape, generator=generator))
    return module.eval().requires_grad_(False)


def make_decoder(
    target: Stack,
    draft: Stack | None = None,
    controller: Controller | None = None,
    sampling: SamplingSettings | None = None,
    decode: Callable[[Sequence[int]], str] | None = None,
) -> Decoder:
    """Target, draft and controller put together; the record is kept where the controller reads it."""
    sampling = sampling or SamplingSettings()
    if draft is None or controller is None:
        return Decoder(target, sampling=sampling, decode=decode)
    drafter = ModelDrafter(draft, target.vocab_size, sampling, record=controller.reads_record)
    return speculative(target, drafter, controller, sampling, decode)


def proposer(decoder: Decoder) -> Proposer:
    """What drafts in a decoder with one draft model."""
    assert isinstance(decoder.proposer, Proposer)
    return decoder.proposer


def generate(decoder: Decoder, requests: Sequence[Request], batch: int) -> list[Result]:
    """All requests, ``batch`` at a time, in their order."""
    return [r for i in range(0, len(requests), batch) for r in decoder.generate(requests[i : i + batch])]


class Rule(Controller):
    """A controller that draws ``b`` tokens at a time while ``go_on(drawn ids (B, n), scores)`` says so."""

    reads_record = True
    stop, full = "controller", "gamma_max"

    def __init__(self, go_on: Callable[[Tensor], Tensor], gamma_max: int = 4, b: int = 1) -> None:
        self.go_on, self.gamma_max, self.b = go_on, gamma_max, b

    def reset(self, rows: Sequence[Row], capacity: int) -> None:
        pass

    def admit(self, index: int) -> None:
        pass

    def prefill(self, record: Record | None, rows: Sequence[Row], read: Sequence[bool]) -> None:
        pass

    def block(self, drawn: int) -> int:
        return min(self.b, self.gamma_max - drawn)

    def judge(
        self, record: Record | None, rows: Sequence[Row], drawn: int, open_rows: Sequence[bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        assert record is not None
        bases = torch.tensor([len(row.committed) for row in rows])
        places = (bases[:, None] + torch.arange(drawn)).clamp_max(record.ids.shape[1] - 1)
        return self.go_on(record.ids.gather(1, places)), None

    def end(self, committed: Sequence[int]) -> None:
        pass


def strangers() -> list[tuple[Stack, str]]:
    """Other models than the tiny one, and the first thing that tells each of them from it (V60)."""
    return [
        (tiny_stack(layers=4), "num_hidden_layers is 4 here: 3"),
        (tiny_stack(vocab=101), "vocab_size is 101 here: 97"),
        (tiny_stack(hidden_size=48), "hidden_size is 48 here: 32"),
        (tiny_stack("qwen3"), "model_type is 'qwen3' here: 'llama'"),
        (tiny_stack(seed=1), "fingerprint is"),
    ]
