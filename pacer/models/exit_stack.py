"""An exit of a model, seen as a model of its own: the same embedding and layers below, another readout.

So that all that works with a draft model (simulated rounds, records, pre-verifiers) works with an exit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from pacer.models.cache import Cache
from pacer.models.copying import Copied
from pacer.models.exits import ExitHead
from pacer.models.stack import Stack


class Both:
    """The caches of an exit's layers and of its adapter, which read the same tokens."""

    def __init__(self, model: Cache, adapter: Cache) -> None:
        self.model, self.adapter = model, adapter

    def at(self, slots: Tensor, extent: int, rows: Sequence[int] | None = None) -> Both:
        """Set where the next forward writes, in both."""
        self.model.at(slots, extent, rows)
        self.adapter.at(slots, extent, rows)
        return self


class ExitStack(Stack):
    """Layers 0 … E − 1 of a stack and an exit's readout. Nothing is copied.

    Args:
        target: the model. head: of an exit of it.
    """

    def __init__(self, target: Stack, head: ExitHead) -> None:
        self.__dict__.update(target.__dict__)  # the same parts; a stack is built only once per model
        self.exit, self.n_layers, self.head_ids, self.copying = head, head.layer, head.head_ids, None

    def run(
        self,
        x: Tensor,
        a: int,
        b: int,
        positions: Tensor,
        mask: Tensor | BlockMask | None,
        cache: Any = None,
    ) -> Tensor:
        """Layers a … b − 1; an adapter follows where b is the exit's layer, with a cache of :meth:`new_cache`."""
        both = isinstance(cache, Both)
        states = super().run(x, a, b, positions, mask, cache.model if both else cache)
        adapter = self.exit.adapter
        if adapter is None or b != self.n_layers:
            return states
        states = states.to(adapter.dtype)
        return adapter.run(states, 0, adapter.n_layers, positions, mask, cache.adapter if both else None)

    def new_cache(  # type: ignore[override]  # a ladder has a lane for the adapter; only simulated rounds ask here
        self, rows: int, capacity: int, a: int = 0, b: int | None = None, block: int | None = None
    ) -> Cache | Both:
        """A cache for layers a … b − 1, and for an adapter that follows them."""
        end = self.n_layers if b is None else b
        model = super().new_cache(rows, capacity, a, end, block)
        if self.exit.adapter is None or end != self.n_layers:
            return model
        return Both(model, self.exit.adapter.new_cache(rows, capacity, block=block))

    def normed(self, states: Tensor) -> Tensor:
        return self.exit.norm(states)

    def readout(self, states: Tensor, copied: Copied | None = None) -> Tensor:
        """What the exit reads out: ``(…, H)`` → ``(…, V)``."""
        return self.exit.readout(states)
