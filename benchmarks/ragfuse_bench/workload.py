"""A prompt of random chunks and a question, for benchmarks of speed: its tokens, its KV, where the
KV is put.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from rich.console import Console

from ragfuse.engine.engine import Engine
from ragfuse.errors import SettingsError
from ragfuse.hf.model import HFModel
from ragfuse.telemetry.progress import progress
from ragfuse.types.kv import ChunkKV
from ragfuse.types.prompt import Prompt, Segment


class Workload:
    """`chunks` runs of `chunk_tokens` random tokens and a question of `question_tokens`: always the
    same ones.
    """

    def __init__(
        self, model: HFModel, chunks: int, chunk_tokens: int, question_tokens: int
    ) -> None:
        drawn = torch.Generator().manual_seed(0)
        vocabulary = model.model.config.get_text_config().vocab_size
        self.size = chunk_tokens
        rows = torch.randint(vocabulary, (chunks, chunk_tokens), generator=drawn).tolist()
        self.chunks = [tuple(row) for row in rows]
        self.question = tuple(
            torch.randint(vocabulary, (question_tokens,), generator=drawn).tolist()
        )

    def encode(self, engines: Sequence[Engine], console: Console) -> ChunkKV:
        """Put every chunk's KV, encoded alone, into the store of each engine; gives the first
        one's.
        """
        first = None
        with progress(console) as bar:
            for tokens in bar.track(self.chunks, description="encoding chunks"):
                kv = engines[0].model.encode(tokens)
                for engine in engines:
                    engine.store.put(engine.runtime.encoder.key(tokens), kv, wait=True)
                first = first or kv
        if first is None:
            raise SettingsError("There is no chunk to measure with.")
        return first

    def prompt(self, engine: Engine, count: int | None = None) -> Prompt:
        """The first `count` chunks (all unless given), then the question."""
        taken = self.chunks[:count]
        segments = [
            Segment(tokens, self.size * index, "chunk", (engine.runtime.encoder.key(tokens),))
            for index, tokens in enumerate(taken)
        ]
        return Prompt((*segments, Segment(self.question, self.size * len(taken))))
