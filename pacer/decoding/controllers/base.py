"""What the loop asks of a controller.

A controller sees everything drawn so far and decides only about the *next* draws; what was drawn always reaches the
verifier. Dropping a token because of its own value would break the sampled distribution.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from pacer.decoding.drafters.model import Record
from pacer.decoding.request import Row


class Controller(Protocol):
    """Decides draft lengths.

    Attributes:
        reads_record: it looks at draft states and signals, which the drafter then keeps.
        gamma_max: no draft is longer; buffers are sized from it.
        stop, full: why a draft ends when the controller ends it, and when gamma_max does, as written in the trace.
    """

    reads_record: bool
    gamma_max: int
    stop: str
    full: str

    def reset(self, rows: Sequence[Row], capacity: int) -> None:
        """A new batch."""

    def prefill(self, record: Record | None, rows: Sequence[Row]) -> None:
        """The prompts were read."""

    def block(self, drawn: int) -> int:
        """How many tokens to draw before the next question, after ``drawn``; 0 ends every draft."""

    def judge(
        self, record: Record | None, rows: Sequence[Row], drawn: int, open_rows: Sequence[bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        """After a block: ``go_on (B,)`` bool on the device (None: all go on) and scores of the block ``(B, b)``."""

    def end(self, committed: Sequence[int]) -> None:
        """The round is over; ``committed[i]`` tokens of row i were committed before it."""
