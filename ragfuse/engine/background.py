"""Background jobs after an answer: encode chunks that it missed.

`remember.py` carries them out, one at a time, so that a question waits for at most one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from ragfuse.schemas.bind import SchemaUse
from ragfuse.schemas.layout import SchemaRun
from ragfuse.types.plan import LoadPlan

IDLE_WAIT_S = 2.0
"""Seconds that a job waits for a moment in which no answer is generated, as encoding delays many
tokens of one.
"""


JobKind = Literal["chunk", "run", "prefix", "learn"]
"""What a job does.

- "chunk": encode a chunk.
- "run": encode a run of a schema as a whole, at its positions.
- "prefix": encode a prompt's first chunk into the prefix cache, after the cached prefix before it.
- "learn": search a prompt for recurring passages.
"""


@dataclass(frozen=True)
class EncodeJob:
    """One job in the background; most jobs encode a chunk.

    Args:
        kind: The work, which says which of the other fields are set.
        tokens: Token ids of a "chunk", a "run", or the prompt to "learn" from; for "prefix", the
            ids of prefix and chunk.
        text: The text of a "chunk"; "" where only its ids are known.
        source: Where the text of a "chunk" came from, for people.
        run: The run of a schema, for "run".
        plan: The plan of that prompt.
        n_prefix: For "prefix", how many of `tokens` are in the prefix cache already.
    """

    kind: JobKind
    tokens: tuple[int, ...] = ()
    text: str = ""
    source: str = ""
    run: SchemaRun | None = None
    plan: LoadPlan | None = field(default=None, compare=False)
    n_prefix: int = 0


def jobs_after(plan: LoadPlan) -> Iterator[EncodeJob]:
    """Yield a job for each chunk that a plan missed."""
    segments = plan.prompt.segments
    hits = {fetch.key for fetch in (*plan.fetches, *plan.unread)}
    schema_use = plan.prompt.schema_use
    if isinstance(schema_use, SchemaUse):
        lacking = {segments[at].keys[0] for at, _ in plan.misses} - hits
        yield from (
            EncodeJob("run", run.tokens, run=run)
            for key, run in schema_use.runs.items()
            if key in lacking
        )
        return
    for segment in segments:  # `prefix_cache.py` saves prefixes and turns
        if segment.kind == "chunk" and segment.keys[0] not in hits:
            hits.add(segment.keys[0])
            yield EncodeJob("chunk", segment.stored or segment.tokens, segment.text, segment.source)
