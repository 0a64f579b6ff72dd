"""Conversion of request bodies into what the engine takes: a question with its documents as chunks, and an `Ask`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from ragfuse.engine.options import Ask
from ragfuse.engine.schema_service import PMLPrompt, parse_prompt
from ragfuse.errors import InputError
from ragfuse.serve.logprobs import Noted
from ragfuse.serve.refusals import APIError
from ragfuse.serve.run import AnswerRequest
from ragfuse.serve.schema import (
    LONGEST_TITLE,
    ChatRequest,
    CompletionRequest,
    ContentPart,
    Document,
    ExplainRequest,
    RequestMessage,
    TextRequest,
)
from ragfuse.text import Piece
from ragfuse.text.chat_messages import ROLE_ALIASES, ChatMessage
from ragfuse.text.chat_template import ChatTemplate
from ragfuse.types.answer import ToolCall
from ragfuse.types.grammar import Grammar

Parts = list[str | Piece]
COOL = 1e-3
"""Temperatures below this mean greedy decoding: dividing logits by them would overflow."""


def chat_requests(request: ChatRequest, tenant: str, template: ChatTemplate | None = None) -> list[AnswerRequest]:
    """Convert a chat request into `n` answer requests, one for each answer that it asks for.

    Args:
        request: The body of `/v1/chat/completions`.
        tenant: Salt of the tenant.
        template: The model's chat template, which decides what `chat_template_kwargs` may hold.

    Raises:
        APIError: Fields contradict each other, or cannot be honoured (400).
    """
    question = question_of(request.pml, request.messages, request.documents or ())
    noted = request.top_logprobs or 0 if request.logprobs else None
    if request.top_logprobs and not request.logprobs:
        raise APIError(400, "top_logprobs needs logprobs: true; give both or neither.", "unusable", "top_logprobs")
    choice, tools = allowed_of(request.tool_choice, request.tools or [])
    if None not in (given := (request.max_completion_tokens, request.max_tokens)) and len(set(given)) > 1:
        raise APIError(400, "max_completion_tokens and max_tokens differ; give one of them.", "unusable", "max_tokens")
    ask = replace(
        ask_of(request, tenant),
        max_tokens=request.max_completion_tokens or request.max_tokens,
        tools=tools,
        tool_choice=Ask.tool_choice_of(choice, tools),
        parallel_tool_calls=request.parallel_tool_calls is not False,
        chat_template_kwargs=told_of(request, template or ChatTemplate()),
        continue_final_message=goes_on(request),
    )
    return [_wish(question, ask, number, noted) for number in range(request.n or 1)]


def text_requests(request: TextRequest, tenant: str, mark: Any, n_tokens: int | None = None) -> list[AnswerRequest]:
    """Convert a text request into answer requests: `n` for each of its prompts.

    Args:
        request: The body of `/v1/completions`.
        tenant: Salt of the tenant.
        mark: (text, source) -> the text marked as a chunk.
        n_tokens: Token ids in the model's vocabulary; None: unknown, so ids are not checked.

    Raises:
        APIError: Fields contradict each other, or cannot be honoured (400).
    """
    ask = replace(ask_of(request, tenant), max_tokens=request.max_tokens or None)
    wishes = []
    for prompt in _prompts(request.prompt):
        if isinstance(prompt, str):
            question: Any = text_of(request.pml, prompt, request.documents or (), mark)
        else:
            question = ids_of(prompt, request.pml, request.documents or (), n_tokens)
        for number in range(request.n or 1):
            wish = _wish(question, ask, number, request.logprobs)
            said = prompt if question == prompt and isinstance(prompt, str) else ""
            if request.echo:
                wish = replace(wish, echo=said, n_top=request.logprobs)
            wishes.append(replace(wish, writes=request.max_tokens != 0))
    return wishes


def _prompts(given: Any) -> list[str | list[int]]:
    """Return one prompt or several as a list."""
    return [given] if isinstance(given, str) or isinstance(given[0], int) else given


def ids_of(ids: Sequence[int], pml: str | None, documents: Sequence[str | Document], n_tokens: int | None) -> list[int]:
    """Return a prompt of token ids; APIError for ids outside the vocabulary, or beside PML or documents."""
    if pml is not None or documents:
        name = "pml" if pml is not None else "documents"
        raise APIError(400, f"A prompt of token ids stands alone; leave out {name}, or send a text.", "unusable", name)
    if n_tokens is not None and max(ids) >= n_tokens:
        raise APIError(
            400, f"The prompt names the token {max(ids)}; wanted ids from 0 to {n_tokens - 1:,}.", "unusable", "prompt"
        )
    return list(ids)


def _wish(question: Any, ask: Ask, number: int, n_top: int | None) -> AnswerRequest:
    """Return the request for answer `number` of several; each has its own seed."""
    ask = replace(ask, seed=ask.seed + number if ask.seed is not None else None)
    if n_top is None:
        return AnswerRequest(question, ask)
    noted = Noted(n_top)
    return AnswerRequest(question, replace(ask, options={**ask.options, "logits_processor": [noted]}), noted)


def told_of(request: ChatRequest | ExplainRequest, template: ChatTemplate) -> dict[str, Any]:
    """Return the extra variables for the chat template; APIError for one that the template never reads."""
    told, fields = dict(request.chat_template_kwargs or {}), dict.fromkeys(request.chat_template_kwargs or (), KWARGS)
    for name in ("enable_thinking", "reasoning_effort", "verbosity"):
        if (value := getattr(request, name)) is None:
            continue
        if told.get(name, value) != value:
            raise APIError(400, f"{name} is {value!r} and, in {KWARGS}, {told[name]!r}; give one.", "unusable", name)
        told[name], fields[name] = value, name
    no_effort = told.get("reasoning_effort") == "none" and "reasoning_effort" not in template.names
    if no_effort and "enable_thinking" in template.names and not told.get("enable_thinking"):
        del told["reasoning_effort"]
        told["enable_thinking"] = False
    unread = template.unread(told)
    if unread is not None:
        raise APIError(
            400,
            f"{unread} is {told[unread]!r:.40}, but this model's chat template reads no '{unread:.40}': it changes "
            "nothing; leave it out.",
            "unusable",
            fields[unread],
        )
    return told


KWARGS = "chat_template_kwargs"


def goes_on(request: ChatRequest | ExplainRequest) -> bool:
    """Return whether the last message is to be continued; APIError where that cannot be."""
    is_on, asks = bool(request.continue_final_message), request.add_generation_prompt
    if is_on and asks:
        raise APIError(
            400,
            "continue_final_message goes on with the last message, add_generation_prompt begins another; give one.",
            "unusable",
            "add_generation_prompt",
        )
    if not is_on and asks is False:
        raise APIError(
            400,
            "add_generation_prompt is false, found no continue_final_message: nothing would be answered. Give both, or "
            "leave it out.",
            "unusable",
            "add_generation_prompt",
        )
    last = request.messages[-1] if request.messages else None
    if is_on and (last is None or last.role != "assistant" or last.tool_calls or request.pml is not None):
        raise APIError(
            400,
            "continue_final_message goes on with an assistant's text; wanted a last message of role 'assistant' "
            "without calls.",
            "unusable",
            "continue_final_message",
        )
    return is_on


def ask_of(request: CompletionRequest, tenant: str) -> Ask:
    """Return the `Ask` for the fields that chat and text requests share."""
    how, stop = request.ragfuse, request.stop
    ask = Ask(
        policy=how.policy,
        ratio=how.ratio,
        reuse=how.reuse,
        overflow=how.overflow,
        deadline_s=how.deadline_s,
        blend=how.blend,
        stop=[stop] if isinstance(stop, str) else stop or (),
        seed=request.seed,
        options=_sampling(request),
    )
    ask = replace(ask, grammar=grammar_of(request))
    _check_ends(request, ask)
    if request.session_id is not None and (request.n or 1) > 1:
        raise APIError(400, "A conversation goes on with one answer; wanted n 1, or no session_id.", "unusable", "n")
    return in_session(ask, request.session_id)


def _check_ends(request: CompletionRequest, ask: Ask) -> None:
    """Raise APIError for fields that would end an answer in contradictory places."""
    least, most = request.min_tokens or 0, request.max_tokens or getattr(request, "max_completion_tokens", None)
    if most is not None and least > most:
        raise APIError(
            400, f"min_tokens is {least}, and of max_tokens there are {most}; give fewer.", "unusable", "min_tokens"
        )
    calls = bool(getattr(request, "tools", None)) and getattr(request, "tool_choice", None) != "none"
    ends = {"tools": calls, "the form of an answer": ask.grammar is not None, "stop": bool(ask.stop and least)}
    other = next((each for each, is_given in ends.items() if is_given), None)
    name = "min_tokens" if least else "stop_token_ids" if request.stop_token_ids else None
    if other is not None and name is not None:
        raise APIError(400, f"{name} and {other} end an answer in different places; give one.", "unusable", name)


def in_session(ask: Ask, session: str | None) -> Ask:
    """Return the `Ask` as a turn of a conversation; unchanged where `session` is None."""
    return ask if session is None else replace(ask, session=session)


def _sampling(request: CompletionRequest) -> dict[str, Any]:
    """Return the options of `generate`, penalties included; greedy decoding unless there is a temperature."""
    bias = {_token_id(id): value for id, value in (request.logit_bias or {}).items()}
    changes = {
        "presence_penalty": request.presence_penalty,
        "frequency_penalty": request.frequency_penalty,
        "repetition_penalty": request.repetition_penalty,
        "logit_bias": bias,
        "stop_token_ids": request.stop_token_ids,
        "min_new_tokens": request.min_tokens,
    }
    told = {name: value for name, value in changes.items() if value}
    if (request.temperature or 0) < COOL or request.top_p == 0:
        return told
    drawn = {"temperature": request.temperature, "top_p": request.top_p, "min_p": request.min_p}
    among = {name: value for name, value in drawn.items() if value is not None}
    return {**told, "do_sample": True, "top_k": max(0, request.top_k or 0), **among}


def _token_id(id: str) -> int:
    if not id.isdecimal() or not id.isascii():
        raise APIError(400, f"logit_bias names {id!r:.40}; wanted token ids such as '42'.", "unusable", "logit_bias")
    return int(id)


def question_of(
    pml: str | None, messages: Sequence[RequestMessage], documents: Sequence[str | Document] = ()
) -> list[ChatMessage] | PMLPrompt:
    """Return the messages as a conversation, or a PML prompt with the messages appended as plain text.

    Text in those messages that looks like PML is not parsed.
    """
    if pml is None:
        return turns_of(messages, documents)
    found = _prompt(pml, documents)
    for turn in turns_of(messages) if messages else ():
        if turn.role not in ("system", "user", "assistant") or turn.tool_calls:
            raise APIError(400, "A prompt in PML tells of no tools; leave out what they said.", "unusable", "messages")
        found = found.asking("".join(map(_plain, turn.content)), cast(Any, turn.role))
    return found


def text_of(pml: str | None, text: str, documents: Sequence[str | Document], mark: Any) -> str | PMLPrompt:
    """Return the text to continue, after its documents or after a PML prompt; APIError where it is empty."""
    if pml is not None:
        return _prompt(pml, documents).going_on(text)
    if found := f"{marked(documents, mark)}{text}":
        return found
    raise APIError(400, "The prompt is empty; wanted a text to go on from.", "unusable", "prompt")


def _prompt(pml: str, documents: Sequence[str | Document]) -> PMLPrompt:
    if documents:
        raise APIError(400, "A prompt in PML has modules, no documents; ask with one of them.", "unusable", "documents")
    return parse_prompt(pml)


def _plain(part: str | Piece) -> str:
    return part if isinstance(part, str) else part.text


def turns_of(messages: Sequence[RequestMessage], documents: Sequence[str | Document] = ()) -> list[ChatMessage]:
    """Return the conversation, with the documents as chunks before the last user message.

    Consecutive messages of one role become one.
    """
    try:
        turns = ChatMessage.conversation(map(_turn, messages))
    except InputError as error:
        raise APIError(400, str(error), "unusable", "messages") from error
    return _with_documents(turns, documents) if documents else turns


def _with_documents(turns: list[ChatMessage], documents: Sequence[str | Document]) -> list[ChatMessage]:
    last = max((at for at, turn in enumerate(turns) if turn.role == "user"), default=-1)
    if last < 0:
        raise APIError(400, "documents stand before a question; wanted a user's message.", "unusable", "documents")
    before: Parts = [part for piece in pieces_of(documents) for part in (piece, "\n\n")]
    turns[last] = replace(turns[last], content=[*before, *turns[last].content])
    return turns


def pieces_of(documents: Sequence[str | Document]) -> list[Piece]:
    """Return one chunk per document; chunk marks inside a document's text are ignored. APIError for an empty one."""
    given = [Document(text=each) if isinstance(each, str) and each else each for each in documents]
    if not all(isinstance(each, Document) and each.text.strip() for each in given):
        raise APIError(400, "One of the documents is empty; leave it out.", "unusable", "documents")
    return [
        Piece(each.text, "chunk", each.title or f"document {number}")
        for number, each in enumerate(given, 1)
        if isinstance(each, Document)
    ]


