"""`ragfuse bench quality` and `paper`: answers beside full prefill's, and the papers' figures."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from ragfuse_bench.cli.start import start
from ragfuse_bench.options import CONTEXT_TOKENS, QUICK_TOKENS, PackedTokens, QualityOptions

from ragfuse.cli.options import Device, Dtype, Json, Model, write_json
from ragfuse.errors import InputError


def quality(
    options: QualityOptions,
    model: Model = None,
    dtype: Dtype = None,
    device: Device = None,
    quick: Annotated[bool, typer.Option(help="64 held-out questions by full, none and auto.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw KL against speed to this file (PNG).")] = None,
    json: Json = None,
) -> None:
    """Answers and next-token distributions of every method on the same prompts, beside full prefill's."""
    from ragfuse_bench.quality.report import run_quality

    from ragfuse.calibration.plots import NO_FRONTIER, plot_frontier

    if quick:
        options = options.quick()
    if not options.sets:
        raise InputError("Name a data set: --data held-out, --data demo or --data FILE; or say --quick.")
    if plot is not None and "none" not in options.methods:
        raise InputError(NO_FRONTIER)
    console, settings = start(json, plot, model=model, dtype=dtype, device=device)
    rows = _rows_beside(json)
    with _kept(rows):
        result = run_quality(settings, options, console, rows)
    write_json(result, json)
    if plot is not None:
        plot_frontier(result, plot)


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
            "Prompt Cache: a folder of them. Or the result of `bench codec` (for cg-fig9 and 15), of `bench "
            "throughput` (for fig14) or of `bench stream` (for cg-fig13)."
        ),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(help="Questions of each set, 60 unless given; CacheGen: contexts, 4. 0: all.")
    ] = None,
    context_tokens: Annotated[int, typer.Option(help="CacheGen: tokens of a context.")] = CONTEXT_TOKENS,
    keep_kv: Annotated[
        Path | None, typer.Option(help="CacheGen: a folder for the contexts' KV, which the next figure takes from it.")
    ] = None,
    chunk_tokens: PackedTokens = 0,
    quick: Annotated[
        bool, typer.Option(help="Eight questions, or one round of the shorter prompts: to see it work.")
    ] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw the figure to this file (PNG).")] = None,
    json: Json = None,
) -> None:
    """A figure of the CacheBlend, CacheGen, AttentionStore or Prompt Cache paper, measured beside the paper's own."""
    from ragfuse_bench.figure import Wanted
    from ragfuse_bench.paper import run_paper

    console, settings = start(json, plot, model=model, dtype=dtype, device=device)
    rows = _rows_beside(json)
    sets = tuple(data or ("held-out",))
    usual, few = (4, 1) if figure.startswith("cg-") else (60, 8)
    cases = few if quick else usual if limit is None else limit
    tokens = min(context_tokens, QUICK_TOKENS) if quick else context_tokens
    wanted = Wanted(settings, sets, cases, chunk_tokens, rows, console, quick, tokens, keep_kv)
    with _kept(rows):
        result = run_paper(figure, wanted, plot)
    write_json(result, json)


@contextmanager
def _kept(rows: Path | None) -> Iterator[None]:
    """Let Ctrl-C say whether what was measured so far is kept."""
    try:
        yield
    except KeyboardInterrupt as stop:
        if rows is None or not rows.is_file():
            raise
        note = f"What was measured is in {rows}, and the same command goes on from there."
        raise KeyboardInterrupt(note) from stop


def _rows_beside(result: Path | None) -> Path | None:
    """Where measurements are kept as they come: beside the result, if that is a file."""
    return result.with_suffix(".rows.jsonl") if result is not None and str(result) != "-" else None
