"""Arms of a measurement: a method in our engine, or transformers' own ``generate`` on the same models.

An arm continues a batch of requests and returns trace lines; arms share models, never caches.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.utils import is_sklearn_available

from pacer.assemble import Models, make_decoder
from pacer.decoding.drafters.pearl import Pearl
from pacer.decoding.loop import Decoder
from pacer.decoding.request import Request
from pacer.decoding.trace import ids_of, request_line
from pacer.errors import ConfigError, UnsupportedError
from pacer.methods.arms import ASSISTED_ARMS, is_reference, method_settings
from pacer.models.tokenizers import pieces
from pacer.settings import SamplingSettings

Line = dict[str, object]


@dataclass(frozen=True)
class Arm:
    """``run`` decodes a batch and returns its trace lines, without arm and benchmark."""

    name: str
    guarantee: str
    run: Callable[[Sequence[Request]], list[Line]]


def make_arm(name: str, models: Models, sampling: SamplingSettings, slots: int | None = None) -> Arm:
    """The arm of this name: ``sd gamma=4``, ``hf_generate``, ``hf_assisted [gamma=N]``, ``hf_dynamic``, …

    Args:
        slots: rows decoded at once; the other requests of a call wait for a row. None: all.
    """
    if is_reference(name):
        return Arm(name, "exact", _transformers(name, models, sampling))
    method = method_settings(name)
    decoder = make_decoder(method, models, sampling)

    def run(requests: Sequence[Request]) -> list[Line]:
        lines: list[Line] = []
        for result in decoder.generate(requests, slots=slots):
            known = pieces(models.tokenizer, ids_of(result.rounds))
            lines += [*result.rounds, {**request_line(result, models.text(result.ids), known), **_beside(decoder)}]
        return lines

    return Arm(name, method.guarantee, run)


def _beside(decoder: Decoder) -> Line:
    """What it costs each side where the draft is written beside the target; nothing of other methods."""
    return {"beside": decoder.proposer.report()} if isinstance(decoder.proposer, Pearl) else {}


def _transformers(name: str, models: Models, sampling: SamplingSettings) -> Callable[[Sequence[Request]], list[Line]]:
    """``generate`` with transformers' own attention; one request at a time, prefill inside its time.

    The assistant is our draft's layers with the whole vocabulary's head, without its copy head: that one is unknown to
    transformers. While an arm runs, the assistant has the arm's own generation config, in which transformers' schedules
    keep what they have learnt: arms that share the assistant share no settings and no state.
    """
    kind, *words = name.split()
    options: dict[str, Any] = {"do_sample": False} if sampling.temperature == 0 else {
        "do_sample": True, "temperature": sampling.temperature, "top_k": sampling.top_k or None, "top_p": sampling.top_p
    }  # fmt: skip
    if sampling.repetition_penalty != 1.0:
        options["repetition_penalty"] = sampling.repetition_penalty
    used: list[PreTrainedModel] = [models.target.model]
    if kind in ASSISTED_ARMS:
        if models.draft_full is None:
            raise ConfigError(f"{kind} needs a draft model", remedy="set model.draft")
        options["assistant_model"] = models.draft_full.model
        used.append(models.draft_full.model)
    configs: list[GenerationConfig] = [copy.deepcopy(model.generation_config) for model in used]
    if kind in ASSISTED_ARMS:
        configs[1].update(**_assistant(kind, words, name))

    def run(requests: Sequence[Request]) -> list[Line]:
        others = [model.generation_config for model in used]
        for model, config in zip(used, configs, strict=True):
            model.set_attn_implementation("sdpa")
            model.generation_config = config
        try:
            return [_generate(models, request, options) for request in requests]
        finally:
            for model, config in zip(used, others, strict=True):
                model.set_attn_implementation("pacer_sdpa")
                model.generation_config = config

    return run


def _assistant(kind: str, words: Sequence[str], name: str) -> dict[str, Any]:
    """Settings of the assistant's draft length.

    ``hf_assisted``: transformers' defaults, up to 20 tokens, until one's probability is below 0.4. Where scikit-learn
    is installed, as it is with pacer, transformers also refits that threshold after each pass (to the least FPR +
    3·FNR on this request's tokens so far). ``hf_dynamic`` is the same and refuses to run without the refit. Each
    request begins at 0.4 again: transformers 5.24 refits a copy, though its documentation says otherwise.
    ``hf_assisted gamma=N`` is a fixed window, nothing else.
    ``hf_heuristic`` is transformers' older default: begin with 5 tokens, 2 more after full acceptance, else 1 fewer, no
    threshold; the number goes on from request to request, warm-up included, as transformers means it.
    """
    constant = {"num_assistant_tokens_schedule": "constant"}
    if words:
        key, _, value = words[0].partition("=")
        if kind != "hf_assisted" or len(words) != 1 or key != "gamma" or not value.isdigit():
            raise ConfigError(f"cannot read arm {name!r}", allowed="hf_assisted, or hf_assisted gamma=N")
        return {"num_assistant_tokens": int(value), "assistant_confidence_threshold": 0.0, **constant}
    if kind == "hf_heuristic":
        return {
            "num_assistant_tokens": 5, "assistant_confidence_threshold": 0.0,
            "num_assistant_tokens_schedule": "heuristic",
        }  # fmt: skip
    if kind == "hf_dynamic" and not is_sklearn_available():
        raise UnsupportedError(
            "hf_dynamic needs scikit-learn, with which transformers refits its threshold",
            remedy="pip install scikit-learn, or use hf_assisted, whose threshold stays at 0.4 without it",
        )
    return {"num_assistant_tokens": 20, "assistant_confidence_threshold": 0.4, **constant}


@torch.inference_mode()
def _generate(models: Models, request: Request, options: dict[str, Any]) -> Line:
    model = models.target.model
    ids = torch.tensor([list(request.prompt_ids)], device=models.target.device)
    mask = torch.ones_like(ids)
    if "assistant_model" in options:
        # transformers 5.24 drops a mask of ones, and without one its assistant reads the whole text again, behind what
        # its cache holds, in every round but the first. A masked token in front (one that penalties see anyway) keeps
        # the mask.
        ids, mask = torch.cat([ids[:, :1], ids], 1), torch.nn.functional.pad(mask, (1, 0))
    stop = sorted(request.stop_ids)
    if models.target.device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    out = model.generate(
        ids, attention_mask=mask, max_new_tokens=request.max_new_tokens,
        eos_token_id=stop or None, pad_token_id=stop[0] if stop else 0, **options,
    )  # fmt: skip
    new = out[0, ids.shape[1] :].tolist()
    seconds = time.perf_counter() - start
    ended = next((i + 1 for i, token in enumerate(new) if token in request.stop_ids), None)
    new = new[:ended]
    return {
        "kind": "request", "request": request.id, "prompt_tokens": len(request.prompt_ids), "new_tokens": len(new),
        "finish": "eos" if ended else "length", "seconds": seconds, "latency": seconds,
        "text": models.text(new), "ids": new,
    }  # fmt: skip
