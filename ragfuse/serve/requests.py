"""Convert request bodies into `AnswerRequest`s: questions with their documents as chunks, each with its `Ask`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, cast

from ragfuse.engine.ask import Ask
from ragfuse.engine.schema_service import PMLPrompt, parse_prompt
from ragfuse.errors import InputError
from ragfuse.serve.logprobs import LogprobRecorder
from ragfuse.serve.refusals import unusable
from ragfuse.serve.run import AnswerRequest
from ragfuse.serve.schema import (
    ChatRequest,
    CompletionRequest,
    ContentPart,
    Document,
    RequestMessage,
    TextRequest,
)
from ragfuse.text.chat_messages import ROLE_ALIASES, ChatMessage, Piece
from ragfuse.text.chat_template import ChatTemplate
from ragfuse.types.answer import ToolCall
from ragfuse.types.grammar import Grammar
from ragfuse.types.request_limits import MAX_TITLE_CHARS

Parts = list[str | Piece]
MIN_TEMPERATURE = 1e-3
"""Temperatures below this mean greedy decoding: dividing logits by them would overflow."""


def chat_requests(request: ChatRequest, template: ChatTemplate | None = None) -> list[AnswerRequest]:
    """Convert a chat request into `n` answer requests, one for each answer that it asks for.

    Args:
        request: The body of `/v1/chat/completions`.
        template: The model's chat template, which decides what `chat_template_kwargs` may hold.

    Raises:
        APIError: Fields contradict each other, or cannot be honoured (400).
    """
    question = question_of(request.pml, request.messages, request.documents or ())
    n_top = request.top_logprobs or 0 if request.logprobs else None
    if request.top_logprobs and not request.logprobs:
        raise unusable("top_logprobs", "top_logprobs needs logprobs: true; give both or neither.")
    choice, tools = allowed_of(request.tool_choice, request.tools or [])
    lengths = {request.max_completion_tokens, request.max_tokens} - {None}
    if len(lengths) > 1:
        raise unusable("max_tokens", "max_completion_tokens and max_tokens differ; give one of them.")
    ask = replace(
        ask_of(request),
        max_tokens=next(iter(lengths), None),
        tools=tools,
        tool_choice=Ask.tool_choice_of(choice, tools),
        parallel_tool_calls=request.parallel_tool_calls is not False,
        chat_template_kwargs=template_kwargs_of(request, template or ChatTemplate()),
        continue_final_message=continues_last_message(request),
    )
    return [_answer_request(question, ask, number, n_top) for number in range(request.n or 1)]


def text_requests(request: TextRequest, n_tokens: int | None = None) -> list[AnswerRequest]:
    """Convert a text request into answer requests: `n` for each of its prompts.

    Args:
        request: The body of `/v1/completions`.
        n_tokens: Token ids in the model's vocabulary; None: unknown, so ids are not checked.

    Raises:
        APIError: Fields contradict each other, or cannot be honoured (400).
    """
    shared = replace(ask_of(request), max_tokens=request.max_tokens or None)
    documents = request.documents or ()
    answer_requests = []
    given: Any = request.prompt
    is_one = isinstance(given, str) or isinstance(given[0], int | ContentPart)
    for prompt in [given] if is_one else given:
        ask = with_documents(shared, pieces_of(documents))
        if isinstance(prompt, str):
            question: Any = text_of(request.pml, prompt, documents)
        elif isinstance(prompt[0], ContentPart):
            message = ChatMessage("user", [_piece(part, _checked_text(part)) for part in prompt])
            ask = with_documents(ask, message.pieces)
            question = text_of(request.pml, message.text, documents)
        else:
            question = ids_of(prompt, request.pml, documents, n_tokens)
        for number in range(request.n or 1):
            answer_request = _answer_request(question, ask, number, request.logprobs)
            echo = prompt if question == prompt and isinstance(prompt, str) else ""
            if request.echo:
                answer_request = replace(answer_request, echo=echo, n_top=request.logprobs)
            answer_requests.append(replace(answer_request, writes=request.max_tokens != 0))
    return answer_requests


def with_documents(ask: Ask, pieces: Iterable[Piece]) -> Ask:
    """Return an `Ask` with the chunks among these pieces as documents of the question."""
    chunks = [(piece.text, piece.source) for piece in pieces if piece.kind == "chunk"]
    return replace(ask, documents=(*ask.documents, *chunks))


def ids_of(ids: Sequence[int], pml: str | None, documents: Sequence[str | Document], n_tokens: int | None) -> list[int]:
    """Return a prompt of token ids; APIError for ids outside the vocabulary, or beside PML or documents."""
    if pml is not None or documents:
        name = "pml" if pml is not None else "documents"
        raise unusable(name, f"{name} cannot be used with a prompt of token ids. Leave it out, or send a text.")
    if n_tokens is not None and max(ids) >= n_tokens:
        raise unusable("prompt", f"The prompt has the token id {max(ids)}; wanted ids from 0 to {n_tokens - 1:,}.")
    return list(ids)


def _answer_request(question: Any, ask: Ask, number: int, n_top: int | None) -> AnswerRequest:
    """Return the request for answer `number` of several; each has its own seed."""
    ask = replace(ask, seed=ask.seed + number if ask.seed is not None else None)
    if n_top is None:
        return AnswerRequest(question, ask)
    recorder = LogprobRecorder(n_top)
    return AnswerRequest(question, replace(ask, options={**ask.options, "logits_processor": [recorder]}), recorder)


def template_kwargs_of(request: ChatRequest, template: ChatTemplate) -> dict[str, Any]:
    """Return the extra variables for the chat template; APIError for one that the template never reads."""
    named = {name: getattr(request, name) for name in ("enable_thinking", "reasoning_effort", "verbosity")}
    kwargs = {
        **(request.chat_template_kwargs or {}),
        **{name: each for name, each in named.items() if each is not None},
    }
    no_effort = kwargs.get("reasoning_effort") == "none" and "reasoning_effort" not in template.names
    if no_effort and "enable_thinking" in template.names and not kwargs.get("enable_thinking"):
        del kwargs["reasoning_effort"]
        kwargs["enable_thinking"] = False
    unread = template.unread(kwargs)
    if unread is not None:
        param = unread if named.get(unread) is not None else "chat_template_kwargs"
        raise unusable(param, f"This model's chat template does not use '{unread:.40}'. Leave it out.")
    return kwargs


def continues_last_message(request: ChatRequest) -> bool:
    """Return whether the answer continues the last message; APIError if that is impossible or contradicted."""
    continues = bool(request.continue_final_message)
    if request.add_generation_prompt is continues:
        raise unusable("add_generation_prompt", "add_generation_prompt is the opposite of continue_final_message.")
    last = request.messages[-1] if request.messages else None
    if continues and (last is None or last.role != "assistant" or last.tool_calls or request.pml is not None):
        raise unusable(
            "continue_final_message",
            "continue_final_message needs a last message of role 'assistant' without tool calls, and no pml.",
        )
    return continues


def ask_of(request: CompletionRequest) -> Ask:
    """Return the `Ask` for the fields that chat and text requests share."""
    stop, options = request.stop, request.ragfuse
    ask = Ask(
        policy=options.policy,
        ratio=options.ratio,
        reuse=options.reuse,
        overflow=options.overflow,
        deadline_s=options.deadline_s,
        blend=options.blend,
        documents=tuple((each.text, each.title) for each in options.retrieved),
        stop=[stop] if isinstance(stop, str) else stop or (),
        seed=request.seed,
        options=_sampling(request),
        grammar=grammar_of(request),
    )
    _check_ends(request, ask)
    if request.session_id is None:
        return ask
    if (request.n or 1) > 1:
        raise unusable("n", "n must be 1 with session_id, as a conversation has one answer a turn.")
    return replace(ask, session=request.session_id)


def _check_ends(request: CompletionRequest, ask: Ask) -> None:
    """Raise APIError for fields that would end an answer in contradictory places."""
    min_tokens = request.min_tokens or 0
    max_tokens = request.max_tokens or getattr(request, "max_completion_tokens", None) or 0
    if 0 < max_tokens < min_tokens:
        raise unusable("min_tokens", f"min_tokens is {min_tokens}, above max_tokens ({max_tokens}).")
    name = "min_tokens" if min_tokens else "stop_token_ids"
    calls = getattr(request, "tools", None) and getattr(request, "tool_choice", None) != "none"
    if (min_tokens or request.stop_token_ids) and (calls or ask.grammar is not None or (ask.stop and min_tokens)):
        raise unusable(name, f"{name} and tools, an output format or stop both decide where an answer ends.")


def _sampling(request: CompletionRequest) -> dict[str, Any]:
    """Return the options of `generate`, penalties included; decoding is greedy without a temperature."""
    bias = {_token_id(id): value for id, value in (request.logit_bias or {}).items()}
    changes = {
        "presence_penalty": request.presence_penalty,
        "frequency_penalty": request.frequency_penalty,
        "repetition_penalty": request.repetition_penalty,
        "logit_bias": bias,
        "stop_token_ids": request.stop_token_ids,
        "min_new_tokens": request.min_tokens,
    }
    options = {name: value for name, value in changes.items() if value}
    if request.ragfuse.max_time_s is not None:
        options["max_time"] = request.ragfuse.max_time_s
    if (request.temperature or 0) < MIN_TEMPERATURE or request.top_p == 0:
        return options
    sampling = {"temperature": request.temperature, "top_p": request.top_p, "min_p": request.min_p}
    given = {name: value for name, value in sampling.items() if value is not None}
    if request.top_k is not None or not request.ragfuse.model_sampling:
        given["top_k"] = max(0, request.top_k or 0)
    return {**options, "do_sample": True, **given}


def _token_id(id: str) -> int:
    if not id.isdecimal() or not id.isascii():
        raise unusable("logit_bias", f"logit_bias names {id!r:.40}; wanted token ids such as '42'.")
    return int(id)


def question_of(
    pml: str | None, messages: Sequence[RequestMessage], documents: Sequence[str | Document] = ()
) -> list[ChatMessage] | PMLPrompt:
    """Return the messages as a conversation, or a PML prompt with the messages appended as plain text.

    Text in those messages that looks like PML is not parsed.
    """
    if pml is None:
        return chat_messages_of(messages, documents)
    prompt = _prompt(pml, documents)
    for message in chat_messages_of(messages) if messages else ():
        if message.role not in ("system", "user", "assistant") or message.tool_calls:
            raise unusable(
                "messages", "pml cannot be used with tools; remove messages of role 'tool' and those with tool_calls."
            )
        prompt = prompt.asking(message.text, cast(Any, message.role))
    return prompt


def text_of(pml: str | None, text: str, documents: Sequence[str | Document]) -> str | PMLPrompt:
    """Return the text to continue, with its documents or a PML prompt before it; APIError if it is empty."""
    if pml is not None:
        return _prompt(pml, documents).with_ending(text)
    if found := "".join([*(f"{piece.text}\n\n" for piece in pieces_of(documents)), text]):
        return found
    raise unusable("prompt", "The prompt is empty; wanted a text to continue.")


def _prompt(pml: str, documents: Sequence[str | Document]) -> PMLPrompt:
    if documents:
        raise unusable(
            "documents", "pml cannot be used with documents, as its texts are modules of a schema; give one."
        )
    return parse_prompt(pml)


def chat_messages_of(messages: Sequence[RequestMessage], documents: Sequence[str | Document] = ()) -> list[ChatMessage]:
    """Return the conversation, with the documents as chunks before the last user message.

    Consecutive messages of one role become one.
    """
    try:
        conversation = ChatMessage.conversation(map(_chat_message, messages))
    except InputError as error:
        raise unusable("messages", str(error)) from error
    return _with_documents(conversation, documents) if documents else conversation


def _with_documents(messages: list[ChatMessage], documents: Sequence[str | Document]) -> list[ChatMessage]:
    last = max((at for at, message in enumerate(messages) if message.role == "user"), default=-1)
    if last < 0:
        raise unusable("documents", "documents are placed before the last user message, found none. Add one.")
    before: Parts = [part for piece in pieces_of(documents) for part in (piece, "\n\n")]
    messages[last] = replace(messages[last], content=[*before, *messages[last].content])
    return messages


def pieces_of(documents: Sequence[str | Document]) -> list[Piece]:
    """Return one chunk per document; APIError for an empty one."""
    given = [Document(text=each) if isinstance(each, str) and each else each for each in documents]
    if not all(isinstance(each, Document) and each.text.strip() for each in given):
        raise unusable("documents", "One of the documents is empty; leave it out.")
    return [
        Piece(each.text, "chunk", each.title or f"document {number}")
        for number, each in enumerate(given, 1)
        if isinstance(each, Document)
    ]


def _chat_message(message: RequestMessage) -> ChatMessage:
    role, parts = ROLE_ALIASES.get(message.role, message.role), list(_parts(message))
    functions = [(call.function, call.id) for call in message.tool_calls or ()]
    if message.function_call is not None:
        functions.append((message.function_call, ""))
    calls = tuple(ToolCall(each.name, ToolCall.read_arguments(each.arguments), id) for each, id in functions)
    if calls and role != "assistant":
        raise unusable("messages", f"A message of role '{message.role}' has tool calls; only an assistant can.")
    answers = (message.tool_call_id or "") if role == "tool" else ""
    thought = (message.reasoning_content or message.reasoning or "") if role == "assistant" else ""
    return ChatMessage(role, parts, calls, answers, message.name or "", thought)


def _parts(message: RequestMessage) -> Iterator[str | Piece]:
    content = message.content or []
    for part in [ContentPart(type="text", text=content)] if isinstance(content, str) else content:
        if part.type != "refusal":
            yield _piece(part, _checked_text(part))


def _checked_text(part: ContentPart) -> str:
    """Return the text of a content part; APIError for a part of another type."""
    if part.type not in ("text", "text-plain") or part.text is None:
        raise unusable(
            "messages",
            f"A content part of type '{part.type:.40}' cannot be read: this model takes only text. Wanted parts "
            "of type 'text' or 'text-plain' with their text; leave others out.",
        )
    return part.text


def _piece(part: ContentPart, text: str) -> str | Piece:
    extra = (part.extras or {}).get("ragfuse")
    fields = extra if isinstance(extra, dict) else {}
    source = str(fields.get("source") or part.title or "message")
    if len(source) > MAX_TITLE_CHARS:
        raise unusable(
            "messages",
            f"The source of a content part has {len(source):,} characters; wanted {MAX_TITLE_CHARS} at most.",
        )
    is_chunk = bool(fields.get("chunk", part.type == "text-plain")) and bool(text.strip())
    return Piece(text, "chunk", source) if is_chunk else text


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
    allowed = choice.get("allowed_tools", choice)
    given, mode = (allowed.get("tools"), allowed.get("mode", "auto")) if isinstance(allowed, Mapping) else (None, None)
    named = {_name_of(each) for each in given} if isinstance(given, list) else set()
    chosen = [tool for tool in tools if _name_of(tool) in named]
    if not named or len(chosen) < len(named) or mode not in ("auto", "required"):
        raise unusable(
            "tool_choice",
            "tool_choice of type 'allowed_tools' needs a mode, 'auto' or 'required', and some of these tools: "
            f"{', '.join(map(_name_of, tools))}.",
        )
    return str(mode), chosen


def _name_of(tool: Any) -> str:
    """Return the name of a tool in either of OpenAI's forms: flat, or nested under "function"."""
    inner = tool.get("function", tool) if isinstance(tool, Mapping) else None
    return str(inner.get("name")) if isinstance(inner, Mapping) else repr(tool)


