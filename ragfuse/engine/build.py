"""Stage 1, build: turn a question and the history of its conversation into a prompt that fits the
model's context.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

from ragfuse.engine.constraints import offered_tools
from ragfuse.engine.history import ConversationHistory, may_leave_out_turns
from ragfuse.engine.overflow import TOKEN_CHARS, check_fits, drops, remaining_context
from ragfuse.engine.question import is_ids, mended_question, messages_of
from ragfuse.engine.request import Request
from ragfuse.engine.schema_service import SchemaService
from ragfuse.errors import about
from ragfuse.schemas.nodes import PMLPrompt
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
    question, ask, settings = request.question, request.ask, request.runtime.settings
    if isinstance(question, PMLPrompt):
        prompt, may_shorten = schemas.prompt(question, ask), False
    else:
        tools, question = offered_tools(ask), mended_question(question)
        messages = [] if is_ids(question) else messages_of(question)
        contents = "\n".join(message.text for message in messages)
        may_shorten = drops(ask, settings) or may_leave_out_turns(messages, ask)
        if not may_shorten:
            pieces = chain.from_iterable(message.pieces for message in messages)
            has_chunks = bool(ask.documents) or any(piece.kind == "chunk" for piece in pieces)
            n_tokens = len(contents) // TOKEN_CHARS
            remaining_context(n_tokens, request.model, may_drop=has_chunks, at_least=True)
        prompt = history.fitted(question, ask, tools)
    check_fits(prompt, ask, request.model, drops(ask, settings), may_shorten)
    if isinstance(question, PMLPrompt) or not ask.documents:
        return prompt
    if any(segment.kind == "chunk" for segment in prompt.segments):
        return prompt
    return replace(prompt, altered=all(text.strip() not in contents for text, _ in ask.documents))
