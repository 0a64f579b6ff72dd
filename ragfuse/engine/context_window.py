"""Cheap early checks that refuse a text which can never fit a model's context, before it is searched or tokenised.

An unusually long text is tokenised in pieces, only until there are too many tokens. Text that fits is never refused
here; text that passes is counted exactly later.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from ragfuse.errors import OverlongError
from ragfuse.schemas.nodes import Import, Item, MessageNode, Module, Param, PMLPrompt, Role, Schema, TextNode, Union
from ragfuse.text.chat_messages import ChatMessage, LaterMessages

UNCHECKED_CHARS = 8
"""A text of at most this many characters per token of context passes without being tokenised here."""
PIECE_CHARS = 1 << 14
"""Characters of a longer text that are tokenised at a time."""
CUT_TOKENS = 256
"""Most tokens that cutting a text in two can add, as it may split a word."""
BODY_NBYTES = 1 << 18
"""Bytes allowed for everything in a request that is not the text of its prompt: names, tools, settings."""
ESCAPED_NBYTES = 2
"""Bytes of JSON allowed per character of a prompt: an escaped line break has two."""
TOKEN_CHARS = 128
"""Characters per token in the largest request."""
UNKNOWN_TOKENS = 1 << 17
"""Tokens of the prompt in the largest request, where the model sets no limit."""
MAX_NBYTES = 1 << 24
"""Most bytes of a request, for any model."""
_THOUGHT = re.compile(r"(?i)think|reason|analysis")


class WindowedModel(Protocol):
    """A model, as far as these checks need it."""

    @property
    def name(self) -> str:
        """The model's name."""
        ...

    @property
    def max_context(self) -> int | None:
        """Most tokens of prompt and answer together; None without a limit."""
        ...

    def tokens(self, text: str, special: bool = False) -> list[int]:
        """Return the token ids of a text, without added special tokens."""
        ...


def advice_for(may_drop: bool) -> str:
    """Return what to do about a prompt that is too long; `may_drop`: it has chunks that may be left out on request."""
    if not may_drop:
        return "Shorten it."
    return "Take fewer or shorter chunks, or leave out the last ones with overflow='drop'."


def check_messages(
    messages: Sequence[ChatMessage],
    model: WindowedModel,
    tools: Sequence[Mapping[str, Any]] = (),
    may_shorten: bool = False,
    what: str = "The prompt",
    has_documents: bool = False,
    is_text: bool = False,
    may_drop: bool = True,
) -> None:
    """Refuse messages that can never fit the model's context.

    Args:
        messages: The messages; each non-empty one counts as at least one token.
        model: The model.
        tools: The tools that the prompt describes, as JSON values.
        may_shorten: Whether earlier turns may be left out; then only the last turn and leading system messages count.
        what: How an error message names the prompt.
        has_documents: Documents that the messages may contain were given with them.
        is_text: Whether the only message is a text without chat template, so that white space at its ends counts.
        may_drop: Whether chunks, if there are any, may still be left out on request.

    Raises:
        OverlongError: They can never fit.
    """
    if model.max_context is None:
        return
    later = LaterMessages(messages) if may_shorten else ()
    counted = later[len(later) - 1] if later else messages
    texts = [message.text if is_text else _rendered_text(message) for message in counted]
    arguments = [text for message in counted for text in _argument_texts(message)]
    may_drop = may_drop and (has_documents or any(map(_has_chunks, counted)))
    n_messages = sum(message.has_content for message in counted)
    check_texts([*texts, *arguments, *_strings(tools)], model, what, min_tokens=n_messages, may_drop=may_drop)


def check_request(request: PMLPrompt, model: WindowedModel) -> None:
    """Raise OverlongError for a prompt in PML whose own texts and arguments can never fit the model's context."""
    check_texts(_own_texts(request), model, advice="Shorten its texts and arguments.")


def check_texts(
    texts: Iterable[str],
    model: WindowedModel,
    what: str = "The prompt",
    advice: str = "",
    min_tokens: int = 0,
    may_drop: bool = False,
) -> None:
    """Refuse texts that together can never fit the model's context.

    Args:
        texts: The texts that will be tokenised.
        model: The model.
        what: How an error message names the texts.
        advice: The last sentence of the error message; "": as `may_drop` says.
        min_tokens: A lower bound of the tokens that is known without looking at the texts.
        may_drop: Whether they have chunks that may be left out on request.

    Raises:
        OverlongError: They can never fit.
    """
    if model.max_context is None:
        return
    whole = "".join(texts)
    n_tokens = max(min_tokens, least_tokens(whole, model, model.max_context))
    if n_tokens > model.max_context:
        raise OverlongError(
            f"{what} does not fit: {model.name} takes at most {model.max_context:,} tokens, "
            f"found at least {n_tokens:,}{f' in {len(whole):,} characters' if whole else ''}.",
            advice or advice_for(may_drop),
            may_drop,
        )


