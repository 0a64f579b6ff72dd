"""A chat template: its variables, its reasoning tags, and conversations rendered by it.

The rendered text is always the template's output for the unchanged messages. If a message, call or
tool contains text that looks like a control token, it is rendered a second time with a mark in
place of the first letter of each such word. Each difference between the two is a word that must be
encoded as text. A template may inspect some of these words, such as reasoning tags, so that the
output changes elsewhere too. Such words are located in the contents that appear verbatim in the
text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ragfuse.errors import InputError

THOUGHT_TAGS = (
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("<thought>", "</thought>"),
    ("<reasoning>", "</reasoning>"),
    ("<seed:think>", "</seed:think>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
    ("\u25c1think\u25b7", "\u25c1/think\u25b7"),
)
"""Known reasoning tags; used if the template contains the closing tag, or the vocabulary both."""


@dataclass(frozen=True)
class Thoughts:
    """The opening and closing tag of a model's reasoning."""

    open: str
    close: str

    def is_open(self, prompt: str) -> bool:
        """Return whether a prompt ends with an opening reasoning tag."""
        return prompt.rstrip().endswith(self.open)


RENDERER_NAMES = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"}
)
"""Variables that the renderer sets, not the caller."""
FUNCTIONS = frozenset({"raise_exception", "strftime_now"})
"""Functions that transformers passes to templates."""
_MARKS = re.compile(r"{%[-+]?\s*(?:end)?generation\s*[-+]?%}")
"""Tags that mark generated text for training; jinja2 cannot parse them."""


@dataclass(frozen=True)
class ChatTemplate:
    """The variables and the reasoning tags of a chat template.

    Args:
        names: Variables that it reads and does not set itself; all others have no effect.
        thoughts: The reasoning tags; None: neither the template nor the tokenizer has any.
    """

    names: frozenset[str] = frozenset()
    thoughts: Thoughts | None = None

    @staticmethod
    def of(source: Any, added_tokens: Collection[str]) -> ChatTemplate:
        """Parse a template.

        Args:
            source: The template's Jinja source, or a mapping with the sources of several templates
                by name.
            added_tokens: The tokens added to the vocabulary.
        """
        text = (
            "\n".join(map(str, source.values()))
            if isinstance(source, Mapping)
            else str(source or "")
        )
        tags = (
            tags
            for tags in THOUGHT_TAGS
            if tags[1] in text or all(tag in added_tokens for tag in tags)
        )
        return ChatTemplate(_names_read(text), next((Thoughts(*each) for each in tags), None))

    def unread(self, variables: Mapping[str, Any]) -> str | None:
        """Return the first of these variables that the template does not read, or None."""
        accepted = NO_THOUGHTS if self.thoughts is None else ()
        unread = (
            each for each in variables.items() if each[0] not in self.names and each not in accepted
        )
        return next((name for name, _ in unread), None)


NO_THOUGHTS = (("enable_thinking", False), ("reasoning_effort", "none"))
"""Template variables, with the values that turn reasoning off."""


def _names_read(template: str) -> frozenset[str]:
    """Return the variables that a template reads; none if it cannot be parsed."""
    from jinja2 import Environment, TemplateError, meta

    environment = Environment(extensions=["jinja2.ext.loopcontrols"])  # parses, never renders
    try:
        found = meta.find_undeclared_variables(environment.parse(_MARKS.sub("", template)))
    except (TemplateError, RecursionError):
        return frozenset()
    return frozenset(found) - RENDERER_NAMES - FUNCTIONS


Chars = tuple[int, int]
"""A span lo:hi of characters in a text."""
Write = Callable[[list[dict[str, Any]], list[Any]], str]
"""Renders messages and tools with the chat template; InputError if it rejects them."""
Forged = Callable[..., Sequence[Chars]]
"""Finds text that looks like a control token; `forged(text, True)`: the text begins an answer."""
Word = tuple[str, str]
"""The role of a content ("" outside contents) and a word in it, lowercased."""

MARKS = "~^`|@0123456789QXZJqxzj" + "".join(map(chr, range(0xE000, 0xE100)))
"""Characters that most templates keep. The first one absent from the text is the mark."""
MAX_INSPECTED_WORDS = 16
"""Maximum words that are tested, one by one, for whether the template inspects them."""
MAX_FAILED_SEARCHES = 16
"""After this many contents not found in the rendered text, the search stops."""


