"""Build an `Ask` from the fields of a framework's model and the arguments of one call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from ragfuse.engine.ask import SAMPLED, Ask
from ragfuse.errors import InputError
from ragfuse.types.arguments import unknown_argument
from ragfuse.types.grammar import Grammar

PLAIN = (
    "max_tokens",
    "policy",
    "ratio",
    "reuse",
    "stop",
    "seed",
    "deadline_s",
    "parallel_tool_calls",
)
"""Names of the options that are passed to `Ask` unchanged."""
CALL_OPTIONS = (
    *PLAIN,
    *SAMPLED,
    "timeout",
    "grammar",
    "response_format",
    "tool_choice",
    "chat_template_kwargs",
    "enable_thinking",
    "generate_kwargs",
)
"""Names of all options of a call. An option that OpenAI also has is named as in OpenAI's API."""


def ask_of(
    owner: str,
    fields: Mapping[str, Any],
    call: Mapping[str, Any],
    tools: Sequence[Mapping[str, Any]] = (),
    documents: Sequence[tuple[str, str]] = (),
) -> Ask:
    """Return the `Ask` of one call. Arguments of the call override fields of the model.

    Args:
        owner: Name of the model's class, for error messages.
        fields: The fields of the model; names that are not in `CALL_OPTIONS` are ignored.
        call: The arguments of the call.
        tools: The tools that the model may call, in OpenAI's format.
        documents: (text, source) of each retrieved document.

    Raises:
        SettingsError: An argument is unknown or out of range.
        InputError: `response_format` is not supported.
    """
    unknown = sorted(set(call) - set(CALL_OPTIONS))
    if unknown:
        raise unknown_argument(owner, unknown[0], CALL_OPTIONS)
    values = {**{name: fields.get(name) for name in CALL_OPTIONS}, **call}
    limit = {} if values["timeout"] is None else {"max_time": values["timeout"]}
    return Ask(
        **{name: values[name] for name in PLAIN if values[name] is not None},
        options={**Ask.generate_options(values), **limit, **(values["generate_kwargs"] or {})},
        tools=tools,
        tool_choice=Ask.tool_choice_of(values["tool_choice"], tools),
        grammar=_grammar_of(values["response_format"]) or values["grammar"],
        documents=documents,
        chat_template_kwargs=Ask.template_kwargs(fields, call),
    )


def text_only(kind: str) -> InputError:
    """Return the error for a message part that is not text."""
    return InputError(
        f"Messages must be text, but a part has type '{kind}'. Remove or convert that part."
    )


def _grammar_of(form: Any) -> Grammar | None:
    """Return the grammar of a `response_format`; None if the format is plain text."""
    if isinstance(form, type) and issubclass(form, BaseModel):
        return Grammar.json(form.model_json_schema())
    kind = form.get("type", "text") if isinstance(form, Mapping) else form
    if kind in (None, "text"):
        return None
    if kind == "json_object":
        return Grammar.json(None)
    schema = (form.get("json_schema") or {}).get("schema") if isinstance(form, Mapping) else None
    if kind != "json_schema" or not isinstance(schema, Mapping):
        raise InputError(
            f"response_format must be a Pydantic class, {{'type': 'json_object'}} or {{'type':"
            f" 'json_schema', 'json_schema': {{'schema': {{...}}}}}}; found {form!r:.80}."
        )
    return Grammar.json(schema)
