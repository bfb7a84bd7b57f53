"""What the target predicts at every position of a text: its top k ids, their log-probabilities, the mass left out.

One teacher-forced pass over prompt + output gives them; shards of texts keep them on disk (safetensors), from which
training reads a text at a time, so memory does not grow with the corpus.

Shapes: T tokens of a text, N tokens of a shard, k stored ids, H width, V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from pacer.data.batching import token_batches
from pacer.models.stack import Stack, causal_mask
from pacer.work.stopping import PATIENCE, check_stop

LOGITS = 2**25  # held at once, in float32: 128 MiB whatever the vocabulary
TOKENS = 4096  # of a batch
_PROBABILITY = torch.float16  # 11 bits: log-probabilities to 1 in 2,000


class Predictions(NamedTuple):
    """Of one text; row t is the prediction after token t."""

    ids: Tensor  # (T, k), most probable first
    logprobs: Tensor  # (T, k)
    rest: Tensor  # (T,) log of the mass of all other ids


def logit_rows(vocabulary: int) -> int:
    """Rows of logits that are held at once."""
    return max(1, LOGITS // vocabulary)


def token_bytes(k: int, vocabulary: int) -> int:
    """Bytes on disk of one token's predictions."""
    return k * (_id_dtype(vocabulary).itemsize + _PROBABILITY.itemsize) + _PROBABILITY.itemsize


def _id_dtype(vocabulary: int) -> torch.dtype:
    return torch.uint16 if vocabulary <= 2**16 else torch.int32


@torch.no_grad()
def predict(target: Stack, texts: Sequence[Sequence[int]], k: int) -> list[Predictions]:
    """The target's predictions in one teacher-forced pass per batch of about ``TOKENS`` tokens, in the texts' order.

    Args:
        texts: token ids, prompt and output. k: 1 … V − 1.
    """
    found: dict[int, Predictions] = {}
    for batch in token_batches([len(ids) for ids in texts], TOKENS, seed=0):
        lengths = [len(texts[i]) for i in batch]
        ids = torch.zeros(len(batch), max(lengths), dtype=torch.long)
        for row, index in enumerate(batch):
            ids[row, : lengths[row]] = torch.tensor(texts[index])
        ids = ids.to(target.device)
        positions = torch.arange(ids.shape[1], device=ids.device).expand(len(ids), -1)
        states = target.run(target.embed(ids), 0, target.n_layers, positions, causal_mask(positions, ids.shape[1]))
        states = torch.cat([row[:length] for row, length in zip(states, lengths, strict=True)])  # no padding
        whole = [tensor.cpu().split(lengths) for tensor in read_out(target, states, k)]
        found |= {i: Predictions(*tensors) for i, *tensors in zip(batch, *whole, strict=True)}
        check_stop(PATIENCE)
    return [found[i] for i in range(len(texts))]


@torch.no_grad()
def read_out(target: Stack, states: Tensor, k: int) -> Predictions:
    """The target's predictions at its last states before the norm ``(N, H)``, few rows of logits at a time."""
    parts = [_top(target.readout(rows).float(), k) for rows in states.split(logit_rows(target.vocab_size))]
    return Predictions(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))


def _top(logits: Tensor, k: int) -> Predictions:
    logprobs = logits.log_softmax(-1)
    top = logprobs.topk(k)
    rest = logprobs.scatter_(1, top.indices, -torch.inf).logsumexp(-1)  # summed: 1 − Σ would lose what is small
    return Predictions(top.indices, top.values, rest)


def write_shard(
    path: Path, names: Sequence[str], predictions: Sequence[Predictions], vocabulary: int, about: Mapping[str, Any]
) -> None:
    """Predictions of texts one after the other, with the texts' names and what the shard is about in its header."""
    ids, logprobs, rest = (torch.cat(tensors) for tensors in zip(*predictions, strict=True))
    ends = torch.tensor([len(p.ids) for p in predictions]).cumsum(0)
    tensors = {
        "ids": ids.to(_id_dtype(vocabulary)), "logprobs": logprobs.to(_PROBABILITY), "rest": rest.to(_PROBABILITY),
        "ends": ends,
    }  # fmt: skip
    header = json.dumps({"texts": list(names), **about})
    save_file(tensors, path, {"about": header})  # one entry: several are written in an order that is not the same twice


class Teacher:
    """Predictions by the name of their text, read from shards when asked for."""

    def __init__(self, shards: Sequence[Path]) -> None:
        self._places: dict[str, tuple[Any, int, int]] = {}
        for shard in shards:
            file = safe_open(shard, "pt")
            ends = file.get_tensor("ends").tolist()
            names = json.loads(file.metadata()["about"])["texts"]
            for name, start, end in zip(names, [0, *ends], ends, strict=False):
                self._places[name] = (file, start, end)

    def __call__(self, name: str) -> Predictions:
        file, start, end = self._places[name]
        ids, logprobs, rest = (file.get_slice(key)[start:end] for key in Predictions._fields)
        return Predictions(ids.long(), logprobs.float(), rest.float())
