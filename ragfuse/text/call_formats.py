"""Known text formats of tool calls, and the detection of the one that a chat template uses.

A template without a known format gets its tools in plain text, in `DEFAULT_CALL_FORMAT` of
`text/tool_calls.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ragfuse.text.chat_messages import ChatMessage
from ragfuse.text.tool_calls import DEFAULT_CALL_FORMAT, CallFormat, Pairs
from ragfuse.types.answer import ToolCall

RenderCalls = Callable[[list[dict[str, Any]], Sequence[Mapping[str, Any]], bool], str]
"""Renders messages with tools; the third argument adds the generation prompt. May raise."""

HERMES = CallFormat(
    head='<tool_call>\n{"name": "',
    inner=('", "arguments": ',),
    end="}\n</tool_call>",
    again='\n<tool_call>\n{"name": "',
    tail="",
    marker="<tool_call>",
    native=True,
)
LLAMA = CallFormat(
    head='{"name": "',
    inner=('", "parameters": ',),
    end="}",
    again=None,
    tail="",
    marker="",
    native=True,
    lead="<|python_tag|>",
)
MISTRAL_LIST = CallFormat(
    head='[TOOL_CALLS] [{"name": "',
    inner=('", "arguments": ', ', "id": "'),
    end='"}',
    again=', {"name": "',
    tail="]",
    marker="[TOOL_CALLS]",
    slots=("name", "arguments", "id"),
    native=True,
    id_size=9,
)
MISTRAL = CallFormat(
    head="[TOOL_CALLS]",
    inner=("[ARGS]",),
    end="",
    again="[TOOL_CALLS]",
    tail="",
    marker="[TOOL_CALLS]",
    native=True,
)
DEEPSEEK = CallFormat(
    head="<\uff5ctool▁calls▁begin\uff5c><\uff5ctool▁call▁begin\uff5c>function<\uff5ctool▁sep\uff5c>",
    inner=("\n```json\n",),
    end="\n```<\uff5ctool▁call▁end\uff5c>",
    again="\n<\uff5ctool▁call▁begin\uff5c>function<\uff5ctool▁sep\uff5c>",
    tail="<\uff5ctool▁calls▁end\uff5c>",
    marker="<\uff5ctool▁calls▁begin\uff5c>",
    native=True,
    as_text=True,
)
QWEN_CODER = CallFormat(
    head="<tool_call>\n<function=",
    inner=(">\n",),
    end="</function>\n</tool_call>",
    again="\n<tool_call>\n<function=",
    tail="",
    marker="<tool_call>",
    native=True,
    pairs=Pairs("<parameter=", ">\n", "\n</parameter>\n"),
)
GLM = CallFormat(
    head="<tool_call>",
    inner=("\n",),
    end="</tool_call>",
    again="\n<tool_call>",
    tail="",
    marker="<tool_call>",
    native=True,
    pairs=Pairs("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"),
)
GLM_TIGHT = replace(
    GLM,
    inner=("",),
    again="<tool_call>",
    pairs=Pairs("<arg_key>", "</arg_key><arg_value>", "</arg_value>"),
)
KNOWN_FORMATS = (
    HERMES,
    LLAMA,
    MISTRAL_LIST,
    replace(MISTRAL_LIST, head='[TOOL_CALLS][{"name": "'),
    MISTRAL,
    DEEPSEEK,
    QWEN_CODER,
    GLM,
    GLM_TIGHT,
)
CALLS = (
    ToolCall("first_tool", {"first_key": "first_value", "other_key": "other_value"}, "call_1"),
    ToolCall("second_tool", {"second_key": "second_value"}, "call_2"),
)
DESCRIPTION, RESULT = "Finds the format.", "The result."


def call_format(render: RenderCalls) -> CallFormat:
    """Return the call format of a template, else `DEFAULT_CALL_FORMAT`."""
    return next(
        (format for format in KNOWN_FORMATS if _writes(render, format)), DEFAULT_CALL_FORMAT
    )


def _writes(render: RenderCalls, format: CallFormat) -> bool:
    """Return whether a template renders tools and writes calls in exactly this format."""
    calls = CALLS[:1] if format.again is None else CALLS
    results = [ChatMessage("tool", RESULT, tool_call_id=call.id, name=call.name) for call in calls]
    turns = [ChatMessage("user", "Which format?"), ChatMessage("assistant", "", calls), *results]
    messages = list(map(format.message, turns))
    try:
        text = render(messages, _TOOLS, False)
        # Bare JSON has no marker of its own, so it must begin the answer.
        before = "" if format.marker else render(messages[:1], _TOOLS, True)
    except Exception:  # a template may raise anything
        return False
    return all(each in text for each in (before + format.write(calls), DESCRIPTION, RESULT))


def _tool(call: ToolCall) -> dict[str, Any]:
    properties = {name: {"type": "string", "description": "A key."} for name in call.arguments}
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {
        "type": "function",
        "function": {"name": call.name, "description": DESCRIPTION, "parameters": parameters},
    }


_TOOLS = tuple(map(_tool, CALLS))
