"""Where a chunk begins and ends in a text: marks that no document can forge, and texts that are known already.

No document is split here: the frameworks' splitters do that. No token either: see `assemble`. A chunk's text is the
text without the white space around it, everywhere: whoever stores a chunk stores `text.strip()`, so that a chunk
which was stripped on its way into a prompt is the same chunk.
"""

from __future__ import annotations

import base64
import hmac
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from threading import Lock
from typing import Literal

from blake3 import blake3

from ragfuse.core import digest
from ragfuse.errors import SettingsError

_LETTER = r"[^\W\u0e00-\U0010ffff]"  # of scripts that put space between words
_START = re.compile(rf"(?:(?<!{_LETTER})|(?!{_LETTER}))\S")
_STOP = re.compile(rf"(?!{_LETTER})|(?<!{_LETTER})")
_HEAD = re.compile(r"\[\[chunk:([0-9]{1,9}):([A-Za-z0-9_-]*):([0-9a-f]{32})\]\]")


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of prompt text: `fresh`, or one `chunk`; `source` says where a chunk came from, for people.

    ids: its token ids where these are known without a tokenizer, as what a model wrote itself; (): to be found.
    """

    text: str
    kind: Literal["fresh", "chunk"] = "fresh"
    source: str = ""
    ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Span:
    """A known chunk found in a text, at characters lo:hi."""

    lo: int
    hi: int
    id: str
    source: str = ""


def chunk_id(text: str) -> str:
    """Digest of a chunk's text, the same with and without white space around it."""
    return digest("chunk", _bytes(text.strip()))


class KnownChunks:
    """Known chunk texts and where they stand in a prompt. Thread-safe; adding or discarding one costs microseconds.

    A chunk is looked up by its first `min_chars` characters (the anchor), then by its whole text, longest first. So
    shorter texts are never known, and neither is a text whose end would cut a word of the prompt in two.
    """

    def __init__(self, min_chars: int = 24) -> None:
        if min_chars < 1:
            raise SettingsError(f"min_chars is {min_chars}; wanted at least 1.")
        self._min_chars = min_chars
        self._lock = Lock()
        self._sources: dict[str, str] = {}  # text -> source
        self._texts: dict[str, str] = {}  # id -> text
        self._lengths: dict[str, dict[int, int]] = {}  # anchor -> length -> how many texts

    def __len__(self) -> int:
        return len(self._texts)

    def __contains__(self, text: str) -> bool:
        return text.strip() in self._sources

    def add(self, texts: Iterable[str], source: str = "") -> list[str]:
        """Ids of `texts`, which are found from now on; those that are too short get an id but are never found."""
        stripped = [text.strip() for text in texts]
        ids = [chunk_id(text) for text in stripped]
        with self._lock:
            for id, text in zip(ids, stripped, strict=True):
                if len(text) >= self._min_chars:
                    self._add(id, text, source)
        return ids

    def discard(self, ids: Iterable[str]) -> None:
        """Forget chunks; unknown ids are no error."""
        with self._lock:
            for id in ids:
                if (text := self._texts.pop(id, None)) is not None:
                    del self._sources[text]
                    self._count(text, -1)

    def find(self, text: str) -> list[Span]:
        """Known chunks in `text`: leftmost first, the longest where several begin, none overlapping."""
        with self._lock:
            return list(self._find(text))

    def _add(self, id: str, text: str, source: str) -> None:
        if id not in self._texts:
            self._texts[id] = text
            self._count(text, 1)
        self._sources[text] = source or self._sources.get(text, "")

    def _count(self, text: str, step: int) -> None:
        anchor = text[: self._min_chars]
        lengths = self._lengths.setdefault(anchor, {})
        lengths[len(text)] = lengths.get(len(text), 0) + step
        if not lengths[len(text)]:
            del lengths[len(text)]
        if not lengths:
            del self._lengths[anchor]

    def _find(self, text: str) -> Iterator[Span]:
        at = 0
        while self._lengths and (start := _START.search(text, at)):
            lo = start.start()
            hi = self._stop(text, lo)
            if hi:
                chunk = text[lo:hi]
                yield Span(lo, hi, chunk_id(chunk), self._sources[chunk])
            at = hi or lo + 1

    def _stop(self, text: str, lo: int) -> int:
        """End of the longest known chunk that begins at `lo`, 0 if there is none."""
        lengths = self._lengths.get(text[lo : lo + self._min_chars], {})
        stops = (lo + length for length in sorted(lengths, reverse=True) if lo + length <= len(text))
        return next((hi for hi in stops if text[lo:hi] in self._sources and _STOP.match(text, hi)), 0)


