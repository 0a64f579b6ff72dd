"""Record the documents that a framework's retrievers return, until a model call uses the documents.

Frameworks report nested runs (LangChain) or spans (LlamaIndex) through callbacks. An integration
forwards the reports to `RetrievalRuns.begin`, `record` and `end`, and calls `retrieved` before each
prompt. In this module, `run` means either a run or a span.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from weakref import ReferenceType, ref

from cachetools import LRUCache

MAX_TEXTS = 64
"""Maximum texts stored per task or thread. An outermost run may store four times this number."""
MAX_RETRIEVED_CHARS = 4 << 20
"""Maximum characters of text stored per outermost run, task or thread."""
MAX_RUNS = 4096
"""Maximum open runs. The least recently used run is dropped, because some runs never end."""

SEARCH_PLACES = 16
"""Number of probes of a text. Probes are evenly spaced pieces that are searched for in a prompt."""
PROBE_CHARS = 12
"""Number of letters and digits of a probe."""

RetrievedText = tuple[str, str, str]
"""(text, source, bare): `text` is the document as the framework prints it. `bare` is the text
without metadata, or "" if both are equal.
"""


@dataclass(eq=False)
class RetrievedTexts:
    """Retrieved texts of one task or thread (`owner`), or of one run (no owner), newest first."""

    owner: ReferenceType[object] | None = None
    all: tuple[RetrievedText, ...] = ()

    def add(self, texts: Sequence[RetrievedText]) -> None:
        """Add texts in front of older texts. The oldest texts beyond the limits are dropped."""
        most = MAX_TEXTS if self.owner else 4 * MAX_TEXTS
        kept, room = list[RetrievedText](), MAX_RETRIEVED_CHARS
        for each in dict.fromkeys((*texts, *self.all)):
            if len(each[0]) <= room and len(kept) < most:
                kept.append(each)
                room -= len(each[0])
        self.all = tuple(kept)


@dataclass(eq=False)
class RetrievalRun:
    """An outermost run with nested runs. `task` has the texts of the task that began the run."""

    task: RetrievedTexts
    open: set[Hashable] = field(default_factory=set)
    texts: RetrievedTexts = field(default_factory=RetrievedTexts)
    model_asked: bool = True
    """False if, since the latest model call, a new text was retrieved or a stream left unread."""

    def record(self, texts: Sequence[RetrievedText]) -> None:
        """Add retrieved texts to the outermost run."""
        if texts:
            self.model_asked = self.model_asked and set(texts) <= set(self.texts.all)
            self.texts.add(texts)


class RetrievalRuns:
    """The retrieved texts of each open run. Thread-safe.

    The texts of an outermost run are dropped when the run and all nested runs have ended. If the
    run returns a stream, a nested run may end later than the outermost run. If, since the
    latest model call, a new text was retrieved or a stream left unread, the task or thread that
    began the outermost run keeps the texts for later prompts.

    Args:
        framework: Name of the framework, used in the name of the context variable.
    """

    def __init__(self, framework: str) -> None:
        self._task: ContextVar[RetrievedTexts | None] = ContextVar(
            f"ragfuse_{framework}_texts", default=None
        )
        self._lock = threading.Lock()
        self._runs: LRUCache[Hashable, RetrievalRun] = LRUCache(MAX_RUNS)

    def __len__(self) -> int:
        """Return the number of open runs."""
        return len(self._runs)

    def begin(
        self, id: Hashable, parent: Hashable | None, texts: Sequence[RetrievedText] = ()
    ) -> None:
        """Open a run inside its parent run. `texts` are the retrieved texts in the run's input."""
        with self._lock:
            run = self._runs.get(parent)
            if run is None:  # an outermost run, or the parent run was not reported
                run = RetrievalRun(self._task_texts())
            self._runs[id] = run
            run.open.add(id)
            run.record(texts)

    def record(self, id: Hashable | None, texts: Sequence[RetrievedText]) -> None:
        """Add retrieved texts to a run, or to the current task or thread if the run is unknown."""
        with self._lock:
            run = self._runs.get(id)
            if run is None:
                self._task_texts().add(texts)
            else:
                run.record(texts)

    def end(self, id: Hashable, texts: Sequence[RetrievedText] = (), unread: bool = False) -> None:
        """Close a run, and add the retrieved texts in the run's output.

        Args:
            id: The run's id.
            texts: The retrieved texts in the output.
            unread: True if the output is an unread stream. Reading the stream may call a model.
        """
        with self._lock:
            run = self._runs.pop(id, None)
            if run is None:
                return
            run.record(texts)
            run.model_asked = run.model_asked and not unread
            run.open.discard(id)
            if not run.open and not run.model_asked:
                run.task.add(run.texts.all)

    def retrieved(
        self, ids: Iterable[Hashable | None], prompt: Callable[[], str]
    ) -> tuple[tuple[str, str], ...]:
        """Return (text, source) of the texts retrieved in these runs, or earlier in the same task
        or thread.

        Args:
            ids: Runs that the prompt belongs to. Closed runs are ignored.
            prompt: Returns the prompt's text. Called only if there are retrieved texts.

        Returns:
            The texts that are at least partly in the prompt, once per source, newest first. A text
            that is wholly in the prompt is returned in the form that the prompt has. If no part
            of a text is in the prompt, the text may belong to another user and is left out.
        """
        task_texts = self._task.get()
        with self._lock:
            runs = dict.fromkeys(run for id in ids if (run := self._runs.get(id)))
            for run in runs:
                run.model_asked = True
            found = [
                *chain.from_iterable(run.texts.all for run in runs),
                *(task_texts.all if task_texts else ()),
            ]
        prompt_text = prompt() if found else ""
        letters = _letters(prompt_text)
        texts: dict[tuple[str, str], None] = {}
        for text, source, without_metadata in found:
            form = next(
                (form for form in _forms(text, without_metadata) if form in prompt_text), ""
            )
            if form or any(probe in letters for probe in _probes(text)):
                texts[form or text, source] = None
        return tuple(texts)

    def _task_texts(self) -> RetrievedTexts:
        """Return the texts of the current task or thread, which starts with its context's texts."""
        try:
            owner: object = asyncio.current_task() or threading.current_thread()
        except RuntimeError:  # no event loop runs in this thread
            owner = threading.current_thread()
        found = self._task.get()
        if found is None or found.owner is None or found.owner() is not owner:
            found = RetrievedTexts(ref(owner), found.all if found else ())
            self._task.set(found)
        return found


def _letters(text: str) -> str:
    """Return the letters and digits of a text, which wrapping and quoting do not change."""
    return re.sub(r"[\W_]+", "", text)


@lru_cache(maxsize=1024)
def _probes(text: str) -> tuple[str, ...]:
    """Return probes: short strings of letters and digits from evenly spaced places of a text."""
    letters = _letters(text)
    last = max(0, len(letters) - PROBE_CHARS)
    places = {last * number // (SEARCH_PLACES - 1) for number in range(SEARCH_PLACES)}
    return tuple(letters[at : at + PROBE_CHARS] for at in sorted(places)) if letters else ()


def _forms(text: str, without_metadata: str) -> Iterator[str]:
    """Yield the forms of a document in a prompt: with or without metadata, plain or as `repr`."""
    for form in filter(None, (text, without_metadata)):
        yield form
        # A template filled with a list contains the list's repr: "['First line.\\nSecond line.']".
        printed = repr(f'"{form}')[2:-1]
        yield printed
        yield printed.replace("\\'", "'")
