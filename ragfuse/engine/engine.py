"""The engine: what users meet. `_run` shows the six stages from a question to its answer, one file each."""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from pathlib import Path

from ragfuse.engine.answer_stream import AnswerStream
from ragfuse.engine.background import EXIT_S, BackgroundEncoder
from ragfuse.engine.constraints import Tool, offered_tools
from ragfuse.engine.encoder import Encoder, Ingested
from ragfuse.engine.history import ConversationHistory
from ragfuse.engine.ingest import Documents
from ragfuse.engine.machine_timings import MachineTimings
from ragfuse.engine.options import Ask, known_policy, remaining_context
from ragfuse.engine.placement import Placement
from ragfuse.engine.prefetch import Prefetcher
from ragfuse.engine.prefix_cache import PrefixCache
from ragfuse.engine.question import ChatInput, Ids, Question, is_ids, mended_content, mended_question, question_of
from ragfuse.engine.request import Request, Say
from ragfuse.engine.runtime import Runtime, handed_over
from ragfuse.engine.schema_service import RegisteredSchema, SchemaService
from ragfuse.engine.stages import Stages
from ragfuse.engine.store_opener import open_catalog, opened
from ragfuse.engine.trace_builder import PreparedPrompt
from ragfuse.hf.model import HFModel
from ragfuse.hf.scores import Score, scored
from ragfuse.hf.verify import Verdict
from ragfuse.load.link import Links
from ragfuse.measure import Progress
from ragfuse.models.dtypes import settled
from ragfuse.models.loader import Given, Tokens
from ragfuse.process.shared import forget, noting, shared
from ragfuse.schemas.nodes import PMLPrompt, Schema
from ragfuse.sessions.conversation_index import ConversationIndex
from ragfuse.sessions.session_store import SessionStore
from ragfuse.settings import Settings
from ragfuse.store import KVStore, countdown
from ragfuse.store.codec_registry import CodecRegistry
from ragfuse.telemetry.counters import AnswerCounters
from ragfuse.telemetry.otel import answered, batched
from ragfuse.text.chat_messages import Content
from ragfuse.text.chat_template import ChatTemplate
from ragfuse.text.chunks import KnownChunks, Marker, Piece
from ragfuse.types.answer import Answer
from ragfuse.types.keys import ChunkKey, whole_text
from ragfuse.types.plan import LoadPlan
from ragfuse.types.profiles import MachineProfile, ModelProfile
from ragfuse.types.prompt import Prompt

__all__ = ["Ask", "Content", "Engine", "Ingested", "PreparedPrompt", "RegisteredSchema"]

MAX_BATCH_ANSWERS = 32
"""Answers of one batch that are written at the same time: each holds its prompt's KV; the next begins as one ends."""


def _unheard(*what: object) -> None:
    """Hear of progress that nobody wants to hear of."""


