"""Phrases by their first token, the latest kept: what n-gram methods remember of a text, or of many."""

from __future__ import annotations

from collections.abc import Sequence

Phrase = tuple[int, ...]


class Pool:
    """Up to ``most`` phrases that follow a token, each up to ``longest`` tokens."""

    def __init__(self, most: int, longest: int) -> None:
        self.most, self.longest = most, longest
        self._after: dict[int, list[Phrase]] = {}

    def add(self, key: int, phrase: Sequence[int]) -> None:
        """Remember that ``phrase`` followed ``key``; one that is known becomes the latest."""
        tokens = tuple(phrase[: self.longest])
        if not tokens or self.most == 0:
            return
        known = self._after.setdefault(key, [])
        if tokens in known:
            known.remove(tokens)
        known.append(tokens)
        del known[: -self.most]

    def replace(self, key: int, old: Phrase, new: Sequence[int]) -> None:
        """Put ``new`` where ``old`` is, if it is still there; what is known already is not there twice."""
        known, tokens = self._after.get(key, []), tuple(new[: self.longest])
        if old in known and tokens != old:
            at = known.index(old)
            known[at : at + 1] = [] if tokens in known else [tokens]

    def learn(self, text: Sequence[int]) -> None:
        """All that follows each token of a text, at full length."""
        for at in range(len(text) - self.longest):
            self.add(text[at], text[at + 1 : at + 1 + self.longest])

    def after(self, key: int) -> list[Phrase]:
        """What followed a token, the latest first."""
        return self._after.get(key, [])[::-1]
