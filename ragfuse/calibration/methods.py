"""The methods that are compared, and the lab that runs them on one model through ragfuse's own engine.

A method is a policy, a ratio, and the context its chunks were encoded in (alone, or after filler text). Full prefill,
prefix caching and plain reuse are methods like the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, get_args

import torch
from torch import Tensor

from ragfuse.calibration.case import Case
from ragfuse.calibration.deviation import attention_of, kv_deviation
from ragfuse.calibration.prompts import ASKED
from ragfuse.engine.engine import Engine, PreparedPrompt
from ragfuse.engine.options import Ask, ends_of, known_policy
from ragfuse.errors import InputError, ModelError, SettingsError
from ragfuse.fuse.attend import RowMask
from ragfuse.fuse.fusor import CachedRun, Fusion, candidate_rows
from ragfuse.hf.handover import generate
from ragfuse.hf.model import HFModel, KVSource, Prefill
from ragfuse.plan.controller import AUTO, settle
from ragfuse.plan.evict import lru
from ragfuse.settings import Settings
from ragfuse.store import KVStore, MemoryTier
from ragfuse.text.chunks import Piece
from ragfuse.types.prompt import Prompt

Encoded = Literal["filler", "alone"]
WRONG_MASK = "wrongmask"
"""`hkvd` over chunks encoded alone, under the mask of the code that was released with CacheBlend."""
ORACLE = "oracle"
"""Selects rows by values that only a full prefill knows: a bound to compare policies with, not a way to answer."""
CHAINS = ("mapreduce", "maprerank")
"""Methods that ask with several prompts, by LangChain's chains."""
RATIO_BY_NAME = MappingProxyType({"full": 1.0, "prefix": None, "none": 0.0, **dict.fromkeys(CHAINS)})
"""Methods with a fixed ratio, or none."""
ENCODED_ALONE = ("none", WRONG_MASK)
"""Methods whose chunks are encoded alone by default, as in the papers; `none` is plain reuse."""
NO_STORE = ("full", "prefix", *CHAINS)
"""Methods that read nothing from a store."""
ROOM = 3 << 30
"""Capacity in bytes of the memory store for each way of encoding."""


@dataclass(frozen=True)
class Method:
    """One way to answer.

    Args:
        policy: A selection policy, or one of the special names above.
        ratio: The recompute ratio; None: the policy's default, or none.
        encoded: Whether its chunks are encoded alone or after filler text.
    """

    policy: str
    ratio: float | None = None
    encoded: Encoded = "filler"

    @property
    def name(self) -> str:
        """The name in reports: `policy@encoded`, or only `policy` where `encoded` is its default."""
        usual = self.policy in NO_STORE or self.encoded == _usual(self.policy)
        return self.policy if usual else f"{self.policy}@{self.encoded}"


def _usual(policy: str) -> Encoded:
    return "alone" if policy in ENCODED_ALONE else "filler"


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
        policy, _, said = name.strip().partition("@")
        encoded = _encoded(name, said or _usual(policy))
        if policy == AUTO:
            found.append(default_method(model))
        elif policy in RATIO_BY_NAME:
            found.append(Method(policy, RATIO_BY_NAME[policy], encoded))
        else:
            if policy not in (WRONG_MASK, ORACLE):
                known_policy(policy)
            found += [Method(policy, ratio, encoded) for ratio in ratios]
    return list(dict.fromkeys(found))


def _encoded(name: str, said: str) -> Encoded:
    for known in get_args(Encoded):
        if said == known:
            return known  # type: ignore[no-any-return]
    raise SettingsError(f"'{name}': chunks are encoded {', '.join(get_args(Encoded))}; found '{said}'.")


def default_method(model: HFModel) -> Method:
    """Return the method that an engine uses by default for this model when all chunks are in the store.

    Results of `ragfuse calibrate`, which are kept in a store, are not considered.
    """
    return Method(*settle(AUTO, None, model.profile.choice))


