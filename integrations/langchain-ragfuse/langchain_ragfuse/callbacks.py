"""A listener to what retrievers return, so that a model knows the chunks of its prompt without an index.

LangChain hands it every run of the process: it is registered once, when a model of this package is first imported.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import islice
from typing import Any
from uuid import UUID
from weakref import ref

from langchain_core.callbacks import BaseCallbackHandler, BaseCallbackManager
from langchain_core.documents import Document
from langchain_core.messages import BaseMessage, ToolMessage
from langchain_core.runnables import ensure_config
from langchain_core.tracers.context import register_configure_hook

from langchain_ragfuse.messages import source_of

MAX_DOCUMENTS = 64
"""Documents kept of one context; a run keeps four times as many."""
MAX_CHARS = 4 << 20
"""Characters of text kept of one context or run."""
MAX_RUNS = 1024
MAX_AGE_S = 3600.0
"""A run that is older, or that so many have begun after, is given up: its end may never come."""
MAX_DEPTH = 4
"""How deep in a step's input or output documents are looked for."""

HOLDERS = (Document, ToolMessage, Mapping, list, tuple)
"""What is a document or may hold one."""

Text = tuple[str, str]
"""A text and where it is from."""


class Texts:
    """Texts that were retrieved, each once, the newest first; the oldest make room."""

    def __init__(self, limit: int = MAX_DOCUMENTS, texts: Sequence[Text] = ()) -> None:
        self._limit = limit
        self.all: tuple[Text, ...] = tuple(texts)

    def add(self, texts: Iterable[Text]) -> None:
        """Put these before the others."""
        kept: dict[str, str] = {}
        room = MAX_CHARS
        for text, source in (*texts, *self.all):
            if text not in kept and len(text) <= room and len(kept) < self._limit:
                kept[text] = source
                room -= len(text)
        self.all = tuple(kept.items())


class Here(Texts):
    """What was retrieved by runs that ended in one task, or in one thread outside of tasks."""

    def __init__(self, owner: object, texts: Sequence[Text] = ()) -> None:
        super().__init__(MAX_DOCUMENTS, texts)
        self._owner = ref(owner)

    @classmethod
    def now(cls) -> Here:
        """That of the running task or thread; a new one knows what the context knew that it began in."""
        owner, found = _owner(), _HERE.get()
        if found is None or found._owner() is not owner:
            found = cls(owner, found.all if found else ())
            _HERE.set(found)
        return found


_HERE: ContextVar[Here | None] = ContextVar("ragfuse_langchain_here", default=None)
_ASKING: ContextVar[tuple[UUID | None, ...]] = ContextVar("ragfuse_langchain_asking", default=())


@dataclass(eq=False)
class Run:
    """A run without a parent, and all below it."""

    id: UUID
    here: Here
    began: float = field(default_factory=time.monotonic)
    open: set[UUID] = field(default_factory=set)
    texts: Texts = field(default_factory=lambda: Texts(4 * MAX_DOCUMENTS))
    told: bool = True
    """Whether a model was asked since the last text was heard."""


