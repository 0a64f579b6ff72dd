"""A request as the engine takes it: a question with its documents as chunks, and an `Ask`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from ragfuse.asking import Ask
from ragfuse.core import ToolCall
from ragfuse.grammar import Grammar
from ragfuse.modules import Request, parse_prompt
from ragfuse.prompting import Turn
from ragfuse.serve.logprobs import Noted
from ragfuse.serve.refusals import Refusal
from ragfuse.serve.run import Wish
from ragfuse.serve.schema import ChatRequest, Document, Message, Part, TextRequest, Wanted
from ragfuse.text import Piece

Parts = list[str | Piece]
ROLES = (("developer", "system"), ("function", "tool"))
COOL = 1e-3
"""A temperature below which nothing is drawn: dividing by it would leave no number."""


def chat_wishes(request: ChatRequest, tenant: str) -> list[Wish]:
    """One wish for each answer that is wanted to the messages."""
    question = question_of(request.pml, request.messages, request.documents or ())
    noted = request.top_logprobs or 0 if request.logprobs else None
    if request.top_logprobs and not request.logprobs:
        raise Refusal(400, "top_logprobs needs logprobs: true; give both or neither.", "unusable", "top_logprobs")
    tools = request.tools or []
    ask = replace(
        ask_of(request, tenant),
        max_tokens=request.max_completion_tokens or request.max_tokens,
        tools=tools,
        tool_choice=choice_of(request.tool_choice, tools),
        grammar=grammar_of(request.response_format),
    )
    return [_wish(question, ask, number, noted) for number in range(request.n or 1)]


def text_wishes(request: TextRequest, tenant: str, mark: Any) -> list[Wish]:
    """One wish for each continuation of each prompt; mark: (text, source) -> the text marked as a chunk."""
    ask = replace(ask_of(request, tenant), max_tokens=request.max_tokens)
    prompts = [request.prompt] if isinstance(request.prompt, str) else request.prompt
    texts = [text_of(request.pml, prompt, request.documents or (), mark) for prompt in prompts]
    numbers = range(request.n or 1)
    return [_wish(text, ask, number, request.logprobs) for text in texts for number in numbers]


def _wish(question: Any, ask: Ask, number: int, n_top: int | None) -> Wish:
    """The wish for one of several answers, each with a seed of its own."""
    ask = replace(ask, seed=ask.seed + number if ask.seed is not None else None)
    if n_top is None:
        return Wish(question, ask)
    noted = Noted(n_top)
    return Wish(question, replace(ask, options={**ask.options, "logits_processor": [noted]}), noted)


def ask_of(request: Wanted, tenant: str) -> Ask:
    """How the request wants its answers, without what only one kind of request has."""
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
    if request.session_id is not None and (request.n or 1) > 1:
        raise Refusal(400, "A conversation goes on with one answer; wanted n 1, or no session_id.", "unusable", "n")
    return in_session(ask, request.session_id)


def in_session(ask: Ask, session: str | None) -> Ask:
    """The same as a turn of a conversation."""
    return ask if session is None else replace(ask, session=session)


def _sampling(request: Wanted) -> dict[str, Any]:
    """Options of `generate`; greedy unless there is a temperature."""
    if (request.temperature or 0) < COOL or request.top_p == 0:
        return {}
    told = {"temperature": request.temperature, "top_p": request.top_p}
    return {"do_sample": True, "top_k": 0, **{name: value for name, value in told.items() if value is not None}}


def question_of(
    pml: str | None, messages: Sequence[Message], documents: Sequence[str | Document] = ()
) -> list[Turn] | Request:
    """Messages; behind a prompt in PML, where there is one: as the text that they hold, whatever that looks like."""
    if pml is None:
        return turns_of(messages, documents)
    found = _prompt(pml, documents)
    for turn in turns_of(messages) if messages else ():
        if turn.role not in ("system", "user", "assistant") or turn.tool_calls:
            raise Refusal(400, "A prompt in PML tells of no tools; leave out what they said.", "unusable", "messages")
        found = found.asking("".join(map(_plain, turn.content)), cast(Any, turn.role))
    return found


def text_of(pml: str | None, text: str, documents: Sequence[str | Document], mark: Any) -> str | Request:
    """A text to go on from, behind documents or behind a prompt in PML."""
    if pml is not None:
        return _prompt(pml, documents).going_on(text)
    if found := f"{marked(documents, mark)}{text}":
        return found
    raise Refusal(400, "The prompt is empty; wanted a text to go on from.", "unusable", "prompt")


def _prompt(pml: str, documents: Sequence[str | Document]) -> Request:
    if documents:
        raise Refusal(400, "A prompt in PML has modules, no documents; ask with one of them.", "unusable", "documents")
    return parse_prompt(pml)


def _plain(part: str | Piece) -> str:
    return part if isinstance(part, str) else part.text


def turns_of(messages: Sequence[Message], documents: Sequence[str | Document] = ()) -> list[Turn]:
    """The messages, neighbours of one role as one, with the documents as chunks before the last question."""
    turns: list[Turn] = []
    names: dict[str, str] = {}
    for message in messages:
        turn = _turn(message, names)
        names |= {call.id: call.name for call in turn.tool_calls}
        turns.append(turn)
    turns = Turn.joined(turns)
    if not any(turn.says_something for turn in turns):
        raise Refusal(
            400, "The messages hold no text; wanted at least one that asks something.", "unusable", "messages"
        )
    return _with_documents(turns, documents) if documents else turns


def _with_documents(turns: list[Turn], documents: Sequence[str | Document]) -> list[Turn]:
    last = max((at for at, turn in enumerate(turns) if turn.role == "user"), default=-1)
    if last < 0:
        raise Refusal(400, "documents stand before a question; wanted a user's message.", "unusable", "documents")
    before: Parts = [part for piece in pieces_of(documents) for part in (piece, "\n\n")]
    turns[last] = replace(turns[last], content=[*before, *turns[last].content])
    return turns


def pieces_of(documents: Sequence[str | Document]) -> list[Piece]:
    """Documents as chunks with exactly their boundaries: no mark in them counts."""
    given = [Document(text=each) if isinstance(each, str) and each else each for each in documents]
    if not all(isinstance(each, Document) and each.text.strip() for each in given):
        raise Refusal(400, "One of the documents is empty; leave it out.", "unusable", "documents")
    return [
        Piece(each.text, "chunk", each.title or f"document {number}")
        for number, each in enumerate(given, 1)
        if isinstance(each, Document)
    ]


def marked(documents: Sequence[str | Document], mark: Any) -> str:
    """The same for a text without messages."""
    return "".join(f"{mark(piece.text, piece.source)}\n\n" for piece in pieces_of(documents))


def _turn(message: Message, names: Mapping[str, str]) -> Turn:
    role, parts = dict(ROLES).get(message.role, message.role), list(_parts(message))
    calls = tuple(
        ToolCall(call.function.name, _arguments(call.function.arguments), call.id) for call in message.tool_calls or ()
    )
    if calls and role != "assistant":
        raise Refusal(
            400, f"A message of role '{message.role}' calls tools; only an assistant does.", "unusable", "messages"
        )
    id = message.tool_call_id or ""
    name = (message.name or names.get(id, "")) if role == "tool" else ""
    return Turn(role, parts, calls, id if role == "tool" else "", name)


def _parts(message: Message) -> Iterator[str | Piece]:
    content = message.content or []
    for part in [Part(type="text", text=content)] if isinstance(content, str) else content:
        if part.type == "refusal":
            continue
        if part.type not in ("text", "text-plain") or part.text is None:
            raise Refusal(
                400,
                f"A content part of type '{part.type:.40}' cannot be read: this model takes text alone. Wanted parts "
                "of type 'text' or 'text-plain' that hold their text; leave others out.",
                "unusable",
                "messages",
            )
        yield _piece(part, part.text)


def _piece(part: Part, text: str) -> str | Piece:
    told = (part.extras or {}).get("ragfuse")
    said = told if isinstance(told, dict) else {}
    source = str(said.get("source") or part.title or "message")
    is_chunk = bool(said.get("chunk", part.type == "text-plain")) and bool(text.strip())
    return Piece(text, "chunk", source) if is_chunk else text


def _arguments(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise Refusal(
            400,
            f"The arguments of a tool call are {text!r:.60}; wanted the JSON text of an object.",
            "unusable",
            "messages",
        )
    return found


def choice_of(choice: str | Mapping[str, Any] | None, tools: Sequence[Mapping[str, Any]]) -> str:
    """OpenAI's ways to say whether a tool must be called, as one word. Where one must be and there is one: its name."""
    if isinstance(choice, Mapping):
        function = choice.get("function")
        choice = str(function.get("name") if isinstance(function, Mapping) else choice.get("type"))
    if choice == "required" and len(tools) == 1:
        function = tools[0].get("function")
        return str(function.get("name")) if isinstance(function, Mapping) else choice
    return choice or "auto"


def grammar_of(response_format: Mapping[str, Any] | None) -> Grammar | None:
    """What OpenAI's `response_format` asks an answer to follow."""
    kind = (response_format or {}).get("type", "text")
    if response_format is None or kind == "text":
        return None
    if kind == "json_object":
        return Grammar.json(None)
    held = response_format.get("json_schema")
    schema = held.get("schema") if isinstance(held, Mapping) else None
    if kind != "json_schema" or not isinstance(schema, Mapping):
        raise Refusal(
            400,
            f"response_format of type {kind!r:.40} cannot be followed; wanted {{'type': 'json_object'}} or {{'type': "
            "'json_schema', 'json_schema': {'schema': {...}}}.",
            "unusable",
            "response_format",
        )
    return Grammar.json(schema)
