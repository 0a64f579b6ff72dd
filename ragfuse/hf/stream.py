"""Incremental detokenisation: decodes new ids to text, finds stop strings, and stops `generate`.

The work per new token is bounded: a few tokens are decoded, and only the new text and what a stop string may overlap
is searched. The prompt is never searched.
"""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from threading import Event
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase, StoppingCriteria

from ragfuse.types.partial_match import partial_match

UNFINISHED = "\ufffd"
"""The replacement character, which tokenizers return for bytes that do not form a whole character yet."""
CONTEXT_TOKENS_BEFORE, MAX_PENDING_TOKENS = 8, 64
"""Tokens decoded again before new ones, because the text of a token depends on its neighbours; and the most tokens that
may wait for a character to become whole, after which their bytes are taken as invalid."""
UNSETTLED = re.compile(r" (?:n'?|'[rv]?)?$")
"""An end of text whose space a tokenizer with `clean_up_tokenization_spaces` may still remove."""

TextOf = Callable[[Sequence[int]], str]


class Detokenizer:
    """An incremental decoder: its text equals that of all ids decoded at once.

    Args:
        text_of: Decodes ids to text.
        hidden: Ids without text, such as special tokens.
        marks: Text of hidden ids that are shown all the same, such as the markup of tool calls.
        cleans: Whether the tokenizer removes spaces (`clean_up_tokenization_spaces`).

    Attributes:
        text: The text so far.
        spans: Characters lo:hi of each mark in `text`.
    """

    def __init__(
        self,
        text_of: TextOf,
        hidden: Collection[int] = (),
        marks: Mapping[int, str] = MappingProxyType({}),
        cleans: bool = False,
    ) -> None:
        self.text, self.spans = "", list[tuple[int, int]]()
        self._text_of, self._hidden, self._marks, self._cleans = text_of, hidden, marks, cleans
        self._window: list[int] = []  # the last ids that have text
        self._done = 0  # characters of the window's text that are in `text`

    @staticmethod
    def of(tokenizer: PreTrainedTokenizerBase, shown: Iterable[str] = ()) -> Detokenizer:
        """Return a decoder for a tokenizer that omits special tokens, except those that occur in a text of `shown`."""
        every = {id: str(token) for id, token in tokenizer.added_tokens_decoder.items() if token.special}
        texts = tuple(shown)
        marks = {id: token for id, token in every.items() if token and any(token in text for text in texts)}
        return Detokenizer(
            lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=True)),
            frozenset(every),
            marks,
            bool(getattr(tokenizer, "clean_up_tokenization_spaces", False)),
        )

    def add(self, ids: Iterable[int]) -> str:
        """Add ids and return the text so far, without characters of which bytes are still missing."""
        for id in ids:
            if id in self._marks:
                self.end()
                self.text += self._marks[id]
                self.spans.append((len(self.text) - len(self._marks[id]), len(self.text)))
            elif id not in self._hidden:
                self._window.append(id)
                self._grow()
        return self.text

    def end(self) -> str:
        """Return the whole text; incomplete bytes become replacement characters."""
        text = self._text_of(self._window)
        self.text += text[self._done :]
        self._done = max(self._done, len(text))
        return self.text

    def copy(self) -> Detokenizer:
        """Return an independent copy, for a sequence that continues differently."""
        new = copy.copy(self)
        new.spans, new._window = list(self.spans), list(self._window)
        return new

    def visible(self, lo: int, hi: int) -> str:
        """Return text[lo:hi] without marks."""
        edges = [lo, *(edge for a, b in self.spans if a < hi and b > lo for edge in (max(a, lo), min(b, hi))), hi]
        return "".join(self.text[a:b] for a, b in zip(edges[::2], edges[1::2], strict=True))

    def _grow(self) -> None:
        text = self._text_of(self._window)
        n_final = len(text.rstrip(UNFINISHED))
        if self._cleans and (found := UNSETTLED.search(text, max(0, n_final - 4), n_final)):
            n_final = found.start()
        if n_final > self._done:
            self.text += text[self._done : n_final]
            self._done = n_final
        if len(self._window) >= MAX_PENDING_TOKENS:
            self.end()
            self._window = self._window[-CONTEXT_TOKENS_BEFORE:]
            self._done = len(self._text_of(self._window))
        elif len(self._window) >= 2 * CONTEXT_TOKENS_BEFORE and n_final == len(text):
            rest = self._text_of(self._window[-CONTEXT_TOKENS_BEFORE:])
            done = self._done - (len(text) - len(rest))
            if done > 0 and text.endswith(rest):
                self._window, self._done = self._window[-CONTEXT_TOKENS_BEFORE:], done


