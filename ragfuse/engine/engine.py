"""`Engine` answers prompts in five stages: build, plan, prefill, generate, remember."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast

from ragfuse.engine.answer_stream import AnswerStream, answers_of
from ragfuse.engine.ask import (
    Ask,
    Ids,
    Question,
    mended_documents,
    prompts_of,
    question_of,
    texts_of,
)
from ragfuse.engine.build import ConversationHistory, build, check_fits
from ragfuse.engine.generate import ConstraintCompiler, generated, share
from ragfuse.engine.prefill import PrefillStage
from ragfuse.engine.prefix_cache import PrefixCache
from ragfuse.engine.prompt_builder import PromptBuilder
from ragfuse.engine.remember import Prefetcher, RememberStage
from ragfuse.engine.request import OnPrepared, PreparedPrompt, Request, Say, Tool
from ragfuse.engine.runtime import Runtime, handed_over, ids_of
from ragfuse.engine.schema_service import RegisteredSchema, SchemaService
from ragfuse.errors import StoreError, about
from ragfuse.hf.model import HFModel
from ragfuse.models.loader import Given, Tokens
from ragfuse.process.jobs import BackgroundJobs, at_work, countdown
from ragfuse.process.shared import OneProcess, collect_notes, forget, shared
from ragfuse.schemas.nodes import PMLPrompt
from ragfuse.sessions.session_store import ConversationIndex
from ragfuse.settings import Settings
from ragfuse.store import KVStore
from ragfuse.store.deletion import chunk_of, forget_chunks
from ragfuse.store.radix import holds
from ragfuse.telemetry.metrics import AnswerCounters
from ragfuse.telemetry.otel import counted
from ragfuse.text.chat_messages import Content
from ragfuse.types.answer import Answer, Ingested, ModelCard
from ragfuse.types.arguments import checks_arguments
from ragfuse.types.plan import LoadPlan
from ragfuse.types.prompt import Prompt
from ragfuse.types.texts import whole_text

__all__ = ["Ask", "Content", "Engine", "Ingested", "PreparedPrompt", "RegisteredSchema"]

log = logging.getLogger("ragfuse.engine")

MAX_BATCH_ANSWERS = 32
"""Maximum answers of a batch that are decoded at once. Each needs memory for a prompt's KV."""