@dataclass
class Lab:
    """One model with two engines: the store of one holds chunks encoded after filler text, that of the other alone."""

    model: HFModel
    settings: Settings = field(default_factory=Settings)

    def __post_init__(self) -> None:
        self.engines: dict[Encoded, Engine] = {}

    def engine(self, encoded: Encoded) -> Engine:
        """Return the engine whose chunks are encoded this way."""
        if encoded not in self.engines:
            filler_context = self.settings.filler_tokens if encoded == "filler" else 0
            settings = self.settings.model_copy(update={"filler_tokens": filler_context})
            self.engines[encoded] = Engine(settings, self.model, KVStore([MemoryTier(ROOM, lru)]))
        return self.engines[encoded]

    def close(self) -> None:
        """Close all engines and their stores."""
        for engine in self.engines.values():
            engine.close(0.0)

    def prompt(self, case: Case, encoded: Encoded = "filler") -> Prompt:
        """Return the case's prompt; its token ids do not depend on how chunks are encoded."""
        before, after = ASKED[case.task]
        asked = f"{case.question}\n\n" if case.task == "summary" and case.question else case.question
        chunks = [part for chunk in case.chunks for part in (Piece("\n\n"), Piece(chunk, "chunk"))]
        pieces = [Piece(before), *chunks[1:], Piece(after.replace("{question}", asked))]
        engine = self.engine(encoded)
        return engine.prompt([("user", pieces)])

    def hold(self, case: Case, methods: Sequence[Method]) -> None:
        """Ingest the case's chunks into the stores, encoded as the methods need them."""
        for encoded in dict.fromkeys(method.encoded for method in methods if method.policy not in NO_STORE):
            engine, prompt = self.engine(encoded), self.prompt(case, encoded)
            first = prompt.segments[0]
            prefix = first.tokens if first.kind == "prefix" else ()
            if sum(tier.nbytes for tier in engine.store.tiers) > ROOM // 2:
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
        if method.policy == WRONG_MASK:
            with wrong_mask():
                return self._held_whole(engine.prepare(prompt, Ask(policy="hkvd", ratio=method.ratio)))
        if method.policy == ORACLE:
            with told(self._foreseen):
                return self._held_whole(engine.prepare(prompt, Ask(policy="lexical", ratio=method.ratio)))
        return self._held_whole(engine.prepare(prompt, Ask(policy=method.policy, ratio=method.ratio)))

    def _held_whole(self, ready: PreparedPrompt) -> Prefill:
        """Return the prefill, after checking that every chunk was a hit: a miss would make the method look better."""
        if ready.plan.fallback_reason:
            raise ModelError(f"{self.model.name} cannot be fused: {ready.plan.fallback_reason}. Measure another model.")
        if ready.plan.misses:
            raise InputError(
                f"{len(ready.plan.misses)} chunks of a prompt are not held in {ROOM >> 30} GB of memory, or shorter "
                f"than {self.settings.min_chunk_tokens} tokens. Take fewer or longer ones."
            )
        return ready.prefill

    def before(self, method: Method, prompt: Prompt) -> None:
        """Compute what a method knows before the question, so that it does not count as its time.

        For "prefix" this is the KV of the prompt up to the end of its first chunk. For "oracle" it is a score of each
        row: the attention that the last token pays to it in a full prefill, times the deviation of its reused KV.
        """
        if method.policy == "prefix":
            self._beginning = self.model.encode(prompt.token_ids[: self._n_prefix(prompt)])
        elif method.policy == ORACLE:
            full = self.model.full_prefill(prompt.token_ids)
            reused = self.prefill(Method("none", 0.0, method.encoded), prompt)
            away = kv_deviation(reused.kv, full.kv)
            away = (away / away.mean(1, keepdim=True).clamp_min(torch.finfo(away.dtype).tiny)).mean(0)
            self._foreseen = away * sum(layer[:, -1].sum(0) for layer in attention_of(self.model, full, 1))

    def _prefix(self, prompt: Prompt) -> Prefill:
        runs = [CachedRun(0, 0, self._n_prefix(prompt), 0, blend=False)]
        return self.model.fuse(prompt.token_ids, prompt.positions, runs, KVSource([self._beginning]), "none", 0.0)

    @staticmethod
    def _n_prefix(prompt: Prompt) -> int:
        chunks = [i for i, segment in enumerate(prompt.segments) if segment.kind == "chunk"]
        if not chunks:
            raise InputError("A prompt holds no chunk that is long enough to be kept (min_chunk_tokens).")
        return prompt.spans[chunks[0]][1]

    def write(self, prefill: Prefill, most: int) -> list[int]:
        """Return the ids of the greedy answer, at most `most`, without end tokens. The prefill cannot be used again."""
        ids = generate(self.model, prefill, {"max_new_tokens": most, "do_sample": False})[0]
        return [token for token in ids if token not in ends_of(self.model)]


@contextmanager
def told(score: Tensor) -> Iterator[None]:
    """In this context, the policy `lexical` selects rows by `score` (float32 [T]) instead of the question's words."""
    found = HFModel._nearness

    def known(
        model: HFModel, token_ids: Sequence[int], runs: Sequence[CachedRun], asked: Sequence[Tensor]
    ) -> Tensor | None:
        rows = candidate_rows(runs, len(token_ids))
        return score[rows] if len(rows) else None

    setattr(HFModel, "_nearness", known)  # noqa: B010 - as below
    try:
        yield
    finally:
        setattr(HFModel, "_nearness", found)  # noqa: B010


@contextmanager
def wrong_mask() -> Iterator[None]:
    """In this context, R recomputed rows attend as if they were the prompt's last R rows (a bottom-right triangle).

    CacheBlend's released code does so. As recomputed rows are sparse, they then see tokens that come after them.
    """
    right = Fusion.mask

    def wrong(fusion: Fusion) -> RowMask:
        total = len(fusion.positions)
        return RowMask(torch.arange(total - len(fusion.rows), total, device=fusion.rows.device), fusion.positions)

    setattr(Fusion, "mask", wrong)  # noqa: B010 - an ablation, for as long as the block lasts
    try:
        yield
    finally:
        setattr(Fusion, "mask", right)  # noqa: B010
