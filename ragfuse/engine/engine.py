"""The engine, the main class of the package. `Engine._run` shows the six stages of an answer, one file each."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from pathlib import Path

from ragfuse.engine.answer_stream import AnswerStream, answers_of
from ragfuse.engine.ask import Ask
from ragfuse.engine.background import BackgroundEncoder
from ragfuse.engine.constraints import Tool, offered_tools
from ragfuse.engine.decoder import Decoder
from ragfuse.engine.encoder import Encoder
from ragfuse.engine.ingest import Documents
from ragfuse.engine.machine_timings import MachineTimings
from ragfuse.engine.options import remaining_context
from ragfuse.engine.pending_saves import PendingSaves
from ragfuse.engine.placement import Placement
from ragfuse.engine.prefetch import Prefetcher
from ragfuse.engine.question import (
    ChatInput,
    Ids,
    Question,
    has_calls,
    is_ids,
    mended_content,
    mended_question,
    places_of,
    prompts_of,
    question_of,
)
from ragfuse.engine.request import Prefilled, Request, Say
from ragfuse.engine.runtime import Runtime, handed_over
from ragfuse.engine.schema_service import RegisteredSchema, SchemaService
from ragfuse.engine.stages import Stages
from ragfuse.engine.store_opener import open_catalog, opened
from ragfuse.engine.trace_builder import PreparedPrompt
from ragfuse.errors import StoreError, about
from ragfuse.fuse.fusor import LostRun
from ragfuse.hf.model import HFModel
from ragfuse.hf.scores import Score, scored
from ragfuse.hf.verify import Verdict
from ragfuse.load.link import Links
from ragfuse.measure import Progress
from ragfuse.models.dtypes import resolve_auto
from ragfuse.models.loader import Given, Tokens
from ragfuse.process.exit import EXITING, at_work
from ragfuse.process.shared import OneProcess, collect_notes, forget, shared
from ragfuse.process.worker import close_at_exit
from ragfuse.schemas.nodes import PMLPrompt, Schema
from ragfuse.sessions.conversation_index import ConversationIndex
from ragfuse.sessions.session_store import SessionStore
from ragfuse.settings import Settings
from ragfuse.store import KVStore, countdown
from ragfuse.store.codec_registry import CodecRegistry
from ragfuse.telemetry.counters import AnswerCounters
from ragfuse.telemetry.otel import answered, batched
from ragfuse.text.chat_messages import Content, Piece
from ragfuse.text.chat_template import ChatTemplate
from ragfuse.types.answer import Answer
from ragfuse.types.arguments import checks_arguments
from ragfuse.types.ingested import Ingested
from ragfuse.types.keys import ChunkKey
from ragfuse.types.model_card import ModelCard
from ragfuse.types.plan import LoadPlan
from ragfuse.types.profiles import MachineProfile, ModelProfile
from ragfuse.types.prompt import Prompt
from ragfuse.types.selection import known_policy
from ragfuse.types.whole_text import whole_text

__all__ = ["Ask", "Content", "Engine", "Ingested", "PreparedPrompt", "RegisteredSchema"]

MAX_BATCH_ANSWERS = 32
"""Answers of one batch that are generated at the same time. Each holds its prompt's KV; the next starts as one ends."""


def _ignore(*what: object) -> None:
    """Ignore progress."""