@checks_arguments
class Engine(OneProcess):
    """Answers prompts with one model, and reuses stored KV of the chunks in the prompts.

    Thread-safe. The model is loaded on first use. Engines in one process that use the same model
    share one copy of the model.

    Args:
        settings: All settings. None means to read the environment and ragfuse.toml.
        model: A name, a folder, a GGUF file, or a loaded model: a `PreTrainedModel` with its
            `tokenizer`, a `pipeline` or a PEFT model. None means the model in the settings.
        store: An open store. None means to open the store in the settings.
        conversations: The index from KV keys to conversations. Engines that share a request queue
            share an index. None means a new index.
        tokenizer: The tokenizer of a loaded model.
    """

    _is_closed = False

    def __init__(
        self,
        settings: Settings | None = None,
        model: Given = None,
        store: KVStore | None = None,
        conversations: ConversationIndex | None = None,
        *,
        tokenizer: Tokens = None,
    ) -> None:
        given, self.settings = handed_over(model, tokenizer, settings)
        self._process = os.getpid()
        self.conversations = conversations if conversations is not None else ConversationIndex()
        self.runtime = runtime = Runtime(self.settings, given, store, self.conversations)
        self.catalog, self.store, self.timings = runtime.catalog, runtime.store, runtime.timings
        self.prompts, self.prefixes = PromptBuilder(runtime), PrefixCache(runtime)
        self.constraints = ConstraintCompiler(self.prompts)
        self.schemas = SchemaService(self.prompts)
        self.history = ConversationHistory(self.prompts, self.prefixes)
        self.sessions = self.history.sessions
        self.prefetcher = Prefetcher(runtime)
        self._prefill = PrefillStage(runtime, self.prefixes, self.prefetcher)
        self._remember = RememberStage(self.prompts, self.history, self.prefixes, self.prefetcher)
        self.counters = AnswerCounters(lambda: len(runtime.jobs), lambda: runtime.catalog.failures)

    @staticmethod
    def shared(
        settings: Settings | None = None, model: Given = None, *, tokenizer: Tokens = None
    ) -> Engine:
        """Return the engine that this process shares for the same settings and model.

        Pending saves are finished when the process ends. After `close`, the next call returns a new
        engine.
        """
        given, settings = handed_over(model, tokenizer, settings)
        return shared(("engine", settings, given), partial(Engine, settings, given))

    # one question, from its prompt to its answer

    def answer(
        self,
        prompt: Question | None = None,
        ask: Ask | None = None,
        *,
        pml: Path | str | None = None,
    ) -> Answer:
        """Return the answer to a prompt, with a trace of what was reused.

        Args:
            prompt: A text, messages for the chat template, token ids, or a parsed prompt in PML.
            ask: Options of this answer. None means that the settings apply.
            pml: PML text (starting with `<`) or the path of a PML file, instead of `prompt`.

        Raises:
            OverlongError: The prompt does not fit the model's context.
            InputError: The prompt or an option is invalid.
        """
        self._check_open()
        return self._answer(Request.of(question_of(prompt, pml), ask, self.runtime))

    def stream(
        self,
        prompt: Question | None = None,
        ask: Ask | None = None,
        *,
        pml: Path | str | None = None,
        on_prepared: OnPrepared = None,
    ) -> AnswerStream:
        """Return an iterator that yields the answer's text during generation.

        `AnswerStream.answer` waits for the end and returns the whole answer. `stream` takes the
        arguments of `Engine.answer`, and `on_prepared`.

        Args:
            on_prepared: Called with the prefilled prompt before the answer is generated. An
                exception in this function ends the stream.
        """
        self._check_open()
        request = replace(
            Request.of(question_of(prompt, pml), ask, self.runtime), on_prepared=on_prepared
        )
        return AnswerStream(partial(self._say, request))

    def batch(
        self,
        prompts: Sequence[Question],
        ask: Ask | None = None,
        cancelled: threading.Event | None = None,
    ) -> list[Answer]:
        """Return the answers to several prompts, prefilled one by one and decoded together.

        Each answer equals the answer of a separate call, even with a seed.

        Args:
            ask: Options of all answers. None means that the settings apply.
            cancelled: An event. Setting the event stops the generation of all answers.
        """
        self._check_open()
        failed, ask = threading.Event(), ask or Ask()
        ends = failed, cancelled or threading.Event()
        requests = [Request.of(prompt, ask, self.runtime, *ends) for prompt in prompts_of(prompts)]
        with counted("batch", self, ask) as answers, collect_notes() as unsaved:
            if len(requests) < 2 or self.model.lock.is_mine:
                found = [self._run(request) for request in requests]
            else:
                together = [replace(request, has_company=True) for request in requests]
                with ThreadPoolExecutor(
                    min(len(requests), MAX_BATCH_ANSWERS), "ragfuse-batch"
                ) as pool:
                    found = answers_of(
                        [pool.submit(copy_context().run, self._run, each) for each in together],
                        failed,
                    )
            answers += [_with_unsaved(answer, unsaved) for answer in found]
        return answers

    def _answer(self, request: Request) -> Answer:
        streams = request.say is not None
        with counted("answer", self, request.ask, streams) as answers, collect_notes() as unsaved:
            answers.append(_with_unsaved(self._run(request), unsaved))
        return answers[0]

    @at_work()
    def _run(self, request: Request) -> Answer:
        prompt = build(request, self.history, self.schemas)
        draft = self.constraints.draft(request, prompt)
        with self._prefill.prepared(prompt, request) as prepared:
            if request.on_prepared is not None:
                request.on_prepared(prepared)
            self._remember.begin(prepared)
            share(prepared)
        answer, ids = generated(prepared, draft)
        self._remember.remember(prepared, answer, ids)
        return answer

    def _say(self, request: Request, say: Say, stop: threading.Event) -> Answer:
        return self._answer(replace(request, say=say, ends=(*request.ends, stop)))

    def plan(self, prompt: Question, ask: Ask | None = None) -> LoadPlan:
        """Return the plan of a prompt: what is read and computed, and the predicted time."""
        self._check_open()
        request = Request.of(prompt, ask, self.runtime)
        return self._prefill.plan(build(request, self.history, self.schemas), request)

    def prepare(self, prompt: Prompt, ask: Ask | None = None) -> PreparedPrompt:
        """Plan, load and prefill a prompt; raise OverlongError if it exceeds the context."""
        self._check_open()
        request = Request.of(prompt.token_ids, ask, self.runtime)
        check_fits(prompt, request)
        with self._prefill.prepared(prompt, request) as prepared:
            return prepared

    @about("prompt")
    def prompt(
        self, prompt: Question, tools: Sequence[Tool] = (), ask: Ask | None = None
    ) -> Prompt:
        """Return the tokens, chunks and positions of a prompt, without a session's earlier turns.

        All known chunks that occur in the prompt's token ids are marked. The modules of a PML
        prompt have their schema positions.

        Args:
            prompt: A text, token ids, messages for the chat template, or a parsed prompt in PML.
            tools: Tools for the chat template.
            ask: Variables of the chat template, and the documents that the prompt may contain.
        """
        self._check_open()
        request = Request.of(prompt, replace(ask or Ask(), tools=tools), self.runtime)
        if isinstance(prompt, PMLPrompt):
            return self.schemas.prompt(prompt, request.ask)
        return self.prompts.prompt(request)

    def count_tokens(self, prompt: Question, tools: Sequence[Tool] = ()) -> int:
        """Return the number of tokens of a prompt, including chat template and tools."""
        return len(self.prompt(prompt, tools))

    def prefix(self, prompt: Question, ask: Ask | None = None) -> tuple[int, ...]:
        """Return the token ids before a prompt's first chunk, to pass to `ingest` as `prefix`.

        Return () if the prompt has no chunk, or fewer than `min_chunk_tokens` ids before the chunk.
        """
        first = self.prompt(prompt, ask=ask).segments[0]
        return first.tokens if first.kind == "prefix" else ()

    # documents, schemas, conversations

    def ingest(
        self,
        texts: Iterable[tuple[str, str]],
        prefix: Sequence[int] = (),
        progress: Callable[[Ingested], None] | None = None,
    ) -> Ingested:
        """Encode chunks and store their KV; chunks whose KV is already stored are skipped.

        If a call is interrupted, call again: at most one chunk is encoded a second time.

        Args:
            texts: (text, source) of each chunk.
            prefix: Token ids that prompts begin with. The KV of this prefix is stored too.
            progress: Called after each chunk with the totals so far.

        Returns:
            The totals: chunks, encoded chunks, tokens, bytes, seconds.
        """
        self._check_open()
        began, done = time.perf_counter(), Ingested()
        encoder, model = self.runtime.encoder, self.model
        if prefix:
            with at_work():
                encoder.keep_prefix(prefix)
            self.catalog.protect(str(encoder.key(prefix)))
        for text, source in mended_documents(texts):
            text = text.strip()
            with at_work():  # per chunk: the process's end waits for one chunk, not for all
                ids = ids_of(text, model)
                is_long = model.max_context is not None and len(ids) > model.max_context
                if is_long or (text and not ids):
                    log.warning(
                        "A text of '%s' exceeds the context of %s and is left out. Split the text.",
                        source,
                        model.name,
                    )
                    done = replace(done, left_out=(*done.left_out, source))
                    continue
                nbytes = encoder.keep_chunk(ids)
                if len(ids) >= encoder.shortest:
                    self.prompts.note(text, source, ids, must=True)
            done = done.plus(
                len(ids), nbytes, time.perf_counter() - began, len(ids) < encoder.shortest
            )
            if progress is not None:
                progress(done)
        return done

    def know(self, texts: Iterable[tuple[str, str]]) -> None:
        """Register (text, source) chunks to be recognised in later prompts; encode nothing now.

        When a prompt contains such a chunk, the chunk is encoded after the answer. Retrievers can
        call this for the chunks that they return.
        """
        self._check_open()
        for text, source in mended_documents(texts):
            text = text.strip()
            ids = ids_of(text, self.model)
            if len(ids) >= self.settings.min_chunk_tokens and not self.prompts.knows(text, ids):
                self.prompts.note(text, source, ids)

    def prefetch(self, texts: Iterable[str]) -> None:
        """Start copying the stored KV of these chunks to memory, for the next prompt.

        The call returns at once and encodes nothing, but may load the model. A closed engine copies
        nothing.
        """
        self._check_process()
        self.prefetcher.submit(texts)

    def expect(self, sessions: Iterable[str] | Mapping[str, float]) -> None:
        """Prefetch the KV of sessions that will continue soon.

        The eviction policy "look-ahead" also evicts this KV last. As many sessions are prefetched
        as fit into memory. Each call replaces the sessions of the previous call. The call returns
        at once, but may load the model.

        Args:
            sessions: Session names in the order in which the sessions will continue, or a mapping
                from session name to queue position. The lowest position is first.
        """
        self._check_open()
        digest, places = self.digest, sessions
        if not isinstance(places, Mapping):
            places = {name: place for place, name in enumerate(texts_of(places))}
        self.conversations.expect(digest, places)
        self.prefetcher.look_ahead(
            [(digest, name) for name in sorted(places, key=places.__getitem__)]
        )

    def forget(self, texts: Iterable[str]) -> int:
        """Delete this tenant's KV of these chunks from every tier; return the bytes freed.

        These chunks, and passages learned from them, are no longer recognised in prompts. Copies of
        the KV in the memory of other processes remain.
        """
        self._check_open()
        runtime, texts = self.runtime, [whole_text(text).strip() for text in texts_of(texts)]
        runs = {tuple(self.model.tokens(text)) for text in texts}
        runtime.jobs.cancel(lambda ids: any(holds(cast(Ids, ids), run) for run in runs))
        self.prefixes.forget(runs)
        runs |= self.prompts.forget(texts)
        chunks = {chunk_of(runtime.encoder.key(run)) for run in runs}
        return forget_chunks(self.store, self.catalog.strict, chunks).nbytes

    # model, machine, store

    @property
    def model(self) -> HFModel:
        """The model, loaded on first use."""
        return self.runtime.model

    @property
    def card(self) -> ModelCard:
        """The model's name, context length and limits, for client programs. Loads the model."""
        model = self.model
        return ModelCard(
            self.settings.model,
            model.max_context,
            bool(self.prompts.template.source),
            self.settings.max_tokens,
            model.profile.refusal,
        )

    @property
    def digest(self) -> str:
        """The digest of model and tenant that is part of every key (`ChunkKey.model`)."""
        return self.runtime.digest

    def tokens(self, text: str, special: bool = False) -> list[int]:
        """Return the token ids that a text has inside a prompt, without a BOS token.

        Args:
            text: The text.
            special: True to parse a special token's name in the text as that special token. False
                to tokenise the name as plain text.
        """
        return self.model.tokens(text, special)

    def flush(self) -> None:
        """Wait until all background work is done: prefetching, encoding and saving.

        Returns at once if the engine is closed.
        """
        self._check_process()
        for part in self._background:
            part.flush()
        self.store.flush()

    def close(self, timeout_s: float | None = None) -> None:
        """Finish pending saves and close the store. Later calls raise StoreError.

        Answers in progress are completed, but their KV and turns are not saved.

        Args:
            timeout_s: Seconds after which pending saves are dropped. None means no limit.
        """
        if self._process != os.getpid():
            return  # a forked child: everything belongs to the parent
        self._is_closed = True
        forget(self)
        self.counters.at_close.close()
        remaining_s = countdown(timeout_s)
        for part in self._background:
            part.close(remaining_s())
        self.prefixes.close()
        self.store.close(remaining_s())
        self.catalog.close()

    def _check_process(self) -> None:
        if self._process != os.getpid():
            raise StoreError(
                "This engine was created before fork(). Use spawn, or create an engine per worker."
            )

    def _check_open(self) -> None:
        self._check_process()
        if self._is_closed:
            raise StoreError(
                "The engine is closed: close() was called, or its `with` block ended. Create"
                " another engine."
            )

    @property
    def _background(self) -> tuple[BackgroundJobs, ...]:
        """The queues of background jobs, in the order in which they are flushed and closed."""
        return self.prefetcher.jobs, self.runtime.jobs, self.runtime.saves

    def __enter__(self) -> Engine:
        self._check_open()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(None if kind is None else 0.0)


def _with_unsaved(answer: Answer, unsaved: Sequence[str]) -> Answer:
    return (
        replace(answer, trace=replace(answer.trace, unsaved=tuple(unsaved))) if unsaved else answer
    )
