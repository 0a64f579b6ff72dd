"""Text as it is written: streamers and stopping for `generate`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from threading import Event
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteria

UNFINISHED = "\ufffd"
"""What stands for bytes that are no character yet."""

TextOf = Callable[[Sequence[int]], str]


class Spelling:
    """The text of ids that come one after the other; joined it is the text of all of them."""

    def __init__(self, text_of: TextOf) -> None:
        self._text_of = text_of
        self._ids: list[int] = []
        self._from = self._upto = 0  # ids: decoded with what follows; all before are in the text
        self.text = ""

    def add(self, ids: Sequence[int]) -> str:
        """The text so far; characters of which bytes are missing are left out."""
        self._ids += ids
        before = self._text_of(self._ids[self._from : self._upto])
        now = self._text_of(self._ids[self._from :])
        if now.startswith(before) and len(now) > len(before) and not now.endswith(UNFINISHED):
            self.text += now[len(before) :]
            self._from, self._upto = self._upto, len(self._ids)
        return self.text

    def end(self) -> str:
        """The whole text, as it is when all ids are read at once."""
        whole = self._text_of(self._ids)
        self.text = whole if whole.startswith(self.text) else self.text
        return self.text


class TextSink:
    """Hands pieces of text to `say` as soon as they will not change, and none that may yet be cut off.

    cut: what of a text counts, and how many of its characters are certain whatever follows. ends: ids that end it.
    first_s: `time.perf_counter()` at the first new token, None before it.
    """

    def __init__(
        self,
        text_of: TextOf,
        say: Callable[[str], None],
        cut: Callable[[str], tuple[str, int]],
        ends: Sequence[int] = (),
    ) -> None:
        self.first_s: float | None = None
        self._say, self._cut, self._ends = say, cut, frozenset(ends)
        self._spelling, self._said, self._prompt, self._over = Spelling(text_of), 0, True, False

    def put(self, value: Tensor) -> None:
        """The prompt, which is skipped, then one step's token ids after the other."""
        if self._prompt:
            self._prompt = False
            return
        if self.first_s is None:
            self.first_s = time.perf_counter()
        for token in value.reshape(-1).tolist():
            self._over = self._over or token in self._ends
            if not self._over:
                text, certain = self._cut(self._spelling.add([token]))
                self._hand_out(text[:certain])

    def end(self) -> None:
        """What is left."""
        self._hand_out(self._cut(self._spelling.end())[0])

    def _hand_out(self, text: str) -> None:
        if len(text) > self._said:
            piece, self._said = text[self._said :], len(text)
            self._say(piece)


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


class StopWhen(StoppingCriteria):
    """Ends generation when an event is set: the caller went away."""

    def __init__(self, event: Event) -> None:
        self.event = event

    def __call__(self, input_ids: Tensor, scores: Any, **options: Any) -> Tensor:
        """bool [B]."""
        return torch.full((input_ids.shape[0],), self.event.is_set(), device=input_ids.device)


class StopWhere(StoppingCriteria):
    """Ends each sequence whose text `is_over`; for what transformers' own stop strings cannot tell apart."""

    def __init__(self, text_of: TextOf, is_over: Callable[[str], bool]) -> None:
        self._text_of, self._is_over = text_of, is_over
        self._rows: list[Spelling] = []
        self._seen = 0

    def __call__(self, input_ids: Tensor, scores: Any, **options: Any) -> Tensor:
        """bool [B]; called after every new token, first after the first."""
        if not self._rows:
            self._rows = [Spelling(self._text_of) for _ in range(input_ids.shape[0])]
            self._seen = input_ids.shape[1] - 1
        news = input_ids[:, self._seen :].tolist()
        self._seen = input_ids.shape[1]
        over = [self._is_over(row.add(new)) for row, new in zip(self._rows, news, strict=True)]
        return torch.tensor(over, device=input_ids.device)
