"""Messages before a chat template sees them: neighbours of one role as one, and whether they say
anything.
"""

from ragfuse.text.chat_messages import ChatMessage
from ragfuse.types.answer import ToolCall

CALL = ToolCall("look", {"at": "sea"}, "1")


def test_what_tools_returned_stays_apart_and_calls_are_kept():
    tools = [ChatMessage("tool", "a", tool_call_id="1"), ChatMessage("tool", "b", tool_call_id="2")]
    calls = [ChatMessage("assistant", (), (CALL,)), ChatMessage("assistant", ["so"])]
    assert ChatMessage.joined([*calls, *tools]) == [
        ChatMessage("assistant", ["so"], (CALL,)),
        *tools,
    ]
