"""Encode runs of tokens into the store: chunks after filler text, prefixes alone, schema runs in
place.

A chunk that is encoded at the start of a text gets KV that occurs only there (attention sinks).
Encoded after filler text, it is several times closer to full prefill at any place. So each chunk
has one entry, whatever prompt it was found in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ragfuse.engine.model_records import MachineTimings
from ragfuse.errors import OverlongError
from ragfuse.hf.model import HFModel
from ragfuse.plan.tiers import choose_tier
from ragfuse.schemas.layout import SchemaRun
from ragfuse.settings import Settings
from ragfuse.store import KVStore
from ragfuse.text import filler_text
from ragfuse.types.choices import LEVEL_NAMES
from ragfuse.types.keys import ChunkKey, filler_context, token_digest
from ragfuse.types.kv import ChunkKV

TOKEN_CHARS = 128
"""Maximum characters per token in the largest vocabularies: a run of spaces."""


def remaining_context(
    n_tokens: int,
    model: HFModel,
    what: str = "The prompt",
    advice: str = "Shorten it, or use fewer or shorter chunks.",
    at_least: bool = False,
) -> int | None:
    """Return the number of tokens that fit after `n_tokens`; None if the model has no limit.

    Args:
        n_tokens: Tokens of the prompt.
        model: The model.
        what: The prompt's name in the error message.
        advice: The last sentence of the error message.
        at_least: True if `n_tokens` is only a lower bound.

    Raises:
        OverlongError: The prompt itself does not fit.
    """
    max_tokens = model.max_context
    if max_tokens is None:
        return None
    if n_tokens > max_tokens:
        raise OverlongError(
            f"{what} does not fit: {model.name} takes at most {max_tokens:,} tokens, found "
            f"{'at least ' if at_least else ''}{n_tokens:,}. {advice}",
            "prompt",
        )
    return max_tokens - n_tokens + 1


def ids_of(text: str, model: HFModel) -> list[int]:
    """Return the token ids of a text; empty if it can never fit the context."""
    limit = model.max_context
    return model.tokens(text) if limit is None or len(text) // TOKEN_CHARS <= limit else []


GAP = "\n\n"
"""The text between the filler text and a chunk."""
PACE_S = 2.0
"""Maximum seconds that background work waits for the first slow tier's save."""


