"""Conversation history: which session a question continues, what its prompt has of it, and the turn that it adds.

A conversation is recognised by its messages, but KV is reused only for identical token ids (AttentionStore).
`engine/prefix_cache.py` saves it. Truncation is in `sessions/session.py`; sessions are stored by
`sessions/session_store.py`.
"""

from __future__ import annotations

import logging
import secrets
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache

from ragfuse.engine.ask import Ask
from ragfuse.engine.overflow import asked_length, fitted
from ragfuse.engine.prefix_cache import PrefixCache, with_rows, without_rows
from ragfuse.engine.prompt_builder import PromptBuilder
from ragfuse.engine.question import ChatInput, Ids, is_ids, mended_question, messages_of
from ragfuse.engine.request import PreparedPrompt
from ragfuse.engine.runtime import Runtime
from ragfuse.process.jobs import BackgroundJobs
from ragfuse.sessions.conversation_index import ConversationIndex, Name
from ragfuse.sessions.session import (
    PendingTurn,
    Session,
    Turn,
    agreed,
    is_again,
    is_same,
    prefix_digests,
    truncated,
)
from ragfuse.sessions.session_store import SessionStore
from ragfuse.settings import Settings
from ragfuse.store import KVStore
from ragfuse.store.catalog import Catalog
from ragfuse.text.chat_messages import ChatMessage, LaterMessages, Piece
from ragfuse.types.answer import Answer
from ragfuse.types.keys import ChunkKey
from ragfuse.types.prompt import Prompt

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
        prefixes: The tree of beginnings, which saves the KV of turns.
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
        pending: BackgroundJobs,
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
            later=self._later,
            index=index,
        )

    def _later(self, job: Callable[[], object]) -> None:
        self._pending.submit(job, counts=False, is_awaited=True)

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
        messages = [*pending.session.messages, *pending.messages]
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
        given = prefix_digests(messages_of(question))
        known = self.sessions.ending(digest, given, persistent=self._settings.history == "all")
        return known[1].id if known is not None else None

    def keys_of(self, name: Name) -> Sequence[ChunkKey]:
        """Return the keys of a conversation's KV; a conversation that is not in the index is read from the catalog."""
        return self._index.keys(name) or (self.sessions.get(*name) and self._index.keys(name)) or ()

    def _pending_turn(self, question: ChatInput | Ids, ask: Ask) -> PendingTurn | None:
        """Return the turn that a question adds to a conversation; None where conversations are not kept.

        Messages without a session's name, or that include one of the assistant, are the whole conversation: only the
        turns that agree with them stay. Where the named session has none yet, they may branch off from another one;
        chunks count only where they are sent again.
        """
        settings, name, digest = self._settings, ask.session, self._runtime.encoder.digest
        if name is None and not self._may_continue(question):
            return None
        given, persistent = messages_of(question), settings.history == "all"
        named = self.sessions.get(digest, name) if name is not None else None
        version, session = named or (0, Session(name or secrets.token_hex(8)))
        source, is_whole = session, name is None or any(message.role == "assistant" for message in given)
        if is_whole and not session.turns:
            known = self.sessions.ending(digest, prefix_digests(given), persistent or name is not None)
            source = known[1] if known is not None else session
            if name is None and known is not None:
                version, session = known
        self._pending.wait([session.id, source.id], TURN_SAVE_WAIT_S)
        if name is not None and not is_whole:
            first = prefix_digests(session.messages[:1])
            new = tuple(each for each in given if each.role != "system" or prefix_digests([each]) != first)
            return PendingTurn(session, new, version, True, settings.history_chunks, session.keys)
        kept = agreed(source, given, is_again if name is not None and source is session else is_same)
        new = tuple(given[len(kept.messages) :])
        if name is not None:
            kept = replace(kept, id=name)
            return PendingTurn(kept, new, version, True, settings.history_chunks, session.keys)
        if len(kept.turns) < len(session.turns):  # it differs in a later turn: a new conversation branches off here
            return PendingTurn(replace(kept, id=secrets.token_hex(8)), new, persistent=persistent)
        return PendingTurn(kept, new, version, persistent, previous_keys=session.keys)

    def _may_continue(self, question: ChatInput | Ids) -> bool:
        """Return whether a question without a session name may continue a conversation."""
        return not (isinstance(question, str) or is_ids(question) or self._settings.history == "asked")

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
        session, ids = pending.session, prompt.token_ids
        known = session.known(ids)
        n_past = known[-1].hi if known else 0
        lo, hi = session.left_out if session.left_out[1] <= n_past else (0, 0)
        window, settings = self._window(ask), self._settings
        if window is not None:
            room, step = max(0, window[1] - (len(prompt) - n_past)), max(1, int(settings.truncate_ratio * window[0]))
            lo, hi = truncated((lo, hi), n_past, room, step, settings.sinks)
        short = without_rows(with_rows(prompt, known, "history"), lo, hi)
        return replace(short, conversation=replace(pending, left_out=(lo, ids[lo:hi])))

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

    def after(self, ready: PreparedPrompt, ids: Sequence[int], answer: Answer, ask: Ask) -> None:
        """Record the turn that was answered, and save its KV in the background.

        Args:
            ready: The prefilled prompt.
            ids: The generated token ids.
            answer: The answer.
            ask: Its options.
        """
        pending, encoder = ready.plan.prompt.conversation, self._runtime.encoder
        if not isinstance(pending, PendingTurn) or not self._is_kept(ready, pending, ask):
            return
        answer_ids = self._text_ids(answer)
        n_written = min(_n_common(answer_ids, ids), ready.n_held(len(ids)) - len(ready.plan.prompt))
        tokens, rows = self._prefixes.keep(ready, pending, answer_ids[:n_written])
        messages = [replace(each, content=tuple(self._prompts.pieces(each.pieces))) for each in pending.messages]
        if not pending.keep_chunks:
            own = ([piece for piece in each.pieces if piece.kind == "fresh"] for each in messages)
            messages = [replace(each, content=pieces) for each, pieces in zip(messages, own, strict=True)]
        text, goes_on = answer.text, ask.continue_final_message
        if goes_on and messages:
            text = messages[-1].text + self._continuation(answer, answer_ids)
            messages = messages[:-1]
        said = Piece(text, ids=() if answer.tool_calls or goes_on else answer_ids)
        turn = Turn((*messages, ChatMessage("assistant", (said,), answer.tool_calls)))
        row, left_out = pending.left_out
        turns = (*pending.session.turns, turn)
        session = Session(
            pending.id, turns, tokens, rows, (row, row + len(left_out)) if left_out and tokens else (0, 0)
        )
        unused_keys = set(pending.previous_keys).difference(session.keys)
        if not self.sessions.put(encoder.digest, session, pending.version, pending.persistent):
            log.warning(
                "Another question continued session %s first, so this question and its answer are not saved in it. The "
                "answer is right.",
                pending.id,
            )
            unused_keys = set(session.keys).difference(pending.previous_keys)
        if unused_keys:  # dropped after all pending saves
            self._later(lambda: self.sessions.release(unused_keys))

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


def _without_turns(whole: Prompt, short: Prompt, pending: PendingTurn) -> Prompt:
    """Return the short prompt, with the tokens of the omitted turns recorded for the conversation's next turn."""
    row, n_omitted = _n_common(whole.token_ids, short.token_ids), max(0, len(whole) - len(short))
    omitted = whole.token_ids[row : row + n_omitted]
    drops_chunks = not pending.keep_chunks and any(segment.kind == "chunk" for segment in whole.segments)
    if drops_chunks or whole.token_ids != (*short.token_ids[:row], *omitted, *short.token_ids[row:]):
        omitted = ()
    return replace(short, truncated=n_omitted, conversation=replace(pending, left_out=(row, omitted)))


def _n_common(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the longest common prefix of two id sequences."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
