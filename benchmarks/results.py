"""`python -m benchmarks.results`: docs/results.md from the JSON of the runs under docs/benchmarks.

A run's JSON has the tables that the benchmark printed. Nothing is typed by hand: what a run did not measure is not on
the page.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

DOCS = Path(__file__).parents[1] / "docs"
Result = Mapping[str, Any]

HEAD = """# Results

Made by `make results` from the files in [benchmarks](benchmarks), each written by `ragfuse bench ... --json`,
`ragfuse calibrate --json` or `python -m benchmarks.peers --json` unless a note says otherwise.
What the columns mean: [quality.md](quality.md).
Times are CPU time unless said, and full prefill's is measured beside each.
"""

TITLES = MappingProxyType(
    {
        "quality": "Quality",
        "calibrate": "Calibration",
        "codec": "Levels of KV",
        "stream": "KV over a line, under a deadline",
        "conversation": "A conversation that grows",
        "throughput": "A server under load",
        "sessions": "Conversations on one server, simulated",
        "modules": "Prompts over modules",
        "peers": "Beside what people use today",
        "engines": "Whole servers: vLLM, ragfuse, both",
        "ray": "Several processes, with Ray",
        "adapt": "Adapters that encode chunks",
        "prefix": "Prefix caching",
        "matching": "Known passages, altered",
        "dropin": "The model swapped in a chain",
        "ttft": "Time to first token, random weights",
        "kernels": "Operations of a prefill",
        "decode": "Decoding one answer",
        "load": "Reading ahead",
        "controller": "The loading controller",
    }
)
"""The headings of the page, by benchmark; `calibrate` and `adapt` are ragfuse's own commands."""


def page(folder: Path) -> str:
    """Return the whole page from all runs in a folder."""
    runs = {path.name: json.loads(path.read_text("utf-8")) for path in sorted(folder.glob("*.json"))}
    parts = [HEAD]
    for benchmark, title in TITLES.items():
        mine = {name: run for name, run in runs.items() if _benchmark(run) == benchmark}
        if mine:
            parts.append(f"## {title}\n")
        for name, run in mine.items():
            parts.append("\n".join([*_tables(run), *_picture(folder, name), _where(name, run), ""]))
    return "\n".join(parts).rstrip() + "\n"


def _benchmark(run: Result) -> str:
    if "benchmark" in run:
        return str(run["benchmark"])
    return "adapt" if "evaluations" in run else "calibrate"


def _tables(run: Result) -> Iterator[str]:
    if "evaluations" in run:
        kl = ", ".join(f"{each['kl']:.3f} ({each['step']})" for each in run["evaluations"])
        yield f"{run['steps']} steps in {run['seconds'] / 60:.0f} minutes. KL by step: {kl}. With the adapter:"
        yield ""
    if "benchmark" not in run:
        yield from _calibration(run.get("calibration", run))
    for each in run.get("tables", ()):
        if each["title"]:
            yield each["title"]
            yield ""
        if each["columns"]:
            yield from _table(each["columns"], each["rows"])
            yield ""


def _calibration(run: Result) -> Iterator[str]:
    yield f"{run['advice']} {run['questions']} questions, {run['seconds']:.0f} s."
    yield ""
    columns = ("policy", "ratio", "KL of reuse's", "95%", "top-1", "TTFT", "safe")
    rows = [
        [
            each["policy"],
            f"{each['ratio']:.0%}",
            f"{each['kl_over_reuse']:.3f}",
            f"{each['low']:.3f}..{each['high']:.3f}",
            f"{each['top1']:.3f}",
            f"{each['ttft_x']:.1f}x",
            "yes" if each["is_safe"] else "",
        ]
        for each in run["tried"]
    ]
    yield from _table(columns, rows)
    yield ""


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield "| " + " | ".join(columns) + " |"
    yield "| --- |" + " ---: |" * (len(columns) - 1)
    for row in rows:
        yield "| " + " | ".join(row) + " |"


def _picture(folder: Path, name: str) -> Iterator[str]:
    """Yield the picture that lies beside a run under its name."""
    beside = Path(name).with_suffix(".png")
    if (folder / beside).exists():
        yield f"![{beside.stem}](benchmarks/{beside})"
        yield ""


def _where(name: str, run: Result) -> str:
    where, given = run.get("machine", {}), {**run.get("options", {}), **run}
    dtype = f" in {given['dtype']}" if "dtype" in given else ""
    versions = run.get("versions", {})
    device = where.get("gpu") or where.get("cpu", "")
    said = [
        f"`{given['model']}`{dtype}" if given.get("model") else "",
        f"chunks of up to {given['chunk_tokens']} tokens" if given.get("chunk_tokens") else "",
        f"{device}, {run['threads']} thread{'s' * (run['threads'] > 1)}" if "threads" in run else device,
        f"torch {versions['torch']}, transformers {versions['transformers']}" if versions else "",
        "allocator tuned" if run.get("malloc", {}).get("tuned") else "allocator untuned",
        str(run.get("date", ""))[:10],
        run.get("note", ""),
    ]
    return f"[{name}](benchmarks/{name}): " + "; ".join(part for part in said if part) + "."


if __name__ == "__main__":
    (DOCS / "results.md").write_text(page(DOCS / "benchmarks"), "utf-8")
