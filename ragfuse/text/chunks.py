"""Where a chunk begins and ends in a text: marks that no document can forge, and texts that are known already.

No document is split here: the frameworks' splitters do that. No token either: see `assemble`. A chunk's text is the
text without the white space around it, everywhere: whoever stores a chunk stores `text.strip()`, so that a chunk
which was stripped on its way into a prompt is the same chunk.
"""

from __future__ import annotations

import base64
import hmac
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Literal

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from ragfuse.core import digest
from ragfuse.errors import SettingsError

_LETTER = r"[^\W\u0e00-\U0010ffff]"  # of scripts that put space between words
_START = re.compile(rf"(?:(?<!{_LETTER})|(?!{_LETTER}))\S")
_STOP = re.compile(rf"(?!{_LETTER})|(?<!{_LETTER})")
FACTOR = 0x9E3779B97F4A7C15
"""Odd and without pattern, for hashes."""
LEAST_BITS, BITS_EACH = 1 << 10, 32
"""Places of the table that says where a text may begin: at least, and for each text."""
_HEAD = re.compile(r"\[\[chunk:([0-9]{1,9}):([A-Za-z0-9_-]*):([0-9a-f]{32})\]\]")


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of prompt text: `fresh`, or one `chunk`; `source` says where a chunk came from, for people.

    ids: its token ids where these are known without a tokenizer, as what a model wrote itself; (): to be found. found:
    the chunk was met in a text that does not say where chunks begin; it is tokenised with what stands around it.
    """

    text: str
    kind: Literal["fresh", "chunk"] = "fresh"
    source: str = ""
    ids: tuple[int, ...] = ()
    found: bool = False


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
        self._may_begin = np.zeros(LEAST_BITS, bool)  # by hash, whether an anchor has it

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
        if anchor not in self._lengths:
            self._expect(anchor)
        lengths = self._lengths.setdefault(anchor, {})
        lengths[len(text)] = lengths.get(len(text), 0) + step
        if not lengths[len(text)]:
            del lengths[len(text)]
        if not lengths:
            del self._lengths[anchor]

    def _expect(self, anchor: str) -> None:
        """Let places be looked at that hash like this anchor; the table grows with the anchors."""
        if BITS_EACH * (len(self._lengths) + 1) > len(self._may_begin):
            self._may_begin = np.zeros(2 * len(self._may_begin), bool)
            codes = _codes("".join(self._lengths)).reshape(-1, self._min_chars)
            self._may_begin[self._places(codes.T)] = True
        found = 0
        for letter in anchor:
            found = (found * FACTOR + ord(letter)) % (1 << 64)
        self._may_begin[_mixed(np.array([found], np.uint64)) % np.uint64(len(self._may_begin))] = True

    def _places(self, letters: Sequence[NDArray[np.uint64]] | NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Where in the table texts are: letters holds the first ones of all texts, then the second ones, and so on."""
        hashes = np.zeros(len(letters[0]), np.uint64)
        for each in letters:
            hashes = hashes * np.uint64(FACTOR) + each
        return _mixed(hashes) % np.uint64(len(self._may_begin))

    def _find(self, text: str) -> Iterator[Span]:
        at, codes = 0, _codes(text)
        count = len(codes) - self._min_chars + 1
        if count < 1 or not self._lengths:
            return
        places = self._places([codes[first : first + count] for first in range(self._min_chars)])
        for place in np.flatnonzero(self._may_begin[places]):
            lo = int(place)
            if lo < at or not _START.match(text, lo):
                continue
            hi = self._stop(text, lo)
            if hi:
                chunk = text[lo:hi]
                yield Span(lo, hi, chunk_id(chunk), self._sources[chunk])
                at = hi

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
        yield Piece(piece.text[span.lo : span.hi], "chunk", span.source, found=True)
        done = span.hi
    yield Piece(piece.text[done:])


def _codes(text: str) -> NDArray[np.uint64]:
    """Its characters as numbers."""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32).astype(np.uint64)


def _mixed(hashes: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Hashes whose low bits depend on all of them."""
    mixed = hashes * np.uint64(FACTOR)
    found: NDArray[np.uint64] = mixed ^ (mixed >> np.uint64(32))
    return found


def _foot(tag: str) -> str:
    return f"[[end:{tag}]]"


def _name(source: str) -> str:
    return base64.urlsafe_b64encode(_bytes(source)).decode().rstrip("=")


def _source(name: str) -> str:
    return base64.urlsafe_b64decode(name + "=" * (-len(name) % 4)).decode("utf-8", "surrogatepass")


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
