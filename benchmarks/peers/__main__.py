"""`python -m benchmarks.peers`: everyone answers the same prompts in turn; a table, JSON for the
results.
"""

from __future__ import annotations

import multiprocessing
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch
import typer
from ragfuse_bench.cli.report import Report
from ragfuse_bench.rounds import thread_count
from rich.console import Console
from rich.table import Table

from benchmarks.models import MODELS
from benchmarks.peers.offers import DTYPE, OFFERS, Given
from benchmarks.peers.process import Peer, PeerError
from benchmarks.peers.prompts import Recurring, prompts
from benchmarks.peers.rounds import WARM_UP, YARDSTICK, Match
from benchmarks.peers.setup import found_llama, found_vllm
from benchmarks.peers.weights import bf16_gguf, own_gguf
from ragfuse.calibration.runner import circumstances, tune_malloc
from ragfuse.errors import InputError, RagFuseError
from ragfuse.models import resolve_llm
from ragfuse.settings import Settings

Found = TypeVar("Found")
WIDE = 10_000
"""Wider than any table."""
ROOM_TOKENS = 256
"""Beyond the longest prompt and its answer, for a peer that wants some of its own."""


def main(
    model: Annotated[
        str, typer.Option(help="Embedded name, folder, GGUF file, or a name of benchmarks.models.")
    ] = "smollm2-135m-reader",
    tokens: Annotated[
        list[int] | None, typer.Option(help="Tokens of a prompt; again for another length.")
    ] = None,
    rounds: Annotated[
        list[int] | None, typer.Option(help="Prompts of each length; one for all, or one for each.")
    ] = None,
    peer: Annotated[
        list[str] | None, typer.Option(help="Who takes part; default: all that are found.")
    ] = None,
    answer_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens of an answer, which are compared.")
    ] = 16,
    threads: Annotated[int, typer.Option(min=1, help="Threads of everyone.")] = 1,
    memory_gib: Annotated[
        int, typer.Option(min=1, help="GiB of KV that each may keep in memory.")
    ] = 2,
    vllm: Annotated[
        Path | None, typer.Option(help="The Python that has vLLM; default: as setup leaves it.")
    ] = None,
    llama: Annotated[
        Path | None, typer.Option(help="llama-server; default: as setup leaves it.")
    ] = None,
    start_s: Annotated[
        float, typer.Option(min=1, help="Seconds that a peer may take to start.")
    ] = 900,
    answer_s: Annotated[float, typer.Option(min=1, help="Seconds that an answer may take.")] = 300,
    json: Annotated[Path | None, typer.Option(help="Where to write the result.")] = None,
) -> None:
    """Measure seconds to the first token over recurring chunks in changing order, by everyone in
    turn.
    """
    console = Report("peers", json)
    tune_malloc(console)
    lengths, counts = tokens or [1100, 3000, 8000], rounds or [12, 8, 4]
    try:
        counts = counts * len(lengths) if len(counts) == 1 else counts
        if len(counts) != len(lengths):
            raise InputError(
                f"Wanted --rounds once, or once for each --tokens; found {len(counts)} for"
                f" {len(lengths)}."
            )
        unknown = [name for name in peer or () if name not in OFFERS]
        if unknown:
            raise InputError(f"No peer {', '.join(unknown)}. It is one of: {', '.join(OFFERS)}.")
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, _leave)
        with thread_count(threads), tempfile.TemporaryDirectory(prefix="ragfuse-peers-") as scratch:
            names = list(dict.fromkeys([YARDSTICK, *peer])) if peer else [*OFFERS]
            source = _source(model)
            asked = [
                (length, count + WARM_UP) for length, count in zip(lengths, counts, strict=True)
            ]
            work, ends, most = _apart(prompts, source, DTYPE, asked, answer_tokens, Settings().home)
            longest = max(len(ids) for each in work for ids in each.prompts)
            folder = Path(resolve_llm(source, Settings().home))
            given = Given(
                model=source,
                folder=folder,
                bf16_gguf=_bf16_maker(source, folder),
                vllm=found_vllm(vllm),
                llama=found_llama(llama),
                threads=threads,
                memory_bytes=memory_gib << 30,
                max_tokens=min(longest + answer_tokens + ROOM_TOKENS, most or sys.maxsize),
                start_s=start_s,
                answer_s=answer_s,
                scratch=Path(scratch),
            )
            result = run(given, work, answer_tokens, ends, names, console)
        result = {
            **result,
            "model": model,
            "dtype": DTYPE,
            "memory_gib": memory_gib,
            "answer_tokens": answer_tokens,
        }
        result |= circumstances(torch.device("cpu"), threads)
    except RagFuseError as error:
        console.print(str(error), style="red", highlight=False, markup=False, soft_wrap=True)
        raise typer.Exit(1) from error
    if json is not None:
        console.write(result)


