"""Models whose layers lie on several devices: memory beside each layer, and copies that are free of its place.

Transformers places the layers (``model.device_map``) and hangs a hook on each that fetches its inputs; a stack brings
the states back to the device of its embedding, so whoever calls it sees one device.

Shapes: B rows of a call, n new tokens, S extent read, G key/value heads, D head.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TypeVar

import torch
from accelerate.hooks import remove_hook_from_module
from torch import Tensor, nn

from pacer.models.cache import Cache

Module = TypeVar("Module", bound=nn.Module)


def own_copy(module: Module, device: torch.device) -> Module:
    """A copy on ``device``, without the hooks that bring inputs to where the original lies."""
    found: Module = copy.deepcopy(module)
    remove_hook_from_module(found, recurse=True)
    for part in found.modules():
        part.__dict__.pop("forward", None)  # what the hook left in place of the class's own
    return found.to(device)


class SplitCache:
    """Caches of runs of consecutive layers as one.

    Args:
        parts: in the order of their layers; each as long as ``counts`` says. first: the first layer's number.
    """

    is_compileable = False

    def __init__(self, parts: Sequence[Cache], counts: Sequence[int], first: int) -> None:
        self.parts = parts
        self.keys, self.values = parts[0].keys, parts[0].values
        self.rows, self.capacity = parts[0].rows, parts[0].capacity
        owners = [part for part, count in zip(parts, counts, strict=True) for _ in range(count)]
        self._of_layer = dict(enumerate(owners, first))
        self._extent = 0

    def reserve(self, ends: Sequence[int]) -> None:
        for part in self.parts:
            part.reserve(ends)

    def at(self, slots_Bn: Tensor, extent: int, rows: Sequence[int] | None = None) -> SplitCache:
        """Set where the next forward writes, in all parts."""
        self._extent = extent
        for part in self.parts:
            part.at(slots_Bn.to(part.keys.device), extent, rows)
        return self

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Write ``(B, G, n, D)`` entries of a layer; return all up to the extent, ``(B, G, S, D)``."""
        return self._of_layer[layer_idx].update(keys, values, layer_idx)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """As :meth:`pacer.models.cache.KeyValues.get_seq_length`."""
        return self._extent

    def move(self, slots: Mapping[int, Sequence[int]], firsts: Mapping[int, int]) -> None:
        for part in self.parts:
            part.move(slots, firsts)

    def truncate(self, lengths: Sequence[int]) -> None:
        for part in self.parts:
            part.truncate(lengths)

    def release(self, row: int) -> None:
        for part in self.parts:
            part.release(row)

    def share(self, row: int, other: int, length: int) -> None:
        for part in self.parts:
            part.share(row, other, length)

    def clear(self, rows: int, capacity: int) -> None:
        for part in self.parts:
            part.clear(rows, capacity)

    def allocated_tokens(self) -> int:
        """Of each layer, as in the parts."""
        return self.parts[0].allocated_tokens()

    def nbytes(self) -> int:
        return sum(part.nbytes() for part in self.parts)

    def workspace_bytes(self) -> int:
        return max(part.workspace_bytes() for part in self.parts)
