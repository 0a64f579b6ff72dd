"""An answer while it is generated: its tokens are split into reasoning, text and tool calls, and
read as an `Answer` in the end.

Streaming, stopping and the final answer all use it, so that they agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ragfuse.engine.options import ends_of
from ragfuse.engine.request import Request
from ragfuse.hf.handover import Detokenizer, StopFinder, resolve_option, stop_strings_of
from ragfuse.text.chat_template import Thoughts
from ragfuse.text.tool_calls import CallFormat, CallReader, stripped_end
from ragfuse.types.answer import Answer, Ended, Thought, Trace
from ragfuse.types.texts import partial_match


class Draft:
    """One answer, parsed as its token ids arrive.

    Stop strings end plain text only; tool calls, and text that follows a grammar, end by
    themselves.

    Args:
        request: The request that it answers.
        options: The options of `generate` that it is generated with.
        calls: The format of tool calls; None without tools.
        tags: The tags around reasoning; None where the model writes none.
        is_thinking: Whether the answer begins inside reasoning.

    Attributes:
        options: See above.
        ids: The ids before the end token.
        over: Whether the answer has ended; later ids are ignored.
    """

    def __init__(
        self,
        request: Request,
        options: Mapping[str, Any],
        calls: CallFormat | None,
        tags: Thoughts | None,
        is_thinking: bool,
    ) -> None:
        ask, model = request.ask, request.model
        self.options = options
        self.ids = list[int]()
        self.over = False
        self._request, self._must_call = request, request.must_call
        stops: tuple[str, ...] = ()
        if ask.grammar is None and not request.must_call:
            stops = *ask.stop, *stop_strings_of(ask.options, model)
        shown = *stops, *(calls.texts if calls is not None else ())
        self._detokenizer = Detokenizer.of(
            model.tokenizer, shown if tags is None else (*shown, tags.open, tags.close)
        )
        self._ends, self._stops = ends_of(model, ask.options), StopFinder(stops)
        self._end_ids: tuple[int, ...] = ()
        self._format, self._max_calls = calls, None if ask.parallel_tool_calls else 1
        self._reader = CallReader(calls, request.schemas) if calls is not None else None
        self._tags, self._is_thinking, self._is_complete = tags, is_thinking, False
        self._thought = self._text = (0, 0)  # characters lo:hi that are final
        self._taken = [0, 0]  # characters of reasoning and text that `take` has yielded

    def add(self, ids: Iterable[int]) -> None:
        """Parse the next generated ids."""
        for id in ids:
            if self.over:
                return
            if id in self._ends:
                self.over = True
                self._end_ids = (id,)
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

    def answer(self, trace: Trace) -> Answer:
        """Return the answer, which has ended."""
        ask, model = self._request.ask, self._request.model
        calls = () if self._reader is None else self._reader.calls[: self._max_calls]
        text = self._detokenizer.visible(*self._text)
        has_time_limit = bool(resolve_option("max_time", ask.options, model))
        is_short = len(self.ids) < self.options.get("max_new_tokens", 0) and not has_time_limit
        reason: Ended = "length"
        if (self.over or is_short) and (calls or not self._must_call):
            reason = "tool_calls" if calls else "stop"
        return Answer(
            text,
            tuple(self.ids),
            reason,
            trace,
            calls,
            self._detokenizer.visible(*self._thought),
            self._end_ids,
        )

    # inside

    def _read(self) -> None:
        """Find what of the text so far is reasoning, text and calls."""
        text = self._detokenizer.text
        if not self._must_call:
            begin = self._think(text) if self._tags is not None else 0
            if begin >= 0:
                self._write(text, begin)
        elif self._format is not None and (opening := self._format.opens(text)) >= 0:
            self._call(text, opening)

    def _think(self, text: str) -> int:
        """Find the reasoning at the start of the output. Return the offset where the answer's text
        begins, -1 while that is not known.

        Reasoning ends with its closing tag, or with a tool call where the tag is missing.
        """
        assert self._tags is not None
        lo, close, rest = 0, self._tags.close, text.lstrip()
        if not self._is_thinking:
            if not rest.startswith(self._tags.open):
                return -1 if self._tags.open.startswith(rest) and not self._is_complete else 0
            lo = len(text) - len(rest) + len(self._tags.open)
        lo = len(text) - len(text[lo:].lstrip())
        marker = self._format.marker if self._format is not None else ""
        closed, called = text.find(close, lo), text.find(marker, lo) if marker else -1
        ends = [at for at in (closed, called) if at >= 0]
        last = text[max(lo, len(text) - max(len(close), len(marker))) :]
        unsure = 0 if self._is_complete else partial_match(last, (close, marker))
        end = min(ends, default=len(text) - unsure)
        self._thought = lo, max(lo, stripped_end(text, lo, end))
        if not ends:
            return -1
        return called if end == called else len(text) - len(text[end + len(close) :].lstrip())

    def _write(self, text: str, lo: int) -> None:
        """Find the end of the text, which begins at `lo`: a stop string or a tool call."""
        format = self._format
        opening = format.opens(text, lo) if format is not None else -1
        hi = len(text) if opening < 0 else opening
        stop = self._stops.look(text, lo, hi)
        if stop >= 0:
            self.over, self._text = True, (lo, stop)
        elif opening >= 0 or self._is_complete:
            self._text = lo, hi
        else:
            undecided = format.undecided(text, lo) if format is not None else 0
            self._text = (
                lo,
                max(lo, self._text[1], hi - max(undecided, self._stops.possible_start(text, lo))),
            )
        if opening >= 0 > stop:
            self._call(text, opening)

    def _call(self, text: str, opening: int) -> None:
        """Read tool calls, at most `max_calls` of them; repeated calls end the answer."""
        assert self._reader is not None
        self._reader.read(text, opening)
        if self._reader.repeats or (
            self._max_calls is not None and len(self._reader.calls) >= self._max_calls
        ):
            self.over = True
