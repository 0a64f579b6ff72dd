"""How much text a token stands for: never less than any text shows, and unknown where there is no such number."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from ragfuse.hf.token_length import TokenLength, token_length
from ragfuse.hf.tokens import TextEncoder

SAID = [
    "the keeper of the lighthouse",
    "    four spaces",
    "aaaaaaaaaaaaaaaa",
    "\u00e9t\u00e9 e\u0301te\u0301",
    "\n\n\n\n\n\n",
] * 4
BYTES = pre_tokenizers.ByteLevel.alphabet()


def trained(
    model: Any, trainer: Callable[..., Any], normalizer: Any = None, pre: Any = None, alphabet=(), **more
) -> Tokenizer:
    made = Tokenizer(model)
    if normalizer is not None:
        made.normalizer = normalizer
    if pre is not None:
        made.pre_tokenizer = pre
    made.train_from_iterator(
        SAID, trainer(vocab_size=400, initial_alphabet=list(alphabet), show_progress=False, **more)
    )
    return made


def byte_level(normalizer: Any = None, before: Any = None) -> Tokenizer:
    level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pre = level if before is None else pre_tokenizers.Sequence([before, level])
    return trained(models.BPE(), trainers.BpeTrainer, normalizer, pre, BYTES)


def without_bytes(chars: str) -> Tokenizer:
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    lacks = {level.pre_tokenize_str(char)[0][0] for char in chars}
    made = Tokenizer(models.BPE({byte: at for at, byte in enumerate(sorted({*BYTES} - lacks))}, []))
    made.pre_tokenizer = level
    return made


def metaspace(**options: Any) -> Tokenizer:
    pieces = {f"<0x{byte:02X}>": byte for byte in range(256)}
    pieces |= {piece: 256 + at for at, piece in enumerate(["\u2581", "a", "b", "aa", "\u2581a", "aaaa", "<unk>"])}
    merges = [("a", "a"), ("\u2581", "a"), ("aa", "aa")]
    made = Tokenizer(models.BPE(pieces, merges, unk_token="<unk>", **options))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    return made


KNOWN = {
    "bytes": byte_level,
    "bytes behind digits": lambda: byte_level(before=pre_tokenizers.Digits(individual_digits=True)),
    "bytes of composed characters": lambda: byte_level(normalizers.NFC()),
    "bytes of fewer characters": lambda: byte_level(normalizers.Replace("aaa", "a")),
    "bytes of small letters": lambda: byte_level(normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])),
    "bytes of which a few lack": lambda: without_bytes("\x04\x16"),
    "pieces with bytes": lambda: metaspace(byte_fallback=True),
    "pieces, one unknown token each": lambda: metaspace(fuse_unk=False),
}
NOT_KNOWN = {
    "stripped": lambda: byte_level(normalizers.Strip()),
    "without accents": lambda: byte_level(normalizers.StripAccents()),
    "with a character taken out": lambda: byte_level(normalizers.Replace("a", "")),
    "by an expression": lambda: byte_level(normalizers.Replace(__import__("tokenizers").Regex(" +"), " ")),
    "parted at white space": lambda: byte_level(before=pre_tokenizers.WhitespaceSplit()),
    "parted by a sign that goes": lambda: byte_level(before=pre_tokenizers.Split("-", "removed")),
    "words": lambda: trained(
        models.WordPiece(unk_token="[UNK]"),
        trainers.WordPieceTrainer,
        pre=pre_tokenizers.Metaspace(),
        special_tokens=["[UNK]"],
    ),
    "bytes of which some lack": lambda: trained(
        models.BPE(), trainers.BpeTrainer, pre=pre_tokenizers.ByteLevel(), alphabet=BYTES[:9]
    ),
    "unknown runs as one": lambda: metaspace(fuse_unk=True),
    "likely pieces": lambda: trained(
        models.Unigram(),
        trainers.UnigramTrainer,
        pre=pre_tokenizers.Metaspace(),
        unk_token="<unk>",
        special_tokens=["<unk>"],
    ),
}
READ = {name: PreTrainedTokenizerFast(tokenizer_object=make()) for name, make in KNOWN.items()}


def ids(tokenizer: Any, text: str) -> list[int]:
    return TextEncoder(tokenizer).tokens(text)


@pytest.mark.parametrize("name", KNOWN)
@given(text=st.text(st.sampled_from("ab \n-9A\u00e9e\u0301\u1f82\u4e2d\U0001f600\u200b\x00\x04"), max_size=200))
@example("a" * 500)
@example(" " * 500)
@example("\u03b1\u0313\u0300\u0345" * 50)
@example("\u4e2d" * 100)
@example("e\u0301" * 100)
def test_no_text_has_fewer_tokens_than_its_characters_ask_for(name, text):
    tokenizer = READ[name]
    assert token_length(tokenizer).min_tokens(text) <= len(ids(tokenizer, text))


@pytest.mark.parametrize("make", NOT_KNOWN.values(), ids=NOT_KNOWN.keys())
def test_where_there_is_no_such_number_none_is_told(make):
    assert token_length(PreTrainedTokenizerFast(tokenizer_object=make())) is None


@pytest.mark.parametrize("is_special", [True, False])
def test_a_token_that_takes_white_space_with_it_has_none_unless_no_content_holds_it(is_special):
    made = PreTrainedTokenizerFast(tokenizer_object=byte_level())
    token = AddedToken("<|end|>", rstrip=True, special=is_special, normalized=False)
    made.add_tokens([token], special_tokens=is_special)
    assert (token_length(made) is not None) is is_special
    if is_special:
        text = "<|end|>" + " " * 500
        assert token_length(made).min_tokens(text) <= len(ids(made, text))


def test_added_tokens_count_by_their_length():
    made = PreTrainedTokenizerFast(tokenizer_object=byte_level())
    made.add_tokens(["a-long-word-of-a-domain" * 10])
    assert token_length(made) == TokenLength(len("a-long-word-of-a-domain" * 10))


def test_what_the_embedded_model_drops_does_not_count(smollm_path):
    tokenizer = AutoTokenizer.from_pretrained(smollm_path)
    length, tokens = token_length(tokenizer), TextEncoder(tokenizer).tokens
    assert length.chars == max(map(len, tokenizer.get_vocab()))
    assert sorted(length.dropped) == [chr(char) for char in range(128) if not tokens(chr(char))]
    for char in (*length.dropped, "\U00050000", "\u00e9", "a", " ", "\n", "="):
        for text in (char * 1000, f"{char} " * 500):
            assert length.min_tokens(text) <= len(tokens(text))
