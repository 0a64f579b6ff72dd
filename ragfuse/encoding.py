"""Runs into the store: alone or behind a prompt's prefix, and a second time amid their own document.

Right behind the prefix a chunk is exact where it stands first. Further down, a chunk that was encoded as if it stood
first brings along what a model computes only once, at the beginning of a text; one that saw other text before itself
comes several times closer to full prefill.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ragfuse.asking import room_behind
from ragfuse.core import ChunkKey, ChunkKV, amid, token_digest
from ragfuse.hf.model import HFModel
from ragfuse.store import KVStore
from ragfuse.text import Window, stand_in, windows

WINDOW = 1024
"""Tokens of a document that are encoded in one go."""
GAP = "\n\n"
"""What stands between two chunks of a document."""


@dataclass(frozen=True)
class Encoder:
    """Encodes for one model and tenant (`digest`) what `store` does not hold yet.

    shortest: tokens of the shortest run that is kept. reach: tokens of its document that a chunk sees, 0: no second
    entries.
    """

    model: HFModel
    store: KVStore
    digest: str
    shortest: int
    reach: int

    def key(self, tokens: Sequence[int], context: str = "") -> ChunkKey:
        """The key of a run of tokens with this context."""
        return ChunkKey(self.digest, token_digest(tokens), context)

    def keep(self, tokens: Sequence[int], prefix: Sequence[int] = ()) -> int:
        """Encode and keep a run behind `prefix`, or alone behind a short one; bytes of new KV."""
        context = self._context(prefix)
        key = self.key(tokens, context)
        if len(tokens) < self.shortest or self.model.profile.refusal or self.store.lookup([key]):
            return 0
        seldom = bool(
            self.reach and context
        )  # one chunk of a prompt stands first, the others are read as they are amid
        return self._put(key, self.model.encode(tokens, prefix if context else ()), fast=not seldom)

    def windows(self, chunks: Iterable[Sequence[int]], prefix: Sequence[int]) -> Iterator[Window]:
        """One document's chunks, as they can be encoded at a time behind `prefix`."""
        room = self._room(prefix)
        reach = min(self.reach, room // 4)
        before = self.model.tokens(stand_in() + GAP)
        return windows(chunks, before, reach, min(WINDOW, room - reach), self.model.tokens(GAP))

    def keep_amid(self, window: Window, prefix: Sequence[int]) -> list[int]:
        """Encode and keep a window's chunks behind `prefix` and what stands before them; bytes of new KV of each."""
        context, kept = self._context(prefix), [0] * len(window.chunks)
        keys = [self.key(chunk, amid(context)) for chunk in window.chunks]
        there = self.store.lookup(keys)
        missing = {
            key: at for at, key in enumerate(keys) if key not in there and len(window.chunks[at]) >= self.shortest
        }
        wanted = sorted(missing.values())  # of equal chunks, one
        before = (*(prefix if context else ()), *window.before)
        fits = len(window.before) + len(window.tokens) <= self._room(prefix)
        if not wanted or not self.reach or not fits or self.model.profile.refusal:
            return kept
        encoded = self.model.encode_all(window.tokens, [window.spans[at] for at in wanted], before)
        for at, kv in zip(wanted, encoded, strict=True):
            kept[at] = self._put(keys[at], kv, fast=True)
        return kept

    def _context(self, prefix: Sequence[int]) -> str:
        return token_digest(prefix) if len(prefix) >= self.shortest else ""

    def _room(self, prefix: Sequence[int]) -> int:
        """Tokens that fit behind a prefix."""
        room = room_behind(len(prefix), self.model)
        return 1 << 30 if room is None else room - 1

    def _put(self, key: ChunkKey, kv: ChunkKV, fast: bool) -> int:
        return kv.nbytes if self.store.put(key, kv, wait=True, fast=fast) else 0
