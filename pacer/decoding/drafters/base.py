"""What the proposer asks of a drafter, and how one is found by its name.

A drafter draws tokens one after another for a batch of rows and says what each was drawn from. One with values of its
own (``method.drafting``) is a class in a module of this folder; those made of models are put together in
`pacer.assemble`.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self

from pacer.decoding.parts import Part, find, resolved
from pacer.decoding.request import Row
from pacer.settings import SamplingSettings

if TYPE_CHECKING:  # words are checked without torch
    import torch
    from torch import Tensor

    from pacer.decoding.record import Record
    from pacer.models.stack import Stack

ROOM = "pacer.decoding.drafters"


class DraftContext:
    """How far a draft model's context reaches, and one warning where it ends.

    Args:
        size: tokens.
    """

    def __init__(self, size: int) -> None:
        self.size, self._warned = size, False

    def room(self, length: int) -> int:
        """Tokens that the model can write after so many; the last one is never fed."""
        if length > self.size:
            self.ended()
        return max(0, self.size - length + 1)

    def ended(self) -> None:
        """Say, once, that drafting is over."""
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"the draft model's context of {self.size} tokens is used up: going on without drafting", stacklevel=3
            )


class Drafter(Part):
    """Proposes tokens.

    Attributes:
        declines: why a draft ends for which it does not draw. reads_prompts: the proposer hands it the prompts.
        keeps_record, record: it notes what controllers look at. sampling, device: the decoder's own.
    """

    section: ClassVar[str] = "drafting"
    declines = "unconfident"
    reads_prompts = False
    keeps_record = False
    record: Record | None = None
    sampling: SamplingSettings
    device: torch.device

    @classmethod
    def build(cls, given: Mapping[str, Any], target: Stack, sampling: SamplingSettings, **parts: Any) -> Self:
        """The drafter from a method's values and the parts that it :meth:`needs`."""
        made = cls(**resolved(given, None), **parts)
        made.sampling, made.device = sampling, target.device
        return made

    def reset(self, rows: Sequence[Row], capacity: int) -> None:
        """A new batch; no text will be longer than ``capacity``."""

    def admit(self, index: int) -> None:
        """Another request takes a row."""

    def room(self, row: Row) -> int:
        """Tokens it can still draft for a row."""
        return 2**31

    def read(self, rows: Sequence[Row], wanted: Sequence[bool]) -> None:
        """A round begins: the rows that will draft have been committed so far."""

    def able(self, offset: int, open_rows: list[bool]) -> list[bool] | None:
        """Which open rows a token will be drawn for at place ``offset``; None: all of them."""
        return None

    def draw(self, offset: int, open_rows: Sequence[bool]) -> tuple[Tensor, Tensor | None]:
        """Draw the token at place ``offset`` (from 0) of the draft.

        Args:
            open_rows: rows still drafting; what the others get is padding.

        Returns:
            ids ``(B, 1)`` and, when sampling, the distribution they were drawn from ``(B, 1, V)`` (None: one-hot).
        """
        raise NotImplementedError  # abstract: what every drafter must do itself

    def truncate(self, lengths: Sequence[int]) -> None:
        """Forget the drafts beyond ``lengths`` tokens of each row."""


def drafter_class(name: str) -> type[Part]:
    """The drafter of a name: the one in ``pacer.decoding.drafters.NAME``, or in the module named with dots.

    It draws token by token (:class:`Drafter`), or makes whole drafts (`pacer.decoding.drafters.branching.Branching`).
    """
    return find(name, ROOM, Part)
