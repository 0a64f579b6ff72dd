"""An engine in another process: questions go to `ragfuse serve`, answers are read as a stream."""

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
from ragfuse.schemas.pml import parse_schema
from ragfuse.schemas.pml_writer import to_pml
from ragfuse.types.answer import Answer, Ingested, ModelCard, Thought, ToolCall, Trace
from ragfuse.types.arguments import checks_arguments

if TYPE_CHECKING:
    from ragfuse.engine.engine import Engine


Answerer: TypeAlias = "Engine | RemoteEngine"
"""What answers prompts and reuses the KV of their chunks; both have the same methods, which
`Engine` documents.
"""


TRACE = TypeAdapter(Trace)


class AnswerReader:
    """Joins the events of one answer, and checks what is in them."""

    def __init__(self) -> None:
        self._texts, self._thoughts = list[str](), list[str]()
        self._calls: tuple[ToolCall, ...] = ()
        self._last: dict[str, Any] = {}

    def read(self, event: dict[str, Any]) -> Piece | None:
        """Return the piece of text or reasoning in an event, if there is one; raise ServerError for
        anything that is no answer.
        """
        try:
            (choice,) = event["choices"]
            delta = choice.get("delta", {})
            self._calls += tuple(map(ToolCall.from_openai, delta.get("tool_calls", ())))
            if choice["finish_reason"] is not None:
                self._last = {**choice, "trace": TRACE.validate_python(event["ragfuse"])}
            if thought := delta.get("reasoning_content"):
                self._thoughts.append("" + thought)
                return Thought(thought)
            text = delta.get("content") or choice.get("text") or ""
            self._texts.append("" + text)
        except (ValueError, LookupError, TypeError, AttributeError, InputError) as error:
            raise _wrong(repr(error)) from None
        return text or None

    @property
    def answer(self) -> Answer:
        """The whole answer; raises ServerError where the events had no end."""
        if not self._last:
            raise _wrong("it broke off before finish_reason and trace")
        return Answer(
            "".join(self._texts),
            tuple(self._last["token_ids"]),
            self._last["finish_reason"],
            self._last["trace"],
            self._calls,
            "".join(self._thoughts),
        )


def _wrong(found: str) -> ServerError:
    return ServerError(
        f"The server's answer cannot be read: {found:.300}. Check base_url=, that client and server"
        " have one version, and the server's log."
    )


Progress = Callable[[Ingested], None]
ROUTE = "ragfuse/schemas"


@dataclass(frozen=True)
class RemoteSchema:
    """A schema that a server has registered, with the counts of its encoding."""

    name: str
    done: Ingested


