"""Finds chunks in a text: by signed marks around them, which no document can forge, or by their known text.

Documents are split by the frameworks' splitters, not here, and tokenising is done in `text/assemble.py`. The text of a
chunk is always `text.strip()`, so that a chunk that was stripped on its way into a prompt is the same chunk.

The time of a search is proportional to the length of the searched text, whatever it contains and however many chunks
are known.
"""

from __future__ import annotations

import base64
import hmac
import re
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Literal

import numpy as np
from blake3 import blake3

from ragfuse.errors import SettingsError
from ragfuse.text.beginnings import LETTER, Beginnings, Family
from ragfuse.text.fingerprints import Fingerprints, Residues, residue, secret_prime
from ragfuse.types.keys import digest
from ragfuse.types.whole_text import whole_text

_START = re.compile(rf"(?:(?<!{LETTER})|(?!{LETTER}))\S")
MIN_SLOTS, SLOTS_PER_TEXT = 1 << 10, 32
"""Least slots of the hash table that tells where a known text may begin: in all, and for each text."""
_HEAD = re.compile(r"\[\[chunk:([0-9]{1,9}):([A-Za-z0-9_-]*):([0-9a-f]{32})\]\]")


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a prompt's text: fresh text or one chunk.

    Args:
        text: The text.
        kind: "chunk" if its KV is to be reused, else "fresh".
        source: Where a chunk came from, for people.
        ids: Its token ids if these are known already, as for text that the model wrote itself; (): unknown.
        found: The chunk was found by its known text, not by marks; it is tokenised with the text around it.
    """

    text: str
    kind: Literal["fresh", "chunk"] = "fresh"
    source: str = ""
    ids: tuple[int, ...] = ()
    found: bool = False


@dataclass(frozen=True, slots=True)
class ChunkSpan:
    """A known chunk that was found in a text, at characters lo:hi."""

    lo: int
    hi: int
    id: str
    source: str = ""


def chunk_id(text: str) -> str:
    """Return the digest of a chunk's text; surrounding white space does not count."""
    return digest("chunk", _bytes(text.strip()))


class KnownChunks:
    """An index of known chunk texts that finds them in a prompt. Thread-safe; adding or discarding takes microseconds.

    A chunk is looked up by its first `min_chars` characters (the anchor), then by its whole text, longest first. So
    shorter texts are never found, nor is a text whose end would split a word of the prompt.

    Args:
        min_chars: Length of the anchor, in characters; at least 1.
    """

    def __init__(self, min_chars: int = 24) -> None:
        if min_chars < 1:
            raise SettingsError(f"min_chars is {min_chars}; wanted at least 1.")
        self._min_chars = min_chars
        self._lock = threading.Lock()
        self._sources: dict[str, str] = {}  # text -> source
        self._texts: dict[str, str] = {}  # id -> text
        self._families: dict[str, Family] = {}  # anchor -> the texts that begin with it
        self._beginnings = Beginnings()
        self._may_begin = np.zeros(MIN_SLOTS, bool)  # index: low bits of an anchor's fingerprint

    def __len__(self) -> int:
        return len(self._texts)

    def __contains__(self, text: str) -> bool:
        return text.strip() in self._sources

    def source_of(self, text: str) -> str:
        """Return where a known chunk came from; "" where that, or the chunk, is not known."""
        return self._sources.get(text.strip(), "")

    def add(self, texts: Iterable[str], source: str = "") -> list[str]:
        """Add chunks, so that they are found from now on, and return their ids.

        Args:
            texts: Their texts; one shorter than `min_chars` gets an id but is never found.
            source: Where they came from, for people.
        """
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
                    anchor = text[: self._min_chars]
                    self._beginnings.discard(self._families[anchor], text)
                    if not self._families[anchor]:
                        del self._families[anchor]

    def find(self, text: str) -> list[ChunkSpan]:
        """Return the known chunks in `text`, left to right and without overlap; at each place the longest."""
        with self._lock:
            return list(self._find(text))

    def _add(self, id: str, text: str, source: str) -> None:
        if id not in self._texts:
            self._texts[id] = text
            anchor = text[: self._min_chars]
            if anchor not in self._families:
                self._add_anchor(anchor)
                self._families[anchor] = Family()
            self._beginnings.add(self._families[anchor], text)
        self._sources[text] = source or self._sources.get(text, "")

    def _add_anchor(self, anchor: str) -> None:
        """Add an anchor's fingerprint to the hash table, which grows with the number of anchors."""
        anchors = [anchor]
        if SLOTS_PER_TEXT * (len(self._families) + 1) > len(self._may_begin):
            self._may_begin = np.zeros(2 * len(self._may_begin), bool)
            anchors += self._families
        prints = np.array([self._beginnings.point.fingerprint(each) for each in anchors], np.uint64)
        self._may_begin[prints % len(self._may_begin)] = True

    def _find(self, text: str) -> Iterator[ChunkSpan]:
        beginnings = self._beginnings
        beginnings.steps = 0
        if len(text) < self._min_chars or not self._families:
            return
        prints = Fingerprints(text, beginnings.point)
        beginnings.steps += len(text)
        candidates = np.flatnonzero(self._may_begin[prints.of_size(self._min_chars) % len(self._may_begin)])
        families: dict[str, Family] = {}
        places = [place for place in candidates.tolist() if self._begins(text, place, families)]
        for family in families.values():
            beginnings.settle(family)
        longest = max((family.longest for family in families.values()), default=0)
        for lo, known in beginnings.find(text, prints, np.array(places, np.int64), longest):
            yield ChunkSpan(lo, lo + len(known), chunk_id(known), self._sources[known])

    def _begins(self, text: str, place: int, families: dict[str, Family]) -> bool:
        """Return whether a chunk may begin at this place, and add the chunks with its anchor to `families`."""
        self._beginnings.steps += 1
        if not _START.match(text, place):
            return False
        anchor = text[place : place + self._min_chars]
        family = self._families.get(anchor)
        if family is not None:
            families[anchor] = family
        return family is not None


