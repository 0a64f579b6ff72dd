"""Text as it is written: what new ids say, where stop strings begin, and what ends `generate`.

Work for a new token is bounded: a few tokens are decoded, and of the text only what is new and what a stop string may
overlap is looked at. The prompt is never looked at.
"""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from threading import Event
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase, StoppingCriteria

UNFINISHED = "\ufffd"
"""What stands for bytes that are no character yet."""
CONTEXT_TOKENS_BEFORE, MAX_PENDING_TOKENS = 8, 64
"""Tokens that are decoded again before new ones, so that these are spelled as they are among others; and the most that
wait for a character to become whole: more are no character any more."""
UNSETTLED = re.compile(r" (?:n'?|'[rv]?)?$")
"""The end of a text that a tokenizer with `clean_up_tokenization_spaces` may still take its space from."""

TextOf = Callable[[Sequence[int]], str]
Piece = TypeVar("Piece", covariant=True)


class Spelling:
    """The text of ids that come one after the other; joined it is the text of all of them.

    text_of: ids -> text. hidden: ids that say nothing. marks: the text of those hidden ids that count here all the
    same, such as the markup of calls; `spans` are their places lo:hi in `text`.
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
        self._window: list[int] = []  # the last ids that say something
        self._done = 0  # characters of the window's text that are in `text`

    @staticmethod
    def over(words: PreTrainedTokenizerBase, shown: Iterable[str] = ()) -> Spelling:
        """By a tokenizer, special tokens left out, but for those that stand in one of the texts `shown`."""
        every = {id: str(token) for id, token in words.added_tokens_decoder.items() if token.special}
        texts = tuple(shown)
        marks = {id: token for id, token in every.items() if token and any(token in text for text in texts)}
        return Spelling(
            lambda ids: str(words.decode(list(ids), skip_special_tokens=True)),
            frozenset(every),
            marks,
            bool(getattr(words, "clean_up_tokenization_spaces", False)),
        )

    def add(self, ids: Iterable[int]) -> str:
        """The text so far; characters of which bytes are missing are left out."""
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
        """The whole text, bytes that became no character as what stands for them."""
        now = self._text_of(self._window)
        self.text += now[self._done :]
        self._done = max(self._done, len(now))
        return self.text

    def copy(self) -> Spelling:
        """The same, to go on in another way."""
        new = copy.copy(self)
        new.spans, new._window = list(self.spans), list(self._window)
        return new

    def visible(self, lo: int, hi: int) -> str:
        """The text between two places, without marks."""
        edges = [lo, *(edge for a, b in self.spans if a < hi and b > lo for edge in (max(a, lo), min(b, hi))), hi]
        return "".join(self.text[a:b] for a, b in zip(edges[::2], edges[1::2], strict=True))

    def _grow(self) -> None:
        now = self._text_of(self._window)
        sure = len(now.rstrip(UNFINISHED))
        if self._cleans and (found := UNSETTLED.search(now, max(0, sure - 4), sure)):
            sure = found.start()
        if sure > self._done:
            self.text += now[self._done : sure]
            self._done = sure
        if len(self._window) >= MAX_PENDING_TOKENS:
            self.end()
            self._window = self._window[-CONTEXT_TOKENS_BEFORE:]
            self._done = len(self._text_of(self._window))
        elif len(self._window) >= 2 * CONTEXT_TOKENS_BEFORE and sure == len(now):
            rest = self._text_of(self._window[-CONTEXT_TOKENS_BEFORE:])
            done = self._done - (len(now) - len(rest))
            if done > 0 and now.endswith(rest):
                self._window, self._done = self._window[-CONTEXT_TOKENS_BEFORE:], done


class StopFinder:
    """Finds where the first of some stop strings begins in a text that grows.

    at: that place, -1 while there is none. Of what was seen before, only what a stop string may overlap is read again.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self.at, self.stops = -1, tuple(stop for stop in stops if stop)
        self._longest = max(map(len, self.stops), default=0)
        self._seen = 0

    def look(self, text: str, lo: int = 0, hi: int | None = None) -> int:
        """The place in text[lo:hi], whose end was never further to the left."""
        hi = len(text) if hi is None else hi
        if self.at < 0 and self.stops:
            begin = max(lo, self._seen - self._longest + 1)
            self.at = min((at for stop in self.stops if (at := text.find(stop, begin, hi)) >= 0), default=-1)
            self._seen = max(self._seen, hi)
        return self.at

    def begun(self, text: str, lo: int = 0) -> int:
        """Characters at the end of text[lo:] that may be the beginning of a stop string."""
        return longest_start(text[max(lo, len(text) - self._longest + 1) :], self.stops) if self.stops else 0


