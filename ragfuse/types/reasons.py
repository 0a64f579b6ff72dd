"""Reasons why KV was not reused, as plans and traces show them. `telemetry.counters` groups them."""

from __future__ import annotations

FULL_PREFILL_ASKED = "full prefill was asked for"
NOTHING_STORED = "none of this text is stored yet"
NEW_OR_DELETED = (
    "these documents are new, or their KV was deleted: they are encoded after the answer, for the next question"
)
KNOWN_ONLY = (
    "these documents are known, but their KV is not stored now, as it was evicted or not encoded yet: they are encoded "
    "after the answer, for the next question"
)
DOCUMENTS_ALTERED = "the documents retrieved for it were altered on their way into it, and none was recognised"
PROMPT_TOO_SHORT = "it is too short to hold a chunk"
NOT_EXACT = (
    "verify found that fusing is not exact with this model where it must be (a policy that is named is used "
    "all the same)"
)
NOT_SAFE = (
    "calibrate found no policy whose answers stay close to full prefill's with this model (one that is named is used "
    "all the same)"
)
ENCODING = "still being encoded, for the next question"
"""The reason for a miss of a chunk that a recent prompt held first."""
MISSING = "not in the store"
CODE = "source code, which is reused only behind an equal beginning"
"""The source of recurring text that is not blended, and the reason for it."""
UNREADABLE = "its entry could not be read"
