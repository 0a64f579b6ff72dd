"""Renders a conversation by its chat template and finds the message contents in the rendered text.

A template may inspect, trim, escape, cut or repeat the contents, so they are located by a second rendering in which
single characters are replaced by marks: private-use code points that no text contains. If the two renderings are equal
apart from the marks, the marks tell where each chunk is, which messages were left out, and which text looks like a
control token but was not written by the template.
"""

from __future__ import annotations

import html
import json
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ragfuse.errors import InputError
from ragfuse.text.chunks import Piece
from ragfuse.text.marks import FoundMark, Marks, MarkSpot, aligned, cut, marked, put_back, too_many, used_of

Chars = tuple[int, int]
"""Characters lo:hi of a text."""
Write = Callable[[list[dict[str, Any]], list[Any]], str]
"""Renders messages and tools by the chat template; raises InputError if the template rejects them."""
Forged = Callable[..., Sequence[Chars]]
"""Finds text that would be tokenised as a control token; `forged(text, True)`: the text begins an answer."""

_REMOVABLE = re.compile(r"[\s\x00-\x1f\x7f\u00ad\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]+")
"""Characters that templates may remove from a text or write differently."""
_ENTITY = re.compile(r"&(?:#\d{1,7}|#[xX][0-9a-fA-F]{1,6}|[a-zA-Z]{2,8});")
MAX_TESTED_TOKENS = 8
"""The most control tokens in answers that are tested one by one for whether the template inspects them."""
MAX_TESTED_MESSAGES = 8
"""The most messages with control tokens that are tested one by one for whether the template inspects these."""
MAX_CONTROL_TOKEN_CHARS = 64
"""The most characters of a control token that content and neighbouring text may form together."""
MAX_TESTED_VALUES = 16
"""The most names and values of calls and tools that are tested one by one for whether they form part of a control
token; the rest are tested together."""
MAX_FAILED_SEARCHES = 16
"""After this many failed searches for texts by their characters, no more texts are searched for."""


@dataclass(frozen=True, slots=True)
class PlacedPiece:
    """A piece at characters lo:hi of the rendered text, with its text as the template wrote it."""

    lo: int
    hi: int
    piece: Piece


@dataclass(frozen=True)
class Rendered:
    """The text that a chat template rendered, with the places of what it contains.

    Args:
        bare: Characters that look like a control token but are none.
        placed: Chunks and texts with known ids, sorted and not overlapping, without those that the template changed
            beyond recognition.
        last_message: Characters of the last message.
    """

    text: str
    bare: tuple[Chars, ...] = ()
    placed: tuple[PlacedPiece, ...] = ()
    last_message: Chars = (0, 0)


@dataclass(frozen=True, slots=True)
class _Trial:
    """A choice of what is marked in one rendering.

    Args:
        visible_tokens: Control tokens that stay unchanged in answers, with a mark behind each.
        both_sides: Put a mark before each of these too, because a template may replace a token by the same one.
        marked_beside: Indices of other messages whose control tokens stay, with marks beside them.
        pieces: Mark the chunks and the texts with known ids.
        messages: Mark the messages.
        only: Index of the only message with marks; None: all have marks.
    """

    visible_tokens: frozenset[str] = frozenset()
    both_sides: bool = False
    marked_beside: frozenset[int] = frozenset()
    pieces: bool = True
    messages: bool = True
    only: int | None = None


