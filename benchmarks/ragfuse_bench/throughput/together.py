"""Answers that are decoded together, and the same ones one by one: tokens a second either way."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from typing import Any, Protocol

from ragfuse_bench.rounds import thread_count
from rich.progress import Progress

from ragfuse.engine.engine import Ask, Engine
from ragfuse.settings import Settings

ROUNDS = 3


class Sizes(Protocol):
    """How many answers, of how many tokens, on how many threads."""

    @property
    def together(self) -> int:
        """Answers."""
        ...

    @property
    def together_tokens(self) -> int:
        """Of each."""
        ...

    @property
    def threads(self) -> int:
        """Of torch."""
        ...


def tokens_a_second(
    settings: Settings, questions: Sequence[str], sizes: Sizes, bar: Progress
) -> dict[str, Any]:
    """batch_x: tokens a second of a batch over those of its questions one by one, by the wall, in
    turns; both rates.

    The questions come without passages, so that next to nothing but decoding is timed.
    """
    prompts = [[("user", question)] for question in islice(cycle(questions), sizes.together)]
    n = sizes.together_tokens
    ask = Ask(reuse=False, max_tokens=n, options={"min_new_tokens": n})
    task = bar.add_task("answers together", total=2 * (ROUNDS + 1))
    with thread_count(sizes.threads), tempfile.TemporaryDirectory(prefix="ragfuse-load-") as folder:
        here = settings.model_copy(
            update={"store": Path(folder) / "store", "disk_bytes": 0, "tiers": ()}
        )
        with Engine(here) as engine:
            ways: dict[str, Callable[[], object]] = {
                "alone": lambda: [engine.answer(prompt, ask) for prompt in prompts],
                "together": lambda: engine.batch(prompts, ask),
            }
            seconds: dict[str, list[float]] = {name: [] for name in ways}
            for _ in range(ROUNDS + 1):
                for name, way in ways.items():
                    began_s = time.perf_counter()
                    way()
                    seconds[name].append(time.perf_counter() - began_s)
                    bar.advance(task)
    bar.remove_task(task)
    # the first one warms up
    pairs = list(zip(seconds["alone"], seconds["together"], strict=True))[1:]
    written = n * sizes.together
    return {
        "batch_x": median(alone / together for alone, together in pairs),
        "batch": {name: written / median(each[1:]) for name, each in seconds.items()},
    }
