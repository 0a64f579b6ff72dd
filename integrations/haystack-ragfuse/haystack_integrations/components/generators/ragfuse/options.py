"""The options of a call, in `generation_kwargs`: names and forms of OpenAI where it has them, else ragfuse's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from haystack.tools import Tool
from pydantic import BaseModel

from ragfuse import Ask, Grammar, InputError

SAMPLING = ("temperature", "top_p", "top_k", "min_p")
PENALTIES = ("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias")
NAMES = (
    "policy",
    "ratio",
    "reuse",
    "max_tokens",
    "max_completion_tokens",
    "stop",
    *SAMPLING,
    *PENALTIES,
    "seed",
    "timeout",
    "deadline_s",
    "overflow",
    "grammar",
    "response_format",
    "tool_choice",
    "parallel_tool_calls",
    "chat_template_kwargs",
    "enable_thinking",
    "continue_final_message",
    "generate_kwargs",
)
"""What `generation_kwargs` may hold."""
JSON_OBJECT = "{'type': 'json_object'}"
JSON_SCHEMA = "{'type': 'json_schema', 'json_schema': {'schema': {...}}}"


def ask_of(given: Mapping[str, Any], tools: Sequence[Tool], documents: Sequence[tuple[str, str]]) -> Ask:
    """Return the options of a call.

    Args:
        given: `generation_kwargs` of the generator and of the call, merged.
        tools: What the model may call.
        documents: (text, source) of what was retrieved for the call.

    Raises:
        InputError: An option is unknown, or a tool is chosen that is not there.
    """
    check_names(given)
    schemas = [{"type": "function", "function": tool.tool_spec} for tool in tools]
    return Ask(
        max_tokens=_max_tokens(given),
        policy=given.get("policy"),
        ratio=given.get("ratio"),
        reuse=given.get("reuse", True),
        stop=() if given.get("stop") is None else given["stop"],
        seed=given.get("seed"),
        overflow=given.get("overflow"),
        deadline_s=given.get("deadline_s"),
        grammar=grammar_of(given.get("response_format")) or given.get("grammar"),
        options=_generate_options(given),
        tools=schemas,
        tool_choice=_choice(given.get("tool_choice"), schemas),
        parallel_tool_calls=given.get("parallel_tool_calls") is not False,
        documents=documents,
        chat_template_kwargs=Ask.template_kwargs(given),
        continue_final_message=bool(given.get("continue_final_message")),
    )


def check(given: Mapping[str, Any]) -> None:
    """Check options that are given ahead of a call.

    Raises:
        InputError: There is no option of a name.
        SettingsError: An option is out of its range.
    """
    check_names(given)
    Ask.check_fields({**given, "max_tokens": _max_tokens(given)})


def check_names(given: Mapping[str, Any]) -> None:
    """Raise InputError for an option that there is not."""
    unknown = sorted(set(given) - set(NAMES))
    if unknown:
        raise InputError(
            f"generation_kwargs has no '{unknown[0]}'; wanted {', '.join(NAMES)}. Other options of transformers' "
            "`generate` go into generation_kwargs={'generate_kwargs': {...}}."
        )


def serialisable(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return options as `to_dict` writes them: a class in `response_format` as its JSON schema.

    Raises:
        InputError: There is a grammar, which has no form in a file.
    """
    if given.get("grammar") is not None:
        raise InputError(
            "A grammar in generation_kwargs cannot be serialised. Pass it at run time, or say it as "
            f"response_format={JSON_SCHEMA}."
        )
    written = dict(given)
    form = written.get("response_format")
    if isinstance(form, type) and issubclass(form, BaseModel):
        schema = {"name": form.__name__, "schema": form.model_json_schema()}
        written["response_format"] = {"type": "json_schema", "json_schema": schema}
    return written


def grammar_of(form: Any) -> Grammar | None:
    """Return the grammar that a `response_format` stands for: OpenAI's forms, or a Pydantic class; None for text."""
    if isinstance(form, type) and issubclass(form, BaseModel):
        return Grammar.json(form.model_json_schema())
    kind = form.get("type", "text") if isinstance(form, Mapping) else form
    if form is None or kind == "text":
        return None
    if kind == "json_object":
        return Grammar.json(None)
    schema = (form.get("json_schema") or {}).get("schema") if isinstance(form, Mapping) else None
    if kind != "json_schema" or not isinstance(schema, Mapping):
        raise InputError(
            f"response_format is {form!r:.80}, which cannot be followed; wanted a Pydantic class, {JSON_OBJECT} or "
            f"{JSON_SCHEMA}."
        )
    return Grammar.json(schema)


def _max_tokens(given: Mapping[str, Any]) -> int | None:
    return given.get("max_tokens", given.get("max_completion_tokens"))


def _choice(choice: Any, schemas: Sequence[Mapping[str, Any]]) -> str:
    """Return a tool choice in OpenAI's form as "auto", "none", "required" or the name of a tool."""
    names = [each["function"]["name"] for each in schemas]
    word = Ask.tool_choice_of(choice, schemas)
    if word in names or word in ("auto", "none") or (word == "required" and names):
        return word
    raise InputError(f"tool_choice is {choice!r}; wanted 'auto', 'none', 'required', or one of the tools: {names}.")


def _generate_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of transformers' `generate` that are not fields of `Ask`."""
    options = Ask.generate_options({name: given.get(name) for name in (*SAMPLING, *PENALTIES)})
    if given.get("timeout") is not None:
        options["max_time"] = given["timeout"]
    return {**options, **(given.get("generate_kwargs") or {})}
