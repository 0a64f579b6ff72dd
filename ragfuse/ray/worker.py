"""One worker of a bulk encode: an engine in an actor of Ray Data. Only keys' counts go back, never KV."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ragfuse.engine.engine import Engine
from ragfuse.errors import RagFuseError, RefusedError, StoreError
from ragfuse.settings import Settings

ATTEMPTS = 3
"""Times that a batch is tried until all its chunks are in a shared tier."""
PAUSE_S = 1.0
"""Seconds before the second attempt, doubled for each further one."""


class EncodeWorker:
    """Encodes batches of chunks into the shared store. What is stored already is not encoded again.

    Errors of ragfuse go back in a row: Ray would tell their text alone, and start a worker again that cannot begin.

    Args:
        settings: The settings, with only those tiers that all workers share.
    """

    def __init__(self, settings: Settings) -> None:
        began = time.perf_counter()
        self._engine: Engine | None = None
        self._failure: RagFuseError | None = None
        try:
            self._engine = Engine(settings)
            if refusal := self._engine.model.profile.refusal:
                raise RefusedError(f"No KV is stored for this model: {refusal}")
        except RagFuseError as error:
            self._failure = error
        self._load_s = time.perf_counter() - began

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, list[Any]]:
        """Encode the chunks in the columns `text` and, if there is one, `source`.

        Returns:
            One row: of counts, or of an error's class, text and attributes.
        """
        try:
            if self._failure is not None or self._engine is None:
                raise self._failure or RefusedError("The worker has no engine.")
            row = self._encode(self._engine, batch)
        except RagFuseError as error:
            row = {
                "error": type(error).__name__,
                "message": str(error),
                "attributes": json.dumps(vars(error), default=str),
            }
        return {name: [value] for name, value in row.items()}

    def _encode(self, engine: Engine, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Encode a batch and return its counts."""
        import ray

        texts = [str(text) for text in batch["text"]]
        sources = [str(source) for source in batch.get("source", [""] * len(texts))]
        began, done = time.perf_counter(), None
        for attempt in range(ATTEMPTS):
            if attempt:
                time.sleep(PAUSE_S * 2 ** (attempt - 1))
            try:
                now = engine.ingest(zip(texts, sources, strict=True))
            except StoreError:
                if attempt + 1 == ATTEMPTS:
                    raise
                continue
            done = now if done is None else done
            unsaved = max(0, _n_unsaved(engine, texts) - len(now.left_out))
            if not unsaved:
                break
        assert done is not None
        context = ray.get_runtime_context()
        return {
            "worker": context.get_actor_id() or context.get_worker_id(),
            "node": context.get_node_id(),
            "pid": os.getpid(),
            "chunks": done.chunks,
            "encoded": done.encoded,
            "tokens": done.tokens,
            "nbytes": done.nbytes,
            "seconds": time.perf_counter() - began,
            "load_s": self._load_s,
            "unsaved": unsaved,
            "short": done.short,
        }


def _n_unsaved(engine: Engine, texts: Sequence[str]) -> int:
    """Count the chunks that no shared tier holds, of those that are long enough to be stored."""
    encoder = engine.runtime.encoder
    runs = [ids for text in texts if len(ids := engine.tokens(text.strip())) >= engine.settings.min_chunk_tokens]
    keys = {encoder.key(ids, encoder.context) for ids in runs}
    held = {key for tier in engine.store.tiers if tier.slow for key in tier.stat(keys)}
    return len(keys - held)
