"""`ragfuse bench`: the benchmarks of speed and quality, and options that several share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from ragfuse.cli.options import (
    Device,
    Dtype,
    Json,
    Model,
    console_for,
    settings_of,
    write_json,
)
from ragfuse.errors import InputError, SettingsError
from ragfuse.settings import Settings

bench = typer.Typer(no_args_is_help=True, help="Measure. All subcommands share one runner: interleaved rounds.")

# What the benchmarks of speed have in common: they name a shape, and have defaults of their own.
Shape = Annotated[str, typer.Option(help="q05, l1b or l8b (random weights), an embedded name, id or folder.")]
BenchDtype = Annotated[str, typer.Option(help="float32, bfloat16 or float16.")]
BenchDevice = Annotated[str, typer.Option(help="cpu or cuda.")]
ChunkTokens = Annotated[int, typer.Option(help="Tokens of a chunk.")]
Share = Annotated[float, typer.Option(help="Share of reused context rows to recompute.")]
PolicyName = Annotated[str, typer.Option(help="Selection policy.")]
Threads = Annotated[int, typer.Option(help="Threads of torch.")]
Rounds = Annotated[int, typer.Option(help="Interleaved rounds.")]

BY_DEFAULT = "full,prefix,none,auto"
CONTEXT_TOKENS, QUICK_TOKENS = 6000, 1000


@bench.command("ttft")
def ttft(
    model: Shape = "q05",
    dtype: BenchDtype = "bfloat16",
    device: BenchDevice = "cpu",
    chunks: Annotated[str, typer.Option(help="Chunks of a prompt; several, as in 2,4,6, show growth.")] = "6",
    chunk_tokens: ChunkTokens = 512,
    question_tokens: Annotated[int, typer.Option(help="Tokens of the question.")] = 32,
    ratio: Share = 0.15,
    policy: PolicyName = "hkvd",
    lego_tokens: Annotated[int, typer.Option(help="First tokens of each chunk, for --policy lego.")] = 0,
    kv: Annotated[str, typer.Option(help="Where the KV lies: memory, pinned, gpu or disk.")] = "memory",
    threads: Threads = 1,
    rounds: Rounds = 3,
    plot: Annotated[Path | None, typer.Option(help="Draw speedup against context tokens here (PNG).")] = None,
    json: Json = None,
) -> None:
    """Time to the first token: full prefill, ragfuse, plain reuse and prefix caching, in interleaved rounds."""
    from ragfuse_bench.ttft import TtftOptions, run_ttft

    from ragfuse.calibration.runner import tune_malloc

    console = console_for(json)
    options: dict[str, Any] = {"model": model, "dtype": dtype, "device": device, "kv": kv, "policy": policy}
    options |= {"chunk_tokens": chunk_tokens, "question_tokens": question_tokens, "ratio": ratio, "plot": plot}
    options |= {"lego_tokens": lego_tokens, "threads": threads, "rounds": rounds, "chunks": _counts(chunks)}
    chosen = TtftOptions(**options)
    tune_malloc(console)
    write_json(run_ttft(chosen, console), json)


@bench.command("load")
def load(
    model: Shape = "q05",
    dtype: BenchDtype = "bfloat16",
    device: BenchDevice = "cpu",
    chunks: Annotated[int, typer.Option(help="Chunks of the prompt.")] = 6,
    chunk_tokens: ChunkTokens = 512,
    ratio: Share = 0.15,
    policy: PolicyName = "hkvd",
    mbps: Annotated[str, typer.Option(help="Speeds of the slow tier, megabytes a second.")] = "50,100,200,500",
    threads: Threads = 1,
    rounds: Rounds = 3,
    plot: Annotated[Path | None, typer.Option(help="Draw the time against the tier's speed here (PNG).")] = None,
    json: Json = None,
) -> None:
    """Time to the first token from a slow tier: read ahead by a thread, read when used, and from memory."""
    from ragfuse_bench.load import LoadOptions, run_load

    from ragfuse.calibration.runner import tune_malloc

    console = console_for(json)
    options: dict[str, Any] = {"model": model, "dtype": dtype, "device": device, "policy": policy, "plot": plot}
    options |= {"chunks": chunks, "chunk_tokens": chunk_tokens, "ratio": ratio, "threads": threads, "rounds": rounds}
    chosen = LoadOptions(**options, mbps=numbers(mbps, "--mbps"))
    tune_malloc(console)
    write_json(run_load(chosen, console), json)


@bench.command("controller")
def controller(
    model: Shape = "q05",
    dtype: BenchDtype = "bfloat16",
    device: BenchDevice = "cpu",
    mbps: Annotated[str, typer.Option(help="Speeds of the tiers, megabytes a second.")] = "30,100,300",
    plans: Annotated[int, typer.Option(help="Plans whose time is predicted and measured.")] = 60,
    threads: Threads = 1,
    rounds: Annotated[int, typer.Option(help="Times that each is measured; the median counts.")] = 3,
    plot: Annotated[Path | None, typer.Option(help="Draw predictions and ratios here (PNG).")] = None,
    json: Json = None,
) -> None:
    """How well the loading controller foresees the time to the first token, and how well it chooses the ratio."""
    from ragfuse_bench.controller import ControllerOptions, run_controller

    from ragfuse.calibration.runner import tune_malloc

    console = console_for(json)
    options: dict[str, Any] = {"model": model, "dtype": dtype, "device": device, "plans": plans, "plot": plot}
    chosen = ControllerOptions(**options, threads=threads, rounds=rounds, mbps=numbers(mbps, "--mbps"))
    tune_malloc(console)
    write_json(run_controller(chosen, console), json)


@bench.command("store")
def store(
    chunks: Annotated[int, typer.Option(help="Entries written to and read from each tier.")] = 48,
    tier: Annotated[
        list[str] | None, typer.Option(help="A further tier, as in redis:// or s3://. Repeat for more.")
    ] = None,
    rows: Annotated[int, typer.Option(help="Entries in the index among which is looked up.")] = 1_000_000,
    rounds: Rounds = 3,
    requests: Annotated[int, typer.Option(help="Rounds of requests, with saving and without.")] = 8,
    threads: Threads = 1,
    json: Json = None,
) -> None:
    """Bytes a second of each tier beside its device, look-ups among a million entries, what saving costs a request."""
    from ragfuse_bench.store import StoreOptions, run_store

    from ragfuse.calibration.runner import tune_malloc

    console = console_for(json)
    sizes: dict[str, Any] = {"chunks": chunks, "index_rows": rows, "rounds": rounds, "requests": requests}
    chosen = StoreOptions(**sizes, threads=threads, urls=tuple(tier or ()))
    tune_malloc(console)
    write_json(run_store(chosen, console), json)


@bench.command("dropin")
def dropin(
    model: Annotated[str, typer.Option(help="Embedded name, Hugging Face id or folder; the same weights for both.")] = (
        "smollm2-135m-reader"
    ),
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16; auto: what this CPU is quick in.")] = "auto",
    questions: Annotated[int, typer.Option(help="Questions, of the demo's on one article.")] = 4,
    splits: Annotated[int, typer.Option(help="Chunks of the article that are retrieved from.")] = 24,
    chunk_tokens: ChunkTokens = 512,
    threads: Threads = 1,
    rounds: Rounds = 3,
    swap: Annotated[bool, typer.Option(help="Compare with Hugging Face's model classes.")] = True,
    doors: Annotated[
        str,
        typer.Option(help="Ways to ask with nothing indexed: chain,lcel,agent,compact,refine,tree,chat,server; none."),
    ] = "all",
    asked: Annotated[int, typer.Option(help="Questions that are asked twice through each of these, 1 to 12.")] = 12,
    plot: Annotated[Path | None, typer.Option(help="Draw times, and what is reused when, here (PNG).")] = None,
    json: Json = None,
) -> None:
    """The model swapped in chains and query engines, beside Hugging Face's, and what is reused with nothing indexed."""
    console = console_for(json)
    os.environ["OMP_NUM_THREADS"] = str(threads)  # both answer in threads of their own, which start with what this says
    try:
        from ragfuse_bench.dropin import DropinOptions, require, run_dropin
        from ragfuse_bench.unprepared import doors_named

        from ragfuse.calibration.plots import require_plotting
        from ragfuse.calibration.runner import tune_malloc
    except ImportError as error:
        raise InputError(
            f"This needs more packages ({error.name}): pip install 'ragfuse-kv[demo,llama-index]'"
        ) from error
    sizes: dict[str, Any] = {"questions": questions, "splits": splits, "chunk_tokens": chunk_tokens, "rounds": rounds}
    more: dict[str, Any] = {"swap": swap, "doors": doors_named(doors), "asked": asked}
    chosen = DropinOptions(model=model, dtype=dtype, **sizes, **more, threads=threads, plot=plot)
    require(chosen)
    if plot is not None:
        require_plotting()
    tune_malloc(console)
    write_json(run_dropin(chosen, console), json)


