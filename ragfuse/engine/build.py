"""Stage 1, build: turn a question and the history of its conversation into a prompt that fits the
model's context.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

from ragfuse.engine.history import ConversationHistory
from ragfuse.engine.overflow import TOKEN_CHARS, remaining_context
from ragfuse.engine.request import Request
from ragfuse.engine.schema_service import SchemaService
from ragfuse.errors import OverlongError, about
from ragfuse.schemas.nodes import PMLPrompt
from ragfuse.text.chat_messages import LaterMessages
from ragfuse.types.prompt import Prompt


@about("prompt")
def build(request: Request, history: ConversationHistory, schemas: SchemaService) -> Prompt:
    """Return the prompt of a question; where it is too long and overflow is "drop", without its
    last chunks.

    Args:
        request: The request.
        history: The conversations, one of which the question may continue.
        schemas: The schemas over which a prompt in PML is.

    Raises:
        OverlongError: The prompt or the length of its answer does not fit the model's context, and
            nothing more may be left out.
        InputError: The question is invalid.
    """
    question, ask, messages = request.question, request.ask, request.messages
    if isinstance(question, PMLPrompt):
        prompt = schemas.prompt(question, ask)
        check_fits(prompt, request)
        return prompt
    contents = "\n".join(message.text for message in messages)
    # earlier turns may be left out
    may_shorten = request.drops or ask.session is not None or len(LaterMessages(messages)) > 0
    if not may_shorten:
        pieces = chain.from_iterable(message.pieces for message in messages)
        has_chunks = bool(ask.documents) or any(piece.kind == "chunk" for piece in pieces)
        n_tokens = len(contents) // TOKEN_CHARS
        remaining_context(n_tokens, request.model, may_drop=has_chunks, at_least=True)
    prompt = history.fitted(request)
    check_fits(prompt, request, may_shorten)
    if not ask.documents or any(segment.kind == "chunk" for segment in prompt.segments):
        return prompt
    return replace(prompt, altered=all(text.strip() not in contents for text, _ in ask.documents))


def check_fits(prompt: Prompt, request: Request, may_shorten: bool = False) -> None:
    """Refuse a prompt, or an answer that was asked to be longer than the model's context has room
    for after it.

    Without a length in the request an answer gets what is left.

    Args:
        prompt: The prompt.
        request: The request, which says whether chunks are left out where it is too long; else that
            is the advice.
        may_shorten: Whether the prompt may be shortened for the answer; then its length alone
            counts.

    Raises:
        OverlongError: One of them does not fit.
    """
    n_tokens, model = prompt.segments[-1].stop, request.model
    may_drop = not request.drops and any(segment.kind == "chunk" for segment in prompt.segments)
    left = remaining_context(n_tokens, model, may_drop=may_drop)
    wanted, max_context = request.max_tokens(), model.max_context
    room = max_context if may_shorten else left
    if wanted is not None and room is not None and wanted > room:
        behind = "" if may_shorten else f" after a prompt of {n_tokens:,}"
        raise OverlongError(
            f"An answer of {wanted:,} tokens does not fit{behind}: the context of"
            f" {model.name} is {max_context:,} tokens.",
            f"Ask for at most {room:,} tokens{'' if may_shorten else ', or shorten the prompt'}.",
            argument="max_tokens",
        )
