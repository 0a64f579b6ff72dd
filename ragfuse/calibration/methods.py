"""The methods that are compared, and the lab that runs them on one model through ragfuse's own engine.

A method is a policy, a ratio, and the context its chunks were encoded in (alone, or after filler text). Full prefill,
prefix caching and plain reuse are methods like the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, get_args

from ragfuse.calibration.case import Case
from ragfuse.calibration.prompts import PROMPT_TEXTS
from ragfuse.engine.ask import Ask
from ragfuse.engine.engine import Engine, PreparedPrompt
from ragfuse.engine.options import ends_of
from ragfuse.errors import InputError, ModelError, SettingsError
from ragfuse.fuse.fusor import CachedRun
from ragfuse.hf.handover import generate
from ragfuse.hf.model import HFModel, KVSource, Prefill
from ragfuse.plan.evict import lru
from ragfuse.settings import Settings
from ragfuse.store import KVStore, MemoryTier
from ragfuse.text.chat_messages import Piece
from ragfuse.types.policy_cost import AUTO
from ragfuse.types.prompt import Prompt
from ragfuse.types.selection import known_policy

Encoded = Literal["filler", "alone"]
RATIO_BY_NAME = MappingProxyType({"full": 1.0, "prefix": None, "none": 0.0})
"""Methods with a fixed ratio, or none."""
NO_STORE = ("full", "prefix")
"""Methods that read nothing from a store."""
STORE_NBYTES = 3 << 30
"""Capacity in bytes of the memory store of each engine."""


@dataclass(frozen=True)
class Method:
    """A way to answer a question that calibration compares with full prefill.

    Args:
        policy: A selection policy, or one of this module's names for methods without one, such as "none".
        ratio: The recompute ratio; None: the policy's default, or none.
        encoded: "alone" or "filler": whether chunks are encoded by themselves or after filler text.
    """

    policy: str
    ratio: float | None = None
    encoded: Encoded = "filler"

    @property
    def name(self) -> str:
        """The name in reports: `policy@encoded`, or only `policy` where `encoded` is its default."""
        is_default = self.policy in NO_STORE or self.encoded == _default_encoded(self.policy)
        return self.policy if is_default else f"{self.policy}@{self.encoded}"


def _default_encoded(policy: str) -> Encoded:
    return "alone" if policy == "none" else "filler"


def methods_of(names: Sequence[str], ratios: Sequence[float], model: HFModel) -> list[Method]:
    """Return the methods of all names at all ratios, without repetitions.

    Args:
        names: Names as in `Method.name`; "auto" is `default_method`.
        ratios: Ratios for the policies that have a choice.
        model: The model, for "auto".

    Raises:
        SettingsError: A name is unknown.
    """
    found: list[Method] = []
    for name in names:
        policy, _, given = name.strip().partition("@")
        encoded = _checked_encoded(name, given or _default_encoded(policy))
        if policy == AUTO:
            found.append(default_method(model))
        elif policy in RATIO_BY_NAME:
            found.append(Method(policy, RATIO_BY_NAME[policy], encoded))
        else:
            known_policy(policy)
            found += [Method(policy, ratio, encoded) for ratio in ratios]
    return list(dict.fromkeys(found))


def _checked_encoded(name: str, given: str) -> Encoded:
    for known in get_args(Encoded):
        if given == known:
            return known  # type: ignore[no-any-return]
    raise SettingsError(f"Method '{name}': after the @, wanted one of {', '.join(get_args(Encoded))}; found '{given}'.")


def default_method(model: HFModel) -> Method:
    """Return the method that an engine uses by default for this model when all chunks are in the store.

    Results of `ragfuse calibrate`, which are kept in a store, are not considered.
    """
    return Method(*model.profile.default_choice)


@dataclass
class Lab:
    """One model with two engines: one whose store has chunks encoded after filler text, and one with chunks alone."""

    model: HFModel
    settings: Settings = field(default_factory=Settings)

    def __post_init__(self) -> None:
        self.engines: dict[Encoded, Engine] = {}

    def engine(self, encoded: Encoded) -> Engine:
        """Return the engine whose chunks are encoded this way."""
        if encoded not in self.engines:
            changes = {"filler_tokens": 0} if encoded == "alone" else {}
            settings = self.settings.model_copy(update=changes)
            self.engines[encoded] = Engine(settings, self.model, KVStore([MemoryTier(STORE_NBYTES, lru)]))
        return self.engines[encoded]

    def close(self) -> None:
        """Close all engines and their stores."""
        for engine in self.engines.values():
            engine.close(0.0)

    def prompt(self, case: Case, encoded: Encoded = "filler") -> Prompt:
        """Return the case's prompt, as a chat's first message or, for a base model without chat template, as one text.

        Its token ids do not depend on how chunks are encoded.
        """
        before, after = PROMPT_TEXTS[case.task]
        question = f"{case.question}\n\n" if case.task == "summary" and case.question else case.question
        chunks = [part for chunk in case.chunks for part in (Piece("\n\n"), Piece(chunk, "chunk"))]
        pieces = [Piece(before), *chunks[1:], Piece(after.replace("{question}", question))]
        engine = self.engine(encoded)
        if getattr(self.model.tokenizer, "chat_template", None):
            return engine.prompt([("user", pieces)])
        documents = [(each.text, each.source) for each in pieces if each.kind == "chunk"]
        return engine.prompt("".join(each.text for each in pieces), ask=Ask(documents=documents))

    def hold(self, case: Case, methods: Sequence[Method]) -> None:
        """Ingest the case's chunks into the stores, encoded as the methods need them."""
        for encoded in dict.fromkeys(method.encoded for method in methods if method.policy not in NO_STORE):
            engine, prompt = self.engine(encoded), self.prompt(case, encoded)
            first = prompt.segments[0]
            prefix = first.tokens if first.kind == "prefix" else ()
            if sum(tier.nbytes for tier in engine.store.tiers) > STORE_NBYTES // 2:
                engine.store.clear()
            engine.ingest([], prefix)
            engine.ingest([(chunk, case.dataset) for chunk in case.chunks])

    def prefill(self, method: Method, prompt: Prompt) -> Prefill:
        """Prefill the prompt with a method; call `hold` and `before` first."""
        if method.policy == "full":
            return self.model.full_prefill(prompt.token_ids)
        if method.policy == "prefix":
            return self._prefix(prompt)
        engine = self.engine(method.encoded)
        return self._require_hits(engine.prepare(prompt, Ask(policy=method.policy, ratio=method.ratio)))

    def _require_hits(self, prepared: PreparedPrompt) -> Prefill:
        """Return the prefill, after checking that every chunk was a hit: a miss would make the method look better."""
        if prepared.plan.fallback_reason:
            reason = prepared.plan.fallback_reason
            raise ModelError(f"{self.model.name} cannot reuse the KV of these chunks: {reason}. Measure another model.")
        if prepared.plan.misses:
            raise InputError(
                f"{len(prepared.plan.misses)} chunks of a prompt could not be stored: they do not fit in "
                f"{STORE_NBYTES >> 30} GB of memory, or have under "
                f"{self.settings.min_chunk_tokens} tokens. Use fewer or longer chunks."
            )
        return prepared.prefill

    def before(self, method: Method, prompt: Prompt) -> None:
        """Compute a method's knowledge from before the question, so that its time does not count.

        For "prefix" this is the KV of the prompt up to the end of its first chunk.
        """
        if method.policy == "prefix":
            self._prefix_kv = self.model.encode(prompt.token_ids[: self._n_prefix(prompt)])

    def _prefix(self, prompt: Prompt) -> Prefill:
        runs = [CachedRun(0, 0, self._n_prefix(prompt), 0, blend=False)]
        return self.model.fuse(prompt.token_ids, prompt.positions, runs, KVSource([self._prefix_kv]), "none", 0.0)

    @staticmethod
    def _n_prefix(prompt: Prompt) -> int:
        chunks = [i for i, segment in enumerate(prompt.segments) if segment.kind == "chunk"]
        if not chunks:
            raise InputError(
                "Every chunk of the prompt has fewer tokens than the setting min_chunk_tokens, so that none is stored. "
                "Use longer chunks, or lower the setting."
            )
        return prompt.spans[chunks[0]][1]

    def write(self, prefill: Prefill, max_tokens: int) -> list[int]:
        """Return the ids of the greedy answer without end tokens, at most `max_tokens`. The prefill is used up."""
        ids = generate(self.model, prefill, {"max_new_tokens": max_tokens, "do_sample": False})
        return [token for token in ids if token not in ends_of(self.model)]