class Marker:
    """A writer and reader of signed marks around chunks; without the secret nobody can make a mark or move one.

    A mark holds the chunk's length and source, and a keyed BLAKE3 tag over these and the text's fingerprint by a secret
    prime. What looks like a mark but is not signed for exactly the text it encloses stays text, and so does everything
    inside a marked chunk. The text is read once, however many marks overlap.

    Args:
        secret: At least 16 random bytes.
    """

    def __init__(self, secret: bytes) -> None:
        if len(secret) < 16:
            raise SettingsError(
                f"`secret`, from which marks around chunks are made, has {len(secret)} bytes; wanted at least 16 "
                "random bytes."
            )
        self._key = blake3(secret, derive_key_context="ragfuse chunk marks 2").digest()
        self._prime = secret_prime(blake3(secret, derive_key_context="ragfuse chunk marks 2, prime").digest())

    def mark(self, text: str, source: str = "") -> str:
        """Return `text` between marks, which `split` removes; neither end is white space, so stripping is harmless.

        Text and source are marked as `whole_text` has them, as they are read so in a prompt.
        """
        text, name = whole_text(text), _name(whole_text(source))
        tag = self._tag(len(text), name, residue(text, self._prime))
        return f"[[chunk:{len(text)}:{name}:{tag}]]{text}[[end:{tag}]]"

    def split(self, text: str) -> list[Piece]:
        """Return the marked chunks and the fresh text around them, in order; joined they are the unmarked text."""
        begins, los, his, names, tags = list[int](), list[int](), list[int](), list[str](), list[str]()
        for head in _HEAD.finditer(text):
            lo = head.end()
            hi = lo + int(head[1])
            if text.startswith(_foot(head[3]), hi):
                begins.append(head.start())
                los.append(lo)
                his.append(hi)
                names.append(head[2])
                tags.append(head[3])
        residues = Residues(text, chain(los, his), self._prime)
        found, done = list[Piece](), 0
        for begin, lo, hi, name, tag in zip(begins, los, his, names, tags, strict=True):
            if begin < done or not hmac.compare_digest(self._tag(hi - lo, name, residues.of(lo, hi)), tag):
                continue
            found += [Piece(text[done:begin]), Piece(text[lo:hi], "chunk", _source(name))]
            done = hi + len(_foot(tag))
        found.append(Piece(text[done:]))
        return [piece for piece in found if piece.text]

    def unmarked(self, text: str) -> str:
        """Return the text without its marks; what looks like a mark but is not signed stays."""
        return "".join(piece.text for piece in self.split(text)) if _HEAD.search(text) else text

    @staticmethod
    def count(text: str) -> int:
        """Return how many marks seem to begin in a text, signed or not."""
        return sum(1 for _ in _HEAD.finditer(text))

    def _tag(self, length: int, name: str, residue: int) -> str:
        return blake3(f"{length}:{name}:{residue:x}".encode(), key=self._key).hexdigest(length=16)


def pieces(text: str, marker: Marker | None = None, known: KnownChunks | None = None) -> tuple[Piece, ...]:
    """Split a text into fresh text and chunks: first at marks, which are removed, then at known chunks in the rest."""
    marked = marker.split(text) if marker else [Piece(text)]
    found = (_known(piece, known) if known and piece.kind == "fresh" else (piece,) for piece in marked)
    return tuple(piece for group in found for piece in group if piece.text)


def peel(piece: Piece) -> tuple[Piece, ...]:
    """Split the white space around a chunk off as fresh text; a fresh piece is returned as it is."""
    core = piece.text.strip()
    if piece.kind == "fresh" or not core:
        return (Piece(piece.text, ids=piece.ids),)
    lo = len(piece.text) - len(piece.text.lstrip())
    parts = (Piece(piece.text[:lo]), Piece(core, "chunk", piece.source), Piece(piece.text[lo + len(core) :]))
    return tuple(part for part in parts if part.text)


def _known(piece: Piece, known: KnownChunks) -> Iterator[Piece]:
    done = 0
    for span in known.find(piece.text):
        yield Piece(piece.text[done : span.lo])
        yield Piece(piece.text[span.lo : span.hi], "chunk", span.source, found=True)
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
