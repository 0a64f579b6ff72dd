"""`ragfuse bench prefix`: prefix caching against full prefill, and beside transformers' own.

Nothing is prepared: an engine over an empty store is asked as anybody would ask it. Times are to
    the first token.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from ragfuse_bench.options import PrefixOptions
from ragfuse_bench.rounds import Runner, Times, speedup, thread_count
from rich.console import Console
from rich.table import Table

from ragfuse.calibration.runner import circumstances
from ragfuse.engine.ask import Ask
from ragfuse.engine.engine import Engine
from ragfuse.settings import Settings
from ragfuse.text.filler import sample

QUESTIONS = (
    "Which of these rules matters most?",
    "May I come in on a Sunday?",
    "Who wrote this down, and for whom?",
    "Summarise rule seven in five words.",
    "What is forbidden in winter?",
    "Is there a rule about bicycles?",
)
IDENTICAL = "What does the second rule say, and since when?"
ROOM = 6 << 30
"""Bytes of KV kept in memory."""


def run_prefix(settings: Settings, options: PrefixOptions, console: Console) -> dict[str, Any]:
    """The result as plain JSON types; `console` shows progress and the table."""
    settings.home.mkdir(parents=True, exist_ok=True)
    told = {"memory_bytes": ROOM, "max_tokens": options.answer_tokens}
    with (
        thread_count(options.threads),
        tempfile.TemporaryDirectory(dir=settings.home, prefix="prefix-") as folder,
        Engine(settings.model_copy(update={**told, "store": Path(folder)})) as engine,
    ):
        system = _system(engine, options.system_tokens)
        identical = _identical(engine, system, options)
        times, shares = _timed(engine, system, options, console)
        exact = _agreeing(engine, system, options)
        full = times["full prefill"]
        ratios = {name: speedup(full.seconds, each.seconds) for name, each in times.items()}
        result: dict[str, Any] = {
            "identical_share": identical,
            "system_x": ratios["ragfuse"],
            "system_share": shares,
            "exact": exact == len(QUESTIONS),
            "exact_answers": f"{exact} of {len(QUESTIONS)}",
            "transformers_x": ratios["transformers"],
            "tokens": len(engine.prompt(_asked(system, QUESTIONS[0]))),
            "times": {name: each.as_dict() for name, each in times.items()},
            "model": settings.model,
            "dtype": engine.settings.dtype,
            "options": asdict(options),
            **circumstances(engine.model.device, options.threads),
        }
    _show(result, ratios, times, console)
    return result


def _system(engine: Engine, n_tokens: int) -> str:
    """A system prompt of so many tokens, about: plain paragraphs as rules."""
    texts, rules = sample(), list[str]()
    while len(engine.tokens("\n\n".join(rules))) < n_tokens:
        rules.append(f"Rule {len(rules) + 1}. {texts[len(rules) % len(texts)]}")
    return engine.model.text(engine.tokens("\n\n".join(rules))[:n_tokens])


def _asked(system: str, question: str) -> list[tuple[str, str]]:
    return [("system", system), ("user", question)]


def _identical(engine: Engine, system: str, options: PrefixOptions) -> float:
    """Share of a prompt that is reused when it is asked once more, of all but its last token."""
    prompt = _asked(system[: len(system) // 8], IDENTICAL)
    for _ in range(2):
        trace = engine.answer(prompt).trace
        engine.flush()
    return trace.tokens_reused / (trace.tokens - 1)


def _timed(
    engine: Engine, system: str, options: PrefixOptions, console: Console
) -> tuple[dict[str, Times], Sequence[float]]:
    """Seconds to the first token of questions under one system prompt; how much of each prompt was
    reused.

    Each round asks another question, so that nothing but the system prompt is shared.
    """
    engine.answer(_asked(system, "Hello?"), Ask(max_tokens=1))
    engine.flush()
    theirs, shares, asked = _theirs(engine, system), list[float](), {"at": 0}

    def question() -> list[tuple[str, str]]:
        at = (asked["at"] - 1) // 3  # three ways a round
        return _asked(system, f"{QUESTIONS[at % len(QUESTIONS)]} Case {at}.")

    def ours() -> None:
        trace = engine.answer(question(), Ask(max_tokens=1)).trace
        shares.append(trace.tokens_reused / trace.tokens)

    def count() -> None:
        engine.flush()
        asked["at"] += 1

    cases: Mapping[str, Callable[[], object]] = {
        "full prefill": lambda: engine.answer(question(), Ask(max_tokens=1, reuse=False)),
        "transformers": lambda: theirs(question()),
        "ragfuse": ours,
    }
    times = Runner(options.rounds, engine.model.device, console).measure(
        cases, "first token", count
    )
    return times, shares


def _theirs(engine: Engine, system: str) -> Callable[[list[tuple[str, str]]], object]:
    """Transformers' prefix caching: the system prompt's cache is made once, copied, and gone on
    from.
    """
    model = engine.model
    first, second = (engine.prompt(_asked(system, text)).token_ids for text in ("Hello?", "Bye."))
    n_shared = next(at for at, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
    with torch.no_grad():
        ids = torch.tensor([first[:n_shared]], device=model.device)
        cache = model.model(input_ids=ids, use_cache=True).past_key_values

    def ask(prompt: list[tuple[str, str]]) -> object:
        ids = torch.tensor([engine.prompt(prompt).token_ids], device=model.device)
        with torch.no_grad():
            return model.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                past_key_values=copy.deepcopy(cache),
                max_new_tokens=1,
                do_sample=False,
            )

    return ask


def _agreeing(engine: Engine, system: str, options: PrefixOptions) -> int:
    """Answers that are full prefill's, token for token."""
    count = 0
    for question in QUESTIONS:
        mine = engine.answer(_asked(system, question))
        count += (
            mine.token_ids == engine.answer(_asked(system, question), Ask(reuse=False)).token_ids
        )
        engine.flush()
    return count


def _show(
    result: Mapping[str, Any],
    ratios: Mapping[str, float],
    times: Mapping[str, Times],
    console: Console,
) -> None:
    table = Table(
        title=f"One system prompt, another question each time: {result['tokens']:,} tokens"
    )
    for column in ("way", "first token", "times as fast"):
        table.add_column(column, justify="left" if column == "way" else "right")
    for name, each in times.items():
        table.add_row(name, f"{each.median_s:.3f} s", f"{ratios[name]:.1f}x")
    console.print(table)
    console.print(
        f"An identical prompt: {result['identical_share']:.0%} of all but its last token reused."
        f" Answers equal to full prefill's, token for token: {result['exact_answers']}"
        f" ({result['dtype']}).",
        highlight=False,
    )
