"""`TransferPlace`: a tier in which whole prompts' KV waits for another engine.

Each prompt gets a handle, which is secret, short-lived, and bound to model, tenant and token ids.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from ragfuse.codec import codec_for
from ragfuse.errors import RagFuseError, TransferError
from ragfuse.settings import Settings
from ragfuse.store.factory import open_tier
from ragfuse.store.tier import EntryMeta, Tier, shown
from ragfuse.transfer.handle import UNKNOWN, TransferHandle, TransferModel, expired
from ragfuse.types.keys import ChunkKey, digest, token_digest
from ragfuse.types.kv import ChunkKV, Entry, LayerKV

log = logging.getLogger("ragfuse.transfer")

_SWEEPS_A_LIFE = 5
_MARGIN_S = 60.0


class TransferPlace:
    """A tier that stores prompts' KV until another engine reads the KV. Thread-safe.

    Args:
        tier: The tier.
        ttl_s: Seconds after which a handle expires.
        label: The tier's name in handles: the kind of tier and a digest of the URL.
        where: The tier's name in messages: the URL without secrets.
        clock: Returns the time in seconds since the epoch.
    """

    def __init__(
        self,
        tier: Tier,
        ttl_s: float = 300.0,
        label: str = "",
        where: str = "",
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.label = label or tier.name
        self.where = where or self.label
        self._tier, self._ttl_s, self._clock = tier, ttl_s, clock
        self.sweep()

    @classmethod
    def open(cls, settings: Settings) -> TransferPlace:
        """Open the tier at `settings.transfer_url` and delete the expired KV in that tier.

        Raises:
            TransferError: The setting is missing, or the tier is unusable or does not respond.
        """
        url = settings.transfer_url
        if not url:
            raise TransferError(
                "KV cannot be transferred without a tier that both engines reach. Set"
                " RAGFUSE_TRANSFER_URL to a folder (in /dev/shm for engines on one machine), or to"
                " a redis:// or s3:// URL."
            )
        life_s = settings.transfer_ttl_s
        limits = {"tier_bytes": settings.transfer_bytes, "ttl_s": life_s + _MARGIN_S}
        try:
            tier = open_tier(url, settings.model_copy(update=limits), _evict_expired)
        except (RagFuseError, ImportError, OSError, ValueError) as error:
            raise TransferError(
                f"RAGFUSE_TRANSFER_URL '{shown(url)}' cannot be opened: {error}"
            ) from error
        if not tier.answers:
            raise TransferError(
                f"RAGFUSE_TRANSFER_URL '{shown(url)}' does not answer. Start its server, or set"
                " a URL that both engines reach."
            )
        return cls(tier, life_s, f"{tier.name}-{digest('place', url)[:8]}", shown(url))

    def put(
        self,
        kv: ChunkKV,
        token_ids: Sequence[int],
        model: TransferModel,
        tenant: str,
        level: str = "raw",
        weights: str = UNKNOWN,
    ) -> TransferHandle:
        """Write the KV of a whole prompt.

        Args:
            kv: The KV of all T tokens: keys and values [H, T, D] per layer, keys rotated to
                positions 0..T-1.
            token_ids: The T token ids of the prompt.
            model: The model that computed the KV.
            tenant: The tenant's label (`TransferHandle.tenant_label`).
            level: The codec level: "raw", or "int8", which is not exact.
            weights: Digest of the model's weights (`sample_weights`).

        Returns:
            The handle, with which the KV can be read until the handle expires.

        Raises:
            TransferError: There is no room for the KV, or the tier failed.
        """
        self.sweep_if_due()
        codec = codec_for(level)
        blobs = [codec.encode(layer, at).cpu() for at, layer in enumerate(kv.layers)]
        meta = EntryMeta.of(kv, level, blobs)
        handle = TransferHandle(
            secret=secrets.token_hex(16),
            expires_s=int(self._clock() + self._ttl_s),
            tenant=tenant,
            model=model,
            weights=weights,
            tokens=token_digest(token_ids),
            n_tokens=len(token_ids),
            nbytes=meta.nbytes,
            level=level,
            place=self.label,
        )
        if not self._tier.put(handle.key, meta, blobs):
            raise TransferError(
                f"{meta.nbytes:,} bytes of KV could not be stored in '{self.where}': the tier is"
                " full, or the write failed (see the log). Raise RAGFUSE_TRANSFER_BYTES, lower"
                " RAGFUSE_TRANSFER_TTL_S, or try again later."
            )
        return handle

    def read(self, handle: TransferHandle) -> Iterator[LayerKV]:
        """Yield the layers of a prompt's KV. Each layer is read on demand. The KV is not deleted.

        Raises:
            TransferError: The KV was never stored under this handle, was deleted, or is damaged.
        """
        codec = codec_for(handle.level)
        for at in range(handle.model.n_layers):
            found = self._tier.get(handle.key, range(at, at + 1))
            if found is None:
                raise TransferError(
                    f"Layer {at} of a prompt's KV is not in '{self.where}' (tier '{self.label}');"
                    f" kv_transfer_params names tier {handle.place!r:.40}. If these two tiers"
                    " differ, set the same RAGFUSE_TRANSFER_URL for both engines. If they are the"
                    " same, the KV was deleted, expired or damaged: prefill again."
                )
            meta, *blobs = found
            yield codec.decode(blobs[0], meta.layers[at])

    def delete(self, handle: TransferHandle) -> bool:
        """Delete the KV of a handle; return whether there was any KV to delete."""
        return bool(self._tier.delete([handle.key]))

    @property
    def n_waiting(self) -> int:
        """Number of prompts whose KV is in the tier."""
        return len(self._tier.list())

    def sweep(self) -> int:
        """Delete the KV of expired handles; return the number of prompts whose KV was deleted."""
        self._swept_at = now_s = self._clock()
        doomed = expired((entry.key for entry in self._tier.list()), now_s)
        if not doomed:
            return 0
        log.info(
            "KV of %d prompts expired in '%s' before any engine decoded them",
            len(doomed),
            self.where,
        )
        return self._tier.delete(doomed)

    def sweep_if_due(self) -> None:
        """Call `sweep` unless the latest sweep was less than a fifth of `ttl_s` ago."""
        if not 0 <= self._clock() - self._swept_at < self._ttl_s / _SWEEPS_A_LIFE:
            self.sweep()

    def close(self) -> None:
        """Close the tier. The stored KV stays in the tier until it expires."""
        self._tier.close()


def _evict_expired(entries: Iterable[Entry]) -> Iterable[Iterable[ChunkKey]]:
    """Return the keys of expired KV. KV that has not expired is never evicted."""
    return [expired((entry.key for entry in entries), time.time())]
