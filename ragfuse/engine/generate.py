"""Stage 4, generate: constrain, decode and parse an answer, and make the answer's trace.

Concurrent answers are decoded in one batch by `hf.decode`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any

from ragfuse.engine.prompt_builder import PromptBuilder
from ragfuse.engine.remember import missed
from ragfuse.engine.request import PreparedPrompt, Request, ends_of, generate_options, n_logits
from ragfuse.errors import InputError, about
from ragfuse.hf.cache import SharedSpan
from ragfuse.hf.grammar import GrammarCompiler, GrammarProcessor, held_schema
from ragfuse.hf.handover import (
    Detokenizer,
    Follower,
    StopFinder,
    generate,
    resolve_option,
    stop_strings_of,
)
from ragfuse.plan.explanation import segment_traces
from ragfuse.schemas.bind import SchemaUse
from ragfuse.telemetry.otel import span
from ragfuse.text.chat_template import Thoughts
from ragfuse.text.tool_calls import CallFormat, CallReader, stripped_end
from ragfuse.types.answer import Answer, Ended, SegmentTrace, Thought, Trace
from ragfuse.types.choices import LEVEL_NAMES
from ragfuse.types.grammar import Grammar
from ragfuse.types.prompt import Prompt
from ragfuse.types.texts import partial_match


class Draft:
    """An unfinished answer, which splits generated ids into reasoning, text and tool calls.

    Stop strings apply only to plain text. Tool calls and grammar-constrained text end where
    their syntax ends.

    Args:
        request: The request of the answer.
        options: The options for transformers' `generate`.
        calls: The format of tool calls; None if the answer cannot call tools.
        tags: The reasoning tags; None if the model has none.
        is_thinking: True if the answer starts inside reasoning.

    Attributes:
        options: The argument `options`.
        ids: The generated ids so far, without the end token.
        over: True if the answer has ended; later ids are ignored.
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
        self._thought = self._text = (0, 0)  # ranges lo:hi of final characters
        self._taken = [0, 0]  # ends of the reasoning and text that `take` yielded

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
        """Finish the answer: no more ids follow, so the whole text is final."""
        self._detokenizer.end()
        self._is_complete = True
        self._read()

    def take(self) -> Iterator[str | Thought]:
        """Yield the reasoning and text that became final since the previous call."""
        (a, b), (lo, hi) = self._thought, self._text
        if piece := self._detokenizer.visible(max(a, self._taken[0]), b):
            self._taken[0] = b
            yield Thought(piece)
        if piece := self._detokenizer.visible(max(lo, self._taken[1]), hi):
            self._taken[1] = hi
            yield piece

    def answer(self, trace: Trace) -> Answer:
        """Return the finished answer with its trace."""
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

    # internal

    def _read(self) -> None:
        """Split everything generated so far into reasoning, text and tool calls."""
        text = self._detokenizer.text
        if not self._must_call:
            begin = self._think(text) if self._tags is not None else 0
            if begin >= 0:
                self._write(text, begin)
        elif self._format is not None and (opening := self._format.opens(text)) >= 0:
            self._call(text, opening)

    def _think(self, text: str) -> int:
        """Find reasoning; return where the text after the reasoning begins, -1 if not known yet.

        Reasoning ends at the closing tag, or at a tool call if the closing tag is missing.
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
        """Find the end of the text that begins at `lo`: a stop string or a tool call."""
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
        """Parse the tool calls; the maximum number of calls or a repeated call ends the answer."""
        assert self._reader is not None
        self._reader.read(text, opening)
        if self._reader.repeats or (
            self._max_calls is not None and len(self._reader.calls) >= self._max_calls
        ):
            self.over = True


TAIL = 32
"""Number of tokens at a prompt's end that are searched for an opening reasoning tag."""


class ConstraintCompiler:
    """Compiles grammars and tools into constraints on an answer's tokens. Thread-safe.

    Args:
        prompts: Provides the model, and the chat template with its format of tool calls.
    """

    def __init__(self, prompts: PromptBuilder) -> None:
        self._prompts = prompts
        # one compiler is cached: a caller seldom changes the end tokens
        self._over = lru_cache(maxsize=1)(
            lambda model, ends: GrammarCompiler(model.tokenizer, n_logits(model), ends)
        )

    def draft(self, request: Request, prompt: Prompt) -> Draft:
        """Return an empty draft of the answer, constrained by the request's grammar and tools.

        Raises:
            InputError: The tools, the grammar or an option cannot be used, or the chat template
                does not read a variable in `chat_template_kwargs`.
        """
        ask, model, form = request.ask, request.model, request.ask.grammar
        template = self._prompts.template
        if ask.chat_template_kwargs and (name := template.unread(ask.chat_template_kwargs)):
            raise InputError(
                f"chat_template_kwargs has '{name:.40}', which the chat template of {model.name}"
                f" does not use. Use only {sorted(template.names)}.",
                "chat_template_kwargs",
            )
        thoughts, is_thinking = None, False
        # in all other cases, the answer has no reasoning
        if request.is_chat and form is None and not request.must_call:
            thoughts = template.thoughts
        if thoughts is not None:
            end = model.tokenizer.decode(list(prompt.token_ids[-TAIL:]), skip_special_tokens=False)
            is_thinking = thoughts.is_open(str(end))
        calls, rules = None, list[GrammarProcessor]()
        if form is not None or request.tools:
            grammars = self._over(model, ends_of(model, ask.options))
            # Answers that follow any other grammar are never parsed as tool calls.
            if form is None or (request.tools and form.kind == "json" and template.calls.marker):
                calls = template.calls
                tags = () if thoughts is None else (thoughts.open, thoughts.close)
                schemas = {name: held_schema(each) for name, each in request.schemas.items()}
                several = ask.parallel_tool_calls and ask.tool_choice not in schemas
                either = "" if form is None else held_schema(form.source)
                form = Grammar.lark(
                    calls.rules(
                        schemas, grammars.literal, not request.must_call, several, tags, either
                    )
                )
            with about("tools" if ask.grammar is None else "grammar"):
                rules.append(GrammarProcessor(grammars, form))
        options = generate_options(request, prompt.segments[-1].stop, rules)
        return Draft(request, options, calls, thoughts, is_thinking)


