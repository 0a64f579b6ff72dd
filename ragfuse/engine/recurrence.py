"""Recurring passages: unmarked text that several prompts contain, and that is therefore worth keeping as a chunk.

No text is remembered: a passage is recognised by a digest of its token ids, for a limited time. A passage that a second
prompt contains is encoded from that prompt's ids, and is a known chunk from then on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator

from cachetools import TTLCache

from ragfuse.engine.model_profiles import calibrate_command
from ragfuse.hf.model import HFModel
from ragfuse.settings import Settings
from ragfuse.text.passages import BorderOf, last_paragraph, passages
from ragfuse.types.keys import token_digest
from ragfuse.types.prompt import Prompt

log = logging.getLogger("ragfuse")

MAX_FINGERPRINTS = 65_536
"""Most fingerprints that are remembered, about 20 MB; the one seen longest ago is dropped first."""
TTL_S = 24 * 3600.0
"""Seconds that a fingerprint is remembered."""


class RecurringPassages:
    """Finds passages that recur in one tenant's prompts. Thread-safe.

    Args:
        max_fingerprints: Most fingerprints that are remembered.
        ttl_s: Seconds that each is remembered.
        clock: Returns seconds.
    """

    def __init__(
        self,
        max_fingerprints: int = MAX_FINGERPRINTS,
        ttl_s: float = TTL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._lock = threading.Lock()
        # fingerprint -> the prompt that held it last
        self._met: TTLCache[str, str] = TTLCache(max_fingerprints, ttl_s, clock)

    def __len__(self) -> int:
        return len(self._met)

    def met_again(self, prompt: Prompt, border_of: BorderOf) -> list[tuple[int, ...]]:
        """Return the token ids of passages that an earlier, different prompt contained too; remember the others.

        Text found in the store, and the question itself, are not passages.
        """
        prompt_digest, found = token_digest(prompt.token_ids), list[tuple[int, ...]]()
        for run in _runs(prompt, border_of):
            fingerprint = token_digest(run)
            with self._lock:
                before = self._met.get(fingerprint)
                if before is None or before == prompt_digest:
                    self._met[fingerprint] = prompt_digest
                    continue
                del self._met[fingerprint]
            found.append(run)
        return found


class RecurrenceHint:
    """Logs once that long passages recur while nothing is reused, and what to do about it."""

    def __init__(self) -> None:
        self._lock, self._is_logged = threading.Lock(), False

    def log_once(self, n_passages: int, settings: Settings, model: HFModel, why: str) -> None:
        """Log the hint unless it was logged before.

        Args:
            n_passages: How many passages recurred.
            settings: The engine's settings.
            model: The engine's model.
            why: Why this model is not blended; "" where it may be.
        """
        with self._lock:
            if self._is_logged:
                return
            self._is_logged = True
        advice = f"set RAGFUSE_LEARN=text (now: {settings.learn}), or index them ahead with engine.ingest(texts)"
        if why:
            advice = f"run {calibrate_command(settings, model)} ({why})"
        log.warning(
            "Nothing was reused, although %d long passages of this prompt were in earlier prompts. To reuse them: %s.",
            n_passages,
            advice,
        )


def _runs(prompt: Prompt, border_of: BorderOf) -> Iterator[tuple[int, ...]]:
    """Yield the token ids of the passages in a prompt's fresh segments, without the question."""
    lo_question, hi_question = _question(prompt, border_of)
    for segment, (lo, _) in zip(prompt.segments, prompt.spans, strict=True):
        if segment.kind != "fresh":
            continue
        for first, stop in passages(segment.tokens, border_of):
            if lo + stop <= lo_question or lo + first >= hi_question:
                yield segment.tokens[first:stop]


def _question(prompt: Prompt, border_of: BorderOf) -> tuple[int, int]:
    """Return the rows lo, hi of the question: the last paragraph of the last message."""
    lo, hi = prompt.last_user_rows
    return lo + last_paragraph(prompt.token_ids[lo:hi], border_of), hi
