"""Where models come from: a local folder, a hub id, or a GGUF inside a PyPI wheel. All end as a local HF folder."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import disable_progress_bars, enable_progress_bars
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from pacer.errors import ConfigError, SourceError
from pacer.models.wheel import PREFIX, fetch_wheel, quiet
from pacer.settings import SourceSettings

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
# The base of the hub client's errors covers its HTTP library, which changed between versions (requests, httpx …).
HUB_ERRORS: tuple[type[Exception], ...] = (HfHubHTTPError.__bases__[0], LocalEntryNotFoundError, OSError)
HUB_FILES = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "merges.txt", "vocab.txt", "*.model"]
HUB_IGNORED = ["*/*", "consolidated*"]  # other formats in subfolders; a second copy of the weights
USE_FOLDER = "use a local folder: model.target.id=/path/to/folder (config.json, *.safetensors, tokenizer files)"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


def fetch(source: SourceSettings, cache: Path, *, progress: bool = True, verify: bool = False) -> Path:
    """Brings the model of `source` to this machine and returns its folder in Hugging Face form.

    A local folder is returned itself. A hub id lands in the Hugging Face cache. A wheel's GGUF is downloaded,
    checked and dequantised once into ``<cache>/models/<hash>``. Nothing is imported or run from what is fetched.

    Args:
        source: where the model is.
        cache: the project's cache folder (`paths.cache`).
        progress: show progress bars on stderr.
        verify: re-read a cached wheel model in full against its hashes, instead of its sizes and small files only.

    Raises:
        SourceError: not found, gated, unreachable, damaged, or not in safetensors form.
        ConfigError: settings that do not fit the kind of source.
    """
    if source.id.startswith(PREFIX):
        return fetch_wheel(source, cache, progress=progress, verify=verify)
    folder = Path(source.id).expanduser()
    if source.id and folder.is_dir():
        check_folder(folder)
        return folder
    if not HUB_ID.fullmatch(source.id) or folder.exists():
        raise SourceError(
            "no model folder here, and not a hub id",
            value=source.id,
            allowed=("a folder with config.json, *.safetensors and tokenizer files", "ORG/NAME", "wheel:NAME==VERSION"),
        )
    return _fetch_hub(source, progress)


def _fetch_hub(source: SourceSettings, progress: bool) -> Path:
    patterns = [*HUB_FILES, "*.py"] if source.trust_remote_code else HUB_FILES
    if not progress:
        disable_progress_bars()
    try:
        folder = snapshot_download(
            source.id,
            revision=source.revision,
            allow_patterns=patterns,
            ignore_patterns=HUB_IGNORED,
            etag_timeout=10,
        )
    except GatedRepoError as error:
        remedy = f"ask for access on the hub and log in (hf auth login), or {USE_FOLDER}"
        raise SourceError("this hub model is gated", value=source.id, remedy=remedy) from error
    except RevisionNotFoundError as error:
        what = f"the hub model {source.id} has no such revision"
        raise SourceError(what, value=source.revision, remedy=f"correct it, or {USE_FOLDER}") from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        remedy = f"correct the id or log in (hf auth login), or {USE_FOLDER}"
        raise SourceError("no such model on the hub (or it is private)", value=source.id, remedy=remedy) from error
    except HUB_ERRORS as error:
        what = "the model is not in the local Hugging Face cache and the hub cannot be reached (offline?)"
        raise SourceError(what, value=source.id, remedy=f"connect, or {USE_FOLDER}") from error
    finally:
        if not progress:
            enable_progress_bars()
    check_folder(Path(folder))
    return Path(folder)


def check_folder(folder: Path) -> None:
    """Checks that `folder` holds config.json, whole safetensors weights and a tokenizer.

    Raises:
        SourceError: naming the missing or damaged file.
    """
    where = str(folder)
    if not (folder / "config.json").is_file():
        raise SourceError("the model folder has no config.json", value=where, remedy="save it with save_pretrained")
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        index = folder / "model.safetensors.index.json"
        named = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values() if index.is_file() else ()
    except (ValueError, KeyError, TypeError) as error:
        raise SourceError("a file of the model folder is not the JSON it should be", value=where) from error
    if "model_type" not in config:
        raise SourceError("config.json names no model_type", value=where)
    weights = sorted({folder / name for name in named}) or sorted(folder.glob("*.safetensors"))
    if not weights:
        pickles = [path.name for pattern in PICKLES for path in folder.glob(pattern)]
        what = "pickle weights are refused (they can run code)" if pickles else "no safetensors weights in the folder"
        remedy = "load it where you trust it and write it again: model.save_pretrained(folder)"
        raise SourceError(what, value=str(folder / pickles[0]) if pickles else where, remedy=remedy)
    for path in weights:
        check_safetensors(path)
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise SourceError("the model folder has no tokenizer", value=where, allowed=TOKENIZER_FILES)


def check_safetensors(path: Path) -> None:
    """Checks that the file is as long as its own header says (a cut download, a Git LFS pointer)."""
    remedy = "fetch this file again"
    if not path.is_file():
        raise SourceError("a weights file is missing", value=str(path), remedy=remedy)
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else size
        try:
            header = json.loads(file.read(length)) if 8 + length <= size else None
        except ValueError:
            header = None
    if not isinstance(header, dict):
        raise SourceError("a weights file is damaged", value=str(path), remedy=remedy)
    end = max((t["data_offsets"][1] for name, t in header.items() if name != "__metadata__"), default=0)
    if 8 + length + end != size:
        what = f"a weights file has {size} bytes instead of {8 + length + end}"
        raise SourceError(what, value=str(path), remedy=remedy)


def pick_device(device: str) -> torch.device:
    """``auto`` is CUDA where there is one, else the CPU; anything else is a torch device name."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        picked = torch.device(device)
    except RuntimeError as error:
        raise ConfigError("unknown device", value=device, allowed="auto, cpu, cuda, cuda:N") from error
    if picked.type == "cuda" and (picked.index or 0) >= torch.cuda.device_count():
        raise ConfigError("there is no such CUDA device here", value=device, remedy="use device=cpu or device=auto")
    return picked


