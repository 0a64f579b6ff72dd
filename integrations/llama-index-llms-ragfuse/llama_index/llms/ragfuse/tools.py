"""LlamaIndex's function calling: convert tools to JSON schemas, and calls to `ToolSelection`s."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llama_index.core.base.llms.types import ChatMessage, ChatResponse, MessageRole, ToolCallBlock
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.llms.llm import ToolSelection
from llama_index.core.tools.types import BaseTool
from llama_index.llms.ragfuse.convert import calls_of

from ragfuse import Ask, InputError


class ToolCalling(FunctionCallingLLM):
    """An LLM whose `chat` takes `tools` and `tool_choice` and can answer with tool calls."""

    def _prepare_chat_with_tools(
        self,
        tools: Sequence[BaseTool],
        user_msg: str | ChatMessage | None = None,
        chat_history: list[ChatMessage] | None = None,
        verbose: bool = False,
        allow_parallel_tool_calls: bool = False,
        tool_required: bool = False,
        tool_choice: str | Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Return the keyword arguments for a `chat` call with tools."""
        messages = list(chat_history or ())
        if user_msg:
            given = isinstance(user_msg, ChatMessage)
            messages.append(
                user_msg if given else ChatMessage(role=MessageRole.USER, content=user_msg)
            )
        schemas = [tool.metadata.to_openai_tool(skip_length_check=True) for tool in tools]
        wanted = "required" if tool_required and tool_choice in (None, "auto") else tool_choice
        choice = Ask.tool_choice_of(wanted, schemas) if schemas else "auto"
        several = {} if allow_parallel_tool_calls or not schemas else {"parallel_tool_calls": False}
        return {"messages": messages, "tools": schemas, "tool_choice": choice, **several, **kwargs}

    def _validate_chat_with_tools_response(
        self,
        response: ChatResponse,
        tools: Sequence[BaseTool],
        allow_parallel_tool_calls: bool = False,
        **kwargs: Any,
    ) -> ChatResponse:
        """Return the response. If parallel calls are not allowed, drop all but the first call."""
        message = response.message
        if not allow_parallel_tool_calls:
            calls = [block for block in message.blocks if isinstance(block, ToolCallBlock)]
            message.blocks = [block for block in message.blocks if block not in calls[1:]]
            if calls:
                message.additional_kwargs["tool_calls"] = message.additional_kwargs["tool_calls"][
                    :1
                ]
        return response

    def get_tool_calls_from_response(
        self, response: ChatResponse, error_on_no_tool_call: bool = True, **kwargs: Any
    ) -> list[ToolSelection]:
        """Return the tool calls of a response.

        Raises:
            InputError: There is no tool call, and `error_on_no_tool_call` is True.
        """
        calls = calls_of(response.message)
        if not calls and error_on_no_tool_call:
            raise InputError(
                "The model answered with text instead of a tool call:"
                f" '{(response.message.content or '')[:80]}'. Call with tool_required=True, or"
                " use the text as the answer."
            )
        return [
            ToolSelection(tool_id=call.id, tool_name=call.name, tool_kwargs={**call.arguments})
            for call in calls
        ]