def marked(documents: Sequence[str | Document], mark: Any) -> str:
    """Return the documents as one text in which `mark` marks each as a chunk, for prompts without messages."""
    return "".join(f"{mark(piece.text, piece.source)}\n\n" for piece in pieces_of(documents))


def _turn(message: RequestMessage) -> ChatMessage:
    role, parts = ROLE_ALIASES.get(message.role, message.role), list(_parts(message))
    said = [(call.function, call.id) for call in message.tool_calls or ()]
    said += [(message.function_call, "")] if message.function_call is not None else []
    calls = tuple(ToolCall(function.name, ToolCall.read_arguments(function.arguments), id) for function, id in said)
    if calls and role != "assistant":
        raise APIError(
            400, f"A message of role '{message.role}' calls tools; only an assistant does.", "unusable", "messages"
        )
    answers = (message.tool_call_id or "") if role == "tool" else ""
    thought = (message.reasoning_content or message.reasoning or "") if role == "assistant" else ""
    return ChatMessage(role, parts, calls, answers, message.name or "", thought)


def _parts(message: RequestMessage) -> Iterator[str | Piece]:
    content = message.content or []
    for part in [ContentPart(type="text", text=content)] if isinstance(content, str) else content:
        if part.type == "refusal":
            continue
        if part.type not in ("text", "text-plain") or part.text is None:
            raise APIError(
                400,
                f"A content part of type '{part.type:.40}' cannot be read: this model takes text alone. Wanted parts "
                "of type 'text' or 'text-plain' that hold their text; leave others out.",
                "unusable",
                "messages",
            )
        yield _piece(part, part.text)