def _leave(number: int, frame: object) -> None:
    sys.exit(128 + number)


def _source(model: str) -> str:
    """What ragfuse loads: the file of a model of `benchmarks.models`, else what was named."""
    known = next((each for each in MODELS if each.name == model), None)
    if known is None:
        return model
    if not known.path.is_file():
        raise InputError(
            f"Wanted {model} prepared, found no file. Run `python -m benchmarks.models {model}`"
            " first."
        )
    return str(known.path)


def _bf16_maker(source: str, folder: Path) -> partial[Path] | None:
    original = own_gguf(source)
    if original is None:
        return None
    return partial(_apart, bf16_gguf, original, folder, Settings().home / "peers" / "gguf")


def _apart(work: Callable[..., Found], *arguments: Any) -> Found:
    """Return what a function gives in a process of its own, whose memory is gone afterwards."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(work, *arguments).result()


def run(
    given: Given,
    work: Sequence[Recurring],
    answer_tokens: int,
    ends: frozenset[int],
    names: Sequence[str],
    console: Console,
) -> dict[str, Any]:
    """Start the peers of these names, measure them at every length, end them; the result as plain
    JSON types.

    Raises:
        PeerError: The yardstick, transformers, failed.
    """
    absent: list[str] = []
    with ExitStack() as stack:
        peers: dict[str, Peer] = {}
        for name in names:
            why = OFFERS[name].absent(given)
            try:
                if not why:
                    with console.status(f"starting {name}"):
                        peers[name] = OFFERS[name].start(given)
                    stack.callback(peers[name].process.close)
            except PeerError as error:
                if name == YARDSTICK:
                    raise
                why = str(error)
            if why:
                absent.append(f"{name} is left out: {why.rstrip('.')}.")
                console.print(absent[-1], highlight=False, markup=False, soft_wrap=True)
        match = Match(peers, answer_tokens, ends, console)
        rows: list[dict[str, Any]] = []
        for each in work:
            found = match.measure(each)
            show(Path(given.model).stem, found, console)
            rows += found
    return {"results": rows, "absent": [*absent, *match.failed]}


def show(model: str, rows: Sequence[Mapping[str, Any]], console: Console) -> None:
    """Print the table of a length, one line a peer."""
    shape = "{n} prompts of {tokens:,.0f} tokens, {chunks} chunks each".format_map(rows[0])
    table = Table(title=f"{model}: {shape}", box=None)
    speedups = ("speedup over transformers", "speedup of ragfuse")
    columns = ("", "first token", "CPU", *speedups, "same first token", "same answer")
    for name in (*columns, "memory", "disk"):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    for row in rows:
        ours = row["ragfuse_speedup"]
        table.add_row(
            row["peer"],
            f"{row['wall_s'] * 1e3:,.0f} ms",
            f"{row['cpu_s'] * 1e3:,.0f} ms",
            f"{row['speedup']:.2f}x",
            "" if ours is None else f"{ours:.2f}x",
            f"{row['same_first_token']:.0%}",
            f"{row['same_answer']:.0%}",
            f"{row['resident_bytes'] / 1e6:,.0f} MB",
            f"{row['disk_bytes'] / 1e6:,.0f} MB",
        )
    table.width = console.measure(table, options=console.options.update(width=WIDE)).maximum
    console.print(table, soft_wrap=True)


if __name__ == "__main__":
    typer.run(main)
