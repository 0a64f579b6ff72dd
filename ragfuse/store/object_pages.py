"""What an object tier learns by listing its folder, page by page, and what is left lying about there.

One thread reads a listing at a time, and no lock that look-ups and reads need is held meanwhile.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

from ragfuse.process.fork import ForkLock
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
    """Tells a catalogue what is in a bucket. What nobody needs there is deleted when it is seen.

    A listing stays good for `fresh_s`, or twice that for every second that it takes where that is longer. Without
    `uses`, those that others have noted are of no interest.
    """

    def __init__(self, bucket: Bucket, catalogue: ObjectIndex, fresh_s: float, *, uses: bool = False) -> None:
        self._bucket, self._catalogue, self._fresh_s, self._uses = bucket, catalogue, fresh_s, uses
        self._turn = ForkLock()
        self._read_at: float | None = None
        self._took_s = 0.0

    @property
    def is_due(self) -> bool:
        """Whether none was ever read to its end, and nobody is about to."""
        return self._read_at is None and not self._turn.locked()

    def forget(self) -> None:
        """The next one is read whoever asks: something may be there that nobody knows of."""
        self._read_at = None

    def read(self, *, anew: bool = False, wait: bool = True) -> Freed:
        """Read it, unless the last one is still good and `anew` is not asked for; what was deleted.

        Without `wait`, one that another thread is reading is as good as the last one, if there was any.
        """
        if not self._turn.acquire(blocking=wait or self._read_at is None):
            return Freed()
        try:
            began = time.monotonic()
            good_s = 0.0 if anew else self._fresh_s * max(1.0, 2 * self._took_s)
            if self._read_at is not None and began - self._read_at < good_s:
                return Freed()
            useless = self._learned(uses=self._uses or anew)
            self._read_at = time.monotonic()
            self._took_s = self._read_at - began
            return self._freed(useless)
        finally:
            self._turn.release()

    def _freed(self, useless: Mapping[str, Object]) -> Freed:
        """Delete these. A listing is no worse where that is not allowed."""
        try:
            self._bucket.delete(list(useless))
        except NO_ANSWER:
            raise
        except OSError as error:
            log.warning("Could not delete what is left in %s: %s", self._bucket.url, error)
            return Freed()
        return Freed(orphans=len(useless), nbytes=sum(each.nbytes for each in useless.values()))

    def _learned(self, *, uses: bool) -> dict[str, Object]:
        """Learn of all objects, pins and uses first; what nobody needs."""
        left: dict[str, Object] = {}
        used: dict[ChunkKey, Object] = {}
        pins: dict[ChunkKey, tuple[str, Object]] = {}
        with self._catalogue.watch() as changed:
            for page in self._bucket.listing(PINS_FOLDER):
                pins |= {key: (name, each) for name, each in page.items() if (key := pin_key(name))}
                left |= {name: each for name, each in page.items() if is_temporary(name)}
            self._catalogue.pin(pins.keys() - changed, True)
            for page in self._bucket.listing(USES_FOLDER) if uses else ():
                used |= {key: each for name, each in page.items() if (key := use_key(name))}
                left |= {name: each for name, each in page.items() if is_temporary(name)}
            missing = self._catalogue.keys()
            for page in self._bucket.listing(CHUNKS_FOLDER):
                found = {key: each for name, each in page.items() if (key := chunk_key(name))}
                self._catalogue.merge(found, used, changed)
                missing -= found.keys()
                left |= {name: each for name, each in page.items() if is_temporary(name)}
            self._catalogue.settle(missing, pins.keys(), changed)
        notes = [*pins.items(), *((key, (use_name(key), each)) for key, each in used.items())]
        left |= dict(note for key, note in notes if self._catalogue.get(key) is None and not note[1].nbytes)
        return {name: each for name, each in left.items() if is_abandoned(each, time.time())}
