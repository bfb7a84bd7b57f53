"""Checks of values that types alone cannot make, and of keys before they reach the configuration."""

from __future__ import annotations

import dataclasses
import re
import typing
from math import fsum
from typing import Any

from pacer.choices import CHOICES, GREEDY_DRAFTERS, HEADS
from pacer.decoding.parts import Range
from pacer.errors import ConfigError
from pacer.methods.arms import (
    check_controller,
    check_drafter,
    check_exits,
    check_guarantee,
    is_reference,
    method_settings,
    unknown,
)
from pacer.settings import MethodSettings, Settings
from pacer.work.shards import shard_of

_COUNT, _SIZE, _POSITIVE, _SHARE = Range(0), Range(1), Range(0, open_low=True), Range(0, 1)
RANGES: dict[str, Range] = {
    "model.draft.head_size": _COUNT,
    "model.exits.head_size": _COUNT,
    "model.feature.head_size": _COUNT,
    "model.feature.layer": _COUNT,
    "model.block": _SIZE,
    **{
        f"{part}.{key}": allowed
        for part in ("preverifier", *HEADS)
        for key, allowed in {
            "depth": Range(0, 4),
            "width": _SIZE,
            "gamma_max": _SIZE,
            "reject_weight": _POSITIVE,
        }.items()
    },
    "sampling.temperature": _COUNT,
    "sampling.top_k": _COUNT,
    "sampling.top_p": Range(0, 1, open_low=True),
    "sampling.repetition_penalty": _POSITIVE,
    "corpus.limit": _SIZE,
    "corpus.chunks": _SIZE,
    "corpus.max_new_tokens": _SIZE,
    "corpus.batch_size": _SIZE,
    "corpus.shard_size": _SIZE,
    "labels.starts_per_text": _SIZE,
    "labels.gamma": _SIZE,
    "labels.texts": _SIZE,
    "labels.tail": _COUNT,
    "labels.temperature": _COUNT,
    "costs.draft": _COUNT,
    "costs.preverify": _COUNT,
    "costs.token": _COUNT,
    "costs.rest": _COUNT,
    "trainer.lr": _POSITIVE,
    "trainer.weight_decay": _COUNT,
    "trainer.warmup": _SHARE,
    "trainer.clip": _COUNT,
    "trainer.epochs": _SIZE,
    "trainer.max_minutes": _POSITIVE,
    "trainer.max_steps": _SIZE,
    "trainer.tokens_per_batch": _SIZE,
    "trainer.accumulate": _SIZE,
    "trainer.dropout": Range(0, 1, open_high=True),
    "trainer.patience": _COUNT,
    "trainer.val_every": _SIZE,
    "trainer.checkpoint_every": _SIZE,
    "trainer.prompt_weight": _COUNT,
    "trainer.kl_weight": _SHARE,
    "trainer.teacher_top_k": Range(2),
    "trainer.devices": _SIZE,
    "trainer.nodes": _SIZE,
    "layerskip.p_max": _SHARE,
    "layerskip.exit_scale": _SHARE,
    "layerskip.rotation": _SIZE,
    "feature_draft.steps": Range(1, 8),
    "feature_draft.regression": _COUNT,
    "feature_draft.noise": _COUNT,
    "benchmark.limit": _SIZE,
    "benchmark.max_new_tokens": _SIZE,
    "benchmark.warmup": _COUNT,
    "benchmark.minutes": _POSITIVE,
    "benchmark.batch_size": _SIZE,
    "benchmark.bootstrap": _SIZE,
    "profile.gamma_max": _COUNT,
    "profile.repeats": _SIZE,
    "profile.scale": _SIZE,
    "replay.limit": _SIZE,
    "replay.gamma_max": Range(1, 32),
    "replay.tail": _COUNT,
    "advise.texts": _SIZE,
    "advise.repeats": _SIZE,
    "advise.measured": _SIZE,
    "advise.prompts": _SIZE,
    "generate.max_new_tokens": _SIZE,
    "shard.index": _COUNT,
    "shard.count": _SIZE,
    "threads": _SIZE,
}


def check(settings: Settings) -> None:
    """Check every value of the settings that has a set of choices or a range.

    Raises:
        ConfigError: names the key, its value and what is allowed.
    """
    for key, choices in CHOICES.items():
        value = get(settings, key)
        for item in value if isinstance(value, list | dict) else [value]:
            if item is not None and item not in choices:
                raise unknown(key, item, choices)
    for key, allowed in RANGES.items():
        value = get(settings, key)
        if value is not None and not allowed.holds(value):
            raise ConfigError(key, value=value, allowed=str(allowed))
    _check_lists(settings)
    shard_of(settings.shard)
    check_controller(settings.method.controller, "method.controller")
    check_drafter(settings.method, "method")
    check_exits(settings.method, "method")
    check_guarantee(settings.method, "method")
    _check_greedy(settings.method, settings.sampling.temperature)
    for arm in settings.benchmark.arms:
        if not is_reference(arm):
            _check_greedy(method_settings(arm), settings.sampling.temperature)
        elif not re.fullmatch(r"hf_(generate|dynamic|heuristic)|hf_assisted( gamma=[1-9]\d*)?", arm):
            known = "hf_generate, hf_assisted, hf_assisted gamma=N, hf_dynamic, hf_heuristic"
            raise ConfigError("a reference arm takes no such settings", value=arm, allowed=known)


