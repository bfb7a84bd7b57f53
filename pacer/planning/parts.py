"""How large the parts of a run are and what they take in memory, from configs alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from pacer.assemble import checkpoint_folder
from pacer.choices import HEADS
from pacer.models.exits import as_module, make_exits
from pacer.models.feature import FeatureDraft
from pacer.models.preverifier import Preverifier
from pacer.models.shapes import known_shapes
from pacer.models.sizes import draft_skeleton, kv_bytes, read_config, skeleton, tensors
from pacer.models.sources import DTYPES
from pacer.models.stack import Stack
from pacer.planning.wanted import Wanted, exit_layers, named
from pacer.settings import DraftSettings, PreverifierSettings, Settings, SourceSettings

LEARNING = 16  # bytes of a parameter that is trained: itself, its gradient and AdamW's two moments in float32


@dataclass(frozen=True)
class Part:
    """``kv``: bytes of keys and values of `pacer.models.sizes.TOKENS` tokens of a row; None: it keeps none.

    The others are None where a config is not known, for the reason that ``what`` ends with.
    """

    name: str
    what: str
    parameters: int | None = None
    bytes: int | None = None
    kv: int | None = None
    trained: bool = False


def parts(settings: Settings, found: Wanted) -> list[Part]:
    """The models of a run, then what is trained for them.

    Raises:
        SourceError: a model that does not exist. UnsupportedError: a family that cannot be cut into layers.
    """
    cache, model = settings.paths.cache_folder, settings.model
    target, own = _model("target", model.target, model.dtype, cache)
    lines, draft = [own], None
    if found.draft and model.draft.kind == "model":
        source = SourceSettings(id=str(model.draft.source), trust_remote_code=model.target.trust_remote_code)
        draft, line = _model("draft", source, model.draft.dtype or model.dtype, cache)
        lines.append(line)
    if target is None:
        return lines
    if found.draft and draft is None and model.draft.kind != "model":
        draft, line = _layers(settings, target, found)
        lines.append(line)
    return [*lines, *_heads(settings, found, target), *_rules(settings, found, draft)]


def _model(name: str, source: SourceSettings, dtype: str, cache: Path) -> tuple[Stack | None, Part]:
    config, note = read_config(source, cache), ""
    if isinstance(config, str):
        known = known_shapes().get(source.id)
        if known is None:
            return None, Part(name, f"{source.id}: {config}")
        config, note = known[0].config(), f" (shape as published; the config itself is {config})"
    stack = skeleton(config, dtype)
    shape = f"{config.model_type}, {stack.n_layers} layers of width {stack.width}, {stack.vocab_size} ids"
    what = f"{source.id}: {shape}, {dtype}{note}"
    return stack, _counted(name, what, tensors([stack.model]), dtype, kv_bytes(stack))


def _layers(settings: Settings, target: Stack, found: Wanted) -> tuple[Stack, Part]:
    """A draft of the target's layers; what it shares with the target is counted there."""
    draft = _as_saved(settings.model.draft)
    dtype = draft.dtype or settings.model.dtype
    made = draft_skeleton(target, draft)
    own = tensors([made.stack.model, made], [target.embedding])
    learns = found.part == "draft"
    if learns:
        own = list(made.parameters())
    what = f"{len(draft.layers)} of the target's layers, {made.stack.head.out_features} ids, {dtype}"
    if draft.quantise:
        what += f" before it is put into {draft.quantise}"
    return made.stack, _counted("draft", what, own, dtype, kv_bytes(made.stack), trained=learns)


def _as_saved(draft: DraftSettings) -> DraftSettings:
    """The settings that a named draft was made by; only the head of its weights' file is read."""
    if draft.kind != "layers" or draft.source is None:
        return draft
    config = named("draft", draft.source)
    with safe_open(checkpoint_folder(draft.source) / "model.safetensors", "pt") as file:
        size = file.get_slice("head_ids").get_shape()[0]
    return replace(draft, layers=config["layers"], copying=config.get("copying", False), head_size=size)


def _heads(settings: Settings, found: Wanted, target: Stack) -> Iterator[Part]:
    """Exits with heads of their own, and a drafter that the target feeds."""
    exits, dtype = settings.model.exits, settings.model.dtype
    for kind, layers in exit_layers(settings, found).items():
        heads = make_exits(target, kind, layers, _ids(exits.head_size, target))
        adapters = [kv_bytes(head.adapter) for head in heads.values() if head.adapter is not None]
        what, own = f"{kind}, after {layers} layers, {dtype}", list(as_module(heads).parameters())
        yield _counted("exits", what, own, dtype, sum(adapters) or None, trained=found.part == "exits")
    if found.feature:
        feature = settings.model.feature
        fed = FeatureDraft(target, _ids(feature.head_size, target), head=feature.head)
        own, kv, learns = list(fed.parameters()), kv_bytes(fed.layers), found.part == "feature_draft"
        yield _counted("feature draft", f"one layer, {dtype}", own, dtype, kv, trained=learns)


def _rules(settings: Settings, found: Wanted, draft: Stack | None) -> Iterator[Part]:
    """Pre-verifier and acceptance heads on the draft's states."""
    for name in ("preverifier", *HEADS):
        if not found.needs(name):
            continue
        if draft is None:
            yield Part(name, "on the draft's states: its size follows from the draft's")
            continue
        chosen = getattr(settings, name)
        if chosen.source is not None:
            chosen = PreverifierSettings(**named(name, chosen.source)["settings"])
        module = Preverifier(draft, chosen)
        what = f"depth {module.settings.depth}, width {module.settings.width or draft.width}"
        own = list(module.parameters())
        yield _counted(name, what, own, settings.model.dtype, None, trained=found.part == name)


def _ids(size: int, target: Stack) -> Tensor | None:
    return torch.arange(size) if 0 < size < target.vocab_size else None


def _counted(
    name: str, what: str, own: Sequence[Tensor], dtype: str, kv: int | None, *, trained: bool = False
) -> Part:  # fmt: skip
    count = sum(tensor.numel() for tensor in own)
    return Part(name, what, count, count * DTYPES[dtype].itemsize, kv, trained)


def learning_bytes(found: Sequence[Part], settings: Settings, part: str | None) -> int | None:
    """What training adds: parameters in float32 with gradients and moments, for some parts a target in float32.

    None: nothing is trained, or a size is not known.
    """
    target = found[0].parameters
    if part == "layerskip" and target is not None:
        return target * LEARNING
    sizes = [one.parameters for one in found if one.trained]
    if target is None or not sizes or None in sizes:
        return None
    own = sum(size for size in sizes if size is not None) * LEARNING
    return own + (target * 4 if part == "draft" else 0)