def _piece(part: ContentPart, text: str) -> str | Piece:
    told = (part.extras or {}).get("ragfuse")
    said = told if isinstance(told, dict) else {}
    source = str(said.get("source") or part.title or "message")
    if len(source) > LONGEST_TITLE:
        raise APIError(
            400,
            f"The source of a content part has {len(source):,} characters; wanted {LONGEST_TITLE} at most.",
            "unusable",
            "messages",
        )
    is_chunk = bool(said.get("chunk", part.type == "text-plain")) and bool(text.strip())
    return Piece(text, "chunk", source) if is_chunk else text


def _loaded(text: str) -> Any:
    """Parse JSON text; None where it is not valid."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def allowed_of(
    choice: str | Mapping[str, Any] | None, tools: list[dict[str, Any]]
) -> tuple[str | Mapping[str, Any] | None, list[dict[str, Any]]]:
    """Resolve a `tool_choice` of type `allowed_tools`: return its mode, and only the tools that it names.

    Any other choice is returned as it is, with all tools.

    Raises:
        APIError: It names an unknown tool, no tool, or an unknown mode (400).
    """
    if not isinstance(choice, Mapping) or choice.get("type") != "allowed_tools":
        return choice, tools
    told = choice.get("allowed_tools", choice)
    given = told.get("tools") if isinstance(told, Mapping) else None
    named = [_named(each) for each in given] if isinstance(given, list) else []
    known = {_named(tool): tool for tool in tools}
    lacks = next((name for name in named if name not in known), None)
    mode = told.get("mode", "auto") if isinstance(told, Mapping) else None
    if not named or lacks is not None or mode not in ("auto", "required"):
        why = f"the tool {lacks!r:.80}" if lacks is not None else f"the mode {mode!r:.40} and {len(named)} tools"
        raise APIError(
            400,
            f"tool_choice of type 'allowed_tools' has {why}; wanted {{'mode': 'auto' or 'required', 'tools': [...]}} "
            f"with some of these: {[str(name) for name in known]}.",
            "unusable",
            "tool_choice",
        )
    return str(mode), [tool for name, tool in known.items() if name in named]


def _named(tool: Any) -> Any:
    """Return the name of a tool in either of OpenAI's forms: flat, or nested under "function"."""
    inner = tool.get("function") if isinstance(tool, Mapping) else None
    name = (inner if isinstance(inner, Mapping) else tool if isinstance(tool, Mapping) else {}).get("name")
    return name if isinstance(name, str) else repr(tool)