class Marker:
    """Marks around chunks in a text, signed with a secret: whoever lacks it cannot make one, or move one elsewhere.

    A mark holds length and source, signed together with the text by keyed BLAKE3. What looks like a mark but is not
    signed for exactly the text it encloses is text, byte for byte; so is anything inside a marked chunk.
    """

    def __init__(self, secret: bytes) -> None:
        if len(secret) < 16:
            raise SettingsError(f"A marker's secret has {len(secret)} bytes; wanted at least 16 random ones.")
        self._key = blake3(secret, derive_key_context="ragfuse chunk marks 1").digest()

    def mark(self, text: str, source: str = "") -> str:
        """`text` between marks that `split` takes off again. Neither end is white space: stripping is harmless."""
        name = _name(source)
        tag = self._tag(text, name)
        return f"[[chunk:{len(text)}:{name}:{tag}]]{text}[[end:{tag}]]"

    def split(self, text: str) -> list[Piece]:
        """Chunks that were marked and the fresh text around them, in order; joined they are the unmarked text."""
        found, done, at = [], 0, 0
        while head := _HEAD.search(text, at):
            at = head.end()
            if chunk := self._open(text, head):
                found += [Piece(text[done : head.start()]), chunk]
                done = at = head.end() + len(chunk.text) + len(_foot(head[3]))
        found.append(Piece(text[done:]))
        return [piece for piece in found if piece.text]

    def _open(self, text: str, head: re.Match[str]) -> Piece | None:
        length, name, tag = head.groups()
        stop = head.end() + int(length)
        if not text.startswith(_foot(tag), stop):
            return None
        chunk = text[head.end() : stop]
        if not hmac.compare_digest(self._tag(chunk, name), tag):
            return None
        return Piece(chunk, "chunk", _source(name))

    def _tag(self, text: str, name: str) -> str:
        signed = f"{len(text)}:{name}\n".encode() + _bytes(text)
        return blake3(signed, key=self._key).hexdigest(length=16)


def pieces(text: str, marker: Marker | None = None, known: KnownChunks | None = None) -> tuple[Piece, ...]:
    """`text` without marks, cut into fresh text and chunks: marked ones first, known ones in what is left."""
    marked = marker.split(text) if marker else [Piece(text)]
    found = (_known(piece, known) if known and piece.kind == "fresh" else (piece,) for piece in marked)
    return tuple(piece for group in found for piece in group if piece.text)


def peel(piece: Piece) -> tuple[Piece, ...]:
    """A chunk without the white space around it, which becomes fresh text; a fresh piece as it is."""
    core = piece.text.strip()
    if piece.kind == "fresh" or not core:
        return (Piece(piece.text, ids=piece.ids),)
    lo = piece.text.index(core)
    parts = (Piece(piece.text[:lo]), Piece(core, "chunk", piece.source), Piece(piece.text[lo + len(core) :]))
    return tuple(part for part in parts if part.text)


def _known(piece: Piece, known: KnownChunks) -> Iterator[Piece]:
    done = 0
    for span in known.find(piece.text):
        yield Piece(piece.text[done : span.lo])
        yield Piece(piece.text[span.lo : span.hi], "chunk", span.source)
        done = span.hi
    yield Piece(piece.text[done:])


def _foot(tag: str) -> str:
    return f"[[end:{tag}]]"


def _name(source: str) -> str:
    return base64.urlsafe_b64encode(_bytes(source)).decode().rstrip("=")


def _source(name: str) -> str:
    return base64.urlsafe_b64decode(name + "=" * (-len(name) % 4)).decode("utf-8", "surrogatepass")


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
