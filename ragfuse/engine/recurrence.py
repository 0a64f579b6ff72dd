"""Recurring passages: unmarked text that several prompts contain, and that is therefore worth
keeping as a chunk.

No text is remembered: a line is recognised by a digest of its token ids, for a limited time. A
passage of lines that a second prompt contains is encoded from that prompt's ids, and is a known
chunk from then on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial

from cachetools import TTLCache

from ragfuse.text.passages import BorderOf, last_paragraph, passages
from ragfuse.types.keys import token_digest
from ragfuse.types.plan import LoadPlan

MAX_FINGERPRINTS = 65_536
"""Most fingerprints that are remembered, about 20 MB; the one seen longest ago is dropped first."""
TTL_S = 24 * 3600.0
"""Seconds that a fingerprint is remembered."""


class RecurringPassages:
    """Finds passages that recur in one tenant's prompts. Thread-safe.

    Args:
        ttl_s: Seconds that each is remembered.
        clock: Returns seconds.
    """

    def __init__(
        self,
        ttl_s: float = TTL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._lock = threading.Lock()
        # fingerprint of a line -> the prompt that held it first
        self._met: TTLCache[str, str] = TTLCache(MAX_FINGERPRINTS, ttl_s, clock)

    def met_again(self, plan: LoadPlan, border_of: BorderOf) -> list[tuple[int, ...]]:
        """Return the token ids of passages whose lines an earlier, different prompt had, too. Lines
        seen for the first time are remembered.

        Text found in the store, and the question itself, are not learnt.
        """
        prompt, read = plan.prompt, {fetch.segment for fetch in (*plan.fetches, *plan.unread)}
        prompt_digest, ids = token_digest(prompt.token_ids), prompt.token_ids
        lo_question, hi_question = prompt.last_user_rows
        lo_question += last_paragraph(ids[lo_question:hi_question], border_of)

        def recurs(begin: int, rows: tuple[int, int]) -> bool:
            lo, hi = rows[0] + begin, rows[1] + begin
            if lo < hi_question and lo_question < hi:
                return False
            with self._lock:
                return (
                    self._met.setdefault(token_digest(ids[lo:hi]), prompt_digest) != prompt_digest
                )

        found = list[tuple[int, ...]]()
        for index, (segment, (begin, _)) in enumerate(
            zip(prompt.segments, prompt.spans, strict=True)
        ):
            if segment.kind in ("fresh", "prefix") and index not in read:
                found += [
                    segment.tokens[lo:hi]
                    for lo, hi in passages(segment.tokens, border_of, partial(recurs, begin))
                ]
        return found