def load_model(
    path: Path,
    dtype: str | torch.dtype = "bfloat16",
    device: str | torch.device = "auto",
    attention: str = "sdpa",
    trust_remote_code: bool = False,
    device_map: str | None = None,
) -> PreTrainedModel:
    """Loads a causal LM from a local folder: eval mode, no gradients, on `device`.

    Args:
        device_map: how transformers places the layers on all GPUs; None: all on `device`.

    Raises:
        ConfigError: an unknown dtype or device, or GPUs that do not hold the model.
        SourceError: the folder needs its own code and `trust_remote_code` is off, an architecture that transformers
            does not know, or weights that do not fill the model.
    """
    if isinstance(dtype, str) and dtype not in DTYPES:
        raise ConfigError("unknown dtype", value=dtype, allowed=DTYPES)
    target = pick_device(device) if isinstance(device, str) else device
    options: dict[str, Any] = {
        "dtype": DTYPES[dtype] if isinstance(dtype, str) else dtype,
        "attn_implementation": attention,
        "trust_remote_code": trust_remote_code,
        "local_files_only": True,
        "use_safetensors": True,
        "output_loading_info": True,
        **({} if device_map is None else {"device_map": device_map}),
    }
    try:
        with quiet():
            loaded: Any = AutoModelForCausalLM.from_pretrained(str(path), **options)
    except (ValueError, OSError, ImportError, RuntimeError) as error:
        raise SourceError(f"the model cannot be loaded ({_first_line(error)})", value=str(path)) from error
    model, info = loaded
    if info["missing_keys"]:  # transformers fills them with random numbers
        missing = sorted(info["missing_keys"])
        what = f"the weights lack {len(missing)} tensors of the model, first {missing[0]}"
        raise SourceError(what, value=str(path), remedy="use a folder saved from the whole causal LM")
    if device_map is None:
        model = model.to(target)
    else:
        _check_placed(model)
    return model.eval().requires_grad_(False)


def _check_placed(model: Any) -> None:
    """Refuse layers that were left in the computer's memory or on disk, to be fetched for every pass."""
    places = {str(place) for place in getattr(model, "hf_device_map", {}).values()}
    if len(places) > 1 and places & {"cpu", "disk"}:
        raise ConfigError(
            "the GPUs here do not hold the model", value=sorted(places),
            remedy="use more GPUs, a smaller model, or model.device_map=null model.device=cpu",
        )  # fmt: skip


def load_tokenizer(path: Path, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Loads the tokenizer of a local model folder, with its chat template if it has one.

    Raises:
        SourceError: missing or unreadable files, or a tokenizer that is code and `trust_remote_code` is off.
    """
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            str(path), local_files_only=True, trust_remote_code=trust_remote_code
        )
    except (ValueError, OSError, ImportError) as error:
        raise SourceError(f"the tokenizer cannot be loaded ({_first_line(error)})", value=str(path)) from error
    return tokenizer


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)[:300]
