"""The doctor's checks of the model: whether it can be fused, what is known of it, and a question
both ways.

The question is answered with and without reuse, about a made-up document in a temporary store.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console

from ragfuse.cli.check import CheckResult, guarded
from ragfuse.cli.engine import loaded_engine
from ragfuse.cli.prompts import prefix_of, rag_prompt
from ragfuse.engine.engine import Ask, Engine
from ragfuse.engine.model_records import (
    MachineTimings,
    calibrate_command,
    judged_profile,
    options_for,
)
from ragfuse.process.jobs import EXIT_S
from ragfuse.settings import Settings
from ragfuse.store import Catalog

SOURCE = "almanac.txt"
TRIAL_PASSAGES = (
    (
        "The harbour of Port Elling was dug in 1847 by sailors who had lost their ship in a winter"
        " storm. It froze over only once, in 1881, when children skated between the boats and the"
        " ferry stayed on the far shore for nine days."
    ),
    (
        "The lighthouse of Port Elling is painted green, because red paint was too dear in the year"
        " it was built. Its lamp burned whale oil until 1902, then petroleum, and since 1961 it has"
        " been electric and needs no keeper at all."
    ),
    (
        "Behind the hills lies a valley that is known for its walnuts. Every October the village"
        " holds a fair at which the oldest tree is given a name. The railway reached the valley in"
        " 1893, and its bed is a path for walkers now."
    ),
    (
        "The workshop of the Marek family has built violins since 1790. Its wood is dried for 12"
        " years in the attic of an old mill. The workshop has never sold more than ten instruments"
        " in one year, and most of them went abroad."
    ),
)
QUESTION = "What colour is the lighthouse of Port Elling?"
TRIAL_ANSWER_TOKENS = 16
"""Most tokens of an answer."""


def check_model(settings: Settings, console: Console) -> Iterator[CheckResult]:
    """Yield the results of checking the model and of a question to it, with a temporary store."""
    with TemporaryDirectory(prefix="ragfuse-doctor-") as folder:
        changes = {
            "store": Path(folder) / "store",
            "tiers": (),
            "memory_bytes": 0,
            "gpu_bytes": 0,
            "disk_bytes": 2 << 30,
        }
        with ExitStack() as held:
            engine = held.enter_context(loaded_engine(settings.model_copy(update=changes), console))
            # after Ctrl-C, the write at hand, before its folder goes
            held.callback(engine.store.flush, EXIT_S)
            refusal = engine.model.profile.refusal
            yield CheckResult(
                "model", "ok", f"{settings.model}, {engine.settings.dtype} on {engine.model.device}"
            )
            if refusal:
                remedy = "it answers by full prefill, without reuse; choose another: RAGFUSE_MODEL"
                yield CheckResult("reuse", "bad", f"its KV cannot be reused: {refusal}", remedy)
            yield from guarded("what is known", lambda: _check_catalog(settings, engine))
            yield from guarded("question", lambda: _check_question(engine, console))


def _check_catalog(settings: Settings, engine: Engine) -> Iterator[CheckResult]:
    """Check what the store's catalog says of the model and of this machine."""
    model = engine.model
    # none is created
    has_file = settings.disk_bytes and (settings.store_path / "catalog.sqlite").is_file()
    with Catalog(settings.store_path if has_file else None) as catalog:
        profile = judged_profile(catalog, model.profile)
        machine = MachineTimings(settings.tiers, catalog).machine(model)
    verify = ["ragfuse", "verify", settings.model, *options_for(settings, model, has_store=False)]
    measure = ["ragfuse", "measure", "--model", settings.model, *options_for(settings, model)]
    chosen = "{} at {:.0%} keeps answers close".format(*profile.choice) if profile.choice else ""
    tiers = "" if machine is None else f"{machine.threads} threads, {', '.join(machine.tiers)}"
    for what, is_well, found, command in (
        ("verified", profile.verified, "reuse is exact where it must be", shlex.join(verify)),
        ("calibrated", profile.safe, chosen, calibrate_command(settings, model)),
        ("measured", None if machine is None else True, tiers, shlex.join(measure)),
    ):
        if is_well is None:
            yield CheckResult(what, "note", "not yet", command)
        elif is_well:
            yield CheckResult(what, "ok", found)
        else:
            remedy = "take another model; RAGFUSE_POLICY=hkvd reuses chunks of a verified one"
            yield CheckResult(what, "bad", "no: prompts are answered by full prefill", remedy)


def _check_question(engine: Engine, console: Console) -> Iterator[CheckResult]:
    """Answer a question both ways: once unmeasured, as the first call of a process is slower, and
    then measured.
    """
    chunks = [(text, SOURCE) for text in TRIAL_PASSAGES]
    prompt = rag_prompt(engine, QUESTION, chunks)
    with console.status("asking a question, with and without reuse"):
        if not engine.model.profile.refusal:
            engine.ingest(chunks, prefix_of(engine))
            engine.flush()
        for reuse in (False, True):
            engine.answer(prompt, Ask(reuse=reuse, max_tokens=1))
        full = engine.answer(prompt, Ask(reuse=False, max_tokens=TRIAL_ANSWER_TOKENS))
        fused = engine.answer(prompt, Ask(max_tokens=TRIAL_ANSWER_TOKENS))
    trace = fused.trace
    yield CheckResult(
        "full prefill", "ok", f"{full.text} (first token after {full.trace.ttft_s:.3f} s)"
    )
    if trace.fallback_reason:
        remedy = "see above; RAGFUSE_POLICY=hkvd reuses chunks anyway"
        yield CheckResult("reuse", "bad", f"nothing was reused: {trace.fallback_reason}", remedy)
    else:
        yield CheckResult("reuse", "ok", f"{fused.text} ({trace.summary})")