@dataclass(frozen=True)
class Rendered:
    """The text that a chat template rendered, and the position of each content in it.

    Args:
        bare: Characters that look like a control token but are none.
        contents: Characters of each message's content, without surrounding white space; None: not
            found verbatim.
    """

    text: str
    bare: tuple[Chars, ...] = ()
    contents: tuple[Chars | None, ...] = ()


def rendered(
    write: Write,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Any],
    forged: Forged,
) -> Rendered:
    """Render a conversation.

    Args:
        write: The chat template.
        messages: The messages in the form that the template takes.
        tools: The tools.
        forged: Finds text that looks like a control token.

    Raises:
        InputError: The template drops a message other than an answer.
    """
    text = write([dict(message) for message in messages], list(tools))
    contents = tuple(_places(text, messages))
    used = set(text)
    marks = _Marks(forged, next(letter for letter in MARKS if letter not in used))
    _check_complete(write, messages, tools, text, marks.mark)

    def marked() -> set[int] | None:
        """Return the positions of the marks; None if marking changed any other text."""
        told = list(map(marks.message, messages))
        told_of = marks.on(list(tools))
        if not marks.words:
            return set()
        try:
            seen = write(told, told_of)
        except InputError:
            return None
        places = [at for at, letter in enumerate(seen) if letter == marks.mark]
        begins = [0, *(at + 1 for at in places)]
        is_same = map(text.startswith, seen.split(marks.mark), begins)
        return set(places) if len(seen) == len(text) and all(is_same) else None

    own = marked()
    inspected = set[Word]()
    if own is None:
        own, inspected = set(), set(marks.words)
        for word in list(marks.words)[:MAX_INSPECTED_WORDS]:
            marks.chosen = word
            found = marked()
            if found is not None:
                own |= found
                inspected.remove(word)
    where = [
        (lo, hi, str(message["role"]))
        for message, (lo, hi) in zip(messages, (chars or (0, 0) for chars in contents), strict=True)
        if inspected
    ]

    def is_bare(lo: int, hi: int) -> bool:
        word = text[lo:hi].lower()
        return lo in own or any(
            a <= lo and hi <= b and (role, word) in inspected for a, b, role in where
        )

    words = forged(text) if marks.words else ()
    return Rendered(text, tuple(sorted(chars for chars in words if is_bare(*chars))), contents)


@dataclass
class _Marks:
    """Marks words in messages and tools: all words that `forged` finds, or only `chosen`."""

    forged: Forged
    mark: str
    chosen: Word | None = None
    words: dict[Word, None] = field(default_factory=dict)

    def message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return a message with marks in everything but its role."""
        role = str(message["role"])
        marked = {
            key: value if key in ("role", "content") else self.on(value)
            for key, value in message.items()
        }
        return {**marked, "content": self.on(message.get("content"), role)}

    def on(self, value: Any, role: str = "") -> Any:
        """Return a JSON value with marks in all its strings."""
        if isinstance(value, str):
            letters = list(value)
            for lo, hi in self.forged(value):
                word = role, value[lo:hi].lower()
                self.words[word] = None
                if self.chosen in (None, word):
                    letters[lo] = self.mark
            return "".join(letters)
        if isinstance(value, Mapping):
            return {self.on(name): self.on(each) for name, each in value.items()}
        return [self.on(each) for each in value] if isinstance(value, list | tuple) else value


def _content(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else ""


def _places(text: str, messages: Sequence[Mapping[str, Any]]) -> Iterator[Chars | None]:
    """Yield the position of each content, searched after the previous one."""
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
    write: Write, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any], text: str, mark: str
) -> None:
    """Raise InputError if the template drops a message other than an answer."""
    roles = [
        message["role"]
        for message in messages
        if message["role"] != "assistant" and _content(message).strip() not in text
    ]
    if not roles:
        return
    told = [
        (
            {**message, "content": _content(message) + mark}
            if message["role"] in roles
            else dict(message)
        )
        for message in messages
    ]
    if write(told, list(tools)).count(mark) < sum(message["role"] in roles for message in messages):
        raise InputError(
            f"The chat template leaves out messages of role {' or '.join(sorted(set(roles)))}. Use"
            " another role (often user and assistant), or pass one text instead of messages."
        )