class RemoteSchemas:
    """Registers schemas at a server.

    Args:
        connection: The connection to it.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def has(self, schema: Schema) -> bool:
        """Return whether the server has an equal schema."""
        found = self._connection.ask("GET", f"{ROUTE}/{quote(schema.name, safe='')}")
        return found is not None and parse_schema(found["pml"]) == schema

    def ensure(self, schema: Schema, progress: Progress | None = None) -> RemoteSchema | None:
        """Register a schema unless the server has it already; None where it does."""
        return None if self.has(schema) else self.register(schema, progress)

    def register(self, schema: Schema, progress: Progress | None = None) -> RemoteSchema:
        """Register a schema, which the server encodes; it replaces one of the same name.

        Args:
            schema: The schema.
            progress: Called once, at the end.
        """
        found = self._connection.ask("POST", ROUTE, encoded({"pml": to_pml(schema)})) or {}
        done = Ingested(found["runs"], found["encoded"], found["tokens"], found["nbytes"])
        if progress is not None:
            progress(done)
        return RemoteSchema(found["name"], done)


T = TypeVar("T")
LOOK_S = 0.05
"""Seconds between two looks whether a running answer is still wanted."""
MAX_TOGETHER = 8
"""Most prompts of a batch that are asked at the same time."""
ENGINE_ALONE = ("ingest", "prefix", "forget", "digest", "settings")
"""What an `Engine` has and no server does for its clients: chunks that are encoded ahead, and its
store.
"""


@checks_arguments
class RemoteEngine(OneProcess):
    """A client of `ragfuse serve` with the interface of an `Engine` (`Answerer`). Thread-safe; it
    opens no store.

    Documents keep their boundaries: marked chunks become documents of the request, and retrieved
    ones (`Ask.documents`) are found in the prompt by the server, as an engine finds them.

    Args:
        base_url: The address that `ragfuse serve` prints.
        api_key: The API key; "": none.
        model: Name of the model that the server must have; "": whichever it has.
        max_retries: How often a request is sent again that found no server or a busy one.
        timeout_s: Seconds that the server may be silent.
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
        """Return the process-wide client of this address, made at the first call."""
        return shared(("remote engine", address), lambda: RemoteEngine(**vars(address)))

    @property
    def name(self) -> str:
        """The model's name as far as it is known without asking the server: "" before the first
        question.
        """
        return self.address.model or (self._card.name if self._card is not None else "")

    @property
    def card(self) -> ModelCard:
        """The model's name, window and limits, as the server says; asked once.

        Raises:
            ServerError: There is no ragfuse server at the address, or it has another model.
        """
        if self._card is None:
            self._card = self._read_card()
        return self._card

    # questions

    def answer(self, prompt: Question, ask: Ask | None = None) -> Answer:
        """Return the answer to a prompt; as `Engine.answer`."""
        with self.stream(prompt, ask) as stream:
            return stream.answer

    def stream(self, prompt: Question, ask: Ask | None = None) -> AnswerStream:
        """Return an iterator over the answer's text as it comes; as `Engine.stream`. Closing it
        ends the generation.
        """
        return AnswerStream(partial(self._say, *request_of(prompt, ask or Ask())))

    def batch(
        self,
        prompts: Sequence[Question],
        ask: Ask | None = None,
        cancelled: threading.Event | None = None,
    ) -> list[Answer]:
        """Return the answers to several prompts, asked together; the first failure ends the others
        and is raised.
        """
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
        """Return the ids of a text in the middle of a prompt, by the server's tokenizer."""
        return self._token_ids({"text": text, "special": special}) if text else []

    def count_tokens(self, prompt: Question, tools: Sequence[Mapping[str, Any]] = ()) -> int:
        """Return the number of tokens of a prompt, with chat template and tools."""
        body = {**prompt_for(prompt), "tools": [dict(each) for each in tools]}
        return len(self._token_ids(body))

    def delete_session(self, name: str) -> int:
        """Delete a conversation that the server keeps, and return the bytes that came free; 0 where
        there is none.
        """
        found = self._connection.ask("DELETE", f"ragfuse/sessions/{quote(name, safe='')}")
        return 0 if found is None else int(found["nbytes"])

    # documents: hints that a server needs not

    def know(self, texts: Iterable[tuple[str, str]]) -> None:
        """Do nothing: retrieved documents come with each question, by which the server recognises
        them.
        """

    def prefetch(self, texts: Iterable[str]) -> None:
        """Do nothing: the server brings a question's KV to memory while it waits for its turn."""

    def __getattr__(self, name: str) -> Any:
        """Raise InputError for what only an engine on the server's store does."""
        if name not in ENGINE_ALONE:
            raise AttributeError(name)
        raise InputError(
            f"'{name}' needs a local engine, but this model asks the server at"
            f" {self.address.base_url}. Leave it out: the server encodes a question's documents"
            " after its answer. Or run `ragfuse ingest` on the server's store."
        )

    # inside

    def _say(
        self, path: str, body: dict[str, Any], say: Callable[[Piece], None], stop: threading.Event
    ) -> Answer:
        """Ask, pass each piece to `say`, and return the answer; an event loop of this thread's own
        does the reading.
        """
        try:
            # the card raises for what is no ragfuse server
            raw = encoded({**body, "model": self.card.name})
            return asyncio.run(self._unless_stopped(path, raw, say, stop))
        except ServerError:
            self._card = None  # the server may come back with another model
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
                return Answer("", (), "stop", Trace())  # nobody reads it
            raise InputError(
                "An answer of a server cannot be cut short and kept. Bound it by max_tokens= or"
                " timeout= instead."
            )
        return asking.result()

    async def _read(self, path: str, body: bytes, say: Callable[[Piece], None]) -> Answer:
        reader = AnswerReader()
        async with self._connection.events(path, body) as events:
            async for event in events:
                if piece := reader.read(event):
                    say(piece)
        return reader.answer

    def _token_ids(self, body: dict[str, Any]) -> list[int]:
        found = self._connection.ask("POST", "ragfuse/tokens", encoded(body)) or {}
        return self._read_as(list[int], found.get("tokens"))

    def _read_card(self) -> ModelCard:
        card = self._read_as(ModelCard, self._connection.ask("GET", "ragfuse/model"))
        wanted = self.address.model
        if wanted and Path(wanted).name != card.name:
            raise ServerError(
                f"The server at {self.address.base_url} has the model '{card.name:.80}', wanted"
                f" '{wanted:.80}'. Leave out model=, or ask the server that has it."
            )
        return card

    def _read_as(self, kind: type[T], found: object) -> T:
        try:
            return TypeAdapter(kind).validate_python(found)
        except ValidationError:
            raise ServerError(
                f"What answers at {self.address.base_url} is no ragfuse server of this version:"
                f" found {found!r:.60}. Wanted the address that `ragfuse serve` prints, such as"
                f" {LOCAL}."
            ) from None
