"""Benchmark options: each is declared once, and the command line gives what its text says."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import is_dataclass
from typing import Any, get_type_hints

import pytest
import typer.main
from ragfuse_bench import options
from ragfuse_bench.cli import bench
from typer.testing import CliRunner

from ragfuse.cli.main import app as everything
from ragfuse.settings import Settings


@pytest.mark.parametrize("option", ["--chunks", "--rounds"])
def test_what_an_option_cannot_be_is_refused_by_its_name(option: str) -> None:
    result = CliRunner().invoke(everything, ["bench", "ttft", option, "many"])
    assert result.exit_code
    assert option in f"{result.output}{result.exception}"


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