def may_fit(text: str, model: WindowedModel) -> bool:
    """Return False for a text that can never fit the model's context; True means that it may fit."""
    return model.max_context is None or least_tokens(text, model, model.max_context) <= model.max_context


def least_tokens(text: str, model: WindowedModel, limit: int, unchecked_chars: int | None = None) -> int:
    """Return a lower bound of a text's tokens; counting stops once it is above `limit`.

    Args:
        text: The text.
        model: The model.
        limit: The number of tokens from which on the count does not matter.
        unchecked_chars: Characters up to which nothing is tokenised; None: `UNCHECKED_CHARS * limit`.
    """
    if len(text) <= (UNCHECKED_CHARS * limit if unchecked_chars is None else unchecked_chars):
        return 0
    found = lo = 0
    while lo < len(text) and found <= limit:
        hi = _cut(text, lo)
        found += len(model.tokens(text[lo:hi])) - (CUT_TOKENS if lo else 0)
        lo = hi
    return found


def largest_body(model: WindowedModel) -> int:
    """Return the most bytes of a request to a server: the JSON of the longest prompt that can fit the model."""
    tokens = model.max_context or UNKNOWN_TOKENS
    return min(MAX_NBYTES, BODY_NBYTES + ESCAPED_NBYTES * TOKEN_CHARS * tokens)


def check_schema(schema: Schema, model: WindowedModel) -> None:
    """Raise OverlongError for a schema whose modules can never fit the model's context.

    The modules of a union share their positions, so only the longest of them counts.
    """
    if model.max_context is not None:
        _Extent(model, model.max_context, f"Schema '{schema.name}'").after(schema.items, _Place())


class _Place(NamedTuple):
    """A lower bound of a position, and the characters of text before it."""

    position: int = 0
    chars: int = 0


class _Extent:
    """Adds up a lower bound of the positions of a schema's items, and raises once there are too many."""

    def __init__(self, model: WindowedModel, max_positions: int, what: str) -> None:
        self._model, self._max, self._what = model, max_positions, what

    def after(self, items: Iterable[Item], at: _Place) -> _Place:
        """Return the first place after items that begin at `at`; raise OverlongError where it is too far."""
        for item in items:
            at = self._after(item, at)
            if at.position > self._max:
                raise OverlongError(
                    f"{self._what} does not fit: {self._model.name} takes at most {self._max:,} token positions, "
                    f"found at least {at.position:,}.",
                    "Shorten its modules.",
                )
        return at

    def _after(self, item: Item, at: _Place) -> _Place:
        match item:
            case TextNode():
                return self._text(item.text, at)
            case Param():
                return at._replace(position=at.position + item.length)
            case Module() | Role():
                return self.after(item.items, at)
            case Union():
                ends = [self.after([each], at) for each in item.modules]
                return _Place(*map(max, zip(at, *ends, strict=True)))

    def _text(self, text: str, at: _Place) -> _Place:
        if not text.strip():  # white space between messages is dropped
            return at
        limit, unchecked_chars = self._max - at.position, max(0, UNCHECKED_CHARS * self._max - at.chars)
        return _Place(at.position + least_tokens(text, self._model, limit, unchecked_chars), at.chars + len(text))


def _cut(text: str, lo: int) -> int:
    """Return where the piece from `lo` on ends: at a space, if there is one in its second half."""
    hi = lo + PIECE_CHARS
    if hi >= len(text):
        return len(text)
    space = text.rfind(" ", lo + PIECE_CHARS // 2, hi)
    return space if space > lo else hi


def _has_chunks(message: ChatMessage) -> bool:
    return any(piece.kind == "chunk" for piece in message.pieces)


def _rendered_text(message: ChatMessage) -> str:
    """Return the text that a message has in any prompt: templates may strip white space and an answer's reasoning."""
    text = message.text.strip()
    if message.role == "assistant" and (thoughts := list(_THOUGHT.finditer(text))):
        return text[thoughts[-1].end() :]
    return text


def _argument_texts(message: ChatMessage) -> Iterator[str]:
    """Yield the texts in the arguments of a message's tool calls."""
    for call in message.tool_calls:
        yield from _strings(call.arguments)


def _strings(value: object) -> Iterator[str]:
    """Yield all texts and names in a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, each in value.items():
            yield str(name)
            yield from _strings(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _strings(each)


def _own_texts(item: PMLPrompt | Import | MessageNode | TextNode) -> Iterator[str]:
    """Yield the texts of a prompt in PML, and the values of its arguments."""
    match item:
        case TextNode(text):
            yield text.strip()
        case MessageNode():
            yield item.text.strip()
        case PMLPrompt() | Import():
            yield from (value for _, value in item.args)
            for each in item.items:
                yield from _own_texts(each)
            if isinstance(item, PMLPrompt):
                yield item.ending
