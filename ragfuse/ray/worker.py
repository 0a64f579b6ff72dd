"""One worker of a bulk encode: an engine in an actor of Ray Data. Only counts go back, never KV."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ragfuse.engine.engine import Engine
from ragfuse.errors import RefusedError
from ragfuse.settings import Settings


class EncodeWorker:
    """Encodes batches of chunks into the shared store. What is stored already is not encoded again.

    Args:
        settings: The settings, with only those tiers that all workers share.

    Raises:
        RefusedError: KV of this model cannot be reused.
    """

    def __init__(self, settings: Settings) -> None:
        self._engine = Engine(settings)
        if refusal := self._engine.model.profile.refusal:
            raise RefusedError(f"No KV is stored for this model: {refusal}")

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, list[Any]]:
        """Encode the chunks in the columns `text` and, if there is one, `source`; return one row of
        counts.
        """
        texts = [str(text) for text in batch["text"]]
        sources = [str(source) for source in batch.get("source", [""] * len(texts))]
        began = time.perf_counter()
        done = self._engine.ingest(zip(texts, sources, strict=True))
        row = {
            "pid": os.getpid(),
            "chunks": done.chunks,
            "encoded": done.encoded,
            "tokens": done.tokens,
            "nbytes": done.nbytes,
            "work_s": time.perf_counter() - began,
            "unsaved": max(0, _n_unsaved(self._engine, texts) - len(done.left_out)),
            "short": done.short,
        }
        return {name: [value] for name, value in row.items()}


def _n_unsaved(engine: Engine, texts: Sequence[str]) -> int:
    """Count the chunks that no shared tier holds, of those that are long enough to be stored."""
    encoder = engine.runtime.encoder
    runs = [
        ids
        for text in texts
        if len(ids := engine.tokens(text.strip())) >= engine.settings.min_chunk_tokens
    ]
    keys = {encoder.key(ids, encoder.context) for ids in runs}
    held = {key for tier in engine.store.tiers if tier.slow for key in tier.stat(keys)}
    return len(keys - held)
