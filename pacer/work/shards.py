"""Work that several processes share: which part of it is this one's.

The parts are array jobs of Slurm or ranks of a launcher. A sample's part follows from a stable hash of its row's id, so
it is the same on every machine and whatever else is in the set.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from pacer.data.splits import owner
from pacer.errors import ConfigError
from pacer.settings import ShardSettings

Item = TypeVar("Item")
_REMEDY = "set both shard.index and shard.count; shard.count=1 is the whole"


@dataclass(frozen=True)
class Shard:
    """One of ``count`` parts, by default the whole."""

    index: int = 0
    count: int = 1

    @property
    def name(self) -> str:
        """For files: empty for the whole."""
        return f"-{self.index}-of-{self.count}" if self.count > 1 else ""

    def owns(self, id: str) -> bool:
        """Whether a sample is in this part."""
        return owner(id, self.count) == self.index


WHOLE = Shard()


def shard_of(settings: ShardSettings) -> Shard:
    """The part that the settings name.

    Raises:
        ConfigError: one of the two is missing, or there is no such part.
    """
    index, count = settings.index, settings.count
    if count == 1 and index is None:
        return WHOLE
    if (index is None) != (count is None):
        raise ConfigError("half a shard", value=f"shard.index={index} shard.count={count}", remedy=_REMEDY)
    shard = Shard(index or 0, 1 if count is None else count)
    if shard.index >= shard.count:
        raise ConfigError("shard.index", value=shard.index, allowed=f"0 … {shard.count - 1}")
    return shard


def from_environment(settings: ShardSettings, environment: Mapping[str, str]) -> ShardSettings:
    """The settings with what they leave open: this process's place in an array of Slurm, else among ranks.

    Raises:
        ConfigError: an array whose numbers have gaps.
    """
    if settings.index is not None or settings.count is not None:
        return settings
    array = [environment.get(f"SLURM_ARRAY_TASK_{name}") for name in ("ID", "COUNT", "MIN", "STEP")]
    if array[0] is not None and array[1] is not None:
        id, count, low, step = (int(word or default) for word, default in zip(array, "0101", strict=True))
        index, rest = divmod(id - low, step)
        if rest or index >= count:
            value = f"task {id} of {count} from {low} by {step}"
            raise ConfigError("the numbers of this array are no shards", value=value, remedy=_REMEDY)
        return ShardSettings(index, count)
    ranks = [environment.get(name) for name in ("RANK", "WORLD_SIZE")]
    return ShardSettings(*(int(word) for word in ranks if word)) if all(ranks) else settings


def pieces(items: Sequence[Item], size: int, shard: Shard, id: Callable[[Item], str]) -> tuple[list[Any], list[int]]:
    """Items in pieces of ``size``, and which of the pieces a worker of this part makes first: by their first items."""
    found = [items[i : i + size] for i in range(0, len(items), size)]
    return found, [number for number, piece in enumerate(found) if shard.owns(id(piece[0]))]
