"""`python -m benchmarks.peers`: everyone answers the same prompts in turn; a table, and JSON for the results page."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from ragfuse_bench.presets import bench_model
from rich.console import Console
from rich.table import Table

from benchmarks.peers.peers import OFFERS, PLAIN, Offer, Peer
from benchmarks.peers.prompts import recurring
from ragfuse.calibration.case import Case
from ragfuse.calibration.methods import Lab, default_method
from ragfuse.calibration.runner import Runner, Sample, circumstances, thread_count, tune_malloc
from ragfuse.cli.options import write_json
from ragfuse.models import resolve_llm
from ragfuse.settings import Settings
from ragfuse.telemetry.progress import progress

WARM_UP = 2
"""Prompts that everyone answers before it counts."""


def main(
    chunk_tokens: Annotated[int, typer.Option(min=16, help="Tokens of a chunk, six in a prompt.")] = 400,
    pool: Annotated[int, typer.Option(min=2, help="Chunks that recur.")] = 12,
    rounds: Annotated[int, typer.Option(min=1, help="Prompts, each answered by everyone.")] = 12,
    threads: Annotated[int, typer.Option(min=1, help="Threads of everyone.")] = 1,
    json: Annotated[Path | None, typer.Option(help="Where to write the result.")] = None,
    model: Annotated[str, typer.Option(help="Embedded name or folder.")] = PLAIN,
) -> None:
    """Seconds to the first token over recurring chunks in changing order."""
    console = Console(stderr=True)
    tune_malloc(console)
    with thread_count(threads):
        result = run(model, chunk_tokens, pool, rounds, threads, console)
    show(result, Console())
    if json is not None:
        write_json(result, json)


def run(model: str, chunk_tokens: int, pool: int, rounds: int, threads: int, console: Console) -> dict[str, Any]:
    """The result as plain JSON types."""
    settings = Settings()
    loaded, path = bench_model(model, "bfloat16", "cpu", settings.home), resolve_llm(model, settings.home)
    lab, runner = Lab(loaded), Runner(1, torch.device("cpu"), console)
    absent = [offer.absent(model) for offer in OFFERS if offer.absent(model)]
    for sentence in absent:
        console.print(sentence, highlight=False)
    try:
        cases = recurring(loaded, chunk_tokens, pool, rounds + 2)
        for case in cases:
            lab.hold(case, [default_method(loaded)])
        peers = {offer: offer.make(loaded, lab, path, threads) for offer in OFFERS if not offer.absent(model)}
        return {
            **_measured(peers, cases, lab, runner),
            "absent": absent,
            "model": model,
            "chunk_tokens": chunk_tokens,
            "pool": len({chunk for case in cases for chunk in case.chunks}),
            **circumstances(loaded.device, threads),
        }
    finally:
        lab.close()


def _measured(peers: dict[Offer, Peer], cases: list[Case], lab: Lab, runner: Runner) -> dict[str, Any]:
    """Everyone on every case in turn; the first two cases warm up and are not counted."""
    samples: dict[Offer, list[Sample]] = {offer: [] for offer in peers}
    agreed = dict.fromkeys(peers, 0)
    tokens, said = [], {}
    with progress(runner.console) as bar:
        task = bar.add_task("prompts", total=len(cases) * len(peers))
        for index, case in enumerate(cases):
            ids = lab.prompt(case).token_ids
            for offer, peer in peers.items():
                bar.update(task, description=f"prompt {index}: {offer.name}")
                sample = runner.once(lambda: said.update(first=peer.first(case, ids)))  # noqa: B023 - called at once
                if offer.name == "hf":
                    wanted = said["first"]
                if index >= WARM_UP:
                    samples[offer].append(sample)
                    agreed[offer] += said["first"] == wanted
                bar.advance(task)
            if index >= WARM_UP:
                tokens.append(len(ids))
    plain = next(each for offer, each in samples.items() if offer.name == "hf")
    return {
        "tokens": sum(tokens) / len(tokens),
        "n": len(tokens),
        "results": [
            {
                "peer": offer.name,
                "what": offer.what,
                "wall_s": median(sample.wall_s for sample in mine),
                "cpu_s": median(sample.cpu_s for sample in mine),
                "sooner": median(a.wall_s / b.wall_s for a, b in zip(plain, mine, strict=True)),
                "same_first_token": agreed[offer] / len(mine),
            }
            for offer, mine in samples.items()
        ],
    }


def show(result: dict[str, Any], console: Console) -> None:
    """One line for each."""
    table = Table(title=f"{result['model']}: {result['n']} prompts of {result['tokens']:,.0f} tokens", box=None)
    for name in ("", "first token", "CPU", "faster than hf", "same first token"):
        table.add_column(name, justify="left" if not name else "right")
    for each in result["results"]:
        table.add_row(
            f"{each['peer']} ({each['what']})",
            f"{each['wall_s'] * 1e3:.0f} ms",
            f"{each['cpu_s'] * 1e3:.0f} ms",
            f"{each['sooner']:.2f}x",
            f"{each['same_first_token']:.0%}",
        )
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
