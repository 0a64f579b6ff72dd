"""How an engine goes on with a conversation: what of a prompt is its history, and what an answer leaves for the next.

A prompt is recognised by its messages, and its history by its tokens: only what has the very ids is reused. What is
shortened is decided in `sessions/session.py`; sessions are kept by `sessions/session_store.py`.
"""

from __future__ import annotations

import logging
import secrets
import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import accumulate

from ragfuse.engine.encoder import PACE_S
from ragfuse.engine.options import Ask
from ragfuse.engine.overflow import fitted
from ragfuse.engine.prefix_cache import PrefixCache
from ragfuse.engine.prompt_builder import PromptBuilder
from ragfuse.engine.question import ChatInput, Ids, is_ids, turns_of
from ragfuse.engine.runtime import Runtime
from ragfuse.engine.trace_builder import PreparedPrompt
from ragfuse.fuse.gather import gathered
from ragfuse.process.fork import at_fork
from ragfuse.sessions.conversation_index import ConversationIndex, Name
from ragfuse.sessions.session import (
    HistoryMessage,
    KVSpan,
    PendingTurn,
    Session,
    Turn,
    agreed,
    is_again,
    matched,
    names_of,
    prefix_digests,
    truncated,
)
from ragfuse.sessions.session_store import SessionStore
from ragfuse.sessions.turn_kv import Saves, Spans, left_by
from ragfuse.settings import Settings
from ragfuse.store import KVStore
from ragfuse.store.catalog import Catalog
from ragfuse.store.writer import Writers
from ragfuse.text.chat_messages import ChatMessage, LaterMessages
from ragfuse.text.chunks import Piece
from ragfuse.types.answer import Answer
from ragfuse.types.keys import ChunkKey
from ragfuse.types.kv import ChunkKV
from ragfuse.types.plan import LoadPlan
from ragfuse.types.prompt import Prompt, Segment

log = logging.getLogger("ragfuse.engine")

TURN_SAVE_WAIT_S = 5.0
"""Seconds that a turn waits, at most, for what the one before it left to be saved."""
MISSPELT = 64
"""Ids at an answer's end among which is looked for where its text was cut."""


