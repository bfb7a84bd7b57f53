"""How large a model and what is trained for it are, from its config alone.

Parts are built on torch's meta device by the code that builds them with weights, and their tensors are counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi, hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError, RevisionNotFoundError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from pacer.errors import SourceError
from pacer.models.draft import TrainableDraft
from pacer.models.preverifier_layer import Layers
from pacer.models.sources import DTYPES, HUB_ERRORS, HUB_ID
from pacer.models.stack import Stack
from pacer.models.wheel import PREFIX, wheel_folder
from pacer.settings import DraftSettings, SourceSettings

TOKENS = 1000  # keys and values are counted for so many


def read_config(source: SourceSettings, cache: Path) -> Any | str:
    """The config of a model, or why it is not known; nothing but config.json is fetched.

    Raises:
        SourceError: no such folder or hub model, or a config that cannot be read.
    """
    folder = wheel_folder(source, cache) if source.id.startswith(PREFIX) else Path(source.id).expanduser()
    if source.id.startswith(PREFIX) and not folder.is_dir():
        return "not fetched yet"
    if not folder.is_dir():
        if not HUB_ID.fullmatch(source.id) or folder.exists():
            raise SourceError("no model folder here, and not a hub id", value=source.id)
        try:
            file = try_to_load_from_cache(source.id, "config.json", revision=source.revision)
            if not isinstance(file, str):
                HfApi().model_info(
                    source.id, revision=source.revision, timeout=10
                )  # a download tries for half a minute
                file = hf_hub_download(source.id, "config.json", revision=source.revision)
        except GatedRepoError:
            return "gated on the hub"
        except (RepositoryNotFoundError, RevisionNotFoundError, HFValidationError) as error:
            raise SourceError("no such model or revision on the hub (or it is private)", value=source.id) from error
        except HUB_ERRORS:
            return "unknown offline"
        folder = Path(file).parent
    try:
        return AutoConfig.from_pretrained(str(folder), local_files_only=True)
    except (ValueError, OSError, KeyError) as error:
        what = f"config.json cannot be read ({next(iter(str(error).splitlines()), '')})"
        raise SourceError(what, value=str(folder)) from error


def skeleton(config: Any, dtype: str) -> Stack:
    """A model without weights.

    Raises:
        UnsupportedError: a family that cannot be cut into layers.
    """
    with torch.device("meta"):
        return Stack(AutoModelForCausalLM.from_config(config, dtype=DTYPES[dtype]).eval())


def draft_skeleton(target: Stack, draft: DraftSettings) -> TrainableDraft:
    """A draft of layers of the target (kinds ``layers`` and ``skip``)."""
    skipping = draft.kind == "skip"
    size = target.vocab_size if skipping or not draft.head_size else min(draft.head_size, target.vocab_size)
    ids = torch.arange(size)
    return TrainableDraft(target, draft.layers, ids, copying=draft.copying and not skipping)


def tensors(modules: Iterable[nn.Module], beside: Sequence[nn.Module] = ()) -> list[Tensor]:
    """The parameters of modules, each once; without those of ``beside``."""
    known = {id(parameter) for module in beside for parameter in module.parameters()}
    found = {id(p): p for module in modules for p in module.parameters() if id(p) not in known}
    return list(found.values())


def kv_bytes(stack: Stack | Layers) -> int:
    """Keys and values of `TOKENS` tokens of a row."""
    return stack.new_cache(1, TOKENS - 1).nbytes()  # and one place more, for padded writes
