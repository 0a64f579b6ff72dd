"""What `ragfuse bench codec` measures: a model, contexts with their KV, and what of the paper's is not at hand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ragfuse_bench.codec.contexts import Context, absent, read_contexts
from ragfuse_bench.codec.kv import Bank
from ragfuse_bench.options import CONTEXT_TOKENS
from ragfuse_bench.presets import bench_model
from rich.console import Console

from ragfuse.errors import ModelError
from ragfuse.hf.model import HFModel
from ragfuse.settings import Settings
from ragfuse.telemetry.progress import progress
from ragfuse.types.kv import ChunkKV

PIECE_TOKENS = 1500
"""Tokens of a piece of a stream."""


@dataclass(frozen=True)
class Wanted:
    """Contexts of each set in a folder (None: of the sets that come along), their tokens, and where their KV is kept.

    quick: each codec is timed once.
    """

    settings: Settings
    console: Console
    folder: Path | None
    contexts: int
    context_tokens: int = CONTEXT_TOKENS
    kept: Path | None = None
    quick: bool = False

    def model(self) -> HFModel:
        """Load the model; ModelError for one that reads no text, or whose KV cannot be reused."""
        settings = self.settings
        model = bench_model(settings.model, settings.dtype, settings.device, settings.home)
        if model.profile.refusal or not model.has_tokenizer:
            why = model.profile.refusal or "it has no tokenizer, so it reads no text."
            raise ModelError(f"The KV of {settings.model} cannot be coded: {why} Measure another model.")
        return model

    def with_kv(self, model: HFModel) -> Iterator[tuple[Context, ChunkKV]]:
        """Yield each context with its raw KV, computed once; a bar says how far it is."""
        bank = Bank(model, self.kept)
        contexts = read_contexts(model, self.folder, self.contexts or 10**9, self.context_tokens)
        with progress(self.console) as bar:
            for context in bar.track(contexts, description="levels"):
                yield context, bank.kv(context.token_ids)

    def piece(self, model: HFModel) -> Sequence[int]:
        """Return the ids of a piece of real text, as long as those of a stream."""
        tokens = min(PIECE_TOKENS, self.context_tokens)
        return read_contexts(model, self.folder, 1, tokens)[0].token_ids

    def words(self) -> str:
        """Say what is measured."""
        most = f"at most {self.contexts} contexts" if self.contexts else "all contexts"
        return f"{most} a set of {self.context_tokens:,} tokens"

    def not_at_hand(self) -> list[str]:
        """Say which of the paper's models and data sets are not here."""
        sets = ["TriviaQA", "NarrativeQA", "WikiText", *absent(self.folder)]
        return [f"Not at hand: Mistral-7B, Llama-34B, Llama-70B and Llama-7B/13B; {', '.join(sets)}."]