@bench.command("quality")
def quality(
    model: Model = None,
    dtype: Dtype = None,
    device: Device = None,
    data: Annotated[
        list[str] | None, typer.Option(help="Data set: held-out or demo, which come along, or a file. Repeat for more.")
    ] = None,
    methods: Annotated[
        str,
        typer.Option(
            help="full; prefix (caching); none (plain reuse); auto (the default); mapreduce, maprerank (LangChain's); "
            "wrongmask (an ablation); oracle (knows full prefill); a policy. @alone, @filler: what chunks saw."
        ),
    ] = BY_DEFAULT,
    ratios: Annotated[str, typer.Option(help="Ratios of the policies among the methods.")] = "0.15",
    limit: Annotated[int, typer.Option(help="Questions of each set, drawn from a seed; 0: all.")] = 0,
    chunk_tokens: Annotated[int, typer.Option(help="Pack passages into chunks of up to so many; 0: as they are.")] = 0,
    context_tokens: Annotated[int, typer.Option(help="Most tokens of passages; longer ones are cut evenly.")] = 2600,
    passages: Annotated[int, typer.Option(min=1, help="Passages of a SQuAD or demo prompt.")] = 6,
    answers: Annotated[bool, typer.Option(help="Write each method's own answer; without, KL and top-1 only.")] = True,
    quick: Annotated[bool, typer.Option(help="64 held-out questions by full, none and auto.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw KL against speed here (PNG).")] = None,
    json: Json = None,
) -> None:
    """Answers and next-token distributions of every method on the same prompts, beside full prefill's."""
    from ragfuse_bench.quality.report import QUICK, QUICK_METHODS, run_quality
    from ragfuse_bench.quality.run import Plan

    from ragfuse.calibration.plots import NO_FRONTIER, plot_frontier

    if quick and (data or limit or methods != BY_DEFAULT):
        raise InputError("--quick has its own questions and methods: leave out --data, --limit and --methods.")
    if not quick and not data:
        raise InputError("Name a data set: --data held-out, --data demo or --data FILE; or say --quick.")
    if plot is not None and not quick and "none" not in methods.split(","):
        raise InputError(NO_FRONTIER)
    console, settings = begun(json, plot, model=model, dtype=dtype, device=device)
    rows = _rows_beside(json)
    wanted = Plan(
        sets=tuple(data or ()),
        limit=limit,
        answers=answers,
        chunk_tokens=chunk_tokens,
        context_tokens=context_tokens,
        passages=passages,
        rows=rows,
    )
    plan = replace(QUICK, rows=rows) if quick else wanted
    names = QUICK_METHODS if quick else methods.split(",")
    with _kept(rows):
        result = run_quality(settings, plan, names, _shares(ratios), console)
    write_json(result, json)
    if plot is not None:
        plot_frontier(result, plot)


