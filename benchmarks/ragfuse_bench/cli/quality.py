"""`ragfuse bench quality` and `paper`: answers beside full prefill's, and the papers' figures."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from ragfuse_bench.cli.start import start
from ragfuse_bench.option_types import PackedTokens
from ragfuse_bench.options import CONTEXT_TOKENS, QUICK_TOKENS, QualityOptions

from ragfuse.cli.options import Device, Dtype, Json, Model, write_json
from ragfuse.errors import InputError


def quality(
    options: QualityOptions,
    model: Model = None,
    dtype: Dtype = None,
    device: Device = None,
    quick: Annotated[
        bool, typer.Option(help="Short run: 64 held-out questions with the methods full, none and auto.")
    ] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw KL against speed to this file (PNG).")] = None,
    json: Json = None,
) -> None:
    """Compare answers and next-token distributions of methods with those of full prefill, on the same prompts."""
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
            help="CacheBlend: fig6, fig7, fig8, fig10, fig12 to fig17. CacheGen: cg-fig3, -fig4, -fig5, -fig9, -fig11 "
            "to -fig15. AttentionStore: as-fig13, -fig14, -fig17 to -fig24 (simulated), -fig25, as-table1. Prompt "
            "Cache: pc-fig3, -fig4, -fig5, pc-table1, pc-table2."
        ),
    ],
    model: Model = None,
    dtype: Dtype = None,
    device: Device = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            help="Data set as for `bench quality` (default: held-out), or a folder of data sets. Repeat for more. To "
            "draw without measuring, give the JSON of an earlier run: of `bench codec` (cg-fig9, cg-fig15), `bench "
            "throughput` (fig14) or `bench stream` (cg-fig13)."
        ),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            min=0, help="Questions of each data set (default 60); CacheGen: contexts of each (default 4). 0: all."
        ),
    ] = None,
    context_tokens: Annotated[int, typer.Option(min=100, help="CacheGen: tokens of each context.")] = CONTEXT_TOKENS,
    keep_kv: Annotated[
        Path | None, typer.Option(help="CacheGen: keep the contexts' KV in this folder, for the next figure.")
    ] = None,
    chunk_tokens: PackedTokens = 0,
    quick: Annotated[
        bool, typer.Option(help="Short trial run: eight questions, or one round of the shorter prompts.")
    ] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw the figure to this file (PNG).")] = None,
    json: Json = None,
) -> None:
    """Measure a figure of the CacheBlend, CacheGen, AttentionStore or Prompt Cache paper, beside its values."""
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
        note = f"What was measured is in {rows}, and the same command continues from there."
        raise KeyboardInterrupt(note) from stop


def _rows_beside(result: Path | None) -> Path | None:
    """Where measurements are kept as they come: beside the result, if that is a file."""
    return result.with_suffix(".rows.jsonl") if result is not None and str(result) != "-" else None
