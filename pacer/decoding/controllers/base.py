"""What the loop asks of a controller.

A controller sees everything drawn so far and decides only about the *next* draws; what was drawn always reaches the
verifier. Dropping a token because of its own value would break the sampled distribution.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from pacer.decoding.record import Record
from pacer.decoding.request import Row

STOP, GO, ASK = 0, 1, 2  # a verdict on a row's next draw; ASK: `ask` has to say. False is STOP, True is GO

Verdicts = tuple[Tensor | None, Tensor | None]


class Controller:
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

    def block(self, drawn: int) -> int:
        """How many tokens to draw before the next question, after ``drawn``; 0 ends every draft."""
        raise NotImplementedError  # the one question that has no answer of its own: every rule says it

    def reset(self, rows: Sequence[Row], capacity: int) -> None:
        """A new batch."""

    def admit(self, index: int) -> None:
        """Another request takes a row."""

    def prefill(self, record: Record | None, rows: Sequence[Row], read: Sequence[bool]) -> None:
        """The prompts of these rows were read."""

    def judge(self, record: Record | None, rows: Sequence[Row], drawn: int, open_rows: Sequence[bool]) -> Verdicts:
        """After a block: verdicts ``(B,)`` on the device (None: all go on) and scores of the block ``(B, b)``."""
        return None, None

    def ask(self, record: Record | None, rows: Sequence[Row], drawn: int, asked: Sequence[bool]) -> Verdicts:
        """The dear answer for the rows whose verdict was ASK: go on ``(B,)`` bool and scores; other rows' are void."""
        return None, None

    def end(self, committed: Sequence[int]) -> None:
        """The round is over; ``committed[i]`` tokens of row i were committed before it."""