class ConversationHistory:
    """The conversations of one engine. Threads may share it."""

    def __init__(
        self,
        settings: Settings,
        catalog: Catalog,
        prompts: PromptBuilder,
        runtime: Runtime,
        store: KVStore,
        index: ConversationIndex,
        prefixes: PrefixCache,
    ) -> None:
        self._settings, self._prompts, self._runtime, self._index = settings, prompts, runtime, index
        self._prefixes = prefixes
        self._writer, self.dropped = Writers(["history"], settings.writer_queue), 0
        self.sessions = SessionStore(
            store,
            catalog,
            self._tenants,
            settings.session_ttl_s,
            settle=self._writer.flush,
            later=self._later,
            index=index,
        )
        self.renew()
        at_fork(self)

    def renew(self) -> None:
        """No turn is being saved."""
        self._changed, self._waiting_bytes = threading.Condition(), 0
        self._waiting = Counter[str]()  # saves by the session's name
        self._begun = set[int]()  # prompts whose turns are not remembered yet

    def _tenants(self) -> list[str]:
        """The digests whose sessions are meant: the engine's own."""
        return [self._runtime.digest]

    # before the answer

    def fitted(
        self, question: ChatInput | Ids, ask: Ask, make: Callable[[ChatInput | Ids, int], Prompt], limit: int | None
    ) -> Prompt:
        """The prompt of a question, with what is known of its conversation as history; `make` and `limit` as for
        `fitting.fitted`, which leaves chunks out where a shorter history is not enough."""
        talk = self._talk(question, ask)
        if talk is None:
            return fitted(lambda n: make(question, n), limit)
        messages = [*_said(talk.session), *(turn_of(message) for message in talk.messages)]
        return fitted(lambda n: self._shortened(lambda said: make(said, n), messages, talk, ask), limit)

    def may_shorten(self, question: ChatInput | Ids, ask: Ask) -> bool:
        """Tell whether earlier turns of a question may be left out where it is too long."""
        if ask.session is not None:
            return True
        if self._settings.history == "asked" or is_ids(question):
            return False
        return len(LaterMessages(turns_of(question))) > 0

    def name_of(self, question: ChatInput | Ids, ask: Ask) -> str | None:
        """The session that a question goes on with; None where none is known."""
        digest = self._runtime.encoder.digest
        if ask.session is not None:
            self.sessions.get(digest, ask.session)  # another process may have added a turn
        if ask.session is not None or not self._is_had(question):
            return ask.session
        given = prefix_digests([self._message(turn, digest) for turn in turns_of(question)])
        known = self.sessions.ending(digest, given, persistent=self._settings.history == "all")
        return known[1].id if known is not None else None

    def keys_of(self, name: Name) -> Sequence[ChunkKey]:
        """Of a conversation's KV, as far as is known; it is looked for where nothing is."""
        return self._index.keys(name) or (self.sessions.get(*name) and self._index.keys(name)) or ()

    def _talk(self, question: ChatInput | Ids, ask: Ask) -> PendingTurn | None:
        """The conversation that a question goes on with, or begins; None where nobody keeps it."""
        settings = self._settings
        if ask.session is None and not self._is_had(question):
            return None
        encoder = self._runtime.encoder
        given = [self._message(turn, encoder.digest) for turn in turns_of(question)]
        if ask.session is not None:
            return self._named(ask.session, given, encoder.digest)
        persistent = settings.history == "all"
        known = self.sessions.ending(encoder.digest, prefix_digests(given), persistent)
        if known is None:
            return PendingTurn(Session(secrets.token_hex(8)), tuple(given), persistent=persistent)
        version, session = known
        self._wait_for(session)
        kept = agreed(session, given)
        if len(kept.turns) < len(session.turns):  # another way from here on: a conversation of its own
            version, kept = 0, replace(kept, id=secrets.token_hex(8))
        previous_keys = kept.keys if version else ()
        return PendingTurn(kept, tuple(given[len(kept.messages) :]), version, persistent, previous_keys=previous_keys)

    def _is_had(self, question: ChatInput | Ids) -> bool:
        """Whether a question without a session's name may go on with a conversation."""
        return not (isinstance(question, str) or is_ids(question) or self._settings.history == "asked")

    def _named(self, name: str, given: list[HistoryMessage], digest: str) -> PendingTurn:
        """The session of that name with new messages, or as much of it as all of its messages agree with."""
        version, session = self.sessions.get(digest, name) or (0, Session(name))
        self._wait_for(session)
        keep_chunks = self._settings.history_chunks
        if any(message.role == "assistant" for message in given):
            if session.turns:
                kept = agreed(session, given, is_again)
            else:  # a way of its own from what another one said, perhaps; its chunks come along if they are sent again
                known = self.sessions.ending(digest, prefix_digests(given), persistent=True)
                self._wait_for(known[1] if known is not None else session)
                kept = agreed(replace(known[1], id=name), given) if known is not None else session
            return PendingTurn(kept, tuple(given[len(kept.messages) :]), version, True, keep_chunks, session.keys)
        first = session.messages[:1]
        new = (message for message in given if message.role != "system" or message not in first)
        return PendingTurn(session, tuple(new), version, True, keep_chunks, session.keys)

    def _wait_for(self, session: Session) -> None:
        """Wait until what its last turn left is saved, `TURN_SAVE_WAIT_S` at most; other conversations do not count."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting[session.id], TURN_SAVE_WAIT_S)

    def _message(self, turn: ChatMessage, digest: str) -> HistoryMessage:
        pieces = self._prompts.pieces(turn.content, digest)
        kinds = ("found" if piece.found else piece.kind for piece in pieces)
        parts = tuple((each.text, kind, each.source) for each, kind in zip(pieces, kinds, strict=True) if each.text)
        return HistoryMessage(turn.role, parts, turn.tool_calls, turn.tool_call_id, turn.name, turn.reasoning)

    def _shortened(
        self, make: Callable[[ChatInput | Ids], Prompt], messages: Sequence[ChatMessage], talk: PendingTurn, ask: Ask
    ) -> Prompt:
        """The prompt with its history in place; where leaving out rows of that is not enough, without as few of the
        earliest turns as it takes. Then all of it is computed."""
        whole = make(messages)
        placed = self._placed(whole, talk, ask)
        shorter = () if self._fits(placed, ask) else LaterMessages(messages)
        if not shorter:
            return placed
        without = lru_cache(maxsize=None)(lambda n: _lacking(whole, make(shorter[n]), talk))
        left = without(bisect_left(range(len(shorter) - 1), True, key=lambda n: self._fits(without(n), ask)))
        return left if len(left) < len(placed) else placed

    def _placed(self, prompt: Prompt, talk: PendingTurn, ask: Ask) -> Prompt:
        """The prompt with its history in place of the tokens that it begins with, as much as there is room for."""
        history = _outside_chunks(matched(talk.session.stretches, prompt.token_ids), prompt)
        n_past = sum(len(stretch.tokens) for stretch in history)
        window, settings = self._window(ask), self._settings
        if window is not None:
            room = max(0, window[1] - (len(prompt) - n_past))
            history = truncated(history, room, window[0], settings.truncate_ratio, settings.sinks)
        talk = replace(talk, history=history)
        names, segments = names_of(talk.session), list[Segment]()
        for lo, hi, stretch in talk.placed():
            start, rows = segments[-1].stop if segments else 0, None if hi - lo == len(stretch.tokens) else (lo, hi)
            name = names.get(stretch.key, "")
            segments.append(Segment(stretch.tokens[lo:hi], start, "history", (stretch.key,), name, rows=rows))
        n_kept = segments[-1].stop if segments else 0
        tail = (replace(each, start=each.start - n_past + n_kept) for each in _behind(prompt, n_past))
        shift = n_kept - n_past
        said = (max(0, prompt.said[0] + shift), max(0, prompt.said[1] + shift))
        first = max(-1, prompt.first_chunk + shift)
        segments += tail
        return replace(prompt, segments=tuple(segments), truncated=-shift, talk=talk, said=said, first_chunk=first)

    def _window(self, ask: Ask) -> tuple[int, int] | None:
        """Tokens that prompt and answer may take, and how many of them the prompt; None without a limit."""
        limits = [each for each in (self._settings.window_tokens, self._runtime.encoder.model.max_context) if each]
        if not limits:
            return None
        window = min(limits)
        answer = min(ask.max_tokens or self._settings.max_tokens, max(1, window // 4))
        return window, window - answer

    def _fits(self, prompt: Prompt, ask: Ask) -> bool:
        window = self._window(ask)
        return window is None or len(prompt) <= window[1]

    # after it

    def begin(self, ready: Sequence[PreparedPrompt], ask: Ask) -> None:
        """Save what prompts added to their conversations while answers are written (AttentionStore 3.2.2)."""
        for each in ready:
            talk = _talk_of(each)
            if talk is not None and self._is_kept(talk, ask):
                self._begun.add(id(each))
                self._save_later(each, _saves(each.plan, talk, self._runtime.encoder.key), talk)

    def after(
        self, ready: Sequence[PreparedPrompt], rows: Sequence[Sequence[int]], answers: Sequence[Answer], ask: Ask
    ) -> None:
        """Remember turns whose answers were generated as the ids of `rows`, and save the answers' KV later."""
        for each, ids, answer in zip(ready, rows, answers, strict=True):
            talk = _talk_of(each)
            if talk is not None and self._is_kept(talk, ask):
                self._remember(each, talk, ids, answer, ask.continue_final_message)

    def end(self, ready: Sequence[PreparedPrompt]) -> None:
        """Nothing more comes of these: what was saved of turns that nobody remembers is dropped again."""
        for each in ready:
            talk = _talk_of(each)
            if talk is not None and id(each) in self._begun:
                self._begun.discard(id(each))
                self._release_later(partial(_saved, each.plan, talk, self._runtime.encoder.key))

    def _remember(
        self, ready: PreparedPrompt, talk: PendingTurn, ids: Sequence[int], answer: Answer, goes_on: bool
    ) -> None:
        """goes_on: the answer goes on with the last message."""
        encoder, n_prompt = self._runtime.encoder, len(ready.plan.prompt)
        left, said = left_by(ready.plan, talk, encoder.key), self._spelled(answer)
        made, n_rows = [*left.asked], min(_n_alike(said, ids), ready.n_held(len(ids)) - n_prompt)
        if n_rows >= encoder.shortest:
            made.append(KVSpan.whole(said[:n_rows], encoder.key(said[:n_rows], left.behind)))
            answered: Saves = ((made[-1], ((n_prompt, n_prompt + n_rows),)),)
            self._save_later(ready, answered, talk, said[:n_rows])
        messages = talk.messages if talk.keep_chunks else tuple(map(_without_chunks, talk.messages))
        text = answer.text
        if goes_on and messages:
            text = messages[-1].text + self._within(answer, said)
            messages = messages[:-1]
        reply = HistoryMessage("assistant", ((text, "fresh", ""),) if text else (), answer.tool_calls)
        turn = Turn((*messages, reply), () if answer.tool_calls or goes_on else said, tuple(made))
        before = talk.session.with_stretches(left.history)
        session = replace(before, turns=(*before.turns, turn))
        loose = set(talk.previous_keys).difference(session.keys)
        if not self.sessions.put(encoder.digest, session, talk.version, talk.persistent):
            log.warning("Another question went on with session %s first: this turn is not part of it.", talk.id)
            loose = {stretch.key for stretch in (*made, *(stretch for stretch, _ in left.saves))}
        self._begun.discard(id(ready))
        if loose:
            self._release_later(lambda: loose)

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until all turns are handed to the store; False if that took too long."""
        return self._writer.flush(timeout_s)

    def close(self, timeout_s: float | None = None) -> None:
        """Save what waits, or as much of it as `timeout_s` allows, and take no more."""
        self._writer.close(timeout_s)

    def _is_kept(self, talk: PendingTurn, ask: Ask) -> bool:
        """Whether the turn is remembered: what nobody asked to keep is, unless it was given chunks."""
        chunks = any(message.has_chunks for message in talk.messages)
        return ask.reuse and (talk.persistent or not chunks)

    def _spelled(self, answer: Answer) -> tuple[int, ...]:
        """The ids that say an answer's text: its own, but where a stop string cut it."""
        model, ids = self._runtime.encoder.model, answer.token_ids
        for count in range(len(ids), max(-1, len(ids) - MISSPELT), -1):
            text = model.text(ids[:count])
            if answer.text.startswith(text):
                rest = answer.text[len(text) :]
                return (*ids[:count], *(model.tokens(rest) if rest else ()))
        return tuple(model.tokens(answer.text))

    def _within(self, answer: Answer, ids: Sequence[int]) -> str:
        """An answer's text as it reads behind what it goes on with: some tokenizers leave out a space before a text."""
        text = self._runtime.encoder.model.encoder.said(ids)
        return text if text.strip() == answer.text.strip() else answer.text

    def _save_later(
        self, ready: PreparedPrompt, saves: Saves, talk: PendingTurn, written: tuple[int, ...] = ()
    ) -> None:
        """Save rows of a prompt, and of what was written behind it, in the background, unless too much waits already.

        What is exact of it is what other prompts may begin with, too: those that come meanwhile wait for it.
        """
        if ready.prefill.cache is None:
            return
        kv = ready.prefill.kv
        with self._changed:
            if self._waiting_bytes and self._waiting_bytes + kv.nbytes > self._settings.history_buffer_bytes:
                self.dropped += 1
                return
            self._waiting_bytes += kv.nbytes
            self._waiting[talk.id] += 1
        exact = [(spans[0], each.key) for each, spans in saves if len(spans) == 1 and each.key.encoded != "filler"]
        for (lo, hi), key in exact:
            self._prefixes.expect((*ready.plan.prompt.token_ids, *written)[:hi], lo, key)

        def job() -> None:
            try:
                for stretch, spans in saves:
                    self._save(kv, stretch, spans, talk.persistent)
            finally:
                self._done(talk, kv.nbytes)
                self._prefixes.saved(key for _, key in exact)

        if not self._writer.submit("history", job):
            self._done(talk, kv.nbytes, dropped=1)
            self._prefixes.saved(key for _, key in exact)

    def _release_later(self, keys: Callable[[], Iterable[ChunkKey]]) -> None:
        """Drop KV that no session has, in the background, behind what waits to be saved, however much that is."""
        self._later(lambda: self.sessions.release(keys()))

    def _later(self, job: Callable[[], object]) -> None:
        """Behind what waits to be saved, however much that is."""
        self._writer.submit("history", job, counts=False, is_awaited=True)

    def _done(self, talk: PendingTurn, nbytes: int, dropped: int = 0) -> None:
        with self._changed:
            self._waiting_bytes -= nbytes
            self._waiting[talk.id] -= 1
            self._waiting += Counter()  # without those of which nothing waits
            self.dropped += dropped
            self._changed.notify_all()

    def _save(self, kv: ChunkKV, stretch: KVSpan, spans: Spans, persistent: bool) -> None:
        """Cut the rows out and keep them: in all tiers, or, as nobody asked for it, in memory alone."""
        encoder = self._runtime.encoder
        store, fast = encoder.store, [tier.name for tier in encoder.store.tiers if not tier.slow]
        if not (persistent or fast):
            return
        if store.lookup([stretch.key], counts=False) and (not persistent or store.is_persistent(stretch.key)):
            return
        run = gathered(kv, spans, encoder.model.profile.rope)
        if not persistent:
            store.put(stretch.key, run, tier=fast[-1])
            return
        home, levels = encoder.home(run.n_tokens, run.nbytes), encoder.levels(run.n_tokens, run.nbytes)
        store.put(stretch.key, run, home=home, levels=levels, pace_s=0.0 if fast else PACE_S)