def grammar_of(request: CompletionRequest) -> Grammar | None:
    """Return the grammar of the answer, from OpenAI's `response_format` or one of vLLM's fields; None: free text.

    Raises:
        APIError: More than one of these fields is given, or its value cannot be used (400).
    """
    held = {kind: value for kind, value in (request.structured_outputs or {}).items() if value is not None}
    if held and (len(held) > 1 or not held.keys() <= set(GRAMMARS)):
        raise APIError(
            400,
            f"structured_outputs has {sorted(held)!r:.80}; wanted one of {', '.join(GRAMMARS)}.",
            "unusable",
            "structured_outputs",
        )
    told: list[tuple[str, str, Any]] = [("structured_outputs", kind, value) for kind, value in held.items()]
    for kind in ("json", "regex", "choice", "grammar"):
        if (value := getattr(request, f"guided_{kind}")) is not None:
            told.append((f"guided_{kind}", kind, value))
    form = _form_of(getattr(request, "response_format", None))
    names = [name for name, *_ in told] + (["response_format"] if form is not None else [])
    if len(names) > 1:
        raise APIError(400, f"{names[0]} and {names[1]} both say an answer's form; give one.", "unusable", names[1])
    return _grammar(*told[0]) if told else form


GRAMMARS = ("json", "json_object", "regex", "choice", "grammar")
"""Kinds of grammars under the names that vLLM's `structured_outputs` gives them."""


