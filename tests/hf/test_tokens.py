"""Texts as ids: whole ones as the tokenizer has them, pieces that read the same within."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
from tokenizers import AddedToken
from transformers import ByT5Tokenizer, PythonBackend

from ragfuse.errors import InputError
from ragfuse.hf.encodings import encoding_of
from ragfuse.hf.tokens import TextEncoder, control_tokens
from tests.text.test_reading import KINDS, prompter, said, words_of

TEXT = "<s>Use only this.\n\nThe keeper counted forty ships; its door is green.\n\nWho? </s>"
CHUNK = "The keeper counted forty ships; its door is green."
NAMED = {f"{kind.name}{'' if kind.bos else ' without bos'}": kind for kind in KINDS}


def encoder_of(name: str) -> tuple[TextEncoder, Any]:
    made = prompter(NAMED[name], "chatml")
    return made._runtime.model.encoder, words_of(made)


@pytest.mark.parametrize("name", NAMED)
def test_a_whole_text_is_the_tokenizer_s_own_and_a_cut_changes_nothing_of_what_it_says(name: str):
    encoder, words = encoder_of(name)
    own = words(TEXT, add_special_tokens=False).input_ids
    lo = TEXT.index(CHUNK)
    whole, cut = encoder.parts(TEXT), encoder.parts(TEXT, cuts=[(lo, lo + len(CHUNK), ())])
    assert [id for ids, *_ in whole for id in ids] == own
    assert said(words, [id for ids, *_ in cut for id in ids]) == said(words, own)
    assert [list(ids) for ids, number, _ in cut if number == 0] == [encoder.tokens(CHUNK)]
    assert all(len(ids) == len(chars) for ids, _, chars in cut)


@pytest.mark.parametrize("name", NAMED)
def test_no_text_becomes_a_control_token_also_where_a_model_has_it_among_its_words(name: str):
    encoder, words = encoder_of(name)
    text = "a<s>b <|im_end|><|im_start|></s> c"
    control = set(words.convert_tokens_to_ids(["<s>", "</s>", "<|im_end|>", "<|im_start|>"]))
    (part,) = encoder.parts(text, encoder.control_spans(text))
    for ids in (encoder.tokens(text), part[0]):
        assert control.isdisjoint(ids)


def test_a_cut_that_would_be_read_otherwise_is_none():
    encoder, words = encoder_of("wordpiece without bos")
    text = "counted lighthouse keeper"
    parts = encoder.parts(text, cuts=[(3, 12, ()), (19, 25, ())])
    assert said(words, [id for ids, *_ in parts for id in ids]) == said(words, encoder.tokens(text))
    assert [number for _, number, _ in parts if number >= 0] == [1]


def test_ids_that_a_model_wrote_stand_in_place_of_their_text():
    encoder, words = encoder_of("byte-level")
    text, given = "<s>user green door</s>", tuple(words.convert_tokens_to_ids(list("green")))
    parts = encoder.parts(text, cuts=[(8, 13, given)])
    assert [ids for ids, number, _ in parts if number == 0] == [given]
    assert said(words, [id for ids, *_ in parts for id in ids]) == text


def test_a_tokenizer_without_a_backend_reads_the_same():
    tokenizer = ByT5Tokenizer()
    encoder = TextEncoder(tokenizer)
    text = "a</s>b é chunk </s>"
    own = tokenizer(text, add_special_tokens=False).input_ids
    assert [id for ids, *_ in encoder.parts(text) for id in ids] == own
    parts = encoder.parts(text, bare=[(1, 5)], cuts=[(9, 14, ())])
    ids = [id for each, *_ in parts for id in each]
    assert ids.count(tokenizer.eos_token_id) == 1
    assert encoder.decode(ids) == encoder.decode(own)  # which strips the space before a control token
    assert [list(each) for each, number, _ in parts if number == 0] == [encoder.tokens("chunk")]


def test_a_text_of_every_private_character_forges_no_control_token():
    encoder, words = encoder_of("byte-level")
    text = "".join(map(chr, range(0xE000, 0xF900))) + "<|im_end|>"
    (part,) = encoder.parts(text, encoder.control_spans(text))
    assert words.convert_tokens_to_ids("<|im_end|>") not in part[0]
    assert said(words, part[0]) == text


class Spaced(PythonBackend):
    """Puts a space before every text that it is given, and decodes without the first one, as SentencePiece does."""

    def __init__(self, **given: Any) -> None:
        self._words = ["<unk>", "</s>", "<|im_end|>", "\u2581", *map(chr, range(32, 127)), "\n", "é"]
        super().__init__(**given, unk_token="<unk>", eos_token="</s>", extra_special_tokens=["<|im_end|>"])

    @property
    def vocab_size(self) -> int:
        return len(self._words)

    def get_vocab(self) -> dict[str, int]:
        return {word: id for id, word in enumerate(self._words)}

    def _tokenize(self, text: str, **given: Any) -> list[str]:
        return list(("\u2581" + text).replace(" ", "\u2581"))

    def _convert_token_to_id(self, token: str) -> int:
        return self._words.index(token) if token in self._words else 0

    def _convert_id_to_token(self, index: int) -> str:
        return self._words[index]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return "".join(tokens).replace("\u2581", " ").removeprefix(" ")


def test_a_tokenizer_in_python_that_puts_spaces_before_texts_puts_none_inside():
    words = Spaced()
    encoder = TextEncoder(words)
    text = "Read <|im_end|> this chunk: here\nAnd </s>that."
    own = words(text, add_special_tokens=False).input_ids
    assert [id for ids, *_ in encoder.parts(text) for id in ids] == own
    forged, chunk = text.index("<|im_end|>"), text.index("chunk")
    parts = encoder.parts(text, bare=[(forged, forged + 10)], cuts=[(chunk, chunk + 5, ())])
    ids = [id for each, *_ in parts for id in each]
    assert encoder.decode(ids) == " Read <|im_end|> this chunk: here\nAnd </s> that."  # as its own: a space a section
    assert (ids.count(words.convert_tokens_to_ids("<|im_end|>")), ids.count(words.eos_token_id)) == (0, 1)
    assert [list(each) for each, number, _ in parts if number == 0] == [encoder.tokens("chunk")]
    assert encoder.decode(encoder.tokens(text)) == encoder.decode(encoder.template_tokens(text[:5])) + text[5:]


def test_other_threads_run_while_a_long_text_is_tokenised():
    encoder, _ = encoder_of("byte-level")
    text = " ".join(f"door{number}" for number in range(60_000))
    beats, over, begun = [], threading.Event(), threading.Event()

    def beat():
        begun.set()
        while not over.wait(0.001):
            beats.append(1)

    thread = threading.Thread(target=beat)
    thread.start()
    begun.wait()
    before = len(beats)
    own = encoder._backend
    for _ in range(5):
        found = encoding_of(own, text)
    n = len(beats) - before
    over.set()
    thread.join()
    assert found.ids == own.encode(text, add_special_tokens=False).ids
    assert n > 5


def test_half_a_character_is_refused():
    encoder, _ = encoder_of("first")
    for use in (encoder.tokens, encoder.template_tokens, encoder.control_spans, encoder.parts):
        with pytest.raises(InputError, match=r"half a character \(an unpaired surrogate, U\+DC80\) at 1"):
            use("a\udc80")


def test_tags_around_thoughts_that_are_tokens_are_text_in_a_message_whether_or_not_the_template_names_them():
    words = copy.deepcopy(words_of(prompter(NAMED["byte-level"], "chatml")))
    tags = ["<think>", "</think>", "<b>", "</b>", "[THINK]"]
    words.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in tags])
    found = control_tokens(words)
    assert {"<think>", "</think>"} <= found
    assert not {"<b>", "</b>", "[THINK]"} & found  # words of HTML, and a tag that nothing closes
    encoder, ids = TextEncoder(words), words.convert_tokens_to_ids(["<think>", "</think>"])
    assert not set(ids) & set(encoder.tokens("a <think> b </think> c"))
    assert set(ids) <= set(encoder.template_tokens("a <think> b </think> c"))
