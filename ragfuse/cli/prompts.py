"""The prompt of all commands: instruction, chunks and question."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ragfuse.engine.ask import Ask
from ragfuse.text.chat_messages import Piece

if TYPE_CHECKING:
    from ragfuse.engine.engine import Content
    from ragfuse.remote.remote_engine import Answerer

INSTRUCTION = "Answer the question in a few words, using only the passages below.\n\n"
FILLER = "A passage long enough to be reused, whatever the model. " * 8


def rag_prompt(
    engine: Answerer, question: str, chunks: Sequence[tuple[str, str]]
) -> str | list[tuple[str, Content]]:
    """Return a prompt with a question over (text, source) chunks.

    Returns:
        One user message whose content has a `Piece` per chunk. Without chunks, the message is just
        the question. For a model without a chat template, the prompt is plain text. The engine
        then recognises known chunks and the chunks of `Ask.documents`.
    """
    if not engine.card.has_chat_template:
        passages = "".join(f"{text}\n\n" for text, _ in chunks)
        return f"{INSTRUCTION}{passages}Question: {question}\nAnswer:"
    if not chunks:
        return [("user", question)]
    parts = [Piece(INSTRUCTION)]
    for text, source in chunks:
        parts += [Piece(text, "chunk", source), Piece("\n\n")]
    return [("user", (*parts, Piece(f"Question: {question}")))]


def prefix_of(engine: Answerer) -> tuple[int, ...]:
    """Return the token ids that precede the first chunk in every `rag_prompt` over chunks."""
    filler = [(FILLER, "")]
    return engine.prefix(rag_prompt(engine, "?", filler), Ask(documents=filler))
