"""From a prompt to its answer: prefilled under the model's lock, decoded beside others, read.

An answer is written in the thread that asks for it; the answers of a batch, each in a thread of its own. What of them
is computed together is told by `hf.decode`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextvars import copy_context
from dataclasses import dataclass, field, replace

from ragfuse.engine.answer_stream import Enough
from ragfuse.engine.constraints import Reply
from ragfuse.engine.history import Conversations
from ragfuse.engine.kv_streamer import Bringer, Brought
from ragfuse.engine.options import Ask, is_streamable, options_of
from ragfuse.engine.planner import Planner
from ragfuse.engine.prefill import Prefiller
from ragfuse.engine.prefix_cache import PrefixCache
from ragfuse.engine.trace_builder import Ready, trace_of
from ragfuse.errors import InputError
from ragfuse.hf.common import Common, Span
from ragfuse.hf.handover import generate, sharing
from ragfuse.hf.model import HFModel
from ragfuse.hf.stream import StopWhen
from ragfuse.settings import Settings
from ragfuse.telemetry.otel import span
from ragfuse.types.answer import Answer, Thought, Trace
from ragfuse.types.profiles import ModelProfile
from ragfuse.types.prompt import Prompt

AT_ONCE = 32
"""Answers of one batch that are written at the same time: each holds its prompt's KV; the next begins as one ends."""

Say = Callable[[str | Thought], None] | None


@dataclass(frozen=True)
class Asked:
    """How a prompt is to be answered, and since when: `time.perf_counter()`. is_chat: a chat template wrote it."""

    ask: Ask
    reply: Reply
    profile: ModelProfile
    began_s: float
    is_chat: bool = True


@dataclass(frozen=True)
class Answerer:
    """Writes an engine's answers. `saves` hears of every prompt that was answered."""

    settings: Settings
    planner: Planner
    prefiller: Prefiller
    bringer: Bringer
    talks: Conversations
    prefixes: PrefixCache
    saves: Callable[[Ready, Ask], None]
    common: Common = field(default_factory=Common)

    def one(self, prompt: Prompt, asked: Asked, say: Say, gone: threading.Event) -> Answer:
        """The answer to a prompt, said while it is written; once `gone` is set, no further.

        InputError where it was set before the answer began.
        """
        with self.bringer.all([prompt], asked.ask, asked.reply.model, asked.profile) as (brought,):
            return self._write(prompt, brought, asked, say, [gone])

    def all(self, prompts: Sequence[Prompt], asked: Sequence[Asked], gone: threading.Event) -> list[Answer]:
        """The answers to one prompt or more, asked in one way; what fails for one ends the others, and is raised."""
        model = asked[0].reply.model
        with self.bringer.all(prompts, asked[0].ask, model, asked[0].profile) as brought:
            given = list(zip(prompts, brought, asked, strict=True))
            if len(given) < 2 or model.lock.is_mine:
                return [self._write(prompt, came, how, None, [gone]) for prompt, came, how in given]
            failed = threading.Event()
            with ThreadPoolExecutor(min(len(given), AT_ONCE), "ragfuse-batch") as pool:
                ends = [gone, failed]
                futures = [
                    pool.submit(copy_context().run, self._write, prompt, came, how, None, ends, True)
                    for prompt, came, how in given
                ]
                return _results(futures, failed)

    def _write(
        self,
        prompt: Prompt,
        brought: Brought | None,
        asked: Asked,
        say: Say,
        ends: Sequence[threading.Event],
        several: bool = False,
    ) -> Answer:
        """several: others are about to be written beside it."""
        reply = asked.reply
        known = asked.ask, reply.model, asked.profile, brought
        with self.prefiller.turn(prompt, *known) as ahead:
            if any(end.is_set() for end in ends):
                raise InputError("The stream was closed before its answer began.")
            ready = self.prefiller.prepare(prompt, *known, ahead)
            if brought is not None:
                brought.close()
            self.talks.begin([ready], asked.ask)
            if asked.ask.reuse:
                self.prefixes.begin(ready)
            if self.settings.share and (several or reply.model.batcher.active):
                self._share(ready, reply.model)
        try:
            return self._decoded(ready, asked, say, ends)
        finally:
            self.talks.end([ready])

    def _decoded(self, ready: Ready, asked: Asked, say: Say, ends: Sequence[threading.Event]) -> Answer:
        ask, reply = asked.ask, asked.reply.behind(ready.plan.prompt.token_ids, asked.is_chat)
        options = options_of(ask, self.settings, ready.room)
        sink = reply.sink(say, options)
        streamer = sink if is_streamable(options, reply.model) else None
        stopping = [*map(StopWhen, ends), *reply.stopping(options)]
        with span("decode"):
            rows = generate(reply.model, ready.prefill, reply.options(options), streamer, stopping, ask.seed)
        self.saves(ready, ask)
        answer = reply.read(rows[0], options, self._traced(ready, asked, sink.first_s))
        if not any(map(_is_gone, ends)):
            self.talks.after([ready], rows[:1], [answer], ask)
            if ask.reuse:
                self.prefixes.after(ready, rows[0])
        if streamer is None and say is not None:
            if answer.reasoning:
                say(Thought(answer.reasoning))
            say(answer.text)
        return answer

    def _share(self, ready: Ready, model: HFModel) -> None:
        """Let modules stand in memory once for all answers that are being written."""
        (cache, wiring), plan = sharing(model, ready.prefill), ready.plan
        if cache is None or wiring is None or plan.refusal or ready.stream is not None:
            return
        spans = []
        for fetch in plan.fetches:
            segment, (lo, hi) = plan.prompt.segments[fetch.segment], plan.prompt.spans[fetch.segment]
            if segment.kind in ("module", "prefix"):
                spans.append(Span(lo, hi, (fetch.key, fetch.level, segment.rows, segment.turn)))
        self.common.share(cache, sorted(spans, key=lambda span: span.lo), wiring.windows)

    def _traced(self, ready: Ready, asked: Asked, first_s: float | None) -> Trace:
        timing = replace(ready.timing, began_s=asked.began_s)
        trace = trace_of(ready, timing, first_s, time.perf_counter(), asked.reply.model.name)
        return replace(trace, promoted=self.planner.take_promoted())


def _is_gone(end: threading.Event) -> bool:
    """Whether nobody reads the answer that this ends; one that is only enough is kept as far as it was written."""
    return end.is_gone if isinstance(end, Enough) else end.is_set()


def _results(futures: Sequence[Future[Answer]], failed: threading.Event) -> list[Answer]:
    """Of all; where one fails, or the wait is broken off, the others end too."""
    try:
        done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        for future in done:
            future.result()
        return [future.result() for future in futures]
    except BaseException:
        failed.set()
        raise
