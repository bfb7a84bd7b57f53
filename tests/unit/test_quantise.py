"""4-bit weights of a draft: within half a step of each group, exact where the weights lie on a 4-bit grid."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from pacer.errors import MismatchError, UnsupportedError
from pacer.models.checkpoint import check_identity, identity
from pacer.models.quantise import GROUP, Int4Linear, quantise
from pacer.models.stack import Stack
from tests.tiny import tiny_model


def on_a_grid(rows: int, width: int) -> torch.Tensor:
    """Weights that each group of 32 writes with 16 levels, scale and lowest value exact in bfloat16."""
    generator = torch.Generator().manual_seed(0)
    levels = torch.randint(0, 16, (rows, width // GROUP, GROUP), generator=generator).float()
    levels[..., 0], levels[..., 1] = 0, 15  # every group uses its whole range
    scale = 2.0 ** torch.randint(-6, -2, (rows, width // GROUP, 1), generator=generator)
    return ((levels - 8) * scale).flatten(1)


@pytest.mark.parametrize("rows", [1, 3, 40])
def test_weights_on_a_grid_are_exact(rows: int) -> None:
    weight = on_a_grid(32, 96)
    x = torch.randn(rows, 96, generator=torch.Generator().manual_seed(1)).bfloat16()
    wanted = x.float() @ weight.T
    found = Int4Linear(weight)(x).float()
    assert (found - wanted).abs().max() <= 0.01 * wanted.abs().max()  # the kernel sums in bfloat16 products


def test_any_weight_is_within_half_a_step() -> None:
    weight = torch.randn(32, 64, generator=torch.Generator().manual_seed(2))
    layer = Int4Linear(weight)
    rows = layer(torch.eye(64).bfloat16()).float().T  # the weight as the kernel sees it
    step = weight.unflatten(1, (-1, GROUP)).aminmax(dim=-1)
    half = ((step.max - step.min) / 15 / 2).repeat_interleave(GROUP, 1)
    assert ((rows - weight).abs() <= half * 1.1 + 0.02).all()
    assert (rows - weight).abs().max() > 0.01  # it is a quantised one


def test_only_layers_that_fit_are_replaced() -> None:
    model = nn.ModuleDict(
        {"fits": nn.Linear(64, 32, bias=False), "bias": nn.Linear(64, 32), "odd": nn.Linear(24, 16, bias=False)}
    )
    assert quantise(model) == 1
    assert isinstance(model["fits"], Int4Linear)
    assert all(isinstance(model[name], nn.Linear) for name in ("bias", "odd"))


def test_a_model_elsewhere_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="CPU"):
        quantise(nn.Linear(64, 32, bias=False, device="meta"))


def test_the_models_embedding_stays() -> None:
    model = tiny_model("llama", 2)
    before = model.get_input_embeddings().weight.clone()
    quantise(model)
    assert torch.equal(model.get_input_embeddings().weight, before)


def test_two_drafts_in_4_bits_are_told_apart() -> None:
    """Norms and embedding are the same; what differs are the 4-bit weights alone."""
    model = tiny_model("llama", 2, intermediate_size=64)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.model.layers[1].self_attn.o_proj.weight.mul_(-1)
    plain = [identity(Stack(m), layers=True) for m in (model, other)]
    stacks = []
    for each in (model, other):
        quantise(each.model.layers)
        assert not any(isinstance(child, nn.Linear) for child in each.model.layers.modules())
        stacks.append(Stack(each))
    one, two = (identity(stack, layers=True) for stack in stacks)
    assert identity(stacks[0]) == identity(stacks[1])
    assert len({found["layers"] for found in (one, two, *plain)}) == 4
    check_identity(one, stacks[0], "a part")
    with pytest.raises(MismatchError, match="layers"):
        check_identity(one, stacks[1], "a part")
