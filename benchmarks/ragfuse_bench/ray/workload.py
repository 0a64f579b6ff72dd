"""Requests to a server of several replicas, as values: when each comes, and which chunks it has.

A chunk is a block of `BLOCK` tokens of a conversation, or a passage of a corpus.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from ragfuse_bench.sessions.lengths import packaged
from ragfuse_bench.sessions.trace import drawn

BLOCK = 512
"""Tokens of a block of a conversation, as in Mooncake's traces."""
DECODE_S = 2.0
"""Seconds until the answer of a turn of a drawn conversation is there, before the pause begins."""
PASSAGE_TOKENS, TOPIC_PASSAGES, RETRIEVED = 160, 24, 6
"""Of a corpus: tokens of a passage, passages about one topic, passages that a question retrieves.
"""
ZIPF = 0.9
"""Exponent of the popularity of topics: the k-th is asked about in proportion to k ** -ZIPF."""
STRAY = 1
"""Of the passages that a question retrieves, those of any topic."""


@dataclass(frozen=True, slots=True)
class TimedRequest:
    """One request.

    at_s: When it comes. chunks: Tokens of its chunks, by number, in their order. fresh: Tokens
        beside them.
    """

    at_s: float
    chunks: dict[int, int]
    fresh: int

    @property
    def tokens(self) -> int:
        """All tokens of the prompt."""
        return self.fresh + sum(self.chunks.values())


def conversations(n_talks: int, per_s: float, seed: int) -> list[TimedRequest]:
    """Return requests in the order of their times, drawn from the lengths of real conversations.

    Of each prompt the blocks of what was said before are chunks, and the blocks of the question,
    which a later turn repeats. All stand behind one system prompt.
    """
    lengths, requests, first = packaged(), [], 1
    for talk in drawn(lengths, n_talks, per_s, seed):
        at_s, tokens, mine = 0.0, BLOCK, range(first, first + 10_000)
        first += 10_000
        for turn in talk:
            at_s += turn.pause_s + DECODE_S
            tokens += turn.question
            requests.append(_of_blocks(at_s, [0, *mine[: -(-tokens // BLOCK) - 1]], tokens))
            tokens += turn.answer
    requests.sort(key=lambda request: request.at_s)
    return requests


def questions(n: int, n_chunks: int, per_s: float, seed: int) -> list[TimedRequest]:
    """Questions over a corpus of `n_chunks` passages: each retrieves passages of one topic, and one
    of any other.
    """
    rng = np.random.default_rng(seed)
    n_topics = max(1, n_chunks // TOPIC_PASSAGES)
    popularity = np.arange(1, n_topics + 1, dtype=float) ** -ZIPF
    topics = rng.choice(n_topics, size=n, p=popularity / popularity.sum())
    times = np.cumsum(rng.exponential(1 / per_s, n))
    own = np.argsort(rng.random((n, TOPIC_PASSAGES)), axis=1)[:, : RETRIEVED - STRAY]
    stray = rng.integers(n_topics * TOPIC_PASSAGES, size=(n, STRAY))
    rows = zip(times.tolist(), topics.tolist(), own.tolist(), stray.tolist(), strict=True)
    return [
        TimedRequest(
            at_s,
            dict.fromkeys(
                [*(topic * TOPIC_PASSAGES + each for each in mine), *others], PASSAGE_TOKENS
            ),
            64,
        )
        for at_s, topic, mine, others in rows
    ]


def _of_blocks(at_s: float, blocks: Sequence[int], tokens: int) -> TimedRequest:
    """A prompt of whole blocks; what is left over is computed and repeated by nobody."""
    whole = min(len(blocks), tokens // BLOCK)
    return TimedRequest(at_s, dict.fromkeys(blocks[:whole], BLOCK), max(1, tokens - whole * BLOCK))
