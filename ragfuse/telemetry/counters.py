"""Counters over all answers of an engine, with few fixed names: never a document, a question or a
key.

The figures of a single answer are in its trace (`engine/generate.py`) and its spans
(`otel.py`); `prometheus.py` exports these counters.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from ragfuse.types import plan
from ragfuse.types.answer import Answer, Trace

TTFT_S = (0.025, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0, 10.0, 20.0, 60.0)
"""Upper bounds, in seconds, of the histogram buckets of the time to first token; one more bucket
has longer times.
"""
TOKEN_FATES = ("reused", "recomputed", "fresh")
"""The kinds of a prompt's tokens: reused from the store, reused and recomputed, or computed fresh.
"""
_KIND_BY_REASON = MappingProxyType(
    {
        plan.FULL_PREFILL_ASKED: "asked",
        plan.NOTHING_STORED: "nothing_stored",
        plan.NOT_ENCODED: "nothing_stored",
        plan.ENCODING: "nothing_stored",
        plan.PROMPT_TOO_SHORT: "too_short",
        plan.DOCUMENTS_ALTERED: "altered",
        plan.NOT_EXACT: "inexact",
        plan.NOT_SAFE: "unsafe",
        "full prefill ": "faster",  # last, as FULL_PREFILL_ASKED begins with it too
    }
)
FALLBACK_KINDS = (*dict.fromkeys(_KIND_BY_REASON.values()), "model")
"""Why prompts were prefilled in full: it was asked for; nothing of the prompt was in the store; it
was too short; its retrieved documents were altered in it; full prefill was predicted to be faster;
`verify` or `calibrate` advises against fusing this model (inexact, unsafe); the model cannot be
fused.
"""


def fallback_kind(reason: str) -> str:
    """Return the name in `FALLBACK_KINDS` of a plan's reason for a full prefill; "" for a prompt
    that was fused.
    """
    return next(
        (kind for prefix, kind in _KIND_BY_REASON.items() if reason.startswith(prefix)),
        "model" if reason else "",
    )


@dataclass(frozen=True)
class CounterSnapshot:
    """The counts of an engine at one moment.

    Args:
        sums: Counts since the engine was made, by name.
        ttft: Number of answers in each bucket of `TTFT_S`, and of those above the last.
        ttft_s: Sum of all times to first token, in seconds.
    """

    sums: Counter[str]
    ttft: Sequence[int]
    ttft_s: float


class AnswerCounters:
    """The counters of one engine's answers. Thread-safe.

    Args:
        waiting: Returns the number of jobs that wait to be encoded in the background.
        catalog_failures: Returns how often the store's catalog could not be read or written.
    """

    def __init__(self, waiting: Callable[[], int], catalog_failures: Callable[[], int]) -> None:
        self.waiting, self._catalog_failures = waiting, catalog_failures
        self._at_close: list[Callable[[], object]] = []
        self._lock = threading.Lock()
        self._sums: Counter[str] = Counter()
        self._ttft, self._ttft_s = [0] * (len(TTFT_S) + 1), 0.0

    def add(self, answer: Answer) -> None:
        """Count an answer."""
        trace = answer.trace
        fallback = fallback_kind(trace.fallback_reason)
        sums = Counter(
            {f"full {fallback}" if fallback else "fused": 1, "written": len(answer.token_ids)}
        )
        sums.update({fate: getattr(trace, f"tokens_{fate}") for fate in TOKEN_FATES})
        sums.update(_lookups(trace, fallback))
        with self._lock:
            self._sums.update(sums)
            self._ttft[bisect_left(TTFT_S, trace.ttft_s)] += 1
            self._ttft_s += trace.ttft_s

    def fail(self) -> None:
        """Count a question that was not answered."""
        with self._lock:
            self._sums["failed"] += 1

    def now(self) -> CounterSnapshot:
        """Return a consistent snapshot of all counts."""
        with self._lock:
            sums = Counter(self._sums)
            sums["catalog_failures"] = self._catalog_failures()
            return CounterSnapshot(sums, tuple(self._ttft), self._ttft_s)

    def when_closed(self, function: Callable[[], object]) -> None:
        """Call `function` when the engine is closed."""
        self._at_close.append(function)

    def close(self) -> None:
        """Call the functions given to `when_closed`; the engine calls this when it is closed."""
        while self._at_close:
            self._at_close.pop()()


def _lookups(trace: Trace, fallback: str) -> Iterator[str]:
    """Yield "hit <tier>" or "missed" for each entry that was looked up."""
    if fallback in ("", "nothing_stored"):
        for segment in trace.segments:
            if segment.goes_on:
                continue
            if segment.hit:
                yield f"hit {segment.tier}"
            elif fallback or segment.why in (plan.MISSING, plan.UNREADABLE, plan.ENCODING):
                yield "missed"
