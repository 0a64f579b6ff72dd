"""The compared methods (policy, ratio, encoding of chunks), and the engines that run them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from ragfuse.calibration.case import PROMPT_TEXTS, Case
from ragfuse.engine.ask import Ask
from ragfuse.engine.engine import Engine
from ragfuse.engine.request import ends_of
from ragfuse.errors import InputError, ModelError
from ragfuse.hf.handover import generate
from ragfuse.hf.model import HFModel, Prefill
from ragfuse.plan.evict import lru
from ragfuse.settings import Settings
from ragfuse.store import KVStore, MemoryTier
from ragfuse.text.chat_messages import Piece
from ragfuse.types.prompt import Prompt

Encoded = Literal["filler", "alone"]
STORE_NBYTES = 3 << 30
"""Bytes of memory for each engine's store."""


@dataclass(frozen=True)
class Method:
    """A way to answer a question. Calibration compares each way with full prefill.

    Args:
        policy: A selection policy; "full" is full prefill, "none" is plain reuse.
        ratio: The recompute ratio. None means the policy's default.
        encoded: "filler": chunks are encoded after filler text. "alone": without filler text.
    """

    policy: str
    ratio: float | None = None
    encoded: Encoded = "filler"

    @property
    def name(self) -> str:
        """The name in reports: `policy@encoded`, or `policy` if `encoded` is the default."""
        is_default = self.encoded == default_encoded(self.policy)
        return self.policy if is_default else f"{self.policy}@{self.encoded}"


def default_encoded(policy: str) -> Encoded:
    """Return the default of `Method.encoded`: "alone" for plain reuse, "filler" for any other."""
    return "alone" if policy == "none" else "filler"


@dataclass
class Lab:
    """Two engines over one model, one for each way of encoding chunks (`Method.encoded`)."""

    model: HFModel
    settings: Settings = field(default_factory=Settings)

    def __post_init__(self) -> None:
        self.engines: dict[Encoded, Engine] = {}

    def engine(self, encoded: Encoded) -> Engine:
        """Return the engine for `encoded`. The engine is created on first use."""
        if encoded not in self.engines:
            changes = {"filler_tokens": 0} if encoded == "alone" else {}
            settings = self.settings.model_copy(update=changes)
            self.engines[encoded] = Engine(
                settings, self.model, KVStore([MemoryTier(STORE_NBYTES, lru)])
            )
        return self.engines[encoded]

    def close(self) -> None:
        """Close all engines and their stores."""
        for engine in self.engines.values():
            engine.close(0.0)

    def prompt(self, case: Case, encoded: Encoded = "filler") -> Prompt:
        """Return a case's prompt: a user message, or a text if the model has no chat template."""
        before, after = PROMPT_TEXTS[case.task]
        question = (
            f"{case.question}\n\n" if case.task == "summary" and case.question else case.question
        )
        chunks = [part for chunk in case.chunks for part in (Piece("\n\n"), Piece(chunk, "chunk"))]
        pieces = [Piece(before), *chunks[1:], Piece(after.replace("{question}", question))]
        engine = self.engine(encoded)
        if getattr(self.model.tokenizer, "chat_template", None):
            return engine.prompt([("user", pieces)])
        documents = [(each.text, each.source) for each in pieces if each.kind == "chunk"]
        return engine.prompt("".join(each.text for each in pieces), ask=Ask(documents=documents))

    def hold(self, case: Case, methods: Sequence[Method]) -> None:
        """Store the case's chunks for the methods, once per encoding (`Method.encoded`)."""
        for encoded in dict.fromkeys(
            method.encoded for method in methods if method.policy != "full"
        ):
            engine, prompt = self.engine(encoded), self.prompt(case, encoded)
            first = prompt.segments[0]
            prefix = first.tokens if first.kind == "prefix" else ()
            if sum(tier.nbytes for tier in engine.store.tiers) > STORE_NBYTES // 2:
                engine.store.clear()
            engine.ingest([], prefix)
            engine.ingest([(chunk, case.dataset) for chunk in case.chunks])

    def prefill(self, method: Method, prompt: Prompt) -> Prefill:
        """Prefill the prompt with a method. Call `hold` first, to store the chunks."""
        if method.policy == "full":
            return self.model.full_prefill(prompt.token_ids)
        prepared = self.engine(method.encoded).prepare(
            prompt, Ask(policy=method.policy, ratio=method.ratio)
        )
        if prepared.plan.fallback_reason:
            reason = prepared.plan.fallback_reason
            raise ModelError(
                f"{self.model.name} cannot reuse this KV: {reason.rstrip('.')}. Use another model."
            )
        if prepared.plan.misses:  # missing chunks are computed, which would flatter the method
            raise InputError(
                f"{len(prepared.plan.misses)} chunks of a prompt could not be stored. If the"
                f" chunks exceed {STORE_NBYTES >> 30} GB of memory, use fewer chunks; if chunks"
                f" have under {self.settings.min_chunk_tokens} tokens, use longer chunks."
            )
        return prepared.prefill

    def write(self, prefill: Prefill, max_tokens: int) -> list[int]:
        """Extend `prefill` by a greedy answer; return the answer's token ids without end tokens."""
        ids = generate(self.model, prefill, {"max_new_tokens": max_tokens, "do_sample": False})
        return [token for token in ids if token not in ends_of(self.model)]
