"""The frozen draft's states of labelled texts, on disk: computed once, read in every epoch and by every variant.

At a narrow pre-verifier the draft's forward is four fifths of a training step. A stage holds the state that produced
each place of a text and its rounds, before the norm, in the draft's own dtype: shards of texts with a manifest that
names the draft, the layer, the dtype and what was read.

Shapes: N places of a text and its rounds, H draft width.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from pacer.artifacts import Stage
from pacer.data.corpus import Text
from pacer.data.labels import Rounds
from pacer.data.packing import pack, packed_length
from pacer.errors import PacerError
from pacer.files import disk_errors
from pacer.models.checkpoint import identity
from pacer.models.stack import Stack
from pacer.training.preverify import produced_states
from pacer.work.progress import progress
from pacer.work.stopping import PATIENCE, check_stop

log = logging.getLogger(__name__)

Pair = tuple[Text, Rounds]
States = Sequence[tuple[Path, str]]  # of each text: the file and the name of its tensor (N, H)
SHARD = 32  # texts per file: the unit of resuming
SUFFIX = ".safetensors"


def bytes_needed(draft: Stack, pairs: Sequence[Pair]) -> int:
    """Size of the states on disk."""
    return sum(packed_length(*pair) for pair in pairs) * draft.width * draft.dtype.itemsize


def read_states(states: States, index: int) -> Tensor:
    """The states of a text ``(N, H)``."""
    file, name = states[index]
    return _open(file).get_tensor(name)


@functools.lru_cache(maxsize=64)
def _open(file: Path) -> Any:
    return safe_open(file, "pt")  # maps the file: a tensor is read when it is asked for


def _digest(pairs: Sequence[Pair]) -> str:
    """What the draft reads: ids and places. Labels and signals do not matter."""
    digest = hashlib.sha256()
    for text, rounds in pairs:
        for ids in (torch.tensor([*text.prompt_ids, *text.output_ids]), rounds.starts, rounds.counts, rounds.tokens):
            digest.update(str(tuple(ids.shape)).encode() + ids.numpy().tobytes())
    return digest.hexdigest()


def store_states(root: Path, draft: Stack, pairs: Sequence[Pair]) -> States:
    """The states of these texts: found in ``root/states``, or computed and written there.

    Raises:
        PacerError: they will not fit on the disk; nothing is written. ArtifactError: the disk refused meanwhile.
    """
    key = {
        "draft": identity(draft, layers=True), "layer": draft.n_layers, "pairs": _digest(pairs), "shard": SHARD,
        "dtype": str(draft.dtype).removeprefix("torch."),
    }  # fmt: skip
    stage = Stage(root, "states", key)
    if not stage.complete:
        _write(stage, draft, pairs)
    return [(stage.shard(i // SHARD, SUFFIX), str(i % SHARD)) for i in range(len(pairs))]


def _write(stage: Stage, draft: Stack, pairs: Sequence[Pair]) -> None:
    shards = [pairs[i : i + SHARD] for i in range(0, len(pairs), SHARD)]
    missing = stage.missing(len(shards), SUFFIX)
    needed = sum(bytes_needed(draft, shards[i]) for i in missing)
    with disk_errors(stage.folder):
        stage.folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(stage.folder).free
    log.info("storing the draft's states of %d texts in %s: %.0f MB", len(pairs), stage.folder, needed / 1e6)
    if needed > 0.95 * free:
        raise PacerError(
            "no room for the draft's states", value=f"{needed / 1e6:.0f} MB", allowed=f"{free / 1e6:.0f} MB free",
            remedy="free space, or set trainer.cache_states=false",
        )  # fmt: skip
    with progress(len(pairs), "draft states", "text", initial=len(pairs) - sum(len(shards[i]) for i in missing)) as bar:

        def make(number: int) -> Callable[[Path], None]:
            found = {}
            for i, pair in enumerate(shards[number]):
                found[str(i)] = (
                    produced_states(draft, pack([[pair]], "survival").to(draft.device))[0].cpu().contiguous()
                )
                bar.update()
                check_stop(PATIENCE)
            return functools.partial(save_file, found)

        extra = {"texts": len(pairs), "bytes": bytes_needed(draft, pairs)}
        stage.fill(len(shards), make, suffix=SUFFIX, extra=extra)
