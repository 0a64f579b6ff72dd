"""Stage 1, build: turn a question and its conversation's history into a prompt that fits the
context.

The history's KV is reused only where token ids are identical (AttentionStore). `prefix_cache.py`
saves the history's KV. `sessions/session.py` computes the ranges to truncate.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from ragfuse.engine.prefix_cache import PrefixCache, with_rows, without_rows
from ragfuse.engine.prompt_builder import PromptBuilder
from ragfuse.engine.request import PreparedPrompt, Request
from ragfuse.engine.runtime import TOKEN_CHARS, remaining_context
from ragfuse.engine.schema_service import SchemaService
from ragfuse.errors import OverlongError, about
from ragfuse.schemas.nodes import PMLPrompt
from ragfuse.sessions.session import (
    PendingTurn,
    Session,
    Turn,
    agreed,
    is_same,
    truncated,
)
from ragfuse.sessions.session_store import SessionStore
from ragfuse.text.chat_messages import ChatMessage, Piece, turn_begins
from ragfuse.types.answer import Answer
from ragfuse.types.prompt import Prompt

log = logging.getLogger("ragfuse.engine")

TURN_SAVE_WAIT_S = 5.0
"""Maximum seconds that a turn waits for the save of the previous turn's KV."""


class ConversationHistory:
    """Puts the stored turns of conversations into prompts, and records new turns. Thread-safe.

    Args:
        prompts: Splits messages into chunks and fresh text.
        prefixes: The prefix cache, which saves the KV of turns.
    """

    def __init__(self, prompts: PromptBuilder, prefixes: PrefixCache) -> None:
        runtime = prompts.runtime
        self._settings, self._prompts, self._runtime = runtime.settings, prompts, runtime
        self._prefixes = prefixes
        self.sessions = SessionStore(
            runtime.store,
            runtime.catalog,
            lambda: [runtime.digest],
            runtime.settings.session_ttl_s,
            runtime.saves,
            runtime.conversations,
        )

    # before the answer

    def fitted(self, request: Request) -> Prompt:
        """Return a question's prompt, shortened to fit the context; stored turns become history
        segments.

        First, rows of the history's KV are truncated. If that is not enough, as few of the earliest
        turns as possible are left out, and the prompt has no history segments.

        Args:
            request: The question. If `Ask.session` is set, the question's messages are that
                session's new messages, or all messages of the conversation.
        """
        name, messages, pending = request.ask.session, request.messages, None
        if name is not None:
            pending = self._pending_turn(request, name)
            messages = [*pending.session.messages, *pending.messages]
        whole = self._prompts.prompt(request, messages)
        placed = whole if pending is None else self._placed(whole, pending, request)
        head, begins = turn_begins(messages)
        if not begins or self._fits(placed, request):
            return placed

        @cache
        def without(begin: int) -> Prompt:
            short = self._prompts.prompt(request, [*messages[:head], *messages[begin:]])
            return _without_turns(whole, short, pending)

        fits = bisect_left(begins[:-1], True, key=lambda at: self._fits(without(at), request))
        shortest = without(begins[fits])
        return shortest if len(shortest) < len(placed) else placed

    def _pending_turn(self, request: Request, name: str) -> PendingTurn:
        """Return the turn that a question adds to a session.

        If the question's messages include an assistant message, they are the whole conversation.
        The turn then continues only the stored turns that the messages repeat.
        """
        given = request.messages
        version, session = self.sessions.get(self._runtime.encoder.digest, name) or (
            0,
            Session(name),
        )
        self._runtime.saves.wait([name], TURN_SAVE_WAIT_S)
        kept, new = session, given
        if any(message.role == "assistant" for message in given):
            kept = agreed(session, given)
            new = given[len(kept.messages) :]
        elif session.messages:
            first = session.messages[0]
            new = [each for each in given if each.role != "system" or not is_same(each, first)]
        return PendingTurn(kept, tuple(new), version, session.keys)

    def _placed(self, prompt: Prompt, pending: PendingTurn, request: Request) -> Prompt:
        """Return the prompt with history segments, truncated to fit the context window."""
        session, ids = pending.session, prompt.token_ids
        known = session.known(ids)
        n_past = known[-1].hi if known else 0
        lo, hi = session.left_out if session.left_out[1] <= n_past else (0, 0)
        window, settings = self._window, self._settings
        if window is not None:
            room = max(0, request.limit(window) - (len(prompt) - n_past))
            step = max(1, int(settings.truncate_ratio * window))
            lo, hi = truncated((lo, hi), n_past, room, step, settings.sinks)
        short = without_rows(with_rows(prompt, known, "history"), lo, hi)
        return replace(short, conversation=replace(pending, left_out=(lo, ids[lo:hi])))

    def _fits(self, prompt: Prompt, request: Request) -> bool:
        window = self._window
        return window is None or len(prompt) <= request.limit(window)

    @property
    def _window(self) -> int | None:
        """Maximum tokens of prompt and answer together; None if there is no limit."""
        limits = (self._settings.window_tokens, self._runtime.model.max_context)
        return min((each for each in limits if each), default=None)

    # after the answer

    def after(self, ready: PreparedPrompt, answer: Answer, ids: Sequence[int]) -> None:
        """Add the answered turn to its session, if any; save the turn's KV in the background."""
        prompt, encoder = ready.plan.prompt, self._runtime.encoder
        pending = prompt.conversation
        if not isinstance(pending, PendingTurn):
            return
        # the text lacks reasoning and tool calls, and a stop string may have cut it
        model, answer_ids = encoder.model, answer.token_ids
        if model.text(answer_ids) != answer.text:
            answer_ids = tuple(model.tokens(answer.text))
        n_written = min(_n_common(answer_ids, ids), ready.n_held(len(ids)) - len(prompt))
        tokens, rows = self._prefixes.keep(ready, pending, answer_ids[:n_written])
        messages = list[ChatMessage]()
        for each in pending.messages:
            messages.append(replace(each, content=tuple(self._prompts.pieces(each.pieces))))
        said = Piece(answer.text, ids=() if answer.tool_calls else answer_ids)
        turn = Turn((*messages, ChatMessage("assistant", (said,), answer.tool_calls)))
        row, left_out = pending.left_out
        turns = (*pending.session.turns, turn)
        session = Session(
            pending.id,
            turns,
            tokens,
            rows,
            (row, row + len(left_out)) if left_out and tokens else (0, 0),
        )
        unused_keys = set(pending.previous_keys).difference(session.keys)
        if not self.sessions.put(encoder.digest, session, pending.version):
            log.warning(
                "Another question continued session %s first, so this question and its answer are"
                " not saved in it. The answer is not affected.",
                pending.id,
            )
            unused_keys = set(session.keys).difference(pending.previous_keys)
        if unused_keys:  # deleted after all pending saves
            self.sessions.release(unused_keys)


