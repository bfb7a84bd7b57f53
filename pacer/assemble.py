"""From settings to parts that work together: the models of a run, and a decoder for a method."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from pacer.decoding.controllers.base import Controller
from pacer.decoding.controllers.fixed import Fixed
from pacer.decoding.controllers.preverifier import PreverifierRule
from pacer.decoding.drafters.model import ModelDrafter
from pacer.decoding.loop import Decoder
from pacer.errors import ConfigError, UnsupportedError
from pacer.models.draft import load_draft
from pacer.models.preverifier import Preverifier, load_preverifier
from pacer.models.sources import fetch, load_model, load_tokenizer
from pacer.models.stack import Stack
from pacer.models.tokenizers import check_same_tokenizer, decode, stop_ids
from pacer.resources import resource
from pacer.settings import MethodSettings, ModelSettings, SamplingSettings, SourceSettings

PACKAGED = "packaged:"
DRAFTERS = ("model", "model_full")


@dataclass
class Models:
    """What a run decodes with. ``draft`` is None where no method drafts with a model."""

    target: Stack
    tokenizer: PreTrainedTokenizerBase
    stop_ids: tuple[int, ...]
    folder: Path
    draft: Stack | None = None
    draft_full: Stack | None = None  # the same draft with the whole vocabulary's head
    preverifier: Preverifier | None = None
    preverifier_folder: Path | None = None
    tuned: dict[str, Any] | None = None  # (b, t0, ρ) found at the end of the pre-verifier's training

    def text(self, ids: Sequence[int]) -> str:
        """Token ids as text, special tokens left out."""
        return decode(self.tokenizer, ids)


def load_target(model: ModelSettings, cache: Path, *, dtype: str | None = None) -> Models:
    """The target with its tokenizer and stop ids; fetched first if need be."""
    folder = fetch(model.target, cache)
    hf = load_model(folder, dtype or model.dtype, model.device, model.attention, model.target.trust_remote_code)
    tokenizer = load_tokenizer(folder, model.target.trust_remote_code)
    return Models(Stack(hf), tokenizer, stop_ids(tokenizer, hf.generation_config, hf.config), folder)


def checkpoint_folder(source: str) -> Path:
    """A checkpoint's folder: ``packaged:NAME`` (shipped with the project) or a path."""
    if source.startswith(PACKAGED):
        return resource("data/checkpoints") / source.removeprefix(PACKAGED)
    return Path(source).expanduser()


def load_draft_model(
    model: ModelSettings, models: Models, cache: Path, folder: Path | None = None, *, full_head: bool = False
) -> Stack:
    """The draft as a stack for decoding.

    Args:
        folder: checkpoint of a draft of kind ``layers``; None: ``model.draft.source`` names it.
        full_head: with the whole vocabulary's head even where the checkpoint has a reduced one.

    Raises:
        MismatchError: another tokenizer, or a checkpoint of another target.
    """
    draft = model.draft
    if draft.kind == "layers":
        if folder is None and draft.source is None:
            raise ConfigError("model.draft.source is not set", allowed="a checkpoint folder, or packaged:NAME")
        trained = load_draft(folder or checkpoint_folder(str(draft.source)), models.target)
        return trained.merged(full=full_head or draft.full_head, target=models.target)
    if draft.kind != "model":
        raise ConfigError("unknown model.draft.kind", value=draft.kind, allowed=("model", "layers"))
    if draft.source is None:
        raise ConfigError("model.draft.source is not set", allowed="a hub id or a folder with a causal LM")
    source = fetch(SourceSettings(id=draft.source, trust_remote_code=model.target.trust_remote_code), cache)
    hf = load_model(source, model.dtype, model.device, model.attention, model.target.trust_remote_code)
    names = (model.target.id, draft.source)
    vocabularies = (models.target.vocab_size, hf.config.vocab_size)
    check_same_tokenizer(models.tokenizer, load_tokenizer(source), *vocabularies, names)
    return Stack(hf)


def attach_preverifier(models: Models, folder: Path) -> None:
    """Load a pre-verifier and its tuned values for the models' pair."""
    assert models.draft is not None, "the draft comes first"
    models.preverifier, config = load_preverifier(folder, models.target, models.draft)
    models.preverifier_folder, models.tuned = folder, config.get("tuned")


def make_controller(method: MethodSettings, models: Models) -> Controller | None:
    """The controller a method names; null values of the pre-verifier's rule are the checkpoint's tuned ones."""
    values = dict(method.controller or {})
    kind = values.pop("kind", "none")
    if kind == "none":
        return None
    if kind == "fixed":
        return Fixed(**values)
    if kind != "preverifier":
        raise ConfigError("unknown controller.kind", value=kind, allowed=("none", "fixed", "preverifier"))
    if models.preverifier is None:
        raise UnsupportedError(
            f"method {method.name} needs a pre-verifier", remedy="train one: python -m pacer.train …"
        )
    tuned = models.tuned or {}
    chosen: dict[str, Any] = {name: tuned.get(name) if value is None else value for name, value in values.items()}
    chosen = {name: value for name, value in chosen.items() if value is not None}
    limit = models.preverifier.settings.gamma_max  # longer drafts were never trained on
    chosen["gamma_max"] = min(chosen.get("gamma_max", limit), limit)
    return PreverifierRule(models.preverifier, **chosen)


def make_decoder(method: MethodSettings, models: Models, sampling: SamplingSettings) -> Decoder:
    """A decoder for one method over shared models; its caches are its own."""
    controller = make_controller(method, models)
    if method.drafter is None or controller is None:
        return Decoder(models.target, sampling=sampling, decode=models.text)
    if method.drafter not in DRAFTERS:
        raise ConfigError("unknown method.drafter", value=method.drafter, allowed=("null", *DRAFTERS))
    draft = models.draft if method.drafter == "model" else models.draft_full
    if draft is None:
        raise UnsupportedError(f"method {method.name} needs a draft model", remedy="set model.draft")
    drafter = ModelDrafter(draft, models.target.vocab_size, sampling, record=controller.reads_record)
    return Decoder(models.target, drafter, controller, sampling, decode=models.text)


@functools.cache
def _template_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    messages = [
        {"role": "system", "content": ""},
        {"role": "user", "content": ""},
        {"role": "assistant", "content": ""},
    ]
    if not tokenizer.chat_template:
        return ()
    return tuple(tokenizer(str(tokenizer.apply_chat_template(messages, tokenize=False)))["input_ids"])


def needed_ids(models: Models) -> list[int]:
    """Ids that a reduced head must cover: stop ids, special tokens, everything the chat template writes."""
    return sorted({*models.stop_ids, *models.tokenizer.all_special_ids, *_template_ids(models.tokenizer)})
