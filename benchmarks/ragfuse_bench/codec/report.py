"""`ragfuse bench codec`: every level's size, fidelity, answers and speed, as one report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from ragfuse_bench.codec.answers import RAW, WORTH, ask_all, scores
from ragfuse_bench.codec.coded import BASELINES, codecs_of, coded
from ragfuse_bench.codec.contexts import read_contexts, read_questions
from ragfuse_bench.codec.levels import fidelities, rows_of
from ragfuse_bench.codec.speed import Speeds, speeds
from ragfuse_bench.options import CodecOptions
from ragfuse_bench.presets import fusable_model
from ragfuse_bench.rounds import Runner
from rich.console import Console
from rich.table import Table

from ragfuse.calibration.runner import circumstances
from ragfuse.codec import Codec
from ragfuse.settings import Settings
from ragfuse.telemetry.progress import progress
from ragfuse.types.kv import ChunkKV

PIECE_TOKENS = 1500
"""Tokens of a piece of a stream, on which codecs are timed."""
Result = dict[str, Any]
SHOWN = ("level", "bytes_over_fp16", "x_vs_int8", "kl", "top1", "top1_answers", "f1_delta")
FAST = ("level", "encode_mbps", "decode_mbps", "decode_over_prefill")
SMALLER, NEAR_F1, NEAR_TOP1 = 3.5, 0.02, 0.95
"""What a level should reach beside 8 bits: so many times smaller, F1 so near, top-1 so alike."""
PAPER = (
    "CacheGen is 3.5-4.3 times smaller than quantisation of equal quality (Mistral-7B, LongChat:"
    " 622 MB in 8 bits, 176 MB at 0.98 of its accuracy); decoding is hidden behind the link."
)


def run_codec(settings: Settings, options: CodecOptions, console: Console) -> Result:
    """Measure all of it and print it; the result as plain JSON types."""
    model = fusable_model(
        settings.model, settings.dtype, settings.device, settings.home, reads=True
    )
    codecs = codecs_of(model)
    contexts = read_contexts(model, options.contexts, options.context_tokens)
    with progress(console) as bar:
        found = fidelities(model, bar.track(contexts, description="levels"), codecs.all)
    ways = {name: _through(codec) for name, codec in codecs.all.items()}
    answered = scores(ask_all(read_questions(model, options.questions), model, ways, console))
    piece = contexts[0].token_ids[:PIECE_TOKENS]
    fast = speeds(model, piece, codecs.all, Runner(options.rounds, model.device, console))
    rows = {row["name"]: row for row in rows_of(found)}
    levels = [_level(name, rows, answered, fast) for name in codecs.levels]
    result = {
        "levels": levels,
        "baselines": [_level(base.name, rows, answered, fast) for base in BASELINES],
        "reached": reached(levels),
        "answers": answered,
        "piece": {"tokens": fast.tokens, "prefill_s": fast.prefill_s},
        "paper": PAPER,
        "speeds_are": (
            "MB of KV in two bytes a value, by the second of one core, on one piece of text"
        ),
        "model": settings.model,
        "dtype": settings.dtype,
        "options": asdict(options),
        **circumstances(model.device, torch.get_num_threads()),
    }
    _show(result, console)
    return result


def _through(codec: Codec) -> Any:
    def change(kv: ChunkKV) -> ChunkKV:
        return coded(codec, kv).kv

    return change


def _level(
    name: str, rows: Mapping[str, Result], answered: Mapping[str, Result], fast: Speeds
) -> Result:
    said = answered[name]
    told = {
        key: said[key]
        for key in ("f1", "f1_delta", "f1_delta_ci", "kl_answers", "top1_answers", "same_answer")
    }
    if answered[RAW]["f1"] < WORTH:
        told |= {"f1_delta": None, "f1_delta_ci": None}
    return {**rows[name], **told, **fast.figures(name)}


def reached(levels: Sequence[Result]) -> list[str]:
    """The levels that are small enough and close enough."""
    return [
        level["name"]
        for level in levels
        if level["x_vs_int8"] >= SMALLER
        and level["top1"] >= NEAR_TOP1
        and level["f1_delta"] is not None
        and abs(level["f1_delta"]) <= NEAR_F1
    ]


def _show(result: Result, console: Console) -> None:
    rows = [{**row, "level": row["name"]} for row in (*result["levels"], *result["baselines"])]
    console.print("[bold]bench codec: size, fidelity and speed of every level[/]", highlight=False)
    _print_rows(SHOWN, rows, console)
    _print_rows(FAST, rows, console)
    raw, near = result["answers"][RAW], ", ".join(result["reached"]) or "none"
    console.print(
        f"Raw KV: F1 {raw['f1']:.3f} on {raw['n']} questions. At least {SMALLER} times smaller than"
        f" 8 bits, F1 within {NEAR_F1}, top-1 at least {NEAR_TOP1}: {near}.",
        highlight=False,
    )
    console.print(f"The paper: {PAPER}", highlight=False)


def _print_rows(
    columns: Sequence[str], rows: Sequence[Mapping[str, Any]], console: Console
) -> None:
    """Print a table of some columns."""
    table = Table(*columns, box=None)
    for row in rows:
        cells = (row.get(column) for column in columns)
        table.add_row(
            *(
                "" if cell is None else f"{cell:.3f}" if isinstance(cell, float) else str(cell)
                for cell in cells
            )
        )
    console.print(table)
