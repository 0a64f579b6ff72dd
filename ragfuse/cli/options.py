"""Options that several commands share, and the settings made from them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError
from pydantic_settings import SettingsError as PydanticSettingsError
from rich.console import Console

from ragfuse.errors import InputError, SettingsError
from ragfuse.settings import Settings

Model = Annotated[
    str | None,
    typer.Option(
        "--model", help="Name as `ragfuse models ls` lists it, Hugging Face id, folder, adapter folder or GGUF file."
    ),
]
Dtype = Annotated[str | None, typer.Option("--dtype", help="auto, float32, bfloat16 or float16.")]
Device = Annotated[str | None, typer.Option("--device", help="cpu, cuda, cuda:N, mps or auto.")]
ModelKwargs = Annotated[
    str | None,
    typer.Option("--model-kwargs", help='Options of from_pretrained, as JSON: \'{"revision": "main"}\'.'),
]
Store = Annotated[Path | None, typer.Option("--store", help="Folder of the KV store.")]
Documents = Annotated[
    list[Path], typer.Option("--docs", help="Files or folders of your documents: txt, md, rst, html, pdf.")
]
Policy = Annotated[
    str | None, typer.Option("--policy", help="Policy that chooses the tokens to recompute; auto: the calibrated one.")
]
Ratio = Annotated[float | None, typer.Option("--ratio", help="Share of reused tokens to recompute, 0 to 1.")]
Overflow = Annotated[
    str | None,
    typer.Option("--overflow", help="For a prompt that is too long: error, or drop (leave out its last chunks)."),
]
Deadline = Annotated[float | None, typer.Option("--deadline", help="Deadline of the first token, seconds.", min=0.0)]
Ray = Annotated[
    str | None,
    typer.Option(
        "--ray", help="Run on a Ray cluster: HOST:PORT, ray://HOST:PORT, auto, or local for a new one on this machine."
    ),
]
RayCPUs = Annotated[
    float | None, typer.Option("--ray-cpus", help="CPUs of each engine on the Ray cluster; default: by its nodes.")
]
Json = Annotated[Path | None, typer.Option("--json", help="Write the result as JSON to this file ('-': stdout).")]
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
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            raise SettingsError(
                f"There is no setting '{name}'. The settings are: {', '.join(Settings.model_fields)}."
            ) from error
        found = (
            ""
            if name.partition(".")[0]
            in ("tiers", "salt", "api_key", "api_keys", "decode_at", "decode_key", "model_kwargs")
            else f", found {first['input']!r}"
        )
        raise SettingsError(f"{name}: {first['msg'].removeprefix('Value error, ')}{found}.") from None
    except PydanticSettingsError as error:
        name = next((name for name in Settings.model_fields if f'"{name}"' in str(error)), "a setting")
        raise SettingsError(
            f"Wanted JSON in RAGFUSE_{name.upper()}, found something else. Correct the variable or remove it."
        ) from None
    except (ValueError, OSError) as error:  # ragfuse.toml itself
        raise SettingsError(f"ragfuse.toml in this folder cannot be read: {error}. Correct it or remove it.") from error


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
    if json_target is not None and str(json_target) != "-":
        folder = json_target.parent
        if json_target.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
            found = (
                "a folder" if json_target.is_dir() else "a file in a folder that does not exist or cannot be written to"
            )
            raise InputError(
                f"Wanted a file to write the result to, found {found}: '{json_target}'. Name another file."
            )
    return Console(stderr=str(json_target) == "-")
