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
_STOP = re.compile(rf"(?!{LETTER})|(?<!{LETTER})")
_AT_ONCE = 1 << 15
"""Places that are searched in one batch."""
_BATCH = 1 << 18
"""Letters of known texts that are fingerprinted in one batch."""


def cuts_no_word(text: str, at: int) -> bool:
    """Tell whether a text may end before place `at` of a longer one."""
    return _STOP.match(text, at) is not None


@dataclass(slots=True)
class Family:
    """Known texts with a common beginning. order: indexed texts, sorted; fresh: texts that are not indexed yet."""

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
        self._marks: dict[int, str] = {}  # fingerprint of a beginning -> the longest known text in that, or ""
        self._prints: dict[str, list[int]] = {}  # text -> fingerprints of its own beginnings, shortest first
        self._parents: dict[str, str] = {}  # text -> the longest other known text that it begins with, or ""
        self._whole: dict[str, str] = {}  # the same, of those that end no word of it in two

    def add(self, family: Family, text: str) -> None:
        """Add a text, which is found after the next `settle`."""
        family.fresh.add(text)
        family.longest = max(family.longest, len(text))

    def discard(self, family: Family, text: str) -> None:
        """Remove a text."""
        for print in self._prints.pop(text, ()):
            self._marks.pop(print, None)
        self._parents.pop(text, None)
        self._whole.pop(text, None)
        if text in family.fresh:
            family.fresh.remove(text)
        else:
            family.fresh.update(family.order)  # some of which shared fingerprints with it, or began with it
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
        self._read([text for text in texts if text not in self._prints])
        for text in texts:
            self._place(family.order, text)
        family.fresh.clear()

    def find(self, text: str, prints: Fingerprints, places: Places, longest: int) -> Iterator[tuple[int, str]]:
        """Yield (place, known text) for places in order, without those inside of a text that was found before.

        The text is the longest of at most `longest` letters that begins there and cuts no word in two.
        """
        done = 0
        for lo in range(0, len(places), _AT_ONCE):
            some = places[lo : lo + _AT_ONCE]
            some = some[some >= done]
            for place, known in zip(some.tolist(), self._longest(prints, some, longest), strict=True):
                if known and not cuts_no_word(text, place + len(known)):
                    known = self._whole[known]
                if not known or place < done:
                    continue
                self.steps += len(known)
                if text.startswith(known, place):
                    yield place, known
                    done = place + len(known)

    def _longest(self, prints: Fingerprints, places: Places, longest: int) -> Sequence[str]:
        """Return the longest known text that begins at each place, even if it ends within a word; "": none."""
        size, found = np.zeros(len(places), np.int64), [""] * len(places)
        for bit in reversed(range(longest.bit_length())):
            rows = np.flatnonzero(places + size + (1 << bit) <= len(prints))
            self.steps += len(rows)
            wanted = prints.of(places[rows], size[rows] + (1 << bit)).tolist()
            for row, print in zip(rows.tolist(), wanted, strict=True):
                known = self._marks.get(print)
                if known is not None:
                    found[row] = known
                    size[row] += 1 << bit
        return found

    # what is kept

    @staticmethod
    def _is_beginning(order: Sequence[str], text: str) -> bool:
        """Whether any of the texts in order begins with this one."""
        at = bisect_left(order, text)
        return at < len(order) and order[at].startswith(text)

    def _place(self, order: list[str], text: str) -> None:
        """Put a text among others, none of which begins with it."""
        at = bisect_left(order, text)
        parent = order[at - 1] if at else ""
        while not text.startswith(parent):
            parent = self._parents[parent]
        order.insert(at, text)
        self._parents[text] = parent
        self._whole[text] = parent if not parent or cuts_no_word(text, len(parent)) else self._whole[parent]
        longest = text
        for size, print in zip(reversed(_sizes(len(text))), reversed(self._prints[text]), strict=True):
            while len(longest) > size:
                longest = self._parents[longest]
            self._marks[print] = longest

    def _read(self, texts: Sequence[str]) -> None:
        """Take the fingerprints of the texts' beginnings, many texts at a time."""
        some, n_letters = list[str](), 0
        for text in texts:
            some.append(text)
            n_letters += len(text)
            if n_letters >= _BATCH:
                self._read_together(some)
                some, n_letters = [], 0
        if some:
            self._read_together(some)

    def _read_together(self, texts: Sequence[str]) -> None:
        sizes = [_sizes(len(text)) for text in texts]
        starts = np.cumsum([0, *map(len, texts)])[:-1]
        counts = [len(each) for each in sizes]
        flat = np.array([size for each in sizes for size in each], np.int64)
        found = Fingerprints("".join(texts), self.point).of(np.repeat(starts, counts).astype(np.int64), flat).tolist()
        at = 0
        for text, n in zip(texts, counts, strict=True):
            self._prints[text] = found[at : at + n]
            at += n


def _sizes(length: int) -> list[int]:
    """Lengths of the beginnings by which a text is met, shortest first: 8, 12, 13 for 13."""
    found, size = list[int](), 0
    for bit in reversed(range(length.bit_length())):
        if length & 1 << bit:
            size += 1 << bit
            found.append(size)
    return found
