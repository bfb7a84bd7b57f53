"""From settings to parts that work together: the models of a run, and a decoder for a method."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from pacer.choices import CHOICES, DRAFTERS, HEADS
from pacer.decoding.build import beside, speculative
from pacer.decoding.controllers.base import Controller
from pacer.decoding.drafters.base import Drafter, drafter_class
from pacer.decoding.drafters.model import ModelDrafter
from pacer.decoding.lane import Lane
from pacer.decoding.loop import Decoder
from pacer.errors import ConfigError, SourceError, UnsupportedError
from pacer.files import sha256
from pacer.methods.branching import branching_decoder, is_branching
from pacer.methods.exits import EXIT_DRAFTERS, exit_decoder
from pacer.methods.feature import FEATURE_DRAFTER, feature_decoder
from pacer.methods.rules import Judge, draft_rule, needed, price_key
from pacer.models.draft import TrainableDraft, load_draft
from pacer.models.exits import ExitHead
from pacer.models.feature import FeatureDraft
from pacer.models.feature_stack import FeatureStack
from pacer.models.prepacked import prepack
from pacer.models.preverifier import Preverifier, load_preverifier, tuned_values
from pacer.models.quantise import quantise
from pacer.models.sources import fetch, load_model, load_tokenizer
from pacer.models.stack import Stack
from pacer.models.tokenizers import check_same_tokenizer, decode, stop_ids
from pacer.resources import resource
from pacer.settings import MethodSettings, ModelSettings, SamplingSettings, SourceSettings

PACKAGED = "packaged:"


@dataclass
class Models:
    """What a run decodes with. ``draft`` is None where no method drafts with a model."""

    target: Stack
    tokenizer: PreTrainedTokenizerBase
    stop_ids: tuple[int, ...]
    folder: Path
    draft: Stack | None = None
    draft_full: Stack | None = None  # the same draft with the whole vocabulary's head
    exits: dict[tuple[str, int], ExitHead] = field(default_factory=dict)  # by kind and layers below
    block: int | None = None  # tokens to a block of paged memory
    exit_kind: str = "shared"  # of methods that name none
    exit_layers: Sequence[int] = ()  # likewise
    feature: FeatureStack | None = None  # fed by the target; None where no method drafts with it
    judge: Stack | None = None  # what accepts the draft's tokens in simulated rounds; None: the target
    # what reads a drafter's states, by its name ("preverifier", or of HEADS) and the drafter: nothing more for the
    # draft model (whose pre-verifier is below), "feature", or of an exit its kind, the layers below it and those below
    # the exit that accepts (None: the target)
    judges: dict[tuple[str | int | None, ...], Judge] = field(default_factory=dict)
    head_folders: dict[str, Path] = field(default_factory=dict)  # of acceptance heads on the draft model, by name
    preverifier: Preverifier | None = None
    preverifier_folder: Path | None = None
    tuned: dict[str, Any] | None = None  # the controller's values that come with the pre-verifier
    # what rounds take, by `pacer.methods.rules.price_key`: with a draft of 0, 1, … tokens, in one unit
    prices: dict[str, list[float]] = field(default_factory=dict)
    prepack: bool = True  # on a CPU

    def pack(self) -> Models:
        """All that drafts and verifies here computes on packed weights from now on (`pacer.models.prepacked`), if that
        is wished; what was packed before stays so. Judges are small enough to lie in the cache: those gain nothing."""
        if self.prepack:
            stacks = (self.target, self.draft, self.draft_full, self.judge)
            found: list[nn.Module] = [stack.model for stack in stacks if stack is not None]
            fed: list[ExitHead | FeatureDraft] = [
                *self.exits.values(),
                *([] if self.feature is None else [self.feature.draft]),
            ]
            found += [*fed, *(one.head for one in fed)]  # the head they read out by is none of their own parts
            prepack(found)
        return self

    def text(self, ids: Sequence[int]) -> str:
        """Token ids as text, special tokens left out."""
        return decode(self.tokenizer, ids)


def load_target(model: ModelSettings, cache: Path, *, dtype: str | None = None) -> Models:
    """The target with its tokenizer and stop ids; fetched first if need be."""
    folder = fetch(model.target, cache)
    hf = load_model(
        folder, dtype or model.dtype, model.device, model.attention, model.target.trust_remote_code, model.device_map
    )
    tokenizer = load_tokenizer(folder, model.target.trust_remote_code)
    stops = stop_ids(tokenizer, hf.generation_config, hf.config)
    return Models(Stack(hf), tokenizer, stops, folder, block=model.block, prepack=model.prepack).pack()


def checkpoint_folder(source: str) -> Path:
    """A checkpoint's folder: ``packaged:NAME`` (shipped with the project) or a path."""
    if source.startswith(PACKAGED):
        return resource("data/checkpoints") / source.removeprefix(PACKAGED)
    return Path(source).expanduser()


