"""Options, settings, console and `--json` of all commands: see `screen`."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from ragfuse.cli.files import READABLE_TYPES
from ragfuse.errors import InputError
from ragfuse.settings import Settings

ENGINE = ("model", "dtype", "device", "model_kwargs", "store")
"""Names of the settings that are options of every command with a model."""


def option(flag: str, text: str, default: str | bool = True, **more: Any) -> Any:
    """Return a typer option. The help shows `default`; True means the parameter's own default."""
    return typer.Option(flag, help=text, show_default=default, **more)


def setting(name: str) -> Any:
    """Return the typer option of a setting, with the setting's description and default."""
    field = Settings.model_fields[name]
    flag, variable = f"--{name.replace('_', '-')}", f"RAGFUSE_{name.upper()}"
    shown = f"{field.default}, or {variable}" if field.default else variable
    return option(flag, str(field.description), shown)


Model = Annotated[str | None, setting("model")]
Dtype = Annotated[str | None, setting("dtype")]
Device = Annotated[str | None, setting("device")]
Documents = Annotated[
    list[Path],
    typer.Option("--docs", help=f"Files or folders of your documents: {READABLE_TYPES}."),
]
DocsFirst = Annotated[
    Path | None,
    option("--docs", "Ingest this file or folder first, into a separate index.", "none"),
]
Session = Annotated[
    str | None,
    option(
        "--session",
        "Continue or start the conversation of this name; see `ragfuse sessions`.",
        "not kept",
    ),
]
Server = Annotated[
    str | None,
    option(
        "--server",
        "Ask the server at this URL; documents are searched locally, the LLM runs remotely.",
        "none",
        metavar="URL",
    ),
]
Ray = Annotated[
    str | None,
    option(
        "--ray",
        "Run on a Ray cluster: HOST:PORT, ray://HOST:PORT, auto, or local for a new cluster.",
        "without Ray",
    ),
]
RayCPUs = Annotated[
    float | None,
    option("--ray-cpus", "CPUs of each engine on the Ray cluster.", "by the size of its nodes"),
]
Plot = Annotated[
    Path | None, option("--plot", "Write a plot of the result to this PNG.", "not drawn")
]
Json = Annotated[
    Path | None,
    option(
        "--json", "Write the result as JSON to this file ('-': standard output).", "not written"
    ),
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]
Index = Annotated[str, typer.Option("--index", help="Name of the document index.")]


def screen(*settings: str, **shared: Any) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Make a typer command of a function that takes console, settings and further options.

    The console is for human-readable output. Settings are read as usual (`Settings`), and options
    of the command override them. If the function returns a result, the command has the option
    `--json`, which writes the result to a file. The function may also return (result, ok). If `ok`
    is False, the exit status is 1.

    Args:
        *settings: Names of settings for which the command has an option. A parameter of the same
            name gets the option's value, or None if the option was not given.
        **shared: Types of further options, by name. The function gets their values, or None.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., None]:
        signature = inspect.signature(function, eval_str=True)
        own = [each for each in signature.parameters.values() if each.kind != each.VAR_KEYWORD][2:]
        given_by_name = {*shared, *(each.name for each in own)}
        more = {name: Annotated[str | None, setting(name)] for name in settings} | shared
        if signature.return_annotation is not None:
            more["json"] = Json
        parameters = {
            each.name: each.replace(kind=each.KEYWORD_ONLY) for each in own if each.name not in more
        }
        for name, kind in more.items():
            parameters[name] = inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind
            )

        def run(**given: Any) -> None:
            target = given.get("json")
            console = console_for(target)
            made = settings_of(**{name: given[name] for name in settings})
            by_name = {name: value for name, value in given.items() if name in given_by_name}
            result = function(console, made, **by_name)
            result, is_well = result if isinstance(result, tuple) else (result, True)
            write_json(result, target)
            raise typer.Exit(0 if is_well else 1)

        run.__name__ = function.__name__
        run.__doc__ = function.__doc__
        run.__annotations__ = {}
        run.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=list(parameters.values()), return_annotation=None
        )
        return run

    return decorate


def settings_of(**given: Any) -> Settings:
    """Return the settings, overridden by all options that are not None."""
    return Settings(**{name: value for name, value in given.items() if value is not None})


def prepare_model(settings: Settings) -> None:
    """Prepare the model's files if necessary, before any other progress is shown."""
    from ragfuse.models import resolve_llm

    resolve_llm(settings.model, settings.home)


def write_json(data: Any, target: Path | None) -> None:
    """Write a result as JSON to `target`. "-" means standard output, None writes nothing."""
    if target is None:
        return
    text = json.dumps(data, ensure_ascii=False, indent=1)
    if str(target) == "-":
        print(text)
        return
    target.write_text(text + "\n", encoding="utf-8")


def console_for(json_target: Path | None) -> Console:
    """Return the console for human-readable output: standard error if JSON goes to standard output.

    Raises:
        InputError: The JSON file cannot be written.
    """
    if str(json_target) != "-":
        require_writable(json_target)
    console = Console(stderr=str(json_target) == "-")
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = 1000  # one line per table row, for programs that read the output
    return console


def require_writable(*targets: Path | None) -> None:
    """Raise InputError if a target cannot be written. A target of None is skipped."""
    for target in targets:
        if target is not None and (
            target.is_dir() or not os.access(target.expanduser().parent, os.W_OK)
        ):
            raise InputError(f"'{target}' cannot be written. Choose another file.")