def _saves(plan: LoadPlan, talk: PendingTurn, key_of: Callable[[Sequence[int], str], ChunkKey]) -> Saves:
    return left_by(plan, talk, key_of).saves


def _saved(plan: LoadPlan, talk: PendingTurn, key_of: Callable[[Sequence[int], str], ChunkKey]) -> Sequence[ChunkKey]:
    return [stretch.key for stretch, _ in _saves(plan, talk, key_of)]


def turn_of(message: HistoryMessage) -> ChatMessage:
    """A message as prompts take it."""
    pieces = tuple(
        Piece(text, "fresh" if kind == "fresh" else "chunk", source, found=kind == "found")
        for text, kind, source in message.parts
    )
    return ChatMessage(message.role, pieces, message.tool_calls, message.tool_call_id, message.name, message.reasoning)


def _said(session: Session) -> Iterator[ChatMessage]:
    """A session's messages, its answers by the ids that they were generated as."""
    for turn in session.turns:
        yield from map(turn_of, turn.messages[:-1])
        reply = turn.messages[-1]
        content = (Piece(reply.text, ids=turn.said),) if reply.text and turn.said else turn_of(reply).content
        yield replace(turn_of(reply), content=content)


def _lacking(whole: Prompt, short: Prompt, talk: PendingTurn) -> Prompt:
    """A prompt without earlier turns; the conversation's next one knows by their tokens what is left out."""
    row, n_gone = _n_alike(whole.token_ids, short.token_ids), max(0, len(whole) - len(short))
    gone = whole.token_ids[row : row + n_gone]
    leaves = not talk.keep_chunks and any(segment.kind == "chunk" for segment in whole.segments)
    if leaves or whole.token_ids != (*short.token_ids[:row], *gone, *short.token_ids[row:]):
        gone = ()
    return replace(short, truncated=n_gone, talk=replace(talk, omitted=(row, gone)))


