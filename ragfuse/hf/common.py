"""KV that several prompts hold alike stands in memory once, for as long as one of them is there.

Prompt Cache, section 3.4 (batches that share modules). It is read once for all of them too, where their newest rows
are computed together (`fuse.attend.attend_ragged`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from weakref import WeakValueDictionary

from ragfuse.fuse.attend import KV
from ragfuse.hf.cache import FrozenRows, RowCache, RowLayer
from ragfuse.process.fork import ForkLock

MIN_SHARED_ROWS = 64
"""Rows of a stretch that is worth standing apart: a layer attends over each for itself."""


@dataclass(frozen=True)
class SharedSpan:
    """Rows lo:hi of a prompt; prompts with the same `name` hold the same KV there, bit by bit."""

    lo: int
    hi: int
    name: Hashable


class _Rows:
    """The KV [1, H, n, D] of a span, by layer."""

    def __init__(self) -> None:
        self.layers: dict[int, KV] = {}


class SharedKV:
    """What prompts that are being answered hold alike. Thread-safe."""

    def __init__(self) -> None:
        self._rows: WeakValueDictionary[Hashable, _Rows] = WeakValueDictionary()
        self._lock = ForkLock()

    def __len__(self) -> int:
        """Stretches that are there now."""
        return len(self._rows)

    def share(self, cache: RowCache, spans: Sequence[SharedSpan], windows: Sequence[int | None]) -> None:
        """Let a prompt's cache hold these spans, which rise, as others do; the first one's rows are taken for all.

        windows: by layer; where one sees only the latest rows, they stay together.
        """
        last = cache.length - 1  # it is computed anew in every prompt, and taken back before an answer begins
        meant = [SharedSpan(each.lo, min(each.hi, last), (each.name, min(each.hi, last) - each.lo)) for each in spans]
        meant = [span for span in meant if span.hi - span.lo >= MIN_SHARED_ROWS]
        if not meant:
            return
        with self._lock:
            owners = [self._rows.setdefault(span.name, _Rows()) for span in meant]
            for layer, window in zip(cache.layers, windows, strict=True):
                if window is None:
                    layer.share([_stretch(layer, span, rows) for span, rows in zip(meant, owners, strict=True)])
        give_back()


def _stretch(layer: RowLayer, span: SharedSpan, rows: _Rows) -> FrozenRows:
    """A span of a layer as it stands outside: copied, where this is the first prompt that has it."""
    found = rows.layers.get(layer.layer)
    if found is None:
        keys, values = (states[:, :, span.lo : span.hi].clone() for states in (layer.keys, layer.values))
        found = rows.layers[layer.layer] = keys, values
    return FrozenRows(span.lo, found, rows)


def give_back() -> None:
    """Let the system have what was freed: glibc keeps it for the thread that did, and each answer is one's own."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