class Listener(BaseCallbackHandler):
    """Keeps the documents that were met in each run: what retrievers and tools return, what chains take and give.

    They are dropped when the outermost run ends. Those that no model was asked about are kept for the task or thread
    that called it: it may put them into a prompt by hand.
    """

    ignore_llm = ignore_chat_model = ignore_retry = ignore_custom_event = True

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._roots: dict[UUID, Run] = {}
        self._runs: dict[UUID, Run] = {}

    def __reduce__(self) -> str:
        """Be the one of each process, where a configuration that holds it is copied or sent to another."""
        return "LISTENER"

    @property
    def run_inline(self) -> bool:  # type: ignore[override]
        """Whether asynchronous runs call it in their own task: always, but for the beginning of a text model's.

        LangChain does not tell a text model's beginning to any other handler if one runs inline, and this one has no
        use for it.
        """
        caller = sys._getframe(1)
        # Before Python 3.12 a list comprehension has a frame of its own.
        callers = (caller, caller.f_back)
        return not any(frame is not None and frame.f_code.co_name == "on_llm_start" for frame in callers)

    def known(self, parents: Iterable[UUID | None]) -> list[Text]:
        """What was met in the runs that these belong to, the newest first."""
        with self._lock:
            runs = dict.fromkeys(run for parent in parents if parent and (run := self._runs.get(parent)))
            for run in runs:
                run.told = True
            return [text for run in runs for text in run.texts.all]

    def on_chain_start(
        self, serialized: Any, inputs: Any, *, run_id: UUID, parent_run_id: UUID | None = None, **kwargs: Any
    ) -> None:
        """Note the run and the documents that it was given."""
        self._begin(run_id, parent_run_id, inputs)

    def on_chain_end(self, outputs: Any, *, run_id: UUID, **kwargs: Any) -> None:
        """Note what it gave; a stream's input is known at its end only."""
        self._end(run_id, (outputs, kwargs.get("inputs")))

    def on_chain_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        """Note the end."""
        self._end(run_id)

    def on_tool_start(
        self, serialized: Any, input_str: str, *, run_id: UUID, parent_run_id: UUID | None = None, **kwargs: Any
    ) -> None:
        """Note the run."""
        self._begin(run_id, parent_run_id)

    def on_tool_end(self, output: Any, *, run_id: UUID, **kwargs: Any) -> None:
        """Note the documents that it returned, or handed over beside its content."""
        self._end(run_id, output)

    def on_tool_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        """Note the end."""
        self._end(run_id)

    def on_retriever_start(
        self, serialized: Any, query: str, *, run_id: UUID, parent_run_id: UUID | None = None, **kwargs: Any
    ) -> None:
        """Note the run."""
        self._begin(run_id, parent_run_id)

    def on_retriever_end(self, documents: Sequence[Document], *, run_id: UUID, **kwargs: Any) -> None:
        """Note what was retrieved."""
        self._end(run_id, list(documents))

    def on_retriever_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        """Note the end."""
        self._end(run_id)

    def _begin(self, id: UUID, parent: UUID | None, given: Any = None) -> None:
        texts = _texts(given)
        with self._lock:
            run = self._runs.get(parent) if parent else None
            if run is None:  # the outermost, or one whose parent LangChain does not run, as LangSmith's `traceable`
                run = self._roots[id] = Run(id, Here.now())
                self._give_up()
            self._runs[id] = run
            run.open.add(id)
            _hear(run, texts)

    def _end(self, id: UUID, given: Any = None) -> None:
        texts = _texts(given)
        with self._lock:
            run = self._runs.get(id)
            if run is None:
                return
            _hear(run, texts)
            if run.id != id:
                del self._runs[id]
                run.open.discard(id)
                return
            self._drop(run)
            if not run.told:
                run.here.add(run.texts.all)

    def _drop(self, run: Run) -> None:
        del self._roots[run.id]
        for id in run.open:
            del self._runs[id]

    def _give_up(self) -> None:
        """Drop runs that are too many or too old, but for the newest."""
        while len(self._roots) > 1:
            oldest = next(iter(self._roots.values()))
            if len(self._roots) <= MAX_RUNS and oldest.began >= time.monotonic() - MAX_AGE_S:
                return
            self._drop(oldest)


LISTENER = Listener()
register_configure_hook(ContextVar("ragfuse_listener", default=LISTENER), inheritable=True)


def heard_for(run_manager: Any, asked: Sequence[str | BaseMessage]) -> tuple[Text, ...]:
    """What was retrieved in a model's run or, before it, in the same task or thread: the run's own come first.

    The text is what of a document stands in what is asked.
    """
    # A stream is given no run manager; what runs around it is in the context, as for any runnable.
    around = ensure_config().get("callbacks")
    parents = (getattr(run_manager, "parent_run_id", None), getattr(around, "parent_run_id", None), *_ASKING.get())
    here = _HERE.get()
    found = (*LISTENER.known(parents), *(here.all if here else ()))
    said = "\n".join(each if isinstance(each, str) else each.text for each in asked) if found else ""
    texts: dict[str, str] = {}
    for text, source in found:
        texts.setdefault(next((form for form in _forms(text) if form in said), text), source)
    return tuple(texts.items())


@contextmanager
def asked_by(callbacks: Any) -> Iterator[None]:
    """Make known whose prompts are answered together: LangChain tells a model the first prompt's run alone."""
    each = callbacks if isinstance(callbacks, list) else []
    parents = tuple(one.parent_run_id for one in each if isinstance(one, BaseCallbackManager))
    token = _ASKING.set(parents)
    try:
        yield
    finally:
        _ASKING.reset(token)


def _forms(text: str) -> Iterator[str]:
    """How a document may stand in a prompt."""
    yield text
    # A prompt filled in with documents themselves has them printed: "[Document(page_content='A line.\\nAnother.')]".
    printed = repr(f'"{text}')[2:-1]
    yield printed
    yield printed.replace("\\'", "'")


def _hear(run: Run, texts: Sequence[Text]) -> None:
    if texts and any(text not in run.texts.all for text in texts):
        run.told = False
    if texts:
        run.texts.add(texts)


def _texts(value: Any) -> list[Text]:
    """The documents in a value, as a chain puts them into a prompt."""
    return [
        (text, source_of(document))
        for document in islice(_documents(value, MAX_DEPTH), 4 * MAX_DOCUMENTS)
        if (text := document.page_content.strip())
    ]


def _documents(value: Any, depth: int) -> Iterator[Document]:
    if isinstance(value, Document):
        yield value
    elif isinstance(value, ToolMessage):
        yield from _documents(value.artifact, depth)
    elif depth and isinstance(value, Mapping):
        for each in value.values():
            yield from _documents(each, depth - 1)
    elif depth and isinstance(value, list | tuple):
        # Of a long list of anything else, as of numbers, one look must be enough.
        if isinstance(value, list) and value and not isinstance(value[0], HOLDERS):
            return
        for each in islice(value, 4 * MAX_DOCUMENTS):
            yield from _documents(each, depth - 1)


def _owner() -> object:
    try:
        return asyncio.current_task() or threading.current_thread()
    except RuntimeError:  # no event loop runs in this thread
        return threading.current_thread()
