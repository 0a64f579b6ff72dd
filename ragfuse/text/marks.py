"""Marks in messages: private-use characters in place of letters or beside words, found again in the rendered text.

If a rendering with marks equals the one without them in all else, the marks locate the marked text in it.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal

from ragfuse.errors import InputError

MARK_RANGES = (range(0xE000, 0xF900), range(0xF0000, 0xFFFFE))
"""Private-use code points, which have no meaning of their own."""
_PRIVATE = re.compile(r"[\ue000-\uf8ff\U000f0000-\U000ffffd]")
_ESCAPED = re.compile(r"\\u([ef][0-9a-f]{3})|\\u(db[89a-f][0-9a-f])\\{1,8}u(d[c-f][0-9a-f]{2})", re.IGNORECASE)
_MARK = re.compile(f"{_PRIVATE.pattern}|{_ESCAPED.pattern}", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class MarkSpot:
    """The place of a mark in a message, tool or call.

    Attributes:
        letter: The replaced letter; "" if the mark was inserted.
        kind: What is marked: text that looks like a control token, a piece, or a message.
        at: Place in the content.
        message: Index of the message; -1: not in a content.
        number: Index of the piece.
        word: The text that looks like a control token.
        is_inserted: The mark was inserted beside `word`, which begins at `start`, and replaces no letter.
        n_beside: Marks that must be beside the word in the rendering for it to come from the content; 0: not needed.
    """

    letter: str
    kind: Literal["forged", "piece", "message"]
    at: int = 0
    message: int = -1
    number: int = -1
    word: str = ""
    is_inserted: bool = False
    start: int = 0
    n_beside: int = 0


@dataclass(frozen=True, slots=True)
class FoundMark:
    """A mark that was found at characters lo:hi of the rendered text."""

    spot: MarkSpot
    lo: int
    hi: int


@dataclass
class Marks:
    """A supply of unused private-use characters, and the spot that each one marks."""

    free: Iterator[int]
    spots: dict[str, MarkSpot] = field(default_factory=dict)

    @classmethod
    def but(cls, used: Collection[int]) -> Marks:
        """Return a supply without these code points."""
        return cls(code for code in chain(*MARK_RANGES) if code not in used)

    @staticmethod
    def room(used: Collection[int]) -> int:
        """Return how many marks there are besides the used code points."""
        return sum(map(len, MARK_RANGES)) - len(used)

    def new(self, spot: MarkSpot) -> str:
        """Return an unused character for a spot; if none is left, its own letter.

        Raises:
            InputError: None is left for text that looks like a control token, which would become one.
        """
        code = next(self.free, None)
        if code is None:
            if spot.kind == "forged":
                raise too_many()
            return "" if spot.is_inserted else spot.letter
        self.spots[chr(code)] = spot
        return chr(code)


def too_many() -> InputError:
    """Return the error for more words to mark than marks."""
    n = sum(map(len, MARK_RANGES))
    return InputError(
        f"The messages contain more than {n:,} words that look like control tokens of the model, or private "
        "characters: too many to tell them from those of the chat template. Leave them out, or send fewer messages."
    )


def marked(text: str, spots: Iterable[tuple[int, MarkSpot]], marks: Marks) -> str:
    """Return the text with marks at these places, which are sorted."""
    pieces, done = list[str](), 0
    for at, spot in spots:
        pieces += [text[done:at], marks.new(spot)]
        done = at if spot.is_inserted else at + 1
    return "".join([*pieces, text[done:]])


def used_of(texts: Iterable[str]) -> set[int]:
    """Return the private-use code points that texts contain, also in JSON escapes."""
    used = set[int]()
    for text in texts:
        used.update(map(ord, _PRIVATE.findall(text)))
        used.update(map(_code, _ESCAPED.finditer(text)))
    return used


def _code(escaped: re.Match[str]) -> int:
    one, high, low = escaped.groups()
    if one:
        return int(one, 16)
    return 0x10000 + ((int(high, 16) - 0xD800) << 10) + int(low, 16) - 0xDC00


def _letter_of(mark: re.Match[str]) -> str:
    """Return the character of a match of `_MARK`, unescaped."""
    return mark[0] if len(mark[0]) == 1 else chr(_code(mark))


def _start_of(mark: re.Match[str]) -> int:
    """Return where a match of `_MARK` begins, including its own backslashes in a text that was escaped repeatedly.

    Escaping n times gives a mark 2 ** (n - 1) backslashes, and each backslash before it twice as many.
    """
    start = mark.start()
    if len(mark[0]) == 1:
        return start
    first = start
    while first and mark.string[first - 1] == "\\":
        first -= 1
    n = start + 1 - first
    return start + 1 - (n & -n)


def cut(rendered: str, marks: Mapping[str, MarkSpot]) -> tuple[list[str], list[tuple[MarkSpot, str]]]:
    """Split a rendering at its marks: return the texts around them, and (spot, text) of each mark."""
    texts, found, done = list[str](), list[tuple[MarkSpot, str]](), 0
    for mark in _MARK.finditer(rendered):
        if (spot := marks.get(_letter_of(mark))) is not None:
            start = _start_of(mark)
            texts.append(rendered[done:start])
            found.append((spot, rendered[start : mark.end()]))
            done = mark.end()
    return [*texts, rendered[done:]], found


def aligned(rendered: str, marks: Mapping[str, MarkSpot], text: str) -> list[FoundMark] | None:
    """Locate the marks of a rendering in `text`, rendered without marks; None if the two differ in anything else."""
    texts, found = cut(rendered, marks)
    if not text.startswith(texts[0]):
        return None
    at, seen = len(texts[0]), list[FoundMark]()
    for (spot, _), behind in zip(found, texts[1:], strict=True):
        forms = _forms(spot.letter) if not spot.is_inserted else ("",)
        form = next(
            (each for each in forms if text.startswith(each, at) and text.startswith(behind, at + len(each))), None
        )
        if form is None:
            return None
        seen.append(FoundMark(spot, at, at + len(form)))
        at += len(form) + len(behind)
    return seen if at == len(text) else None


def put_back(rendered: str, marks: Mapping[str, MarkSpot]) -> tuple[str, list[FoundMark]]:
    """Replace the marks of a rendering by their letters; return the text and the place of each mark."""
    texts, found = cut(rendered, marks)
    pieces, seen, at = [texts[0]], list[FoundMark](), len(texts[0])
    for (spot, written), behind in zip(found, texts[1:], strict=True):
        letter = spot.letter if len(written) == 1 else json.dumps(spot.letter)[1:-1]
        pieces += [letter, behind]
        seen.append(FoundMark(spot, at, at + len(letter)))
        at += len(letter) + len(behind)
    return "".join(pieces), seen


def _forms(letter: str) -> Iterator[str]:
    """Yield the forms in which a template may write a letter: other cases and escapes."""
    yield letter
    yield from (letter.upper(), letter.lower())
    escaped = [json.dumps(letter)[1:-1], json.dumps(letter, ensure_ascii=False)[1:-1], f"\\u{ord(letter):04x}"]
    yield from escaped
    yield from (each.replace("\\", "\\\\") for each in escaped)
    yield html.escape(letter)