def trace_of(ready: PreparedPrompt, first_s: float | None) -> Trace:
    """Return the trace of an answer that ends now.

    Args:
        ready: The prefilled prompt.
        first_s: `time.perf_counter()` at the answer's first token; None if no token was generated.
    """
    request, plan, prefill, now_s = ready.request, ready.plan, ready.prefill, time.perf_counter()
    began_s, prompt, forecast = request.began_s, plan.prompt, plan.forecast
    rows = tuple(prefill.chosen.tolist())
    segments = tuple(segment_traces(plan, rows))
    if prefill.n_before:
        known = SegmentTrace(
            "",
            "prefix",
            prefill.n_before,
            0,
            True,
            "memory",
            LEVEL_NAMES[0],
            exact=True,
            encoded="alone",
        )
        segments = (
            known,
            *(each for each in segments if each.start + each.n_tokens > prefill.n_before),
        )
    hits = Counter[str]()
    for each in segments:
        hits[each.kind] += each.n_tokens if each.hit else 0
    cached = hits.total()
    blended = (s.n_tokens for s in segments if s.hit and s.kind == "chunk" and not s.exact)
    recomputed = round(prefill.mean_ratio * sum(blended))
    use, read = prompt.schema_use, {fetch.key for fetch in plan.fetches}
    modules = use.modules if isinstance(use, SchemaUse) else ()
    return Trace(
        model=request.model.name,
        policy=plan.policy,
        ratio=plan.ratio,
        tokens=len(prompt),
        tokens_reused=cached - recomputed,
        tokens_recomputed=recomputed,
        tokens_fresh=len(prompt) - cached,
        mean_ratio=prefill.mean_ratio,
        nbytes=sum(s.nbytes for s in segments),
        load_s=ready.load_s,
        compute_s=ready.compute_s,
        prefill_s=ready.wait_s + ready.compute_s,
        ttft_s=(first_s or now_s) - began_s,
        deadline_s=request.ask.deadline_s,
        total_s=now_s - began_s,
        fallback_reason=plan.fallback_reason,
        segments=segments,
        recomputed_rows=rows,
        predicted_ttft_s=forecast.ttft_s if forecast is not None else None,
        predicted_load_s=forecast.load_s if forecast is not None else None,
        stream=ready.stream,
        session=prompt.conversation.id if prompt.conversation is not None else "",
        truncated=prompt.truncated,
        schema=use.schema if isinstance(use, SchemaUse) else "",
        modules=tuple(path for path, key in modules if key in read),
        tokens_prefix=hits["prefix"],
        tokens_chunks=hits["chunk"] - recomputed,
        tokens_to_encode=sum(len(each.tokens) for each in missed(plan)),
    )


def share(prepared: PreparedPrompt) -> None:
    """Let concurrently decoded answers share one copy of the KV of modules and prefixes."""
    request, cache, plan = prepared.request, prepared.prefill.cache, prepared.plan
    runtime, wiring = request.runtime, request.model.shared_wiring
    if not runtime.settings.share or not (request.has_company or request.model.batcher.active):
        return
    if cache is None or wiring is None or plan.fallback_reason or prepared.stream is not None:
        return
    spans = []
    for fetch in plan.fetches:
        segment, (lo, hi) = plan.prompt.segments[fetch.segment], plan.prompt.spans[fetch.segment]
        if segment.kind in ("module", "prefix"):
            spans.append(SharedSpan(lo, hi, (fetch.key, fetch.level, segment.rows, segment.shift)))
    runtime.shared_kv.share(cache, sorted(spans, key=lambda span: span.lo), wiring.windows)


def generated(prepared: PreparedPrompt, draft: Draft) -> tuple[Answer, list[int]]:
    """Decode the answer, streaming to `request.say`; return the answer and all generated ids."""
    request = prepared.request
    follower = Follower(draft, request.say, request.ends)
    with span("decode"):
        ids = generate(request.model, prepared.prefill, draft.options, [follower], request.ask.seed)
        follower.end()
    return draft.answer(trace_of(prepared, follower.first_s)), ids
