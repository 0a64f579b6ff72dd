"""Finds retrieved documents that are not encoded yet in prompts, by their token ids."""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from heapq import merge

from cachetools import LRUCache

from ragfuse.text.known_spans import MIN_ALTERED_TOKENS, KnownSpans, Match
from ragfuse.text.span_runs import MIN_RUN_TOKENS

MAX_DOCUMENTS = 4096
"""The most documents that are searched; the least recently retrieved or found are dropped first."""
MAX_RETRIEVED_TOKENS = 1 << 22
"""The most tokens of these documents together."""
COVERED_SHARE = 0.75
"""If encoded chunks cover at least this share of a document's tokens in a prompt, they are used instead of it."""


class RetrievedDocuments:
    """An index of documents that the next prompts may contain. Each is tokenised once. Thread-safe.

    Args:
        min_tokens: The least tokens of a document that is kept.
        tokens: Returns the token ids of a text.
    """

    def __init__(self, min_tokens: int, tokens: Callable[[str], Sequence[int]]) -> None:
        self._min_tokens, self._tokens, self._lock = min_tokens, tokens, threading.Lock()
        min_tokens = max(MIN_RUN_TOKENS + 2, self._min_tokens)
        self._spans = KnownSpans(min_tokens, max(MIN_ALTERED_TOKENS, min_tokens), MAX_DOCUMENTS, MAX_RETRIEVED_TOKENS)
        self._lengths: LRUCache[bytes, int] = LRUCache(MAX_DOCUMENTS)  # digest of a text -> its tokens

    def add(self, text: str, source: str, known: KnownSpans) -> bool:
        """Add a document, unless it is in `known`, the encoded chunks; return whether it is long enough to be kept."""
        digest = _digest(text)
        with self._lock:
            length = self._lengths.get(digest)
        if length is None:
            ids = self._tokens(text)
            length = len(ids)
            if length >= self._min_tokens and ids not in known:
                self._spans.add(ids, text, source)
            with self._lock:
                self._lengths[digest] = length
        return length >= self._min_tokens

    def discard(self, tokens: Sequence[int], text: str = "") -> None:
        """Remove a document; text: also forget that it was added, so that it can be added again."""
        self._spans.discard(tokens)
        if text:
            with self._lock:
                self._lengths.pop(_digest(text), None)

    def find(self, ids: Sequence[int], found: Sequence[Match]) -> list[Match]:
        """Find documents in ids and merge them with the chunks in `found`, sorted and not overlapping.

        If chunks cover less than `COVERED_SHARE` of a document's matches, the document has these tokens and the chunks
        keep the rest; else the chunks have them.
        """
        matches = self._spans.find(ids) if len(self._spans) else []
        if not matches:
            return list(found)
        covered, matched = Counter[tuple[int, ...]](), Counter[tuple[int, ...]]()
        for match, parts in _beside(matches, found):
            matched[match.span.tokens] += match.hi - match.lo
            covered[match.span.tokens] += sum(min(each.hi, match.hi) - max(each.lo, match.lo) for each in parts)
        preferred = [
            match for match in matches if covered[match.span.tokens] < COVERED_SHARE * matched[match.span.tokens]
        ]
        remaining = (part for match, parts in _beside(found, preferred) for part in _outside(match, parts))
        return list(merge(remaining, preferred, key=lambda match: match.lo))


def _beside(matches: Sequence[Match], others: Sequence[Match]) -> Iterator[tuple[Match, Sequence[Match]]]:
    """Yield each match with the others that overlap it. Both inputs are sorted and free of overlaps in themselves."""
    first = 0
    for match in matches:
        while first < len(others) and others[first].hi <= match.lo:
            first += 1
        last = first
        while last < len(others) and others[last].lo < match.hi:
            last += 1
        yield match, others[first:last]


def _outside(match: Match, others: Sequence[Match]) -> Iterator[Match]:
    """Yield the parts of a match outside of others, except for those shorter than `MIN_RUN_TOKENS`."""
    ends = [match.lo, *(each.hi for each in others)]
    begins = [*(each.lo for each in others), match.hi]
    for lo, hi in zip(ends, begins, strict=True):
        if hi - lo >= MIN_RUN_TOKENS or not others:
            yield replace(match, lo=lo, hi=hi, row=match.row + lo - match.lo)


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
