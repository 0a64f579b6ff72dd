"""Runs into the store: alone or behind a prompt's prefix, and a second time amid other text; a schema's once, at their
positions.

Right behind the prefix a chunk is exact where it stands first. Further down, a chunk that was encoded as if it stood
first brings along what a model computes only once, at the beginning of a text; one that saw other text before itself
comes several times closer to full prefill.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from ragfuse.asking import room_behind
from ragfuse.core import ChunkKey, ChunkKV, amid, token_digest
from ragfuse.hf.model import HFModel
from ragfuse.store import KVStore
from ragfuse.text import stand_in
from ragfuse.text.schema import Run

GAP = "\n\n"
"""What stands between the other text and a chunk."""
PACE_S = 2.0
"""Seconds that the next run waits for the first slow tier to have this one, in the background."""


@dataclass(frozen=True)
class Ingested:
    """What an ingest did: chunks given, those encoded and kept now, their tokens, bytes of KV, seconds.

    of: chunks that there are in all, None where that is not known.
    """

    chunks: int = 0
    encoded: int = 0
    tokens: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    of: int | None = None

    def plus(self, tokens: int, nbytes: int, seconds: float) -> Ingested:
        """After one more chunk, of which so many bytes were new, at `seconds`."""
        new = bool(nbytes)
        found = self.chunks + 1, self.encoded + new, self.tokens + new * tokens, self.nbytes + nbytes
        return Ingested(*found, seconds, self.of)


@dataclass(frozen=True)
class Encoder:
    """Encodes for one model and tenant (`digest`) what `store` does not hold yet.

    shortest: tokens of the shortest run that is kept. other_tokens: tokens of other text that a chunk's second entry
    is encoded behind, 0: no second entries. home, levels: by tokens and bytes, the one slow tier that a chunk goes to,
    and the levels of tiers that it is written at. pace_s: seconds that saving one is waited for, None: until all tiers
    have it.
    """

    model: HFModel
    store: KVStore
    digest: str
    shortest: int
    other_tokens: int
    home: Callable[[int, int], str | None] = lambda n_tokens, nbytes: None
    levels: Callable[[int, int], Mapping[str, Sequence[str]]] = lambda n_tokens, nbytes: {}
    pace_s: float | None = None

    def in_background(self) -> Encoder:
        """The same, held up by no tier that is slow or hangs while another takes what it saves."""
        return replace(self, pace_s=PACE_S)

    def key(self, tokens: Sequence[int], context: str = "") -> ChunkKey:
        """The key of a run of tokens with this context."""
        return ChunkKey(self.digest, token_digest(tokens), context)

    def key_of(self, run: Run) -> ChunkKey:
        """The key of a schema's run, which is encoded alone, with the gaps between its positions."""
        return ChunkKey(self.digest, token_digest(run.tokens), "", run.layout(self.model.profile.fixed))

    def nbytes_in(self, tier: str, tokens: Sequence[int]) -> int:
        """Bytes that one entry of a run takes in a tier, at the levels that it is written at there; it is encoded."""
        kv = self.model.encode(tokens)
        wanted = self.levels(len(tokens), kv.nbytes).get(tier) or self.store.levels.of(tier)
        return self.store.levels.nbytes(self.key(tokens), kv, wanted)

    def keep(self, tokens: Sequence[int], prefix: Sequence[int] = ()) -> int:
        """Encode and keep a run behind `prefix`, or alone behind a short one; bytes of new KV."""
        context = self._context(prefix)
        seldom = bool(self.other_tokens and context)  # only the chunk that stands first in a prompt is read from here
        key, behind = self.key(tokens, context), prefix if context else ()
        return self._put(tokens, key, lambda: self.model.encode(tokens, behind), fast=not seldom)

    def keep_run(self, run: Run) -> int:
        """Encode and keep a schema's run (Prompt Cache 3.3); bytes of new KV.

        Its own positions begin at 0, but where KV cannot be moved: there it is encoded where it stands.
        """
        start = run.start if self.model.profile.fixed else 0
        positions = [start + position for position in run.positions]
        encoded = lambda: self.model.encode_at(run.tokens, positions)  # noqa: E731
        return self._put(run.tokens, self.key_of(run), encoded, fast=True, stays=True)

    def keep_amid(self, tokens: Sequence[int], prefix: Sequence[int] = ()) -> int:
        """Encode and keep a chunk behind `prefix` and other text; bytes of new KV, 0 where there is no room for it."""
        context, room = self._context(prefix), room_behind(len(prefix), self.model)
        other = self.other_tokens if room is None else min(self.other_tokens, room // 2)
        if not other or (room is not None and other + len(tokens) >= room):
            return 0

        def encoded() -> ChunkKV:
            before = prefix if context else ()
            return self.model.encode_amid(tokens, (*before, *self.model.tokens(stand_in() + GAP)[-other:]))

        return self._put(tokens, self.key(tokens, amid(context)), encoded, fast=True)

    def _put(
        self, tokens: Sequence[int], key: ChunkKey, encoded: Callable[[], ChunkKV], fast: bool, stays: bool = False
    ) -> int:
        """stays: it is used where it was encoded, if the model's KV cannot be moved."""
        profile = self.model.profile
        refused = profile.refusal and not (stays and profile.fixed)
        if len(tokens) < self.shortest or refused or self.store.lookup([key]):
            return 0
        kv = encoded()
        home, levels = self.home(len(tokens), kv.nbytes), self.levels(len(tokens), kv.nbytes)
        wait, pace_s = self.pace_s is None, self.pace_s or 0.0
        kept = self.store.put(key, kv, wait=wait, fast=fast, home=home, pace_s=pace_s, levels=levels)
        return kv.nbytes if kept else 0

    def _context(self, prefix: Sequence[int]) -> str:
        return token_digest(prefix) if len(prefix) >= self.shortest else ""
