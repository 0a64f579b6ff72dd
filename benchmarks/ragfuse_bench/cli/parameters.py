"""Command line parameters made from the fields of a dataclass of `ragfuse_bench.options`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import MISSING, Field, fields, is_dataclass
from types import GenericAlias
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from ragfuse_bench.option_types import FromText
from typer.models import OptionInfo


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Let a command of typer take dataclasses of options.

    Each parameter whose type is a dataclass is replaced by one parameter for each of its fields
    that has a `typer.Option`. A field of type `tuple[str, ...]` is an option that may be repeated,
    one with `FromText` is read from one text. The other fields keep their defaults.

    Returns:
        The function to hand to `app.command(name)`; it makes the dataclasses and calls `command`
        with them.
    """
    hints = get_type_hints(command, include_extras=True)
    parameters: list[inspect.Parameter] = []
    made: dict[str, tuple[type[Any], dict[str, Any]]] = {}
    for parameter in inspect.signature(command).parameters.values():
        kind = hints[parameter.name]
        if is_dataclass(kind) and isinstance(kind, type):
            types = get_type_hints(kind, include_extras=True)
            shown = {
                each.name: types[each.name] for each in fields(kind) if _option(types[each.name])
            }
            made[parameter.name] = kind, shown
            parameters += [
                _parameter(each, shown[each.name]) for each in fields(kind) if each.name in shown
            ]
        else:
            parameters.append(
                parameter.replace(annotation=kind, kind=inspect.Parameter.KEYWORD_ONLY)
            )

    @functools.wraps(command)
    def run(**values: Any) -> None:
        for name, (kind, types) in made.items():
            values[name] = kind(
                **{each: _value(each, values.pop(each), types[each]) for each in types}
            )
        command(**values)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    return run


def _option(hint: Any) -> OptionInfo | None:
    """The `typer.Option` of a field's type; None where it has none."""
    return next(
        (each for each in getattr(hint, "__metadata__", ()) if isinstance(each, OptionInfo)), None
    )


def _from_text(hint: Any) -> FromText | None:
    return next((each for each in hint.__metadata__ if isinstance(each, FromText)), None)


def _parameter(of: Field[Any], hint: Any) -> inspect.Parameter:
    default: Any = of.default_factory() if of.default_factory is not MISSING else of.default
    kind: Any = hint.__origin__
    text = _from_text(hint)
    if text is not None:
        kind = str
        default = ",".join(
            f"{part:g}" if isinstance(part, float) else str(part) for part in default
        )
    elif get_origin(kind) is tuple:
        kind, default = GenericAlias(list, get_args(kind)[:1]), list(default)
    annotation = Annotated[kind, _option(hint)]
    return inspect.Parameter(
        of.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )


def _value(name: str, given: Any, hint: Any) -> Any:
    text = _from_text(hint)
    if text is not None:
        return text.parse(given, _flag(name, hint))
    return tuple(given or ()) if get_origin(hint.__origin__) is tuple else given


def _flag(name: str, hint: Any) -> str:
    """The option's name as a user types it."""
    option = _option(hint)
    return option.param_decls[0] if option and option.param_decls else f"--{name.replace('_', '-')}"
