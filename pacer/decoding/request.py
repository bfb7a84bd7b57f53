"""What is asked for, what came of it, and the one committed list in between."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pacer.errors import PacerError


@dataclass(frozen=True)
class Request:
    """A prompt to continue.

    Args:
        id: names the request; with the seed it determines the random numbers.
        stop_ids: the output ends with the first of these. stop: strings that end the output once its text holds one.
    """

    id: str
    prompt_ids: Sequence[int]
    max_new_tokens: int
    stop_ids: frozenset[int] = frozenset()
    stop: tuple[str, ...] = ()


@dataclass
class Result:
    """Output ids (prompt excluded), why it ended (eos | length | stop_string | context), and the trace.

    ``seconds`` is its share of the batch's wall time (sums add up to the wall), ``latency`` the wall time it took.
    """

    request: Request
    ids: list[int]
    finish: str
    seconds: float
    latency: float
    rounds: list[dict[str, object]] = field(default_factory=list)


@dataclass
class Row:
    """A request in flight. ``committed`` = prompt + output: stream, result, history and caches all follow from it."""

    request: Request
    committed: list[int]
    key: int
    rounds: int = 0
    finish: str | None = None
    seconds: float = 0.0
    latency: float = 0.0
    trace: list[dict[str, object]] = field(default_factory=list)

    @property
    def output(self) -> list[int]:
        return self.committed[len(self.request.prompt_ids) :]

    @property
    def left(self) -> int:
        """Tokens that may still be emitted."""
        return self.request.max_new_tokens - (len(self.committed) - len(self.request.prompt_ids))

    def commit(self, new: Sequence[int], context: int, decode: Callable[[Sequence[int]], str] | None) -> list[int]:
        """Append what may be emitted of ``new`` and set ``finish``; returns the emitted ids.

        Plain decoding would look for an end after each token, so the earliest end wins, whatever its kind.
        """
        emitted: list[int] = []
        for token in new:
            self.committed.append(token)
            emitted.append(token)
            self.finish = self._end(token, context, decode)
            if self.finish:
                break
        return emitted

    def _end(self, token: int, context: int, decode: Callable[[Sequence[int]], str] | None) -> str | None:
        if token in self.request.stop_ids:
            return "eos"
        if self.request.stop:
            if decode is None:
                raise PacerError("stop strings need a tokenizer", value=self.request.stop, remedy="pass decode=")
            text = self._tail(decode, max(len(s.encode()) for s in self.request.stop))
            if any(s in text for s in self.request.stop):
                return "stop_string"
        if self.left <= 0:
            return "length"
        return "context" if len(self.committed) >= context else None

    def _tail(self, decode: Callable[[Sequence[int]], str], size: int) -> str:
        """Text of the last tokens, at least ``size`` bytes of it: a match ends in the last token. Some have no text."""
        output, tokens = self.output, size + 8
        while len((text := decode(output[-tokens:])).encode()) < size + 8 and tokens < len(output):
            tokens *= 2
        return text


def common(one: Sequence[int], other: Sequence[int], start: int = 0) -> int:
    """How many first ids are equal, where the first ``start`` are known to be."""
    most = min(len(one), len(other))
    return next((k for k in range(min(start, most), most) if one[k] != other[k]), most)
