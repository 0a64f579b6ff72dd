"""One worker of a bulk encode: an engine in an actor of Ray Data. Only counts go back, never KV."""

from __future__ import annotations

from collections.abc import Mapping
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
        before = self._n_refused()
        done = self._engine.ingest(zip(texts, sources, strict=True))
        names = ("chunks", "encoded", "tokens", "nbytes", "short")
        row = {name: getattr(done, name) for name in names}
        row["unsaved"] = self._n_refused() - before
        return {name: [value] for name, value in row.items()}

    def _n_refused(self) -> int:
        """Return the number of writes to shared tiers that were refused or failed so far."""
        slow = [tier.counts for tier in self._engine.store.tiers if tier.slow]
        return sum(counts["refused"] + counts["failed"] for counts in slow)