def checkpoint_hash(source: str) -> str:
    """sha256 of the weights of a named checkpoint.

    Raises:
        SourceError: there is none.
    """
    file = checkpoint_folder(source) / "model.safetensors"
    if not file.is_file():
        raise SourceError("no checkpoint", value=source, allowed="a checkpoint folder, or packaged:NAME")
    return sha256(file)


def load_draft_model(
    model: ModelSettings, models: Models, cache: Path, folder: Path | None = None, *, full_head: bool = False
) -> Stack:
    """The draft as a stack for decoding, as it is or in 4 bits; arguments and errors as :func:`_draft_stack`."""
    found = _draft_stack(model, models, cache, folder, full_head=full_head)
    if model.draft.quantise is None:
        return found
    quantise(found.model)
    return Stack(found.model, found.head_ids, found.copying)  # it looks for its head anew


def _draft_stack(
    model: ModelSettings, models: Models, cache: Path, folder: Path | None = None, *, full_head: bool = False
) -> Stack:
    """The draft as it is.

    Args:
        folder: checkpoint of a draft of kind ``layers``; None: ``model.draft.source`` names it.
        full_head: with the whole vocabulary's head even where the checkpoint has a reduced one.

    Raises:
        MismatchError: another tokenizer, or a checkpoint of another target.
    """
    draft, dtype = model.draft, model.draft.dtype or model.dtype
    trust = model.target.trust_remote_code
    if draft.kind == "model":
        if draft.source is None:
            raise ConfigError("model.draft.source is not set", allowed="a hub id or a folder with a causal LM")
        source = fetch(SourceSettings(id=draft.source, trust_remote_code=trust), cache)
        hf = load_model(source, dtype, model.device, model.attention, trust)
        vocabularies = (models.target.vocab_size, hf.config.vocab_size)
        names = (model.target.id, draft.source)
        check_same_tokenizer(models.tokenizer, load_tokenizer(source), *vocabularies, names)
        return Stack(hf)
    target = models.target
    if dtype != model.dtype or draft.quantise is not None:  # weights of its own
        target = Stack(load_model(models.folder, dtype, model.device, model.attention, trust))
    if draft.kind == "skip":
        return TrainableDraft(target, draft.layers, torch.arange(target.vocab_size)).merged()
    if draft.kind != "layers":
        raise ConfigError("unknown model.draft.kind", value=draft.kind, allowed=CHOICES["model.draft.kind"])
    if folder is None and draft.source is None:
        raise ConfigError("model.draft.source is not set", allowed="a checkpoint folder, or packaged:NAME")
    trained = load_draft(folder or checkpoint_folder(str(draft.source)), target)
    return trained.merged(full=full_head or draft.full_head, target=target)


