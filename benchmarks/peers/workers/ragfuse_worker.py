"""`MODEL DTYPE MEMORY [FOLDER]`: ragfuse's own engine with its default policy, chunks in memory or
in a folder.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

from benchmarks.peers.workers.wire import private_stdout, serve


class RagFuse:
    """An engine as a user makes it, but for where its KV is kept.

    Args:
        model: An embedded name, a folder or a GGUF file.
        dtype: Of weights and KV.
        memory_bytes: Of KV kept in memory.
        folder: Where chunks are kept on disk, and nowhere else; "": in memory alone.
    """

    def __init__(self, model: str, dtype: str, memory_bytes: int, folder: str) -> None:
        from ragfuse_bench.presets import bench_model

        from ragfuse.calibration.runner import versions
        from ragfuse.engine.engine import Engine
        from ragfuse.plan.evict import lru
        from ragfuse.settings import Settings
        from ragfuse.store import KVStore, MemoryTier

        settings = Settings(model=model, dtype=dtype, device="cpu", memory_bytes=memory_bytes)
        if folder:
            settings = settings.model_copy(update={"store": Path(folder), "memory_bytes": 0})
        self.version = f"ragfuse {versions()['ragfuse']}"
        self.folder = Path(folder) if folder else None
        store = None if folder else KVStore([MemoryTier(memory_bytes, lru)])
        self.engine = Engine(settings, bench_model(model, dtype, "cpu", settings.home), store)

    def hold(self, chunks: Sequence[str]) -> dict[str, Any]:
        """Encode chunks; in how many seconds, how many bytes, and how many of them lie on disk."""
        found = self.engine.ingest([(chunk, "benchmark") for chunk in chunks])
        self.engine.flush()
        return {"encode_s": found.seconds, "kv_bytes": found.nbytes, **self.rest()}

    def answer(self, ids: Sequence[int], max_tokens: int) -> Iterator[int]:
        """Yield the tokens that the engine's answer chooses."""
        told: SimpleQueue[int | BaseException | None] = SimpleQueue()
        thread = Thread(target=self._answer, args=(ids, max_tokens, told), daemon=True)
        thread.start()
        while (token := told.get()) is not None:
            if isinstance(token, BaseException):
                raise token
            yield token
        thread.join()

    def rest(self) -> dict[str, Any]:
        """Wait for what is encoded and written after an answer."""
        self.engine.flush()
        if self.folder is None:
            return {"disk_bytes": 0}
        return {
            "disk_bytes": sum(
                path.stat().st_size for path in self.folder.rglob("*") if path.is_file()
            )
        }

    def _answer(
        self, ids: Sequence[int], max_tokens: int, told: SimpleQueue[int | BaseException | None]
    ) -> None:
        from ragfuse.engine.ask import Ask

        def tell(before: Any, scores: Any) -> Any:
            told.put(int(scores[0].argmax()))
            return scores

        try:
            self.engine.answer(
                [*ids], Ask(max_tokens=max_tokens, options={"logits_processor": [tell]})
            )
        except BaseException as error:
            told.put(error)
        told.put(None)


if __name__ == "__main__":
    out = private_stdout()
    model, dtype, memory, *folder = sys.argv[1:]
    serve(RagFuse(model, dtype, int(memory), "".join(folder)), out)
