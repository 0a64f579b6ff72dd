"""One prompt over modules asked both ways through the product's own engine: how soon, and what is
said.

The first token is timed from the prompt in PML to its first logits: bound, planned, read and fused,
    or computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any, Literal

from ragfuse_bench.modules.cases import ModuleCase
from ragfuse_bench.rounds import Runner, speedup
from ragfuse_bench.scores import score

from ragfuse.engine.engine import Ask, Engine, PreparedPrompt
from ragfuse.errors import ModelError
from ragfuse.hf.model import HFModel
from ragfuse.plan.evict import lru
from ragfuse.schemas.nodes import PMLPrompt, Schema
from ragfuse.settings import Settings
from ragfuse.store import KVStore, MemoryTier

Place = Literal["host", "gpu"]
WAYS: Mapping[str, Ask] = MappingProxyType({"full": Ask(reuse=False), "cached": Ask()})
"""All of the prompt computed, and its modules from the store."""
ROOM = 3 << 30
"""Bytes of KV that are kept."""


@contextmanager
def engine_over(settings: Settings, model: HFModel, place: Place = "host") -> Iterator[Engine]:
    """An engine whose modules lie in memory: the host's, pinned where the model is on a GPU, or the
    GPU's.
    """
    on_gpu = model.device.type == "cuda"
    where = str(model.device) if place == "gpu" else "cpu"
    with KVStore(
        [MemoryTier(ROOM, lru, device=where, pin_memory=on_gpu and place == "host")]
    ) as store:
        engine = Engine(settings, model, store)
        try:
            yield engine
        finally:
            engine.close(0.0)


@contextmanager
def registered(engine: Engine, schema: Schema) -> Iterator[None]:
    """With a schema's modules in the store, which forgets them afterwards."""
    engine.schemas.register(schema)
    engine.flush()
    try:
        yield
    finally:
        engine.schemas.remove(schema.name)


def first_logits(engine: Engine, request: PMLPrompt, ask: Ask) -> PreparedPrompt:
    """A prompt in PML to its first logits."""
    return engine.prepare(engine.schemas.prompt(request, ask), ask)


def timed(engine: Engine, request: PMLPrompt, runner: Runner, what: str) -> dict[str, Any]:
    """Both ways in interleaved rounds: tokens, the cached share of them, seconds by the clock that
    counts.
    """
    ready = first_logits(engine, request, WAYS["cached"])
    if ready.plan.fallback_reason or ready.plan.misses:
        raise ModelError(f"{what} was not answered over its modules: {ready.plan.explain()}.")
    tokens = len(ready.plan.prompt)
    cached = sum(fetch_tokens(ready))
    cases = {way: partial(first_logits, engine, request, ask) for way, ask in WAYS.items()}
    times = runner.measure(cases, what)
    full, kept = times["full"], times["cached"]
    return {
        "tokens": tokens,
        "cached_tokens": cached,
        "cached_share": cached / tokens,
        "full_s": full.median_s,
        "cached_s": kept.median_s,
        "ttft_x": speedup(full.seconds, kept.seconds),
    }


def fetch_tokens(ready: PreparedPrompt) -> list[int]:
    """Tokens of each segment that was read."""
    prompt = ready.plan.prompt
    return [len(prompt.segments[fetch.segment].tokens) for fetch in ready.plan.fetches]


def answered(engine: Engine, case: ModuleCase, ways: Mapping[str, Ask] = WAYS) -> dict[str, Any]:
    """What is said each way, greedily, with scores where there are known answers, and how alike
    both are.
    """
    texts = {way: said(engine, case, ask) for way, ask in ways.items()}
    found: dict[str, Any] = {f"answer_{way}": text for way, text in texts.items()}
    found["same"] = texts["full"] == texts["cached"]
    for way, text in texts.items() if case.answers else ():
        found[f"score_{way}"] = score(case.task, text, case.answers)
    return found


def said(engine: Engine, case: ModuleCase, ask: Ask) -> str:
    """The answer's text."""
    wish = Ask(max_tokens=case.max_tokens, reuse=ask.reuse, blend=ask.blend)
    return engine.answer(case.request, wish).text.strip()


def measured(engine: Engine, case: ModuleCase, runner: Runner) -> dict[str, Any]:
    """A case's row: its name, times, what its KV takes, answers side by side."""
    with registered(engine, case.schema):
        times = timed(engine, case.request, runner, case.name)
        layout = engine.schemas.show(case.schema.name)
        kept = sum(len(run.tokens) for run in layout.runs)
        sizes = {
            "modules": len(layout.modules),
            "kv_mb": kept * engine.model.nbytes_per_token / 1e6,
        }
        return {
            "name": case.name,
            "dataset": case.dataset,
            **times,
            **sizes,
            **answered(engine, case),
        }


def mean_of(rows: Sequence[Mapping[str, Any]], key: str) -> float | None:
    """The mean of what rows have under a key; None where none has it."""
    values = [row[key] for row in rows if row.get(key) is not None]
    return sum(values) / len(values) if values else None