@bench.command("paper")
def paper(
    figure: Annotated[
        str,
        typer.Argument(
            help="fig6, 7, 8, 10 or 12 to 17 of CacheBlend, as in fig12; cg-fig3, 4, 5, 9, 11, 12, 13, 14 or 15 of "
            "CacheGen; as-fig13, 14, 17 to 25 or as-table1 of AttentionStore, which is simulated up to 24; pc-fig3, 4, "
            "5, pc-table1 or 2 of Prompt Cache."
        ),
    ],
    model: Model = None,
    dtype: Dtype = None,
    device: Device = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            help="Data set as for `bench quality`; held-out unless given. Repeat for more. CacheGen, AttentionStore, "
            "Prompt Cache: a folder of them. What `bench codec` wrote will do for cg-fig9 and 15, what `bench "
            "throughput` wrote for fig14; cg-fig13: what `bench stream` wrote."
        ),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(help="Questions of each set, 60 unless given; CacheGen: contexts, 4. 0: all.")
    ] = None,
    context_tokens: Annotated[int, typer.Option(help="CacheGen: tokens of a context.")] = CONTEXT_TOKENS,
    keep_kv: Annotated[
        Path | None, typer.Option(help="CacheGen: a folder for the contexts' KV, which the next figure takes from it.")
    ] = None,
    chunk_tokens: Annotated[int, typer.Option(help="Pack passages into chunks of up to so many; 0: as they are.")] = 0,
    quick: Annotated[
        bool, typer.Option(help="Eight questions, or one round of the shorter prompts: to see it work.")
    ] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw the figure here (PNG).")] = None,
    json: Json = None,
) -> None:
    """A figure of the CacheBlend, CacheGen, AttentionStore or Prompt Cache paper, measured beside what that says."""
    from ragfuse_bench.figure import Wanted
    from ragfuse_bench.paper import run_paper

    console, settings = begun(json, plot, model=model, dtype=dtype, device=device)
    rows = _rows_beside(json)
    sets = tuple(data or ("held-out",))
    usual, least = (4, 1) if figure.startswith("cg-") else (60, 8)
    most = least if quick else usual if limit is None else limit
    tokens = min(context_tokens, QUICK_TOKENS) if quick else context_tokens
    wanted = Wanted(settings, sets, most, chunk_tokens, rows, console, quick, tokens, keep_kv)
    with _kept(rows):
        result = run_paper(figure, wanted, plot)
    write_json(result, json)


