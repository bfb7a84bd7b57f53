"""What the loop asks of a controller.

A controller sees everything drawn so far and decides only about the *next* draws; what was drawn always reaches the
verifier. Dropping a token because of its own value would break the sampled distribution.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self, TypeAlias

from pacer.decoding.parts import Part, find, resolved
from pacer.decoding.request import Row

if TYPE_CHECKING:  # words are checked without torch
    from torch import Tensor

    from pacer.decoding.record import Record

STOP, GO, ASK = 0, 1, 2  # a verdict on a row's next draw; ASK: `ask` has to say. False is STOP, True is GO

Verdicts: TypeAlias = "tuple[Tensor | None, Tensor | None]"


class Controller(Part):
    """Decides draft lengths.

    Attributes:
        reads_record: it looks at draft states and signals, which the drafter then keeps.
        gamma_max: no draft is longer; buffers are sized from it.
        stop, full: why a draft ends when the controller ends it, and when gamma_max does, as written in the trace.
    """

    reads_record: bool = True
    gamma_max: int
    stop: str = "controller"
    full: str = "gamma_max"

    def __post_init__(self) -> None:  # of rules that are dataclasses of their values
        self.check(vars(self))

    @classmethod
    def build(cls, given: Mapping[str, Any], **parts: Any) -> Self:
        """The rule from a method's values (``kind`` is not among them) and the parts that it :meth:`needs`."""
        return cls(**resolved(given, None), **parts)

    def block(self, drawn: int) -> int:
        """How many tokens to draw before the next question, after ``drawn``; 0 ends every draft."""
        return min(1, self.gamma_max - drawn)

    def limits(self, rows: Sequence[Row]) -> Sequence[int]:
        """The longest draft of each row in this round; 0: the drafter is not even read for it."""
        return [self.gamma_max] * len(rows)

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

    def learn(
        self, record: Record | None, committed: Sequence[int], drawn: Sequence[int], accepted: Sequence[int]
    ) -> None:
        """What became of the round's drafts, ``(B,)`` each; a row that was not verified now has drawn −1.

        Args:
            committed: tokens before the round. drawn: 0 where a row had no draft. accepted: of those drawn.
        """

    def end(self, committed: Sequence[int]) -> None:
        """The round is over; ``committed[i]`` tokens of row i were committed before it."""


def controller_class(kind: str) -> type[Controller]:
    """The rule of a kind: the one in ``pacer.decoding.controllers.KIND``, or in the module named with dots."""
    return find(kind, "pacer.decoding.controllers", Controller)
