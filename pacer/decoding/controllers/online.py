"""What rules have in common that learn while they decode: a state for each request.

A request's state starts fresh and learns from its own rounds alone, so lengths and output of a request are the same
alone, in any batch and in any order. ``warm`` gives that up: what a row has learnt goes on to the request that takes it
next.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

from pacer.decoding.controllers.base import Controller
from pacer.decoding.request import Row

State = TypeVar("State")


class Online(Controller, Generic[State]):
    """A rule with a state for each row of the batch.

    Attributes:
        warm: states outlive their requests. states: of the rows.
    """

    warm: bool
    states: list[State]

    def __post_init__(self) -> None:
        super().__post_init__()
        self.states = []

    def fresh(self) -> State:
        """The state of a request that nothing is known of."""
        raise NotImplementedError  # abstract: each rule remembers something else

    def reset(self, rows: Sequence[Row], capacity: int) -> None:
        kept = self.states[: len(rows)] if self.warm else []
        self.states = [*kept, *(self.fresh() for _ in range(len(rows) - len(kept)))]

    def admit(self, index: int) -> None:
        if not self.warm:
            self.states[index] = self.fresh()