def _grammar(name: str, kind: str, value: Any) -> Grammar:
    """Build a grammar of this kind from a field's value; `name` is the field in error messages."""
    if kind == "json_object" and value is True:
        return Grammar.json(None)
    if kind == "json" and isinstance(value, str):
        value = _loaded(value)
    if kind == "json" and isinstance(value, dict):
        return Grammar.json(value)
    if kind in ("regex", "grammar") and isinstance(value, str) and value:
        return Grammar.regex(value) if kind == "regex" else Grammar.lark(value)
    if kind == "choice" and isinstance(value, list) and value and all(isinstance(e, str) and e for e in value):
        return Grammar.choice(value)
    wanted = {"json": "a JSON schema", "json_object": "true", "choice": "a list of texts"}.get(kind, "a text")
    raise APIError(400, f"{name}: wanted {wanted} for '{kind}', found {value!r:.60}; mend it.", "unusable", name)


def _form_of(response_format: Mapping[str, Any] | None) -> Grammar | None:
    """Return the grammar that OpenAI's `response_format` asks for; None for plain text."""
    kind = (response_format or {}).get("type", "text")
    if response_format is None or kind == "text":
        return None
    if kind == "json_object":
        return Grammar.json(None)
    held = response_format.get("json_schema")
    schema = held.get("schema") if isinstance(held, Mapping) else None
    if kind != "json_schema" or not isinstance(schema, Mapping):
        raise APIError(
            400,
            f"response_format of type {kind!r:.40} cannot be followed; wanted {{'type': 'json_object'}} or {{'type': "
            "'json_schema', 'json_schema': {'schema': {...}}}.",
            "unusable",
            "response_format",
        )
    return Grammar.json(schema)
