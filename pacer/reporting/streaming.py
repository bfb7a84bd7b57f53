"""Text as it is decoded: plain, or with the origin of each token in colour."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, TextIO

from transformers import PreTrainedTokenizerBase

from pacer.decoding.request import Result
from pacer.models.tokenizers import IncrementalText, decode
from pacer.settings import MethodSettings

GREEN, RED, YELLOW, DIM, RESET = "\x1b[32m", "\x1b[9;31m", "\x1b[33m", "\x1b[2m", "\x1b[0m"
LEGEND = f"{GREEN}accepted draft{RESET} {RED}rejected draft{RESET} {YELLOW}from the target{RESET} {DIM}score{RESET}"


class Writer(Protocol):
    def write(self, line: Mapping[str, Any]) -> None:
        """Show a round."""

    def close(self) -> None:
        """Show what was held back."""


class PlainText:
    """The text alone, whole characters only."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, out: TextIO) -> None:
        self.text, self.out = IncrementalText(tokenizer), out

    def write(self, line: Mapping[str, Any]) -> None:
        self.out.write(self.text.push(line["emitted"]))
        self.out.flush()

    def close(self) -> None:
        self.out.write(self.text.flush() + "\n")


class Painter:
    """Accepted drafts green, rejected ones red and struck through, the target's own tokens yellow, scores dim."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, out: TextIO) -> None:
        self.tokenizer, self.out = tokenizer, out
        out.write(LEGEND + "\n")

    def write(self, line: Mapping[str, Any]) -> None:
        accepted, drafted, emitted = line["accepted"][-1], line["drafted"], line["emitted"]
        drafted = emitted[:accepted] if "parents" in line else drafted  # of a tree, the branch that is text
        for place, token in enumerate(drafted):
            kept = place < min(accepted, len(emitted))
            self._paint(GREEN if kept else RED, token)
            score = line["scores"][place] if place < len(line["scores"]) else None
            if score is not None:
                self.out.write(f"{DIM}{score:.2f}{RESET}")
        for token in emitted[accepted:]:
            self._paint(YELLOW, token)
        self.out.flush()

    def close(self) -> None:
        self.out.write("\n")

    def _paint(self, color: str, token: int) -> None:
        self.out.write(f"{color}{decode(self.tokenizer, [token], skip_special=False)}{RESET}")


def summary(result: Result, method: MethodSettings) -> str:
    """One line: speed, tokens per target pass, acceptance."""
    rounds = result.rounds[1:]
    drafted = sum(len(line["drafted"]) for line in rounds)  # type: ignore[arg-type,misc]  # trace values are plain data
    accepted = sum(line["accepted"][-1] for line in rounds)  # type: ignore[index]
    label = "" if method.guarantee == "exact" else f" [{method.guarantee}]"
    parts = [
        f"{method.name}{label}: {len(result.ids)} tokens in {result.latency:.1f} s",
        f"{len(result.ids) / result.latency:.1f} tok/s with prefill",
        f"{(len(result.ids) - 1) / max(len(rounds), 1):.2f} tokens per target pass",
    ]
    if drafted:
        parts.append(f"{drafted / len(rounds):.1f} drafted per pass, {accepted / drafted:.0%} accepted")
    return ", ".join([*parts, f"ended by {result.finish}"])
