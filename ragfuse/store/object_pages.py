"""Listings of an object tier's folder: they update its `ObjectIndex` and delete what interrupted writes left behind.

One thread lists at a time. It holds no lock that lookups and reads need.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping

from ragfuse.store.bucket import NO_ANSWER, Bucket, Object
from ragfuse.store.names import (
    CHUNKS_FOLDER,
    PINS_FOLDER,
    USES_FOLDER,
    chunk_key,
    is_abandoned,
    is_temporary,
    pin_key,
    use_key,
    use_name,
)
from ragfuse.store.object_state import ObjectIndex
from ragfuse.store.tier import Freed
from ragfuse.types.keys import ChunkKey

log = logging.getLogger("ragfuse.store")


class BucketPages:
    """The listings of a bucket. Each one updates the index, and deletes objects that no entry and no writer needs.

    Args:
        bucket: The bucket.
        index: The index to update.
        fresh_s: Seconds for which a listing counts as up to date; a listing that took `t` seconds counts for at least
            `2 * fresh_s * t` seconds.
        uses: Whether every listing also reads the times of last use that other processes have recorded.
    """

    def __init__(self, bucket: Bucket, index: ObjectIndex, fresh_s: float, *, uses: bool = False) -> None:
        self._bucket, self._index, self._fresh_s, self._uses = bucket, index, fresh_s, uses
        self._lock = threading.Lock()
        self._read_at: float | None = None
        self._took_s = 0.0

    @property
    def is_due(self) -> bool:
        """Whether no listing was completed since the start or `forget`, and none is under way."""
        return self._read_at is None and not self._lock.locked()

    def forget(self) -> None:
        """Make the next `read` list the bucket in any case, since it may hold an object that the index lacks."""
        self._read_at = None

    def read(self, *, anew: bool = False, wait: bool = True) -> Freed:
        """List the bucket and update the index, unless the last listing is up to date.

        Args:
            anew: List even if the last listing is up to date, and read the recorded uses too.
            wait: Whether to wait while another thread lists. If False, return at once, unless there was no listing yet.

        Returns:
            What was deleted.
        """
        if not self._lock.acquire(blocking=wait or self._read_at is None):
            return Freed()
        try:
            began = time.monotonic()
            valid_s = 0.0 if anew else self._fresh_s * max(1.0, 2 * self._took_s)
            if self._read_at is not None and began - self._read_at < valid_s:
                return Freed()
            useless = self._list_pages(uses=self._uses or anew)
            self._read_at = time.monotonic()
            self._took_s = self._read_at - began
            return self._delete_useless(useless)
        finally:
            self._lock.release()

    def _delete_useless(self, useless: Mapping[str, Object]) -> Freed:
        """Delete these objects. A refusal is only logged: the listing is complete without it."""
        try:
            self._bucket.delete(list(useless))
        except NO_ANSWER:
            raise
        except OSError as error:
            log.warning("Could not delete leftover objects in %s: %s", self._bucket.url, error)
            return Freed()
        return Freed(orphans=len(useless), nbytes=sum(each.nbytes for each in useless.values()))

    def _list_pages(self, *, uses: bool) -> dict[str, Object]:
        """Read all pages into the index (pins and uses first), and return the objects that can be deleted.

        These are temporary objects, and pins and uses without an entry, that were written more than an hour ago.
        """
        leftovers: dict[str, Object] = {}
        used: dict[ChunkKey, Object] = {}
        pins: dict[ChunkKey, tuple[str, Object]] = {}
        with self._index.watch() as changed:
            for page in self._bucket.listing(PINS_FOLDER):
                pins |= {key: (name, each) for name, each in page.items() if (key := pin_key(name))}
                leftovers |= {name: each for name, each in page.items() if is_temporary(name)}
            self._index.pin(pins.keys() - changed, True)
            for page in self._bucket.listing(USES_FOLDER) if uses else ():
                used |= {key: each for name, each in page.items() if (key := use_key(name))}
                leftovers |= {name: each for name, each in page.items() if is_temporary(name)}
            missing = self._index.keys()
            for page in self._bucket.listing(CHUNKS_FOLDER):
                found = {key: each for name, each in page.items() if (key := chunk_key(name))}
                self._index.merge(found, used, changed)
                missing -= found.keys()
                leftovers |= {name: each for name, each in page.items() if is_temporary(name)}
            self._index.settle(missing, pins.keys(), changed)
        notes = [*pins.items(), *((key, (use_name(key), each)) for key, each in used.items())]
        leftovers |= dict(note for key, note in notes if self._index.get(key) is None and not note[1].nbytes)
        return {name: each for name, each in leftovers.items() if is_abandoned(each, time.time())}
