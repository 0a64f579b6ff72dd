"""Benchmark options: each is declared once, and the command line gives what its text says."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, is_dataclass
from typing import Annotated, Any, get_type_hints

import pytest
import typer.main
from ragfuse_bench import options
from ragfuse_bench.cli import bench
from ragfuse_bench.cli.parameters import with_options
from ragfuse_bench.option_types import FromText, integers
from typer.testing import CliRunner

from ragfuse.cli.main import app as everything
from ragfuse.errors import SettingsError
from ragfuse.settings import Settings

GIVEN: list[object] = []


@dataclass(frozen=True)
class Toy:
    """Options of every kind."""

    numbers: Annotated[tuple[int, ...], typer.Option(help="Numbers."), FromText(integers)] = (1, 2)
    urls: Annotated[tuple[str, ...], typer.Option("--url", help="Repeat for more.")] = ()
    chunk_tokens: Annotated[int, typer.Option(min=1, help="Tokens.")] = 5
    inner: str = "not on the command line"

    def __post_init__(self) -> None:
        if self.chunk_tokens == 13:
            raise SettingsError("Not 13.")


@pytest.fixture
def app() -> typer.Typer:
    def toy(options: Toy, loud: bool = False) -> None:
        """A toy."""
        GIVEN.append((options, loud))

    toy.__annotations__ = {"options": Toy, "loud": bool, "return": None}
    app = typer.Typer()
    app.command()(with_options(toy))
    GIVEN.clear()
    return app


def test_a_field_with_an_option_is_one_of_the_command(app: typer.Typer) -> None:
    assert CliRunner().invoke(app, []).exit_code == 0
    line = ["--numbers", "3,4,5", "--url", "a", "--url", "b", "--chunk-tokens", "7", "--loud"]
    assert CliRunner().invoke(app, line).exit_code == 0
    assert [(Toy(), False), (Toy((3, 4, 5), ("a", "b"), 7), True)] == GIVEN


@pytest.mark.parametrize(
    ("line", "message"),
    [(["--numbers", "x"], "--numbers is 'x'; wanted whole"), (["--chunk-tokens", "13"], "Not 13.")],
)
def test_what_the_dataclass_refuses_the_command_refuses(
    app: typer.Typer, line: list[str], message: str
) -> None:
    error = CliRunner().invoke(app, line).exception
    assert isinstance(error, SettingsError)
    assert message in str(error)


def test_every_dataclass_of_options_belongs_to_one_command() -> None:
    taken = [
        hint
        for command in bench.registered_commands
        for hint in get_type_hints(inspect.unwrap(command.callback or bench)).values()
        if is_dataclass(hint)
    ]
    declared = {each for name, each in vars(options).items() if name.endswith("Options")}
    assert sorted(map(str, taken)) == sorted(map(str, declared))
    assert len(bench.registered_commands) == len(declared)


def whole_numbers(command: Any, name: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """All options with a whole number of a command and those below it."""
    for below, each in getattr(command, "commands", {}).items():
        yield from whole_numbers(each, (*name, below))
    for each in command.params:
        if each.type_descriptor.annotation is int and not each.is_flag:
            yield " ".join((*name, each.opts[0])), each


def test_every_whole_number_has_a_least_one() -> None:
    found = dict(whole_numbers(typer.main.get_command(everything)))
    bounded = [
        name
        for name, field in Settings.model_fields.items()
        if any(hasattr(m, "ge") for m in field.metadata)
    ]
    assert len(found) > 60
    assert [
        name for name, each in found.items() if each.min is None and each.name not in bounded
    ] == []


def test_help_of_a_benchmark_needs_no_torch() -> None:
    code = "import sys, ragfuse_bench.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