def _without_turns(whole: Prompt, short: Prompt, pending: PendingTurn | None) -> Prompt:
    """Return `short`, with the tokens of the omitted turns recorded for the next turn."""
    row, n_omitted = _n_common(whole.token_ids, short.token_ids), max(0, len(whole) - len(short))
    omitted = whole.token_ids[row : row + n_omitted]
    if whole.token_ids != (
        *short.token_ids[:row],
        *omitted,
        *short.token_ids[row:],
    ):
        omitted = ()
    turn = pending and replace(pending, left_out=(row, omitted))
    return replace(short, truncated=n_omitted, conversation=turn)


def _n_common(one: Sequence[int], other: Sequence[int]) -> int:
    return next(
        (at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )


@about("prompt")
def build(request: Request, history: ConversationHistory, schemas: SchemaService) -> Prompt:
    """Build the prompt of a question, and check that prompt and answer fit the context.

    Args:
        request: The request.
        history: The stored conversations, used if the question continues a conversation.
        schemas: The schemas, used if the question is a PML prompt.

    Raises:
        OverlongError: The prompt or the answer does not fit the context (see `check_fits`).
        InputError: The question is invalid.
    """
    question, ask, messages = request.question, request.ask, request.messages
    if isinstance(question, PMLPrompt):
        prompt = schemas.prompt(question, ask)
        check_fits(prompt, request)
        return prompt
    contents = "\n".join(message.text for message in messages)
    # earlier turns may be left out
    may_shorten = ask.session is not None or bool(turn_begins(messages)[1])
    if not may_shorten:
        remaining_context(len(contents) // TOKEN_CHARS, request.model, at_least=True)
    prompt = history.fitted(request)
    check_fits(prompt, request, may_shorten)
    if not ask.documents or any(segment.kind == "chunk" for segment in prompt.segments):
        return prompt
    return replace(prompt, altered=all(text.strip() not in contents for text, _ in ask.documents))


def check_fits(prompt: Prompt, request: Request, may_shorten: bool = False) -> None:
    """Raise OverlongError if the prompt and the longest allowed answer exceed the context.

    An answer without a maximum length may use the remaining context.

    Args:
        prompt: The prompt.
        request: The request.
        may_shorten: True if earlier turns may have been left out. The answer's maximum length may
            then be the whole context, not only the room after the prompt.

    Raises:
        OverlongError: The prompt or the answer does not fit.
    """
    n_tokens, model = prompt.segments[-1].stop, request.model
    left = remaining_context(n_tokens, model)
    wanted, max_context = request.max_tokens(), model.max_context
    room = max_context if may_shorten else left
    if wanted is not None and room is not None and wanted > room:
        behind = "" if may_shorten else f" after a prompt of {n_tokens:,}"
        raise OverlongError(
            f"An answer of {wanted:,} tokens does not fit{behind}: the context of"
            f" {model.name} is {max_context:,} tokens. Ask for at most {room:,} tokens"
            f"{'' if may_shorten else ', or shorten the prompt'}.",
            "max_tokens",
        )
