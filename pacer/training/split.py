"""A model that is tuned as a whole, split over the processes that tune it (torch's ``fully_shard``).

Each process keeps a share of every layer: weights, gradients, moments. A layer is gathered when it runs, so all
processes run the same layers in the same order. States on disk hold the whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import lightning
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import FSDPModule, fully_shard
from transformers import PreTrainedModel

from pacer.training.ranks import world


def split_strategy() -> ModelParallelStrategy:
    """Lightning's part: where states are gathered and dealt out again."""
    return ModelParallelStrategy(data_parallel_size=world(), tensor_parallel_size=1, save_distributed_checkpoint=False)


def split(module: lightning.LightningModule, layers: Iterable[nn.Module]) -> None:
    """Split these layers one by one, and the rest of the module together; every step must go through its ``forward``,
    around which the rest is gathered."""
    if isinstance(module, FSDPModule):
        return
    assert module.device_mesh is not None
    mesh = module.device_mesh["data_parallel"]
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)


def load_weights(module: lightning.LightningModule, state: Mapping[str, Tensor]) -> None:
    """Whole weights into a module, which may be split."""
    if isinstance(module, FSDPModule):
        module.reshard()  # what the last forward gathered
        set_model_state_dict(module, dict(state), options=StateDictOptions(full_state_dict=True))
    else:
        module.load_state_dict(state)


def whole_model(model: PreTrainedModel, state: Mapping[str, Any], prefix: str) -> PreTrainedModel:
    """A model like one that is split, with the whole weights of a state, whose names begin with ``prefix``."""
    with torch.device("meta"):
        found = type(model)(model.config)
    weights = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
    found.load_state_dict(weights, assign=True)
    found.tie_weights()
    found.generation_config = model.generation_config
    return found