def begun(json: Path | None, plot: Path | None, **named: Any) -> tuple[Console, Settings]:
    """Where a benchmark speaks and what it goes by, in a process with a tuned allocator; named: model, dtype, device.

    SettingsError where a picture is wanted and none can be drawn.
    """
    from ragfuse.calibration.plots import require_plotting
    from ragfuse.calibration.runner import tune_malloc
    from ragfuse.models.dtypes import settled

    console, settings = console_for(json), settled(settings_of(**named))
    if plot is not None:
        require_plotting()
    tune_malloc(console)
    return console, settings


@contextmanager
def _kept(rows: Path | None) -> Iterator[None]:
    """Ctrl-C says whether what was measured so far is kept."""
    try:
        yield
    except KeyboardInterrupt as stop:
        kept = rows is not None and rows.is_file()
        said = f"What was measured is in {rows}, and the same command goes on from there." if kept else ""
        raise KeyboardInterrupt(*filter(None, [said])) from stop


def _rows_beside(result: Path | None) -> Path | None:
    """Where measurements are kept as they come: beside the result, if that is a file."""
    return result.with_suffix(".rows.jsonl") if result is not None and str(result) != "-" else None


def _shares(text: str) -> tuple[float, ...]:
    """0.05,0.15 as shares."""
    shares = numbers(text, "--ratios")
    if not all(0 <= share <= 1 for share in shares):
        raise SettingsError(f"--ratios is '{text}'; wanted shares from 0 to 1.")
    return shares


def _counts(text: str) -> tuple[int, ...]:
    """6 or 2,4,6 as numbers."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise SettingsError(f"--chunks is '{text}'; wanted a number, or several as in 2,4,6.") from error


def numbers(text: str, option: str) -> tuple[float, ...]:
    """0.05,0.15 as numbers."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise SettingsError(f"{option} is '{text}'; wanted a number, or several as in 0.05,0.15.") from error