@checks_arguments
class Engine(OneProcess):
    """A model with a store of KV caches, which answers prompts and reuses the KV of their chunks. Thread-safe.

    The model is loaded at first use and shared by all engines of the process that name the same one.

    Args:
        settings: All settings; None: read from the environment and ragfuse.toml.
        model: A name, a folder, a GGUF file, or a loaded model: a `PreTrainedModel` with its `tokenizer`, a
            `pipeline`, a PEFT model. None: the model in the settings.
        store: An open store; None: the store in the settings.
        conversations: Which KV belongs to which conversation, for engines that share a request queue; None: a new
            index.
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
        given, chosen = handed_over(model, tokenizer, settings or Settings())
        self.settings = resolve_auto(chosen.usable())
        known_policy(self.settings.policy)
        self.catalog = open_catalog(self.settings, store)
        self.conversations = conversations if conversations is not None else ConversationIndex()
        codecs = CodecRegistry(self.catalog)
        self.store = opened(self.settings, store, codecs, self.conversations.evict(self.settings))
        codecs.tiers = self.store.tiers
        self._timings = MachineTimings(self.settings.tiers, self.catalog)
        placement = Placement(self.settings, self.store, self._timings)
        self.runtime = Runtime(self.settings, given, self.catalog, self.store, codecs, placement)
        known = self.runtime, self._timings, self.conversations
        self._stages = Stages.of(self.settings, self.catalog, self.store, *known)
        self._documents = Documents(self.settings, self.runtime, self.store, self.catalog, self._stages)
        self.counters = AnswerCounters(self._stages.remember.jobs, self.catalog)

    @staticmethod
    def shared(settings: Settings | None = None, model: Given = None, *, tokenizer: Tokens = None) -> Engine:
        """Return the process-wide engine for these settings and this model, made at the first call.

        It is closed when the process ends. After an earlier `close`, the next call makes a new engine.
        """
        given, chosen = handed_over(model, tokenizer, settings or Settings())
        settings = resolve_auto(chosen.usable())
        return shared(("engine", settings, given), partial(_closed_at_exit, settings, given))

    # one question, from its prompt to its answer

    def answer(
        self, prompt: Question | None = None, ask: Ask | None = None, *, pml: Path | str | None = None
    ) -> Answer:
        """Return the answer to a prompt, with a trace of what was reused.

        Args:
            prompt: A text, messages for the chat template, token ids, or a parsed prompt in PML.
            ask: Options of this answer; None: the settings apply.
            pml: Instead of `prompt`: PML text (starting with `<`), or the path of a PML file.

        Raises:
            OverlongError: The prompt does not fit the model's context.
            InputError: The prompt or an option is invalid.
        """
        self._check_open()
        return self._answer(self._request(question_of(prompt, pml), ask or Ask(), began_s=time.perf_counter()))

    def stream(
        self,
        prompt: Question | None = None,
        ask: Ask | None = None,
        *,
        pml: Path | str | None = None,
        prefilled: Prefilled = None,
        decoder: Decoder | None = None,
    ) -> AnswerStream:
        """Return an iterator over the answer's text as it is generated; arguments as for `answer`.

        `AnswerStream.answer` has the whole answer once the stream is read to its end.

        Args:
            prompt: As for `answer`.
            ask: As for `answer`.
            pml: As for `answer`.
            prefilled: Called with the prefilled prompt before its answer is generated; what it raises ends the stream.
            decoder: Another engine that writes the answer, as far as it can; None: this one does.
        """
        self._check_open()
        ask, question = ask or Ask(), question_of(prompt, pml)
        offered_tools(ask)  # raises for invalid tools here, not while the stream is read
        return AnswerStream(partial(self._say, question, ask, prefilled, decoder))

    def batch(
        self, prompts: Sequence[Question], ask: Ask | None = None, cancelled: threading.Event | None = None
    ) -> list[Answer]:
        """Return the answers to several prompts: each is prefilled by itself, all are decoded together.

        Each answer is the same as if it were asked alone, also with a seed.

        Args:
            prompts: As for `answer`.
            ask: Options of all answers; None: the settings apply.
            cancelled: Ends the generation of all answers once it is set.
        """
        self._check_open()
        return self._batch(prompts_of(prompts), ask or Ask(), cancelled or threading.Event())

    @answered
    def _answer(self, request: Request) -> Answer:
        with collect_notes() as unsaved:
            prompt = self._stages.build.build(request)
            return _with_unsaved(self._run(prompt, self._constrained(request)), unsaved)

    @at_work()
    def _run(self, prompt: Prompt, request: Request) -> Answer:
        """Run a built prompt through stages 2 to 6; `BuildStage`, the first, built it from the question."""
        stages = self._stages
        with self._prefilled(prompt, request) as prepared:
            if request.prefilled is not None:
                request.prefilled(prepared)
            stages.remember.begin(prepared, request)
            stages.generate.share(prepared, request)
        with stages.remember.begun(prepared, request):
            generated = stages.generate.generate(prepared, request)
            stages.remember.remember(prepared, generated, request)
        return generated.answer

    @contextmanager
    def _prefilled(self, prompt: Prompt, request: Request) -> Iterator[PreparedPrompt]:
        """Plan, fetch and prefill a prompt, and hold the model; again without an entry that turns out unreadable."""
        stages, began_s, lost = self._stages, time.perf_counter(), frozenset[int]()
        waits = request.ask.reuse and request.ask.deadline_s is None and not request.model.lock.is_mine
        with stages.prefixes.turn(prompt) if waits else nullcontext():
            while True:
                plan = stages.planner.plan(prompt, request, lost)
                with stages.fetch.fetch(plan, request) as fetched:
                    try:
                        prepared = stages.prefill.prefill(fetched, request)
                    except LostRun as error:
                        prompt, lost = plan.prompt, lost | {error.segment}
                        request = request.after(time.perf_counter() - began_s)
                        continue
                    yield prepared
                    return

    @batched
    def _batch(self, prompts: Sequence[Question], ask: Ask, cancelled: threading.Event) -> list[Answer]:
        began_s, stages = time.perf_counter(), self._stages
        with collect_notes() as unsaved:
            requests = [self._request(prompt, ask, ends=(cancelled,), began_s=began_s) for prompt in prompts]
            built = [stages.build.build(request) for request in requests]
            requests = [self._constrained(request) for request in requests]
            if len(built) < 2 or requests[0].model.lock.is_mine:
                answers = [self._run(prompt, request) for prompt, request in zip(built, requests, strict=True)]
            else:
                answers = self._run_in_parallel(built, requests, cancelled)
        return [_with_unsaved(answer, unsaved) for answer in answers]

    def _run_in_parallel(
        self, built: Sequence[Prompt], requests: Sequence[Request], cancelled: threading.Event
    ) -> list[Answer]:
        """Run prompts in parallel; the first failure ends the others and is raised."""
        failed = threading.Event()
        with ThreadPoolExecutor(min(len(built), MAX_BATCH_ANSWERS), "ragfuse-batch") as pool:
            futures = [
                pool.submit(
                    copy_context().run, self._run, prompt, replace(each, ends=(*each.ends, failed), has_company=True)
                )
                for prompt, each in zip(built, requests, strict=True)
            ]
            return answers_of(futures, failed)

    def _request(
        self,
        question: Question,
        ask: Ask,
        say: Say = None,
        ends: tuple[threading.Event, ...] = (),
        began_s: float = 0.0,
    ) -> Request:
        return Request(question, ask, self.runtime, began_s, say=say, ends=(*ends, EXITING))

    def _constrained(self, request: Request) -> Request:
        """Return the request with the constraints of its answer: tools, grammar, stop strings."""
        calls, constraints = self._stages.prompts.calls, self._stages.constraints
        is_after_calls = has_calls(request.question)
        return replace(request, constraints=constraints.compile(request.ask, request.model, calls, is_after_calls))

    def _say(
        self,
        question: Question,
        ask: Ask,
        prefilled: Prefilled,
        decoder: Decoder | None,
        say: Say,
        stop: threading.Event,
    ) -> Answer:
        request = self._request(question, ask, say, (stop,), time.perf_counter())
        return self._answer(replace(request, prefilled=prefilled, decoder=decoder))

    def check_length(self, prompt: Question, ask: Ask | None = None) -> None:
        """Raise OverlongError for a prompt that cannot fit the model's context, without tokenising it."""
        self._check_open()
        self._stages.build.check_length(prompt, ask or Ask())

    def plan(self, prompt: Question, ask: Ask | None = None) -> LoadPlan:
        """Return what would be read and computed for a prompt, and how long that would take, without doing it."""
        self._check_open()
        request = self._request(prompt, ask or Ask())
        return self._stages.planner.plan(self._stages.build.build(request), request)

    def prepare(self, prompt: Prompt, ask: Ask | None = None) -> PreparedPrompt:
        """Plan, load and prefill a prompt; raise OverlongError where it does not fit the model's context."""
        self._check_open()
        request = self._request((), ask or Ask())
        with self._prefilled(prompt, request) as prepared:
            return prepared

    @about("prompt")
    def prompt(self, prompt: Question, tools: Sequence[Tool] = (), ask: Ask | None = None) -> Prompt:
        """Return the tokens, chunks and positions of a prompt, without reusing the history of its conversation.

        Its chunks are all known ones that are found in its ids. The modules of a prompt in PML are at the positions of
        its schema.

        Args:
            prompt: A text, token ids, messages for the chat template, or a parsed prompt in PML.
            tools: Tools for the chat template.
            ask: Variables of the chat template, and the documents that the prompt may contain.
        """
        self._check_open()
        if isinstance(prompt, PMLPrompt):
            return self._stages.schemas.prompt(prompt, ask or Ask())
        return self._stages.prompts.prompt(mended_question(prompt), self.digest, tools, ask=ask)

    def count_tokens(self, prompt: Question, tools: Sequence[Tool] = ()) -> int:
        """Return the number of tokens of a prompt, with chat template and tools."""
        return len(self.prompt(prompt, tools))

    def pieces(self, content: Content) -> Sequence[Piece]:
        """Return a text, or the texts of a list, split into known chunks and fresh text; pieces in a list stay."""
        self._check_open()
        return self._stages.prompts.pieces(mended_content(content))

    def prefix(self, prompt: Question, ask: Ask | None = None) -> tuple[int, ...]:
        """Return the ids before the first chunk of a prompt, for `ingest(prefix=...)`; () where there are none."""
        first = self.prompt(prompt, ask=ask).segments[0]
        return first.tokens if first.kind == "prefix" else ()

    # documents, schemas, conversations

    def ingest(
        self,
        texts: Iterable[tuple[str, str]],
        prefix: Sequence[int] = (),
        progress: Callable[[Ingested], None] | None = None,
    ) -> Ingested:
        """Encode chunks and store their KV, except for those that are stored already.

        An interruption loses at most the current chunk; a second call continues where the first one stopped.

        Args:
            texts: (text, source) of each chunk.
            prefix: Ids that prompts begin with; their KV is stored too.
            progress: Called after each chunk with the totals so far.

        Returns:
            The totals: chunks, encoded chunks, tokens, bytes, seconds.
        """
        self._check_open()
        return self._documents.ingest(texts, prefix, progress)

    def register(
        self, schema: Schema | Path | str, progress: Callable[[Ingested], None] | None = None
    ) -> RegisteredSchema:
        """Register a schema (Prompt Cache) and encode its modules, for prompts in PML here and in later processes.

        `schemas` lists, shows and removes registered schemas.

        Args:
            schema: A parsed schema, PML text, or the path of a PML file.
            progress: Called after each module with the totals so far.
        """
        return self.schemas.register(schema, progress)

    @property
    def schemas(self) -> SchemaService:
        """The registered schemas, whose modules prompts in PML use."""
        self._check_open()
        return self._stages.schemas

    @property
    def sessions(self) -> SessionStore:
        """The stored conversations."""
        self._check_open()
        return self._stages.history.sessions

    @property
    def links(self) -> Links:
        """The network links to remote tiers, with their measured throughput."""
        return self._stages.links

    def know(self, texts: Iterable[tuple[str, str]]) -> None:
        """Recognise chunks, given as (text, source), in prompts from now on, without encoding them now.

        Chunks that a prompt contains are encoded after its answer. Meant for retrievers, which see chunks first.
        """
        self._check_open()
        self._documents.know(texts)

    def prefetch(self, texts: Iterable[str]) -> None:
        """Start copying the stored KV of these chunks to memory, for the next prompt.

        Returns at once and encodes nothing, but may load the model. A closed engine copies nothing.
        """
        self.runtime.check_process()
        self._stages.prefetcher.submit(texts)

    def expect(self, sessions: Iterable[str] | Mapping[str, float]) -> None:
        """Prefetch conversations that will continue soon into memory, as many as fit, and evict them last.

        Each call replaces the expectations of the one before. Returns at once, but may load the model.

        Args:
            sessions: Session names in the order in which they are expected; or names with numbers, the smallest first.
        """
        self._check_open()
        digest, places = self.digest, places_of(sessions)
        self.conversations.expect(digest, places)
        self._stages.prefetcher.look_ahead([(digest, name) for name in sorted(places, key=places.__getitem__)])

    def session_of(self, prompt: ChatInput | Ids, ask: Ask | None = None) -> str | None:
        """Return the name of the stored conversation that a prompt continues; None where there is none."""
        self._check_open()
        return self._stages.history.name_of(mended_question(prompt), ask or Ask())

    def forget(self, texts: Iterable[str]) -> int:
        """Delete this tenant's KV of these chunks from every tier, pinned or not, and return the bytes freed.

        The chunks, and passages learned from them, are no longer recognised in prompts. Copies in the memory of other
        processes stay.
        """
        self._check_open()
        return self._documents.forget(texts)

    def known_texts(self, source: str) -> list[str]:
        """Return the texts of known chunks from this source."""
        self._check_open()
        return self._stages.prompts.known_from(self.digest, whole_text(source))

    # the model, this machine, the store

    @property
    def model(self) -> HFModel:
        """The model, loaded at first use."""
        return self.runtime.model

    @property
    def card(self) -> ModelCard:
        """The model's name, window and limits, for programs that ask it; loads the model."""
        model = self.model
        has_template = bool(getattr(model.tokenizer, "chat_template", None))
        return ModelCard(
            self.settings.model, model.max_context, has_template, self.settings.max_tokens, model.profile.refusal
        )

    @property
    def digest(self) -> str:
        """The digest of model and tenant in every key (`ChunkKey.model`)."""
        return self.runtime.digest

    @property
    def encoder(self) -> Encoder:
        """The encoder that computes the KV of runs of tokens and stores it."""
        return self.runtime.encoder

    def key(self, tokens: Sequence[int], context: str = "") -> ChunkKey:
        """Return the key of a run of tokens; `context` as in `ChunkKey` ("": encoded alone)."""
        return self.encoder.key(tokens, context)

    def tokens(self, text: str, special: bool = False) -> list[int]:
        """Return the ids of a text in the middle of a prompt, without a BOS token.

        Args:
            text: The text.
            special: Whether special tokens written in the text become such tokens; else they stay plain text.
        """
        return self.model.tokens(text, special)

    def ids(self, prompt: Question) -> list[int]:
        """Return all ids of a prompt; raise OverlongError where it does not fit the model's context."""
        ids = [*prompt] if is_ids(prompt) else [*self.prompt(prompt).token_ids]
        remaining_context(len(ids), self.model)
        return ids

    def score(
        self, prompt: Question | Sequence[int], n_top: int = 0, check: Callable[[], object] = _ignore
    ) -> list[tuple[int, Score | None]]:
        """Return the ids of a prompt, each with its log probability given the ids before it; None for the first.

        The whole prompt is computed, nothing is reused.

        Args:
            prompt: A prompt, or its token ids.
            n_top: How many of the most likely alternatives to report for each id.
            check: Called between forward passes; it may raise to stop.

        Raises:
            OverlongError: The prompt does not fit the model's context.
        """
        self._check_open()
        ids = self.ids(prompt)
        return list(zip(ids, [None, *scored(self.model, ids, n_top, check)], strict=True))

    @property
    def template(self) -> ChatTemplate:
        """The variables that the model's chat template reads, and whether it separates reasoning from answers."""
        return self._stages.constraints.template(self.model)

    def verify(self, progress: Callable[[str], object] = _ignore) -> Verdict:
        """Check with the model's real weights that fusing is exact where it must be; the profile keeps the verdict."""
        self._check_open()
        return self.runtime.verify(progress)

    @property
    def profile(self) -> ModelProfile:
        """The model's profile: the one it came with, or one learned on this store."""
        return self.runtime.profile

    def learn(self, profile: ModelProfile | MachineProfile) -> None:
        """Use a new profile of the model or of this machine, here and in later processes on this store."""
        self._check_open()
        if isinstance(profile, MachineProfile):
            self._timings.learn(profile)
        else:
            self.runtime.learn(profile)

    def measure(self, stores: Sequence[str] = (), progress: Progress = _ignore) -> MachineProfile:
        """Time the model and the tiers on this machine and use the timings in all later plans.

        Args:
            stores: URLs of further tiers to time, besides those of the store.
            progress: Called with the current step and the share done, 0..1.
        """
        self._check_open()
        return self._timings.measure(self.model, self.store, self.settings, stores, progress)

    def flush(self) -> None:
        """Wait until all pending chunks are encoded and written, and all prefetches are done.

        A closed engine has none.
        """
        self.runtime.check_process()
        for part in self._background:
            part.flush()
        self.store.flush()

    def close(self, timeout_s: float | None = None) -> None:
        """Finish pending saves and close the store; what is asked from then on raises StoreError.

        Questions that began before are answered, and what they would save is left out.

        Args:
            timeout_s: Seconds after which the rest is not saved; None: no limit.
        """
        if self.runtime.is_forked:
            return  # all of it is the parent's
        self._is_closed = True
        forget(self)
        self.counters.close()
        remaining_s = countdown(timeout_s)
        for part in self._background:
            part.close(remaining_s())
        self._stages.prefixes.close()
        self.store.close(remaining_s())
        self.catalog.close()

    def _check_open(self) -> None:
        self.runtime.check_process()
        if self._is_closed:
            raise StoreError(
                "The engine is closed: close() was called, or its `with` block has ended. Ask it before that, or make "
                "a new Engine."
            )

    @property
    def _background(self) -> tuple[Prefetcher | BackgroundEncoder | PendingSaves, ...]:
        """The background workers, in the order in which each passes work to the next."""
        stages = self._stages
        return stages.prefetcher, stages.remember.jobs, stages.pending

    def __enter__(self) -> Engine:
        self._check_open()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(None if kind is None else 0.0)


def _with_unsaved(answer: Answer, unsaved: Sequence[str]) -> Answer:
    """Return the answer, with what could not be read or written in its trace."""
    return replace(answer, trace=replace(answer.trace, unsaved=tuple(unsaved))) if unsaved else answer


def _closed_at_exit(settings: Settings, model: Given) -> Engine:
    engine = Engine(settings, model)
    close_at_exit(engine)
    return engine
