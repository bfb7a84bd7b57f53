"""4-bit weights for a draft on a CPU: groups of 32 along the input, scale and zero in bfloat16, torch's own kernel.

Only the draft is quantised: whatever it proposes, the output stays the target's. torchao 0.18 offers int4 on GPUs
alone, and its 8-bit layers unpack their weights in every call, which is slower than bfloat16 at one token.

Shapes: O outputs, I inputs, G groups of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pacer.errors import UnsupportedError

GROUP, LEVELS, MIDDLE = 32, 15, 8  # the kernel's zero is the value of level 8
TILE = 16  # outputs must be multiples of it


def packed_int4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A weight ``(O, I)`` → packed levels, and scale and middle of each group ``(G, O, 2)`` in bfloat16."""
    groups = weight.float().unflatten(-1, (-1, GROUP))
    low, high = groups.aminmax(dim=-1)
    scale = ((high - low) / LEVELS).clamp_min(1e-6).bfloat16()
    middle = (low + scale.float() * MIDDLE).bfloat16()
    levels = ((groups - middle.float()[..., None]) / scale.float()[..., None] + MIDDLE).round().clamp(0, LEVELS)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(levels.flatten(-2).int(), 1)
    return packed, torch.stack([scale, middle], -1).transpose(0, 1).contiguous()


class Int4Linear(nn.Module):
    """A linear layer without bias whose weight takes 4.5 bits per number."""

    packed: Tensor
    groups: Tensor

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        for name, value in zip(("packed", "groups"), packed_int4(weight), strict=True):
            self.register_buffer(name, value)

    def forward(self, x: Tensor) -> Tensor:
        """``(…, I)`` → ``(…, O)`` in the dtype of ``x``."""
        flat = x.flatten(0, -2).to(torch.bfloat16)
        out = torch.ops.aten._weight_int4pack_mm_for_cpu(flat, self.packed, GROUP, self.groups)
        return out.unflatten(0, x.shape[:-1]).to(x.dtype)


def _fits(layer: nn.Linear) -> bool:
    return layer.bias is None and layer.in_features % GROUP == 0 and layer.out_features % TILE == 0


@torch.no_grad()
def quantise(model: nn.Module) -> int:
    """Replace every linear layer that fits (in place); returns how many.

    Raises:
        UnsupportedError: not on a CPU.
    """
    weight = next(model.parameters())
    if weight.device.type != "cpu":
        raise UnsupportedError("a 4-bit draft runs on a CPU only", value=str(weight.device), allowed="model.device=cpu",
                               remedy="use model.draft.quantise=null")  # fmt: skip
    found: list[tuple[nn.Module, str, nn.Linear]] = [
        (parent, name, child)
        for parent in list(model.modules())
        for name, child in parent.named_children()
        if isinstance(child, nn.Linear) and _fits(child)
    ]
    for parent, name, child in found:
        setattr(parent, name, Int4Linear(child.weight.detach()))
    return len(found)
