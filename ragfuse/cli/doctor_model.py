"""The doctor's checks of the model: whether it can be fused, what is known of it, and a question both ways.

The question is answered with and without reuse, about a made-up document in a temporary store.
"""

from __future__ import annotations

import shlex
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from rich.console import Console

from ragfuse.cli.check import CheckResult, guarded
from ragfuse.cli.options import prepare_model
from ragfuse.cli.prompts import prefix_of, rag_prompt
from ragfuse.engine.engine import Ask, Engine
from ragfuse.engine.machine_timings import MachineTimings
from ragfuse.engine.model_profiles import ProfileStore, calibrate_command, options_for
from ragfuse.settings import Settings
from ragfuse.store import CatalogFile
from ragfuse.store.catalog import Catalog
from ragfuse.types.profiles import ModelProfile

if TYPE_CHECKING:
    from ragfuse.types.answer import Answer

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


def check_model(settings: Settings, console: Console, report: dict[str, Any]) -> Iterator[CheckResult]:
    """Yield the results of checking the model and of a question to it; add the answers to `report` in JSON types.

    The engine has a temporary store.
    """
    prepare_model(settings)
    with TemporaryDirectory(prefix="ragfuse-doctor-") as folder:
        changes = {
            "store": Path(folder) / "store",
            "tiers": (),
            "memory_bytes": 0,
            "gpu_bytes": 0,
            "disk_bytes": 2 << 30,
        }
        with Engine(settings.model_copy(update=changes)) as engine:
            began = time.perf_counter()
            with console.status("loading the model"):
                model = engine.model
            what = f"{settings.model}, {engine.settings.dtype} on {model.device}"
            yield CheckResult("model", "ok", f"{what}, loaded in {time.perf_counter() - began:.1f} s")
            yield _probe_result(model.profile)
            yield from guarded("what is known", lambda: _check_catalog(settings, engine))
            yield from guarded("question", lambda: _check_question(engine, console, report))


def _probe_result(profile: ModelProfile) -> CheckResult:
    if profile.refusal:
        remedy = "it answers by full prefill, without reuse; choose another: RAGFUSE_MODEL"
        return CheckResult("probe", "bad", f"its KV cannot be reused: {profile.refusal}", remedy)
    kinds = Counter[str]()
    for layout in profile.rope:
        pairs = "halves" if layout is not None and layout.pairing == "half" else "neighbours"
        rope = "" if layout is None else f"with rope over {2 * len(layout.inv_freq)} dims in {pairs}"
        kinds[rope or "without positions in keys"] += 1
    layers = ", ".join(f"{n} layers {kind}" for kind, n in kinds.items())
    how = "the chosen tokens alone" if profile.mode == "rows" else "the model itself, with a mask"
    return CheckResult("probe", "ok", f"its KV can be reused anywhere in a prompt: {layers}; attention by {how}")


def _check_catalog(settings: Settings, engine: Engine) -> Iterator[CheckResult]:
    """Check what the store's catalog says of the model and of this machine."""
    model = engine.model
    has_file = settings.disk_bytes and (settings.store_path / "catalog.sqlite").is_file()  # none is created
    with closing(Catalog(CatalogFile(settings.store_path) if has_file else None)) as catalog:
        profile = ProfileStore(catalog).joined(model.profile)
        machine = MachineTimings(settings.tiers, catalog).machine(model)
    if profile.verified is None:
        yield CheckResult("verified", "note", "not checked yet", _verify_command(settings, engine))
    elif profile.verified:
        yield CheckResult("verified", "ok", "reuse is exact where it must be")
    else:
        remedy = "prompts are answered by full prefill; take another model or dtype"
        yield CheckResult("verified", "bad", "reuse is not exact where it must be", remedy)
    if profile.choice is not None:
        yield CheckResult("calibrated", "ok", "{} at {:.0%} keeps answers close".format(*profile.choice))
    elif profile.safe is False:
        remedy = "prompts are answered by full prefill; RAGFUSE_POLICY=hkvd reuses chunks anyway"
        yield CheckResult("calibrated", "bad", "no policy kept answers close to full prefill's", remedy)
    else:
        yield CheckResult(
            "calibrated", "note", "not calibrated: the default policy is used", calibrate_command(settings, model)
        )
    if machine is None:
        measure = shlex.join(["ragfuse", "measure", "--model", settings.model, *options_for(settings, model)])
        yield CheckResult("measured", "note", "this machine was not timed with this model", measure)
    else:
        threads = f"{machine.threads} thread{'s' if machine.threads > 1 else ''}"
        yield CheckResult("measured", "ok", f"on {threads}, tiers {', '.join(machine.tiers)}")