class Conversation:
    """Messages and tools in the form that a chat template takes, and the contents of the messages as pieces.

    Args:
        contents: The pieces of each message; None: it has no content.
        is_begun: The last message is the beginning of the answer.
    """

    def __init__(
        self,
        messages: Sequence[Mapping[str, Any]],
        contents: Sequence[Sequence[Piece] | None],
        tools: Sequence[Any],
        forged: Forged,
        is_begun: bool = False,
    ) -> None:
        self._messages, self._contents, self._tools, self._forged = messages, contents, tools, forged
        self._texts = ["".join(piece.text for piece in pieces or ()) for pieces in contents]
        self._in_texts = [forged(text) for text in self._texts]
        if is_begun:
            self._in_texts[-1] = forged(self._texts[-1], True)
        self._answers = [message.get("role") == "assistant" for message in messages]
        self._used = set[int]()
        self._inspected_tokens: frozenset[str] | None = None

    def rendered(self, write: Write) -> Rendered:
        """Render by `write`; raises InputError if the template leaves out a message that is not an answer."""
        text = write([dict(message) for message in self._messages], list(self._tools))
        self._used = used_of([text, *self._strings()])
        if sum(map(len, self._in_texts)) > Marks.room(self._used):
            raise too_many()
        found_messages = set[int]()
        for trial in self._trials(write, text):
            try:
                other, marks = self._tried(write, trial)
            except InputError:  # the template inspects a character that is now a mark
                continue
            found_messages |= {spot.message for spot, _ in cut(other, marks)[1]}
            seen = aligned(other, marks, text)
            if seen is not None:
                self._check_complete(text, found_messages)
                found = self._found(text, seen, trial)
                formed = {*self._joined(write, text, found.bare), *self._uncovered(write, text, seen)}
                return replace(found, bare=tuple(sorted({*found.bare, *formed}))) if formed else found
        trial = replace(
            self._with_inspected(write), pieces=False, messages=False
        )  # no trial agreed: put the letters back
        text, seen = put_back(*self._tried(write, trial))
        self._check_complete(text, found_messages)
        return self._found(text, seen, trial)

    # what is marked

    def _trials(self, write: Write, text: str) -> Iterator[_Trial]:
        """Yield trials: first those that locate most, last those that change least of what a template inspects."""
        ways = [_Trial()]
        yield from (ways[0], replace(ways[0], messages=False))
        forged = [self._answers[at] for at, found in enumerate(self._in_texts) if found]
        if any(forged):
            shown = self._with_inspected(write)
            ways += [replace(shown, both_sides=True), shown] if shown.visible_tokens else [shown]
        others = frozenset(at for at, found in enumerate(self._in_texts) if found and not self._answers[at])
        if not all(forged):
            ways += [replace(way, marked_beside=others, both_sides=True) for way in ways[-1:]]
        yield from ways[1:]
        least = [replace(way, messages=False, pieces=False) for way in ways]
        if not all(forged):
            least += [replace(way, marked_beside=others) for way in least[1:-1] or least[:-1]]
        yield from least
        if len(others) > 1:
            beside = self._beside(write, text, others)
            yield from (replace(way, marked_beside=beside) for way in least if not way.marked_beside)

    def _beside(self, write: Write, text: str, turns: Iterable[int]) -> frozenset[int]:
        """Return the messages in which the template inspects control tokens, testing each alone."""
        found = list[int]()
        for turn in sorted(turns)[:MAX_TESTED_MESSAGES]:
            hidden = _Trial(pieces=False, messages=False, only=turn)
            if not self._is_aligned(write, hidden, text):
                visible = replace(hidden, marked_beside=frozenset({turn}))
                found += [turn] if self._is_aligned(write, visible, text) else []
        return frozenset(found)

    def _is_aligned(self, write: Write, trial: _Trial, text: str) -> bool:
        try:
            return aligned(*self._tried(write, trial), text) is not None
        except InputError:
            return False

    def _with_inspected(self, write: Write) -> _Trial:
        """Return a trial that keeps the control tokens in answers that the template inspects; determined once."""
        if self._inspected_tokens is not None:
            return _Trial(visible_tokens=self._inspected_tokens)
        words = dict.fromkeys(
            self._texts[at][lo:hi] for at, found in enumerate(self._in_texts) if self._answers[at] for lo, hi in found
        )
        tried, whole = [*words][:MAX_TESTED_TOKENS], frozenset(words)
        seen = self._plain(write, whole) if words else None
        inspected = {word for word in tried if self._plain(write, whole - {word}) != seen}
        if words and self._plain(write, frozenset(inspected)) != seen:  # the template accepts any of several
            hidden = self._plain(write, frozenset())
            inspected |= {word for word in tried if self._plain(write, frozenset({word})) != hidden}
        self._inspected_tokens = frozenset(inspected)
        return _Trial(visible_tokens=self._inspected_tokens)

    def _plain(self, write: Write, shown: frozenset[str]) -> str | None:
        """Render with only these control tokens visible in answers; None if the template rejects that."""
        try:
            return put_back(*self._tried(write, _Trial(visible_tokens=shown, pieces=False, messages=False)))[0]
        except InputError:
            return None

    def _tried(self, write: Write, trial: _Trial) -> tuple[str, dict[str, MarkSpot]]:
        """Render with the marks of a trial; return the text and the spot of each mark."""
        marks = Marks.but(self._used)
        messages = []
        for at, message in enumerate(self._messages):
            if trial.only not in (None, at):
                messages.append(dict(message))
                continue
            beside = {key: self._leaves(value, marks) for key, value in message.items() if key != "content"}
            content = message.get("content")
            if content == self._texts[at] and content:
                content = self._content(at, marks, trial)
            messages.append({**beside, "content": content} if "content" in message else beside)
        tools = list(self._tools) if trial.only is not None else [self._leaves(tool, marks) for tool in self._tools]
        return write(messages, tools), marks.spots

    def _leaves(self, value: Any, marks: Marks) -> Any:
        """Return a JSON value with a mark in all text that would be tokenised as a control token."""
        if isinstance(value, str):
            spots = [(lo, MarkSpot(value[lo], "forged", word=value[lo:hi])) for lo, hi in self._forged(value)]
            return marked(value, spots, marks)
        if isinstance(value, Mapping):
            return {self._leaves(name, marks): self._leaves(each, marks) for name, each in value.items()}
        return [self._leaves(each, marks) for each in value] if isinstance(value, list | tuple) else value

    def _content(self, turn: int, marks: Marks, trial: _Trial) -> str:
        text, forged = self._texts[turn], self._in_texts[turn]
        inserted, spots = list[tuple[int, MarkSpot]](), dict[int, MarkSpot]()
        blank = len(text) - len(text.lstrip())
        for lo, hi in forged:
            word = text[lo:hi]
            is_answers = self._answers[turn] and word in trial.visible_tokens
            if is_answers and not trial.both_sides:
                continue
            if is_answers or (turn in trial.marked_beside and not self._answers[turn]):
                places = [hi] if lo <= blank else [lo, hi] if trial.both_sides else [lo]
                n_beside = len(places) if trial.both_sides else 0
                inserted += [(at, MarkSpot("", "forged", at, turn, -1, word, True, lo, n_beside)) for at in places]
            else:
                spots[lo] = MarkSpot(text[lo], "forged", lo, turn, word=word)
        if trial.pieces:
            for number, (lo, hi, _) in enumerate(_tracked_pieces(self._contents[turn])):
                if (at := _mark_place(text, lo, hi, forged)) not in spots:
                    spots[at] = MarkSpot(text[at], "piece", at, turn, number)
        if trial.messages and text.strip() and (at := _mark_place(text, 0, len(text), forged)) not in spots:
            spots[at] = MarkSpot(text[at], "message", at, turn)
        return marked(text, sorted([*inserted, *spots.items()], key=lambda each: each[0]), marks)

    def _strings(self) -> Iterator[str]:
        yield from self._texts
        yield from _strings(self._messages)
        yield from _strings(self._tools)

    # what is found

    def _found(self, text: str, seen: Sequence[FoundMark], trial: _Trial) -> Rendered:
        bare = list(_bare(text, [each for each in seen if each.spot.kind == "forged"]))
        spans = self._spans(text, seen)
        bare += self._across(text, spans)
        placed = list(self._placed(text, seen)) if trial.pieces else list(self._searched(text))
        last = len(self._messages) - 1
        last_chars = [chars for turn, chars, _ in spans if turn == last]
        if not last_chars and (core := self._texts[last].strip()) and (at := text.rfind(core)) >= 0:
            last_chars = [(at, at + len(core))]
        last_message = (min(lo for lo, _ in last_chars), max(hi for _, hi in last_chars)) if last_chars else (0, 0)
        return Rendered(text, tuple(sorted(set(bare))), tuple(_without_overlap(placed)), last_message)

    def _spans(self, text: str, seen: Sequence[FoundMark]) -> list[tuple[int, Chars, list[int]]]:
        """Return the unchanged part of each content around its mark: (message, characters lo:hi, those of lo and hi at
        which the content itself begins or ends)."""
        found = list[tuple[int, Chars, list[int]]]()
        for each in seen:
            spot, is_one = each.spot, each.hi - each.lo == 1
            if (
                spot.message < 0
                or not is_one
                or not (spot.kind == "message" or (spot.kind == "piece" and not spot.number))
            ):
                continue
            if found and found[-1][0] == spot.message and each.lo < found[-1][1][1]:
                continue
            content = self._texts[spot.message]
            head, rest = content[: spot.at], content[spot.at + 1 :]
            before = _n_alike(head[::-1], text[max(0, each.lo - spot.at) : each.lo][::-1])
            behind = _n_alike(rest, text[each.hi : each.hi + len(rest)])
            lo, hi = each.lo - before, each.hi + behind
            whole = (lo, before >= len(head.lstrip())), (hi, behind >= len(rest.rstrip()))
            found.append((spot.message, (lo, hi), [at for at, is_whole in whole if is_whole]))
        return found

    def _across(self, text: str, spans: Iterable[tuple[int, Chars, list[int]]]) -> Iterator[Chars]:
        """Yield text that would be a control token and crosses the border of a content and the template's text."""
        for edge in {edge for _, _, edges in spans for edge in edges}:
            first = max(0, edge - MAX_CONTROL_TOKEN_CHARS)
            for lo, hi in self._forged(text[first : edge + MAX_CONTROL_TOKEN_CHARS]):
                if first + lo < edge < first + hi:
                    yield first + lo, first + hi

    def _joined(self, write: Write, text: str, bare: Sequence[Chars]) -> Iterator[Chars]:
        """Yield text that would be a control token, formed of a name or value of a tool or call and the text beside it.

        bare: text known not to be a control token.
        """
        values = (*self._beside_contents(), *self._tools)
        leaves = dict.fromkeys(each for value in values for each in _strings(value) if each)
        if not leaves:
            return
        known = {lo for lo, _ in bare}
        meets = _MayForm({text[lo:hi].lower() for lo, hi in self._forged(text) if lo not in known})
        risky = [leaf for leaf in leaves if meets(leaf.lower())]
        alone, rest = risky[:MAX_TESTED_VALUES], risky[MAX_TESTED_VALUES:]
        for group in [*([leaf] for leaf in alone), *([rest] if rest else [])]:
            other, marks = self._exchanged(write, frozenset(group))
            seen = aligned(other, marks, text) if other else None
            if seen is None and len(group) > 1:
                raise too_many()
            for each in seen or ():  # None: the template inspects it, like `type`, and wrote it itself
                leaf = each.spot.word
                lo = each.lo - each.spot.at
                if text[max(0, lo) : lo + len(leaf)].casefold() == leaf.casefold():
                    yield from self._over(text, (lo, lo + len(leaf)))

    def _beside_contents(self) -> Iterator[Any]:
        """Yield all values of the messages except role and content."""
        for message in self._messages:
            yield from (value for key, value in message.items() if key not in ("role", "content"))

    def _exchanged(self, write: Write, leaves: frozenset[str]) -> tuple[str, dict[str, MarkSpot]]:
        """Render with a mark in place of one letter of each of these names and values; "" if that is rejected."""
        marks = Marks.but(self._used)

        def changed(value: Any) -> Any:
            if isinstance(value, str) and value in leaves:
                at = _mark_place(value, 0, len(value), ()) if value.strip() else 0
                return marked(value, [(at, MarkSpot(value[at], "forged", at, word=value))], marks)
            if isinstance(value, Mapping):
                return {changed(name): changed(each) for name, each in value.items()}
            return [changed(each) for each in value] if isinstance(value, list | tuple) else value

        messages = [
            {key: value if key in ("role", "content") else changed(value) for key, value in message.items()}
            for message in self._messages
        ]
        try:
            return write(messages, [changed(tool) for tool in self._tools]), marks.spots
        except InputError:
            return "", {}

    def _uncovered(self, write: Write, text: str, seen: Sequence[FoundMark]) -> Iterator[Chars]:
        """Yield what became a control token because the template removed or unescaped characters inside a content;
        raises InputError if it cannot be told from the template's own tokens."""
        whole = {turn for turn, _, edges in self._spans(text, seen) if len(edges) == 2}
        spots, at, n_failed = dict[int, list[tuple[int, MarkSpot]]](), 0, 0
        for turn, content in enumerate(self._texts):
            core = content.strip()
            if turn in whole or not core:
                continue
            # Messages are mostly rendered in order.
            found = text.find(core, at) if n_failed < MAX_FAILED_SEARCHES else -1
            at, n_failed = max(at, found), n_failed + (found < 0)
            if found < 0:
                spots[turn] = [(at, MarkSpot(content[at], "forged", at, turn)) for at in self._hidden_tokens(turn)]
        if not any(spots.values()):
            return
        marks = Marks.but(self._used)
        messages = [
            {**message, "content": marked(self._texts[turn], spots[turn], marks)} if turn in spots else dict(message)
            for turn, message in enumerate(self._messages)
        ]
        placed = aligned(write(messages, list(self._tools)), marks.spots, text)
        if placed is None:
            raise _hidden_token_error()
        for each in placed:
            yield from self._over(text, (each.lo, each.hi))

    def _hidden_tokens(self, turn: int) -> list[int]:
        """Return the place of a middle letter of each control token that a content would contain once characters are
        removed or HTML entities are unescaped, except for those it contains already."""
        content, forged = self._texts[turn], self._in_texts[turn]
        rest = "".join(content[lo:hi] for lo, hi in _between(forged, len(content)))
        if not any(self._forged(_unescaped(each)) for each in (rest, content if forged else "")):
            return []
        pieces, places = list[str](), list[int]()
        for lo, hi, read in _read_as_html(content):
            for at in range(lo, hi) if read == content[lo:hi] else [lo] * len(read):
                places.append(at)
            pieces.append(read)
        visible_letters = [
            (letter, at) for letter, at in zip("".join(pieces), places, strict=True) if not _REMOVABLE.match(letter)
        ]
        forged_places = {at for lo, hi in forged for at in range(lo, hi)}
        found = set[int]()
        outside = [each for each in visible_letters if each[1] not in forged_places]
        for letters_read in [visible_letters, outside] if forged_places else [visible_letters]:
            for lo, hi in self._forged("".join(letter for letter, _ in letters_read)):
                if not forged_places.issuperset(at for _, at in letters_read[lo:hi]):
                    letters = [at for letter, at in letters_read[lo:hi] if letter.isalnum() and content[at] == letter]
                    found |= {*(letters[len(letters) // 2 :][:1] or [letters_read[lo][1]])}
        return sorted(found)

    def _over(self, text: str, chars: Chars) -> Iterator[Chars]:
        """Yield what would be tokenised as control tokens in a text and overlaps these characters."""
        first, last = max(0, chars[0] - MAX_CONTROL_TOKEN_CHARS), min(len(text), chars[1] + MAX_CONTROL_TOKEN_CHARS)
        for lo, hi in self._forged(text[first:last]):
            if first + lo < chars[1] and chars[0] < first + hi:
                yield first + lo, first + hi

    def _placed(self, text: str, seen: Sequence[FoundMark]) -> Iterator[PlacedPiece]:
        places = [_tracked_pieces(pieces) for pieces in self._contents]
        for each in seen:
            if each.spot.kind == "piece":
                lo, _, piece = places[each.spot.message][each.spot.number]
                if (placed := _placed_at(text, each, piece, each.spot.at - lo)) is not None:
                    yield placed

    def _searched(self, text: str) -> Iterator[PlacedPiece]:
        """Find pieces by their text instead of by marks, each after the one before."""
        at = n_failed = 0
        for pieces in self._contents:
            for _, _, piece in _tracked_pieces(pieces):
                lo = text.find(piece.text, at) if n_failed < MAX_FAILED_SEARCHES else -1
                if lo < 0:
                    n_failed += 1
                else:
                    at = lo + len(piece.text)
                    yield PlacedPiece(lo, at, piece)

    def _check_complete(self, text: str, found_messages: set[int]) -> None:
        """Raise InputError if a message is missing that is no answer and not in `found_messages`, by their indices."""
        at = 0
        for turn, message in enumerate(self._messages):
            core = self._texts[turn].strip()
            if not core or turn in found_messages or self._answers[turn] or message.get("content") != self._texts[turn]:
                continue
            found = text.find(core, at)  # messages are mostly in order: one pass finds all
            at = max(at, found)
            if found < 0 and core not in text:
                raise InputError(
                    f"The chat template leaves out message {turn} (role '{message.get('role')}'); use a role that it "
                    "writes (often user and assistant), or pass one text instead of messages."
                )


def _hidden_token_error() -> InputError:
    return InputError(
        "The chat template removes characters inside a message, and the rest looks like a control token of the model. "
        "Leave that text out of the message."
    )


class _MayForm:
    """A test whether a name or value may form one of these words together with the text beside it."""

    def __init__(self, words: Collection[str]) -> None:
        self._all = "\0".join(words)
        self._heads = {word[:n] for word in words for n in range(1, len(word))}
        self._tails = {word[n:] for word in words for n in range(1, len(word))}
        self._max_chars = max(map(len, words), default=1) - 1

    def __call__(self, leaf: str) -> bool:
        if len(leaf) <= self._max_chars and leaf in self._all:
            return True
        sizes = range(1, min(len(leaf), self._max_chars) + 1)
        return any(leaf[-n:] in self._heads or leaf[:n] in self._tails for n in sizes)


def _between(spans: Sequence[Chars], size: int) -> Iterator[Chars]:
    """Yield the parts of 0:size outside of these spans, which are sorted."""
    done = 0
    for lo, hi in spans:
        yield done, lo
        done = hi
    yield done, size


def _unescaped(text: str) -> str:
    """Unescape HTML entities and remove the characters that templates may remove."""
    return _REMOVABLE.sub("", _ENTITY.sub(lambda found: html.unescape(found[0]), text))


def _read_as_html(text: str) -> Iterator[tuple[int, int, str]]:
    """Yield (lo, hi, unescaped text) of the consecutive parts of a text: HTML entities and the text between them."""
    done = 0
    for found in _ENTITY.finditer(text):
        yield done, found.start(), text[done : found.start()]
        yield found.start(), found.end(), html.unescape(found[0])
        done = found.end()
    yield done, len(text), text[done:]


def _tracked_pieces(pieces: Sequence[Piece] | None) -> list[tuple[int, int, Piece]]:
    """Return (lo, hi, piece) of the chunks and texts with known ids in a content."""
    found, at = list[tuple[int, int, Piece]](), 0
    for piece in pieces or ():
        if (piece.ids or piece.kind == "chunk") and piece.text.strip():
            found.append((at, at + len(piece.text), piece))
        at += len(piece.text)
    return found


def _mark_place(text: str, lo: int, hi: int, forged: Sequence[Chars]) -> int:
    """Return a place for a mark, near the middle of lo:hi because templates inspect the ends of a text.

    It is a letter outside of `forged` if there is one.
    """

    def is_plain(at: int) -> bool:
        before = bisect_right(forged, at, key=lambda chars: chars[0])
        return not text[at].isspace() and not (before and forged[before - 1][1] > at)

    found = next((at for at in _outwards(lo, hi) if is_plain(at) and text[at].isalnum()), None)
    if found is None:
        found = next((at for at in _outwards(lo, hi) if is_plain(at)), None)
    return found if found is not None else next(at for at in range(lo, hi) if not text[at].isspace())


def _outwards(lo: int, hi: int) -> Iterator[int]:
    """Yield all of lo:hi, from the middle outwards."""
    middle = (lo + hi) // 2
    for step in range(hi - lo):
        yield from (at for at in (middle + step, middle - step - 1) if lo <= at < hi)


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


def _escapes(text: str) -> Iterator[str]:
    """Yield a text in the ways in which templates escape it as JSON."""
    for plain in (False, True):
        yield json.dumps(text, ensure_ascii=plain)[1:-1]
    safe = {ord(letter): f"\\u{ord(letter):04x}" for letter in "<>&'"}
    yield json.dumps(text)[1:-1].translate(safe)


def _placed_at(text: str, seen: FoundMark, piece: Piece, at: int) -> PlacedPiece | None:
    """Place a piece around its marked letter `at`: as it is, JSON-escaped, or in another case; None if it differs."""
    lo = seen.lo - at
    if lo >= 0 and text.startswith(piece.text, lo):
        return PlacedPiece(lo, lo + len(piece.text), piece)
    core = piece.text.strip()
    if piece.ids:
        lo = seen.lo - at + piece.text.index(core)
        return PlacedPiece(lo, lo + len(core), replace(piece, text=core)) if text.startswith(core, max(0, lo)) else None
    for head, whole in zip(_escapes(piece.text[:at]), _escapes(piece.text), strict=True):
        lo = seen.lo - len(head)
        if lo >= 0 and text.startswith(whole, lo):
            return PlacedPiece(lo, lo + len(whole), replace(piece, text=whole))
    lo, written = seen.lo - at, text[max(0, seen.lo - at) : max(0, seen.lo - at) + len(piece.text)]
    if lo >= 0 and written.casefold() == piece.text.casefold():
        return PlacedPiece(lo, lo + len(written), replace(piece, text=written))
    return None


def _bare(text: str, seen: Sequence[FoundMark]) -> Iterator[Chars]:
    """Yield the characters of texts that are not control tokens, found by the marks in or beside them."""
    beside = Counter[tuple[int, int, int]]()
    for each in seen:
        spot = each.spot
        lo = each.lo - (spot.at - spot.start) if spot.is_inserted else max(each.lo, each.hi - 1)
        if spot.n_beside:
            beside[spot.message, spot.start, lo] += 1
            if beside[spot.message, spot.start, lo] < spot.n_beside or not text.startswith(spot.word, max(0, lo)):
                continue
        yield max(0, lo), min(len(text), lo + len(spot.word))


def _n_alike(one: str, other: str) -> int:
    """Return the length of the common prefix of two texts."""
    if one == other:
        return len(one)
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def _without_overlap(placed: Iterable[PlacedPiece]) -> Iterator[PlacedPiece]:
    """Yield the pieces in order, without those that overlap an earlier one."""
    done = 0
    for each in sorted(placed, key=lambda each: each.lo):
        if each.lo >= done:
            yield each
            done = each.hi
