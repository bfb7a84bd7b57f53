"""Tokenizers: do two belong together, which ids end a text, and text from a growing list of ids."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from pacer.errors import MismatchError

REMEDY = "use a draft model with the target's tokenizer"
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # what decoders put for bytes that are not (yet) UTF-8


def check_same_tokenizer(
    target_tok: PreTrainedTokenizerBase,
    draft_tok: PreTrainedTokenizerBase,
    target_vocab: int,
    draft_vocab: int,
    names: tuple[str, str] = ("target", "draft"),
) -> None:
    """Start-up check that an id means the same to both models: kind, text of each id, BOS/EOS, sizes.

    The models' vocabularies may differ in size where that is padding beyond the tokenizer.

    Args:
        target_tok, draft_tok: the tokenizers.
        target_vocab, draft_vocab: the models' vocabulary sizes (rows of the embedding).
        names: how the message calls the two models.

    Raises:
        MismatchError: naming the first differing id and both strings, or what else differs.
    """
    kinds = _kind(target_tok), _kind(draft_tok)
    if kinds[0] != kinds[1]:
        what = f"{names[0]} and {names[1]} have tokenizers of different kinds: {kinds[0]} and {kinds[1]}"
        raise MismatchError(what, remedy=REMEDY)
    _check_texts(target_tok, draft_tok, names)
    for role in ("bos_token", "eos_token"):
        ids = getattr(target_tok, f"{role}_id"), getattr(draft_tok, f"{role}_id")
        if ids[0] != ids[1]:
            texts = getattr(target_tok, role), getattr(draft_tok, role)
            what = f"the {role.replace('_', ' ')} differs: id {ids[0]} {texts[0]!r} in {names[0]}"
            raise MismatchError(f"{what}, id {ids[1]} {texts[1]!r} in {names[1]}", remedy=REMEDY)
    for name, tokenizer, vocab in zip(names, (target_tok, draft_tok), (target_vocab, draft_vocab), strict=True):
        needed = max(len(tokenizer), 1 + max(tokenizer.get_vocab().values(), default=-1))
        if vocab < needed:
            what = f"the model {name} has {vocab} ids, its tokenizer {needed}"
            raise MismatchError(what, remedy="use the tokenizer that belongs to the model")


def _kind(tokenizer: PreTrainedTokenizerBase) -> str:
    """The algorithm (BPE, Unigram …), not the Python class: one tokenizer loads as several classes."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return type(tokenizer).__name__ if backend is None else type(backend.model).__name__


def _check_texts(target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase, names: tuple[str, str]) -> None:
    left, right = target.get_vocab(), draft.get_vocab()
    if left == right:
        return
    first = min(id for _, id in left.items() ^ right.items())
    texts = [next((repr(text) for text, id in vocab.items() if id == first), "missing") for vocab in (left, right)]
    what = f"the tokenizers differ, first at id {first}: {texts[0]} in {names[0]}, {texts[1]} in {names[1]}"
    if len(target) != len(draft):
        what += f" (sizes {len(target)} and {len(draft)})"
    raise MismatchError(what, remedy=REMEDY)


def stop_ids(tokenizer: Any, generation_config: Any = None, model_config: Any = None) -> tuple[int, ...]:
    """All ids that end a text, from tokenizer, generation config and model config: sorted, without repeats.

    Each source may hold None, one id or a list; any may be None itself. Empty: texts run to their budget.
    """
    found: set[int] = set()
    for source in (tokenizer, generation_config, model_config):
        ids = getattr(source, "eos_token_id", None)
        if ids is not None:
            found.update(int(id) for id in (ids if isinstance(ids, Iterable) else (ids,)))
    return tuple(sorted(found))


def decode(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], *, skip_special: bool = True) -> str:
    """The text of `ids`, exactly: no tidying of spaces before punctuation."""
    text = tokenizer.decode(list(ids), skip_special_tokens=skip_special, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)  # a list only for a list of lists
    return text


def pieces(tokenizer: PreTrainedTokenizerBase, ids: Iterable[int]) -> dict[int, str]:
    """The text of each id inside a text, special ones too: with the space that begins a word. Part of a character is
    REPLACEMENT."""
    before = list(tokenizer("a", add_special_tokens=False)["input_ids"])
    start = len(decode(tokenizer, before, skip_special=False))
    return {id: decode(tokenizer, [*before, id], skip_special=False)[start:] for id in sorted(set(ids))}


class IncrementalText:
    """Text of a growing list of ids for streaming: never half a character, never a piece taken back.

    The pieces joined, `flush` included, are `decode` of all ids. Each push decodes only the ids since the piece
    before the last, which a tokenizer needs as context for the space before a word.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, skip_special: bool = True) -> None:
        self.tokenizer, self.skip_special = tokenizer, skip_special
        self.window: list[int] = []  # ids of the last piece given out, then those held back
        self.given = 0  # how many of them have been given out

    def push(self, ids: Sequence[int]) -> str:
        """Adds ids and returns the new text; what may be an incomplete character is held back."""
        self.window += ids
        piece = self._piece()
        if not piece or piece.endswith(REPLACEMENT):
            return ""
        del self.window[: self.given]
        self.given = len(self.window)
        return piece

    def flush(self) -> str:
        """The text still held back, at the end."""
        piece = self._piece()
        self.given = len(self.window)
        return piece

    def _piece(self) -> str:
        before = decode(self.tokenizer, self.window[: self.given], skip_special=self.skip_special)
        return decode(self.tokenizer, self.window, skip_special=self.skip_special)[len(before) :]
