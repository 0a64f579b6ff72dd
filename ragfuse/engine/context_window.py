"""Whether a text can fit a model at all, asked before anything of it is searched or tokenised.

A token stands for a few characters at most, so a text that has many more can never fit. One that has more than texts
usually have is tokenised in pieces, only until these are too many. What passes is tokenised whole and counted exactly
where it is needed: nothing that fits is ever refused here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from ragfuse.errors import OverlongError
from ragfuse.hf.token_length import TokenLength
from ragfuse.schemas.nodes import Import, Item, MessageNode, Module, Param, PMLPrompt, Role, Schema, TextNode, Union
from ragfuse.text.chat_messages import ChatMessage, LaterMessages
from ragfuse.text.chunks import Marker, Piece

USUAL_CHARS = 8
"""Characters for each token of the window up to which a text is simply tokenised."""
PIECE_CHARS = 1 << 14
"""Characters of a longer text that are tokenised at a time."""
CUT_TOKENS = 256
"""Tokens that two pieces of a text may have more than the same text in one piece: parts of a word that was cut."""
BODY_NBYTES = 1 << 18
"""Bytes of a request beside the text of its prompt: names, tools, settings."""
ESCAPED_NBYTES = 2
"""Bytes of JSON for each character that a prompt may have: a line break is two."""
UNKNOWN_CHARS = 32
"""Characters that a token is taken for, in the largest request, where a tokenizer sets no limit."""
UNKNOWN_TOKENS = 1 << 17
"""Tokens that a prompt is taken to have, in the largest request, where a model sets no limit."""
MOST_NBYTES = 1 << 24
"""Of a request, however much a model takes."""
_THOUGHT = re.compile(r"(?i)think|reason|analysis")


class WindowedModel(Protocol):
    """The model that a text is for, as far as its length goes."""

    @property
    def name(self) -> str:
        """What it is called."""
        ...

    @property
    def max_context(self) -> int | None:
        """Tokens of prompt and answer that it takes together; None without a limit."""
        ...

    @property
    def token_length(self) -> TokenLength | None:
        """How much text one token stands for at most; None where that is not known."""
        ...

    def tokens(self, text: str, special: bool = False) -> list[int]:
        """Ids of a text, none added."""
        ...


def check_turns(
    turns: Sequence[ChatMessage],
    model: WindowedModel,
    tools: Sequence[Mapping[str, Any]] = (),
    may_shorten: bool = False,
    what: str = "The prompt",
    marker: Marker | None = None,
    is_text: bool = False,
) -> None:
    """Refuse messages that can never fit what a model takes: OverlongError.

    Args:
        turns: The messages, each of which has a token at least if it says something.
        model: Whose window and tokenizer count.
        tools: What is told of tools, as JSON values.
        may_shorten: Earlier turns may be left out, so that the last ones alone count, and what the system says first.
        what: The subject of the refusal.
        marker: Whose marks around chunks are no text. A chunk has a token at least, so that a text in which more marks
            begin than the model takes tokens is refused, signed or not.
        is_text: The only turn is a text that no template writes, so that white space at its ends counts.
    """
    if model.max_context is None:
        return
    later = LaterMessages(turns) if may_shorten else ()
    kept = later[len(later) - 1] if later else turns
    said = [_text_of(turn) if is_text else _said(turn) for turn in kept]
    beside = [text for turn in kept for text in _called(turn)]
    if marker is not None:
        check_texts((), model, what, n_least=sum(map(marker.count, said)))
        said = [marker.unmarked(text) for text in said]
    n_said = sum(turn.says_something for turn in kept)
    check_texts([*said, *beside, *_strings(tools)], model, what, n_least=n_said)


def check_request(request: PMLPrompt, model: WindowedModel) -> None:
    """Refuse a prompt in PML whose own texts and arguments can never fit what a model takes: OverlongError."""
    check_texts(_asked(request), model, so="Make its texts and arguments shorter.")


def check_texts(
    texts: Iterable[str],
    model: WindowedModel,
    what: str = "The prompt",
    so: str = "Take fewer or shorter chunks.",
    n_least: int = 0,
) -> None:
    """Refuse texts that together can never fit what a model takes: OverlongError.

    Args:
        texts: What will be tokenised, each once.
        model: Whose window and tokenizer count.
        what: The subject of the refusal.
        so: What to do about it.
        n_least: Tokens that there are at least, whatever the texts say.
    """
    if model.max_context is None:
        return
    whole = "".join(texts)
    least = max(n_least, least_tokens(whole, model, model.max_context))
    if least > model.max_context:
        raise OverlongError(
            f"{what} does not fit: wanted at most {model.max_context:,} tokens, which is what {model.name} was made "
            f"for, found at least {least:,}{f' in {len(whole):,} characters' if whole else ''}. {so}"
        )


def may_fit(text: str, model: WindowedModel) -> bool:
    """Tell whether a text may have as few tokens as a model takes. Whether it has is known when it is tokenised."""
    return model.max_context is None or least_tokens(text, model, model.max_context) <= model.max_context


def least_tokens(text: str, model: WindowedModel, most: int, usual: int | None = None) -> int:
    """Return a number of tokens that a text has at least, found without reading on once it is above `most`.

    usual: Characters up to which nothing is tokenised for that; `USUAL_CHARS` for each of `most` by default.
    """
    least = model.token_length.least(text) if model.token_length is not None else 0
    if least > most or len(text) <= (USUAL_CHARS * most if usual is None else usual):
        return least
    found = lo = 0
    while lo < len(text) and found <= most:
        hi = _cut(text, lo)
        found += len(model.tokens(text[lo:hi])) - (CUT_TOKENS if lo else 0)
        lo = hi
    return max(least, found)


def largest_body(model: WindowedModel) -> int:
    """Return the bytes that a request to a server may have: as many as JSON of the longest prompt that can fit."""
    tokens, length = model.max_context or UNKNOWN_TOKENS, model.token_length
    chars = UNKNOWN_CHARS if length is None else length.chars
    return min(MOST_NBYTES, BODY_NBYTES + ESCAPED_NBYTES * chars * tokens)


def check_schema(schema: Schema, model: WindowedModel) -> None:
    """Refuse a schema whose modules can never stand in what a model takes: OverlongError.

    The modules of a union stand in the same place, so that the longest of them counts.
    """
    if model.max_context is not None:
        _Extent(model, model.max_context, f"Schema '{schema.name}'").behind(schema.items, _Place())


class _Place(NamedTuple):
    """A position that is reached at least, and the characters of text before it."""

    position: int = 0
    chars: int = 0


class _Extent:
    """Finds positions that items of a schema take at least, until they are too many."""

    def __init__(self, model: WindowedModel, most: int, what: str) -> None:
        self._model, self._most, self._what = model, most, what

    def behind(self, items: Iterable[Item], at: _Place) -> _Place:
        """The first place behind items that begin at `at`."""
        for item in items:
            at = self._behind(item, at)
            if at.position > self._most:
                raise OverlongError(
                    f"{self._what} does not fit: wanted at most {self._most:,} positions, which is what "
                    f"{self._model.name} was made for, found at least {at.position:,}. Make its modules shorter."
                )
        return at

    def _behind(self, item: Item, at: _Place) -> _Place:
        match item:
            case TextNode():
                return self._text(item.text, at)
            case Param():
                return at._replace(position=at.position + item.length)
            case Module() | Role():
                return self.behind(item.items, at)
            case Union():
                ends = [self.behind([each], at) for each in item.modules]
                return _Place(*map(max, zip(at, *ends, strict=True)))

    def _text(self, text: str, at: _Place) -> _Place:
        if not text.strip():  # beside messages it is no text
            return at
        left, usual = self._most - at.position, max(0, USUAL_CHARS * self._most - at.chars)
        return _Place(at.position + least_tokens(text, self._model, left, usual), at.chars + len(text))


def _cut(text: str, lo: int) -> int:
    """Where a piece from `lo` on ends: at a space, if there is one in its second half."""
    hi = lo + PIECE_CHARS
    if hi >= len(text):
        return len(text)
    space = text.rfind(" ", lo + PIECE_CHARS // 2, hi)
    return space if space > lo else hi


def _text_of(turn: ChatMessage) -> str:
    parts = [turn.content] if isinstance(turn.content, str) else turn.content
    return "".join(part.text if isinstance(part, Piece) else part for part in parts)


def _said(turn: ChatMessage) -> str:
    """What a turn says in a prompt at least: templates take off white space, and what was thought before an answer."""
    said = _text_of(turn).strip()
    if turn.role == "assistant" and (thoughts := list(_THOUGHT.finditer(said))):
        return said[thoughts[-1].end() :]
    return said


def _called(turn: ChatMessage) -> Iterator[str]:
    """Texts in the calls of tools that a turn makes."""
    for call in turn.tool_calls:
        yield from _strings(call.arguments)


def _strings(value: object) -> Iterator[str]:
    """Texts and names in a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, each in value.items():
            yield str(name)
            yield from _strings(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _strings(each)


def _asked(item: PMLPrompt | Import | MessageNode | TextNode) -> Iterator[str]:
    """Texts of a prompt in PML, and the values of its arguments."""
    match item:
        case TextNode(text):
            yield text.strip()
        case MessageNode():
            yield item.text.strip()
        case PMLPrompt() | Import():
            yield from (value for _, value in item.args)
            for each in item.items:
                yield from _asked(each)
            if isinstance(item, PMLPrompt):
                yield item.ending