def attach_preverifier(models: Models, folder: Path) -> None:
    """Load a pre-verifier and its tuned values for the models' pair; those of a replay before those of training."""
    assert models.draft is not None, "the draft comes first"
    models.preverifier, _ = load_preverifier(folder, models.target, models.draft)
    models.preverifier_folder, models.tuned = folder, tuned_values(folder)


def attach_head(models: Models, name: str, folder: Path) -> None:
    """Load an acceptance head (`pacer.choices.HEADS`) for the models' pair."""
    assert models.draft is not None, "the draft comes first"
    module, _ = load_preverifier(folder, models.target, models.draft)
    models.judges[(name,)], models.head_folders[name] = (module, None), folder


def make_controller(method: MethodSettings, models: Models) -> Controller | None:
    """The controller a method names, over the models' parts."""
    return draft_rule(method.name, method.controller, parts(models, method))


def parts(models: Models, method: MethodSettings) -> dict[str, Any]:
    """What rules and drafters may need, by name (`pacer.methods.rules.PARTS`); None: it is not there."""
    judge = None if models.preverifier is None else (models.preverifier, models.tuned)
    heads = {name: models.judges.get((name,)) for name in HEADS}
    return {"preverifier": judge, "draft": models.draft, "prices": models.prices.get(price_key(method)), **heads}


def plain_decoder(models: Models, sampling: SamplingSettings) -> Decoder:
    """The target alone."""
    reader, paged = Lane(models.target, block=models.block), models.block is not None
    return Decoder(models.target, None, sampling, models.text, reader, shares_prefixes=paged)


def make_decoder(method: MethodSettings, models: Models, sampling: SamplingSettings) -> Decoder:
    """A decoder for one method over shared models; its caches are its own."""
    if method.drafter in EXIT_DRAFTERS:
        return exit_decoder(method, models, sampling)
    if method.drafter == "pearl":
        return pearl_decoder(method, models, sampling)
    if method.drafter == FEATURE_DRAFTER:
        return feature_decoder(method, models, sampling)
    if is_branching(method):
        return branching_decoder(method, models, sampling)
    controller = make_controller(method, models)
    if method.drafter is None or controller is None:
        return plain_decoder(models, sampling)
    if method.drafter not in DRAFTERS:
        own = own_drafter(method, models, sampling)
        return speculative(models.target, own, controller, sampling, models.text, block=models.block)
    draft = models.draft if method.drafter == "model" else models.draft_full
    if draft is None:
        raise UnsupportedError(f"method {method.name} needs a draft model", remedy="set model.draft")
    size, record = models.target.vocab_size, controller.reads_record
    drafter = ModelDrafter(draft, size, sampling, record=record, block=models.block)
    last_only = method.checks == "last"
    return speculative(
        models.target, drafter, controller, sampling, models.text, block=models.block, last_only=last_only
    )


def pearl_decoder(method: MethodSettings, models: Models, sampling: SamplingSettings) -> Decoder:
    """A decoder whose draft is written while the target verifies; no length rule can be asked meanwhile."""
    values = dict(method.controller or {})
    kind = values.pop("kind", None)
    if kind is None:
        return plain_decoder(models, sampling)
    if kind != "balanced":
        raise ConfigError(f"controller of method {method.name}", value=kind, allowed="balanced, none")
    if models.draft is None:
        raise UnsupportedError(f"method {method.name} needs a draft model", remedy="set model.draft")
    return beside(models.target, models.draft, values.get("gamma"), sampling, models.text, models.block)


def own_drafter(method: MethodSettings, models: Models, sampling: SamplingSettings) -> Drafter:
    """The drafter of a module, with the values of the method's ``drafting``."""
    found, values = drafter_class(str(method.drafter)), method.drafting or {}
    if not issubclass(found, Drafter):
        allowed = "a kind of Drafter or Branching"
        raise ConfigError(f"drafter of method {method.name}", value=method.drafter, allowed=allowed)
    given = needed(method.name, found, values, parts(models, method))
    return found.build(values, models.target, sampling, **given)


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
