"""Converts LangChain's tools, tool choices and output schemas to the OpenAI form that ragfuse takes.

The constraints are passed to the engine, which enforces them during decoding.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any

from langchain_core.exceptions import OutputParserException
from langchain_core.messages import AIMessage
from langchain_core.output_parsers import BaseOutputParser, JsonOutputParser, PydanticOutputParser
from langchain_core.output_parsers.openai_tools import JsonOutputKeyToolsParser, PydanticToolsParser
from langchain_core.runnables import Runnable, RunnableGenerator, RunnableMap, RunnablePassthrough
from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool
from langchain_core.utils.pydantic import is_basemodel_subclass

from ragfuse import Ask, InputError

METHODS = ("json_schema", "function_calling", "json_mode")
CHOICES = ("auto", "none", "required")


def tools_of(tools: Sequence[Any], strict: bool | None = None) -> list[dict[str, Any]]:
    """Return tools in OpenAI's form, given functions, classes, LangChain tools, schemas or that form."""
    return [_tool(tool, strict) for tool in tools]


def choice_of(choice: str | bool | Mapping[str, Any] | None, tools: Sequence[Mapping[str, Any]]) -> str:
    """Return a tool choice in LangChain's or OpenAI's form as "auto", "none", "required" or the name of a tool.

    A name means exactly one call, "required" one or several; if there is only one tool, "required" becomes its name.

    Raises:
        InputError: There is no such tool or choice.
    """
    names = [tool["function"]["name"] for tool in tools]
    word = Ask.tool_choice_of(choice, tools)
    if word in names or word in ("auto", "none") or (word == "required" and names):
        return word
    raise InputError(f"tool_choice is {choice!r}; wanted 'any', one of {', '.join(CHOICES)}, or a tool: {names}.")


def structured(llm: Any, schema: dict[str, Any] | type, method: str, strict: bool | None) -> Runnable[Any, Any]:
    """Return the model bound to answers of this schema; raises InputError for an unknown method."""
    format_info = {"kwargs": {"method": method, "strict": strict}, "schema": schema}
    if method not in METHODS:
        raise InputError(f"with_structured_output knows no method '{method}'; wanted {', '.join(METHODS)}.")
    if method == "function_calling":
        name = _tool(schema, strict)["function"]["name"]
        bound: Runnable[Any, Any] = llm.bind_tools(
            [schema], tool_choice=name, strict=strict, ls_structured_output_format=format_info
        )
        return bound
    response_format = {"type": "json_schema", "json_schema": {"schema": _json_schema(schema)}}
    bound = llm.bind(response_format=response_format, ls_structured_output_format=format_info)
    return bound


def parsed_into(llm: Runnable[Any, Any], schema: Any, method: str, include_raw: bool) -> Runnable[Any, Any]:
    """Return a runnable of the parsed answers; include_raw: of {"raw", "parsed", "parsing_error"} instead."""
    parser = RunnableGenerator(_checked, _achecked, name="whole_answer") | _parser(schema, method)
    if not include_raw:
        return llm | parser
    parsed = RunnablePassthrough.assign(parsed=itemgetter("raw") | parser, parsing_error=lambda _: None)
    unparsed = RunnablePassthrough.assign(parsed=lambda _: None)
    return RunnableMap(raw=llm) | parsed.with_fallbacks([unparsed], exception_key="parsing_error")


def _checked(messages: Iterator[AIMessage]) -> Iterator[AIMessage]:
    """Yield the messages, then raise an error if they are not a whole answer."""
    answer: Any = None
    for message in messages:
        answer = message if answer is None else answer + message
        yield message
    _check_complete(answer)


async def _achecked(messages: AsyncIterator[AIMessage]) -> AsyncIterator[AIMessage]:
    answer: Any = None
    async for message in messages:
        answer = message if answer is None else answer + message
        yield message
    _check_complete(answer)


def _check_complete(answer: AIMessage) -> None:
    """Raise OutputParserException if an answer was cut off.

    LangChain's parsers would not report it: they complete partial JSON and find no call in half of one.
    """
    if answer.tool_calls:
        return
    text = str(answer.content) or "".join(call["args"] or "" for call in answer.invalid_tool_calls)
    try:
        json.loads(str(answer.content))
    except ValueError as error:
        n_tokens = answer.usage_metadata["output_tokens"] if answer.usage_metadata else 0
        shown = f": '...{text[-40:]}'" if text else ""
        raise OutputParserException(
            f"The structured answer was cut off after {n_tokens} tokens{shown}. "
            "Raise max_tokens or timeout, or limit the lengths in the schema.",
            llm_output=text,
        ) from error


def _parser(schema: Any, method: str) -> BaseOutputParser[Any]:
    is_class = isinstance(schema, type) and is_basemodel_subclass(schema)
    if method != "function_calling":
        return PydanticOutputParser(pydantic_object=schema) if is_class else JsonOutputParser()
    if is_class:
        return PydanticToolsParser(tools=[schema], first_tool_only=True)
    return JsonOutputKeyToolsParser(key_name=_tool(schema, None)["function"]["name"], first_tool_only=True)


def _tool(tool: Any, strict: bool | None) -> dict[str, Any]:
    try:
        found = convert_to_openai_tool(tool, strict=strict)
    except Exception as error:  # whatever a tool's own schema raises
        raise InputError(
            f"The tool '{_name(tool)}' cannot be described by a JSON schema ({error}). Give functions type hints, or "
            "pass {'type': 'function', 'function': {...}}."
        ) from error
    if "function" not in found:
        raise InputError(
            f"A tool of type '{found.get('type')}' runs on a provider's servers, so a local model cannot use it. Pass "
            "functions, classes, LangChain tools, or {'type': 'function', 'function': {...}}."
        )
    return found


def _name(tool: Any) -> str:
    named: Callable[[str], Any] = tool.get if isinstance(tool, Mapping) else lambda name: getattr(tool, name, None)
    return str(named("name") or named("title") or named("__name__") or type(tool).__name__)


def _json_schema(schema: Any) -> dict[str, Any]:
    """Return a JSON schema unchanged, or the JSON schema of a class or function."""
    if isinstance(schema, Mapping) and not {"function", "parameters", "input_schema"} & schema.keys():
        return dict(schema)
    try:
        return convert_to_json_schema(schema)
    except Exception as error:
        raise InputError(
            f"'{_name(schema)}' cannot be converted to a JSON schema ({error}). Pass a JSON schema, a class, or a "
            "function with type hints."
        ) from error
