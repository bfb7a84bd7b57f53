"""An exit of a model, seen as a model of its own: the same embedding and layers below, another readout.

So that all that works with a draft model (simulated rounds, records, pre-verifiers) works with an exit.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from pacer.errors import UnsupportedError
from pacer.models.copying import Copied
from pacer.models.exits import ExitHead
from pacer.models.stack import Stack


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
        """Layers a … b − 1; an adapter follows where b is the exit's layer.

        Raises:
            UnsupportedError: an adapter with a cache (a ladder has a lane for it).
        """
        states = super().run(x, a, b, positions, mask, cache)
        adapter = self.exit.adapter
        if adapter is None or b != self.n_layers:
            return states
        if cache is not None:
            raise UnsupportedError("an exit with an adapter, read with a cache of its own", value=self.exit.kind)
        return adapter.run(states, 0, adapter.n_layers, positions, mask)

    def normed(self, states: Tensor) -> Tensor:
        return self.exit.norm(states)

    def readout(self, states: Tensor, copied: Copied | None = None) -> Tensor:
        """What the exit reads out: ``(…, H)`` → ``(…, V)``."""
        return self.exit.readout(states)