def _verify_command(settings: Settings, engine: Engine) -> str:
    return shlex.join(["ragfuse", "verify", settings.model, *options_for(settings, engine.model, has_store=False)])


def _check_question(engine: Engine, console: Console, report: dict[str, Any]) -> Iterator[CheckResult]:
    """Answer a question both ways: once unmeasured, as the first call of a process is slower, and then measured."""
    chunks = [(text, SOURCE) for text in TRIAL_PASSAGES]
    prompt, can_fuse, n = rag_prompt(engine, QUESTION, chunks), not engine.model.profile.refusal, TRIAL_ANSWER_TOKENS
    with console.status("asking a question, with and without reuse"):
        if can_fuse:
            engine.ingest(chunks, prefix_of(engine))
            engine.flush()
        for reuse in (False, True):
            engine.answer(prompt, Ask(reuse=reuse, max_tokens=1))
        full = engine.answer(prompt, Ask(reuse=False, max_tokens=n))
        fused = engine.answer(prompt, Ask(max_tokens=n))
    trace = fused.trace
    report |= {
        "question": QUESTION,
        "answer_full": full.text,
        "answer_fused": fused.text,
        "ttft_full_s": full.trace.ttft_s,
        "ttft_fused_s": trace.ttft_s,
        "tokens": trace.tokens,
        "tokens_reused": trace.tokens_reused,
        "exact": False,
    }
    yield CheckResult("question", "ok", QUESTION)
    yield CheckResult("full prefill", "ok", f"{_line(full)} (first token after {full.trace.ttft_s:.3f} s)")
    if trace.fallback_reason:
        remedy = "see above; RAGFUSE_POLICY=hkvd reuses chunks anyway"
        yield CheckResult("reuse", "bad", f"nothing was reused: {trace.fallback_reason}", remedy)
    else:
        share = f"{trace.tokens_reused} of {trace.tokens} tokens reused, {trace.tokens_recomputed} recomputed"
        yield CheckResult("reuse", "ok", f"{_line(fused)} (first token after {trace.ttft_s:.3f} s; {share})")
    if can_fuse:
        exact_length: dict[str, Any] = {"max_tokens": n, "options": {"min_new_tokens": n}}
        long = engine.answer(prompt, Ask(reuse=False, **exact_length)).token_ids
        recomputed = engine.answer(prompt, Ask(policy="hkvd", ratio=1.0, **exact_length)).token_ids
        report["exact"] = long == recomputed
        yield _check_exact(engine, long == recomputed)


def _check_exact(engine: Engine, is_same: bool) -> CheckResult:
    """Check that recomputing all rows gives full prefill's tokens, or else that rounding explains the difference."""
    if is_same:
        found = f"with every token recomputed, the answer's {TRIAL_ANSWER_TOKENS} tokens are full prefill's"
        return CheckResult("exact", "ok", found)
    found = "with every token recomputed, the answer is not full prefill's"
    if engine.settings.dtype != "float32" and engine.runtime.verify().passed:
        return CheckResult("exact", "ok", f"{found}, by no more than rounding explains")
    return CheckResult("exact", "bad", found, f"{_verify_command(engine.settings, engine)} shows which check fails")


def _line(answer: Answer) -> str:
    """Return the answer's text on one line."""
    return " ".join(answer.text.split()) or "(no text)"