@dataclass(frozen=True)
class Encoder:
    """Computes and stores the KV of runs that the store does not have yet.

    Args:
        model: The model.
        store: The store.
        settings: The settings; uses `min_chunk_tokens` and `placement`.
        timings: Timings of this machine, for the choice of tiers.
        digest: Digest of model and tenant in keys.
        filler_tokens: Tokens of filler text before a chunk; 0: chunks are encoded alone.
        ratio: Returns the default recompute ratio.
        pace_s: Maximum seconds to wait for a save; None: wait until all tiers have it.
    """

    model: HFModel
    store: KVStore
    settings: Settings
    timings: MachineTimings
    digest: str
    filler_tokens: int
    ratio: Callable[[], float]
    pace_s: float | None = None

    def in_background(self, pace_s: float = PACE_S) -> Encoder:
        """Return an encoder that waits at most `pace_s` for the save to a slow tier."""
        return replace(self, pace_s=pace_s)

    def key(self, tokens: Sequence[int], context: str = "") -> ChunkKey:
        """Return the key of a run of tokens; `context` as in `ChunkKey`."""
        return ChunkKey(self.digest, token_digest(tokens), context)

    def key_of(self, run: SchemaRun) -> ChunkKey:
        """Return the key of a schema's run, which includes the gaps between its positions."""
        return ChunkKey(
            self.digest, token_digest(run.tokens), "", run.layout(self.model.profile.fixed)
        )

    @property
    def shortest(self) -> int:
        """Minimum tokens of a stored run."""
        return self.settings.min_chunk_tokens

    def home(self, n_tokens: int, nbytes: int) -> str | None:
        """Return the slow tier for a new chunk; None: all, by setting or for lack of timings."""
        costs = self.timings.costs(self.model)
        slow = [tier.name for tier in self.store.tiers if tier.slow]
        if costs is None or len(slow) < 2 or self.settings.placement == "all":
            return None
        written = {tier: self.store.levels.of(tier) for tier in slow}
        return choose_tier(n_tokens, nbytes, costs, written, self.ratio())

    @property
    def context(self) -> str:
        """The context of chunks in keys: filler text, or "" if `filler_tokens` is 0."""
        return filler_context("") if self.filler_tokens else ""

    def keep_prefix(self, tokens: Sequence[int]) -> int:
        """Encode and store a prefix of prompts; return the bytes of new KV."""
        return self._put(tokens, self.key(tokens), lambda: self.model.encode(tokens))

    def keep_chunk(self, tokens: Sequence[int], persistent: bool = True) -> int:
        """Encode and store a chunk; return the bytes of new KV, 0 if it was stored before.

        Args:
            tokens: Its token ids.
            persistent: True to write it to slow tiers too; False for a chunk unknown to later
                processes.
        """
        before = self.filler(len(tokens))
        encode = self.model.encode_with_filler if self.filler_tokens else self.model.encode
        return self._put(
            tokens,
            self.key(tokens, self.context),
            lambda: encode(tokens, before),
            persistent=persistent,
        )

    def filler(self, n_tokens: int) -> list[int]:
        """Return the filler tokens to encode before a chunk of `n_tokens` tokens."""
        room = remaining_context(n_tokens, self.model)
        other = self.filler_tokens if room is None else min(self.filler_tokens, room - 1)
        return self.model.tokens(filler_text() + GAP)[-other:] if other else []

    def keep_run(self, run: SchemaRun) -> int:
        """Encode and store a schema's run (Prompt Cache 3.3); return the bytes of new KV.

        It is encoded from position 0 on, or at its schema positions if the model's KV cannot be
        moved.
        """
        start = run.start if self.model.profile.fixed else 0
        positions = [start + position for position in run.positions]
        encoded = lambda: self.model.encode_at(run.tokens, positions)  # noqa: E731
        return self._put(run.tokens, self.key_of(run), encoded, at_encoded_position=True)

    def _put(
        self,
        tokens: Sequence[int],
        key: ChunkKey,
        encoded: Callable[[], ChunkKV],
        at_encoded_position: bool = False,
        persistent: bool = True,
    ) -> int:
        """Store a run unless it is stored; return the bytes of new KV. If the model's KV cannot be
        moved, only runs that stay `at_encoded_position` are stored.
        """
        profile = self.model.profile
        refused = profile.refusal and not (at_encoded_position and profile.fixed)
        if len(tokens) < self.shortest or refused:
            return 0
        return self.save(key, encoded, persistent)

    def save(
        self,
        key: ChunkKey,
        kv_of: Callable[[], ChunkKV],
        persistent: bool = True,
        exact: bool = False,
    ) -> int:
        """Store KV under a key unless it is already stored; return the bytes of new KV.

        Args:
            key: The key.
            kv_of: Returns the KV.
            persistent: True to write it to slow tiers too.
            exact: True to store it losslessly in the last fast tier, whatever its levels.
        """
        fast = [tier.name for tier in self.store.tiers if not tier.slow][-1:]
        raw = dict.fromkeys(fast, LEVEL_NAMES[:1]) if exact else {}
        found = self.store.lookup([key]).get(key)
        is_stored = found is not None and (not raw or LEVEL_NAMES[0] in found.sizes)
        if is_stored and (not persistent or self.store.is_persistent(key)):
            return 0
        if not persistent and not fast:
            return 0
        kv = kv_of()
        if not persistent:
            return kv.nbytes if self.store.put(key, kv, tier=fast[0], levels=raw) else 0
        home, wait, pace_s = (
            self.home(kv.n_tokens, kv.nbytes),
            self.pace_s is None,
            self.pace_s or 0.0,
        )
        kept = self.store.put(key, kv, wait=wait, slow_tier=home, pace_s=pace_s, levels=raw)
        return kv.nbytes if kept else 0