def _without_chunks(message: HistoryMessage) -> HistoryMessage:
    return replace(message, parts=tuple(part for part in message.parts if part[1] == "fresh"))


def _talk_of(ready: PreparedPrompt) -> PendingTurn | None:
    talk = ready.plan.prompt.talk
    return talk if isinstance(talk, PendingTurn) else None


def _outside_chunks(history: Sequence[KVSpan], prompt: Prompt) -> tuple[KVSpan, ...]:
    """As much of a history as does not end inside a chunk of the prompt, whose rest would be of no use."""
    inside = [
        (lo, hi) for segment, (lo, hi) in zip(prompt.segments, prompt.spans, strict=True) if segment.kind == "chunk"
    ]
    ends = list(accumulate(len(stretch.tokens) for stretch in history))
    while ends and any(lo < ends[-1] < hi for lo, hi in inside):
        ends.pop()
    return tuple(history[: len(ends)])


def _behind(prompt: Prompt, row: int) -> Iterator[Segment]:
    """Segments from a row on; what is left of one that begins before is fresh."""
    for segment, (lo, hi) in zip(prompt.segments, prompt.spans, strict=True):
        if lo >= row:
            yield segment
        elif hi > row:
            yield Segment(segment.tokens[row - lo :], segment.start + row - lo)


def _n_alike(one: Sequence[int], other: Sequence[int]) -> int:
    """How many ids two beginnings share."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