class StopFinder:
    """A search for the first stop string in a growing text; text seen before is not searched again.

    Attributes:
        at: Where the first stop string begins, as a character index; -1 while there is none.
        stops: The stop strings.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self.at, self.stops = -1, tuple(stop for stop in stops if stop)
        self._longest = max(map(len, self.stops), default=0)
        self._seen = 0

    def look(self, text: str, lo: int = 0, hi: int | None = None) -> int:
        """Search text[lo:hi] and return `at`; `hi` must not decrease between calls."""
        hi = len(text) if hi is None else hi
        if self.at < 0 and self.stops:
            begin = max(lo, self._seen - self._longest + 1)
            self.at = min((at for stop in self.stops if (at := text.find(stop, begin, hi)) >= 0), default=-1)
            self._seen = max(self._seen, hi)
        return self.at

    def possible_start(self, text: str, lo: int = 0) -> int:
        """Return how many characters at the end of text[lo:] may be the beginning of a stop string."""
        return partial_match(text[max(lo, len(text) - self._longest + 1) :], self.stops) if self.stops else 0


class Tracked(Protocol):
    """A sequence of generated tokens that knows when generation has to end, and which of its text is final."""

    @property
    def over(self) -> bool:
        """Whether the sequence has ended."""
        ...

    def add(self, ids: Iterable[int]) -> None:
        """Add its next ids; they are ignored once it is over."""
        ...

    def copy(self) -> Any:
        """Return an independent copy, for a sequence that continues differently."""
        ...

    def end(self) -> None:
        """End the sequence: no more ids will come."""
        ...

    def take(self) -> Iterator[Any]:
        """Yield the pieces of text that became final since the last call."""
        ...


class StopWhere(StoppingCriteria):
    """A stopping criterion that ends each sequence of one `generate` call when its tracker is over.

    Args:
        new: Makes the tracker of a sequence.
        reorders: Whether sequences change places between steps, as beams do.
    """

    def __init__(self, new: Callable[[], Tracked], reorders: bool = False) -> None:
        self._new, self._reorders = new, reorders
        self._rows: list[Tracked] = []
        self._known: dict[tuple[int, ...], Tracked] = {}
        self._from = self._seen = -1

    def __call__(self, input_ids: Tensor, scores: Any, **options: Any) -> Tensor:
        """Return which sequences have ended, bool [B]; transformers calls it after every new token."""
        if self._seen < 0:
            self._from = self._seen = input_ids.shape[1] - 1
        if self._reorders:
            rows = [self._followed(tuple(row)) for row in input_ids[:, self._from :].tolist()]
            self._known = dict(rows)
            self._rows = [row for _, row in rows]
        else:
            self._rows = self._rows or [self._new() for _ in range(input_ids.shape[0])]
            for row, ids in zip(self._rows, input_ids[:, self._seen :].tolist(), strict=True):
                row.add(ids)
        self._seen = input_ids.shape[1]
        return torch.tensor([row.over for row in self._rows], device=input_ids.device)

    def _followed(self, ids: tuple[int, ...]) -> tuple[tuple[int, ...], Tracked]:
        """Return the tracker of a sequence: a copy if it extends one of the last step, else a new one."""
        before = self._known.get(ids[:-1])
        row: Tracked = self._new() if before is None else before.copy()
        row.add(ids if before is None else ids[-1:])
        return ids, row


class StopWhen(StoppingCriteria):
    """A stopping criterion that ends generation when an event is set, because the caller went away."""

    def __init__(self, event: Event) -> None:
        self.event = event

    def __call__(self, input_ids: Tensor, scores: Any, **options: Any) -> Tensor:
        """Return whether the event is set, for every sequence: bool [B]."""
        return torch.full((input_ids.shape[0],), self.event.is_set(), device=input_ids.device)


class FirstToken:
    """A streamer that only records the time of the first new token, `first_s`, in `time.perf_counter()` seconds."""

    def __init__(self) -> None:
        self.first_s: float | None = None
        self._prompt = True

    def put(self, value: Tensor) -> None:
        """Receive the prompt's ids first, then the ids of each step."""
        if not self._prompt and self.first_s is None:
            self.first_s = time.perf_counter()
        self._prompt = False

    def end(self) -> None:
        """Do nothing."""


class TextSink(FirstToken):
    """A streamer that calls `emit` with each piece of a sequence's text as soon as it is final."""

    def __init__(self, growing: Tracked, emit: Callable[[Any], None]) -> None:
        super().__init__()
        self._growing, self._emit, self._skipped = growing, emit, False

    def put(self, value: Tensor) -> None:
        """Receive the prompt's ids, which are skipped, then the ids of each step."""
        super().put(value)
        if not self._skipped:
            self._skipped = True
            return
        self._growing.add(value.reshape(-1).tolist())
        self._emit_final()

    def end(self) -> None:
        """End the sequence and pass on its remaining text."""
        self._growing.end()
        self._emit_final()

    def _emit_final(self) -> None:
        for piece in self._growing.take():
            self._emit(piece)
