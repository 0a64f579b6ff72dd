"""Prompts over recurring chunks: the same few chunks in every prompt, drawn and ordered anew."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ragfuse_bench.presets import bench_model
from ragfuse_bench.quality.cases import Packing, read_cases

from ragfuse.calibration.case import Case
from ragfuse.calibration.methods import Lab
from ragfuse.engine.request import ends_of
from ragfuse.errors import InputError

LEAST_DRAWN = 6
"""Fewest chunks of a prompt."""
CHUNK_TOKENS = 512
"""Most tokens of a chunk."""
AROUND_TOKENS = 60
"""About what a prompt holds besides its chunks: the template, the instruction and the question."""


@dataclass(frozen=True)
class Recurring:
    """Prompts of one length as token ids.

    Args:
        chunks: The texts that recur.
        drawn: How many of them a prompt holds.
        beginnings: A prompt's beginning up to the end of its first chunk, with every chunk in that
            place.
        prompts: The prompts.
    """

    chunks: tuple[str, ...]
    drawn: int
    beginnings: tuple[tuple[int, ...], ...]
    prompts: tuple[tuple[int, ...], ...]


def prompts(
    model: str, dtype: str, lengths: Sequence[tuple[int, int]], answer_tokens: int, home: Path
) -> tuple[list[Recurring], frozenset[int], int | None]:
    """Return the prompts of each length, the ids that end an answer, and most tokens of both, if
    there is a limit.

    Args:
        model: As ragfuse names it.
        dtype: What it is loaded in.
        lengths: Tokens and number of prompts.
        answer_tokens: Most tokens of an answer.
        home: The folder of prepared models.

    Raises:
        InputError: The model takes no prompt of such a length.
    """
    loaded = bench_model(model, dtype, "cpu", home)
    lab = Lab(loaded)
    try:
        work = [recurring(lab, tokens, rounds) for tokens, rounds in lengths]
    finally:
        lab.close()
    most, longest = loaded.max_context, max(len(ids) for each in work for ids in each.prompts)
    if most is not None and longest + answer_tokens > most:
        raise InputError(
            f"{model} takes at most {most:,} tokens, found a prompt of {longest:,} and an answer of"
            f" {answer_tokens}. Lower --tokens."
        )
    return work, frozenset(ends_of(loaded)), most


def recurring(lab: Lab, tokens: int, rounds: int, seed: int = 0) -> Recurring:
    """Return `rounds` prompts of about `tokens` tokens, each over chunks drawn from twice as many.

    Each asks a question that one of its chunks answers, if there is one.
    """
    count: Callable[[str], int] = lambda text: len(lab.model.tokens(text))  # noqa: E731
    drawn = max(LEAST_DRAWN, -(-(tokens - AROUND_TOKENS) // CHUNK_TOKENS))
    random_ = random.Random(seed)
    cases = read_cases("held-out", Packing(count, context_tokens=1 << 30))
    paragraphs = list(dict.fromkeys(paragraph for case in cases for paragraph in case.chunks))
    chunks = list(cut(paragraphs, max(1, (tokens - AROUND_TOKENS) // drawn), count))
    pool = random_.sample(chunks, min(2 * drawn, len(chunks)))
    known = [(case.question, gold) for case in cases if (gold := _answering(case))]
    prompts = []
    for index in range(rounds):
        chosen = random_.sample(pool, min(drawn, len(pool)))
        fitting = [question for question, gold in known if any(gold in chunk for chunk in chosen)]
        question = random_.choice(fitting or [case.question for case in cases])
        prompts.append(
            lab.prompt(Case("peers", str(index), question, ("",), tuple(chosen))).token_ids
        )
    beginnings = tuple(_beginning(lab, chunk) for chunk in pool)
    return Recurring(tuple(pool), drawn, beginnings, tuple(map(tuple, prompts)))


def cut(paragraphs: Sequence[str], tokens: int, count: Callable[[str], int]) -> Iterator[str]:
    """Yield chunks of about `tokens` tokens, each of whole sentences of neighbouring paragraphs."""
    held, size = "", 0
    for paragraph in paragraphs:
        gap = "\n\n"
        for sentence in re.split(r"(?<=[.!?]) +", paragraph):
            n_tokens = count(sentence)
            if held and size + n_tokens / 2 > tokens:
                yield held
                held, size = "", 0
            held = f"{held}{gap}{sentence}" if held else sentence
            size += n_tokens
            gap = " "


def _answering(case: Case) -> str:
    """The sentence of a case's paragraphs that alone holds an answer; "" where several do."""
    sentences = [part for chunk in case.chunks for part in re.split(r"(?<=[.!?]) +", chunk)]
    found = {part for part in sentences if any(answer in part for answer in case.answers)}
    return found.pop() if len(found) == 1 else ""


def _beginning(lab: Lab, chunk: str) -> tuple[int, ...]:
    prompt = lab.prompt(Case("peers", "", "", ("",), (chunk,)))
    first = next(index for index, segment in enumerate(prompt.segments) if segment.kind == "chunk")
    return tuple(prompt.token_ids[: prompt.spans[first][1]])
