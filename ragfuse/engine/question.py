"""Questions: the forms in which they are asked, and the checks and repairs before a prompt is built
from them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from numbers import Integral
from pathlib import Path
from typing import TypeGuard, cast

from ragfuse.errors import InputError
from ragfuse.schemas.nodes import PMLPrompt
from ragfuse.schemas.pml import read_prompt
from ragfuse.text.chat_messages import ChatMessage, Content, Piece
from ragfuse.types.texts import whole_text, whole_value

ChatInput = str | Sequence[tuple[str, Content] | ChatMessage]
"""One text, or messages for the chat template, each a (role, content) pair or a `ChatMessage`."""


Ids = Sequence[int]
"""A prompt as token ids, which the model reads unchanged."""


Question = ChatInput | Ids | PMLPrompt
"""A question that an engine answers: text or messages, token ids, or a prompt in PML over a
registered schema.
"""


def is_ids(question: object) -> TypeGuard[Ids]:
    """Return whether a prompt is token ids."""
    if isinstance(question, str | PMLPrompt) or not isinstance(question, Sequence) or not question:
        return False
    return isinstance(question[0], Integral) and not isinstance(question[0], bool)


def mended_documents(texts: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Yield (text, source) of documents as `whole_text` does; raise InputError for anything else
    than such pairs.
    """
    for each in texts if isinstance(texts, Iterable) and not isinstance(texts, str) else (texts,):
        is_pair = isinstance(each, Sequence) and not isinstance(each, str) and len(each) == 2
        if not is_pair or not all(isinstance(part, str) for part in each):
            raise InputError(
                f"Documents are a list of (text, source) pairs; found {each!r:.80}. Write [(text,"
                " source)].",
                "documents",
            )
        source = whole_text(each[1])
        yield whole_text(each[0], f"'{source}'"), source


def texts_of(texts: Iterable[str]) -> tuple[str, ...]:
    """Return texts, or one that is given alone."""
    return (texts,) if isinstance(texts, str) else tuple(texts)


def prompts_of(prompts: Iterable[Question]) -> list[Question]:
    """Return the prompts of a batch; raise InputError for what is no list of them."""
    if isinstance(prompts, str | PMLPrompt) or not isinstance(prompts, Iterable):
        raise InputError(
            f"A batch takes a list of prompts; found {prompts!r:.80}. Write [prompt].", "prompts"
        )
    return list(prompts)


def mended_question(question: Question) -> Question:
    """Return a question with its texts as `whole_text` does; token ids and PML are returned
    unchanged.
    """
    if isinstance(question, PMLPrompt) or is_ids(question):
        return question
    whole: ChatInput = whole_value(
        question if isinstance(question, str) else messages_of(question), "The prompt"
    )
    return whole


def messages_of(question: Question) -> list[ChatMessage]:
    """Return a question's messages; a text is one message of the user.

    Raises:
        InputError: The question is token ids, an empty list, or holds something else than messages.
    """
    if is_ids(question):
        raise InputError(
            "A prompt of token ids cannot have tools or a session. Leave these out, or ask with"
            " messages."
        )
    question = cast(ChatInput, question)
    if not isinstance(question, str | Sequence):
        raise InputError(
            f"A question is a text, a list of messages or token ids; found {question!r:.80}."
        )
    messages = [ChatMessage("user", question)] if isinstance(question, str) else list(question)
    if not messages:
        raise InputError(
            "There are no messages; wanted at least one, such as ('user', 'a question')."
        )
    return [_message(each) for each in messages]


def question_of(prompt: Question | None, pml: Path | str | None) -> Question:
    """Return `prompt`, or the prompt that `pml` holds or names; raise InputError unless exactly one
    is given.
    """
    if prompt is not None and pml is None:
        return prompt
    if pml is not None and prompt is None:
        return read_prompt(pml)
    raise InputError(
        f"Give either a prompt or `pml`, found {'both' if pml is not None else 'neither'}."
    )


def _message(given: object) -> ChatMessage:
    """Return a (role, content) pair or `ChatMessage` as a `ChatMessage`; raise InputError for
    anything else.
    """
    is_pair = isinstance(given, Sequence) and not isinstance(given, str) and len(given) == 2
    message = given if isinstance(given, ChatMessage) else ChatMessage(*given) if is_pair else None  # type: ignore[misc]
    if message is None or not isinstance(message.role, str) or not _is_content(message.content):
        raise InputError(
            "A message is a pair such as ('user', 'a question'), or a ChatMessage whose content is"
            f" a text or a list of texts and `Piece`s; found {given!r:.80}."
        )
    return message


def _is_content(content: object) -> bool:
    if isinstance(content, str):
        return True
    return isinstance(content, Sequence) and all(isinstance(each, str | Piece) for each in content)
