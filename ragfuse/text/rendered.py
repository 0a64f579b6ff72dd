"""Renders a conversation by its chat template, and finds in the rendered text what the template did not write.

The text is always what the template makes of the messages themselves. Where a message, call or tool holds what looks
like a control token, it is rendered once more with one letter of each such word changed: where the two renderings
differ stands a word that must be read as text. A template may inspect such a word, so that more than that letter
changes; then a mark is put beside it instead, and where that changes the rendering, too, the word stays the template's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

from ragfuse.errors import InputError

Chars = tuple[int, int]
"""Characters lo:hi of a text."""
Write = Callable[[list[dict[str, Any]], list[Any]], str]
"""Renders messages and tools by the chat template; raises InputError if the template rejects them."""
Forged = Callable[..., Sequence[Chars]]
"""Finds text that would be tokenised as a control token; `forged(text, True)`: the text begins an answer."""
Unit = tuple[int, str]
"""Words that are marked alike: those of one message ("" as word), one word in all answers (-1), or what stands outside
of contents (-2)."""
Way = Literal["changed", "beside", "behind"]

MARKS = ("~^`|@0123456789QXZJqxzj", range(0xE000, 0xF900))
"""Characters that mark: the first ones that a rendering does not hold, as templates write most of these unchanged."""
MAX_RENDERINGS = 64
"""The most renderings of one prompt."""
MAX_FAILED_SEARCHES = 16
"""After this many contents that are not in the rendered text no more are searched for."""


@dataclass(frozen=True)
class Rendered:
    """The text that a chat template rendered, and where contents stand in it.

    Args:
        bare: Characters that look like a control token but are none.
        contents: Characters of each message's content, without the white space around it; None: not found as it is.
    """

    text: str
    bare: tuple[Chars, ...] = ()
    contents: tuple[Chars | None, ...] = ()


def rendered(
    write: Write,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Any],
    forged: Forged,
    is_begun: bool = False,
) -> Rendered:
    """Render a conversation.

    Args:
        write: The chat template.
        messages: The messages in the form that the template takes.
        tools: The tools.
        forged: Finds what looks like a control token.
        is_begun: The last message is the beginning of the answer.

    Raises:
        InputError: The template leaves out a message that is no answer, or the words that look like control tokens are
            too many.
    """
    text = write([dict(message) for message in messages], list(tools))
    contents = tuple(_places(text, messages))
    _check_complete(write, messages, tools, text, contents)
    words = [forged(_content(message)) for message in messages]
    if is_begun:
        words[-1] = forged(_content(messages[-1]), True)
    others = [each for each in chain(_outside(messages), _strings(tools)) if each]
    if not any(words) and not forged("\n".join(others)):
        return Rendered(text, (), contents)
    bare = _Marking(write, messages, tools, forged, text, words).bare()
    return Rendered(text, tuple(sorted(bare)), contents)


class _Marking:
    """The search for words in a rendered text that are not the template's."""

    def __init__(
        self,
        write: Write,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any],
        forged: Forged,
        text: str,
        words: Sequence[Sequence[Chars]],
    ) -> None:
        self._write, self._messages, self._tools, self._forged = write, messages, tools, forged
        self._text, self._words = text, words
        self._changed, self._before, self._behind = marks_outside(set(text), 3)
        self._ways: dict[Unit, Way] = {}
        self._seen = ""  # the last rendering with all marks in `_ways`
        self._n_renderings = 0

    def bare(self) -> set[Chars]:
        """Return the characters of the words that are not the template's."""
        units = dict.fromkeys(unit for turn, spans in enumerate(self._words) for unit in self._units(turn, spans))
        self._settle([(-2, ""), *units])
        plain = self._seen.replace(self._before, "").replace(self._behind, "")
        changed = {at for at, letter in enumerate(plain) if letter == self._changed}
        before = _at_marks(self._seen, self._before, self._behind)
        behind = _at_marks(self._seen, self._behind, self._before)
        words: dict[Way, set[str]] = {"beside": set(), "behind": set()}
        for turn, spans in enumerate(self._words):  # what the template writes beside a mark may be a word of its own
            content = _content(self._messages[turn])
            for (lo, hi), unit in zip(spans, self._units(turn, spans), strict=True):
                if (way := self._way(content, lo, unit)) in words:
                    words[way].add(content[lo:hi].lower())
        return {
            (lo, hi)
            for lo, hi in self._forged(self._text)
            if lo in changed
            or (lo in before and self._text[lo:hi].lower() in words["beside"])
            or (hi in behind and self._text[lo:hi].lower() in words["behind"])
        }

    def _way(self, content: str, lo: int, unit: Unit) -> Way | None:
        """Return how the word at `lo` is marked; at a content's beginning, which templates inspect, only behind it."""
        way = self._ways.get(unit)
        return "behind" if way == "beside" and lo <= len(content) - len(content.lstrip()) else way

    def _units(self, turn: int, spans: Sequence[Chars]) -> Iterator[Unit]:
        content, is_answer = _content(self._messages[turn]), self._messages[turn].get("role") == "assistant"
        for lo, hi in spans:
            yield (-1, content[lo:hi].lower()) if is_answer else (turn, "")

    def _settle(self, units: Sequence[Unit]) -> None:
        """Mark these units beside those that are marked already, in a way in which the rendering stays the same."""
        before = dict(self._ways)
        ways: tuple[Way, ...] = ("changed", "beside", "behind")
        for way in ways:
            self._ways = {**before, **dict.fromkeys(units, way)}
            if self._is_same():
                return
        self._ways = before
        if len(units) > 1:
            half = len(units) // 2
            self._settle(units[:half])
            self._settle(units[half:])

    def _is_same(self) -> bool:
        """Render with marks, and return whether all else is as in the text."""
        self._n_renderings += 1
        if self._n_renderings > MAX_RENDERINGS:
            raise InputError(
                "The messages contain too many words that look like control tokens of the model and that its chat "
                "template inspects. Leave them out, or send fewer messages."
            )
        messages = [self._marked(turn, message) for turn, message in enumerate(self._messages)]
        try:
            seen = self._write(messages, [self._leaves(tool) for tool in self._tools])
        except InputError:  # the template inspects what is marked
            return False
        at = 0
        for part in seen.replace(self._before, "").replace(self._behind, "").split(self._changed):
            if not self._text.startswith(part, at):
                return False
            at += len(part) + 1
        if at != len(self._text) + 1:
            return False
        self._seen = seen
        return True

    def _marked(self, turn: int, message: Mapping[str, Any]) -> dict[str, Any]:
        marked = {key: value if key in ("role", "content") else self._leaves(value) for key, value in message.items()}
        if self._words[turn]:
            marked["content"] = self._with_marks(turn)
        return marked

    def _with_marks(self, turn: int) -> str:
        content, spans = _content(self._messages[turn]), self._words[turn]
        parts, done = list[str](), 0
        for (lo, hi), unit in zip(spans, self._units(turn, spans), strict=True):
            way = self._way(content, lo, unit)
            if way == "changed":
                parts += [content[done:lo], self._changed]
                done = lo + 1
            elif way == "behind":
                parts += [content[done:hi], self._behind]
                done = hi
            elif way == "beside":
                parts += [content[done:lo], self._before]
                done = lo
        return "".join([*parts, content[done:]])

    def _leaves(self, value: Any) -> Any:
        """Return a JSON value with the words in all its texts changed."""
        if self._ways.get((-2, "")) != "changed":
            return value
        if isinstance(value, str):
            hidden = {lo for lo, _ in self._forged(value)} if value else ()
            return "".join(self._changed if at in hidden else each for at, each in enumerate(value))
        if isinstance(value, Mapping):
            return {self._leaves(name): self._leaves(each) for name, each in value.items()}
        return [self._leaves(each) for each in value] if isinstance(value, list | tuple) else value


