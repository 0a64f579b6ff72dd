"""The doctor's look at the model: what it allows, what is known of it, and a question with and without reuse.

The question is about a document that is made up, over a store that is thrown away.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from rich.console import Console

from ragfuse.cli.check import CheckResult, guarded
from ragfuse.cli.options import prepared
from ragfuse.cli.prompts import prefix_of, rag_prompt
from ragfuse.engine.engine import Ask, Engine
from ragfuse.engine.machine_timings import MachineTimings
from ragfuse.engine.model_profiles import ProfileStore
from ragfuse.errors import StoreError
from ragfuse.settings import Settings
from ragfuse.store import CatalogFile
from ragfuse.store.catalog import Catalog
from ragfuse.types.profiles import ModelProfile

if TYPE_CHECKING:
    from ragfuse.types.answer import Answer
    from ragfuse.types.kv import RopeLayout

SOURCE = "almanac.txt"
TRIAL_PASSAGES = (
    "The harbour of Port Elling was dug in 1847 by sailors who had lost their ship in a winter storm. It froze over "
    "only once, in 1881, when children skated between the boats and the ferry stayed on the far shore for nine days.",
    "The lighthouse of Port Elling is painted green, because red paint was too dear in the year it was built. Its lamp "
    "burned whale oil until 1902, then petroleum, and since 1961 it has been electric and needs no keeper at all.",
    "Behind the hills lies a valley that is known for its walnuts. Every October the village holds a fair at which the "
    "oldest tree is given a name. The railway reached the valley in 1893, and its bed is a path for walkers now.",
    "The workshop of the Marek family has built violins since 1790. Its wood is dried for 12 years in the attic of an "
    "old mill. The workshop has never sold more than ten instruments in one year, and most of them went abroad.",
)
QUESTION = "What colour is the lighthouse of Port Elling?"
TRIAL_ANSWER_TOKENS = 16
"""Most tokens of an answer."""
ELSEWHERE = "name an embedded model (ragfuse models ls), a local folder or a Hugging Face id: RAGFUSE_MODEL"


@dataclass(frozen=True)
class PairedAnswers:
    """The answers to one question, by full prefill and by default settings.

    `long` holds two answers of exactly `TRIAL_ANSWER_TOKENS` tokens, whatever they say: by full prefill, and with all
    rows recomputed. It is None for a model that cannot be fused.
    """

    full: Answer
    default: Answer
    long: tuple[Answer, Answer] | None


def tried(settings: Settings, console: Console, said: dict[str, Any]) -> Iterator[CheckResult]:
    """Yield the results of checking the model and a question to it; the answers are put into `said` as JSON types."""
    with ExitStack() as stack:
        rows: list[CheckResult] = []
        engine = _loaded(settings, console, stack, rows)
        yield from rows
        if engine is None:
            return
        kept = list(guarded("what is known", lambda: _known(settings, engine)))
        yield from kept
        yield from guarded("question", lambda: _question(engine, console, said))


def _loaded(settings: Settings, console: Console, stack: ExitStack, rows: list[CheckResult]) -> Engine | None:
    """An engine over a store that is thrown away, its model loaded; None, and the reason in `rows`, if it cannot be."""

    def load() -> Iterator[CheckResult]:
        prepared(settings)
        folder = stack.enter_context(TemporaryDirectory(prefix="ragfuse-doctor-"))
        alone = {"store": Path(folder) / "store", "tiers": (), "memory_bytes": 0, "gpu_bytes": 0, "disk_bytes": 2 << 30}
        engine = stack.enter_context(Engine(settings.model_copy(update=alone)))
        began = time.perf_counter()
        with console.status("loading the model"):
            model = engine.model
        took = f"{time.perf_counter() - began:.1f} s"
        yield CheckResult(
            "model", "ok", f"{settings.model}, {engine.settings.dtype} on {model.device}, loaded in {took}"
        )
        yield _probed(model.profile)
        engines.append(engine)

    engines: list[Engine] = []
    rows += guarded("model", load, ELSEWHERE)
    return engines[0] if engines else None


def _probed(profile: ModelProfile) -> CheckResult:
    if profile.refusal:
        remedy = "nothing is reused with it; name another: RAGFUSE_MODEL"
        return CheckResult("probe", "bad", f"cannot be fused: {profile.refusal}", remedy)
    kinds = dict.fromkeys(_in_words(layout) for layout in profile.rope)
    layers = [f"{sum(_in_words(layout) == kind for layout in profile.rope)} layers {kind}" for kind in kinds]
    how = "rows alone" if profile.mode == "rows" else "the model's own attention with a mask"
    return CheckResult("probe", "ok", f"can be fused: {', '.join(layers)}; attention by {how}")


def _in_words(layout: RopeLayout | None) -> str:
    if layout is None:
        return "without positions in keys"
    pairs = "halves" if layout.pairing == "half" else "neighbours"
    return f"with rope over {2 * len(layout.inv_freq)} dims in {pairs}"


def _known(settings: Settings, engine: Engine) -> Iterator[CheckResult]:
    """What the store's catalog says of the model and of this machine."""
    model = engine.model
    with closing(Catalog(_catalog_file(settings))) as catalog:
        profile = ProfileStore(catalog).joined(model.profile)
        machine = MachineTimings(settings.tiers, catalog).machine(model)
    if profile.verified is None:
        yield CheckResult("verified", "note", "not looked at", f"ragfuse verify {settings.model}")
    elif profile.verified:
        yield CheckResult("verified", "ok", "fusing is exact where it must be")
    else:
        remedy = "prompts are answered by full prefill; take another model or dtype"
        yield CheckResult("verified", "bad", "fusing is not exact where it must be", remedy)
    calibrate = f"ragfuse calibrate --model {settings.model} --docs PATH"
    if profile.choice is not None:
        yield CheckResult("calibrated", "ok", "{} at {:.0%} keeps answers close".format(*profile.choice))
    elif profile.safe is False:
        remedy = "prompts are answered by full prefill; name a policy to fuse all the same"
        yield CheckResult("calibrated", "bad", "no policy kept answers close to full prefill's", remedy)
    else:
        yield CheckResult("calibrated", "note", "not calibrated: the default policy is used", calibrate)
    if machine is None:
        yield CheckResult(
            "measured", "note", "this machine was not timed with it", f"ragfuse measure --model {settings.model}"
        )
    else:
        threads = f"{machine.threads} thread{'s' if machine.threads > 1 else ''}"
        yield CheckResult("measured", "ok", f"on {threads}, tiers {', '.join(machine.tiers)}")


