"""A crowd: threads that ask, stream, leave, ingest, forget and clear at once; every answer stays
full prefill's own.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from ragfuse import Ask, Engine, Piece
from tests.kits.tiny import CHUNKS, INSTRUCTION

THREADS, STEPS = 4, 25
EXACT = Ask(ratio=1.0)
KEPT_NBYTES = 400_000
"""Room in memory and on disk for about a dozen chunks, so that entries are evicted all the time."""


@pytest.fixture
def crowded(tiny_settings):
    small = {"memory_bytes": KEPT_NBYTES, "disk_bytes": KEPT_NBYTES}
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # as many interleavings as possible
    with Engine(
        tiny_settings.model_copy(update={"prefix_cache": True, "learn": "text", **small})
    ) as engine:
        yield engine
    sys.setswitchinterval(before)


def question(draw: random.Random) -> Any:
    chunks = draw.sample(CHUNKS, draw.randrange(len(CHUNKS)))
    marked = [part for text in chunks for part in (Piece(text, "chunk", "book"), Piece("\n\n"))]
    plain = [Piece(INSTRUCTION + "".join(f"{text}\n\n" for text in chunks))]
    body = draw.choice([[Piece(INSTRUCTION), *marked], plain])
    return [
        ("system", "You keep the book of a harbour."),
        ("user", (*body, Piece(f"Question {draw.randrange(4)}?"))),
    ]


def asks(engine: Engine, draw: random.Random) -> None:
    prompt = question(draw)
    found = engine.answer(prompt, EXACT).token_ids
    assert found == engine.answer(prompt, Ask(reuse=False)).token_ids


def asks_several(engine: Engine, draw: random.Random) -> None:
    prompts = [question(draw) for _ in range(3)]
    full = engine.batch(prompts, Ask(reuse=False))
    assert [a.token_ids for a in engine.batch(prompts, EXACT)] == [a.token_ids for a in full]


def leaves_a_stream(engine: Engine, draw: random.Random) -> None:
    with engine.stream(question(draw)) as stream:
        next(iter(stream), None)


def goes_on_with_a_session(engine: Engine, draw: random.Random) -> None:
    engine.answer(question(draw), Ask(session=f"talk-{draw.randrange(3)}"))


STEPS_OF: tuple[tuple[Callable[[Engine, random.Random], object], int], ...] = (
    (asks, 10),
    (asks_several, 1),
    (leaves_a_stream, 2),
    (goes_on_with_a_session, 3),
    (lambda engine, draw: engine.ingest([(draw.choice(CHUNKS), "book")]), 2),
    (lambda engine, draw: engine.forget([draw.choice(CHUNKS)]), 1),
    (lambda engine, draw: engine.store.clear(), 1),
)


def test_every_answer_is_right_whatever_others_do(crowded):
    def acts(seed: int) -> None:
        draw = random.Random(seed)
        for act in draw.choices(
            [act for act, _ in STEPS_OF], [weight for _, weight in STEPS_OF], k=STEPS
        ):
            act(crowded, draw)

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(acts, range(THREADS)))
