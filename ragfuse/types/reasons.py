"""Reasons why KV was not reused, as plans and traces show them. `telemetry.counters` groups
them.
"""

from __future__ import annotations

FULL_PREFILL_ASKED = "full prefill was asked for"
NOTHING_STORED = "none of this text is stored yet"
NOT_ENCODED = "no KV of these passages yet: encoded after the answer"
DOCUMENTS_ALTERED = (
    "the documents retrieved for it were altered on their way into it, and none was recognised"
)
PROMPT_TOO_SHORT = "it is too short to hold a chunk"
NOT_EXACT = "verify found this model inexact; a policy that is named is used nevertheless"
NOT_SAFE = (
    "calibrate found no safe policy for this model; a policy that is named is used nevertheless"
)
ENCODING = "still being encoded, for the next question"
"""The reason for a miss of a chunk that a recent prompt held first."""
MISSING = "not in the store"
CODE = "source code, which is reused only after an equal beginning"
"""The source of recurring text that is not blended, and the reason for it."""
UNREADABLE = "its entry could not be read"
