"""Wires the floors: ingest, answer, stream. It decides nothing: what is a chunk, what is read and what is recomputed
is told by `text`, `plan` and `fuse`."""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from ragfuse.engine.answer_stream import AnswerStream
from ragfuse.engine.background import EXIT_S, LEARNT, WAIT_S, Saver, Work
from ragfuse.engine.codec_tables import ensure_tables
from ragfuse.engine.constraints import Caller, Tool, offered
from ragfuse.engine.context_window import check_request, check_texts, check_turns, may_fit
from ragfuse.engine.encoder import Encoder, Ingested
from ragfuse.engine.generate import Answerer, Asked, Say
from ragfuse.engine.history import Conversations
from ragfuse.engine.kv_streamer import Bringer
from ragfuse.engine.machine_timings import Timings
from ragfuse.engine.model_profiles import Profiles, refusal_of
from ragfuse.engine.options import Ask, known_policy, room_behind
from ragfuse.engine.overflow import drops, limit_of
from ragfuse.engine.planner import Planner
from ragfuse.engine.prefetch import Prefetcher
from ragfuse.engine.prefill import Prefiller
from ragfuse.engine.prefix_cache import PrefixCache
from ragfuse.engine.prompt_builder import (
    Content,
    Ids,
    Inquiry,
    Prompter,
    Question,
    is_bare_text,
    is_ids,
    mended_content,
    mended_documents,
    mended_question,
    turns_of,
)
from ragfuse.engine.recurrence import Recurs, Sightings
from ragfuse.engine.runtime import handed_over, loaded
from ragfuse.engine.schema_service import Registered, Schemas, inquiry_of
from ragfuse.engine.store_opener import open_kept
from ragfuse.engine.trace_builder import Ready
from ragfuse.errors import SettingsError
from ragfuse.hf.model import HFModel
from ragfuse.hf.scores import Score, scored
from ragfuse.hf.verify import Verdict, verify
from ragfuse.load.link import Links
from ragfuse.measure import Progress
from ragfuse.models.dtypes import settled
from ragfuse.models.loader import Given, Tokens
from ragfuse.plan.controller import settle
from ragfuse.process.fork import ForkLock
from ragfuse.process.shared import forget, noting, shared
from ragfuse.schemas.bind import Taken
from ragfuse.schemas.nodes import Request, Schema
from ragfuse.schemas.registry import Registry
from ragfuse.sessions.conversation_index import Outlook
from ragfuse.settings import Settings
from ragfuse.store import Book, KVStore, countdown
from ragfuse.store.catalog import Booked
from ragfuse.store.codec_registry import Coding
from ragfuse.store.deletion import chunk_of, forget_chunks
from ragfuse.store.tenants import remember_tenant
from ragfuse.telemetry.counters import Tally
from ragfuse.telemetry.otel import answered, batched
from ragfuse.text.chat_template import ChatTemplate
from ragfuse.text.chunks import KnownChunks, Piece
from ragfuse.text.passages import is_prose
from ragfuse.types.answer import Answer
from ragfuse.types.keys import ChunkKey, digest, whole_text
from ragfuse.types.plan import LoadPlan
from ragfuse.types.profiles import MachineProfile, ModelProfile
from ragfuse.types.prompt import Prompt

__all__ = ["Ask", "Content", "Engine", "Ingested", "Ready", "Registered"]


