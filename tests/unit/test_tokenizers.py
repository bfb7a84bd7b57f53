"""Tokenizer pairs (V56, V57), stop ids, and streaming text."""

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from pacer.errors import MismatchError
from pacer.models.tokenizers import IncrementalText, check_same_tokenizer, decode, pieces, stop_ids

SPECIAL = ["<bos>", "<eos>"]


def _tokenizer(pieces: list[str] | None = None, kind: str = "bpe", **special: str) -> PreTrainedTokenizerFast:
    """Byte level: every byte has a token, so every text and many broken ones can be made of ids."""
    vocab = {text: id for id, text in enumerate(SPECIAL + (pieces or sorted(pre_tokenizers.ByteLevel.alphabet())))}
    model = models.BPE(vocab, []) if kind == "bpe" else models.WordLevel(vocab, unk_token="<bos>")
    backend = Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokens = {"bos_token": "<bos>", "eos_token": "<eos>"} | special
    return PreTrainedTokenizerFast(tokenizer_object=backend, **tokens)


def test_equal_tokenizers_pass_whatever_the_padding() -> None:
    pieces = ["a", "b", "c"]
    check_same_tokenizer(_tokenizer(pieces), _tokenizer(pieces), 5, 5)
    check_same_tokenizer(_tokenizer(pieces), _tokenizer(pieces), 8, 64)


def test_added_tokens_count() -> None:
    """`tokenizer.vocab_size` leaves added tokens out: it would call these two the same."""
    target, draft = _tokenizer(["a"]), _tokenizer(["a"])
    target.add_tokens(["<tool>"])
    assert target.vocab_size == draft.vocab_size
    with pytest.raises(MismatchError, match=r"first at id 3: '<tool>' in big, missing in small \(sizes 4 and 3\)"):
        check_same_tokenizer(target, draft, 8, 8, ("big", "small"))


def test_swapped_tokens_name_the_first_id_and_both_strings() -> None:
    with pytest.raises(MismatchError, match=r"first at id 3: 'b' in target, 'c' in draft"):
        check_same_tokenizer(_tokenizer(["a", "b", "c"]), _tokenizer(["a", "c", "b"]), 5, 5)


def test_other_kind_bos_eos_and_sizes_are_refused() -> None:
    pieces = ["a", "b"]
    with pytest.raises(MismatchError, match=r"different kinds: BPE and WordLevel"):
        check_same_tokenizer(_tokenizer(pieces), _tokenizer(pieces, kind="word"), 4, 4)
    with pytest.raises(MismatchError, match=r"eos token differs: id 1 '<eos>' in target, id 2 'a' in draft"):
        check_same_tokenizer(_tokenizer(pieces), _tokenizer(pieces, eos_token="a"), 4, 4)
    with pytest.raises(MismatchError, match=r"the model draft has 3 ids, its tokenizer 4"):
        check_same_tokenizer(_tokenizer(pieces), _tokenizer(pieces), 4, 3)


def test_stop_ids_join_all_sources() -> None:
    def source(ids: int | list[int] | None) -> SimpleNamespace:
        return SimpleNamespace(eos_token_id=ids)

    assert stop_ids(source(7), source([9, 2]), source(9)) == (2, 7, 9)
    assert stop_ids(source(0)) == (0,)
    assert stop_ids(source(None), source(None), None) == ()


TOKENIZER = _tokenizer()


def _ids(text: str) -> list[int]:
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def test_half_a_character_is_held_back() -> None:
    stream = IncrementalText(TOKENIZER)
    pieces = [stream.push([id]) for id in _ids("aé€🙂b")]
    assert pieces == ["a", "", "é", "", "", "€", "", "", "", "🙂", "b"]
    assert stream.push(_ids("€")[:2]) == ""
    assert stream.flush() == "\N{REPLACEMENT CHARACTER}"
    assert stream.flush() == ""


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, len(TOKENIZER) - 1), max_size=4), max_size=12))
def test_pieces_join_to_the_whole_text(chunks: list[list[int]]) -> None:
    stream = IncrementalText(TOKENIZER)
    pieces = [stream.push(chunk) for chunk in chunks]
    assert "".join(pieces) + stream.flush() == decode(TOKENIZER, [id for chunk in chunks for id in chunk])


@settings(max_examples=40, deadline=None)
@given(st.text(max_size=20))
def test_streamed_text_never_shows_a_broken_character(text: str) -> None:
    text = text.replace("\N{REPLACEMENT CHARACTER}", "")
    stream = IncrementalText(TOKENIZER)
    assert "".join(stream.push([id]) for id in _ids(text)) == text


def test_decoding_does_not_tidy_spaces() -> None:
    assert decode(TOKENIZER, _ids("a , b n't .")) == "a , b n't ."


def test_each_id_has_its_text_inside_a_text() -> None:
    ids = _ids("to é b")
    found = pieces(TOKENIZER, [*ids, 1])
    assert found[1] == "<eos>" and found[ids[0]] == "t" and found[ids[2]] == " "
    assert {found[id] for id in _ids("é")} == {"\N{REPLACEMENT CHARACTER}"}  # a half of it each


def test_a_word_keeps_the_space_that_begins_it() -> None:
    """Sentence-piece decoders drop it at the beginning of a text."""
    backend = Tokenizer(models.WordLevel({"<bos>": 0, "▁a": 1, "▁word": 2}, unk_token="<bos>"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<bos>")
    assert decode(tokenizer, [2]) == "word" and pieces(tokenizer, [2]) == {2: " word"}
