"""Figure 13 says what a file of `ragfuse bench stream` says, and asks for one where there is none."""

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from ragfuse_bench.figure import Figure, Wanted, run_figure
from ragfuse_bench.paper import run_paper
from rich.console import Console

from ragfuse import Settings
from ragfuse.errors import InputError

MEASURED = {
    "deadlines": [
        {"deadline_s": 1.0, "violations": {"int8": 0.8, "adaptive": 0.05}, "f1": {"int8": 0.58, "adaptive": 0.57}},
        {"deadline_s": 2.0, "violations": {"int8": 0.4, "adaptive": 0.0}, "f1": {"int8": 0.58}},
    ]
}


def wanted(*sets: str) -> Wanted:
    return Wanted(Settings(model="m", dtype="float32"), sets, 1, 0, None, Console(file=io.StringIO(), width=200))


def test_every_deadline_and_way_is_a_row_with_its_f1(tmp_path: Path) -> None:
    path = tmp_path / "stream.json"
    path.write_text(json.dumps(MEASURED))
    result = run_paper("cg-fig13", wanted(str(path)), tmp_path / "late.png")
    assert result["rows"] == [
        {"deadline_s": 1.0, "method": "int8", "violations": 0.8, "f1": 0.58},
        {"deadline_s": 1.0, "method": "adaptive", "violations": 0.05, "f1": 0.57},
        {"deadline_s": 2.0, "method": "int8", "violations": 0.4, "f1": 0.58},
        {"deadline_s": 2.0, "method": "adaptive", "violations": 0.0, "f1": None},
    ]
    assert (tmp_path / "late.png").read_bytes().startswith(b"\x89PNG")


def test_without_a_file_the_command_that_makes_it_is_named() -> None:
    with pytest.raises(InputError, match="bench stream --json"):
        run_paper("cg-fig13", wanted("held-out"), None)


@pytest.mark.parametrize("text", ["no json", "[]", '{"deadlines": [{"deadline_s": 1}]}', '{"levels": []}'])
def test_another_file_is_refused_by_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(InputError, match=r"other\.json"):
        run_paper("cg-fig13", wanted(str(path)), None)


def test_a_table_wider_than_the_terminal_runs_on_and_loses_nothing(tmp_path: Path) -> None:
    path, said = tmp_path / "stream.json", io.StringIO()
    path.write_text(json.dumps(MEASURED))
    run_paper("cg-fig13", replace(wanted(str(path)), console=Console(file=said, width=20)), None)
    rows = [line.split() for line in said.getvalue().splitlines()]
    assert ["1.000", "int8", "0.800", "0.580"] in rows
    assert ["2.000", "adaptive", "0.000"] in rows


def test_what_was_measured_stands_above_the_picture_in_as_many_lines_as_it_takes(tmp_path: Path) -> None:
    from matplotlib.image import imread

    long = Figure(
        "a figure",
        "says",
        lambda wanted: [{"n": 1}],
        ("n",),
        lambda axes, rows: None,
        lambda wanted: "six words of no use " * 12,
    )
    run_figure("long", long, wanted("held-out"), tmp_path / "long.png")
    margins = imread(tmp_path / "long.png")[:80, [*range(10), *range(-10, 0)], :3]
    assert (margins == 1).all()
