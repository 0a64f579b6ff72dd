"""Incremental detokenisation: decodes new ids to text, finds stop strings, and stops `generate`.

The work per new token is bounded: a few tokens are decoded, and only the new text and what a stop
string may overlap is searched. The prompt is never searched.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from threading import Event
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase, StoppingCriteria

from ragfuse.types.texts import partial_match

UNFINISHED = "\ufffd"
"""The replacement character, which tokenizers return for bytes that do not form a whole character
yet.
"""
CONTEXT_TOKENS_BEFORE, MAX_PENDING_TOKENS = 8, 64
"""Tokens decoded again before new ones, because the text of a token depends on its neighbours; and
the most tokens that may wait for a character to become whole, after which their bytes are taken as
invalid.
"""
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
        """Return a decoder for this tokenizer. It omits special tokens unless they occur in one of
        the texts of `shown`.
        """
        every = {
            id: str(token) for id, token in tokenizer.added_tokens_decoder.items() if token.special
        }
        texts = tuple(shown)
        marks = {
            id: token
            for id, token in every.items()
            if token and any(token in text for text in texts)
        }
        return Detokenizer(
            lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=True)),
            frozenset(every),
            marks,
            bool(getattr(tokenizer, "clean_up_tokenization_spaces", False)),
        )

    def add(self, ids: Iterable[int]) -> str:
        """Add ids and return the text so far, without characters of which bytes are still
        missing.
        """
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

    def visible(self, lo: int, hi: int) -> str:
        """Return text[lo:hi] without marks."""
        edges = [
            lo,
            *(
                edge
                for a, b in self.spans
                if a < hi and b > lo
                for edge in (max(a, lo), min(b, hi))
            ),
            hi,
        ]
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
            self.at = min(
                (at for stop in self.stops if (at := text.find(stop, begin, hi)) >= 0), default=-1
            )
            self._seen = max(self._seen, hi)
        return self.at

    def possible_start(self, text: str, lo: int = 0) -> int:
        """Return how many characters at the end of text[lo:] may be the beginning of a stop
        string.
        """
        return (
            partial_match(text[max(lo, len(text) - self._longest + 1) :], self.stops)
            if self.stops
            else 0
        )


class Follower(StoppingCriteria):
    """A stopping criterion that follows the answer of one `generate` call, token by token.

    It ends the answer where that is over, or an event is set because the caller went away.

    Args:
        growing: The answer, which parses its ids and knows when it is over (`engine.draft.Draft`).
        emit: Called with each piece of its text as soon as it is final.
        ends: The events.

    Attributes:
        first_s: `time.perf_counter()` at the first token; None before.
    """

    def __init__(
        self,
        growing: Any,
        emit: Callable[[Any], object] | None = None,
        ends: Iterable[Event] = (),
    ) -> None:
        self.first_s: float | None = None
        self._growing, self._emit, self._ends, self._seen = growing, emit, tuple(ends), 0

    def __call__(self, input_ids: Tensor, scores: Any, **options: Any) -> Tensor:
        """Return whether the answer has ended, bool [1]; transformers calls it after every new
        token.
        """
        if self.first_s is None:
            self.first_s = time.perf_counter()
            self._seen = input_ids.shape[1] - 1
        self._growing.add(input_ids[0, self._seen :].tolist())
        self._seen = input_ids.shape[1]
        self._say()
        return torch.tensor(
            [self._growing.over or any(end.is_set() for end in self._ends)], device=input_ids.device
        )

    def end(self) -> None:
        """End the answer and emit its remaining text."""
        self._growing.end()
        self._say()

    def _say(self) -> None:
        if self._emit is not None:
            for piece in self._growing.take():
                self._emit(piece)
