"""A conversation whose turns' KV is kept, beside one whose prompts are recomputed (AttentionStore 4.2, 4.3.7).

A real engine talks, turn after turn, over a store in memory and on disk. Full prefill and history take turns within one
run. Whose words are said is told by `dialogues`; perplexity after truncation is `truncation.py`'s.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from ragfuse_bench.dialogues import Dialogue, dialogue_of
from ragfuse_bench.options import ConversationOptions
from ragfuse_bench.presets import bench_model
from ragfuse_bench.truncation import Perplexity, perplexity_after
from rich.console import Console
from rich.table import Table

from ragfuse.calibration.plots import saved
from ragfuse.calibration.runner import Runner, circumstances, speedup, thread_count
from ragfuse.engine.engine import Ask, Engine
from ragfuse.errors import ModelError
from ragfuse.settings import Settings
from ragfuse.telemetry.progress import progress

NAME = "measured"


def run_conversation(options: ConversationOptions, console: Console) -> dict[str, Any]:
    """Measure it, show it, and give all of it in plain JSON types."""
    with thread_count(options.threads), tempfile.TemporaryDirectory(prefix="ragfuse-talk-") as folder:
        device = torch.device(options.device)
        with console.status("loading the model"):
            exact = talking_engine(options, options.dtype, Path(folder) / "exact")
        said = dialogue_of(options.data, options.turns, options.opening_tokens, _counter(exact))
        with exact:
            turns = timed_turns(exact, said, options, Runner(options.rounds, device, console))
            ppl = perplexity_after(exact.model, said.text, options.window, options.texts, console)
        with talking_engine(options, "bfloat16", Path(folder) / "rounded") as rounded:
            top1 = _agreement(rounded, said, min(64, options.answer_tokens), console)
        where = circumstances(device, options.threads)
    result = {**_summed(turns, top1, ppl), "turns": turns, "said": said.source, "perplexity": ppl.as_dict()}
    given = {name: str(value) for name, value in vars(options).items() if name not in ("data", "plot")}
    result |= {"model": options.model, "dtype": options.dtype, "options": given, **where}
    _show(result, console)
    if options.plot is not None:
        _draw(turns, options.plot)
    return result


def talking_engine(options: ConversationOptions, dtype: str, store: Path) -> Engine:
    """An engine over an empty store; ModelError for a model that cannot reuse KV."""
    settings = Settings(model=options.model, dtype=dtype, device=options.device, store=store, min_chunk_tokens=8)
    model = bench_model(options.model, dtype, options.device, settings.home)
    if model.profile.refusal:
        raise ModelError(f"{options.model} cannot reuse KV: {model.profile.refusal} Measure another model.")
    return Engine(settings, model=model)


def _counter(engine: Engine) -> Any:
    return lambda text: len(engine.tokens(text))


def timed_turns(engine: Engine, said: Dialogue, options: ConversationOptions, runner: Runner) -> list[dict[str, Any]]:
    """Each turn: how long until its first logits either way, and whether it says the same."""
    rows = []
    for number, question in enumerate(said.questions, 1):
        asked = [("user", question)]
        length: Mapping[str, Any] = {"min_new_tokens": options.answer_tokens}
        ways = {
            way: Ask(session=NAME, reuse=way == "history", max_tokens=options.answer_tokens, options=length)
            for way in ("full", "history")
        }
        row: dict[str, Any] = {"turn": number}
        if number > 1:
            cases = {way: _to_first_logits(engine, asked, ask) for way, ask in ways.items()}
            times = runner.measure(cases, f"turn {number} of {len(said.questions)}")
            full, history = times["full"], times["history"]
            row |= {"full_s": full.median_s, "history_s": history.median_s}
            row["reduction"] = 1 - 1 / speedup(full.seconds, history.seconds)
            row["wall"] = {way: median(each.of("wall")) for way, each in times.items()}
        answers = {way: engine.answer(asked, ask) for way, ask in ways.items()}
        engine.flush()
        trace = answers["history"].trace
        row |= {"tokens": trace.tokens, "reused": trace.history_reused, "ttft_s": trace.ttft_s}
        row["equal"] = answers["history"].token_ids == answers["full"].token_ids
        rows.append(row)
    return rows


def _to_first_logits(engine: Engine, asked: Any, ask: Ask) -> Any:
    return lambda: engine.prepare(engine.plan(asked, ask).prompt, ask)


def _agreement(engine: Engine, said: Dialogue, n_tokens: int, console: Console) -> float:
    """Share of next tokens, along the answers of history in a rounded dtype, that full prefill holds likeliest too."""
    same, total = 0, 0
    ask = Ask(session=NAME, max_tokens=n_tokens)
    with progress(console) as bar:
        task = bar.add_task("agreement in bfloat16", total=len(said.questions))
        for question in said.questions:
            asked = [("user", question)]
            prompt = engine.plan(asked, ask).prompt
            kept = engine.prepare(prompt, ask).prefill
            answer = engine.answer(asked, ask).token_ids
            engine.flush()
            if any(segment.kind == "history" for segment in prompt.segments) and answer:
                model = engine.model
                wanted = model.score_continuation(model.full_prefill(prompt.token_ids), answer).argmax(-1)
                found = model.score_continuation(kept, answer).argmax(-1)
                same, total = same + int((wanted == found).sum()), total + len(answer)
            bar.advance(task)
    return same / total if total else 1.0


def _summed(turns: Sequence[Mapping[str, Any]], top1: float, ppl: Perplexity) -> dict[str, Any]:
    later = [turn["reduction"] for turn in turns if "reduction" in turn]
    return {
        "ttft_reduction": median(later),
        "token_equal_fp32": all(turn["equal"] for turn in turns),
        "top1_bf16": top1,
        "ppl_delta": ppl.kept - ppl.recomputed,
        "ppl_naive": ppl.naive,
        "ttft_reduction_min": min(later),
    }


def _show(result: Mapping[str, Any], console: Console) -> None:
    table = Table("turn", box=None)
    for heading in ("tokens", "reused", "full s", "history s", "less", "same answer"):
        table.add_column(heading, justify="right")
    for row in result["turns"]:
        timed = ["", "", ""]
        if "reduction" in row:
            timed = [f"{row['full_s']:.2f}", f"{row['history_s']:.3f}", f"{row['reduction']:.0%}"]
        cells = [f"{row['tokens']:,}", f"{row['reused']:,}", *timed]
        table.add_row(str(row["turn"]), *cells, "yes" if row["equal"] else "no")
    console.print(table)
    ppl = result["perplexity"]
    for line in (
        f"First token {result['ttft_reduction']:.0%} faster than by full prefill, the median of later turns.",
        f"bfloat16: {result['top1_bf16']:.1%} of next tokens are the same.",
        f"Perplexity after truncation: {ppl['kept']:.3f} by kept KV at new positions, {ppl['recomputed']:.3f} "
        f"recomputed, {ppl['naive']:.1f} with KV at its old positions; {ppl['bare']:.3f} by kept KV without the first "
        f"{ppl['n_sinks']} tokens of all.",
    ):
        console.print(line, highlight=False)


def _draw(turns: Sequence[Mapping[str, Any]], path: Path) -> None:
    timed = [turn for turn in turns if "reduction" in turn]
    with saved(path, (7, 4)) as figure:
        axes = figure.add_subplot()
        for way, label in (("full_s", "every turn recomputed"), ("history_s", "history from the store")):
            axes.plot([turn["tokens"] for turn in timed], [turn[way] for turn in timed], "o-", label=label)
        axes.set_xlabel("tokens of the prompt")
        axes.set_ylabel("seconds to the first logits")
        axes.set_yscale("log")
        axes.legend()