def marks_outside(used: set[str], n: int) -> list[str]:
    """Return the first n marks that are not used."""
    candidates = chain(MARKS[0], map(chr, MARKS[1]))
    return [letter for letter, _ in zip((each for each in candidates if each not in used), range(n), strict=False)]


def _content(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else ""


def _outside(messages: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield all texts of messages outside of role and content."""
    for message in messages:
        yield from _strings([value for key, value in message.items() if key not in ("role", "content")])


def _strings(value: Any) -> Iterator[str]:
    """Yield all strings in a JSON value, names of objects too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, each in value.items():
            yield from _strings(name)
            yield from _strings(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _strings(each)


def _at_marks(seen: str, mark: str, other: str) -> set[int]:
    """Return where one mark stands in a text, counted without any of both marks."""
    found, at = set[int](), 0
    for part in seen.replace(other, "").split(mark)[:-1]:
        at += len(part)
        found.add(at)
    return found


def _places(text: str, messages: Sequence[Mapping[str, Any]]) -> Iterator[Chars | None]:
    """Yield where each content stands; messages are mostly rendered in order, so each is searched after the last."""
    at = n_failed = 0
    for message in messages:
        core = _content(message).strip()
        lo = text.find(core, at) if core and n_failed < MAX_FAILED_SEARCHES else -1
        if lo < 0:
            n_failed += bool(core)
            yield None
        else:
            at = lo + len(core)
            yield lo, at


def _check_complete(
    write: Write,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Any],
    text: str,
    contents: Sequence[Chars | None],
) -> None:
    """Raise InputError if the template leaves out a message that is no answer: then a change of it changes nothing."""
    missing = [
        turn
        for turn, message in enumerate(messages)
        if contents[turn] is None
        and message.get("role") != "assistant"
        and (core := _content(message).strip())
        and core not in text
    ]
    if not missing:
        return
    [mark] = marks_outside(set(text), 1)

    def n_seen(turns: Sequence[int]) -> int:
        changed = [
            {**message, "content": _content(message) + mark} if turn in turns else dict(message)
            for turn, message in enumerate(messages)
        ]
        return write(changed, list(tools)).count(mark)

    if n_seen(missing) >= len(missing):
        return
    for turn in missing:
        if not n_seen([turn]):
            raise InputError(
                f"The chat template leaves out message {turn} (role '{messages[turn].get('role')}'); use a role that "
                "it writes (often user and assistant), or pass one text instead of messages."
            )