def longest_start(text: str, words: Sequence[str]) -> int:
    """Characters at the end of `text` that could be the beginning of one of these."""
    sizes = range(min(len(text), max(map(len, words), default=0) - 1), 0, -1)
    return next((size for size in sizes if any(word.startswith(text[-size:]) for word in words)), 0)


class Tracked(Protocol):
    """One sequence while it is written."""

    @property
    def over(self) -> bool:
        """Whether it has ended."""
        ...

    def add(self, ids: Iterable[int]) -> None:
        """Its next ids; none count once it is over."""
        ...

    def copy(self) -> Any:
        """The same, to go on in another way."""
        ...


class UntilStop:
    """One sequence that ends at a stop string in what it says."""

    def __init__(self, spelling: Spelling, stops: Iterable[str]) -> None:
        self._spelling, self._stops = spelling, StopFinder(stops)

    @property
    def over(self) -> bool:
        """Whether a stop string was met."""
        return self._stops.at >= 0

    def add(self, ids: Iterable[int]) -> None:
        """Its next ids."""
        for id in ids:
            if not self.over:
                self._stops.look(self._spelling.add([id]))

    def copy(self) -> UntilStop:
        """The same, to go on in another way."""
        new = copy.copy(self)
        new._spelling, new._stops = self._spelling.copy(), copy.copy(self._stops)
        return new


class StopWhere(StoppingCriteria):
    """Ends each sequence of one `generate` that is over.

    new: makes what follows a sequence. reorders: whether sequences change places, as beams do.
    """

    def __init__(self, new: Callable[[], Tracked], reorders: bool = False) -> None:
        self._new, self._reorders = new, reorders
        self._rows: list[Tracked] = []
        self._known: dict[tuple[int, ...], Tracked] = {}
        self._from = self._seen = -1

    def __call__(self, input_ids: Tensor, scores: Any, **options: Any) -> Tensor:
        """bool [B]; called after every new token, first after the first."""
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
        """A sequence that goes on from one of the last step's; any other is read from its beginning."""
        before = self._known.get(ids[:-1])
        row: Tracked = self._new() if before is None else before.copy()
        row.add(ids if before is None else ids[-1:])
        return ids, row


class StopWhen(StoppingCriteria):
    """Ends generation when an event is set: the caller went away."""

    def __init__(self, event: Event) -> None:
        self.event = event

    def __call__(self, input_ids: Tensor, scores: Any, **options: Any) -> Tensor:
        """bool [B]."""
        return torch.full((input_ids.shape[0],), self.event.is_set(), device=input_ids.device)


class Growing(Protocol[Piece]):
    """One sequence that tells what of it will not change any more."""

    def add(self, ids: Iterable[int]) -> None:
        """Its next ids."""
        ...

    def end(self) -> None:
        """No more will come."""
        ...

    def take(self) -> Iterator[Piece]:
        """What is certain since the last time."""
        ...


class FirstToken:
    """A streamer that only notes when the first new token came: `first_s`, as `time.perf_counter()`."""

    def __init__(self) -> None:
        self.first_s: float | None = None
        self._prompt = True

    def put(self, value: Tensor) -> None:
        """The prompt, then one step's token ids after the other."""
        if not self._prompt and self.first_s is None:
            self.first_s = time.perf_counter()
        self._prompt = False

    def end(self) -> None:
        """Nothing to finish."""


class TextSink(FirstToken):
    """Hands pieces of what one sequence says to `say` as soon as they will not change."""

    def __init__(self, growing: Growing[Any], say: Callable[[Any], None]) -> None:
        super().__init__()
        self._growing, self._say, self._skipped = growing, say, False

    def put(self, value: Tensor) -> None:
        """The prompt, which is skipped, then one step's token ids after the other."""
        super().put(value)
        if not self._skipped:
            self._skipped = True
            return
        self._growing.add(value.reshape(-1).tolist())
        self._hand_out()

    def end(self) -> None:
        """What is left."""
        self._growing.end()
        self._hand_out()

    def _hand_out(self) -> None:
        for piece in self._growing.take():
            self._say(piece)
