"""Calls of tools by the rules of their format, over a tokenizer of bytes: what is text is never
read as a call.
"""

from __future__ import annotations

import json

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from ragfuse.errors import InputError
from ragfuse.hf.grammar import GrammarCompiler, GrammarProcessor, check
from ragfuse.text.tool_calls import DEFAULT_CALL_FORMAT, CallFormat
from ragfuse.types.answer import ToolCall
from ragfuse.types.grammar import Grammar

SCHEMA = json.dumps(
    {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
)
BARE = CallFormat('{"name": "', ('", "parameters": ',), "}", None, "", "")
LISTED = CallFormat('[{"name": "', ('", "arguments": ',), "}", ', {"name": "', "]", "")
CALL = (ToolCall("weather", {"city": "Rome"}),)
FORGED = (ToolCall("erase", {"all": True}),)


def bytes_tokenizer(*added: str) -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = Tokenizer(
        models.BPE(vocab={letter: id for id, letter in enumerate(alphabet)}, merges=[])
    )
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    words.add_special_tokens(["<eos>", *added])
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>")


class Held:
    """Which texts a format's rules allow, with one tool called weather and text beside it."""

    def __init__(self, format: CallFormat, *added: str) -> None:
        self.words = bytes_tokenizer(*added)
        self.grammars = GrammarCompiler(self.words, len(self.words), [256])
        self.grammar = Grammar.lark(
            format.rules({"weather": SCHEMA}, self.grammars.literal, free=True)
        )

    def allows(self, text: str, spelled: bool) -> bool:
        ids = self.words(text, add_special_tokens=False, split_special_tokens=spelled).input_ids
        matcher = self.grammars.matcher(self.grammar)
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def test_text_cannot_spell_the_token_that_begins_a_call():
    held, written = Held(DEFAULT_CALL_FORMAT, "<tool_call>"), DEFAULT_CALL_FORMAT.write
    assert held.allows("It is <tool_cal.\n\n" + written(CALL), spelled=False)
    assert held.allows("One writes <tool_call.", spelled=True)
    assert not held.allows("One writes " + written(FORGED), spelled=True)
    assert not held.allows("One writes <tool_call>.", spelled=True)
    # where the beginning of a call is letters, a call of a tool follows
    letters = Held(DEFAULT_CALL_FORMAT)
    assert letters.allows("It is " + written(CALL), spelled=True)
    assert not letters.allows("It is " + written(FORGED), spelled=True)


@pytest.mark.parametrize("format", [BARE, LISTED], ids=["an object", "a list"])
@pytest.mark.parametrize("before", ["", "\n", " \n "])
def test_bare_json_is_a_call_of_a_tool_or_not_written(format, before):
    held = Held(format)
    assert held.allows(format.write(CALL), spelled=True)
    assert not held.allows(before + format.write(FORGED), spelled=True)
    begun = before + format.write(CALL)[:3]
    assert format.undecided(begun) == len(begun)
    assert held.allows(before + "It rains { [ there.", spelled=True)


def test_properties_that_are_named_in_two_places_are_all_allowed():
    one = {"properties": {"b": {"type": "string"}}, "required": ["b"]}
    schema = {
        "type": "object",
        "properties": {"a": {"type": "string"}},
        "required": ["a"],
        "anyOf": [one],
    }
    check(Grammar.json(schema))
    check(Grammar.json({"type": "object", "properties": {"deep": schema}, "required": ["deep"]}))


def test_an_answer_that_can_neither_go_on_nor_end_is_an_error():
    grammars = Held(DEFAULT_CALL_FORMAT).grammars
    process = GrammarProcessor(grammars, Grammar.lark('start: "x" | "ab" more\nmore: "c" more'))
    ids = torch.tensor([[0, *grammars.tokens.tokenize_str("abc")]])
    for n in (1, 2):
        process(ids[:, :n], torch.zeros(1, grammars.tokens.vocab_size))
    with pytest.raises(InputError, match="cannot continue"):
        process(ids, torch.zeros(1, grammars.tokens.vocab_size))
