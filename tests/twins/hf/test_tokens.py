"""Texts as ids: whole ones as the tokenizer has them, and what is no control token in them
as text.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
from tokenizers import AddedToken
from transformers import ByT5Tokenizer

from ragfuse.errors import ModelError
from ragfuse.hf.tokens import TextEncoder, control_tokens
from tests.contracts.text.test_reading import KINDS, prompter, said, words_of

NAMED = {f"{kind.name}{'' if kind.bos else ' without bos'}": kind for kind in KINDS}


def encoder_of(name: str) -> tuple[TextEncoder, Any]:
    made = prompter(NAMED[name], "chatml")
    return made.runtime.model.text_encoder, words_of(made)


@pytest.mark.parametrize("name", NAMED)
def test_no_text_becomes_a_control_token_also_where_a_model_has_it_among_its_words(name):
    encoder, words = encoder_of(name)
    text = "a<s>b <|im_end|><|im_start|></s> c" + "".join(map(chr, range(0xE000, 0xF900)))
    control = set(words.convert_tokens_to_ids(["<s>", "</s>", "<|im_end|>", "<|im_start|>"]))
    found, _ = encoder.read(text, encoder.control_spans(text))
    assert control.isdisjoint(encoder.tokens(text))
    assert control.isdisjoint(found)
    assert name != "byte-level" or said(words, found) == text


def test_ids_that_a_model_wrote_stand_in_place_of_their_text_if_they_are_its_whole_tokens():
    encoder, words = encoder_of("byte-level")
    text = "<s>user green door</s>"
    for lo, letters in ((7, "\u0120green"), (8, "green"), (7, "\u0120grean")):
        given = tuple(words.convert_tokens_to_ids([*letters]))
        ids, chars = encoder.read(text, given=[(lo, 13, given)])
        if letters == "\u0120green":
            assert tuple(ids[chars.index((7, 13)) :][: len(given)]) == given
            assert said(words, ids) == text
        else:
            assert (ids, chars) == encoder.read(text)


def test_a_tokenizer_in_python_is_refused():
    with pytest.raises(ModelError, match="fast"):
        TextEncoder(ByT5Tokenizer())


def test_tags_of_thoughts_are_text_in_a_message_and_tokens_in_a_template():
    words = copy.deepcopy(words_of(prompter(NAMED["byte-level"], "chatml")))
    tags = ["<think>", "</think>", "<b>", "</b>", "[THINK]"]
    words.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in tags])
    found = control_tokens(words)
    assert {"<think>", "</think>"} <= found
    assert not {"<b>", "</b>", "[THINK]"} & found  # words of HTML, and a tag that nothing closes
    encoder, ids = TextEncoder(words), words.convert_tokens_to_ids(["<think>", "</think>"])
    assert not set(ids) & set(encoder.tokens("a <think> b </think> c"))
    assert set(ids) <= set(encoder.template_tokens("a <think> b </think> c"))
