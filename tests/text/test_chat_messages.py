"""Messages before a chat template sees them: neighbours of one role as one, and whether they say anything."""

import pytest

from ragfuse.text.chat_messages import Turn
from ragfuse.text.chunks import Piece
from ragfuse.types.answer import ToolCall

CALL = ToolCall("look", {"at": "sea"}, "1")


def test_neighbours_of_one_role_are_one_message_with_a_line_between_them():
    found = Turn.joined([Turn("user", "one"), Turn("user", [Piece("two", "chunk")]), Turn("assistant", "three")])
    assert found == [Turn("user", ["one", "\n", Piece("two", "chunk")]), Turn("assistant", "three")]


def test_what_tools_returned_stays_apart_and_calls_are_kept():
    tools = [Turn("tool", "a", tool_call_id="1"), Turn("tool", "b", tool_call_id="2")]
    calls = [Turn("assistant", (), (CALL,)), Turn("assistant", ["so"])]
    assert Turn.joined([*calls, *tools]) == [Turn("assistant", ["so"], (CALL,)), *tools]


@pytest.mark.parametrize("content", ["", " \n", (), [Piece(" ", "chunk"), "\t"]])
def test_white_space_says_nothing_unless_a_tool_is_called(content):
    assert not Turn("user", content).says_something
    assert Turn("assistant", content, (CALL,)).says_something


@pytest.mark.parametrize("content", ["a", [" ", Piece("b", "chunk")]])
def test_text_says_something(content):
    assert Turn("user", content).says_something