def _check_greedy(method: MethodSettings, temperature: float) -> None:
    """A draft that comes without what it was drawn from cannot be verified in sampling: said before all else."""
    if method.drafter in GREEDY_DRAFTERS and temperature > 0:
        raise ConfigError(
            f"sampling.temperature with method {method.name}", value=temperature, allowed="0",
            remedy="it decodes greedily only: sample with another method",
        )  # fmt: skip


def _check_lists(settings: Settings) -> None:
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", settings.model.device):
        raise ConfigError("model.device", value=settings.model.device, allowed="auto, cpu, cuda, cuda:N")
    layers = settings.model.draft.layers
    if settings.model.draft.kind != "model" and (not layers or layers != sorted(set(layers)) or layers[0] < 0):
        raise ConfigError("model.draft.layers", value=layers, allowed="layer numbers in rising order")
    exits = settings.model.exits
    if exits.layers != sorted(set(exits.layers)) or (exits.layers and exits.layers[0] < 1):
        raise ConfigError("model.exits.layers", value=exits.layers, allowed="numbers of layers in rising order, from 1")
    if exits.weights and (len(exits.weights) != len(exits.layers) or not all(w > 0 for w in exits.weights)):
        raise ConfigError("model.exits.weights", value=exits.weights, allowed="one number > 0 for each of the layers")
    betas = settings.trainer.betas
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ConfigError("trainer.betas", value=betas, allowed="two numbers in [0, 1)")
    part = settings.trainer.part
    for name, unused in (("kl_weight", 0), ("prompt_labels", "text"), ("start_from", None)):
        used = part == "draft" or (part in ("exits", "feature_draft") and name == "kl_weight")
        if not used and (value := getattr(settings.trainer, name)) != unused:
            raise ConfigError(f"trainer.{name} is for the draft", value=value, allowed=str(unused))
    if settings.trainer.strategy == "fsdp" and part != "layerskip":
        remedy = "only tuning the model itself needs it split: drop trainer.strategy"
        raise ConfigError("trainer.strategy", value="fsdp", allowed=f"auto, ddp for trainer.part={part}", remedy=remedy)
    ready = settings.corpus.file
    if not all(isinstance(file, str) for file in (ready if isinstance(ready, list) else [ready or ""])):
        raise ConfigError("corpus.file", value=ready, allowed="a path, a list of paths, or null")
    parts = settings.corpus.parts
    if any(share < 0 for share in parts.values()) or abs(fsum(parts.values()) - 1) > 1e-6:
        raise ConfigError("corpus.parts", value=parts, allowed="shares that add up to 1")
    for key in ("replay.draft_costs", "replay.token_costs"):
        if not get(settings, key) or not all(0 <= cost <= 10 for cost in get(settings, key)):
            raise ConfigError(key, value=get(settings, key), allowed="at least one number in [0, 10]")
    if settings.profile.scale > 1 and settings.profile.weights != "random":
        remedy = "add profile.weights=random: a trained model is as large as it is"
        raise ConfigError("profile.scale", value=settings.profile.scale, allowed="1", remedy=remedy)
    for key in ("profile.contexts", "profile.batches"):
        if not all(number >= 1 for number in get(settings, key)):
            raise ConfigError(key, value=get(settings, key), allowed="whole numbers ≥ 1")


def get(settings: Any, path: str) -> Any:
    """The value at a dotted path."""
    for name in path.split("."):
        settings = getattr(settings, name)
    return settings


def check_key(path: str) -> None:
    """Check that a dotted key exists in the schema; what is inside a free-form mapping is not looked at.

    Raises:
        ConfigError: names the key, the keys there are at that place, and the closest one.
    """
    node: Any = Settings
    for index, name in enumerate(path.split(".")):
        if not dataclasses.is_dataclass(node):
            if any(typing.get_origin(part) is dict for part in (node, *typing.get_args(node))):
                return
            raise ConfigError(f"unknown key: {'.'.join(path.split('.')[:index])} has no keys inside", value=path)
        hints = typing.get_type_hints(node)
        if name not in hints:
            raise unknown("unknown key", path, hints, name)
        node = hints[name]
