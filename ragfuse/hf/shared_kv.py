"""Shares identical KV between prompts that are answered at the same time, so that it is in memory
once.

It follows Prompt Cache, section 3.4 (batches that share modules). Attention also reads shared KV
only once for all prompts that are decoded in one batch (`fuse.attend.attend_ragged`).
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from weakref import WeakValueDictionary

from ragfuse.fuse.attend import KV
from ragfuse.hf.cache import FrozenRows, RowCache

MIN_SHARED_ROWS = 64
"""The least rows of a span that is shared: each shared span costs one more attention call per
layer.
"""


@dataclass(frozen=True)
class SharedSpan:
    """Rows lo:hi of a prompt whose KV is bit-identical in all prompts that have a span of the same
    `name`.
    """

    lo: int
    hi: int
    name: Hashable


class _Rows(dict[int, KV]):
    """The KV [1, H, n, D] of a span, by layer."""


class SharedKV:
    """The KV that prompts being answered have in common; freed with the last of them.
    Thread-safe.
    """

    def __init__(self) -> None:
        self._rows: WeakValueDictionary[Hashable, _Rows] = WeakValueDictionary()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Number of shared spans in memory."""
        return len(self._rows)

    def share(
        self, cache: RowCache, spans: Sequence[SharedSpan], windows: Sequence[int | None]
    ) -> None:
        """Replace spans of a prompt's cache by the KV that other prompts hold already; the first
        prompt's is copied.

        Args:
            cache: KV of the prompt.
            spans: Its spans, in order.
            windows: Sliding window of each layer; layers that have one are not shared.
        """
        # every prompt computes its last row, which is dropped before an answer begins
        last = cache.length - 1
        shared = [
            SharedSpan(each.lo, min(each.hi, last), (each.name, min(each.hi, last) - each.lo))
            for each in spans
        ]
        shared = [span for span in shared if span.hi - span.lo >= MIN_SHARED_ROWS]
        if not shared:
            return
        with self._lock:
            owners = [self._rows.setdefault(span.name, _Rows()) for span in shared]
            for layer, window in zip(cache.layers, windows, strict=True):
                if window is not None:
                    continue
                ranges = list[FrozenRows]()
                for span, rows in zip(shared, owners, strict=True):
                    if layer.layer not in rows:  # this prompt is the first that has it
                        keys, values = layer.rows(span.lo, span.hi)
                        rows[layer.layer] = keys.clone(), values.clone()
                    ranges.append(FrozenRows(span.lo, rows[layer.layer], rows))
                layer.share(ranges)
        give_back()


def give_back() -> None:
    """Return freed memory to the system: glibc keeps it per thread, and every answer runs in a
    thread of its own.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
