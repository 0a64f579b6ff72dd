"""Conversation history: reuse the KV of earlier turns in a prompt, and save the KV of each new turn (AttentionStore).

A conversation is recognised by its messages, but KV is reused only for identical token ids. Truncation is in
`sessions/session.py`; sessions are stored by `sessions/session_store.py`.
"""

from __future__ import annotations

import logging
import secrets
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate

from ragfuse.engine.ask import Ask
from ragfuse.engine.encoder import PACE_S
from ragfuse.engine.overflow import asked_length, fitted
from ragfuse.engine.pending_saves import PendingSaves
from ragfuse.engine.prefix_cache import PrefixCache
from ragfuse.engine.prompt_builder import PromptBuilder
from ragfuse.engine.question import ChatInput, Ids, is_ids, mended_question, messages_of
from ragfuse.engine.request import PreparedPrompt
from ragfuse.engine.runtime import Runtime
from ragfuse.fuse.gather import gathered
from ragfuse.sessions.conversation_index import ConversationIndex, Name
from ragfuse.sessions.session import (
    HistoryMessage,
    KVSpan,
    Part,
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
from ragfuse.sessions.turn_kv import RowRanges, Saves, turn_kv_of
from ragfuse.settings import Settings
from ragfuse.store import KVStore
from ragfuse.store.catalog import Catalog
from ragfuse.text.chat_messages import ChatMessage, LaterMessages, Piece
from ragfuse.types.answer import Answer
from ragfuse.types.keys import ChunkKey
from ragfuse.types.kv import ChunkKV
from ragfuse.types.prompt import Prompt, Segment

log = logging.getLogger("ragfuse.engine")

TURN_SAVE_WAIT_S = 5.0
"""Longest time in seconds that a turn waits until the KV of the turn before it is saved."""
STOP_SEARCH_TOKENS = 64
"""How many of an answer's last token ids are searched for the place where a stop string cut its text."""


class ConversationHistory:
    """The conversations of one engine. Thread-safe.

    Args:
        settings: Which conversations are kept, and how histories are truncated.
        catalog: Where sessions are written.
        prompts: Splits messages into chunks and fresh text.
        runtime: The model and its encoder.
        store: Where KV is kept.
        index: Which conversation each KV entry belongs to; used for eviction and prefetching.
        prefixes: The prefix cache, which shares exact KV of conversations with other prompts.
        pending: Saves in the background.
    """

    def __init__(
        self,
        settings: Settings,
        catalog: Catalog,
        prompts: PromptBuilder,
        runtime: Runtime,
        store: KVStore,
        index: ConversationIndex,
        prefixes: PrefixCache,
        pending: PendingSaves,
    ) -> None:
        self._settings, self._prompts, self._runtime, self._index = settings, prompts, runtime, index
        self._prefixes = prefixes
        self._pending = pending
        self.sessions = SessionStore(
            store,
            catalog,
            lambda: [runtime.digest],
            settings.session_ttl_s,
            settle=pending.flush,
            later=pending.later,
            index=index,
        )
        self._begun = set[int]()  # ids of prompts whose KV is saved but whose turn is not recorded yet

    # before the answer

    def fitted(
        self, question: ChatInput | Ids, ask: Ask, make: Callable[[ChatInput | Ids, int], Prompt], limit: int | None
    ) -> Prompt:
        """Return the prompt of a question, with the stored turns of its conversation as history segments.

        The history is truncated first; chunks are left out only where that is not enough.

        Args:
            question: The new messages, or all messages of the conversation.
            ask: Its options; `session` names the conversation.
            make: Makes the prompt of messages without their last n chunks.
            limit: Most tokens of the prompt, as for `overflow.fitted`; None: no chunk is left out.
        """
        pending = self._pending_turn(question, ask)
        if pending is None:
            return fitted(lambda n: make(question, n), limit)
        messages = [*_stored_messages(pending.session), *(chat_message_of(message) for message in pending.messages)]
        return fitted(lambda n: self._shortened(lambda shorter: make(shorter, n), messages, pending, ask), limit)

    def may_shorten(self, question: ChatInput | Ids, ask: Ask) -> bool:
        """Return whether earlier turns may be left out of a question that is too long."""
        if ask.session is not None:
            return True
        if self._settings.history == "asked" or is_ids(question):
            return False
        return len(LaterMessages(messages_of(question))) > 0

    def has_earlier(self, prompt: Prompt, question: ChatInput | Ids) -> bool:
        """Return whether a prompt has earlier turns, stored ones or in its question, that may be left out of it."""
        pending = prompt.conversation
        if isinstance(pending, PendingTurn) and pending.session.turns:
            return True
        return not is_ids(question) and len(LaterMessages(messages_of(question))) > 0

    def name_of(self, question: ChatInput | Ids, ask: Ask) -> str | None:
        """Return the name of the session that a question continues; None where it continues none."""
        question, digest = mended_question(question), self._runtime.encoder.digest
        if ask.session is not None:
            self.sessions.get(digest, ask.session)  # another process may have added a turn
        if ask.session is not None or not self._may_continue(question):
            return ask.session
        given = prefix_digests([_history_message(message) for message in messages_of(question)])
        known = self.sessions.ending(digest, given, persistent=self._settings.history == "all")
        return known[1].id if known is not None else None

    def keys_of(self, name: Name) -> Sequence[ChunkKey]:
        """Return the keys of a conversation's KV; a conversation that is not in the index is read from the catalog."""
        return self._index.keys(name) or (self.sessions.get(*name) and self._index.keys(name)) or ()

    def _pending_turn(self, question: ChatInput | Ids, ask: Ask) -> PendingTurn | None:
        """Return the conversation that a question continues or begins; None where conversations are not kept."""
        settings = self._settings
        if ask.session is None and not self._may_continue(question):
            return None
        encoder = self._runtime.encoder
        given = [_history_message(message) for message in messages_of(question)]
        if ask.session is not None:
            return self._named(ask.session, given, encoder.digest)
        persistent = settings.history == "all"
        known = self.sessions.ending(encoder.digest, prefix_digests(given), persistent)
        if known is None:
            return PendingTurn(Session(secrets.token_hex(8)), tuple(given), persistent=persistent)
        version, session = known
        self._pending.wait([session.id], TURN_SAVE_WAIT_S)
        kept = agreed(session, given)
        if len(kept.turns) < len(session.turns):  # it differs in a later turn: a new conversation branches off here
            version, kept = 0, replace(kept, id=secrets.token_hex(8))
        previous_keys = kept.keys if version else ()
        return PendingTurn(kept, tuple(given[len(kept.messages) :]), version, persistent, previous_keys=previous_keys)

    def _may_continue(self, question: ChatInput | Ids) -> bool:
        """Return whether a question without a session name may continue a conversation."""
        return not (isinstance(question, str) or is_ids(question) or self._settings.history == "asked")

    def _named(self, name: str, given: list[HistoryMessage], digest: str) -> PendingTurn:
        """Return the session of this name with the new messages.

        Messages that include one of the assistant are the whole conversation: only the turns that agree with them stay.
        """
        version, session = self.sessions.get(digest, name) or (0, Session(name))
        self._pending.wait([session.id], TURN_SAVE_WAIT_S)
        keep_chunks = self._settings.history_chunks
        if any(message.role == "assistant" for message in given):
            if session.turns:
                kept = agreed(session, given, is_again)
            else:  # perhaps a branch of another session; chunks count only where they are sent again
                known = self.sessions.ending(digest, prefix_digests(given), persistent=True)
                self._pending.wait([known[1].id if known is not None else name], TURN_SAVE_WAIT_S)
                kept = agreed(replace(known[1], id=name), given) if known is not None else session
            return PendingTurn(kept, tuple(given[len(kept.messages) :]), version, True, keep_chunks, session.keys)
        first = session.messages[:1]
        new = (message for message in given if message.role != "system" or message not in first)
        return PendingTurn(session, tuple(new), version, True, keep_chunks, session.keys)

    def _with_chunks(self, message: HistoryMessage) -> HistoryMessage:
        """Return a message with its known chunks as parts of their own."""
        return replace(message, parts=_parts_of(self._prompts.pieces(pieces_of(message))))

    def _shortened(
        self, make: Callable[[ChatInput | Ids], Prompt], messages: Sequence[ChatMessage], pending: PendingTurn, ask: Ask
    ) -> Prompt:
        """Return the prompt with its history, shortened to fit the context window.

        First KV rows of the history are truncated. Where that is not enough, the fewest earliest turns that have to go
        are left out; such a prompt is computed without history.
        """
        whole = make(messages)
        placed = self._placed(whole, pending, ask)
        shorter = () if self._fits(placed, ask) else LaterMessages(messages)
        if not shorter:
            return placed
        without = lru_cache(maxsize=None)(lambda n: _without_turns(whole, make(shorter[n]), pending))
        shortest = without(bisect_left(range(len(shorter) - 1), True, key=lambda n: self._fits(without(n), ask)))
        return shortest if len(shortest) < len(placed) else placed

    def _placed(self, prompt: Prompt, pending: PendingTurn, ask: Ask) -> Prompt:
        """Return the prompt with its first tokens replaced by history segments, truncated to the context window."""
        history = _outside_chunks(matched(pending.session.kv_spans, prompt.token_ids), prompt)
        n_past = sum(len(kv_span.tokens) for kv_span in history)
        window, settings = self._window(ask), self._settings
        if window is not None:
            room = max(0, window[1] - (len(prompt) - n_past))
            history = truncated(history, room, window[0], settings.truncate_ratio, settings.sinks)
        pending = replace(pending, history=history)
        names, segments = names_of(pending.session), list[Segment]()
        for lo, hi, kv_span in pending.placed():
            start, rows = segments[-1].stop if segments else 0, None if hi - lo == len(kv_span.tokens) else (lo, hi)
            name = names.get(kv_span.key, "")
            segments.append(Segment(kv_span.tokens[lo:hi], start, "history", (kv_span.key,), name, rows=rows))
        n_kept = segments[-1].stop if segments else 0
        tail = (replace(each, start=each.start - n_past + n_kept) for each in _segments_from(prompt, n_past))
        shift = n_kept - n_past
        user_rows = (max(0, prompt.last_user_rows[0] + shift), max(0, prompt.last_user_rows[1] + shift))
        first = max(-1, prompt.first_chunk + shift)
        segments += tail
        return replace(
            prompt,
            segments=tuple(segments),
            truncated=-shift,
            conversation=pending,
            last_user_rows=user_rows,
            first_chunk=first,
        )

    def _window(self, ask: Ask) -> tuple[int, int] | None:
        """Return the most tokens of prompt and answer together, and of the prompt alone; None without a limit."""
        limits = [each for each in (self._settings.window_tokens, self._runtime.encoder.model.max_context) if each]
        if not limits:
            return None
        window = min(limits)
        answer = min(asked_length(ask) or self._settings.max_tokens, max(1, window // 4))
        return window, window - answer

    def _fits(self, prompt: Prompt, ask: Ask) -> bool:
        window = self._window(ask)
        return window is None or len(prompt) <= window[1]

    # after it

    def begin(self, ready: PreparedPrompt, ask: Ask) -> None:
        """Start saving the KV of a prompt's new tokens while its answer is generated (AttentionStore 3.2.2)."""
        pending = ready.plan.prompt.conversation
        if isinstance(pending, PendingTurn) and self._is_kept(ready, pending, ask):
            self._begun.add(id(ready))
            self._save_later(ready, turn_kv_of(ready.plan, pending, self._runtime.encoder.key).saves, pending)

    def after(self, ready: PreparedPrompt, ids: Sequence[int], answer: Answer, ask: Ask) -> None:
        """Record the turn that was answered, and save the answer's KV in the background.

        Args:
            ready: The prefilled prompt.
            ids: The generated token ids.
            answer: The answer.
            ask: Its options.
        """
        pending = ready.plan.prompt.conversation
        if isinstance(pending, PendingTurn) and self._is_kept(ready, pending, ask):
            self._remember(ready, pending, ids, answer, ask.continue_final_message)

    def end(self, ready: PreparedPrompt) -> None:
        """Finish a prompt: drop the KV that was saved for a turn that was never recorded, as after an error."""
        pending = ready.plan.prompt.conversation
        if isinstance(pending, PendingTurn) and id(ready) in self._begun:
            self._begun.discard(id(ready))
            saves = turn_kv_of(ready.plan, pending, self._runtime.encoder.key).saves
            self._release_later({kv_span.key for kv_span, _ in saves})

    def _remember(
        self, ready: PreparedPrompt, pending: PendingTurn, ids: Sequence[int], answer: Answer, goes_on: bool
    ) -> None:
        """Record one turn and save its answer's KV; `goes_on`: the answer continues the last message."""
        encoder, n_prompt = self._runtime.encoder, len(ready.plan.prompt)
        turn_kv, answer_ids = turn_kv_of(ready.plan, pending, encoder.key), self._text_ids(answer)
        n_rows = min(_n_common(answer_ids, ids), ready.n_held(len(ids)) - n_prompt)
        kv_spans, written = [*turn_kv.new_spans], answer_ids[:n_rows]
        if n_rows >= encoder.shortest:
            kv_spans.append(KVSpan.whole(written, encoder.key(written, turn_kv.answer_context)))
            answer_rows = ((n_prompt, n_prompt + n_rows),)
            self._save_later(ready, ((kv_spans[-1], answer_rows),), pending, written)
        messages = tuple(map(self._with_chunks, pending.messages))
        if not pending.keep_chunks:
            messages = tuple(map(_without_chunks, messages))
        text = answer.text
        if goes_on and messages:
            text = messages[-1].text + self._continuation(answer, answer_ids)
            messages = messages[:-1]
        reply = HistoryMessage("assistant", ((text, "fresh", ""),) if text else (), answer.tool_calls)
        turn = Turn((*messages, reply), () if answer.tool_calls or goes_on else answer_ids, tuple(kv_spans))
        before = pending.session.with_kv_spans(turn_kv.history)
        session = replace(before, turns=(*before.turns, turn))
        unused_keys = set(pending.previous_keys).difference(session.keys)
        if not self.sessions.put(encoder.digest, session, pending.version, pending.persistent):
            log.warning(
                "Another question continued session %s first, so this question and its answer are not saved in it. The "
                "answer is right.",
                pending.id,
            )
            unused_keys = {kv_span.key for kv_span in (*kv_spans, *(kv_span for kv_span, _ in turn_kv.saves))}
        self._begun.discard(id(ready))
        if unused_keys:
            self._release_later(unused_keys)

    def _is_kept(self, ready: PreparedPrompt, pending: PendingTurn, ask: Ask) -> bool:
        """Return whether the turn is kept; one that is not persistent only where its prompt has no chunks."""
        has_chunks = any(segment.kind == "chunk" for segment in ready.plan.prompt.segments)
        return ask.reuse and (pending.persistent or not has_chunks)

    def _text_ids(self, answer: Answer) -> tuple[int, ...]:
        """Return the ids of an answer's text: the generated ones, with the end tokenised anew where a stop cut it."""
        model, ids = self._runtime.encoder.model, answer.token_ids
        for count in range(len(ids), max(-1, len(ids) - STOP_SEARCH_TOKENS), -1):
            text = model.text(ids[:count])
            if answer.text.startswith(text):
                rest = answer.text[len(text) :]
                return (*ids[:count], *(model.tokens(rest) if rest else ()))
        return tuple(model.tokens(answer.text))

    def _continuation(self, answer: Answer, ids: Sequence[int]) -> str:
        """Return an answer's text as it reads after the message that it continues.

        Decoded alone, the text of some tokenizers lacks the space before it.
        """
        text = self._runtime.encoder.model.encoder.decode(ids)
        return text if text.strip() == answer.text.strip() else answer.text

    def _save_later(
        self, ready: PreparedPrompt, saves: Saves, pending: PendingTurn, written: tuple[int, ...] = ()
    ) -> None:
        """Save KV rows of a prompt and its answer (`written`) in the background, unless too many bytes wait already.

        Exact rows go to the prefix cache too: a prompt that begins with them waits until they are saved.
        """
        if ready.prefill.cache is None:
            return
        kv, ids = ready.prefill.kv, (*ready.plan.prompt.token_ids, *written)
        exact = [(rows[0], each.key) for each, rows in saves if len(rows) == 1 and each.key.encoded != "filler"]
        for (lo, hi), key in exact:
            self._prefixes.note_raw(ids[:hi], lo, key)

        def save() -> None:
            for kv_span, rows in saves:
                self._save(kv, kv_span, rows, pending.persistent)

        self._pending.submit({pending.id, *(key for _, key in exact)}, kv.nbytes, save)

    def _release_later(self, keys: Collection[ChunkKey]) -> None:
        """Drop KV that no session uses, in the background, after all pending saves."""
        self._pending.later(lambda: self.sessions.release(keys))

    def _save(self, kv: ChunkKV, kv_span: KVSpan, rows: RowRanges, persistent: bool) -> None:
        """Cut the rows out of a prompt's KV and store them: in memory alone unless the session is persistent."""
        encoder = self._runtime.encoder
        store, fast = encoder.store, [tier.name for tier in encoder.store.tiers if not tier.slow]
        if not (persistent or fast):
            return
        if store.lookup([kv_span.key]) and (not persistent or store.is_persistent(kv_span.key)):
            return
        run = gathered(kv, rows, encoder.model.profile.rope)
        if not persistent:
            store.put(kv_span.key, run, tier=fast[-1])
            return
        home, levels = encoder.home(run.n_tokens, run.nbytes), encoder.levels(run.n_tokens, run.nbytes)
        store.put(kv_span.key, run, slow_tier=home, levels=levels, pace_s=0.0 if fast else PACE_S)


def _history_message(message: ChatMessage) -> HistoryMessage:
    parts = _parts_of(message.pieces)
    return HistoryMessage(
        message.role, parts, message.tool_calls, message.tool_call_id, message.name, message.reasoning
    )


def _parts_of(pieces: Iterable[Piece]) -> tuple[Part, ...]:
    return tuple((piece.text, piece.kind, piece.source) for piece in pieces if piece.text)


def pieces_of(message: HistoryMessage) -> tuple[Piece, ...]:
    """Return a stored message's content."""
    return tuple(Piece(text, "chunk" if kind == "chunk" else "fresh", source) for text, kind, source in message.parts)


def chat_message_of(message: HistoryMessage) -> ChatMessage:
    """Return a stored message as a chat message for a prompt."""
    return ChatMessage(
        message.role, pieces_of(message), message.tool_calls, message.tool_call_id, message.name, message.reasoning
    )


def _stored_messages(session: Session) -> Iterator[ChatMessage]:
    """Yield a session's messages; answers carry their generated ids, so that they are not tokenised again."""
    for turn in session.turns:
        yield from map(chat_message_of, turn.messages[:-1])
        answer = chat_message_of(turn.messages[-1])
        text = turn.messages[-1].text
        yield replace(answer, content=(Piece(text, ids=turn.answer_ids),)) if text and turn.answer_ids else answer


def _without_turns(whole: Prompt, short: Prompt, pending: PendingTurn) -> Prompt:
    """Return the short prompt, with the tokens of the omitted turns recorded for the conversation's next turn."""
    row, n_omitted = _n_common(whole.token_ids, short.token_ids), max(0, len(whole) - len(short))
    omitted = whole.token_ids[row : row + n_omitted]
    drops_chunks = not pending.keep_chunks and any(segment.kind == "chunk" for segment in whole.segments)
    if drops_chunks or whole.token_ids != (*short.token_ids[:row], *omitted, *short.token_ids[row:]):
        omitted = ()
    return replace(short, truncated=n_omitted, conversation=replace(pending, omitted=(row, omitted)))


def _without_chunks(message: HistoryMessage) -> HistoryMessage:
    return replace(message, parts=tuple(part for part in message.parts if part[1] == "fresh"))


def _outside_chunks(history: Sequence[KVSpan], prompt: Prompt) -> tuple[KVSpan, ...]:
    """Return the longest part of a history that does not end inside a chunk: the chunk's rest would match no entry."""
    inside = [
        (lo, hi) for segment, (lo, hi) in zip(prompt.segments, prompt.spans, strict=True) if segment.kind == "chunk"
    ]
    ends = list(accumulate(len(kv_span.tokens) for kv_span in history))
    while ends and any(lo < ends[-1] < hi for lo, hi in inside):
        ends.pop()
    return tuple(history[: len(ends)])


def _segments_from(prompt: Prompt, row: int) -> Iterator[Segment]:
    """Yield the segments from a row on; the rest of a segment that begins earlier becomes fresh text."""
    for segment, (lo, hi) in zip(prompt.segments, prompt.spans, strict=True):
        if lo >= row:
            yield segment
        elif hi > row:
            yield Segment(segment.tokens[row - lo :], segment.start + row - lo)


def _n_common(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the longest common prefix of two id sequences."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
