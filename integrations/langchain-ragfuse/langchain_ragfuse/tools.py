"""Structured output: decoding constrained to the schema, then LangChain's output parsers."""

from __future__ import annotations

from collections.abc import Mapping
from operator import itemgetter
from typing import Any

from langchain_core.exceptions import OutputParserException
from langchain_core.output_parsers import BaseOutputParser, JsonOutputParser, PydanticOutputParser
from langchain_core.output_parsers.openai_tools import JsonOutputKeyToolsParser, PydanticToolsParser
from langchain_core.outputs import Generation
from langchain_core.runnables import Runnable, RunnableMap, RunnablePassthrough
from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool
from langchain_core.utils.pydantic import is_basemodel_subclass

from ragfuse import InputError

METHODS = ("json_schema", "function_calling", "json_mode")


class WholeAnswer(BaseOutputParser[Any]):
    """A parser that raises an error for a truncated answer.

    LangChain's own parsers would complete truncated JSON, and would ignore a truncated tool call.
    """

    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        """Parse an answer; OutputParserException if the answer is truncated."""
        message: Any = getattr(result[0], "message", None)
        if message is not None and message.response_metadata.get("finish_reason") == "length":
            n_tokens = message.usage_metadata["output_tokens"]
            raise OutputParserException(
                f"The structured answer was cut off after {n_tokens} tokens:"
                f" '...{message.text[-40:]}'. Raise max_tokens or timeout, or limit the lengths in"
                " the schema.",
                llm_output=message.text,
            )
        return super().parse_result(result, partial=partial)


class WholeJson(WholeAnswer, JsonOutputParser):
    """A parser that returns the JSON value of a whole answer."""


class WholeObject(WholeAnswer, PydanticOutputParser[Any]):
    """A parser that returns a whole answer as an object of a Pydantic class."""


class WholeCall(WholeAnswer, JsonOutputKeyToolsParser):
    """A parser that returns the arguments of a whole answer's tool call."""


class WholeCallObject(WholeAnswer, PydanticToolsParser):
    """A parser that returns a whole answer's tool call as an object of a Pydantic class."""


def structured(
    llm: Any, schema: Any, method: str, include_raw: bool, strict: bool | None
) -> Runnable[Any, Any]:
    """Return a runnable that answers with objects of a schema (`with_structured_output`).

    Raises:
        InputError: The method is unknown.
    """
    if method not in METHODS:
        raise InputError(
            f"with_structured_output has no method '{method}'. Use one of: {', '.join(METHODS)}."
        )
    told = {
        "ls_structured_output_format": {
            "kwargs": {"method": method, "strict": strict},
            "schema": schema,
        }
    }
    is_class = isinstance(schema, type) and is_basemodel_subclass(schema)
    parser: BaseOutputParser[Any]
    if method == "function_calling":
        name = convert_to_openai_tool(schema, strict=strict)["function"]["name"]
        llm = llm.bind_tools([schema], tool_choice=name, strict=strict, **told)
        by_name = WholeCall(key_name=name, first_tool_only=True)
        parser = WholeCallObject(tools=[schema], first_tool_only=True) if is_class else by_name
    else:
        form = {"type": "json_schema", "json_schema": {"schema": _json_schema(schema)}}
        llm = llm.bind(response_format=form, **told)
        parser = WholeObject(pydantic_object=schema) if is_class else WholeJson()
    if not include_raw:
        return llm | parser
    parsed = RunnablePassthrough.assign(
        parsed=itemgetter("raw") | parser, parsing_error=lambda _: None
    )
    unparsed = RunnablePassthrough.assign(parsed=lambda _: None)
    return RunnableMap(raw=llm) | parsed.with_fallbacks([unparsed], exception_key="parsing_error")


def _json_schema(schema: Any) -> dict[str, Any]:
    """Return the JSON schema of a class or function; a JSON schema is returned unchanged."""
    if (
        isinstance(schema, Mapping)
        and not {"function", "parameters", "input_schema"} & schema.keys()
    ):
        return dict(schema)
    return convert_to_json_schema(schema)
