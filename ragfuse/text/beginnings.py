"""Finds the longest known text that begins at each of many places of a prompt.

A known text is indexed by the fingerprints of a few of its prefixes, whose lengths are that of the text with its low
bits cleared (13 letters, 0b1101: prefixes of 8, 12 and 13). A search tries the bits of a length, highest first, and
keeps each bit with which the prefix is still indexed, so it takes one step per bit, however many texts are known. Each
fingerprint leads to the longest known text that its prefix begins with. A match is confirmed by comparing letters.
"""

from __future__ import annotations

import re
import secrets
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ragfuse.text.fingerprints import MODULUS, EvaluationPoint, Fingerprints

Places = NDArray[np.int64]

LETTER = r"[^\W\u0e00-\U0010ffff]"
"""Letters of scripts that separate words by spaces."""
_WORD_BORDER = re.compile(rf"(?!{LETTER})|(?<!{LETTER})")
_BATCH_PLACES = 1 << 15
"""Places that are searched in one batch."""
_BATCH_LETTERS = 1 << 18
"""Letters of known texts that are fingerprinted in one batch."""


def cuts_no_word(text: str, at: int) -> bool:
    """Return whether a longer text can be cut at place `at` without splitting a word."""
    return _WORD_BORDER.match(text, at) is not None


@dataclass(slots=True)
class Family:
    """Known texts with a common beginning.

    Attributes:
        order: Indexed texts, sorted.
        fresh: Texts that are not indexed yet.
        longest: Letters of the longest text.
    """

    order: list[str] = field(default_factory=list)
    fresh: set[str] = field(default_factory=set)
    longest: int = 0

    def __bool__(self) -> bool:
        return bool(self.order or self.fresh)


class Beginnings:
    """An index of known texts by their prefixes. Not thread-safe.

    Attributes:
        steps: Letters compared and fingerprints looked up by searches since it was set to 0; adding and discarding
            are not counted, as they happen once for each text.
    """

    def __init__(self) -> None:
        self.point, self.steps = EvaluationPoint(2 + secrets.randbelow(MODULUS - 3)), 0
        # fingerprint of a prefix -> the longest known text that the prefix begins with, or ""
        self._by_print: dict[int, str] = {}
        self._fingerprints: dict[str, list[int]] = {}  # text -> fingerprints of its indexed prefixes, shortest first
        self._parents: dict[str, str] = {}  # text -> the longest other known text that it begins with, or ""
        self._parents_at_words: dict[str, str] = {}  # the same, but only texts whose end does not split a word

    def add(self, family: Family, text: str) -> None:
        """Add a text, which is found after the next `settle`."""
        family.fresh.add(text)
        family.longest = max(family.longest, len(text))

    def discard(self, family: Family, text: str) -> None:
        """Remove a text."""
        for fingerprint in self._fingerprints.pop(text, ()):
            self._by_print.pop(fingerprint, None)
        self._parents.pop(text, None)
        self._parents_at_words.pop(text, None)
        if text in family.fresh:
            family.fresh.remove(text)
        else:
            family.fresh.update(family.order)  # indexed again: some may share fingerprints with it, or begin with it
            family.fresh.remove(text)
            family.order.clear()

    def settle(self, family: Family) -> None:
        """Index the texts that were added since the last call."""
        if not family.fresh:
            return
        texts = sorted(family.fresh)
        if any(self._is_beginning(family.order, text) for text in texts):
            texts = sorted([*family.order, *texts])
            family.order.clear()
        self._add_fingerprints([text for text in texts if text not in self._fingerprints])
        for text in texts:
            self._insert(family.order, text)
        family.fresh.clear()

    def find(self, text: str, fingerprints: Fingerprints, places: Places, longest: int) -> Iterator[tuple[int, str]]:
        """Yield (place, known text) for places in order, except for places inside of a text that was found before.

        It is the longest known text of at most `longest` letters that begins there and does not end within a word.
        """
        end = 0
        for lo in range(0, len(places), _BATCH_PLACES):
            batch = places[lo : lo + _BATCH_PLACES]
            batch = batch[batch >= end]
            for place, known in zip(batch.tolist(), self._longest(fingerprints, batch, longest), strict=True):
                if known and not cuts_no_word(text, place + len(known)):
                    known = self._parents_at_words[known]
                if not known or place < end:
                    continue
                self.steps += len(known)
                if text.startswith(known, place):
                    yield place, known
                    end = place + len(known)

    def _longest(self, fingerprints: Fingerprints, places: Places, longest: int) -> Sequence[str]:
        """Return the longest known text that begins at each place, even if it ends within a word; "": none."""
        size, found = np.zeros(len(places), np.int64), [""] * len(places)
        for bit in reversed(range(longest.bit_length())):
            rows = np.flatnonzero(places + size + (1 << bit) <= len(fingerprints))
            self.steps += len(rows)
            batch = fingerprints.of(places[rows], size[rows] + (1 << bit)).tolist()
            for row, fingerprint in zip(rows.tolist(), batch, strict=True):
                known = self._by_print.get(fingerprint)
                if known is not None:
                    found[row] = known
                    size[row] += 1 << bit
        return found

    # the index

    @staticmethod
    def _is_beginning(order: Sequence[str], text: str) -> bool:
        """Return whether any of these sorted texts begins with this one."""
        at = bisect_left(order, text)
        return at < len(order) and order[at].startswith(text)

    def _insert(self, order: list[str], text: str) -> None:
        """Insert a text into sorted ones, none of which begins with it."""
        at = bisect_left(order, text)
        parent = order[at - 1] if at else ""
        while not text.startswith(parent):
            parent = self._parents[parent]
        order.insert(at, text)
        self._parents[text] = parent
        self._parents_at_words[text] = (
            parent if not parent or cuts_no_word(text, len(parent)) else self._parents_at_words[parent]
        )
        longest = text
        for size, fingerprint in zip(
            reversed(_prefix_sizes(len(text))), reversed(self._fingerprints[text]), strict=True
        ):
            while len(longest) > size:
                longest = self._parents[longest]
            self._by_print[fingerprint] = longest

    def _add_fingerprints(self, texts: Sequence[str]) -> None:
        """Compute the fingerprints of the texts' prefixes, many texts at a time."""
        batch, n_letters = list[str](), 0
        for text in texts:
            batch.append(text)
            n_letters += len(text)
            if n_letters >= _BATCH_LETTERS:
                self._add_batch(batch)
                batch, n_letters = [], 0
        if batch:
            self._add_batch(batch)

    def _add_batch(self, texts: Sequence[str]) -> None:
        sizes = [_prefix_sizes(len(text)) for text in texts]
        starts = np.cumsum([0, *map(len, texts)])[:-1]
        counts = [len(each) for each in sizes]
        flat = np.array([size for each in sizes for size in each], np.int64)
        found = Fingerprints("".join(texts), self.point).of(np.repeat(starts, counts).astype(np.int64), flat).tolist()
        at = 0
        for text, n in zip(texts, counts, strict=True):
            self._fingerprints[text] = found[at : at + n]
            at += n


def _prefix_sizes(length: int) -> list[int]:
    """Return the lengths of the prefixes by which a text is indexed, shortest first: 8, 12 and 13 for 13 letters."""
    found, size = list[int](), 0
    for bit in reversed(range(length.bit_length())):
        if length & 1 << bit:
            size += 1 << bit
            found.append(size)
    return found
