"""A client of `ragfuse serve` with the methods of an engine for questions and schemas."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar
from urllib.parse import quote

from pydantic import TypeAdapter, ValidationError

from ragfuse.engine.answer_stream import AnswerStream, Piece, answers_of
from ragfuse.engine.ask import Ask, Question, prompts_of
from ragfuse.errors import InputError, ServerError
from ragfuse.process.shared import OneProcess, shared
from ragfuse.remote.connection import LOCAL, Connection, ServerAddress
from ragfuse.remote.request_body import encoded, prompt_for, request_of
from ragfuse.schemas.nodes import Schema
from ragfuse.schemas.pml import parse_schema, to_pml
from ragfuse.types.answer import Answer, Ingested, ModelCard, Thought, ToolCall, Trace
from ragfuse.types.arguments import checks_arguments

if TYPE_CHECKING:
    from ragfuse.engine.engine import Engine


Answerer: TypeAlias = "Engine | RemoteEngine"
"""An engine in this process, or a client of a server. Both have the same answering methods."""


TRACE = TypeAdapter(Trace)


Progress = Callable[[Ingested], None]
ROUTE = "ragfuse/schemas"


@dataclass(frozen=True)
class RemoteSchema:
    """A schema that was registered at a server.

    Args:
        name: The schema's name.
        done: Number of token runs in the schema, and numbers of encoded runs, tokens and bytes.
    """

    name: str
    done: Ingested


class RemoteSchemas:
    """A server's schemas, for prompts in PML."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def has(self, schema: Schema) -> bool:
        """Return True if the server has a schema with the same name and content."""
        found = self._connection.ask("GET", f"{ROUTE}/{quote(schema.name, safe='')}")
        return found is not None and parse_schema(found["pml"]) == schema

    def ensure(self, schema: Schema, progress: Progress | None = None) -> RemoteSchema | None:
        """Register a schema and return it; return None if the server has an equal schema."""
        return None if self.has(schema) else self.register(schema, progress)

    def register(self, schema: Schema, progress: Progress | None = None) -> RemoteSchema:
        """Register and encode a schema at the server. A schema of the same name is replaced.

        Args:
            schema: The schema.
            progress: Called once, with the totals, after the schema is registered.
        """
        found = self._connection.ask("POST", ROUTE, encoded({"pml": to_pml(schema)})) or {}
        done = Ingested(found["runs"], found["encoded"], found["tokens"], found["nbytes"])
        if progress is not None:
            progress(done)
        return RemoteSchema(found["name"], done)


T = TypeVar("T")
LOOK_S = 0.05
"""Seconds between checks for a cancelled answer."""
MAX_TOGETHER = 8
ENGINE_ALONE = ("ingest", "prefix", "forget", "digest", "settings")
"""Attributes that only a local engine has."""


