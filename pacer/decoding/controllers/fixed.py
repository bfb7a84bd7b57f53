"""The fixed window: always γ tokens. γ = 0 never drafts and costs what plain decoding costs."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from pacer.decoding.drafters.model import Record
from pacer.decoding.request import Row
from pacer.errors import ConfigError


class Fixed:
    """Draft ``gamma`` tokens each round."""

    reads_record = False
    stop = full = "fixed"

    def __init__(self, gamma: int = 4) -> None:
        if gamma < 0:
            raise ConfigError("gamma out of range", value=gamma, allowed="≥ 0")
        self.gamma_max = gamma

    def reset(self, rows: Sequence[Row], capacity: int) -> None:
        pass

    def prefill(self, record: Record | None, rows: Sequence[Row]) -> None:
        pass

    def block(self, drawn: int) -> int:
        return self.gamma_max - drawn

    def judge(
        self, record: Record | None, rows: Sequence[Row], drawn: int, open_rows: Sequence[bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        return None, None

    def end(self, committed: Sequence[int]) -> None:
        pass
