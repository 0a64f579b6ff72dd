"""The parser of an answer while it is generated: it splits the tokens into reasoning, text and tool calls.

Streaming, stopping and the final answer all use it, so that they agree.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

from ragfuse.hf.stream import Detokenizer, StopFinder
from ragfuse.text.chat_template import Thoughts
from ragfuse.text.tool_calls import CallFormat, CallReader, stripped_end
from ragfuse.types.answer import Thought, ToolCall
from ragfuse.types.partial_match import partial_match

Phase = Literal["begin", "thought", "between", "text", "calls"]


class Draft:
    """One answer, parsed as its token ids arrive.

    Args:
        detokenizer: Decodes the ids.
        ends: Ids of end tokens.
        stops: Stop strings; they end text only.
        calls: The format of tool calls; None without tools.
        schemas: JSON schemas of the tools' arguments, by tool name.
        max_calls: Most tool calls; None for any number.
        must_call: Whether the answer consists of tool calls only.
        tags: The tags around reasoning; None for a model without.
        is_thinking: Whether the answer begins inside reasoning.

    Attributes:
        ids: The ids before the end token.
        end_ids: The end token, once it has come.
        over: Whether the answer has ended; later ids are ignored.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        ends: Sequence[int] = (),
        stops: Sequence[str] = (),
        calls: CallFormat | None = None,
        schemas: Mapping[str, str] | None = None,
        max_calls: int | None = None,
        must_call: bool = False,
        tags: Thoughts | None = None,
        is_thinking: bool = False,
    ) -> None:
        self.ids = list[int]()
        self.end_ids: tuple[int, ...] = ()
        self.over = False
        self._detokenizer, self._ends, self._stops = detokenizer, frozenset(ends), StopFinder(stops)
        self._format, self._max_calls, self._tags = calls, max_calls, tags
        self._reader = CallReader(calls, schemas or {}) if calls is not None else None
        self._phase: Phase = "calls" if must_call else "begin" if tags is not None else "text"
        self._is_thinking, self._is_complete = is_thinking, False
        self._seen = 0  # characters searched without a find
        self._thought = self._text = (0, 0)  # characters lo:hi that are final
        self._opening = -1
        self._taken = [0, 0]  # characters of reasoning and text that `take` has yielded

    @property
    def text(self) -> str:
        """The answer's text as far as it is final: more tokens will not change it."""
        return self._detokenizer.visible(*self._text)

    @property
    def reasoning(self) -> str:
        """The reasoning before the text, as far as it is final."""
        return self._detokenizer.visible(*self._thought)

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """All complete tool calls, each once; none in an answer that ended at a stop string."""
        return () if self._reader is None else self._reader.calls[: self._max_calls]

    def add(self, ids: Iterable[int]) -> None:
        """Parse the next generated ids."""
        for id in ids:
            if self.over:
                return
            if id in self._ends:
                self.over = True
                self.end_ids = (id,)
                return
            self.ids.append(id)
            self._detokenizer.add([id])
            self._read()

    def end(self) -> None:
        """Finish the answer: no more ids come, so all of it becomes final."""
        self._detokenizer.end()
        self._is_complete = True
        self._read()

    def take(self) -> Iterator[str | Thought]:
        """Yield the reasoning and text that became final since the last call."""
        (a, b), (lo, hi) = self._thought, self._text
        if piece := self._detokenizer.visible(max(a, self._taken[0]), b):
            self._taken[0] = b
            yield Thought(piece)
        if piece := self._detokenizer.visible(max(lo, self._taken[1]), hi):
            self._taken[1] = hi
            yield piece

    def copy(self) -> Draft:
        """Return an independent copy, as for another beam of the same answer."""
        new = copy.copy(self)
        new.ids, new._taken, new._detokenizer = list(self.ids), list(self._taken), self._detokenizer.copy()
        new._stops, new._reader = copy.copy(self._stops), copy.copy(self._reader)
        return new

    # inside

    def _read(self) -> None:
        text = self._detokenizer.text
        if self._phase == "begin":
            self._begin(text)
        if self._phase == "thought":
            self._think(text)
        if self._phase == "between":
            self._skip_space(text)
        if self._phase == "text":
            self._write(text)
        if self._phase == "calls":
            self._call(text)

    def _begin(self, text: str) -> None:
        """Find out whether the answer begins with reasoning."""
        assert self._tags is not None
        rest, open = text.lstrip(), self._tags.open
        start = len(text) - len(rest)
        if self._is_thinking or rest.startswith(open):
            self._phase, at = "thought", 0 if self._is_thinking else start + len(open)
            self._thought, self._seen = (at, at), at
        elif self._is_complete or not open.startswith(rest):
            self._phase = "text"

    def _think(self, text: str) -> None:
        """Look for the end of the reasoning: its closing tag, or a tool call made without closing it."""
        assert self._tags is not None
        lo, close = self._thought[0], self._tags.close
        if lo == self._thought[1]:
            while lo < len(text) and text[lo].isspace():
                lo += 1
        at = text.find(close, max(lo, self._seen - len(close) + 1))
        marker = self._format.marker if self._format is not None else ""
        called = text.find(marker, max(lo, self._seen - len(marker) + 1)) if marker else -1
        if called >= 0 and not 0 <= at < called:
            self._phase, end = "text", called
        elif at >= 0:
            self._phase, end = "between", at
        else:
            last = text[max(lo, len(text) - max(len(close), len(marker))) :]
            end = len(text) - (0 if self._is_complete else partial_match(last, (close, marker)))
        self._thought = lo, max(lo, stripped_end(text, lo, end))
        self._seen = len(text) if self._phase == "thought" else end
        if self._phase != "thought":
            start = end + len(close) if self._phase == "between" else end
            self._text, self._seen = (start, start), start

    def _skip_space(self, text: str) -> None:
        lo = self._text[0]
        while lo < len(text) and text[lo].isspace():
            lo += 1
        self._text, self._seen = (lo, lo), lo
        if lo < len(text):
            self._phase = "text"

    def _write(self, text: str) -> None:
        """Look for the end of the text: a stop string or a tool call."""
        lo, format = self._text[0], self._format
        opening = format.opens(text, lo, self._seen) if format is not None else -1
        hi = len(text) if opening < 0 else opening
        stop = self._stops.look(text, lo, hi)
        self._seen = len(text)
        if stop >= 0:
            self.over, self._text = True, (lo, stop)
        elif opening >= 0:
            self._phase, self._opening, self._text = "calls", opening, (lo, hi)
        elif self._is_complete:
            self._text = lo, hi
        else:
            undecided = format.undecided(text, lo) if format is not None else 0
            self._text = lo, max(self._text[1], hi - max(undecided, self._stops.possible_start(text, lo)))

    def _call(self, text: str) -> None:
        """Read tool calls, at most `max_calls` of them; repeated calls end the answer."""
        if self._reader is None or self._format is None:
            return
        if self._opening < 0:
            self._opening = self._format.opens(text, 0, self._seen)
            self._seen = len(text)
        if self._opening >= 0:
            self._reader.read(text, self._opening)
        if self._reader.repeats or (self._max_calls is not None and len(self._reader.calls) >= self._max_calls):
            self.over = True
