"""OpenAI's form of messages, calls and choices: read and written alike by the server and the
integrations.
"""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragfuse import Ask, ChatMessage, InputError, ToolCall

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
ONE = [{"type": "function", "function": {"name": "paint"}}]
TWO = [*ONE, {"type": "function", "function": {"name": "knock"}}]


@given(st.text(), st.text(), st.dictionaries(st.text(), JSON, max_size=3))
def test_a_call_that_is_written_reads_back_the_same(name, id, arguments):
    call = ToolCall(name, arguments, id)
    assert ToolCall.from_openai(json.loads(json.dumps(call.as_openai()))) == call


@pytest.mark.parametrize("given", [None, "", {}, "{}"])
def test_no_arguments_are_an_empty_object(given):
    assert ToolCall.read_arguments(given) == {}


@pytest.mark.parametrize("given", ["[1]", "no", "[" * 100_000, 3])
def test_arguments_that_are_no_object_are_refused_in_short_words(given):
    with pytest.raises(InputError, match="must be a JSON object") as raised:
        ToolCall.read_arguments(given)
    assert len(str(raised.value)) < 200


def test_a_tools_result_gets_the_name_of_the_call_that_it_answers():
    calls = (ToolCall("look", {"at": "sky"}, "c1"), ToolCall("hear", {}, "c2"))
    given = [
        ChatMessage("user", "What is up?"),
        ChatMessage("assistant", "", calls),
        ChatMessage("function", "quiet", tool_call_id="c2"),
        ChatMessage("tool", "blue", tool_call_id="c1"),
        ChatMessage("tool", "?", tool_call_id="c1", name="its own"),
        ChatMessage("tool", "?", tool_call_id="c9"),
    ]
    found = ChatMessage.conversation(given)
    assert [message.role for message in found] == ["user", "assistant", *["tool"] * 4]
    assert [message.name for message in found] == ["", "", "hear", "look", "its own", ""]


def test_roles_have_the_templates_names_and_neighbours_are_one_message():
    given = [ChatMessage("developer", "Be brief."), ChatMessage("system", "Be kind.")]
    (found,) = ChatMessage.conversation([*given, ChatMessage("user", "Hello")])[:1]
    assert (found.role, "".join(found.content)) == ("system", "Be brief.\nBe kind.")


@pytest.mark.parametrize("given", [[], [ChatMessage("user", "")], [ChatMessage("system", " \n")]])
def test_messages_without_text_are_refused(given):
    with pytest.raises(InputError, match="messages are empty"):
        ChatMessage.conversation(given)


@pytest.mark.parametrize(
    ("choice", "tools", "word"),
    [
        (None, TWO, "auto"),
        ({"type": "none"}, TWO, "none"),
        ("required", TWO, "required"),
        ("any", TWO, "required"),
        (True, TWO, "required"),
        ("required", [], "required"),
        ("required", ONE, "paint"),
        (True, ONE, "paint"),
        ("knock", TWO, "knock"),
        ({"type": "function", "function": {"name": "knock"}}, TWO, "knock"),
        ({"type": "function", "name": "knock"}, TWO, "knock"),
        ({"type": "any"}, TWO, "required"),
    ],
)
def test_a_choice_is_one_word(choice, tools, word):
    assert Ask.tool_choice_of(choice, tools) == word