@checks_arguments
class RemoteEngine(OneProcess):
    """A client of `ragfuse serve` with the answering methods of an `Engine`. Thread-safe.

    A `Piece` that is not fresh text is sent as a "text-plain" part. The server searches the prompt
    for the text of retrieved documents (`Ask.documents`).

    Args:
        base_url: The address that `ragfuse serve` prints.
        api_key: The API key. "" means no key.
        model: Name of the model that the server must have. "" means any model.
        max_retries: Maximum retries if the server is unreachable or busy.
        timeout_s: Seconds without data from the server after which a request fails.
    """

    def __init__(
        self,
        base_url: str,
        api_key: str = "",
        model: str = "",
        max_retries: int = 2,
        timeout_s: float = 600.0,
    ) -> None:
        self.address = ServerAddress(base_url, api_key, model, max_retries, timeout_s)
        self._connection = Connection(self.address)
        self._card: ModelCard | None = None
        self.schemas = RemoteSchemas(self._connection)

    @staticmethod
    def shared(address: ServerAddress) -> RemoteEngine:
        """Return this process's shared client for an address. The first call creates the client."""
        return shared(("remote engine", address), lambda: RemoteEngine(**vars(address)))

    @property
    def name(self) -> str:
        """The model's name. "" if no name was given and the server has not been asked yet."""
        return self.address.model or (self._card.name if self._card is not None else "")

    @property
    def card(self) -> ModelCard:
        """The model's name, context and limits. The server is asked once.

        Raises:
            ServerError: No ragfuse server is at the address, or the server has another model.
        """
        if self._card is None:
            card = self._read_as(ModelCard, self._connection.ask("GET", "ragfuse/model"))
            wanted = self.address.model
            if wanted and Path(wanted).name != card.name:
                raise ServerError(
                    f"The server at {self.address.base_url} has the model '{card.name:.80}', not"
                    f" '{wanted:.80}'. Remove model=, or use a server that has '{wanted:.80}'."
                )
            self._card = card
        return self._card

    # questions

    def answer(self, prompt: Question, ask: Ask | None = None) -> Answer:
        """Answer a prompt, as `Engine.answer` does."""
        with self.stream(prompt, ask) as stream:
            return stream.answer

    def stream(self, prompt: Question, ask: Ask | None = None) -> AnswerStream:
        """Stream the answer to a prompt. Closing the stream stops the generation."""
        return AnswerStream(partial(self._say, *request_of(prompt, ask or Ask())))

    def batch(
        self,
        prompts: Sequence[Question],
        ask: Ask | None = None,
        cancelled: threading.Event | None = None,
    ) -> list[Answer]:
        """Answer prompts concurrently; raise the first failure. Setting `cancelled` stops all."""
        bodies = [request_of(prompt, ask or Ask()) for prompt in prompts_of(prompts)]
        if not bodies:
            return []
        stop = cancelled or threading.Event()
        with ThreadPoolExecutor(min(len(bodies), MAX_TOGETHER), "ragfuse-remote") as pool:
            calls = [
                partial(self._say, path, body, lambda piece: None, stop) for path, body in bodies
            ]
            return answers_of([pool.submit(copy_context().run, call) for call in calls], stop)

    def tokens(self, text: str, special: bool = False) -> list[int]:
        """Return a text's token ids from the server's tokenizer, without a BOS token."""
        return self._token_ids({"text": text, "special": special}) if text else []

    def count_tokens(self, prompt: Question, tools: Sequence[Mapping[str, Any]] = ()) -> int:
        """Return a prompt's number of tokens, including chat template and tools."""
        body = {**prompt_for(prompt), "tools": [dict(each) for each in tools]}
        return len(self._token_ids(body))

    def delete_session(self, name: str) -> int:
        """Delete a conversation on the server; return the bytes freed."""
        found = self._connection.ask("DELETE", f"ragfuse/sessions/{quote(name, safe='')}")
        return 0 if found is None else int(found["nbytes"])

    # documents: hints that a server does not need

    def know(self, texts: Iterable[tuple[str, str]]) -> None:
        """Do nothing, because documents are sent with each question."""

    def prefetch(self, texts: Iterable[str]) -> None:
        """Do nothing, because the server prefetches for waiting requests."""

    def __getattr__(self, name: str) -> Any:
        """Raise InputError for an attribute that only a local engine has."""
        if name not in ENGINE_ALONE:
            raise AttributeError(name)
        raise InputError(
            f"'{name}' needs a local engine, but this model uses the server at"
            f" {self.address.base_url}. Do not use '{name}' here. The server stores the KV of a"
            " question's documents by itself; `ragfuse ingest` on the server stores KV beforehand."
        )

    # internal

    def _say(
        self, path: str, body: dict[str, Any], say: Callable[[Piece], None], stop: threading.Event
    ) -> Answer:
        """Send a request, and call `say` with each piece of the answer, in this thread."""
        try:
            # `card` raises if this is not a ragfuse server
            raw = encoded({**body, "model": self.card.name})
            return asyncio.run(self._unless_stopped(path, raw, say, stop))
        except ServerError:
            self._card = None  # the server may restart with another model
            raise

    async def _unless_stopped(
        self, path: str, body: bytes, say: Callable[[Piece], None], stop: threading.Event
    ) -> Answer:
        asking = asyncio.ensure_future(self._read(path, body, say))
        while not asking.done():
            await asyncio.wait({asking}, timeout=LOOK_S)
            if stop.is_set() and not asking.done():
                asking.cancel()
                await asyncio.wait({asking})
        if asking.cancelled():
            if getattr(stop, "is_abandoned", True):
                return Answer("", (), "stop", Trace())  # nobody reads this answer
            raise InputError(
                "finish() needs a local engine. With a server, set max_tokens= or timeout= instead."
            )
        return asking.result()

    async def _read(self, path: str, body: bytes, say: Callable[[Piece], None]) -> Answer:
        text, thoughts, calls, end = "", "", list[ToolCall](), None
        async with self._connection.events(path, body) as events:
            async for event in events:
                try:
                    (choice,) = event["choices"]
                    delta = choice.get("delta", {})
                    calls += map(ToolCall.from_openai, delta.get("tool_calls", ()))
                    thought = "" + (delta.get("reasoning_content") or "")
                    said = "" + (delta.get("content") or choice.get("text") or "")
                    if (reason := choice["finish_reason"]) is not None:
                        trace = TRACE.validate_python(event["ragfuse"])
                        end = tuple(choice["token_ids"]), reason, trace
                except (ValueError, LookupError, TypeError, AttributeError, InputError) as error:
                    raise _unreadable(repr(error)) from None
                text, thoughts = text + said, thoughts + thought
                if thought:
                    say(Thought(thought))
                if said:
                    say(said)
        if end is None:
            raise _unreadable("the answer ended before finish_reason and trace")
        return Answer(text, *end, tuple(calls), thoughts)

    def _token_ids(self, body: dict[str, Any]) -> list[int]:
        found = self._connection.ask("POST", "ragfuse/tokens", encoded(body)) or {}
        return self._read_as(list[int], found.get("tokens"))

    def _read_as(self, kind: type[T], found: object) -> T:
        try:
            return TypeAdapter(kind).validate_python(found)
        except ValidationError:
            raise ServerError(
                f"The server at {self.address.base_url} does not run ragfuse, or runs another"
                f" version: found {found!r:.60}. Use the address that `ragfuse serve` prints, such"
                f" as {LOCAL}."
            ) from None


def _unreadable(found: str) -> ServerError:
    return ServerError(
        f"The server's answer cannot be read: {found:.300}. Check the address, the versions"
        " of client and server, and the server's log."
    )