GRAMMARS: Mapping[str, Callable[[Any], Grammar]] = MappingProxyType(
    {
        "json": Grammar.json,
        "json_object": lambda _: Grammar.json(None),
        "regex": Grammar.regex,
        "choice": Grammar.choice,
        "grammar": Grammar.lark,
    }
)
"""What makes grammars, by their names in vLLM's `structured_outputs`."""


def grammar_of(request: CompletionRequest) -> Grammar | None:
    """Return the grammar of the answer, from OpenAI's `response_format` or vLLM's field; None: free text.

    Raises:
        APIError: More than one is given, or its value cannot be used (400).
    """
    given = request.structured_outputs
    kinds = {} if given is None else given.model_dump(by_alias=True, exclude_none=True)
    found = [GRAMMARS[kind](value) for kind, value in kinds.items()]
    response_grammar = _response_grammar(getattr(request, "response_format", None))
    found += [response_grammar] if response_grammar is not None else []
    if len(found) > 1:
        raise unusable("structured_outputs", "Several fields set the output format; give only one.")
    return found[0] if found else None


def _response_grammar(response_format: Mapping[str, Any] | None) -> Grammar | None:
    """Return the grammar that OpenAI's `response_format` asks for; None for plain text."""
    kind = (response_format or {}).get("type", "text")
    if response_format is None or kind == "text":
        return None
    if kind == "json_object":
        return Grammar.json(None)
    json_schema = response_format.get("json_schema")
    schema = json_schema.get("schema") if isinstance(json_schema, Mapping) else None
    if kind != "json_schema" or not isinstance(schema, Mapping):
        raise unusable(
            "response_format",
            f"response_format of type {kind!r:.40} cannot be followed; wanted {{'type': 'json_object'}} or {{'type': "
            "'json_schema', 'json_schema': {'schema': {...}}}.",
        )
    return Grammar.json(schema)