class Engine:
    """One model, one store, and the way from a question to an answer. Safe to share between threads.

    The model is loaded on first use and shared by all engines of the process that name the same one.

    Args:
        settings: Everything that may be set; None: as the environment says.
        model: A name, a folder, a GGUF file, or what is loaded already: a `PreTrainedModel` with its `tokenizer`, a
            `pipeline`, a PEFT model. None: the one that the settings name.
        store: An open store; None: the one that the settings describe.
        conversations: Whose KV is whose, where several engines share a queue of requests; None: its own.
        tokenizer: Of a model that is loaded already.
    """

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
        self.settings = settled(chosen)
        known_policy(self.settings.policy)
        self.catalog = open_catalog(self.settings, store)
        self.conversations = conversations if conversations is not None else ConversationIndex()
        codecs = CodecRegistry(self.catalog)
        self.store = opened(self.settings, store, codecs, self.conversations.evict(self.settings))
        codecs.tiers = self.store.tiers
        self._timings = MachineTimings(self.settings.tiers, self.catalog)
        placement = Placement(self.settings, self.store, self._timings)
        self.runtime = Runtime(self.settings, given, self.catalog, self.store, codecs, placement)
        known = self.runtime, self._timings, placement, self.conversations
        self._stages = Stages.of(self.settings, self.catalog, self.store, *known)
        self._documents = Documents(self.settings, self.runtime, self.store, self.catalog, self._stages)
        self.counters = AnswerCounters(self._stages.remember.jobs, self.catalog)

    @staticmethod
    def shared(settings: Settings | None = None, model: Given = None, *, tokenizer: Tokens = None) -> Engine:
        """Return the engine of all who name the same settings, or hand over the same loaded model with them.

        It is closed when the process ends, not before; `close` lets go of it, and of the model.
        """
        given, settings = handed_over(model, tokenizer, settings or Settings())
        settings = settled(settings)
        if given is None:
            return shared(("engine", settings), partial(_closed_at_exit, settings))
        if isinstance(given, HFModel):
            return shared(("engine", settings, id(given)), partial(_closed_at_exit, settings, given))
        name = "engine", settings, id(given.model), id(given.tokenizer)
        return shared(name, partial(_closed_at_exit, settings, given.model, given.tokenizer))

    # the road of one question

    def answer(
        self, prompt: Question | None = None, ask: Ask | None = None, *, pml: Path | str | None = None
    ) -> Answer:
        """Return the answer to a prompt, with the trace of what was reused.

        Args:
            prompt: A text, messages, token ids, or a prompt in PML.
            ask: How it is to be answered; None: as the settings say.
            pml: In place of `prompt`, PML or a file of it.
        """
        return self._answer(self._request(question_of(prompt, pml), ask or Ask(), began_s=time.perf_counter()))

    def stream(
        self, prompt: Question | None = None, ask: Ask | None = None, *, pml: Path | str | None = None
    ) -> AnswerStream:
        """Return the answer's text as it is written; `AnswerStream.answer` has the whole once it is read to the end."""
        ask, question = ask or Ask(), question_of(prompt, pml)
        offered_tools(ask)  # what cannot be used is told here, not while reading
        return AnswerStream(partial(self._say, question, ask))

    def batch(
        self, prompts: Sequence[Question], ask: Ask | None = None, gone: threading.Event | None = None
    ) -> list[Answer]:
        """Return answers to several prompts: each fused by itself, all decoded together.

        Each is what it would be alone, from the same seed too. Once `gone` is set, they are written no further.
        """
        return self._batch(prompts, ask or Ask(), gone or threading.Event())

    @answered
    def _answer(self, request: Request) -> Answer:
        with noting() as unsaved:
            prompt = self._stages.build.build(request)
            return _with_unsaved(self._run(prompt, self._constrained(request)), unsaved)

    def _run(self, prompt: Prompt, request: Request) -> Answer:
        """Take a prompt through its stages; a question is built into one before (`BuildStage`)."""
        stages = self._stages
        plan = stages.planner.begin(prompt, request)
        with stages.fetch.fetch(plan) as fetched:
            prepared = stages.prefill.prefill(fetched)
            stages.remember.begin(prepared, request)
            stages.generate.share(prepared, request)
        with stages.remember.begun(prepared, request):
            generated = stages.generate.generate(prepared, request)
            stages.remember.remember(prepared, generated, request)
        return generated.answer

    @batched
    def _batch(self, prompts: Sequence[Question], ask: Ask, gone: threading.Event) -> list[Answer]:
        began_s, stages = time.perf_counter(), self._stages
        with noting() as unsaved:
            requests = [self._request(prompt, ask, ends=(gone,), began_s=began_s) for prompt in prompts]
            built = [stages.build.build(request) for request in requests]
            requests = [self._constrained(request) for request in requests]
            if len(built) < 2 or requests[0].model.lock.is_mine:
                answers = [self._run(prompt, request) for prompt, request in zip(built, requests, strict=True)]
            else:
                answers = self._together(built, requests, gone)
        return [_with_unsaved(answer, unsaved) for answer in answers]

    def _together(self, built: Sequence[Prompt], requests: Sequence[Request], gone: threading.Event) -> list[Answer]:
        """Run prompts side by side; what fails for one ends the others, and is raised."""
        failed = threading.Event()
        with ThreadPoolExecutor(min(len(built), MAX_BATCH_ANSWERS), "ragfuse-batch") as pool:
            futures = [
                pool.submit(copy_context().run, self._run, prompt, replace(each, ends=(gone, failed), has_company=True))
                for prompt, each in zip(built, requests, strict=True)
            ]
            return _results(futures, failed)

    def _request(
        self,
        question: Question,
        ask: Ask,
        say: Say = None,
        ends: tuple[threading.Event, ...] = (),
        began_s: float = 0.0,
    ) -> Request:
        return Request(question, ask, self.runtime, began_s, say=say, ends=ends)

    def _constrained(self, request: Request) -> Request:
        """The request with what its answer must follow."""
        calls = self._stages.prompts.calls
        return replace(request, constraints=self._stages.constraints.reply(request.ask, request.model, calls))

    def _say(self, question: Question, ask: Ask, say: Say, gone: threading.Event) -> Answer:
        return self._answer(self._request(question, ask, say, (gone,), time.perf_counter()))

    def check_length(self, prompt: Question, ask: Ask | None = None) -> None:
        """Raise OverlongError for a prompt that can never fit what the model takes, before it is tokenised."""
        self._stages.build.check_length(prompt, ask or Ask())

    def plan(self, prompt: Question, ask: Ask | None = None) -> LoadPlan:
        """Return what would be read and computed for a prompt now, and how long that would take; nothing is."""
        request = self._request(prompt, ask or Ask())
        return self._stages.planner.plan(self._stages.build.build(request), request, request.ask)

    def prepare(self, prompt: Prompt, ask: Ask | None = None) -> PreparedPrompt:
        """Plan, load and prefill a prompt; OverlongError if it is longer than the model takes."""
        request = self._request((), ask or Ask())
        with self._stages.fetch.begun(self._stages.planner.begin(prompt, request)) as fetched:
            return self._stages.prefill.prefill(fetched)

    def prompt(self, prompt: Question, tools: Sequence[Tool] = (), ask: Ask | None = None) -> Prompt:
        """Return tokens, chunks and positions of a prompt, without what is known of its conversation.

        Chunks are what carries this engine's marks, and every known chunk that stands in the text. A prompt in PML has
        its modules where its schema has them.

        Args:
            prompt: One text, token ids, messages by the chat template, or a prompt in PML.
            tools: What the template tells of.
            ask: What the template is told beside them, and whether anything is reused.
        """
        if isinstance(prompt, PMLPrompt):
            return self._stages.schemas.prompt(prompt, ask or Ask())
        return self._stages.prompts.prompt(mended_question(prompt), self.digest, tools, ask=ask)

    def pieces(self, content: Content) -> Sequence[Piece]:
        """Return a text, or the texts of a list, cut into chunks and fresh text; pieces stay as they are."""
        return self._stages.prompts.pieces(mended_content(content), self.digest)

    def prefix(self, prompt: Question) -> tuple[int, ...]:
        """The ids before the first chunk of a prompt, () if there is none: what `ingest` may keep beside chunks."""
        first = self.prompt(prompt).segments[0]
        return first.tokens if first.kind == "prefix" else ()

    # documents, schemas, conversations

    def ingest(
        self,
        texts: Iterable[tuple[str, str]],
        prefix: Sequence[int] = (),
        progress: Callable[[Ingested], None] | None = None,
    ) -> Ingested:
        """Encode and keep the KV of chunks that are not kept yet.

        Interrupted, it loses at most the chunk at hand; called again, it goes on where it stopped.

        Args:
            texts: (text, source) of each chunk.
            prefix: Ids that prompts begin with, whose KV is kept beside.
            progress: Hears after each chunk what is done.
        """
        return self._documents.ingest(texts, prefix, progress)

    def register(
        self, schema: Schema | Path | str, progress: Callable[[Ingested], None] | None = None
    ) -> RegisteredSchema:
        """Take prompts in PML for this schema from now on, also in later processes; its modules are encoded now.

        `schemas` lists, shows and removes them.

        Args:
            schema: As it was read, its PML, or its file.
            progress: Hears after each module what is done.
        """
        return self.schemas.register(schema, progress)

    @property
    def schemas(self) -> SchemaService:
        """The schemas that prompts in PML take modules from."""
        return self._stages.schemas

    @property
    def sessions(self) -> SessionStore:
        """The conversations that are kept."""
        return self._stages.history.sessions

    @property
    def marker(self) -> Marker:
        """Marks chunks in texts, so that this engine knows them again."""
        return self._stages.prompts.marker

    @property
    def links(self) -> Links:
        """The lines to tiers that are streamed from."""
        return self._stages.links

    def know(self, texts: Iterable[tuple[str, str]]) -> None:
        """Find (text, source) of chunks in prompts from now on, without an ingest.

        What a prompt then holds of them is encoded after its answer. For retrievers, which know it first.
        """
        self._documents.know(texts)

    def prefetch(self, texts: Iterable[str]) -> None:
        """Begin to bring what the store holds of these chunks to memory, for the next prompt. Returns at once, encodes
        nothing, may load the model."""
        self._stages.prefetcher.submit(texts)

    def expect(self, sessions: Iterable[str] | Mapping[str, float]) -> None:
        """Bring conversations to memory that will have their next turn soon, as many as it has room for.

        They are dropped last. This replaces what was said before. It returns at once, and may load the model.

        Args:
            sessions: Names in the order in which they are expected, or names with numbers of which the least is first.
        """
        told = sessions if isinstance(sessions, Mapping) else {name: at for at, name in enumerate(sessions)}
        whose = self.digest
        self.conversations.expect(whose, told)
        self._stages.prefetcher.look_ahead([(whose, name) for name in sorted(told, key=told.__getitem__)])

    def session_of(self, prompt: ChatInput | Ids, ask: Ask | None = None) -> str | None:
        """The name of the kept conversation that a prompt goes on with; None where there is none."""
        return self._stages.history.name_of(mended_question(prompt), ask or Ask())

    def forget(self, texts: Iterable[str]) -> int:
        """Drop the KV of these chunks of this tenant from every tier, pinned or not, and return the bytes freed.

        They are no known chunks any more, nor are passages that were learnt from them. What other processes hold in
        memory stays there.
        """
        return self._documents.forget(texts)

    def known_texts(self, source: str) -> list[str]:
        """Texts of known chunks that came from this source."""
        return self._stages.prompts.known_from(self.digest, whole_text(source))

    # the model, this machine, the store

    @property
    def model(self) -> HFModel:
        """The model, loaded now if it was not."""
        return self.runtime.model

    @property
    def digest(self) -> str:
        """What stands for model and tenant in every key."""
        return self.runtime.digest

    @property
    def encoder(self) -> Encoder:
        """How runs of tokens come into the store."""
        return self.runtime.encoder

    @property
    def known(self) -> KnownChunks:
        """The texts of chunks that a prompt is searched for."""
        return self._stages.prompts.known(self.digest)

    def key(self, tokens: Sequence[int], context: str = "") -> ChunkKey:
        """The key of a run of tokens with this context ("": alone)."""
        return self.encoder.key(tokens, context)

    def tokens(self, text: str, special: bool = False) -> list[int]:
        """Ids of a text as it reads in the middle of a prompt; unless `special`, what looks like a special token in it
        stays text."""
        return self.model.tokens(text, special)

    def ids(self, prompt: Question) -> list[int]:
        """All ids of a prompt; InputError if it is longer than the model can take."""
        ids = [*prompt] if is_ids(prompt) else [*self.prompt(prompt).token_ids]
        remaining_context(len(ids), self.model)
        return ids

    def score(
        self, prompt: Question | Sequence[int], n_top: int = 0, check: Callable[[], object] = _unheard
    ) -> list[tuple[int, Score | None]]:
        """The ids of a prompt, each with how likely it is behind those before it; None for the first.

        n_top: how many of the likeliest others are told beside each. The whole prompt is computed, nothing is reused.
        check: called between two forwards; it may raise. InputError if the prompt is longer than the model can take.
        """
        ids = self.ids(prompt)
        return list(zip(ids, [None, *scored(self.model, ids, n_top, check)], strict=True))

    @property
    def template(self) -> ChatTemplate:
        """What the model's chat template takes besides messages, and whether it knows of thoughts."""
        return self._stages.constraints.template(self.model)

    def verify(self, progress: Callable[[str], object] = _unheard) -> Verdict:
        """Measure on the model's real weights that fusing is exact where it must be; the profile keeps the verdict."""
        return self.runtime.verify(progress)

    @property
    def profile(self) -> ModelProfile:
        """What is known of the model: what came with it, or was learned on this store."""
        return self.runtime.profile

    def learn(self, profile: ModelProfile | MachineProfile) -> None:
        """Go by what was found out about the model or this machine, here and in later processes on this store."""
        if isinstance(profile, MachineProfile):
            self._timings.learn(profile)
        else:
            self.runtime.learn(profile)

    def measure(self, stores: Sequence[str] = (), progress: Progress = _unheard) -> MachineProfile:
        """Time the model and the tiers, the store's own and those at `stores`, on this machine; plans go by it then."""
        return self._timings.measure(self.model, self.store, self.settings, stores, progress)

    def flush(self) -> None:
        """Wait until every chunk met so far is encoded and written, and all that is prefetched is there."""
        for part in self._background:
            part.flush()
        self.store.flush()

    def close(self, timeout_s: float | None = None) -> None:
        """Finish saving, or as much of it as `timeout_s` allows, and let go of the store."""
        forget(self)
        self.counters.close()
        left = countdown(timeout_s)
        for part in self._background:
            part.close(left())
        self.store.close(left())
        self.catalog.close()

    @property
    def _background(self) -> tuple[Prefetcher | BackgroundEncoder | ConversationHistory | PrefixCache, ...]:
        """What works beside the answers, in the order in which one hands on to the next."""
        stages = self._stages
        return stages.prefetcher, stages.remember.jobs, stages.history, stages.prefixes

    def __deepcopy__(self, memo: dict[int, object]) -> Engine:
        """Itself: what holds an engine and is copied shares it."""
        return self

    def __copy__(self) -> Engine:
        return self

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(None if kind is None else 0.0)


def _with_unsaved(answer: Answer, unsaved: Sequence[str]) -> Answer:
    """The answer, whose trace says what could not be read or written beside it."""
    return replace(answer, trace=replace(answer.trace, unsaved=tuple(unsaved))) if unsaved else answer


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


def _closed_at_exit(settings: Settings, model: Given = None, tokenizer: Tokens = None) -> Engine:
    engine = Engine(settings, model, tokenizer=tokenizer)
    atexit.register(engine.close, EXIT_S)
    return engine
