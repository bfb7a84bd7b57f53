"""When what an exit has accepted goes to the next verifier.

A rule sees tokens that are in the buffer and decides only whether more are to come; all of them reach the verifier.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from pacer.decoding.request import Row
from pacer.errors import ConfigError

Stops = tuple[list[str | None], list[list[float]]]


class BufferRule:
    """Decides about buffers, row by row: they grow at their own pace.

    Attributes:
        reads_exit: it looks at the exit's logits, states and signals, and is shown them (:meth:`saw`).
        longest: tokens after which it certainly stops.
    """

    reads_exit = False
    longest: int

    def reset(self, rows: Sequence[Row], capacity: int) -> None:
        """A new batch."""

    def admit(self, index: int) -> None:
        """Another request takes a row."""

    def saw(
        self, rows: Sequence[Row], numbers: Sequence[int], logits: Tensor, emitted: Sequence[Sequence[int]]
    ) -> None:
        """What the exit said of the tokens that rows ``numbers`` have just got: logits ``(B, g + 1, V)``."""

    def judge(
        self, rows: Sequence[Row], numbers: Sequence[int], buffered: Sequence[int], fresh: Sequence[int]
    ) -> Stops:
        """Why each buffer is full (None: it is not), and scores of its fresh tokens, if there are any.

        Args:
            rows: with their buffer behind the prefix. numbers: which rows of the batch they are.
            buffered, fresh: tokens in each buffer, and how many of them are new.
        """
        raise NotImplementedError  # the one question that has no answer of its own

    def end(self, before: Sequence[int], chosen: Sequence[int]) -> None:
        """The chosen rows were verified; ``before`` tokens of a row were committed before that."""


class Enough(BufferRule):
    """Full at ``n`` tokens (HiSpec's N_i)."""

    def __init__(self, n: int = 4) -> None:
        if n < 1:
            raise ConfigError("controller.n out of range", value=n, allowed="≥ 1")
        self.longest = n

    def judge(
        self, rows: Sequence[Row], numbers: Sequence[int], buffered: Sequence[int], fresh: Sequence[int]
    ) -> Stops:
        return ["fixed" if have >= self.longest else None for have in buffered], [[] for _ in buffered]
