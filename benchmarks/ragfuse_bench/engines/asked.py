"""Prompts over recurring chunks as token ids, which every server reads alike."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ragfuse_bench.presets import bench_model
from ragfuse_bench.quality.cases import Packing, read_cases

from ragfuse.calibration.case import Case
from ragfuse.calibration.methods import Lab
from ragfuse.errors import InputError
from ragfuse.settings import Settings


@dataclass(frozen=True)
class Shape:
    """Prompts of one shape.

    Args:
        n_chunks: Chunks of a prompt.
        chunk_tokens: About how many tokens each has.
        pool: The chunks that recur, of which every prompt has some in an order of its own.
        prompts: The prompts' token ids.
    """

    n_chunks: int
    chunk_tokens: int
    pool: tuple[str, ...]
    prompts: tuple[tuple[int, ...], ...]

    @property
    def name(self) -> str:
        """The shape in a few characters, such as 6x512."""
        return f"{self.n_chunks}x{self.chunk_tokens}"


def shapes_of(
    settings: Settings, sizes: Sequence[tuple[int, int]], n_prompts: int, answer_tokens: int, seed: int
) -> list[Shape]:
    """Return so many different prompts of each size.

    Args:
        settings: The model, its dtype and the folder of prepared models.
        sizes: Chunks of a prompt, and tokens of a chunk.
        n_prompts: Prompts of each size.
        answer_tokens: Tokens of an answer.
        seed: Of what is drawn.

    Raises:
        InputError: The model takes no prompt of such a length.
    """
    lab = Lab(bench_model(settings.model, settings.dtype, "cpu", settings.home))
    try:
        found = [_shape(lab, n, tokens, n_prompts, seed) for n, tokens in sizes]
        most = lab.model.max_context
    finally:
        lab.close()
    longest = max(len(ids) for shape in found for ids in shape.prompts)
    if most is not None and longest + answer_tokens > most:
        raise InputError(
            f"{settings.model} takes at most {most:,} tokens, found a prompt of {longest:,} and an answer of "
            f"{answer_tokens}. Name smaller --shapes."
        )
    return found


def _shape(lab: Lab, n_chunks: int, tokens: int, n_prompts: int, seed: int) -> Shape:
    count: Callable[[str], int] = lambda text: len(lab.model.tokens(text))  # noqa: E731
    cases, drawn = read_cases("held-out", Packing(count, context_tokens=1 << 30)), random.Random(seed)
    paragraphs = list(dict.fromkeys(paragraph for case in cases for paragraph in case.chunks))
    chunks = list(cut(paragraphs, tokens, count))
    pool = drawn.sample(chunks, min(2 * n_chunks, len(chunks)))
    if len(pool) < n_chunks:
        raise InputError(
            f"Wanted {n_chunks} chunks of {tokens} tokens, found {len(pool)} in the held-out articles. Name fewer."
        )
    prompts = []
    for number in range(n_prompts):
        question, chosen = drawn.choice(cases).question, tuple(drawn.sample(pool, n_chunks))
        prompts.append(tuple(lab.prompt(Case("engines", str(number), question, ("",), chosen)).token_ids))
    return Shape(n_chunks, tokens, tuple(pool), tuple(prompts))


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
