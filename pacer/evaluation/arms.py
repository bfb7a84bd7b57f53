"""Arms of a measurement: a method in our engine, or transformers' own ``generate`` on the same models.

An arm continues a batch of requests and returns trace lines; arms share models, never caches.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from pacer.arms import is_reference, method_settings
from pacer.assemble import Models, make_decoder
from pacer.decoding.request import Request
from pacer.decoding.trace import request_line
from pacer.errors import ConfigError
from pacer.settings import SamplingSettings

Line = dict[str, object]


@dataclass(frozen=True)
class Arm:
    """``run`` decodes a batch and returns its trace lines, without arm and benchmark."""

    name: str
    guarantee: str
    run: Callable[[Sequence[Request]], list[Line]]


def make_arm(name: str, models: Models, sampling: SamplingSettings) -> Arm:
    """The arm of this name: ``sd gamma=4``, ``hf_generate``, ``hf_assisted [gamma=N]``."""
    if is_reference(name):
        return Arm(name, "exact", _transformers(name, models, sampling))
    method = method_settings(name)
    decoder = make_decoder(method, models, sampling)

    def run(requests: Sequence[Request]) -> list[Line]:
        lines: list[Line] = []
        for result in decoder.generate(requests):
            lines += [*result.rounds, request_line(result, models.text(result.ids))]
        return lines

    return Arm(name, method.guarantee, run)


def _transformers(name: str, models: Models, sampling: SamplingSettings) -> Callable[[Sequence[Request]], list[Line]]:
    """``generate`` with transformers' own attention; one request at a time, prefill inside its time."""
    kind, *words = name.split()
    options: dict[str, Any] = {"do_sample": False} if sampling.temperature == 0 else {
        "do_sample": True, "temperature": sampling.temperature, "top_k": sampling.top_k or None, "top_p": sampling.top_p
    }  # fmt: skip
    if sampling.repetition_penalty != 1.0:
        options["repetition_penalty"] = sampling.repetition_penalty
    used: list[PreTrainedModel] = [models.target.model]
    window: dict[str, Any] = {}
    if kind == "hf_assisted":
        if models.draft_full is None:
            raise ConfigError("hf_assisted needs a draft model", remedy="set model.draft")
        window = _assistant(words, name)
        options["assistant_model"] = models.draft_full.model
        used.append(models.draft_full.model)

    def run(requests: Sequence[Request]) -> list[Line]:
        for model in used:
            model.set_attn_implementation("sdpa")
        used[-1].generation_config.update(**window)  # here, since arms share the assistant
        try:
            return [_generate(models, request, options) for request in requests]
        finally:
            for model in used:
                model.set_attn_implementation("pacer_sdpa")

    return run


def _assistant(words: Sequence[str], name: str) -> dict[str, Any]:
    """Transformers' defaults (20 tokens, stop below probability 0.4), or a fixed window for ``gamma=N``."""
    if not words:
        return {
            "num_assistant_tokens": 20, "assistant_confidence_threshold": 0.4,
            "num_assistant_tokens_schedule": "constant",
        }  # fmt: skip
    key, _, value = words[0].partition("=")
    if len(words) != 1 or key != "gamma" or not value.isdigit():
        raise ConfigError(f"cannot read arm {name!r}", allowed="hf_assisted, or hf_assisted gamma=N")
    return {
        "num_assistant_tokens": int(value), "assistant_confidence_threshold": 0.0,
        "num_assistant_tokens_schedule": "constant",
    }  # fmt: skip


@torch.inference_mode()
def _generate(models: Models, request: Request, options: dict[str, Any]) -> Line:
    model = models.target.model
    ids = torch.tensor([list(request.prompt_ids)], device=models.target.device)
    stop = sorted(request.stop_ids)
    if models.target.device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=request.max_new_tokens,
        eos_token_id=stop or None, pad_token_id=stop[0] if stop else 0, **options,
    )  # fmt: skip
    new = out[0, ids.shape[1] :].tolist()
    seconds = time.perf_counter() - start
    ended = next((i + 1 for i, token in enumerate(new) if token in request.stop_ids), None)
    new = new[:ended]
    return {
        "kind": "request", "request": request.id, "prompt_tokens": ids.shape[1], "new_tokens": len(new),
        "finish": "eos" if ended else "length", "seconds": seconds, "latency": seconds,
        "text": models.text(new), "ids": new,
    }  # fmt: skip
