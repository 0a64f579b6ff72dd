"""`ragfuse bench codec`: every level's size, fidelity, answers and speed, and the share of each idea, as one report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from ragfuse_bench.codec.answers import RAW, WORTH, Row, ask_all, scores
from ragfuse_bench.codec.coded import BASELINES, codecs_of, coded, ideas_of, random_ids
from ragfuse_bench.codec.contexts import read_questions
from ragfuse_bench.codec.kv import Bank
from ragfuse_bench.codec.levels import by_set, fidelities, rows_of
from ragfuse_bench.codec.speed import SHAPE, Speeds, shaped, speeds
from ragfuse_bench.codec.wanted import Wanted
from rich.console import Console
from rich.table import Table

from ragfuse.calibration.plots import model_in_title, saved
from ragfuse.calibration.runner import Runner, circumstances
from ragfuse.codec import Codec
from ragfuse.hf.model import HFModel
from ragfuse.types.kv import ChunkKV

Result = dict[str, Any]
SHOWN = ("level", "bytes_over_fp16", "x_vs_int8", "kl", "top1", "top1_answers", "f1_delta")
FAST = ("level", "encode_mbps", "decode_mbps", "decode_over_prefill")
SMALLER, NEAR_F1, NEAR_TOP1 = 3.5, 0.02, 0.95
"""What a level should reach beside 8 bits: so many times smaller, F1 so near, top-1 so alike."""
PAPER = (
    "CacheGen is 3.5-4.3 times smaller than quantisation of equal quality (Mistral-7B, LongChat: 622 MB in 8 bits, "
    "176 MB at 0.98 of its accuracy); decoding is hidden behind the link."
)


def run_codec(wanted: Wanted, questions: int, picture: Path | None) -> Result:
    """Measure all of it, print it, draw size against quality; the result as plain JSON types."""
    model = wanted.model()
    codecs, runner = codecs_of(model), Runner(1 if wanted.quick else 3, model.device, wanted.console)
    ideas = ideas_of(model, codecs)
    found = fidelities(model, wanted.with_kv(model), codecs.all, ideas)
    answered = _answers(wanted, model, codecs.all, questions)
    fast = speeds(model, wanted.piece(model), codecs.all, runner)
    rows = {row["name"]: row for row in rows_of(found)}
    sets = by_set(found)
    levels = [_level(name, rows, answered, fast) for name in codecs.levels]
    result = {
        "levels": levels,
        "baselines": [_level(base.name, rows, answered, fast) for base in BASELINES],
        "ideas": [rows[name] for name in ideas],
        "reached": reached(levels),
        "by_set": [row for row in sets if row["name"] in codecs.all],
        "answers": answered,
        "piece": {"tokens": fast.tokens, "prefill_s": fast.prefill_s},
        "shapes": _shapes(wanted, runner),
        "paper": PAPER,
        "absent": wanted.not_at_hand(),
        "speeds_are": "MB of KV in two bytes a value, by the second of one core, on one piece of text",
        "model": wanted.settings.model,
        "dtype": wanted.settings.dtype,
        "sets": list(dict.fromkeys(row["dataset"] for row in sets)),
        "context_tokens": wanted.context_tokens,
        **circumstances(model.device, torch.get_num_threads()),
    }
    _show(result, wanted)
    if picture is not None:
        _draw(result, picture, wanted)
    return result


def _answers(wanted: Wanted, model: HFModel, codecs: Mapping[str, Codec], limit: int) -> dict[str, dict[str, Any]]:
    readings = read_questions(model, limit)
    ways = {name: _through(codec) for name, codec in codecs.items()}
    found: dict[str, list[Row]] = ask_all(readings, Bank(model, wanted.kept), ways, wanted.console)
    return scores(found)


def _through(codec: Codec) -> Any:
    def change(kv: ChunkKV) -> ChunkKV:
        return coded(codec, kv).kv

    return change


def _level(name: str, rows: Mapping[str, Result], answered: Mapping[str, Result], fast: Speeds) -> Result:
    said = answered[name]
    told = {key: said[key] for key in ("f1", "f1_delta", "f1_delta_ci", "kl_answers", "top1_answers", "same_answer")}
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


def _shapes(wanted: Wanted, runner: Runner) -> list[Result]:
    """Decoding over prefilling for an 8B-like shape, in 8 bits and at the default level.

    A few of its layers, random weights.
    """
    model = shaped(SHAPE, wanted.settings.dtype, wanted.settings.device)
    codecs = codecs_of(model)
    tokens = 128 if wanted.quick else 512
    shown = {name: codec for name, codec in codecs.levels.items() if name in ("int8", codecs.default)}
    fast = speeds(model, random_ids(tokens), shown, Runner(1, runner.device, runner.console))
    return [{"shape": SHAPE, "level": name, "tokens": tokens, **fast.figures(name)} for name in shown]


def _show(result: Result, wanted: Wanted) -> None:
    console = wanted.console
    rows = [{**row, "level": row["name"]} for row in (*result["levels"], *result["baselines"])]
    console.print("[bold]bench codec: size, fidelity and speed of every level[/]", highlight=False)
    _print_rows(SHOWN, rows, console)
    _print_rows(FAST, rows, console)
    if result["ideas"]:
        _print_rows(
            ("idea", "bytes_over_fp16", "kl", "top1"), [{**i, "idea": i["name"]} for i in result["ideas"]], console
        )
    _print_rows(("what", *FAST), [{**row, "what": row["shape"]} for row in result["shapes"]], console)
    raw = result["answers"][RAW]
    console.print(f"Raw KV: F1 {raw['f1']:.3f} on {raw['n']} questions; {wanted.words()}.", highlight=False)
    console.print(f"The paper: {PAPER}", highlight=False)
    reached = ", ".join(result["reached"]) or "none"
    console.print(
        f"At least {SMALLER} times smaller than 8 bits, F1 within {NEAR_F1}, top-1 at least {NEAR_TOP1}: {reached}.",
        highlight=False,
    )
    for sentence in result["absent"]:
        console.print(sentence, highlight=False)


def _draw(result: Result, picture: Path, wanted: Wanted) -> None:
    rows = [{**row, "level": row["name"]} for row in (*result["levels"], *result["baselines"])]
    with saved(picture, (7, 5)) as drawing:
        axes = drawing.add_subplot()
        _draw_sizes(axes, rows)
        axes.set_title(f"{model_in_title(result['model'])} in {result['dtype']}, {wanted.words()}", fontsize=9)
        axes.grid(True, alpha=0.3)
    wanted.console.print(f"Picture: {picture}", highlight=False)


def _draw_sizes(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    """KL against size: our levels as a line, uniform quantisation as another."""
    every = [each for each in rows if each.get("dataset", "all") == "all"]
    for names, label, style in ((("int8", "int4", "int3"), "uniform", "s--"), (None, "levels", "o-")):
        mine = [each for each in every if (each["level"] in names if names else each["level"] not in ("int4", "int3"))]
        mine = sorted(mine, key=lambda each: each["bits_a_value"])
        axes.plot([each["bits_a_value"] for each in mine], [max(each["kl"], 1e-6) for each in mine], style, label=label)
        for each in mine:
            at = (each["bits_a_value"], max(each["kl"], 1e-6))
            axes.annotate(
                f"{each['level']}, top-1 {each['top1']:.0%}", at, (4, 4), textcoords="offset points", fontsize=7
            )
    axes.set_yscale("log")
    axes.set_xlim(right=1.25 * max(each["bits_a_value"] for each in every))  # a label stands behind the last one
    axes.set_xlabel("size (bits a value, everything counted)")
    axes.set_ylabel("KL to raw KV (nats a token)")
    axes.legend()


def _print_rows(columns: Sequence[str], rows: Sequence[Mapping[str, Any]], console: Console) -> None:
    """Print a table of some columns."""
    table = Table(*columns, box=None)
    for row in rows:
        cells = (row.get(column) for column in columns)
        table.add_row(
            *("" if cell is None else f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in cells)
        )
    console.print(table)
