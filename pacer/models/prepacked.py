"""Linear layers on a CPU whose weights lie as its kernels read them (oneDNN).

A pass over one to sixteen tokens is the time it takes to read the weights. Torch's own ``linear`` reads them slower,
and in float32 slowest at two to five rows, which is what a verification pass has. The packed copy is made at the first
use and lies beside the plain weight, which stays what is saved, compared and trained.

Shapes: O outputs, I inputs.
"""

from __future__ import annotations

import logging
import platform
from collections.abc import Iterable
from typing import Any

import psutil
import torch
from torch import Tensor, nn

log = logging.getLogger(__name__)

LEAST = 2**16  # weights of a layer below which a call costs more than what it reads
ROWS = 8  # tokens of a usual pass: which layout is best hardly depends on it
SHARE = 0.5  # of the free memory that copies may take


class PackedLinear(nn.Linear):
    """A linear layer that computes on a packed copy of its weight where no gradient is wanted.

    It has no constructor of its own: :func:`prepack` turns a plain layer into one where it stands, so that all who hold
    the layer or its weight go on holding it.
    """

    _packed: tuple[tuple[int, int], Tensor] | None = None

    def forward(self, input: Tensor) -> Tensor:
        """``(…, I)`` → ``(…, O)``."""
        weight = self.weight
        plain = torch.is_grad_enabled() or not input.is_cpu or input.dtype != weight.dtype
        if plain or torch.is_autocast_enabled("cpu"):
            return super().forward(input)
        # an optimiser or a checkpoint may have written to the weight since
        now = (weight.data_ptr(), 0 if weight.is_inference() else weight._version)
        if self._packed is None or self._packed[0] != now:
            self._packed = now, torch.ops.mkldnn._reorder_linear_weight(weight.detach(), ROWS)
        out: Tensor = torch.ops.mkldnn._linear_pointwise(input, self._packed[1], self.bias, "none", [], "")
        return out

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_packed"}  # copies make their own


def packable(layer: nn.Module) -> bool:
    """Whether a layer is a plain linear one that this CPU has kernels for, and large enough to gain."""
    if type(layer) is not nn.Linear or layer.weight.device.type != "cpu" or layer.weight.numel() < LEAST:
        return False
    if platform.machine() not in ("x86_64", "AMD64") or not torch.backends.mkldnn.is_available():
        return False
    if layer.weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return layer.weight.dtype == torch.float32


def prepack(modules: Iterable[nn.Module]) -> int:
    """Let the linear layers of these modules compute on packed copies; returns how many do.

    None does where the copies would take more than half of the free memory.
    """
    layers = list(dict.fromkeys(child for module in modules for child in module.modules() if packable(child)))
    needed, free = _bytes(layers), _free_memory()
    if needed > SHARE * free:
        what = "weights are not packed for this CPU: their copies would take %.1f of %.1f GB of free memory"
        log.warning(what, needed / 1e9, free / 1e9)
        return 0
    for layer in layers:
        layer.__class__ = PackedLinear
    return len(layers)


def _bytes(layers: Iterable[nn.Module]) -> int:
    weights = [weight for layer in layers for weight in layer.parameters()]
    return sum(weight.numel() * weight.element_size() for weight in weights)


def _free_memory() -> int:
    """Bytes that can be had, what files only fill as a cache included."""
    return int(psutil.virtual_memory().available)