class Engine:
    """One model, one store, and the way from a question to an answer. Safe to share between threads.

    The model is loaded on first use and shared by all engines of the process that name the same one.

    model: a name, a folder, a GGUF file, or what is loaded already: a `PreTrainedModel` with its `tokenizer`, a
    `pipeline`, a PEFT model; None: the one that settings name.
    """

    def __init__(
        self,
        settings: Settings | None = None,
        model: Given = None,
        store: KVStore | None = None,
        outlook: Outlook | None = None,
        *,
        tokenizer: Tokens = None,
    ) -> None:
        self._given, told = handed_over(model, tokenizer, settings or Settings())
        self.settings = settled(told)
        known_policy(self.settings.policy)
        if not isinstance(store, KVStore | None):
            raise SettingsError(f"Wanted an open KVStore, found {store!r:.60}. Name a folder by Settings(store=...).")
        place, shared_with = self.settings.store_path, self.settings.shared_with
        self.book = Book(place, shared_with) if store is None and self.settings.disk_bytes else None
        self._booked = Booked(self.book)
        self._coding = Coding(self._booked, lambda: self.store.tiers)
        self.outlook = outlook if outlook is not None else Outlook()
        evict = self.outlook.evict(self.settings)
        self.store = store if store is not None else open_kept(self.settings, codecs=self._coding, evict=evict)
        self._model, self._lock = model if isinstance(model, HFModel) else None, ForkLock()
        self._sightings = Sightings()
        self._profiles, self._timings = Profiles(self._booked), Timings(self.settings.tiers, self._booked)
        self._prefixes = PrefixCache(self.settings, lambda: self.encoder, self.store)
        self._saver = Saver(self._save)
        waits = self._saver.is_waiting
        self._planner = Planner(self.settings, self.store, self._timings, self._prefixes, waits)
        self._learned: ModelProfile | None = None
        self.tally = Tally(lambda: self._saver.waiting, lambda: self._booked.failures)
        self._prompter = Prompter(self.settings, self._booked, lambda: self.model, self.key)
        keys_of, free_share = lambda name: self._talks.keys_of(name), self.settings.memory_free
        self._prefetcher = Prefetcher(self.store, lambda: self.encoder, keys_of, free_share)
        self._prefiller = Prefiller(self.settings, self.store, self._planner, self._prefetcher.leave)
        self.links = Links(self.settings.streams)
        self._bringer = Bringer(self.settings, self.store, self._planner, self.links, self._prefetcher.leave)
        known = self._booked, self._prompter, lambda: self.encoder, self.store, self.outlook, self._prefixes
        self._talks: Conversations = Conversations(self.settings, *known)
        registry = Registry(self.store, self._booked, self.settings.salt)
        self.schemas = Schemas(self.settings, registry, self._prompter, lambda: self.encoder)
        own = self._planner, self._prefiller, self._bringer, self._talks, self._prefixes
        self._answerer = Answerer(self.settings, *own, self._save_later)
        self.marker, self._caller, self.sessions = self._prompter.marker, Caller(), self._talks.sessions
        if self._model is not None:
            ensure_tables(self._coding, self.digest, self._model, self.settings)

    @staticmethod
    def shared(settings: Settings | None = None, model: Given = None, *, tokenizer: Tokens = None) -> Engine:
        """The engine of all who name the same settings, or hand over the same loaded model with them.

        It is closed when the process ends, not before; `close` lets go of it, and of the model.
        """
        given, settings = handed_over(model, tokenizer, settings or Settings())
        settings = settled(settings)
        if given is None:
            return shared(("engine", settings), lambda: _closed_at_exit(Engine(settings)))
        whose = "engine", settings, id(given.model), id(given.tokenizer)
        make = partial(Engine, settings, given.model, tokenizer=given.tokenizer)
        return shared(whose, lambda: _closed_at_exit(make()))

    @property
    def model(self) -> HFModel:
        """The model, loaded now if it was not."""
        with self._lock:
            if self._model is None:
                self._model = loaded(self.settings, self._profiles, self._given)
                self._profiles.remember(self._model.profile)
                tenant = digest(self._model.fingerprint, self.settings.salt)
                self._booked(lambda book: remember_tenant(book, tenant, self.settings), None)
                ensure_tables(self._coding, tenant, self._model, self.settings)
            return self._model

    @property
    def digest(self) -> str:
        """What stands for model and tenant in every key."""
        return digest(self.model.fingerprint, self.settings.salt)

    @property
    def known(self) -> KnownChunks:
        """The texts of chunks that a prompt is searched for."""
        return self._prompter.known(self.digest)

    def key(self, tokens: Sequence[int], context: str = "") -> ChunkKey:
        """The key of a run of tokens with this context ("": alone)."""
        return self.encoder.key(tokens, context)

    def tokens(self, text: str, special: bool = False) -> list[int]:
        """Ids of a text as it reads in the middle of a prompt; unless `special`, what looks like a special token in it
        stays text."""
        return self.model.tokens(text, special)

    def prompt(self, prompt: Inquiry, tools: Sequence[Tool] = (), ask: Ask | None = None) -> Prompt:
        """Tokens, chunks and positions of a prompt: one text, token ids, or messages by the chat template, which tells
        of tools. ask: what the template is told beside them, and whether anything is reused.

        Chunks are what carries this engine's marks, and every known chunk that stands in the text. A prompt in PML has
        its modules where its schema has them.
        """
        if isinstance(prompt, Request):
            return self.schemas.prompt(prompt, ask or Ask())
        return self._prompter.prompt(mended_question(prompt), self.digest, tools, ask=ask)

    def pieces(self, content: Content) -> Sequence[Piece]:
        """A text, or the texts of a list, cut into chunks and fresh text; pieces stay as they are."""
        return self._prompter.pieces(mended_content(content), self.digest)

    def prefix(self, prompt: Inquiry) -> tuple[int, ...]:
        """The ids before the first chunk of a prompt, () if there is none: what `ingest` may keep beside chunks."""
        first = self.prompt(prompt).segments[0]
        return first.tokens if first.kind == "prefix" else ()

    def ingest(
        self,
        texts: Iterable[tuple[str, str]],
        prefix: Sequence[int] = (),
        progress: Callable[[Ingested], None] | None = None,
    ) -> Ingested:
        """Encode and keep the KV of (text, source) chunks that are not kept yet, and of a `prefix` of prompts.

        Interrupted, it loses at most the chunk at hand; called again, it goes on where it stopped.
        """
        began, done, encoder = time.perf_counter(), Ingested(), self.encoder
        room_behind(len(prefix), self.model, "What stands before the first chunk")
        encoder.keep_prefix(prefix)
        for text, source in mended_documents(texts):
            text = text.strip()
            check_texts([text], self.model, f"A chunk of '{source}'")
            ids = self.tokens(text)
            room_behind(len(ids), self.model, f"A chunk of '{source}'")
            nbytes = encoder.keep_chunk(ids)
            if len(ids) >= self.settings.min_chunk_tokens:
                self._prompter.note(self.digest, text, source, ids, must=True)
            done = done.plus(len(ids), nbytes, time.perf_counter() - began)
            if progress is not None:
                progress(done)
        return done

    def register(self, schema: Schema | Path | str, progress: Callable[[Ingested], None] | None = None) -> Registered:
        """Take prompts in PML for this schema from now on, also in later processes; its modules are encoded now.

        schema: as read, its PML, or its file. See `Schemas.register`; `schemas` lists, shows and removes them.
        """
        return self.schemas.register(schema, progress)

    def know(self, texts: Iterable[tuple[str, str]]) -> None:
        """(text, source) of chunks that are found in prompts from now on, without an ingest.

        What a prompt then holds of them is encoded after its answer. For retrievers, which know it first.
        """
        for text, source in mended_documents(texts):
            text = text.strip()
            if text in self.known or not may_fit(text, self.model):
                continue
            ids = self.tokens(text)
            if len(ids) >= self.settings.min_chunk_tokens:
                self._prompter.note(self.digest, text, source, ids)

    def prefetch(self, texts: Iterable[str]) -> None:
        """Begin to bring what the store holds of these chunks to memory, for the next prompt. Returns at once, encodes
        nothing, may load the model."""
        self._prefetcher.submit(texts)

    def expect(self, sessions: Iterable[str] | Mapping[str, float]) -> None:
        """These conversations are gone on with soon, the first one first (or the one with the least number): what was
        kept of them comes to memory, as much as it has room for, and is dropped last. In place of what was said
        before. Returns at once, may load the model."""
        told = sessions if isinstance(sessions, Mapping) else {name: at for at, name in enumerate(sessions)}
        whose = self.digest
        self.outlook.expect(whose, told)
        self._prefetcher.look_ahead([(whose, name) for name in sorted(told, key=told.__getitem__)])

    def session_of(self, prompt: Question | Ids, ask: Ask | None = None) -> str | None:
        """The name of the kept conversation that a prompt goes on with; None where there is none."""
        return self._talks.name_of(mended_question(prompt), ask or Ask())

    def forget(self, texts: Iterable[str]) -> int:
        """Drop the KV of these chunks of this tenant, in any company and pinned or not, from every tier; bytes freed.
        They are no known chunks any more, nor are passages that were learnt from them. What other processes hold in
        memory stays there."""
        texts = [whole_text(text).strip() for text in ((texts,) if isinstance(texts, str) else texts)]
        runs = {tuple(self.tokens(text)) for text in texts}
        self._saver.forget(runs)
        self._prefixes.forget(runs)
        runs |= self._prompter.forget(self.digest, texts)
        return forget_chunks(self.store, self.book, {chunk_of(self.key(run)) for run in runs})

    def known_texts(self, source: str) -> list[str]:
        """Texts of known chunks that came from this source."""
        return self._prompter.known_from(self.digest, whole_text(source))

    def check_length(self, prompt: Inquiry, ask: Ask | None = None) -> None:
        """OverlongError for a prompt that can never fit what the model takes, told before it is searched or tokenised.

        One that passes may still be too long: that is known when it is tokenised. Where chunks may be left out, or
        earlier turns of a conversation, what has to stay counts.
        """
        ask = ask or Ask()
        if isinstance(prompt, Request):
            check_request(prompt, self.model)
        elif is_ids(prompt):
            room_behind(len(prompt), self.model)
        elif not drops(ask, self.settings):
            tools, may_shorten = offered(ask), self._talks.may_shorten(prompt, ask)
            is_text = is_bare_text(prompt, ask, tools) and ask.session is None
            check_turns(turns_of(prompt), self.model, tools, may_shorten, marker=self.marker, is_text=is_text)

    def plan(self, prompt: Inquiry, ask: Ask | None = None) -> LoadPlan:
        """What would be read and computed for a prompt now, and how long that would take; nothing is."""
        ask = ask or Ask()
        return self._planner.plan(self._fitted(prompt, ask), ask, self.model, self.profile)

    def prepare(self, prompt: Prompt, ask: Ask | None = None) -> Ready:
        """Plan, load and prefill a prompt; InputError if it is longer than the model can take."""
        ask = ask or Ask()
        with self._bringer.all([prompt], ask, self.model, self.profile) as (brought,):
            return self._prefiller.prepare(prompt, ask, self.model, self.profile, brought)

    def answer(self, prompt: Inquiry | None = None, ask: Ask | None = None, *, pml: Path | str | None = None) -> Answer:
        """The answer to a prompt, or to the one that is PML or a file of it, with the trace of what was reused."""
        return self._answer(inquiry_of(prompt, pml), ask or Ask(), None, threading.Event())

    def stream(
        self, prompt: Inquiry | None = None, ask: Ask | None = None, *, pml: Path | str | None = None
    ) -> AnswerStream:
        """The answer's text as it is written; `AnswerStream.answer` has the whole once it is read to the end."""
        ask, asked = ask or Ask(), inquiry_of(prompt, pml)
        offered(ask)  # what cannot be used is told here, not while reading
        return AnswerStream(lambda say, gone: self._answer(asked, ask, say, gone))

    def batch(
        self, prompts: Sequence[Inquiry], ask: Ask | None = None, gone: threading.Event | None = None
    ) -> list[Answer]:
        """Answers to several prompts: each fused by itself, all decoded together; once `gone` is set, no further.

        Each is what it would be alone, from the same seed too.
        """
        return self._batch(prompts, ask or Ask(), gone or threading.Event())

    @batched
    def _batch(self, prompts: Sequence[Inquiry], ask: Ask, gone: threading.Event) -> list[Answer]:
        began = time.perf_counter()
        with noting() as unsaved:
            assembled = [self._fitted(prompt, ask) for prompt in prompts]
            asked = self._asked(ask, self.model, began)
            each = [replace(asked, is_chat=_is_chat(prompt, ask)) for prompt in prompts]
            answers = self._answerer.all(assembled, each, gone) if assembled else []
        return [_told(answer, unsaved) for answer in answers]

    def ids(self, prompt: Inquiry) -> list[int]:
        """All ids of a prompt; InputError if it is longer than the model can take."""
        ids = [*prompt] if is_ids(prompt) else [*self.prompt(prompt).token_ids]
        room_behind(len(ids), self.model)
        return ids

    def score(
        self, prompt: Inquiry | Sequence[int], n_top: int = 0, check: Callable[[], object] = lambda: None
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
        return self._caller.template(self.model)

    def verify(self, progress: Callable[[str], object] = lambda check: None) -> Verdict:
        """Measure on the model's real weights that fusing is exact where it must be; the profile keeps the verdict."""
        how = settle(self.settings.policy, self.settings.ratio, self.profile.choice)
        verdict = verify(self.model, *how, progress)
        self._profiles.judge(self.model.profile, verdict.passed)
        self._learned = replace(self.profile, verified=verdict.passed)
        return verdict

    @property
    def profile(self) -> ModelProfile:
        """What is known of the model: what came with it, or was learned on this store."""
        if self._learned is None:
            self._learned = self._profiles.joined(self.model.profile)
        return self._learned

    def learn(self, profile: ModelProfile | MachineProfile) -> None:
        """Go on with what was found out about the model or this machine, here and in later processes on this store."""
        if isinstance(profile, MachineProfile):
            self._timings.learn(profile)
            return
        self._learned = profile
        self._profiles.put(profile)

    def measure(self, stores: Sequence[str] = (), progress: Progress = lambda what, done: None) -> MachineProfile:
        """Time the model and the tiers, the store's own and those at `stores`, on this machine; plans go by it then."""
        return self._planner.measure(self.model, stores, progress)

    def flush(self) -> None:
        """Wait until every chunk met so far is encoded and written, and all that is prefetched is there."""
        self._prefetcher.flush()
        self._saver.flush()
        self._talks.flush()
        self._prefixes.flush()
        self.store.flush()

    def close(self, timeout_s: float | None = None) -> None:
        """Finish saving, or as much of it as `timeout_s` allows, and let go of the store."""
        forget(self)
        self.tally.close()
        left = countdown(timeout_s)
        self._prefetcher.close(left())
        self._saver.close(left())
        self._talks.close(left())
        self._prefixes.close(left())
        self.store.close(left())
        self.book = None
        self._booked.close()

    def __deepcopy__(self, memo: dict[int, object]) -> Engine:
        """Itself: what holds an engine and is copied shares it."""
        return self

    def __copy__(self) -> Engine:
        return self

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(None if kind is None else 0.0)

    # inside

    @property
    def encoder(self) -> Encoder:
        """How runs of tokens come into the store."""
        settings = self.settings
        shortest, other, model = settings.min_chunk_tokens, settings.amid_tokens, self.model
        home = partial(self._planner.home, model, self.profile)
        levels = partial(self._planner.levels, model, self.profile)
        return Encoder(model, self.store, self.digest, shortest, other, home, levels)

    def _fitted(self, question: Inquiry, ask: Ask) -> Prompt:
        """The prompt of a question; without its last chunks where it is too long and they may be left out."""
        if isinstance(question, Request):
            return self.schemas.prompt(question, ask)
        tools, question = offered(ask), mended_question(question)
        self.check_length(question, ask)
        limit = limit_of(ask, self.settings, self.model)
        check = not self._talks.may_shorten(question, ask)
        documents = list(mended_documents(ask.documents))
        if self.settings.learn != "off":
            self._prompter.hear(self.digest, documents, question)
        make = partial(self._prompter.prompt, digest=self.digest, tools=tools, ask=ask, check=check)
        prompt = self._talks.fitted(question, ask, lambda q, n: make(q, leave_out=n), limit)
        if documents and all(segment.kind != "chunk" for segment in prompt.segments):
            return replace(prompt, altered=self._prompter.altered(question, documents))
        return prompt

    @answered
    def _answer(
        self,
        prompt: Inquiry,
        ask: Ask,
        say: Say,
        gone: threading.Event,
    ) -> Answer:
        began = time.perf_counter()
        with noting() as unsaved:
            assembled, model = self._fitted(prompt, ask), self.model
            asked = replace(self._asked(ask, model, began), is_chat=_is_chat(prompt, ask))
            answer = self._answerer.one(assembled, asked, say, gone)
        return _told(answer, unsaved)

    def _asked(self, ask: Ask, model: HFModel, began_s: float) -> Asked:
        return Asked(ask, self._caller.reply(ask, model, self._prompter.calls), self.profile, began_s)

    def _save_later(self, ready: Ready, ask: Ask) -> None:
        taken, profile = ready.plan.prompt.taken, self.model.profile
        if ask.reuse and (not profile.refusal or (profile.fixed and taken is not None)):
            for work in self._planner.work_after(ready.plan):
                self._saver.submit(work)
        if ask.reuse and not profile.refusal:
            begins, n_exact = self._prefixes.lacks(ready)
            if begins:
                self._saver.submit(Work(tuple(begins), begins=n_exact))
        if ask.reuse and self.settings.learn != "off" and taken is None:
            self._saver.submit(Work((), prompt=ready.plan.prompt, bare=not ready.plan.fetches))
        if ask.reuse and isinstance(taken, Taken):
            self._prefetcher.submit_keys(taken.others)  # of the unions used: the next prompt may want another one

    def _save(self, work: Work) -> None:
        if work.used:
            return self._planner.promote(self.model, work.used)
        if work.far is not None:
            self.store.promote(work.far)
            return
        if work.prompt is not None:
            runs = self._sightings.met_again(work.prompt, self.model.border)
            why = refusal_of(self.profile, self.settings.policy)
            if self.settings.learn == "text" and not why:
                for run in runs:
                    if is_prose(self.model.text(run)):
                        self._saver.submit(Work(run, source=LEARNT))
            elif runs and work.bare:
                shared(("recurs", self.settings.model), Recurs).tell(len(runs), self.settings, why)
            return
        self.model.batcher.wait_idle(WAIT_S)
        if work.begins:
            self._prefixes.extend(work.tokens, work.begins)
            return
        encoder = self.encoder.in_background()
        if work.run is not None:
            encoder.keep_run(work.run)
            return
        text = work.text or self._text(work.tokens)
        encoder.keep_chunk(work.tokens, lasts=bool(text))
        self._prompter.note(self.digest, text, work.source, work.tokens)

    def _text(self, tokens: tuple[int, ...]) -> str:
        """The text of ids, where it is tokenised as these; else "": then later processes do not know it."""
        text = self.model.text(tokens).strip()
        return text if tuple(self.model.tokens(text)) == tokens else ""


def _told(answer: Answer, unsaved: Sequence[str]) -> Answer:
    """The answer, whose trace says what could not be read or written beside it."""
    return replace(answer, trace=replace(answer.trace, unsaved=tuple(unsaved))) if unsaved else answer


def _is_chat(question: Inquiry, ask: Ask) -> bool:
    """Whether the model answers messages in its chat template, rather than continuing a text or token ids."""
    if isinstance(question, Request):
        return not question.ending
    return bool(ask.tools) if isinstance(question, str) else not is_ids(question)


def _closed_at_exit(engine: Engine) -> Engine:
    atexit.register(engine.close, EXIT_S)
    return engine