def _catalog_file(settings: Settings) -> CatalogFile | None:
    """The catalog of the store as it is; none is made."""
    folder = settings.store_path
    if not settings.disk_bytes or not (folder / "catalog.sqlite").is_file():
        return None
    try:
        return CatalogFile(folder)
    except StoreError:  # which the row of the store's own tier tells
        return None


def _question(engine: Engine, console: Console, said: dict[str, Any]) -> Iterator[CheckResult]:
    with console.status("asking a question, with and without reuse"):
        found = _asked(engine, [(text, SOURCE) for text in TRIAL_PASSAGES])
    full, default = found.full, found.default
    said |= {
        "question": QUESTION,
        "answer_full": full.text,
        "answer_fused": default.text,
        "ttft_full_s": full.trace.ttft_s,
        "ttft_fused_s": default.trace.ttft_s,
        "tokens": default.trace.tokens,
        "tokens_reused": default.trace.tokens_reused,
        "exact": found.long is not None and found.long[0].token_ids == found.long[1].token_ids,
    }
    yield CheckResult("question", "ok", QUESTION)
    yield CheckResult("full prefill", "ok", f"{_line(full)} (first token after {full.trace.ttft_s:.3f} s)")
    if default.trace.fallback_reason:
        remedy = "see above; RAGFUSE_POLICY=hkvd fuses all the same"
        yield CheckResult("reuse", "bad", f"nothing was reused: {default.trace.fallback_reason}", remedy)
    else:
        trace = default.trace
        share = f"{trace.tokens_reused} of {trace.tokens} tokens reused, {trace.tokens_recomputed} recomputed"
        yield CheckResult("reuse", "ok", f"{_line(default)} (first token after {trace.ttft_s:.3f} s; {share})")
    if found.long is not None:
        yield _exact(engine, *found.long)


def _asked(engine: Engine, chunks: Sequence[tuple[str, str]]) -> PairedAnswers:
    """Each way once unmeasured, as the first call of a process is slower, and then measured."""
    prompt, can_fuse = rag_prompt(engine, QUESTION, chunks), not engine.model.profile.refusal
    if can_fuse:
        engine.ingest(chunks, prefix_of(engine))
        engine.flush()
    for reuse in (False, True):
        engine.answer(prompt, Ask(reuse=reuse, max_tokens=1))
    full = engine.answer(prompt, Ask(reuse=False, max_tokens=TRIAL_ANSWER_TOKENS))
    default = engine.answer(prompt, Ask(max_tokens=TRIAL_ANSWER_TOKENS))
    if not can_fuse:
        return PairedAnswers(full, default, None)
    long: dict[str, Any] = {"max_tokens": TRIAL_ANSWER_TOKENS, "options": {"min_new_tokens": TRIAL_ANSWER_TOKENS}}
    ids = engine.prompt(prompt).token_ids  # of marked chunks, which the model's own prompt does not have
    wanted, whole = (
        engine.answer(ids, Ask(reuse=False, **long)),
        engine.answer(prompt, Ask(policy="hkvd", ratio=1.0, **long)),
    )
    return PairedAnswers(full, default, (wanted, whole))


def _exact(engine: Engine, full: Answer, whole: Answer) -> CheckResult:
    """Check that recomputing all rows gives full prefill's tokens, or else that rounding explains the difference."""
    if whole.token_ids == full.token_ids:
        return CheckResult("exact", "ok", f"all rows recomputed give full prefill's {len(full.token_ids)} tokens")
    pairs = zip(whole.token_ids, full.token_ids, strict=False)
    at = next((at for at, (ours, theirs) in enumerate(pairs) if ours != theirs), len(full.token_ids))
    found = f"with all rows recomputed, token {at + 1} is not full prefill's"
    if engine.settings.dtype != "float32" and engine.verify().passed:
        return CheckResult("exact", "ok", f"{found}, by no more than rounding explains")
    return CheckResult("exact", "bad", found, f"ragfuse verify {engine.settings.model} says which promise is broken")


def _line(answer: Answer) -> str:
    """The answer's text in one line."""
    return " ".join(answer.text.split()) or "(no text)"
