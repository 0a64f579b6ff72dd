"""The page of results shows what the committed runs measured, and nothing else."""

import json
from pathlib import Path

from ragfuse_bench.cli.report import Report
from rich.table import Table

from benchmarks.results import DOCS, TITLES, page


def test_the_committed_page_is_made_from_the_committed_runs() -> None:
    assert (DOCS / "results.md").read_text("utf-8") == page(DOCS / "benchmarks"), (
        "Run make results."
    )


def test_every_committed_run_stands_on_the_page() -> None:
    text = page(DOCS / "benchmarks")
    for run in (DOCS / "benchmarks").glob("*.json"):
        assert f"[{run.stem}](benchmarks/{run.name})" in text


def test_a_run_s_tables_are_those_that_its_benchmark_printed(tmp_path: Path) -> None:
    report = Report("ttft", tmp_path / "run.json")
    table = Table("tokens", "[bold]ragfuse[/bold]", title="Seconds to the first token")
    table.add_row("1,024", "0.25")
    report.print("Loading ...")
    report.print(table)
    report.write({"model": "q05", "threads": 1})
    run = json.loads((tmp_path / "run.json").read_text("utf-8"))
    assert (run["benchmark"], run["model"]) == ("ttft", "q05")
    text = page(tmp_path)
    assert f"## {TITLES['ttft']}" in text
    assert "| tokens | ragfuse |\n| --- | ---: |\n| 1,024 | 0.25 |" in text
    assert "Loading" not in text
