"""Options that several commands share, and the settings made from them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from ragfuse.cli.files import READABLE_TYPES
from ragfuse.errors import InputError, SettingsError
from ragfuse.settings import Settings


def default_of(setting: str, value: str = "") -> str:
    """Return what `--help` shows as the default of an option that stands for a setting.

    Args:
        setting: Name of the setting.
        value: Its default in words, where the value itself says little.
    """
    return f"{value or Settings.model_fields[setting].default}, or RAGFUSE_{setting.upper()}"


def option(flag: str, text: str, default: str | bool = True, **more: Any) -> Any:
    """Return an option with its help and the default that `--help` shows (True: the parameter's own value)."""
    return typer.Option(flag, help=text, show_default=default, **more)


Model = Annotated[
    str | None,
    option(
        "--model",
        "Name as `ragfuse models ls` lists it, Hugging Face id, folder, adapter folder or GGUF file.",
        default_of("model"),
    ),
]
Dtype = Annotated[str | None, option("--dtype", "auto, float32, bfloat16 or float16.", default_of("dtype"))]
Device = Annotated[str | None, option("--device", "cpu, cuda, cuda:N, mps or auto.", default_of("device"))]
ModelKwargs = Annotated[
    str | None,
    option(
        "--model-kwargs",
        'Options of from_pretrained, as JSON: \'{"revision": "main"}\'.',
        default_of("model_kwargs", "none"),
    ),
]
STORE_DEFAULT = default_of("store", "`store` in the folder RAGFUSE_HOME")
Store = Annotated[Path | None, option("--store", "Folder of the KV store.", STORE_DEFAULT)]
Documents = Annotated[list[Path], typer.Option("--docs", help=f"Files or folders of your documents: {READABLE_TYPES}.")]
DocsFirst = Annotated[
    Path | None, option("--docs", "Ingest this file or folder first, into an index of its own.", "none")
]
Policy = Annotated[
    str | None,
    option(
        "--policy",
        "How the tokens to recompute are chosen; auto: as `ragfuse calibrate` found best.",
        default_of("policy"),
    ),
]
Ratio = Annotated[
    float | None,
    option(
        "--ratio",
        "Share of the reused tokens to recompute: 0 is fastest, 1 is full prefill.",
        default_of("ratio", "chosen for each question"),
    ),
]
TopK = Annotated[int | None, option("--top-k", "Number of chunks to retrieve.", default_of("top_k"))]
MaxTokens = Annotated[
    int | None, option("--max-tokens", "Maximum length of the answer, in tokens.", default_of("max_tokens"))
]
Overflow = Annotated[
    str | None,
    option(
        "--overflow",
        "For a prompt that is too long: error, or drop (leave out its last chunks).",
        default_of("overflow"),
    ),
]
Deadline = Annotated[
    float | None,
    option("--deadline", "Seconds within which the first token should come.", "none", min=0.0),
]
Ray = Annotated[
    str | None,
    option(
        "--ray",
        "Run on a Ray cluster: HOST:PORT, ray://HOST:PORT, auto, or local for a new one on this machine.",
        "without Ray",
    ),
]
RayCPUs = Annotated[
    float | None, option("--ray-cpus", "CPUs of each engine on the Ray cluster.", "chosen by the size of its nodes")
]
Json = Annotated[
    Path | None, option("--json", "Write the result as JSON to this file ('-': standard output).", "none is written")
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]
Index = Annotated[str, typer.Option("--index", help="Name of the document index.")]


ONE_LINE = 320
"""Most characters of a JSON value that is written on one line."""


def settings_of(**given: Any) -> Settings:
    """Return the settings with the options of the command line (None: not given).

    Raises:
        SettingsError: One is invalid; the message has the reason in words.
    """
    try:
        return Settings(**{name: value for name, value in given.items() if value is not None})
    except SettingsError as error:
        told, name = str(error), error.argument
        if given.get(name) is None or f"RAGFUSE_{name.upper()}" in told:
            raise
        raise SettingsError(f"{told.removesuffix('.')} (--{name.replace('_', '-')}).", name) from None


def prepare_model(settings: Settings) -> None:
    """Prepare the model's files if needed, before any other progress is shown."""
    from ragfuse.models import resolve_llm

    resolve_llm(settings.model, settings.home)


def json_text(data: Any, indent: int = 0) -> str:
    """Return readable JSON: short values on one line, longer ones with one line per part."""
    flat = json.dumps(data, ensure_ascii=False)
    if not data or not isinstance(data, dict | list | tuple) or (indent and len(flat) <= ONE_LINE):
        return flat
    inner, outer = " " * (indent + 2), " " * indent
    if isinstance(data, dict):
        named = [(json.dumps(str(name), ensure_ascii=False), part) for name, part in data.items()]
        parts, ends = [f"{name}: {json_text(part, indent + 2)}" for name, part in named], "{}"
    else:
        parts, ends = [json_text(part, indent + 2) for part in data], "[]"
    return ends[0] + "\n" + ",\n".join(inner + part for part in parts) + f"\n{outer}{ends[1]}"


def write_json(data: dict[str, Any], target: Path | None) -> None:
    """Write a result to the target of `--json`, atomically."""
    if target is None:
        return
    text = json_text(data)
    if str(target) == "-":
        print(text)
        return
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        partial.write_text(text + "\n", encoding="utf-8")
        partial.replace(target)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise InputError(f"The result cannot be written to '{target}': {error.strerror}. Name another file.") from error


def console_for(json_target: Path | None) -> Console:
    """Return the console for people: standard error if standard output carries the JSON.

    Raises:
        InputError: The file for the JSON cannot be written.
    """
    if str(json_target) != "-":
        require_writable(json_target)
    return Console(stderr=str(json_target) == "-")


def require_writable(*targets: Path | None) -> None:
    """Raise InputError for a file that cannot be written, before hours of work for it; None is skipped."""
    for target in targets:
        if target is not None and (target.is_dir() or not os.access(target.expanduser().parent, os.W_OK)):
            found = "a folder" if target.is_dir() else "a folder that does not exist or cannot be written to"
            raise InputError(f"Wanted a file to write to, found {found}: '{target}'. Name another file.")
