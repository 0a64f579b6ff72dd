"""`ragfuse demo` and `ragfuse bench`: what ragfuse is worth, measured here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from ragfuse.cli.options import Device, Dtype, Json, Model, Policy, Ratio, console_for, settings_of, write_json
from ragfuse.errors import InputError, SettingsError

bench = typer.Typer(no_args_is_help=True, help="Measure. All subcommands share one runner: interleaved rounds.")


DEMO_MEMORY = 3 << 30
"""Bytes of KV that the demo keeps in memory: all that stands further down in a prompt; the rest is read from disk."""


def demo(
    model: Model = None,
    dtype: Dtype = None,
    device: Device = None,
    policy: Policy = None,
    ratio: Ratio = None,
    out: Annotated[Path, typer.Option(help="Report as JSON; the picture lies beside it.")] = Path("demo-report.json"),
) -> None:
    """Ask real questions over real documents through a LangChain chain: full prefill and ragfuse side by side."""
    try:
        from ragfuse.demo.picture import draw
        from ragfuse.demo.run import run
        from ragfuse.engine import Engine
    except ImportError as error:
        raise InputError(f"The demo needs more packages ({error.name}): pip install 'ragfuse-kv[demo]'") from error
    base = settings_of(model=model, dtype=dtype, device=device, policy=policy, ratio=ratio)
    memory = base.memory_bytes if "memory_bytes" in base.model_fields_set else DEMO_MEMORY
    settings = base.model_copy(update={"store": base.home / "demo-store", "memory_bytes": memory})
    console = Console()
    with Engine(settings) as engine:
        report = run(engine, console)
    write_json(report, out)
    draw(report, out.with_suffix(".png"))
    n = len(report["questions"])
    for line in (
        f"First token [bold]{report['mean_speedup']:.1f}x[/] sooner on {n} questions, "
        f"[bold]{report['long_speedup']:.1f}x[/] on the long prompt.",
        f"Right answers: full prefill {report['right_full']}, ragfuse {report['right_fused']} of {n}.",
        f"KL to full prefill: {report['kl_over_reuse']:.2f} of plain reuse's.",
        f"Written: {out}, {out.with_suffix('.png')}",
    ):
        console.print(line, highlight=False)


@bench.command("ttft")
def ttft(
    model: Annotated[
        str, typer.Option(help="q05, l1b or l8b (random weights), an embedded name, id or folder.")
    ] = "q05",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "bfloat16",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    chunks: Annotated[str, typer.Option(help="Chunks of a prompt; several, as in 2,4,6, show growth.")] = "6",
    chunk_tokens: Annotated[int, typer.Option(help="Tokens of a chunk.")] = 512,
    question_tokens: Annotated[int, typer.Option(help="Tokens of the question.")] = 32,
    ratio: Annotated[float, typer.Option(help="Share of reused context rows computed again.")] = 0.15,
    policy: Annotated[str, typer.Option(help="Selection policy.")] = "hkvd",
    lego_tokens: Annotated[int, typer.Option(help="First tokens of each chunk, for --policy lego.")] = 0,
    kv: Annotated[str, typer.Option(help="Where the KV lies: memory, pinned, gpu or disk.")] = "memory",
    threads: Annotated[int, typer.Option(help="Threads of torch.")] = 1,
    rounds: Annotated[int, typer.Option(help="Interleaved rounds.")] = 3,
    plot: Annotated[Path | None, typer.Option(help="Draw speedup against context tokens here (PNG).")] = None,
    json: Json = None,
) -> None:
    """Time to the first token: full prefill, ragfuse, plain reuse and prefix caching, in interleaved rounds."""
    from ragfuse.bench.runner import tune_malloc
    from ragfuse.bench.ttft import TtftOptions, run_ttft

    console = console_for(json)
    options: dict[str, Any] = {"model": model, "dtype": dtype, "device": device, "kv": kv, "policy": policy}
    options |= {"chunk_tokens": chunk_tokens, "question_tokens": question_tokens, "ratio": ratio, "plot": plot}
    options |= {"lego_tokens": lego_tokens, "threads": threads, "rounds": rounds, "chunks": _counts(chunks)}
    chosen = TtftOptions(**options)
    tune_malloc(console)
    write_json(run_ttft(chosen, console), json)


def _counts(text: str) -> tuple[int, ...]:
    """6 or 2,4,6 as numbers."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise SettingsError(f"--chunks is '{text}'; wanted a number, or several as in 2,4,6.") from error
